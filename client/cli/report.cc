#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
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
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/message_json.h"
#include "client/cli/progress.h"
#include "client/cli/report_data.h"
#include "client/cli/report_page.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "client/cli/tensor_input.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/files/atomic_file.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

constexpr const char* kDefaultSpecs[] = {"int8:per-channel", "int8:mse",
                                         "int4:mse"};
constexpr int kMixtures = 8;

struct Options {
  NameOptions name;
  std::vector<std::string> specs;
  std::vector<std::string> patterns;
  std::string output;
  // Where Debian's python3-plotly has it.
  std::string plotly = "/usr/share/python3-plotly/plotly.js";
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
    std::ifstream plotly(options_.plotly, std::ios::binary);
    if (!plotly) {
      return session_.FailUsage(ArgumentInvalidError(absl::StrCat(
          "expected plotly.js in ", options_.plotly,
          "; install python3-plotly, or name the file with --plotly")));
    }
    const std::string script(std::istreambuf_iterator<char>(plotly), {});
    client_ = session_.ConnectOrFail();
    if (client_ == nullptr) return;
    status = Collect();
    if (status.ok()) status = Write(script);
    if (!status.ok()) return session_.Fail(status);
    if (session_.json) {
      return session_.PrintJson({{"model", options_.name.model},
                                 {"revision", options_.name.revision},
                                 {"output", options_.output},
                                 {"tensor_count", tensors_.size()},
                                 {"failed_count", errors_.size()}});
    }
    session_.Print(absl::StrCat(CountText(tensors_.size()),
                                " tensors, written to ",
                                Printable(options_.output), "\n"));
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
          if (response.has_summary()) {
            summary_ = response.summary();
          } else {
            swept.push_back(response);
          }
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
    return AddMixtures();
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
        client_->GetStatistics(swept.name(), /*with_state=*/true);
    if (!stored.ok()) {
      if (ExitCodeOf(stored.status()) == kUnreachable) return stored.status();
      AddError(name, stored.status());
      return absl::OkStatus();
    }
    const v1::TensorStatistics& statistics = stored->statistics();
    const Distribution distribution = DistributionOf(stored->state());
    Json counts = Json::array();
    for (const double count : distribution.counts) {
      counts.push_back(Number(count));
    }
    std::vector<Json> candidates(specs_.size());
    for (const v1::SweepCandidate& candidate : swept.candidates()) {
      const size_t index = candidate.spec_index();
      if (candidate.has_error() || index >= candidates.size()) continue;
      const v1::Prediction& prediction = candidate.prediction();
      Json& json = candidates[index];
      json = {{"sqnr_db", Number(prediction.sqnr_db())},
              {"sqnr_db_low", Number(prediction.sqnr_db_low())},
              {"sqnr_db_high", Number(prediction.sqnr_db_high())},
              {"clip", nullptr},
              {"scale_count", 0}};
      const auto clip = clips_[index].find(name);
      if (clip != clips_[index].end()) json.update(clip->second);
    }
    tensors_.push_back(
        {{"name", name},
         {"count", statistics.count()},
         {"zero_count", statistics.zero_count()},
         {"min", Number(statistics.min())},
         {"max", Number(statistics.max())},
         {"low", Number(distribution.low)},
         {"high", Number(distribution.high)},
         {"edges",
          {Number(distribution.first_edge), Number(distribution.last_edge)}},
         {"bins", counts},
         {"candidates", candidates}});
    return absl::OkStatus();
  }

  // A spec for each tensor within growing sizes.
  absl::Status AddMixtures() {
    uint64_t least = UINT64_MAX;
    uint64_t most = 0;
    int sizes = 0;
    for (const v1::SweepTotal& total : summary_.totals()) {
      totals_.push_back(
          {{"candidate", total.spec_index()},
           {"size_bytes", total.size_bytes()},
           {"min_sqnr_db", Number(total.min_sqnr_db())},
           {"min_sqnr_tensor", total.min_sqnr_tensor()},
           {"noise_to_signal_sum", Number(total.noise_to_signal_sum())},
           {"failed_count", total.failed_count()}});
      if (total.failed_count() != 0) continue;
      ++sizes;
      least = std::min(least, total.size_bytes());
      most = std::max(most, total.size_bytes());
    }
    if (sizes < 2) return absl::OkStatus();
    for (int i = 0; i < kMixtures; ++i) {
      v1::SweepRequest request = sweep_;
      // The last may be of any size: the best is not always the largest, nor
      // within what one spec takes for all tensors.
      request.set_max_size_bytes(
          i == kMixtures - 1
              ? static_cast<uint64_t>(std::numeric_limits<int64_t>::max())
              : least + (most - least) * static_cast<uint64_t>(i) /
                            (kMixtures - 1));
      const absl::Status status =
          client_->Sweep(request, [&](const v1::SweepResponse& response) {
            const v1::SweepMixture& mixture = response.summary().mixture();
            if (mixture.target_met()) {
              mixtures_.push_back({{"size_bytes", mixture.size_bytes()},
                                   {"noise_to_signal_sum",
                                    Number(mixture.noise_to_signal_sum())}});
            }
            return true;
          });
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Write(const std::string& plotly) {
    const Json document = {
        {"model", options_.name.model}, {"revision", options_.name.revision},
        {"candidates", specs_},         {"totals", totals_},
        {"mixtures", mixtures_},        {"tensors", tensors_}};
    const std::string data = absl::StrReplaceAll(
        document.dump(-1, ' ', false, Json::error_handler_t::replace),
        {{"<", "\\u003c"}});
    // What is put in is not searched for more places.
    const std::pair<absl::string_view, absl::string_view> begin_and_rest =
        absl::StrSplit(absl::string_view(kReportPage),
                       absl::MaxSplits("@DATA@", 1));
    const std::pair<absl::string_view, absl::string_view> middle_and_end =
        absl::StrSplit(begin_and_rest.second, absl::MaxSplits("@PLOTLY@", 1));
    absl::StatusOr<files::AtomicFile> file =
        files::AtomicFile::Create(options_.output);
    if (!file.ok()) return file.status();
    absl::Status status = file->Append(
        absl::StrCat(begin_and_rest.first, data, middle_and_end.first,
                     absl::StrReplaceAll(plotly, {{"</script", "<\\/script"}}),
                     middle_and_end.second));
    return status.ok() ? file->Commit() : status;
  }

  const Options& options_;
  Session& session_;
  std::vector<std::string> specs_;
  std::unique_ptr<Client> client_;
  v1::SweepRequest sweep_;
  v1::SweepSummary summary_;
  // By spec and tensor.
  std::vector<std::map<std::string, Json>> clips_;
  Json tensors_ = Json::array();
  Json totals_ = Json::array();
  Json mixtures_ = Json::array();
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
                     "A candidate such as int4:group:32:mse; may be repeated. "
                     "Default int8:per-channel, int8:mse and int4:mse");
  command->AddOption("--pattern", &options->patterns, "PATTERN",
                     "Only tensors whose name matches (* and ?); may be "
                     "repeated");
  command
      ->AddOption("-o,--output", &options->output, "FILE",
                  "HTML file to write, which needs no network")
      ->Required();
  command
      ->AddOption("--plotly", &options->plotly, "FILE",
                  "plotly.js, which becomes part of the page")
      ->ShowDefault();
  command->OnRun([options, session] { Reporter(*options, session).Run(); });
}

}  // namespace quantd::cli
