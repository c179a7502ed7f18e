#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
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
#include "client/cli/output_options.h"
#include "client/cli/printable.h"
#include "client/cli/progress.h"
#include "client/cli/report_data.h"
#include "client/cli/report_page.h"
#include "client/cli/session.h"
#include "client/cli/sweep_file.h"
#include "client/cli/sweep_options.h"
#include "client/cli/tensor_notes.h"
#include "client/cli/tensor_options.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/cpp/tensor.h"
#include "client/files/atomic_file.h"
#include "client/files/safetensors.h"
#include "client/jobs/file_ties.h"
#include "client/jobs/output.h"
#include "client/jobs/selection.h"
#include "client/jobs/spec_options.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/model_importance.h"
#include "client/models/model_sweep.h"
#include "client/models/plain_input.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"
#include "client/models/text.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

constexpr const char* kDefaultSpecs[] = {"int8:per-channel", "int8:mse",
                                         "int4:mse"};

// Specs for a file, unless others are given.
constexpr const char* kDefaultFileSpecs[] = {
    "int8:per-channel", "int4:group:32", "nf4", "mxfp4_e2m1"};
constexpr double kDefaultBits = 5;
// With more tensors their histograms have half as many bins.
constexpr size_t kManyTensors = 500;

struct ReportOptions : ErrorSourceOptions {
  // Empty for stored statistics.
  std::string input;
  jobs::SpecOptions spec;
  jobs::TensorFilter filter;
  BudgetOptions budgets;
  jobs::OutputOptions output;
};

// Six digits, which plots never show more of; null for what is not finite.
Json Number(double value) {
  if (!std::isfinite(value)) return nullptr;
  return std::strtod(absl::StrFormat("%.6g", value).c_str(), nullptr);
}

// The text as a shell takes it for one word.
std::string ShellWord(const std::string& text) {
  const bool is_plain =
      !text.empty() && text.find_first_not_of(
                           "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUV"
                           "WXYZ0123456789_-./:=,+@") == std::string::npos;
  if (is_plain) return text;
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "'\\''"}}), "'");
}

// One run of `quantctl report`. Not thread-safe.
class Reporter {
 public:
  Reporter(const ReportOptions& options, Session* session)
      : options_(options), session_(*session) {}

  void Run() {
    specs_ = options_.spec.specs;
    if (specs_.empty() && options_.input.empty()) {
      specs_.assign(std::begin(kDefaultSpecs), std::end(kDefaultSpecs));
    } else if (specs_.empty()) {
      specs_.assign(std::begin(kDefaultFileSpecs), std::end(kDefaultFileSpecs));
    }
    const std::vector<Budget> budgets = options_.budgets.Parse();
    if (budgets.size() > 1) {
      return session_.FailUsage(
          ArgumentInvalidError("expected one budget of a report"));
    }
    if (!budgets.empty()) {
      budget_ = budgets[0];
    } else if (!options_.input.empty()) {
      budget_ = Budget{Budget::Kind::kMaxBitsPerElement, kDefaultBits};
    }
    options_.input.empty() ? RunOnStatistics() : RunOnFile();
  }

 private:
  void RunOnStatistics() {
    absl::Status status = MakeRequest();
    if (!status.ok()) return session_.FailUsage(status);
    status = CheckOutputFile(options_.output, options_.spec.Files(), ".html",
                             &session_);
    if (!status.ok()) return FailEarly(status, &session_);
    client_ = session_.ConnectOrFail();
    if (client_ == nullptr) return;
    status = jobs::CheckStoredPatterns("--pattern", options_.patterns,
                                       jobs::Stored::kStatistics, options_.name,
                                       client_.get());
    if (!status.ok()) return FailEarly(status, &session_);
    Finish(Collect());
  }

  void RunOnFile() {
    const absl::StatusOr<std::vector<SpecTemplate>> specs =
        ParseSpecs(specs_, /*takes_gguf_types=*/false);
    if (!specs.ok()) return session_.FailUsage(specs.status());
    for (size_t i = 0; i < specs->size(); ++i) {
      if (!(*specs)[i].spec.has_importance()) continue;
      return session_.FailUsage(ArgumentInvalidError(
          absl::StrCat("expected specs without importance in a report, got ",
                       specs_[i], "; quantctl sweep measures it")));
    }
    const absl::StatusOr<TensorInput> input = TensorInput::Open(options_.input);
    if (!input.ok()) return session_.Fail(input.status());
    absl::Status status = CheckPlain(*input, options_.input);
    if (!status.ok()) return session_.Fail(status);
    std::vector<std::string> inputs = options_.spec.Files();
    inputs.insert(inputs.end(), input->paths().begin(), input->paths().end());
    status = CheckOutputFile(options_.output, inputs, ".html", &session_);
    if (!status.ok()) return FailEarly(status, &session_);
    ReportUnread(*input, options_.filter, &session_);
    const absl::StatusOr<std::vector<const files::FileTensor*>> taken =
        SelectMeasurable(*input, options_.filter, nullptr, &session_);
    if (!taken.ok()) return session_.FailUsage(taken.status());
    client_ = session_.ConnectOrFail();
    if (client_ == nullptr) return;
    Finish(CollectFrom(*taken, *specs));
  }

  // Writes what was collected, and says so.
  void Finish(absl::Status status) {
    if (status.ok()) status = Write();
    if (!status.ok()) return session_.Fail(status);
    if (session_.json) {
      Json json = {{"output", options_.output.path},
                   {"tensor_count", tensors_.size()},
                   {"failed_count", errors_.size()}};
      if (options_.input.empty()) {
        json["model"] = options_.name.model;
        json["revision"] = options_.name.revision;
      } else {
        json["input"] = options_.input;
      }
      return session_.PrintJson(json);
    }
    session_.Print(absl::StrCat(CountText(tensors_.size()),
                                " tensors, written to ",
                                Printable(options_.output.path), "\n"));
    PrintNotes(notes_, &session_);
    for (const std::string& error : errors_) session_.PrintError(error);
  }

  absl::Status MakeRequest() {
    sweep_.set_model(options_.name.model);
    sweep_.set_revision(options_.name.revision);
    const absl::StatusOr<std::vector<EncodingSpec>> specs =
        ParseSpecsOfStatistics(specs_);
    if (!specs.ok()) return specs.status();
    for (const EncodingSpec& spec : *specs) *sweep_.add_specs() = spec;
    for (const std::string& pattern : options_.patterns) {
      sweep_.add_patterns(pattern);
    }
    if (!budget_.has_value()) return absl::OkStatus();
    if (budget_->kind == Budget::Kind::kMaxBitsPerElement) {
      return ArgumentInvalidError(
          "expected --min-sqnr or --max-bytes with --model");
    }
    const v1::MixtureTarget target = budget_->TargetFor(0);
    if (target.has_min_sqnr_db()) {
      sweep_.set_min_sqnr_db(target.min_sqnr_db());
    } else {
      sweep_.set_max_size_bytes(target.max_size_bytes());
    }
    return absl::OkStatus();
  }

  absl::Status Collect() {
    std::vector<v1::SweepResponse> swept;
    v1::SweepMixture mixture;
    Progress progress(Progress::Unit::kTensors, !session_.quiet);
    absl::Status status =
        client_->Sweep(sweep_, [&](const v1::SweepResponse& response) {
          if (response.has_summary()) {
            mixture = response.summary().mixture();
          } else {
            swept.push_back(response);
          }
          return true;
        });
    if (!status.ok()) return status;
    uint64_t done = 0;
    for (const v1::SweepResponse& response : swept) {
      progress.Set(++done, swept.size(), response.name().tensor());
      status = AddTensor(response);
      if (!status.ok()) return status;
    }
    if (budget_.has_value()) TakeMixture(mixture);
    return absl::OkStatus();
  }

  // Measures all tensors in one pass, and chooses.
  absl::Status CollectFrom(const std::vector<const files::FileTensor*>& taken,
                           const std::vector<SpecTemplate>& specs) {
    // Groups tensors as the commands that the page shows do by default.
    absl::StatusOr<std::vector<TieGroup>> groups =
        jobs::FindFileTies(jobs::TieFlags(), /*matters=*/true, taken);
    if (!groups.ok()) return groups.status();
    SweepOptions options;
    options.ties = *std::move(groups);
    const absl::StatusOr<ModelSweep> sweep =
        SweepWithProgress(taken, specs, {*budget_}, std::move(options),
                          client_.get(), !session_.quiet);
    if (!sweep.ok()) return sweep.status();
    for (const MeasuredTensor& tensor : sweep->tensors) AddMeasured(tensor);
    TakeMixture(sweep->mixtures[0]);
    return absl::OkStatus();
  }

  void AddMeasured(const MeasuredTensor& measured) {
    const std::string& name = measured.tensor->name;
    std::vector<Json> candidates(specs_.size());
    for (size_t i = 0; i < specs_.size(); ++i) {
      const MeasuredCandidate& candidate = measured.candidates[i];
      if (!candidate.status.ok()) {
        AddError(absl::StrCat(name, ", ", specs_[i]), candidate.status);
        continue;
      }
      candidates[i] = {{"sqnr_db", Number(candidate.metrics.sqnr_db())},
                       {"size_bytes", candidate.size_bytes}};
      if (candidate.metrics.count() == 0) candidates[i]["unmeasured"] = true;
    }
    const v1::TensorStatistics& statistics = measured.statistics;
    const uint64_t not_finite = NonFiniteCount(statistics);
    if (not_finite > 0) {
      notes_.push_back(absl::StrCat("quantctl: tensor ", name, ": ",
                                    CountText(not_finite),
                                    " elements are not finite, and not "
                                    "measured"));
    }
    tensors_.push_back({{"name", name},
                        {"count", statistics.count()},
                        {"zero_count", statistics.zero_count()},
                        {"min", Number(statistics.min())},
                        {"max", Number(statistics.max())},
                        {"elements", measured.element_count()},
                        {"low", nullptr},
                        {"high", nullptr},
                        {"edges", nullptr},
                        {"bins", nullptr},
                        {"candidates", candidates}});
  }

  // Sets what the page says of the mixture, and how to apply it.
  void TakeMixture(const v1::SweepMixture& mixture) {
    std::map<std::string, uint32_t> choices;
    for (const auto& choice : mixture.choices()) {
      choices[choice.tensor()] = choice.spec_index();
    }
    Json list = Json::array();
    for (const Json& tensor : tensors_) {
      const auto found = choices.find(tensor["name"].get<std::string>());
      list.push_back(found == choices.end() ? Json(nullptr)
                                            : Json(found->second));
    }
    std::string sweep =
        options_.input.empty()
            ? absl::StrCat("quantctl sweep --model ",
                           ShellWord(options_.name.model), " --revision ",
                           ShellWord(options_.name.revision))
            : absl::StrCat("quantctl sweep ", ShellWord(options_.input));
    for (const std::string& spec : specs_) {
      absl::StrAppend(&sweep, " --spec ", ShellWord(spec));
    }
    absl::StrAppend(&sweep, " ", BudgetFlag(*budget_), " -o mixture.txt");
    const std::string apply =
        options_.input.empty()
            ? absl::StrCat("quantctl encodings compute --model ",
                           ShellWord(options_.name.model), " --revision ",
                           ShellWord(options_.name.revision),
                           " --spec @mixture.txt")
            : absl::StrCat("quantctl quantize ", ShellWord(options_.input),
                           " -o quantized --spec @mixture.txt");
    mixture_ = {
        {"target", absl::StrCat(BudgetText(*budget_),
                                mixture.target_met() ? "" : " (not met)")},
        {"size_bytes", mixture.size_bytes()},
        {"commands", {sweep, apply}},
        {"choices", std::move(list)}};
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
              {"size_bytes", candidate.size_bytes()}};
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

  void HalveBins() {
    for (Json& tensor : tensors_) {
      Json halved = Json::array();
      const Json& bins = tensor["bins"];
      for (size_t i = 0; i + 1 < bins.size(); i += 2) {
        halved.push_back(
            Number(bins[i].get<double>() + bins[i + 1].get<double>()));
      }
      if (!bins.is_null()) tensor["bins"] = std::move(halved);
    }
  }

  absl::Status Write() {
    if (tensors_.size() > kManyTensors) HalveBins();
    const Json document = {
        {"model", options_.name.model},
        {"input",
         options_.input.empty() ? Json(nullptr) : Json(options_.input)},
        {"mixture", mixture_},
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

  const ReportOptions& options_;
  Session& session_;
  std::vector<std::string> specs_;
  std::unique_ptr<Client> client_;
  v1::SweepRequest sweep_;
  std::optional<Budget> budget_;
  Json mixture_;
  Json tensors_ = Json::array();
  std::vector<std::string> errors_;
  std::vector<std::string> notes_;
};

}  // namespace

void AddReportCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "report",
      "Write a page about what quantizing a model would cost, with plots: "
      "measured on a file, or predicted from stored statistics");
  const auto options = std::make_shared<ReportOptions>();
  options->AddOptions(command, &options->input);
  command->AddOption("--spec", &options->spec.specs, "SPEC",
                     "A candidate, such as int4:group:32:mse. May be repeated; "
                     "see quantctl help specs. Default: int8:per-channel, "
                     "int4:group:32, nf4 and mxfp4_e2m1; of statistics "
                     "int8:per-channel, int8:mse and int4:mse");
  options->AddPatternOption(command);
  AddFilterOptions(command, &options->filter);
  options->budgets.AddOptions(command);
  AddOutputOptions(command,
                   "HTML file to write, which needs no network; - for standard "
                   "output",
                   &options->output)
      ->Required();
  command->AddExample(
      "quantctl report llm/ -o report.html --spec int8:per-channel \\\n"
      "  --spec int4:group:32 --max-bits-per-element 5",
      "weights, measured in one pass over the files");
  command->AddExample("quantctl report --model acme/net -o report.html",
                      "activations, predicted from statistics");
  command->AddNote(
      "Of a file the page shows a mixture of at most 5 bits per element, "
      "unless another budget is given, and the commands that apply it. Of "
      "statistics it shows one only with --min-sqnr or --max-bytes.");
  command->OnRun([=] {
    const absl::Status status = options->Check(options->filter);
    if (!status.ok()) return session->FailUsage(status);
    Reporter(*options, session).Run();
  });
}

}  // namespace quantd::cli
