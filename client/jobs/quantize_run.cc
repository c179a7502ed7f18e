#include "client/jobs/quantize_run.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "client/cpp/errors.h"
#include "client/files/mapped_file.h"
#include "client/files/safetensors.h"
#include "client/jobs/connections.h"
#include "client/jobs/job_events.h"
#include "client/jobs/quantize_activations.h"
#include "client/jobs/quantize_folder.h"
#include "client/jobs/quantize_gguf.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_output.h"
#include "client/jobs/quantize_parts.h"
#include "client/jobs/quantize_plan.h"
#include "client/jobs/quantize_publish.h"
#include "client/jobs/quantize_rounding.h"
#include "client/jobs/quantize_server.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"

namespace quantd::jobs {
namespace {

// `what`  the option, for people.
// Errors: ARGUMENT_INVALID if `value` is none of `values`, and not empty.
absl::Status CheckOneOf(absl::string_view what, absl::string_view value,
                        const std::vector<absl::string_view>& values) {
  if (value.empty() || absl::c_linear_search(values, value)) {
    return absl::OkStatus();
  }
  return ArgumentInvalidError(absl::StrCat("expected one of ",
                                           absl::StrJoin(values, ", "), " as ",
                                           what, ", got \"", value, "\""));
}

// Checks the options that have one of some values, or none.
absl::Status CheckValues(const QuantizeOptions& options) {
  absl::Status status =
      CheckOneOf("the layout", options.layout,
                 {"quantd", "compressed-tensors", "pack-quantized"});
  status.Update(CheckOneOf("the NaN policy", options.nan_policy,
                           {"zero-point", "qmin", "reject"}));
  status.Update(CheckOneOf("the rounding", options.rounding.method,
                           {"nearest", "compensated"}));
  status.Update(CheckOneOf("the column order", options.rounding.column_order,
                           {"activation", "natural"}));
  if (options.output.path.empty()) {
    status.Update(ArgumentInvalidError("expected an output, got none"));
  }
  return status;
}

}  // namespace

QuantizeRun::QuantizeRun(QuantizeOptions options, std::string server,
                         Connect connect, const JobEvents& events)
    : options_(std::move(options)),
      address_(std::move(server)),
      connect_(std::move(connect)),
      events_(events) {}

absl::Status QuantizeRun::Resolve() {
  if (absl::Status s = CheckValues(options_); !s.ok()) return s;
  options_.spec.takes_gguf_types = true;
  const bool has_model = !options_.name.model.empty();
  if (!has_model) options_.name.model = FileStem(options_.input);
  if (!options_.inputs.text.empty()) {
    options_.inputs.Resolve();
  } else if (has_model) {
    options_.inputs.model = options_.name.model;
    options_.inputs.revision = options_.name.revision;
  }
  return ApplyScheme(&options_);
}

absl::Status QuantizeRun::Prepare() {
  absl::Status status = Resolve();
  if (!status.ok()) return status;
  const absl::StatusOr<SpecSet> specs = options_.spec.ParseSet();
  if (!specs.ok()) return specs.status();
  const absl::StatusOr<std::optional<Part>> part = ParsePartOptions(options_);
  if (!part.ok()) return part.status();
  status = CheckGgufOptions(options_, *specs);
  if (status.ok()) status = CheckRounding(options_, *specs);
  if (status.ok() &&
      (NeedsActivations(options_) || NeedsInputs(options_, *specs))) {
    status = ConnectOnce();
  }
  if (!status.ok()) return status;
  absl::StatusOr<QuantizePlan> plan = MakePlan(
      options_, *specs, *part, address_,
      connections_.has_value() ? connections_->first() : nullptr, events_);
  if (!plan.ok()) return plan.status();
  plan_ = *std::move(plan);
  events_.Step();
  return IsDoable() && NeedsServer() ? ConnectOnce() : absl::OkStatus();
}

absl::Status QuantizeRun::Write() {
  absl::Status status;
  if (IsDoable()) {
    if (NeedsServer()) status = Begin();
    if (!status.ok()) return status;
    has_begun_ = true;
    status = WriteFiles();
    const absl::Status unchanged = files::CheckMappedFiles();
    if (!unchanged.ok()) status = unchanged;
    // The output may be whole by now, but whoever stopped the run may not keep
    // it.
    if (status.ok()) status = events_.CheckStopped();
    if (status.ok()) status = Publish();
  }
  DropDraft();
  return status;
}

bool QuantizeRun::IsDoable() const {
  return !plan_.AnyFailed() || options_.keep_going;
}

bool QuantizeRun::NeedsServer() const {
  if (options_.store) return true;
  const auto is_made_here = [](const std::unique_ptr<Shard>& shard) {
    return !shard->blocks.empty() && shard->selected.empty();
  };
  return !options_.join &&
         !std::all_of(plan_.shards.begin(), plan_.shards.end(), is_made_here);
}

absl::Status QuantizeRun::ConnectOnce() {
  if (connections_.has_value()) return absl::OkStatus();
  absl::StatusOr<Connections> connected = connect_();
  if (!connected.ok()) return connected.status();
  connections_ = *std::move(connected);
  return absl::OkStatus();
}

absl::Status QuantizeRun::Begin() {
  const absl::StatusOr<std::string> key =
      DraftKeyOf(options_, plan_, connections_->first());
  if (!key.ok()) return key.status();
  server_ = std::make_unique<QuantizeServer>(options_, *std::move(connections_),
                                             *key, plan_, events_);
  if (server_->draft() == nullptr) return absl::OkStatus();
  return CheckDraft(options_, plan_, *server_->draft(), server_->client());
}

absl::Status QuantizeRun::WriteFiles() {
  QuantizeFolder folder(options_, plan_, events_);
  absl::Status status = folder.Make();
  if (!status.ok()) return status;
  bool is_written = false;
  status = WriteTargets(&folder, &is_written);
  if (!status.ok() || !is_written) {
    folder.RemoveIfEmpty();
    return status;
  }
  // A part leaves the rest to --join.
  if (!plan_.part.has_value()) status = folder.Complete();
  plan_.is_complete = status.ok();
  return status;
}

absl::Status QuantizeRun::WriteTargets(QuantizeFolder* folder,
                                       bool* is_written) {
  uint64_t total_bytes = 0;
  for (const Target& target : plan_.targets) {
    if (target.IsDone()) continue;
    for (const files::FileTensor* const tensor : target.tensors) {
      total_bytes += tensor->data.size();
    }
    for (const auto& [tensor, type] : target.shard->blocks) {
      total_bytes += tensor->data.size();
    }
  }
  JobProgress progress(total_bytes, events_);
  for (const Target& target : plan_.targets) {
    if (target.IsDone()) continue;
    if (absl::Status s = events_.CheckStopped(); !s.ok()) return s;
    const absl::Status status =
        options_.IsGguf()
            ? WriteGguf(options_, events_, server_.get(), &plan_, &progress)
            : WriteSafetensors(options_, events_, target, server_.get(), folder,
                               &plan_, &progress);
    if (!status.ok() || !target.shard->is_written) return status;
    events_.Step();
  }
  *is_written = true;
  return absl::OkStatus();
}

absl::Status QuantizeRun::Publish() {
  if (!plan_.is_complete || plan_.part.has_value() || server_ == nullptr ||
      server_->draft() == nullptr) {
    return absl::OkStatus();
  }
  const absl::Status status =
      PublishDraft(options_, *server_->draft(), server_->client(), &plan_);
  events_.Step();
  return status;
}

void QuantizeRun::DropDraft() const {
  if (!options_.output.IsStandardOutput() || server_ == nullptr ||
      server_->draft() == nullptr) {
    return;
  }
  // Encodings under way when the run was stopped may be stored too.
  const bool is_dropped =
      events_.stopped() ? !plan_.is_published
                        : !plan_.is_complete && server_->stored_count() > 0;
  if (!is_dropped) return;
  // The report tells of one that cannot be deleted.
  server_->DeleteDraft().IgnoreError();
}

}  // namespace quantd::jobs
