#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/progress.h"
#include "client/cli/session.h"
#include "client/cli/spec_syntax.h"
#include "client/cli/table.h"
#include "client/cli/tensor_input.h"
#include "client/cli/tensor_loop.h"
#include "client/cpp/client.h"
#include "client/files/safetensors.h"

namespace quantd::cli {
namespace {

struct Options {
  std::string input;
  NameOptions name;
  SpecOptions spec;
  TensorFilter filter;
  std::vector<std::string> candidates;
};

Json MetricsJson(const v1::CandidateMetrics& candidate) {
  const v1::ErrorMetrics& metrics = candidate.overall();
  return {{"label", candidate.label()},
          {"sqnr_db", metrics.sqnr_db()},
          {"max_absolute_error", metrics.max_absolute_error()},
          {"mean_absolute_error", metrics.mean_absolute_error()},
          {"mean_squared_error", metrics.mean_squared_error()},
          {"max_relative_error", metrics.max_relative_error()},
          {"mean_relative_error", metrics.mean_relative_error()},
          {"cosine_similarity", metrics.cosine_similarity()},
          {"count", metrics.count()},
          {"non_finite_count", metrics.non_finite_count()},
          {"clipped_low_count", metrics.clipped_low_count()},
          {"clipped_high_count", metrics.clipped_high_count()},
          {"zero_flushed_count", metrics.zero_flushed_count()}};
}

// The candidates of the command line, or the one of --format and the like.
absl::StatusOr<std::vector<Candidate>> ParseCandidates(const Options& options) {
  std::vector<Candidate> candidates;
  for (const std::string& text : options.candidates) {
    absl::StatusOr<Candidate> candidate = ParseCandidate(text);
    if (!candidate.ok()) return candidate.status();
    candidates.push_back(*std::move(candidate));
  }
  if (!candidates.empty()) return candidates;
  const absl::StatusOr<SpecTemplate> spec = options.spec.Parse();
  if (!spec.ok()) return spec.status();
  Candidate candidate;
  candidate.spec = *spec;
  candidate.label =
      absl::StrCat(options.spec.format, ":",
                   options.spec.block_size.empty() ? options.spec.granularity
                                                   : options.spec.block_size);
  candidates.push_back(std::move(candidate));
  return candidates;
}

absl::StatusOr<EvaluateJob> MakeJob(const Options& options,
                                    const std::vector<Candidate>& candidates,
                                    const files::FileTensor& tensor) {
  EvaluateJob job;
  job.tensor = MakeTensor(tensor, options.name.NameOf(tensor.name));
  for (const Candidate& candidate : candidates) {
    if (candidate.is_stored) {
      job.candidates.push_back({v1::EncodingReference(), candidate.label});
      continue;
    }
    const absl::StatusOr<EncodingSpec> spec =
        candidate.spec.SpecOf(tensor.shape);
    if (!spec.ok()) return spec.status();
    job.candidates.push_back({*spec, candidate.label});
  }
  return job;
}

void Run(const Options& options, Session* session) {
  const absl::StatusOr<std::vector<Candidate>> candidates =
      ParseCandidates(options);
  if (!candidates.ok()) return session->FailUsage(candidates.status());
  const absl::StatusOr<std::unique_ptr<Client>> client = session->Connect();
  if (!client.ok()) return session->FailUsage(client.status());
  const absl::StatusOr<TensorInput> input = TensorInput::Open(options.input);
  if (!input.ok()) return session->Fail(input.status());

  Json list = Json::array();
  Table table;
  table.AddColumn("TENSOR", Table::Align::kLeft);
  table.AddColumn("SHAPE", Table::Align::kLeft);
  table.AddColumn("DTYPE", Table::Align::kLeft);
  for (const Candidate& candidate : *candidates) {
    table.AddColumn(absl::StrCat(candidate.label, " DB"), Table::Align::kRight);
    table.AddColumn("MAX ERROR", Table::Align::kRight);
  }
  std::vector<std::string> errors;
  const auto fail = [&](const files::FileTensor& tensor,
                        const absl::Status& status) {
    session->Note(kServerError);
    errors.push_back(
        absl::StrCat("quantctl: tensor ", tensor.name, ": ", status.message()));
    list.push_back({{"name", tensor.name},
                    {"shape", tensor.shape},
                    {"dtype", std::string(DtypeName(tensor.dtype))},
                    {"error", ErrorJson(status)}});
    table.AddRow({Printable(tensor.name), ShapeText(tensor.shape),
                  std::string(DtypeName(tensor.dtype)), "failed"});
  };
  std::vector<const files::FileTensor*> selected;
  uint64_t total_bytes = 0;
  for (const files::FileTensor& tensor : input->tensors()) {
    if (!options.filter.Takes(tensor)) continue;
    const absl::Status status = MakeJob(options, *candidates, tensor).status();
    if (!status.ok()) {
      fail(tensor, status);
      continue;
    }
    selected.push_back(&tensor);
    total_bytes += tensor.data.size();
  }
  absl::Status fatal;
  {
    Progress progress(total_bytes, !session->quiet);
    const std::unique_ptr<EvaluateStream> stream = (*client)->OpenEvaluate();
    ForEachTensor(
        stream.get(), selected,
        [&](const files::FileTensor& tensor) {
          return *MakeJob(options, *candidates, tensor);
        },
        [&](const files::FileTensor& tensor,
            const absl::StatusOr<EvaluateResult>& result) {
          progress.Add(tensor.data.size(), tensor.name);
          if (!result.ok()) {
            if (ExitCodeOf(result.status()) == kUnreachable) {
              fatal = result.status();
            }
            fail(tensor, result.status());
            return fatal.ok();
          }
          Json metrics = Json::array();
          std::vector<std::string> row = {Printable(tensor.name),
                                          ShapeText(tensor.shape),
                                          std::string(DtypeName(tensor.dtype))};
          for (const v1::CandidateMetrics& candidate : result->candidates()) {
            metrics.push_back(MetricsJson(candidate));
            row.push_back(DecibelText(candidate.overall().sqnr_db()));
            row.push_back(NumberText(candidate.overall().max_absolute_error()));
          }
          list.push_back({{"name", tensor.name},
                          {"shape", tensor.shape},
                          {"dtype", std::string(DtypeName(tensor.dtype))},
                          {"candidates", std::move(metrics)}});
          table.AddRow(std::move(row));
          return true;
        });
  }
  if (!fatal.ok()) {
    // Not the tensor's but everybody's error.
    session->exit_code = kSuccess;
    return session->Fail(fatal);
  }
  if (session->json) {
    return session->PrintJson({{"input", options.input}, {"tensors", list}});
  }
  session->Print(table.empty() ? "no tensors\n"
                               : table.Render(StdoutHasStyle()));
  for (const std::string& error : errors) session->PrintError(error);
}

}  // namespace

void AddEvaluateCommand(CLI::App* app, Session* session) {
  CLI::App* const command = app->add_subcommand(
      "evaluate",
      "Measure the error of candidate encodings on a file's tensors");
  const auto options = std::make_shared<Options>();
  command->add_option("file", options->input, "safetensors or .npy file")
      ->required()
      ->type_name("FILE");
  command
      ->add_option("--candidate", options->candidates,
                   "FORMAT[:GRANULARITY][:SYMMETRY], e.g. int4:group:32, or "
                   "stored for the server's own; may be repeated. Default: "
                   "the one of --format, --granularity, --symmetry")
      ->allow_extra_args(false)
      ->type_name("CANDIDATE");
  options->name.AddOptions(command, /*required=*/false);
  options->spec.AddOptions(command);
  options->filter.AddOptions(command);
  command->callback([options, session] {
    if (options->name.model.empty()) {
      options->name.model = FileStem(options->input);
    }
    Run(*options, session);
  });
}

}  // namespace quantd::cli
