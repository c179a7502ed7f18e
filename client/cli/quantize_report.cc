#include "client/cli/quantize_report.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "client/cli/input_options.h"
#include "client/cli/printable.h"
#include "client/cli/table.h"
#include "client/cli/tensor_notes.h"
#include "client/cpp/errors.h"
#include "client/files/safetensors.h"
#include "client/jobs/draft_revision.h"
#include "client/jobs/model_tensors.h"
#include "client/jobs/quantize_model.h"
#include "client/jobs/quantize_notes.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_outcome.h"
#include "client/jobs/quantize_parts.h"
#include "client/jobs/quantize_plan.h"
#include "client/jobs/quantize_server.h"
#include "client/jobs/stored_inputs.h"
#include "client/models/fused_experts.h"
#include "client/models/text.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

// Totals of all tensors.
struct Totals {
  size_t tensor_count = 0;
  uint64_t before = 0;
  uint64_t after = 0;
  uint64_t quantized_count = 0;
  uint64_t kept_count = 0;
  uint64_t clipped_count = 0;
  bool has_output_noise = false;
  bool has_not_finite = false;
  std::set<std::string> formats;
  std::vector<TensorError> errors;
  // Failed tensors that the output has as they were.
  uint64_t copied_count = 0;
};

// Totals of all shards.
struct ShardTotals {
  uint64_t kept = 0;
  uint64_t written = 0;
  uint64_t file_bytes = 0;
};

ShardTotals CountShards(const jobs::QuantizePlan& plan) {
  ShardTotals totals;
  for (const std::unique_ptr<jobs::Shard>& shard : plan.shards) {
    totals.kept += shard->is_kept ? 1 : 0;
    totals.written += shard->is_written ? 1 : 0;
    totals.file_bytes += shard->file_bytes;
  }
  return totals;
}

Totals CountTensors(const std::vector<jobs::ModelTensor>& tensors) {
  Totals totals;
  for (const jobs::ModelTensor& tensor : tensors) {
    ++totals.tensor_count;
    totals.before += tensor.bytes_before;
    if (!tensor.status.ok()) {
      totals.errors.push_back({tensor.name, tensor.status});
      totals.copied_count += tensor.is_quantized ? 0 : 1;
    }
    totals.clipped_count +=
        tensor.clipped_low_count + tensor.clipped_high_count;
    totals.has_output_noise |= tensor.output_noise.has_value();
    totals.has_not_finite |= tensor.nan_count + tensor.infinity_count > 0;
    if (!tensor.is_written) continue;
    totals.after += tensor.bytes_after;
    totals.kept_count +=
        tensor.result == jobs::ModelTensor::Result::kKept ? 1 : 0;
    if (!tensor.is_quantized) continue;
    ++totals.quantized_count;
    totals.formats.insert(tensor.format);
  }
  return totals;
}

std::string ResultText(const jobs::ModelTensor& tensor) {
  if (!tensor.is_written) return tensor.status.ok() ? "not written" : "failed";
  if (!tensor.status.ok() && !tensor.is_quantized) return "failed, copied";
  return absl::StrCat(
      tensor.is_quantized ? tensor.format : "copied",
      tensor.is_compensated ? ", compensated" : "",
      tensor.result == jobs::ModelTensor::Result::kKept ? ", kept" : "");
}

absl::string_view ResultName(jobs::ModelTensor::Result result) {
  switch (result) {
    case jobs::ModelTensor::Result::kQuantized:
      return "quantized";
    case jobs::ModelTensor::Result::kCopied:
      return "copied";
    case jobs::ModelTensor::Result::kKept:
      return "kept";
    case jobs::ModelTensor::Result::kFailed:
      return "failed";
    case jobs::ModelTensor::Result::kNotWritten:
      return "not written";
  }
  return "";
}

Json TensorJson(const jobs::ModelTensor& tensor) {
  Json json = {{"name", tensor.name},
               {"shape", tensor.shape},
               {"dtype", tensor.dtype},
               {"result", std::string(ResultName(tensor.result))},
               {"bytes_before", tensor.bytes_before},
               {"bytes_after", tensor.bytes_after}};
  if (tensor.is_quantized) {
    json["format"] = tensor.format;
    json["rounding"] = tensor.is_compensated ? "compensated" : "nearest";
    json["importance"] = tensor.is_weighed;
    json["mantissa_bits"] = tensor.mantissa_bits;
    json["clipped_low_count"] = tensor.clipped_low_count;
    json["clipped_high_count"] = tensor.clipped_high_count;
    json["nan_count"] = tensor.nan_count;
    json["infinity_count"] = tensor.infinity_count;
    json["coarse_scale_count"] = tensor.coarse_scale_count;
  }
  if (tensor.output_noise.has_value()) {
    json["output_noise"] = OutputNoiseJson(*tensor.output_noise);
  }
  if (tensor.metrics.has_value()) {
    json["sqnr_db"] = tensor.metrics->sqnr_db();
    json["max_absolute_error"] = tensor.metrics->max_absolute_error();
    json["mean_squared_error"] = tensor.metrics->mean_squared_error();
  }
  if (!tensor.status.ok()) json["error"] = ErrorJson(tensor.status);
  return json;
}

// Says what to do where the server refused to store.
void PrintRefused(const jobs::QuantizeOptions& options,
                  const std::vector<absl::Status>& statuses,
                  const Session& session) {
  const bool is_refused = std::any_of(
      statuses.begin(), statuses.end(), [](const absl::Status& status) {
        const absl::string_view reason = ErrorReason(status);
        return reason == "SCOPE_MISSING" || reason == "MODEL_DENIED";
      });
  if (options.store && is_refused) {
    session.PrintError(
        "quantctl: --no-store quantizes without keeping the encodings on "
        "the server");
  }
}

// The text on an output that is complete, but whose encodings are not
// published.
std::string UnpublishedText(const jobs::QuantizeOptions& options,
                            const jobs::QuantizePlan& plan,
                            const jobs::DraftRevision& draft) {
  const std::string how =
      plan.is_folder    ? "the same command publishes them"
      : plan.is_lacking ? "the same command with --force does so"
                        : absl::StrCat(
                              "to publish them: quantctl revisions publish "
                              "--keep-others ",
                              options.name.model, " ", draft.revision(), " ",
                              options.name.revision);
  return absl::StrCat("quantctl: ", options.output.path,
                      " is written, but its encodings are not published; ",
                      how);
}

// The report of one run, as it is now. Not thread-safe.
class RunReport {
 public:
  RunReport(const jobs::QuantizeOptions& options,
            const jobs::QuantizePlan& plan, const jobs::QuantizeServer* server,
            Session* session)
      : options_(options),
        plan_(plan),
        server_(server),
        session_(*session),
        tensors_(TensorsOf(plan)),
        totals_(CountTensors(tensors_)),
        shard_totals_(CountShards(plan)) {}

  void PrintRun() {
    if (!totals_.errors.empty()) session_.Note(kServerError);
    if (session_.json) {
      PrintJson();
    } else {
      session_.Print(TableText());
      if (plan_.is_complete) session_.Print(SummaryText());
    }
    for (const jobs::QuantizeNote& note : NotesOf(options_, plan_, tensors_)) {
      PrintNote(note);
    }
    if (!totals_.errors.empty()) PrintFailed();
  }

  void PrintError(const absl::Status& error) {
    ReportRefused(error, options_, &session_);
    PrintUnfinished();
  }

 private:
  void PrintJson() const {
    Json list = Json::array();
    for (const jobs::ModelTensor& tensor : tensors_) {
      list.push_back(TensorJson(tensor));
    }
    session_.PrintJson({{"input", options_.input},
                        {"output", options_.output.path},
                        {"written", plan_.is_complete},
                        {"formats", totals_.formats},
                        {"bytes_before", totals_.before},
                        {"bytes_after", totals_.after},
                        {"file_bytes", shard_totals_.file_bytes},
                        {"quantized_count", totals_.quantized_count},
                        {"kept_count", totals_.kept_count},
                        {"failed_count", totals_.errors.size()},
                        {"rounded_count", plan_.RoundedCount()},
                        {"experts", ExpertsJson()},
                        {"ties", TiesJson()},
                        {"ignored", plan_.ignored},
                        {"no_linear", plan_.no_linear},
                        {"conv1d", plan_.conv1d},
                        {"warnings", RuntimeWarnings(plan_)},
                        {"notes", plan_.input_notes},
                        {"retries", session_.retries()},
                        {"tensors", list}});
  }

  Json ExpertsJson() const {
    Json list = Json::array();
    for (const FusedExperts& experts : plan_.experts) {
      list.push_back({{"name", experts.name},
                      {"expert_count", experts.expert_count},
                      {"transposed", experts.is_transposed}});
    }
    return list;
  }

  Json TiesJson() const {
    Json ties = Json::array();
    for (const TieGroup& group : plan_.ties) {
      Json names = Json::array();
      for (const files::FileTensor* const tensor : group.tensors) {
        names.push_back(tensor->name);
      }
      ties.push_back({{"label", group.label}, {"tied_tensors", names}});
    }
    return ties;
  }

  bool HasClipped() const { return totals_.clipped_count > 0; }
  std::string TableText() const {
    Table table;
    table.AddColumn("TENSOR", Table::Align::kLeft);
    table.AddColumn("SHAPE", Table::Align::kLeft);
    table.AddColumn("DTYPE", Table::Align::kLeft);
    table.AddColumn("RESULT", Table::Align::kLeft);
    table.AddColumn("BEFORE", Table::Align::kBytes);
    table.AddColumn("AFTER", Table::Align::kBytes);
    if (options_.evaluate) {
      table.AddColumn("SQNR DB", Table::Align::kRight);
      table.AddColumn("MAX ERROR", Table::Align::kRight);
    }
    if (totals_.has_output_noise) {
      table.AddColumn("OUTPUT DB", Table::Align::kRight);
    }
    if (HasClipped()) table.AddColumn("CLIPPED", Table::Align::kRight);
    if (totals_.has_not_finite) {
      table.AddColumn("NAN", Table::Align::kRight);
      table.AddColumn("INF", Table::Align::kRight);
    }
    for (const jobs::ModelTensor& tensor : tensors_) {
      table.AddRow(RowOf(tensor));
    }
    return table.Render(StdoutHasStyle());
  }

  std::vector<std::string> RowOf(const jobs::ModelTensor& tensor) const {
    std::vector<std::string> row = {
        tensor.name,
        ShapeText(tensor.shape),
        tensor.dtype,
        ResultText(tensor),
        BytesCell(tensor.bytes_before),
        tensor.is_written ? BytesCell(tensor.bytes_after) : ""};
    if (options_.evaluate) {
      const auto& metrics = tensor.metrics;
      row.push_back(metrics.has_value() ? DecibelText(metrics->sqnr_db()) : "");
      row.push_back(!metrics.has_value() ? ""
                    : metrics->count() == 0
                        ? kNotMeasured
                        : NumberText(metrics->max_absolute_error()));
    }
    if (totals_.has_output_noise) {
      row.push_back(tensor.output_noise.has_value()
                        ? DecibelText(jobs::OutputSqnrDb(*tensor.output_noise))
                        : "");
    }
    const auto add_count = [&](uint64_t count) {
      row.push_back(tensor.is_quantized ? CountText(count) : "");
    };
    if (HasClipped()) {
      add_count(tensor.clipped_low_count + tensor.clipped_high_count);
    }
    if (totals_.has_not_finite) {
      add_count(tensor.nan_count);
      add_count(tensor.infinity_count);
    }
    return row;
  }

  std::string SummaryText() const {
    return absl::StrCat(
        CountText(totals_.quantized_count), " of ",
        CountText(totals_.tensor_count), " tensors to ",
        totals_.formats.empty() ? "codes"
                                : absl::StrJoin(totals_.formats, ", "),
        ", ", BytesText(totals_.before), " to ", BytesText(totals_.after),
        plan_.part.has_value()
            ? absl::StrCat(", part ", jobs::PartText(*plan_.part))
            : "",
        ", written to ", Printable(options_.output.path),
        shard_totals_.kept == 0
            ? ""
            : absl::StrCat("; ", CountText(shard_totals_.kept), " of ",
                           CountText(plan_.shards.size()),
                           " shards kept from an earlier run"),
        plan_.part.has_value() ? "; with all parts done, the same command with "
                                 "--join in place of --part completes it"
                               : "",
        "\n");
  }

  void PrintNote(const jobs::QuantizeNote& note) {
    using Kind = jobs::QuantizeNote::Kind;
    if (note.kind == Kind::kExpected && session_.quiet) return;
    if (note.kind == Kind::kFailure) session_.Note(kServerError);
    std::vector<std::string> lines;
    for (const std::string& line : note.lines) {
      lines.push_back(absl::StrCat(
          "quantctl: ", note.kind == Kind::kRuntime ? "warning: " : "", line));
    }
    PrintNotes(lines, &session_);
  }

  void PrintFailed() {
    if (!session_.json) PrintTensorErrors(totals_.errors, &session_);
    const std::string failed =
        absl::StrCat(CountText(totals_.errors.size()), " of ",
                     CountText(totals_.tensor_count), " tensors failed");
    if (plan_.is_complete) {
      session_.PrintError(absl::StrCat(
          "quantctl: ", failed, "; ", options_.output.path, " has ",
          CountText(totals_.copied_count), " of them as they were"));
      return;
    }
    std::vector<absl::Status> statuses;
    for (const TensorError& error : totals_.errors) {
      statuses.push_back(error.status);
    }
    PrintRefused(options_, statuses, session_);
    PrintUnfinished();
    session_.PrintError(absl::StrCat(
        "quantctl: ", failed, ", so ", options_.output.path,
        plan_.is_folder ? " is not complete" : " is not written",
        options_.IsGguf() ? ""
                          : "; --keep-going leaves such tensors as they are"));
  }

  // Prints what there is of an output that is not complete, or not published.
  void PrintUnfinished() const {
    const jobs::DraftRevision* const draft =
        server_ == nullptr ? nullptr : server_->draft();
    if (draft != nullptr && plan_.is_complete) {
      return session_.PrintError(UnpublishedText(options_, plan_, *draft));
    }
    if (draft != nullptr && server_->stored_count() > 0) {
      session_.PrintError(absl::StrCat(
          "quantctl: the server has the new encodings of ",
          CountText(server_->stored_count()), " tensors in revision ",
          draft->revision(), " of model \"", options_.name.model,
          "\"; revision ", options_.name.revision, " is as it was",
          options_.output.IsStandardOutput()
              ? absl::StrCat("; `quantctl revisions delete ",
                             options_.name.model, " ", draft->revision(),
                             "` deletes them")
              : ""));
    }
    if (plan_.is_folder && shard_totals_.written > 0) {
      session_.PrintError(UnfinishedText(options_, plan_, server_));
    }
  }

  const jobs::QuantizeOptions& options_;
  const jobs::QuantizePlan& plan_;
  // Null where none was called.
  const jobs::QuantizeServer* const server_;
  Session& session_;
  const std::vector<jobs::ModelTensor> tensors_;
  const Totals totals_;
  const ShardTotals shard_totals_;
};

}  // namespace

void ReportRun(const jobs::QuantizeOptions& options,
               const jobs::QuantizePlan& plan,
               const jobs::QuantizeServer* server, Session* session) {
  RunReport(options, plan, server, session).PrintRun();
}

void ReportError(const absl::Status& error,
                 const jobs::QuantizeOptions& options,
                 const jobs::QuantizePlan& plan,
                 const jobs::QuantizeServer* server, Session* session) {
  RunReport(options, plan, server, session).PrintError(error);
}

void ReportRefused(const absl::Status& error,
                   const jobs::QuantizeOptions& options, Session* session) {
  PrintRefused(options, {error}, *session);
  session->Fail(error);
}

std::string UnfinishedText(const jobs::QuantizeOptions& options,
                           const jobs::QuantizePlan& plan,
                           const jobs::QuantizeServer* server) {
  const uint64_t written = CountShards(plan).written;
  if (plan.is_folder) {
    return absl::StrCat("quantctl: ", options.output.path, " has ",
                        CountText(written), " of ",
                        CountText(plan.shards.size()),
                        " shards; the same command goes on from there");
  }
  const bool is_written = written == 1 && !plan.part.has_value();
  if (is_written && server != nullptr && server->draft() != nullptr &&
      !plan.is_published) {
    return UnpublishedText(options, plan, *server->draft());
  }
  return absl::StrCat("quantctl: stopped; ", options.output.path,
                      is_written ? " is written" : " is not written");
}

}  // namespace quantd::cli
