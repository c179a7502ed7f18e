#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/message_json.h"
#include "client/cli/output.h"
#include "client/cli/printable.h"
#include "client/cli/progress.h"
#include "client/cli/report_data.h"
#include "client/cli/report_page.h"
#include "client/cli/selection.h"
#include "client/cli/session.h"
#include "client/cli/spec_syntax.h"
#include "client/cli/table.h"
#include "client/cli/tensor_input.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/cpp/tensor.h"
#include "client/files/atomic_file.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

constexpr const char* kDefaultSpecs[] = {"int8:per-channel", "int8:mse",
                                         "int4:mse"};

struct Options {
  NameOptions name;
  std::vector<std::string> specs;
  std::vector<std::string> patterns;
  OutputOptions output;
};

// Six digits, which plots never show more of; null for what is not finite.
Json Number(double value) {
  if (!std::isfinite(value)) return nullptr;
  return std::strtod(absl::StrFormat("%.6g", value).c_str(), nullptr);
}

// One run of `quantctl report`. Not thread-safe.
class Reporter {
 public:
  Reporter(const Options& options, Session* session)
      : options_(options), session_(*session) {}

  void Run() {
    if (options_.specs.empty()) {
      specs_.assign(std::begin(kDefaultSpecs), std::end(kDefaultSpecs));
    } else {
      specs_ = options_.specs;
    }
    absl::Status status = MakeRequest();
    if (!status.ok()) return session_.FailUsage(status);
    status = options_.output.CheckFile({}, ".html", &session_);
    if (!status.ok()) return FailEarly(status, &session_);
    client_ = session_.ConnectOrFail();
    if (client_ == nullptr) return;
    status =
        CheckStoredPatterns("--pattern", options_.patterns, Stored::kStatistics,
                            options_.name, client_.get());
    if (!status.ok()) return FailEarly(status, &session_);
    status = Collect();
    if (status.ok()) status = Write();
    if (!status.ok()) return session_.Fail(status);
    if (session_.json) {
      return session_.PrintJson({{"model", options_.name.model},
                                 {"revision", options_.name.revision},
                                 {"output", options_.output.path},
                                 {"tensor_count", tensors_.size()},
                                 {"failed_count", errors_.size()}});
    }
    session_.Print(absl::StrCat(CountText(tensors_.size()),
                                " tensors, written to ",
                                Printable(options_.output.path), "\n"));
    for (const std::string& error : errors_) session_.PrintError(error);
  }

 private:
  absl::Status MakeRequest() {
    sweep_.set_model(options_.name.model);
    sweep_.set_revision(options_.name.revision);
    for (const std::string& text : specs_) {
      const absl::StatusOr<SpecTemplate> spec = ParseSpec(text);
      if (!spec.ok()) return spec.status();
      const absl::StatusOr<EncodingSpec> any = spec->SpecOfAny();
      if (!any.ok()) return any.status();
      *sweep_.add_specs() = *any;
    }
    for (const std::string& pattern : options_.patterns) {
      sweep_.add_patterns(pattern);
    }
    return absl::OkStatus();
  }

  absl::Status Collect() {
    std::vector<v1::SweepResponse> swept;
    Progress progress(Progress::Unit::kTensors, !session_.quiet);
    absl::Status status =
        client_->Sweep(sweep_, [&](const v1::SweepResponse& response) {
          if (!response.has_summary()) swept.push_back(response);
          return true;
        });
    for (int i = 0; status.ok() && i < sweep_.specs_size(); ++i) {
      status = ComputeWith(sweep_.specs(i));
    }
    if (!status.ok()) return status;
    uint64_t done = 0;
    for (const v1::SweepResponse& response : swept) {
      progress.Set(++done, swept.size(), response.name().tensor());
      status = AddTensor(response);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // The encodings of all tensors by one spec; those that fail stay out.
  absl::Status ComputeWith(const EncodingSpec& spec) {
    v1::ComputeEncodingsRequest request;
    request.set_model(options_.name.model);
    request.set_revision(options_.name.revision);
    request.set_dry_run(true);
    if (options_.patterns.empty()) *request.mutable_default_spec() = spec;
    for (const std::string& pattern : options_.patterns) {
      v1::SpecOverride* const added = request.add_overrides();
      added->set_pattern(pattern);
      *added->mutable_spec() = spec;
    }
    std::map<std::string, Json>& clips = clips_.emplace_back();
    return client_->ComputeEncodings(
        request, [&](const v1::ComputeEncodingsResponse& response) {
          if (response.has_error()) return true;
          const Encoding& encoding = response.stored_encoding().encoding();
          const auto limits = CodeLimits(encoding);
          Json& clip = clips[response.name().tensor()];
          clip = {{"clip", nullptr}, {"scale_count", encoding.scale_size()}};
          if (limits.has_value()) {
            clip["clip"] = {Number(limits->first), Number(limits->second)};
          }
          return true;
        });
  }

  void AddError(const std::string& tensor, const absl::Status& error) {
    session_.Note(kServerError);
    errors_.push_back(
        absl::StrCat("quantctl: tensor ", tensor, ": ", error.message()));
  }

  absl::Status AddTensor(const v1::SweepResponse& swept) {
    const std::string& name = swept.name().tensor();
    if (swept.has_error()) {
      AddError(name, FromTensorError(swept.error()));
      return absl::OkStatus();
    }
    const absl::StatusOr<v1::GetStatisticsResponse> stored =
        client_->GetStatistics(swept.name(), /*with_state=*/false,
                               /*per_tensor=*/true);
    if (!stored.ok()) {
      if (ExitCodeOf(stored.status()) == kUnreachable) return stored.status();
      AddError(name, stored.status());
      return absl::OkStatus();
    }
    const v1::TensorStatistics& statistics = stored->statistics();
    std::vector<Json> candidates(specs_.size());
    for (const v1::SweepCandidate& candidate : swept.candidates()) {
      const size_t index = candidate.spec_index();
      if (candidate.has_error() || index >= candidates.size()) continue;
      const v1::Prediction& prediction = candidate.prediction();
      Json& json = candidates[index];
      json = {{"sqnr_db", Number(prediction.sqnr_db())},
              {"sqnr_db_low", Number(prediction.sqnr_db_low())},
              {"sqnr_db_high", Number(prediction.sqnr_db_high())},
              {"size_bytes", candidate.size_bytes()},
              {"clip", nullptr},
              {"scale_count", 0}};
      const auto clip = clips_[index].find(name);
      if (clip != clips_[index].end()) json.update(clip->second);
    }
    Json tensor = {{"name", name},
                   {"count", statistics.count()},
                   {"zero_count", statistics.zero_count()},
                   {"min", Number(statistics.min())},
                   {"max", Number(statistics.max())},
                   {"elements", nullptr},
                   {"low", nullptr},
                   {"high", nullptr},
                   {"edges", nullptr},
                   {"bins", nullptr},
                   {"candidates", candidates}};
    AddDistribution(stored->state(), &tensor);
    tensors_.push_back(std::move(tensor));
    return absl::OkStatus();
  }

  static void AddDistribution(const v1::StatisticsState& state, Json* tensor) {
    const absl::StatusOr<int64_t> elements = ElementCount(
        std::vector<int64_t>(state.shape().begin(), state.shape().end()));
    if (elements.ok()) (*tensor)["elements"] = *elements;
    const Distribution distribution = DistributionOf(state);
    Json counts = Json::array();
    for (const double count : distribution.counts) {
      counts.push_back(Number(count));
    }
    (*tensor)["bins"] = std::move(counts);
    (*tensor)["low"] = Number(distribution.low);
    (*tensor)["high"] = Number(distribution.high);
    (*tensor)["edges"] = {Number(distribution.first_edge),
                          Number(distribution.last_edge)};
  }

  absl::Status Write() {
    const Json document = {
        {"model", options_.name.model},
        {"revision", options_.name.revision},
        {"date", absl::FormatTime("%Y-%m-%d %H:%M UTC", absl::Now(),
                                  absl::UTCTimeZone())},
        {"version", absl::StrCat("quantctl ", QUANTD_VERSION)},
        {"server", session_.server},
        {"candidates", specs_},
        {"tensors", tensors_}};
    const std::string data = absl::StrReplaceAll(
        document.dump(-1, ' ', false, Json::error_handler_t::replace),
        {{"<", "\\u003c"}});
    const std::pair<absl::string_view, absl::string_view> begin_and_end =
        absl::StrSplit(absl::string_view(kReportPage),
                       absl::MaxSplits("@DATA@", 1));
    absl::StatusOr<files::AtomicFile> file = files::AtomicFile::Create(
        options_.output.path, options_.output.if_exists());
    if (!file.ok()) return file.status();
    absl::Status status = file->Append(
        absl::StrCat(begin_and_end.first, data, begin_and_end.second));
    return status.ok() ? file->Commit() : status;
  }

  const Options& options_;
  Session& session_;
  std::vector<std::string> specs_;
  std::unique_ptr<Client> client_;
  v1::SweepRequest sweep_;
  // By spec and tensor.
  std::vector<std::map<std::string, Json>> clips_;
  Json tensors_ = Json::array();
  std::vector<std::string> errors_;
};

}  // namespace

void AddReportCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "report",
      "Write a page about a model's stored statistics and what quantizing it "
      "would cost, with plots");
  const auto options = std::make_shared<Options>();
  options->name.AddOptions(command, /*required=*/true);
  command->AddOption("--spec", &options->specs, "SPEC",
                     "A candidate, such as int4:group:32:mse. May be repeated; "
                     "see quantctl help specs. Default: int8:per-channel, "
                     "int8:mse and int4:mse");
  command->AddOption("--pattern", &options->patterns, "PATTERN",
                     "Only tensors whose name matches (* and ?); may be "
                     "repeated");
  options->output
      .AddOptions(command,
                  "HTML file to write, which needs no network; - for standard "
                  "output")
      ->Required();
  command->AddExample(
      "quantctl report --model acme/net --revision weights -o report.html \\\n"
      "  --spec int8:per-channel --spec int4:group:32");
  command->OnRun([options, session] { Reporter(*options, session).Run(); });
}

}  // namespace quantd::cli
