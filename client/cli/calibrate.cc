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
  bool store = true;
};

Json StatisticsJson(const v1::TensorStatistics& statistics) {
  return {{"count", statistics.count()},
          {"min", statistics.min()},
          {"max", statistics.max()},
          {"nan_count", statistics.nan_count()},
          {"positive_infinity_count", statistics.positive_infinity_count()},
          {"negative_infinity_count", statistics.negative_infinity_count()},
          {"zero_count", statistics.zero_count()}};
}

void Run(const Options& options, Session* session) {
  const absl::StatusOr<SpecTemplate> spec = options.spec.Parse();
  if (!spec.ok()) return session->FailUsage(spec.status());
  const absl::StatusOr<std::unique_ptr<Client>> client = session->Connect();
  if (!client.ok()) return session->FailUsage(client.status());
  const absl::StatusOr<TensorInput> input = TensorInput::Open(options.input);
  if (!input.ok()) return session->Fail(input.status());

  Json list = Json::array();
  Table table;
  table.AddColumn("TENSOR", Table::Align::kLeft);
  table.AddColumn("SHAPE", Table::Align::kLeft);
  table.AddColumn("MIN", Table::Align::kRight);
  table.AddColumn("MAX", Table::Align::kRight);
  table.AddColumn("ZEROS", Table::Align::kRight);
  table.AddColumn("NAN", Table::Align::kRight);
  table.AddColumn("INF", Table::Align::kRight);
  if (options.store) {
    table.AddColumn("SCALES", Table::Align::kRight);
    table.AddColumn("ETAG", Table::Align::kLeft);
  }
  std::vector<std::string> errors;
  const auto fail = [&](const files::FileTensor& tensor,
                        const absl::Status& status) {
    session->Note(kServerError);
    errors.push_back(
        absl::StrCat("quantctl: tensor ", tensor.name, ": ", status.message()));
    list.push_back({{"name", tensor.name},
                    {"shape", tensor.shape},
                    {"error", ErrorJson(status)}});
    table.AddRow({Printable(tensor.name), ShapeText(tensor.shape), "failed"});
  };
  std::vector<const files::FileTensor*> selected;
  uint64_t total_bytes = 0;
  for (const files::FileTensor& tensor : input->tensors()) {
    if (!options.filter.Takes(tensor)) continue;
    const absl::Status status = spec->SpecOf(tensor.shape).status();
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
    const std::unique_ptr<CalibrateStream> stream = (*client)->OpenCalibrate();
    ForEachTensor(
        stream.get(), selected,
        [&](const files::FileTensor& tensor) {
          CalibrateJob job;
          job.tensor = MakeTensor(tensor, options.name.NameOf(tensor.name));
          if (options.store) job.spec = *spec->SpecOf(tensor.shape);
          return job;
        },
        [&](const files::FileTensor& tensor,
            const absl::StatusOr<CalibrateResult>& result) {
          progress.Add(tensor.data.size(), tensor.name);
          if (!result.ok()) {
            if (ExitCodeOf(result.status()) == kUnreachable) {
              fatal = result.status();
            }
            fail(tensor, result.status());
            return fatal.ok();
          }
          const v1::TensorStatistics& statistics = result->statistics();
          Json json = {{"name", tensor.name},
                       {"shape", tensor.shape},
                       {"statistics", StatisticsJson(statistics)}};
          std::vector<std::string> row = {
              Printable(tensor.name),
              ShapeText(tensor.shape),
              NumberText(statistics.min()),
              NumberText(statistics.max()),
              CountText(statistics.zero_count()),
              CountText(statistics.nan_count()),
              CountText(statistics.positive_infinity_count() +
                        statistics.negative_infinity_count())};
          if (result->has_stored_encoding()) {
            const v1::StoredEncoding& stored = result->stored_encoding();
            const int scale_count = stored.encoding().scale_size();
            json["format"] = FormatName(stored.encoding().format());
            json["scale_count"] = scale_count;
            json["etag"] = stored.etag();
            json["generation"] = stored.generation();
            row.push_back(CountText(static_cast<uint64_t>(scale_count)));
            row.push_back(Printable(stored.etag()));
          }
          list.push_back(std::move(json));
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
    return session->PrintJson({{"input", options.input},
                               {"model", options.name.model},
                               {"revision", options.name.revision},
                               {"tensors", list}});
  }
  session->Print(table.empty() ? "no tensors\n"
                               : table.Render(StdoutHasStyle()));
  for (const std::string& error : errors) session->PrintError(error);
}

}  // namespace

void AddCalibrateCommand(CLI::App* app, Session* session) {
  CLI::App* const command = app->add_subcommand(
      "calibrate",
      "Compute the encodings of a file's tensors and keep them on the server");
  const auto options = std::make_shared<Options>();
  command->add_option("file", options->input, "safetensors or .npy file")
      ->required()
      ->type_name("FILE");
  options->name.AddOptions(command, /*required=*/false);
  options->spec.AddOptions(command);
  options->filter.AddOptions(command);
  command->add_flag("--store,!--no-store", options->store,
                    "Keep the encodings (the default); --no-store only shows "
                    "the statistics");
  command->callback([options, session] {
    if (options->name.model.empty()) {
      options->name.model = FileStem(options->input);
    }
    Run(*options, session);
  });
}

}  // namespace quantd::cli
