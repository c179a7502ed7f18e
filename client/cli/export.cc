#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/imatrix_export.h"
#include "client/cli/interchange.h"
#include "client/cli/onnx_export.h"
#include "client/cli/output_options.h"
#include "client/cli/printable.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "client/cli/tensor_notes.h"
#include "client/cli/tensor_options.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/files/atomic_file.h"
#include "client/jobs/output.h"
#include "client/jobs/revision_name.h"
#include "client/jobs/selection.h"
#include "client/models/text.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

struct ExportOptions {
  jobs::RevisionName name;
  std::string format = "json";
  jobs::OutputOptions output;
  std::vector<std::string> include;
  std::vector<std::string> parameters;
  // Only for imatrix.
  std::string inputs_map;
  std::string onnx;
  std::vector<std::string> map;
  bool float_biases = false;
  bool names = false;
};

std::vector<std::string> ExportFormatNames() {
  std::vector<std::string> names = InterchangeFormatNames();
  names.push_back(kImatrix);
  return names;
}

absl::Status WriteOutput(const jobs::OutputOptions& output, int spool,
                         uint64_t size_bytes) {
  absl::StatusOr<files::AtomicFile> file =
      files::AtomicFile::Create(output.path, output.if_exists());
  if (!file.ok()) return file.status();
  const absl::Status status = file->AppendFrom(spool, 0, size_bytes);
  return status.ok() ? file->Commit() : status;
}

void ExportEncodings(const ExportOptions& options, Session* session) {
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
  absl::Status status = CheckOutputFile(options.output, {}, ".json", session);
  if (!status.ok()) return FailEarly(status, session);
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  status = jobs::CheckStoredPatterns("--include", options.include,
                                     jobs::Stored::kEncodings, options.name,
                                     client.get());
  if (!status.ok()) return FailEarly(status, session);
  // Kept until it is whole: standard output has nothing of one that fails.
  const absl::StatusOr<int> spool = files::OpenUnnamedFile(options.output.path);
  if (!spool.ok()) return session->Fail(spool.status());
  const absl::Cleanup close_spool = [fd = *spool] { close(fd); };
  std::vector<v1::InterchangeLoss> losses;
  uint64_t encoding_count = 0;
  uint64_t size_bytes = 0;
  absl::Status write_status;
  status = client->ExportEncodings(
      request, [&](const v1::ExportEncodingsResponse& response) {
        write_status = files::WriteAll(
            *spool,
            {reinterpret_cast<const uint8_t*>(response.data().data()),
             response.data().size()},
            options.output.path);
        size_bytes += response.data().size();
        encoding_count = response.encoding_count();
        losses.insert(losses.end(), response.losses().begin(),
                      response.losses().end());
        return write_status.ok();
      });
  status.Update(write_status);
  if (status.ok() && encoding_count == 0) {
    PrintLosses(losses, *session);
    session->Note(kServerError);
    return session->PrintError(absl::StrCat("quantctl: no encoding is left; ",
                                            options.output.path,
                                            " is not written"));
  }
  if (status.ok()) status = WriteOutput(options.output, *spool, size_bytes);
  if (!status.ok()) return session->Fail(status);
  if (AnyLeftOut(losses)) session->Note(kServerError);
  // Often typed without -o: the document alone.
  if (session->stdout_is_data) return PrintLosses(losses, *session);
  if (session->json) {
    return session->PrintJson({{"model", options.name.model},
                               {"revision", options.name.revision},
                               {"format", options.format},
                               {"output", options.output.path},
                               {"bytes", size_bytes},
                               {"encoding_count", encoding_count},
                               {"losses", LossesJson(losses)}});
  }
  PrintLosses(losses, *session);
  session->Print(absl::StrCat(CountText(encoding_count), " encodings, ",
                              BytesText(size_bytes), ", written to ",
                              Printable(options.output.path), "\n"));
}

void RunExport(const ExportOptions& options, Session* session) {
  if (!options.inputs_map.empty() && options.format != kImatrix) {
    return session->FailUsage(ArgumentInvalidError(
        absl::StrCat("expected --inputs-map with --format ", kImatrix)));
  }
  if (options.format == kImatrix) {
    return ExportImatrix(options.name, options.include, options.inputs_map,
                         options.output, session);
  }
  if (options.onnx.empty()) return ExportEncodings(options, session);
  OnnxExport job;
  job.name = options.name;
  job.model_path = options.onnx;
  job.output = options.output;
  job.include = options.include;
  job.map = options.map;
  job.keeps_biases = options.float_biases;
  job.prints_names = options.names;
  ExportOnnx(job, session);
}

}  // namespace

void AddExportCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "export",
      "Write the encodings of a revision as a file of another project, or into "
      "an ONNX model; exits with 1 when a tensor had to be left out");
  const auto options = std::make_shared<ExportOptions>();
  AddRevisionOptions(command, /*required=*/true, &options->name);
  Option* const format =
      command
          ->AddOption("--format", &options->format, "",
                      "Format of the file; json is our own and holds "
                      "everything; imatrix is llama.cpp's importance matrix, "
                      "of the moments that are stored of inputs")
          ->OneOf(ExportFormatNames())
          ->ShowDefault();
  Option* const onnx =
      command
          ->AddOption("--onnx", &options->onnx, "FILE",
                      "ONNX model to put QuantizeLinear and DequantizeLinear "
                      "into, in place of --format")
          ->Excludes(format);
  options->output.path = std::string(files::kStandardOutput);
  onnx->Needs(AddOutputOptions(
      command, "File to write; - for standard output, the default",
      &options->output));
  command->AddOption("--include", &options->include, "PATTERN",
                     "Only tensors whose name matches this pattern (* and ?); "
                     "may be repeated");
  command
      ->AddOption("--parameter", &options->parameters, "PATTERN",
                  "Tensors that are parameters, for AIMET 0.6.1 and 1.0.0; "
                  "default *weight, *bias, and all of more than one scale")
      ->Excludes(onnx);
  command->AddOption("--inputs-map", &options->inputs_map, "FILE",
                     "With --format imatrix, a JSON object that says of "
                     "weights under which name their inputs are. By default "
                     "those of MODULE.weight are MODULE.input, which q/k/v and "
                     "gate/up share if only one of them has some");
  command
      ->AddOption("--map", &options->map, "TORCH=ONNX",
                  "With --onnx, where a tensor is in the model if it cannot be "
                  "told from the graph; may be repeated")
      ->Needs(onnx);
  command
      ->AddFlag(
          "--float-biases", &options->float_biases,
          "With --onnx, leave biases as they are; by default those of "
          "layers whose weight and input become integers are int32, under "
          "the product of the two scales, as kernels for integers take "
          "them")
      ->Needs(onnx);
  command
      ->AddFlag("--names", &options->names,
                "With --onnx, print where each tensor was found, and which "
                "inputs of layers are not quantized")
      ->Needs(onnx);
  command->AddExample("quantctl export --model acme/net -o net.json");
  command->AddExample(
      "quantctl export --model acme/net --format aimet-1.0.0 -o net.encodings");
  command->AddExample(
      "quantctl export --model acme/net --onnx model.onnx -o model.qdq.onnx");
  command->AddExample(
      "quantctl export --model acme/net --format imatrix -o imatrix.gguf",
      "for llama-quantize --imatrix, from quantctl calibrate --moments");
  command->OnRun([options, session] { RunExport(*options, session); });
}

}  // namespace quantd::cli
