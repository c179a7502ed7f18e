#include "client/cli/sweep_file.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/cli/input_options.h"
#include "client/cli/output_options.h"
#include "client/cli/progress.h"
#include "client/cli/session.h"
#include "client/cli/sweep_options.h"
#include "client/cli/sweep_output.h"
#include "client/cli/table.h"
#include "client/cli/tensor_notes.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/files/dtype.h"
#include "client/files/gguf_types.h"
#include "client/files/safetensors.h"
#include "client/jobs/file_ties.h"
#include "client/jobs/gguf_output.h"
#include "client/jobs/importance.h"
#include "client/jobs/output.h"
#include "client/jobs/selection.h"
#include "client/jobs/stored_inputs.h"
#include "client/models/gguf_blocks.h"
#include "client/models/model_importance.h"
#include "client/models/model_sweep.h"
#include "client/models/plain_input.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"
#include "client/models/text.h"
#include "client/models/tie_groups.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

constexpr char kPlace[] = "{}";

// One run of `quantctl sweep FILE`. Not thread-safe.
class FileSweeper {
 public:
  FileSweeper(const FileSweepOptions& options, Session* session)
      : options_(options),
        session_(*session),
        specs_(options.spec.specs),
        budgets_(options.budgets.Parse()) {}

  void Run() {
    const absl::StatusOr<std::vector<SpecTemplate>> specs =
        ParseSpecs(specs_.texts(), /*takes_gguf_types=*/true);
    if (!specs.ok()) return session_.FailUsage(specs.status());
    if (options_.inputs.text.empty() &&
        (!options_.inputs.map.empty() || !options_.output_weights.empty())) {
      return session_.FailUsage(ArgumentInvalidError(
          "expected --inputs with --inputs-map and --output-weights"));
    }
    const absl::StatusOr<TensorInput> input = TensorInput::Open(options_.input);
    if (!input.ok()) return session_.Fail(input.status());
    absl::Status status = CheckPlain(*input, options_.input);
    if (!status.ok()) return session_.Fail(status);
    status = TakeOutputs(*input);
    if (!status.ok()) return FailEarly(status, &session_);
    ReportUnread(*input, options_.filter, &session_);
    for (const files::UnreadTensor& tensor : input->unread()) {
      if (options_.filter.TakesName(tensor.name)) {
        unread_.push_back(tensor.name);
      }
    }
    absl::StatusOr<std::vector<const files::FileTensor*>> taken =
        SelectMeasurable(*input, options_.filter, nullptr, &session_);
    if (!taken.ok()) return session_.FailUsage(taken.status());
    status = IgnoreInGguf(*specs, &*taken);
    if (!status.ok()) return session_.FailUsage(status);
    PrintOneScale(*specs, *taken);
    if (!outputs_.empty()) {
      for (const files::FileTensor* const tensor : *taken) {
        status = CheckNameForSpecFile(tensor->name);
        if (!status.ok()) return session_.FailUsage(status);
      }
    }
    absl::StatusOr<std::vector<TieGroup>> ties =
        jobs::FindFileTies(options_.ties, /*matters=*/true, *taken);
    if (!ties.ok()) return session_.FailUsage(ties.status());
    SweepOptions how;
    how.ties = *std::move(ties);
    const std::unique_ptr<Client> client = session_.ConnectOrFail();
    if (client == nullptr) return;

    const absl::StatusOr<jobs::FoundImportance> importance =
        jobs::FindImportance(
            options_.importance, options_.inputs, *taken,
            [&specs](const files::FileTensor& /*tensor*/) {
              std::vector<const SpecTemplate*> all;
              for (const SpecTemplate& spec : *specs) all.push_back(&spec);
              return all;
            },
            client.get());
    if (!importance.ok()) return FailEarly(importance.status(), &session_);
    ReportMissingImportance(options_.importance, *importance,
                            !options_.filter.include.empty(), &session_);
    how.importance = importance->importance;
    status = FindOutputs(*taken, *specs, client.get(), &how);
    if (!status.ok()) return FailEarly(status, &session_);
    absl::StatusOr<ModelSweep> sweep =
        SweepWithProgress(*taken, *specs, budgets_, std::move(how),
                          client.get(), !session_.quiet);
    if (!sweep.ok()) return session_.Fail(sweep.status());
    sweep_ = *std::move(sweep);
    AddTensors();
    const std::vector<v1::SweepMixture>& mixtures = sweep_.mixtures;
    const std::vector<std::string> reasons = ReasonsAgainst(mixtures);
    for (size_t i = 0; i < outputs_.size(); ++i) {
      if (!reasons[i].empty()) continue;
      status = specs_.WriteMixture(mixtures[i], outputs_[i],
                                   options_.output.if_exists());
      if (!status.ok()) return session_.Fail(status);
    }
    Report(mixtures, reasons);
  }

 private:
  // Finds the file of each mixture, if they are written.
  absl::Status TakeOutputs(const TensorInput& input) {
    if (options_.output.path.empty()) return absl::OkStatus();
    if (budgets_.empty()) {
      return ArgumentInvalidError(
          "expected --min-sqnr, --max-bytes or --max-bits-per-element with "
          "-o");
    }
    const bool has_place = absl::StrContains(options_.output.path, kPlace);
    if (budgets_.size() > 1 && !has_place) {
      return ArgumentInvalidError(absl::StrCat(
          "expected {} in -o with ", budgets_.size(),
          " budgets, in the place of their figures, as in mixture-{}.txt; "
          "got ",
          options_.output.path));
    }
    std::vector<std::string> inputs = options_.spec.Files();
    inputs.insert(inputs.end(), input.paths().begin(), input.paths().end());
    inputs.insert(inputs.end(), {options_.importance, options_.inputs.map,
                                 options_.output_weights});
    for (const Budget& budget : budgets_) {
      jobs::OutputOptions output = options_.output;
      output.path =
          absl::StrReplaceAll(output.path, {{kPlace, BudgetNumber(budget)}});
      absl::Status status = CheckOutputFile(output, inputs, ".txt", &session_);
      if (!status.ok()) return status;
      if (std::find(outputs_.begin(), outputs_.end(), output.path) !=
          outputs_.end()) {
        return ArgumentInvalidError(
            absl::StrCat("expected different budgets, got ",
                         BudgetNumber(budget), " twice"));
      }
      outputs_.push_back(output.path);
    }
    return absl::OkStatus();
  }

  void PrintOneScale(const std::vector<SpecTemplate>& specs,
                     const std::vector<const files::FileTensor*>& taken) {
    std::vector<std::string> notes;
    for (const files::FileTensor* const tensor : taken) {
      for (const SpecTemplate& spec : specs) {
        const std::string text = jobs::OneScaleText(spec, *tensor);
        if (!text.empty()) notes.push_back(absl::StrCat("quantctl: ", text));
      }
    }
    if (!session_.quiet) PrintNotes(notes, &session_);
  }

  // With a spec of GGUF alone leaves out what `quantize -o OUT.gguf` leaves as
  // it is: a mixture has no spec for rows without whole blocks.
  absl::Status IgnoreInGguf(const std::vector<SpecTemplate>& specs,
                            std::vector<const files::FileTensor*>* taken) {
    const auto spec = absl::c_find_if(specs, [](const SpecTemplate& candidate) {
      return !candidate.gguf_type.empty();
    });
    if (spec == specs.end()) return absl::OkStatus();
    std::vector<const files::FileTensor*> measured;
    std::vector<std::string> notes;
    for (const files::FileTensor* const tensor : *taken) {
      const bool is_named = MatchesAny(options_.filter.include, tensor->name);
      if (is_named || (!jobs::IsLeftInGguf(options_.filter, *tensor) &&
                       BlockTypeFor(*spec, tensor->shape) != nullptr)) {
        measured.push_back(tensor);
        for (const SpecTemplate& one : specs) {
          const files::GgufType* const type = BlockTypeFor(one, tensor->shape);
          if (type == nullptr) continue;
          const std::string text = NoWholeBlocksText(one, *tensor, type, "");
          if (!text.empty()) notes.push_back(absl::StrCat("quantctl: ", text));
        }
      } else {
        ignored_.push_back(tensor->name);
      }
    }
    if (measured.empty()) {
      return ArgumentInvalidError(absl::StrCat(
          "expected tensors that quantize -o OUT.gguf quantizes, got none "
          "among ",
          taken->size(), ", such as ", ignored_[0], "; --include takes them"));
    }
    *taken = std::move(measured);
    if (!session_.quiet) PrintNotes(notes, &session_);
    if (!ignored_.empty() && !session_.quiet) {
      session_.PrintError(absl::StrCat(
          "quantctl: left out, as quantize -o OUT.gguf leaves them as they "
          "are: ",
          NamesText(ignored_), "; --include takes them"));
    }
    return absl::OkStatus();
  }

  // Finds the inputs of layers, and how much of the noise at their outputs
  // counts.
  absl::Status FindOutputs(const std::vector<const files::FileTensor*>& taken,
                           const std::vector<SpecTemplate>& specs,
                           Client* client, SweepOptions* how) {
    const bool is_needed = std::none_of(
        specs.begin(), specs.end(),
        [](const SpecTemplate& spec) { return NeedsInputs(spec.spec); });
    absl::StatusOr<std::map<std::string, v1::TensorName>> inputs =
        FindOutputInputs(options_.inputs, taken, is_needed,
                         !options_.filter.include.empty(), client, &session_);
    if (!inputs.ok()) return inputs.status();
    how->inputs = *std::move(inputs);
    has_output_noise_ = !how->inputs.empty();
    if (options_.output_weights.empty()) return absl::OkStatus();
    absl::StatusOr<std::map<std::string, double>> weights =
        jobs::ReadOutputWeights(options_.output_weights);
    if (!weights.ok()) return weights.status();
    how->output_weights = *std::move(weights);
    for (const SpecTemplate& spec : specs) {
      if (!spec.gguf_type.empty()) {
        return ArgumentInvalidError(absl::StrCat(
            "expected specs of the server with --output-weights, got ",
            spec.gguf_type));
      }
    }
    for (const files::FileTensor* const tensor : taken) {
      const char* const lacks =
          how->output_weights.count(tensor->name) == 0 ? "weight"
          : how->inputs.count(tensor->name) == 0 ? "Gram matrix of its inputs"
                                                 : nullptr;
      if (lacks != nullptr) {
        return ArgumentInvalidError(absl::StrCat(
            tensor->name, " has no ", lacks,
            ", which --output-weights needs; --exclude it, and give it a spec "
            "of its own"));
      }
    }
    return absl::OkStatus();
  }

  void AddTensors() {
    table_.AddColumn("TENSOR, SPEC", Table::Align::kLeft);
    table_.AddColumn("SQNR DB", Table::Align::kRight);
    table_.AddColumn("MAX ERROR", Table::Align::kRight);
    if (has_output_noise_) table_.AddColumn("OUTPUT DB", Table::Align::kRight);
    table_.AddColumn("SIZE", Table::Align::kBytes);
    for (const MeasuredTensor& measured : sweep_.tensors) AddTensor(measured);
  }

  void AddTensor(const MeasuredTensor& measured) {
    const std::string& name = measured.tensor->name;
    // On a line of its own, because names and specs are long.
    table_.AddLine(name);
    Json candidates = Json::array();
    for (const size_t i : Ranked(measured)) {
      const MeasuredCandidate& candidate = measured.candidates[i];
      const std::string& spec = specs_.texts()[i];
      Json json = {{"spec_index", i}, {"spec", spec}};
      std::vector<std::string> row = {absl::StrCat("  ", spec)};
      if (!candidate.status.ok()) {
        session_.Note(kServerError);
        json["error"] = ErrorJson(candidate.status);
        errors_.push_back({absl::StrCat(name, ", ", spec), candidate.status});
        row.push_back("failed");
      } else {
        const v1::ErrorMetrics& metrics = candidate.metrics;
        json.update(Json{{"sqnr_db", metrics.sqnr_db()},
                         {"max_absolute_error", metrics.max_absolute_error()},
                         {"mean_squared_error", metrics.mean_squared_error()},
                         {"sum_squared_error", metrics.sum_squared_error()},
                         {"count", metrics.count()},
                         {"non_finite_count", metrics.non_finite_count()},
                         {"clipped_low_count", metrics.clipped_low_count()},
                         {"clipped_high_count", metrics.clipped_high_count()},
                         {"noise_to_signal", candidate.noise_to_signal},
                         {"size_bytes", candidate.size_bytes},
                         {"importance", candidate.is_weighed}});
        if (candidate.output_noise.has_value()) {
          json["output_noise"] = OutputNoiseJson(*candidate.output_noise);
        }
        row.push_back(DecibelText(metrics.sqnr_db()));
        row.push_back(metrics.count() == 0
                          ? kNotMeasured
                          : NumberText(metrics.max_absolute_error()));
        if (has_output_noise_) {
          row.push_back(
              candidate.output_noise.has_value()
                  ? DecibelText(jobs::OutputSqnrDb(*candidate.output_noise))
                  : "");
        }
        row.push_back(BytesCell(candidate.size_bytes));
      }
      candidates.push_back(std::move(json));
      table_.AddRow(std::move(row));
    }
    const uint64_t not_finite = NonFiniteCount(measured.statistics);
    if (not_finite > 0) {
      notes_.push_back(absl::StrCat("quantctl: tensor ", name, ": ",
                                    CountText(not_finite),
                                    " elements are not finite, and not "
                                    "measured"));
    }
    tensors_.push_back(
        {{"name", name},
         {"shape", measured.tensor->shape},
         {"dtype", std::string(DtypeName(measured.tensor->dtype))},
         {"candidates", std::move(candidates)}});
  }

  // Least noise first, then the smaller; failures last.
  static std::vector<size_t> Ranked(const MeasuredTensor& measured) {
    std::vector<size_t> order(measured.candidates.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      const MeasuredCandidate& x = measured.candidates[a];
      const MeasuredCandidate& y = measured.candidates[b];
      if (x.status.ok() != y.status.ok()) return x.status.ok();
      if (x.noise_to_signal != y.noise_to_signal) {
        return x.noise_to_signal < y.noise_to_signal;
      }
      return x.size_bytes < y.size_bytes;
    });
    return order;
  }

  // For each mixture, the reason why it is none; empty where it is one.
  std::vector<std::string> ReasonsAgainst(
      const std::vector<v1::SweepMixture>& mixtures) {
    std::vector<std::string> reasons;
    for (const v1::SweepMixture& mixture : mixtures) {
      reasons.push_back(ReasonForNoMixture(mixture, sweep_.tensors.size()));
      if (!reasons.back().empty()) session_.Note(kServerError);
    }
    return reasons;
  }

  void Report(const std::vector<v1::SweepMixture>& mixtures,
              const std::vector<std::string>& reasons) {
    const std::vector<v1::SweepTotal> totals =
        TotalsOf(sweep_.tensors, specs_.texts().size());
    const auto is_written = [&](size_t i) {
      return !outputs_.empty() && reasons[i].empty();
    };
    if (session_.json) {
      Json list = Json::array();
      for (size_t i = 0; i < mixtures.size(); ++i) {
        Json mixture = {{"target", BudgetText(budgets_[i])}};
        mixture.update(specs_.MixtureJson(mixtures[i], is_written(i)));
        if (is_written(i)) mixture["output"] = outputs_[i];
        list.push_back(std::move(mixture));
      }
      session_.PrintJson({{"input", options_.input},
                          {"retries", session_.retries()},
                          {"ignored", ignored_},
                          {"unread", unread_},
                          {"tensors", tensors_},
                          {"totals", specs_.TotalsJson(totals)},
                          {"mixtures", std::move(list)}});
    } else {
      session_.Print(table_.Render(StdoutHasStyle()));
      session_.Print(absl::StrCat("\n", specs_.TotalsText(totals)));
      for (size_t i = 0; i < mixtures.size(); ++i) {
        session_.Print(absl::StrCat(
            "\n", BudgetText(budgets_[i]), ":\n",
            specs_.MixtureText(mixtures[i], is_written(i) ? outputs_[i] : "")));
      }
      PrintNotes(notes_, &session_);
      PrintTensorErrors(errors_, &session_);
    }
    for (size_t i = 0; i < reasons.size(); ++i) {
      if (reasons[i].empty()) continue;
      session_.PrintError(absl::StrCat(
          "quantctl: ", BudgetText(budgets_[i]), ": ", reasons[i],
          outputs_.empty()
              ? ""
              : absl::StrCat("; ", outputs_[i], " is not written")));
    }
  }

  const FileSweepOptions& options_;
  Session& session_;
  const SweptSpecs specs_;
  const std::vector<Budget> budgets_;
  // By budget; empty when nothing is written.
  std::vector<std::string> outputs_;
  // Tensors that a .gguf file has as they are.
  std::vector<std::string> ignored_;
  std::vector<std::string> unread_;
  bool has_output_noise_ = false;
  ModelSweep sweep_;
  Json tensors_ = Json::array();
  Table table_;
  // Errors of one spec of a tensor.
  std::vector<TensorError> errors_;
  std::vector<std::string> notes_;
};

}  // namespace

absl::StatusOr<ModelSweep> SweepWithProgress(
    const std::vector<const files::FileTensor*>& tensors,
    const std::vector<SpecTemplate>& specs, const std::vector<Budget>& budgets,
    SweepOptions options, Client* client, bool shows_progress) {
  uint64_t total_bytes = 0;
  for (const files::FileTensor* const tensor : tensors) {
    total_bytes += tensor->data.size();
  }
  Progress progress(total_bytes, shows_progress);
  options.on_tensor = [&progress](const files::FileTensor& tensor) {
    progress.Add(tensor.data.size(), tensor.name);
  };
  return SweepTensors(tensors, specs, budgets, client, options);
}

void SweepFile(const FileSweepOptions& options, Session* session) {
  FileSweeper(options, session).Run();
}

}  // namespace quantd::cli
