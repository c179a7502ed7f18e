#include <cstdint>
#include <fstream>
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
#include "client/cli/progress.h"
#include "client/cli/session.h"
#include "client/cli/spec_syntax.h"
#include "client/cli/table.h"
#include "client/cli/tensor_input.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/files/errors.h"
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
  std::string output;
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
    const std::unique_ptr<Client> client = session_.ConnectOrFail();
    if (client == nullptr) return;
    absl::Status status;
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
    if (!options_.output.empty()) {
      status = WriteMixture();
      if (!status.ok()) return session_.Fail(status);
    }
    Report();
  }

 private:
  const std::string& SpecText(uint32_t index) const {
    static const std::string& unknown = *new std::string("unknown");
    return index < options_.spec.specs.size() ? options_.spec.specs[index]
                                              : unknown;
  }

  void AddColumns() {
    table_.AddColumn("TENSOR", Table::Align::kLeft);
    table_.AddColumn("SPEC", Table::Align::kLeft);
    table_.AddColumn("SQNR DB", Table::Align::kRight);
    table_.AddColumn("AT LEAST", Table::Align::kRight);
    table_.AddColumn("SIZE", Table::Align::kRight);
  }

  void AddTensor(const v1::SweepResponse& response) {
    const std::string& name = response.name().tensor();
    Json tensor = {{"name", name}};
    if (response.has_error()) {
      const absl::Status error = FromTensorError(response.error());
      tensor["error"] = ErrorJson(error);
      Note(name, error);
      table_.AddRow({Printable(name), "failed"});
    }
    Json candidates = Json::array();
    bool is_first = true;
    for (const v1::SweepCandidate& candidate : response.candidates()) {
      const std::string& spec = SpecText(candidate.spec_index());
      Json json = {{"spec_index", candidate.spec_index()}, {"spec", spec}};
      std::vector<std::string> row = {is_first ? Printable(name) : "",
                                      Printable(spec)};
      is_first = false;
      if (candidate.has_error()) {
        const absl::Status error = FromTensorError(candidate.error());
        json["error"] = ErrorJson(error);
        Note(absl::StrCat(name, ", ", spec), error);
        row.push_back("failed");
      } else {
        json["prediction"] = PredictionJson(candidate.prediction());
        json["size_bytes"] = candidate.size_bytes();
        row.push_back(DecibelText(candidate.prediction().sqnr_db()));
        row.push_back(DecibelText(candidate.prediction().sqnr_db_low()));
        row.push_back(BytesText(candidate.size_bytes()));
      }
      candidates.push_back(std::move(json));
      table_.AddRow(std::move(row));
    }
    tensor["candidates"] = std::move(candidates);
    tensors_.push_back(std::move(tensor));
  }

  void Note(const std::string& what, const absl::Status& error) {
    errors_.push_back(
        absl::StrCat("quantctl: tensor ", what, ": ", error.message()));
  }

  // What `quantize --spec @FILE` reads.
  absl::Status WriteMixture() const {
    std::ofstream file(options_.output, std::ios::binary);
    for (const auto& choice : summary_.mixture().choices()) {
      file << choice.tensor() << "=" << SpecText(choice.spec_index()) << "\n";
    }
    file.close();
    if (!file) return files::FileUnwritableError(options_.output, errno);
    return absl::OkStatus();
  }

  void Report() {
    Json totals = Json::array();
    Table total_table;
    total_table.AddColumn("SPEC", Table::Align::kLeft);
    total_table.AddColumn("SIZE", Table::Align::kRight);
    total_table.AddColumn("LOWEST DB", Table::Align::kRight);
    total_table.AddColumn("OF TENSOR", Table::Align::kLeft);
    total_table.AddColumn("NOISE/SIGNAL", Table::Align::kRight);
    total_table.AddColumn("FAILED", Table::Align::kRight);
    for (const v1::SweepTotal& total : summary_.totals()) {
      totals.push_back({{"spec_index", total.spec_index()},
                        {"spec", SpecText(total.spec_index())},
                        {"size_bytes", total.size_bytes()},
                        {"min_sqnr_db", total.min_sqnr_db()},
                        {"min_sqnr_tensor", total.min_sqnr_tensor()},
                        {"noise_to_signal_sum", total.noise_to_signal_sum()},
                        {"failed_count", total.failed_count()}});
      total_table.AddRow({Printable(SpecText(total.spec_index())),
                          BytesText(total.size_bytes()),
                          DecibelText(total.min_sqnr_db()),
                          Printable(total.min_sqnr_tensor()),
                          NumberText(total.noise_to_signal_sum()),
                          CountText(total.failed_count())});
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
      mixture_table.AddRow({Printable(choice.tensor()),
                            Printable(SpecText(choice.spec_index()))});
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
            {"target_met", mixture.target_met()}};
      }
      return session_.PrintJson(json);
    }
    const bool bold = StdoutHasStyle();
    session_.Print(table_.empty() ? "no tensors\n" : table_.Render(bold));
    if (!total_table.empty()) {
      session_.Print(absl::StrCat("\n", total_table.Render(bold)));
    }
    if (summary_.has_mixture()) {
      session_.Print(absl::StrCat(
          "\n", mixture_table.Render(bold), BytesText(mixture.size_bytes()),
          ", lowest ", DecibelText(mixture.min_sqnr_db()), " dB, noise/signal ",
          NumberText(mixture.noise_to_signal_sum()),
          mixture.target_met() ? "" : "; no choice meets the target", "\n"));
    }
    for (const std::string& error : errors_) session_.PrintError(error);
  }

  const Options& options_;
  Session& session_;
  Json tensors_ = Json::array();
  Table table_;
  std::vector<std::string> errors_;
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
      ->AddOption("--spec", &options->spec.specs, "SPEC",
                  "FORMAT[:GRANULARITY][:SYMMETRY][:METHOD[=PARAMETER]], e.g. "
                  "int4:group:32:mse; may be repeated")
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
  command->AddOption("-o,--output", &options->output, "FILE",
                     "Write the mixture as TENSOR=SPEC lines, for quantize "
                     "--spec @FILE");
  command->OnRun([options, session] { Sweeper(*options, session).Run(); });
}

}  // namespace quantd::cli
