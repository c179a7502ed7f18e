#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/input_options.h"
#include "client/cli/message_json.h"
#include "client/cli/output_options.h"
#include "client/cli/progress.h"
#include "client/cli/session.h"
#include "client/cli/sweep_file.h"
#include "client/cli/sweep_options.h"
#include "client/cli/sweep_output.h"
#include "client/cli/table.h"
#include "client/cli/tensor_notes.h"
#include "client/cli/tensor_options.h"
#include "client/cli/tie_options.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/files/safetensors.h"
#include "client/jobs/selection.h"
#include "client/models/model_sweep.h"
#include "client/models/spec_syntax.h"
#include "client/models/tie_groups.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

struct SweepCommand : ErrorSourceOptions {
  // With an input those of statistics are not used.
  FileSweepOptions file;
  // Budget for the statistics, where one was asked for.
  std::optional<Budget> budget;
};

absl::StatusOr<v1::SweepRequest> MakeRequest(const SweepCommand& options) {
  v1::SweepRequest request;
  request.set_model(options.name.model);
  request.set_revision(options.name.revision);
  const absl::StatusOr<std::vector<EncodingSpec>> specs =
      ParseSpecsOfStatistics(options.file.spec.specs);
  if (!specs.ok()) return specs.status();
  for (const EncodingSpec& spec : *specs) *request.add_specs() = spec;
  for (const std::string& pattern : options.patterns) {
    request.add_patterns(pattern);
  }
  return request;
}

// Elements of all tensors of the request: codes of 16 bits take one byte more
// for each than codes of 8, and their scales the same.
absl::StatusOr<uint64_t> CountElements(const v1::SweepRequest& request,
                                       Client* client) {
  v1::SweepRequest sizes = request;
  sizes.clear_specs();
  sizes.clear_ties();
  sizes.add_specs()->set_format(v1::NUMBER_FORMAT_INT8);
  sizes.add_specs()->set_format(v1::NUMBER_FORMAT_INT16);
  uint64_t count = 0;
  const absl::Status status =
      client->Sweep(sizes, [&count](const v1::SweepResponse& response) {
        for (const v1::SweepTotal& total : response.summary().totals()) {
          count += total.spec_index() == 1 ? total.size_bytes() : 0;
          count -= total.spec_index() == 0 ? total.size_bytes() : 0;
        }
        return true;
      });
  if (!status.ok()) return status;
  return count;
}

// One run of `quantctl sweep`. Not thread-safe.
class Sweeper {
 public:
  Sweeper(const SweepCommand& options, Session* session)
      : options_(options),
        session_(*session),
        specs_(options.file.spec.specs) {}

  void Run() {
    absl::StatusOr<v1::SweepRequest> request = MakeRequest(options_);
    if (!request.ok()) return session_.FailUsage(request.status());
    absl::Status status;
    if (!options_.file.output.path.empty()) {
      status = CheckOutputFile(options_.file.output, options_.file.spec.Files(),
                               ".txt", &session_);
      if (!status.ok()) return FailEarly(status, &session_);
    }
    const std::unique_ptr<Client> client = session_.ConnectOrFail();
    if (client == nullptr) return;
    status = jobs::CheckStoredPatterns("--pattern", options_.patterns,
                                       jobs::Stored::kStatistics, options_.name,
                                       client.get());
    if (status.ok()) status = AddTies(client.get(), &*request);
    if (!status.ok()) return FailEarly(status, &session_);
    AddColumns();
    absl::Status name_status;
    {
      Progress progress(Progress::Unit::kTensors, !session_.quiet);
      status = client->Sweep(*request, [&](const v1::SweepResponse& response) {
        progress.Set(response.done_count(), response.total_count(),
                     response.name().tensor());
        if (response.has_summary()) {
          summary_ = response.summary();
          return true;
        }
        if (!options_.file.output.path.empty()) {
          name_status = CheckNameForSpecFile(response.name().tensor());
        }
        AddTensor(response);
        return name_status.ok();
      });
    }
    if (!name_status.ok()) return session_.FailUsage(name_status);
    if (status.ok() && options_.budget.has_value()) {
      status = Choose(*request, client.get());
    }
    if (!status.ok()) return session_.Fail(status);
    if (!errors_.empty()) session_.Note(kServerError);
    const std::string reason =
        options_.budget.has_value()
            ? ReasonForNoMixture(mixture_, tensors_.size())
            : "";
    if (!reason.empty()) session_.Note(kServerError);
    const bool writes = !options_.file.output.path.empty() && reason.empty();
    if (writes) {
      status = specs_.WriteMixture(mixture_, options_.file.output.path,
                                   options_.file.output.if_exists());
      if (!status.ok()) return session_.Fail(status);
    }
    Report(writes);
    if (reason.empty()) return;
    session_.PrintError(
        absl::StrCat("quantctl: ", reason,
                     options_.file.output.path.empty()
                         ? ""
                         : absl::StrCat("; ", options_.file.output.path,
                                        " is not written")));
  }

 private:
  // Specs with outer scales make groups of the defaults matter.
  absl::Status AddTies(Client* client, v1::SweepRequest* request) {
    const std::vector<EncodingSpec> specs(request->specs().begin(),
                                          request->specs().end());
    const auto outer = std::find_if(
        specs.begin(), specs.end(),
        [](const EncodingSpec& spec) { return HasOuterScales(spec); });
    const EncodingSpec* const spec = outer == specs.end() ? &specs[0] : &*outer;
    absl::StatusOr<std::vector<NamedTies>> ties = AddStoredTies(
        options_.file.ties, specs, options_.name, client,
        [spec](const std::string&) { return spec; }, request->mutable_ties());
    if (!ties.ok()) return ties.status();
    ties_ = *std::move(ties);
    return absl::OkStatus();
  }

  // Chooses the mixture here, not in the sweep: what runtimes fuse gets one
  // spec, whether it shares a scale or not.
  absl::Status Choose(const v1::SweepRequest& request, Client* client) {
    Budget budget = *options_.budget;
    if (budget.kind == Budget::Kind::kMaxBitsPerElement) {
      const absl::StatusOr<uint64_t> count = CountElements(request, client);
      if (!count.ok()) return count.status();
      budget = {Budget::Kind::kMaxBytes,
                static_cast<double>(budget.TargetFor(*count).max_size_bytes())};
    }
    const absl::StatusOr<TieOptions> options = options_.file.ties.Parse();
    if (!options.ok()) return options.status();
    std::vector<const files::FileTensor*> tensors;
    absl::flat_hash_set<absl::string_view> names;
    for (const MeasuredTensor& predicted : predicted_) {
      tensors.push_back(predicted.tensor);
      names.insert(predicted.tensor->name);
    }
    // A pattern names two tensors or more, of which --pattern may leave out
    // some.
    for (const NamedTies& ties : ties_) {
      for (const std::string& name : ties.tensors) {
        if (names.insert(name).second) tensors.push_back(AddName(name));
      }
    }
    absl::StatusOr<std::vector<TieGroup>> groups =
        FindTiedTensors(*options, tensors);
    if (!groups.ok()) return groups.status();
    SweepOptions how;
    how.ties = *std::move(groups);
    const absl::StatusOr<std::vector<v1::SweepMixture>> mixtures =
        ChooseMixtures(predicted_, {budget}, specs_.texts().size(), how,
                       client);
    if (!mixtures.ok()) return mixtures.status();
    mixture_ = mixtures->front();
    return absl::OkStatus();
  }

  const files::FileTensor* AddName(const std::string& name) {
    files::FileTensor& tensor = names_.emplace_back();
    tensor.name = name;
    // Shape of a matrix, which runtimes fuse; statistics tell no shape.
    tensor.shape = {1, 1};
    return &tensor;
  }

  // Adds the predictions that a mixture is chosen by.
  void AddPredicted(const v1::SweepResponse& response) {
    MeasuredTensor& predicted = predicted_.emplace_back();
    predicted.tensor = AddName(response.name().tensor());
    predicted.candidates.resize(specs_.texts().size());
    for (MeasuredCandidate& candidate : predicted.candidates) {
      candidate.status = absl::UnknownError("not predicted");
    }
    for (const v1::SweepCandidate& answer : response.candidates()) {
      if (answer.has_error() ||
          answer.spec_index() >= predicted.candidates.size()) {
        continue;
      }
      MeasuredCandidate& candidate = predicted.candidates[answer.spec_index()];
      const double sqnr_db = answer.prediction().sqnr_db();
      candidate.status = absl::OkStatus();
      candidate.metrics.set_sqnr_db(sqnr_db);
      candidate.size_bytes = answer.size_bytes();
      candidate.noise_to_signal = std::pow(10, -sqnr_db / 10);
    }
  }

  void AddColumns() {
    table_.AddColumn("TENSOR, SPEC", Table::Align::kLeft);
    table_.AddColumn("SQNR DB", Table::Align::kRight);
    table_.AddColumn("AT LEAST", Table::Align::kRight);
    table_.AddColumn("SIZE", Table::Align::kBytes);
  }

  void AddTensor(const v1::SweepResponse& response) {
    AddPredicted(response);
    const std::string& name = response.name().tensor();
    Json tensor = {{"name", name}};
    if (response.has_error()) {
      const absl::Status error = FromTensorError(response.error());
      tensor["error"] = ErrorJson(error);
      errors_.push_back({name, error});
    }
    // On a line of its own, because names and specs are long.
    table_.AddLine(absl::StrCat(name, response.has_error() ? ": failed" : ""));
    Json candidates = Json::array();
    for (const v1::SweepCandidate& candidate : response.candidates()) {
      const std::string& spec = specs_.Text(candidate.spec_index());
      Json json = {{"spec_index", candidate.spec_index()}, {"spec", spec}};
      std::vector<std::string> row = {absl::StrCat("  ", spec)};
      if (candidate.has_error()) {
        const absl::Status error = FromTensorError(candidate.error());
        json["error"] = ErrorJson(error);
        errors_.push_back({absl::StrCat(name, ", ", spec), error});
        row.push_back("failed");
      } else {
        json["prediction"] = PredictionJson(candidate.prediction());
        json["size_bytes"] = candidate.size_bytes();
        row.push_back(DecibelText(candidate.prediction().sqnr_db()));
        row.push_back(DecibelText(candidate.prediction().sqnr_db_low()));
        row.push_back(BytesCell(candidate.size_bytes()));
      }
      candidates.push_back(std::move(json));
      table_.AddRow(std::move(row));
    }
    tensor["candidates"] = std::move(candidates);
    tensors_.push_back(std::move(tensor));
  }

  void Report(bool is_written) {
    const std::vector<v1::SweepTotal> totals(summary_.totals().begin(),
                                             summary_.totals().end());
    if (session_.json) {
      Json json = {{"model", options_.name.model},
                   {"revision", options_.name.revision},
                   {"ties", TiesJson(ties_)},
                   {"tensors", tensors_},
                   {"totals", specs_.TotalsJson(totals)}};
      if (options_.budget.has_value()) {
        json["mixture"] = specs_.MixtureJson(mixture_, is_written);
      }
      return session_.PrintJson(json);
    }
    session_.Print(table_.Render(StdoutHasStyle()));
    if (!totals.empty()) {
      session_.Print(absl::StrCat("\n", specs_.TotalsText(totals)));
    }
    if (options_.budget.has_value()) {
      session_.Print(absl::StrCat(
          "\n", specs_.MixtureText(
                    mixture_, is_written ? options_.file.output.path : "")));
    }
    PrintTies(ties_, session_);
    PrintTensorErrors(errors_, &session_);
  }

  const SweepCommand& options_;
  Session& session_;
  const SweptSpecs specs_;
  std::vector<NamedTies> ties_;
  Json tensors_ = Json::array();
  Table table_;
  // Errors of tensors, and of one spec of a tensor.
  std::vector<TensorError> errors_;
  v1::SweepSummary summary_;
  // Neither moves.
  std::deque<files::FileTensor> names_;
  std::vector<MeasuredTensor> predicted_;
  // Set where a budget was given.
  v1::SweepMixture mixture_;
};

}  // namespace

void AddSweepCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "sweep",
      "Measure the error of many specs on a file's tensors, or predict it from "
      "stored statistics; rank them, and choose one for each tensor");
  const auto options = std::make_shared<SweepCommand>();
  options->AddOptions(command, &options->file.input);
  command
      ->AddOption(
          "--spec", &options->file.spec.specs, "SPEC",
          "A candidate, such as int4:group:32:mse. May be repeated; see "
          "quantctl help specs")
      ->Suggest(FormatNames())
      ->Required();
  options->AddPatternOption(command);
  AddTieOptions(
      command,
      "Tensors that share one outer scale, and get one spec in a mixture; with "
      "--model they share one encoding where the spec has no outer scale",
      &options->file.ties);
  AddFilterOptions(command, &options->file.filter);
  AddInputsOptions(
      command,
      "With a file: also tell the error at the output of the layer, for the "
      "inputs whose Gram matrix is stored: for MODULE.weight under "
      "MODULE.input, or under that of a layer that runtimes fuse with it. "
      "Specs with importance take these, or moments",
      &options->file.inputs);
  command->AddOption(
      "--output-weights", &options->file.output_weights, "FILE",
      "JSON object that says of weights how much of the noise at the output of "
      "their layer reaches the end of the model: mixtures keep the sum of that "
      "noise small. With --inputs; quantd.torch.output_weights finds them");
  AddImportanceOption(command, &options->file.importance);
  options->file.budgets.AddOptions(command);
  AddOutputOptions(
      command,
      "Write the mixture as TENSOR=SPEC lines, for quantize --spec @FILE; - "
      "for standard output. With several budgets {} stands for the figure of "
      "each",
      &options->file.output);
  command->AddExample(
      "quantctl sweep llm/ --spec int8:per-channel --spec int4:group:128 \\\n"
      "  --spec nvfp4 --max-bits-per-element 4.5 --max-bits-per-element 6 \\\n"
      "  -o mixture-{}.txt",
      "two mixtures, measured in one pass over the files");
  command->AddExample(
      "quantctl sweep --model acme/net --revision weights \\\n"
      "  --spec int8:per-channel --spec int4:per-channel:mse \\\n"
      "  --max-bits-per-element 5 -o mixture.txt",
      "predicted from statistics");
  command->AddNote(
      "Weights lie in a file: measure them there. It takes one pass over the "
      "data, any spec, and nothing is stored. Statistics are for activations, "
      "which are gone once the model has run, per tensor or per channel. "
      "Per tensor they take less than a hundredth of a float32 tensor, per "
      "channel less than half of it; in groups they take more than the "
      "tensor.");
  command->AddNote(
      "From statistics, specs can be in any blocks that are made of those of "
      "the statistics.");
  command->AddNote(
      "SUM N/S is the noise power by the signal power of each tensor, added up "
      "over all tensors. It ranks specs on the same tensors and may pass 1; "
      "for one tensor, SQNR is -10 log10 of it.");
  command->OnRun([=] {
    const std::vector<Budget> budgets = options->file.budgets.Parse();
    const auto fail = [session](const char* text) {
      session->FailUsage(ArgumentInvalidError(text));
    };
    const absl::Status status = options->Check(options->file.filter);
    if (!status.ok()) return session->FailUsage(status);
    options->file.inputs.Resolve();
    if (options->HasFile()) return SweepFile(options->file, session);
    if (options->file.inputs.IsGiven() || !options->file.importance.empty() ||
        !options->file.output_weights.empty()) {
      return fail(
          "expected --inputs, --inputs-map, --output-weights and --importance "
          "with a file: statistics do not tell which column an element is "
          "from");
    }
    if (budgets.size() > 1) {
      return fail(
          "expected one budget with --model; several at once need a "
          "file");
    }
    // There is nothing to write without a target.
    if (budgets.empty() && !options->file.output.path.empty()) {
      return fail(
          "expected --min-sqnr, --max-bytes or "
          "--max-bits-per-element with -o");
    }
    if (!budgets.empty()) options->budget = budgets[0];
    Sweeper(*options, session).Run();
  });
}

}  // namespace quantd::cli
