#include <cstdint>
#include <cstdio>
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
#include "client/cli/interchange.h"
#include "client/cli/onnx_export.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "client/cli/tensor_input.h"
#include "client/cpp/client.h"
#include "client/files/atomic_file.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

struct Options {
  NameOptions name;
  std::string format = "json";
  std::string output;
  std::vector<std::string> include;
  std::vector<std::string> parameters;
  std::string onnx;
};

// Writes to a file, or to stdout.
class Output {
 public:
  // Errors: FILE_UNWRITABLE.
  absl::Status Open(const std::string& path) {
    if (path.empty() || path == "-") return absl::OkStatus();
    absl::StatusOr<files::AtomicFile> file = files::AtomicFile::Create(path);
    if (!file.ok()) return file.status();
    file_.emplace(*std::move(file));
    return absl::OkStatus();
  }

  absl::Status Append(const std::string& text) {
    if (file_.has_value()) return file_->Append(text);
    std::fwrite(text.data(), 1, text.size(), stdout);
    return absl::OkStatus();
  }

  absl::Status Commit() {
    return file_.has_value() ? file_->Commit() : absl::OkStatus();
  }

 private:
  std::optional<files::AtomicFile> file_;
};

void ExportEncodings(const Options& options, Session* session) {
  const bool to_stdout = options.output.empty() || options.output == "-";
  v1::ExportEncodingsRequest request;
  request.set_model(options.name.model);
  request.set_revision(options.name.revision);
  const absl::StatusOr<v1::InterchangeFormat> format =
      ParseInterchangeFormat(options.format);
  if (!format.ok()) return session->FailUsage(format.status());
  request.set_format(*format);
  for (const std::string& pattern : options.include) {
    request.add_patterns(pattern);
  }
  for (const std::string& pattern : options.parameters) {
    request.add_parameter_patterns(pattern);
  }
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  Output output;
  absl::Status status = output.Open(options.output);
  if (!status.ok()) return session->Fail(status);
  std::vector<v1::InterchangeLoss> losses;
  uint64_t encoding_count = 0;
  uint64_t size_bytes = 0;
  absl::Status write_status;
  status = client->ExportEncodings(
      request, [&](const v1::ExportEncodingsResponse& response) {
        write_status = output.Append(response.data());
        size_bytes += response.data().size();
        encoding_count = response.encoding_count();
        losses.insert(losses.end(), response.losses().begin(),
                      response.losses().end());
        return write_status.ok();
      });
  status.Update(write_status);
  if (status.ok()) status = output.Commit();
  if (!status.ok()) return session->Fail(status);
  if (AnyLeftOut(losses)) session->Note(kServerError);
  if (to_stdout) return PrintLosses(losses, *session);
  if (session->json) {
    return session->PrintJson({{"model", options.name.model},
                               {"revision", options.name.revision},
                               {"format", options.format},
                               {"output", options.output},
                               {"bytes", size_bytes},
                               {"encoding_count", encoding_count},
                               {"losses", LossesJson(losses)}});
  }
  PrintLosses(losses, *session);
  session->Print(absl::StrCat(CountText(encoding_count), " encodings, ",
                              BytesText(size_bytes), ", written to ",
                              Printable(options.output), "\n"));
}

void Run(const Options& options, Session* session) {
  if (options.onnx.empty()) return ExportEncodings(options, session);
  OnnxExport job;
  job.name = options.name;
  job.model_path = options.onnx;
  job.output_path = options.output;
  job.include = options.include;
  ExportOnnx(job, session);
}

}  // namespace

void AddExportCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "export",
      "Write the encodings of a revision as a file of another project, or into "
      "an ONNX model; exits with 1 when a tensor had to be left out");
  const auto options = std::make_shared<Options>();
  options->name.AddOptions(command, /*required=*/true);
  Option* const format =
      command
          ->AddOption("--format", &options->format, "",
                      "Format of the file; json is our own and holds "
                      "everything")
          ->OneOf(InterchangeFormatNames())
          ->ShowDefault();
  Option* const onnx =
      command
          ->AddOption("--onnx", &options->onnx, "FILE",
                      "ONNX model to put QuantizeLinear and DequantizeLinear "
                      "into, in place of --format")
          ->Excludes(format);
  Option* const output = command->AddOption(
      "-o,--output", &options->output, "FILE", "File to write; default stdout");
  onnx->Needs(output);
  command->AddOption("--include", &options->include, "PATTERN",
                     "Only tensors whose name matches this pattern (* and ?); "
                     "may be repeated");
  command
      ->AddOption("--parameter", &options->parameters, "PATTERN",
                  "Tensors that are parameters, for AIMET 0.6.1 and 1.0.0; "
                  "default *weight, *bias, and all of more than one scale")
      ->Excludes(onnx);
  command->OnRun([options, session] { Run(*options, session); });
}

}  // namespace quantd::cli
