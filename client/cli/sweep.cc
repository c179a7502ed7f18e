#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/message_json.h"
#include "client/cli/output.h"
#include "client/cli/printable.h"
#include "client/cli/progress.h"
#include "client/cli/selection.h"
#include "client/cli/session.h"
#include "client/cli/spec_syntax.h"
#include "client/cli/table.h"
#include "client/cli/tensor_input.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/files/atomic_file.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

struct Options {
  NameOptions name;
  SpecOptions spec;
  std::vector<std::string> patterns;
  std::optional<double> min_sqnr_db;
  std::optional<uint64_t> max_bytes;
  std::optional<double> max_bits_per_element;
  OutputOptions output;
};

absl::StatusOr<v1::SweepRequest> MakeRequest(const Options& options) {
  v1::SweepRequest request;
  request.set_model(options.name.model);
  request.set_revision(options.name.revision);
  for (const std::string& text : options.spec.specs) {
    absl::StatusOr<SpecTemplate> spec = ParseSpec(text);
    if (!spec.ok()) return spec.status();
    const absl::Status status = options.spec.AddCodebook(&*spec);
    if (!status.ok()) return status;
    const absl::StatusOr<EncodingSpec> any = spec->SpecOfAny();
    if (!any.ok()) return any.status();
    *request.add_specs() = *any;
  }
  for (const std::string& pattern : options.patterns) {
    request.add_patterns(pattern);
  }
  if (options.min_sqnr_db.has_value()) {
    request.set_min_sqnr_db(*options.min_sqnr_db);
  } else if (options.max_bytes.has_value()) {
    request.set_max_size_bytes(*options.max_bytes);
  }
  return request;
}

// Elements of all tensors of the request: codes of 16 bits take one byte more
// for each than codes of 8, and their scales the same.
absl::StatusOr<uint64_t> CountElements(const v1::SweepRequest& request,
                                       Client* client) {
  v1::SweepRequest sizes = request;
  sizes.clear_specs();
  sizes.clear_mixture();
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
  Sweeper(const Options& options, Session* session)
      : options_(options), session_(*session) {}

  void Run() {
    absl::StatusOr<v1::SweepRequest> request = MakeRequest(options_);
    if (!request.ok()) return session_.FailUsage(request.status());
    absl::Status status;
    if (!options_.output.path.empty()) {
      status = options_.output.CheckFile({}, ".txt", &session_);
      if (!status.ok()) return FailEarly(status, &session_);
    }
    const std::unique_ptr<Client> client = session_.ConnectOrFail();
    if (client == nullptr) return;
    status =
        CheckStoredPatterns("--pattern", options_.patterns, Stored::kStatistics,
                            options_.name, client.get());
    if (!status.ok()) return FailEarly(status, &session_);
    if (options_.max_bits_per_element.has_value()) {
      const absl::StatusOr<uint64_t> count =
          CountElements(*request, client.get());
      if (!count.ok()) return session_.Fail(count.status());
      request->set_max_size_bytes(static_cast<uint64_t>(
          *options_.max_bits_per_element * static_cast<double>(*count) / 8));
    }
    AddColumns();
    {
      Progress progress(Progress::Unit::kTensors, !session_.quiet);
      status = client->Sweep(*request, [&](const v1::SweepResponse& response) {
        progress.Set(response.done_count(), response.total_count(),
                     response.name().tensor());
        if (response.has_summary()) {
          summary_ = response.summary();
        } else {
          AddTensor(response);
        }
        return true;
      });
    }
    if (!status.ok()) return session_.Fail(status);
    if (!errors_.empty()) session_.Note(kServerError);
    const std::string reason = ReasonForNoMixture();
    if (!reason.empty()) session_.Note(kServerError);
    const bool writes = !options_.output.path.empty() && reason.empty();
    if (writes) {
      status = WriteMixture();
      if (!status.ok()) return session_.Fail(status);
    }
    Report(writes);
    if (reason.empty()) return;
    session_.PrintError(absl::StrCat(
        "quantctl: ", reason,
        options_.output.path.empty()
            ? ""
            : absl::StrCat("; ", options_.output.path, " is not written")));
  }

 private:
  const std::string& SpecText(uint32_t index) const {
    static const std::string& unknown = *new std::string("unknown");
    return index < options_.spec.specs.size() ? options_.spec.specs[index]
                                              : unknown;
  }

  void AddColumns() {
    table_.AddColumn("TENSOR, SPEC", Table::Align::kLeft);
    table_.AddColumn("SQNR DB", Table::Align::kRight);
    table_.AddColumn("AT LEAST", Table::Align::kRight);
    table_.AddColumn("SIZE", Table::Align::kBytes);
  }

  void AddTensor(const v1::SweepResponse& response) {
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
      const std::string& spec = SpecText(candidate.spec_index());
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

  bool HasTarget() const {
    return options_.min_sqnr_db.has_value() || options_.max_bytes.has_value() ||
           options_.max_bits_per_element.has_value();
  }

  // Why there is no mixture that does what was asked for; empty where there is
  // one, or none was asked for.
  std::string ReasonForNoMixture() const {
    if (!HasTarget()) return "";
    const v1::SweepMixture& mixture = summary_.mixture();
    const size_t choice_count = static_cast<size_t>(mixture.choices_size());
    if (choice_count < tensors_.size()) {
      return absl::StrCat("there is a choice for ", CountText(choice_count),
                          " of ", CountText(tensors_.size()), " tensors");
    }
    if (mixture.target_met()) return "";
    return absl::StrCat("no choice meets the target; the nearest has ",
                        BytesText(mixture.size_bytes()),
                        " and a lowest SQNR of ",
                        DecibelText(mixture.min_sqnr_db()), " dB");
  }

  // What `quantize --spec @FILE` reads.
  absl::Status WriteMixture() const {
    absl::StatusOr<files::AtomicFile> file = files::AtomicFile::Create(
        options_.output.path, options_.output.if_exists());
    if (!file.ok()) return file.status();
    std::string text;
    for (const auto& choice : summary_.mixture().choices()) {
      absl::StrAppend(&text, choice.tensor(), "=",
                      SpecText(choice.spec_index()), "\n");
    }
    const absl::Status status = file->Append(text);
    return status.ok() ? file->Commit() : status;
  }

  void Report(bool is_written) {
    Json totals = Json::array();
    Table total_table;
    total_table.AddColumn("SPEC", Table::Align::kLeft);
    total_table.AddColumn("SIZE", Table::Align::kBytes);
    total_table.AddColumn("SUM N/S", Table::Align::kRight);
    total_table.AddColumn("FAILED", Table::Align::kRight);
    total_table.AddColumn("LOWEST DB", Table::Align::kRight);
    for (const v1::SweepTotal& total : summary_.totals()) {
      totals.push_back({{"spec_index", total.spec_index()},
                        {"spec", SpecText(total.spec_index())},
                        {"size_bytes", total.size_bytes()},
                        {"min_sqnr_db", total.min_sqnr_db()},
                        {"min_sqnr_tensor", total.min_sqnr_tensor()},
                        {"noise_to_signal_sum", total.noise_to_signal_sum()},
                        {"failed_count", total.failed_count()}});
      total_table.AddRow(
          {SpecText(total.spec_index()), BytesCell(total.size_bytes()),
           NumberText(total.noise_to_signal_sum()),
           CountText(total.failed_count()), DecibelText(total.min_sqnr_db())});
      if (!total.min_sqnr_tensor().empty()) {
        total_table.AddLine(
            absl::StrCat("  lowest in ", total.min_sqnr_tensor()));
      }
    }
    Json choices = Json::array();
    Table mixture_table;
    mixture_table.AddColumn("TENSOR", Table::Align::kLeft);
    mixture_table.AddColumn("SPEC", Table::Align::kLeft);
    const v1::SweepMixture& mixture = summary_.mixture();
    for (const auto& choice : mixture.choices()) {
      choices.push_back({{"tensor", choice.tensor()},
                         {"spec_index", choice.spec_index()},
                         {"spec", SpecText(choice.spec_index())}});
      mixture_table.AddRow({choice.tensor(), SpecText(choice.spec_index())});
    }
    if (session_.json) {
      Json json = {{"model", options_.name.model},
                   {"revision", options_.name.revision},
                   {"tensors", tensors_},
                   {"totals", totals}};
      if (summary_.has_mixture()) {
        json["mixture"] = {
            {"choices", choices},
            {"size_bytes", mixture.size_bytes()},
            {"min_sqnr_db", mixture.min_sqnr_db()},
            {"noise_to_signal_sum", mixture.noise_to_signal_sum()},
            {"target_met", mixture.target_met()},
            {"written", is_written}};
      }
      return session_.PrintJson(json);
    }
    const bool bold = StdoutHasStyle();
    session_.Print(table_.Render(bold));
    if (!total_table.empty()) {
      session_.Print(absl::StrCat("\n", total_table.Render(bold)));
    }
    if (summary_.has_mixture()) {
      session_.Print(absl::StrCat(
          "\n", mixture_table.Render(bold), BytesText(mixture.size_bytes()),
          ", lowest ", DecibelText(mixture.min_sqnr_db()),
          " dB, sum of noise/signal ",
          NumberText(mixture.noise_to_signal_sum()),
          is_written
              ? absl::StrCat(", written to ", Printable(options_.output.path))
              : "",
          "\n"));
    }
    PrintTensorErrors(errors_, &session_);
  }

  const Options& options_;
  Session& session_;
  Json tensors_ = Json::array();
  Table table_;
  // Of tensors, and of one spec of a tensor.
  std::vector<TensorError> errors_;
  v1::SweepSummary summary_;
};

}  // namespace

void AddSweepCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "sweep",
      "Predict the error of many specs from stored statistics, rank them, and "
      "choose one for each tensor");
  const auto options = std::make_shared<Options>();
  options->name.AddOptions(command, /*required=*/true);
  command
      ->AddOption(
          "--spec", &options->spec.specs, "SPEC",
          "A candidate, such as int4:group:32:mse. May be repeated; see "
          "quantctl help specs")
      ->Suggest(FormatNames())
      ->Required();
  options->spec.AddCodebookOption(command);
  command->AddOption("--pattern", &options->patterns, "PATTERN",
                     "Only tensors whose name matches (* and ?); may be "
                     "repeated");
  Option* const min_sqnr = command->AddOption(
      "--min-sqnr", &options->min_sqnr_db, "DB",
      "Choose the fewest bytes with at least this expected SQNR in every "
      "tensor");
  Option* const max_bytes =
      command
          ->AddOption("--max-bytes", &options->max_bytes, "N",
                      "Choose the least noise with at most this many bytes of "
                      "codes and scales")
          ->Bytes();
  Option* const max_bits =
      command
          ->AddOption("--max-bits-per-element", &options->max_bits_per_element,
                      "X",
                      "The same, as bits of codes and scales for each element")
          ->Positive();
  command->AddAlternatives("Mixture", {min_sqnr, max_bytes, max_bits});
  Option* const output = options->output.AddOptions(
      command,
      "Write the mixture as TENSOR=SPEC lines, for quantize --spec @FILE; - "
      "for standard output");
  command->AddExample(
      "quantctl sweep --model acme/net --revision weights \\\n"
      "  --spec int8:per-channel --spec int4:group:32 --spec nf4 \\\n"
      "  --max-bits-per-element 5 -o mixture.txt");
  command->AddNote(
      "Specs can be in any blocks that are made of those of the statistics: "
      "statistics of group:16 serve all. Those take 3 times the size of a "
      "float32 tensor, and a sweep reads them all; statistics of per-channel "
      "take less than half of it.");
  command->AddNote(
      "SUM N/S is the noise power by the signal power of each tensor, added up "
      "over all tensors. It ranks specs on the same tensors and may pass 1; "
      "for one tensor, SQNR is -10 log10 of it.");
  command->OnRun([=] {
    // There is nothing to write without a target.
    if (output->IsGiven() && !min_sqnr->IsGiven() && !max_bytes->IsGiven() &&
        !max_bits->IsGiven()) {
      return session->FailUsage(
          ArgumentInvalidError("expected --min-sqnr, --max-bytes or "
                               "--max-bits-per-element with -o"));
    }
    Sweeper(*options, session).Run();
  });
}

}  // namespace quantd::cli
