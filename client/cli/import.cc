#include <cerrno>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/compressed_tensors.h"
#include "client/cli/interchange.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "client/cli/tensor_input.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/files/errors.h"
#include "client/files/onnx_model.h"
#include "client/files/shard_index.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

struct Options {
  NameOptions name;
  std::string file;
  std::string format = "auto";
  std::string tensors;
  std::vector<std::string> block_sizes;
  std::optional<int> axis;
  bool dry_run = false;
};

bool IsOnnxPath(absl::string_view path) {
  return absl::EndsWithIgnoreCase(path, ".onnx");
}

// Hints of the file that has the tensors.
absl::Status AddShapes(const std::string& path,
                       v1::ImportEncodingsRequest* request) {
  const auto add = [request](const std::string& name, const auto& shape) {
    v1::TensorHint* const hint = request->add_hints();
    hint->set_pattern(name);
    for (const int64_t size : shape) hint->add_shape(size);
  };
  if (IsOnnxPath(path)) {
    const absl::StatusOr<files::OnnxModel> model = files::OnnxModel::Open(path);
    if (!model.ok()) return model.status();
    for (const files::OnnxModel::Weight& weight : model->weights()) {
      add(weight.name, weight.shape);
    }
    return absl::OkStatus();
  }
  const absl::StatusOr<TensorInput> input = TensorInput::Open(path);
  if (!input.ok()) return input.status();
  for (const files::FileTensor& tensor : input->tensors()) {
    add(tensor.name, tensor.shape);
  }
  return absl::OkStatus();
}

// PATTERN=N,N,... of --block-size.
absl::Status AddBlockSize(const std::string& text,
                          v1::ImportEncodingsRequest* request) {
  const size_t equals = text.rfind('=');
  v1::TensorHint* const hint = request->add_hints();
  hint->set_pattern(equals == std::string::npos ? "*" : text.substr(0, equals));
  const absl::string_view sizes =
      equals == std::string::npos ? absl::string_view(text)
                                  : absl::string_view(text).substr(equals + 1);
  for (const absl::string_view size : absl::StrSplit(sizes, ',')) {
    int64_t value = 0;
    if (!absl::SimpleAtoi(size, &value) || value < 0) {
      return ArgumentInvalidError(absl::StrCat(
          "expected --block-size [PATTERN=]N,N,..., got \"", text, "\""));
    }
    hint->add_block_size(value);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadText(const std::string& path) {
  if (path == "-") {
    return std::string(std::istreambuf_iterator<char>(std::cin), {});
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return files::FileUnreadableError(path, errno);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void Report(const Options& options, const v1::ImportEncodingsResponse& response,
            Session* session) {
  const std::vector<v1::InterchangeLoss> losses(response.losses().begin(),
                                                response.losses().end());
  if (AnyLeftOut(losses)) session->Note(kServerError);
  const std::string format = InterchangeFormatName(response.format());
  if (session->json) {
    return session->PrintJson({{"model", options.name.model},
                               {"revision", options.name.revision},
                               {"format", format},
                               {"dry_run", options.dry_run},
                               {"encoding_count", response.encoding_count()},
                               {"loss_count", response.loss_count()},
                               {"losses", LossesJson(losses)}});
  }
  PrintLosses(losses, *session);
  session->Print(
      absl::StrCat(CountText(response.encoding_count()), " encodings of ",
                   format, options.dry_run ? " would be" : "", " stored under ",
                   Printable(options.name.model), "\n"));
}

// The encodings of a compressed-tensors model, which are in its tensors.
void ImportCompressed(const Options& options, Session* session) {
  const absl::StatusOr<TensorInput> input = TensorInput::Open(options.file);
  if (!input.ok()) return session->Fail(input.status());
  const absl::StatusOr<std::vector<QuantizedTensor>> tensors =
      ReadCompressed(*input, options.file);
  if (!tensors.ok()) return session->Fail(tensors.status());
  if (tensors->empty()) {
    return session->Fail(files::FileMalformedError(
        options.file,
        "expected a compressed-tensors model with its config.json"));
  }
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  v1::ImportEncodingsResponse response;
  response.set_format(v1::INTERCHANGE_FORMAT_COMPRESSED_TENSORS);
  for (const QuantizedTensor& tensor : *tensors) {
    if (!options.dry_run) {
      const absl::StatusOr<v1::StoredEncoding> stored = client->PutEncoding(
          options.name.NameOf(tensor.name), tensor.encoding, "");
      if (!stored.ok()) {
        if (ExitCodeOf(stored.status()) == kUnreachable) {
          return session->Fail(stored.status());
        }
        v1::InterchangeLoss* const loss = response.add_losses();
        loss->set_tensor(tensor.name);
        loss->set_what(std::string(stored.status().message()));
        loss->set_left_out(true);
        continue;
      }
    }
    response.set_encoding_count(response.encoding_count() + 1);
  }
  response.set_loss_count(static_cast<uint64_t>(response.losses_size()));
  Report(options, response, session);
}

void Run(const Options& options, Session* session) {
  if (files::IsFolder(options.file) ||
      absl::EndsWithIgnoreCase(options.file, ".safetensors")) {
    return ImportCompressed(options, session);
  }
  v1::ImportEncodingsRequest request;
  request.set_model(options.name.model);
  request.set_revision(options.name.revision);
  request.set_dry_run(options.dry_run);
  const absl::StatusOr<v1::InterchangeFormat> format =
      ParseInterchangeFormat(options.format);
  if (!format.ok()) return session->FailUsage(format.status());
  request.set_format(*format);
  for (const std::string& block_size : options.block_sizes) {
    const absl::Status status = AddBlockSize(block_size, &request);
    if (!status.ok()) return session->FailUsage(status);
  }
  if (!options.tensors.empty()) {
    const absl::Status status = AddShapes(options.tensors, &request);
    if (!status.ok()) return session->Fail(status);
  }
  if (options.axis.has_value()) {
    v1::TensorHint* const hint = request.add_hints();
    hint->set_pattern("*");
    hint->set_axis(*options.axis);
  }
  const absl::StatusOr<std::string> text = ReadText(options.file);
  if (!text.ok()) return session->Fail(text.status());
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  const absl::StatusOr<v1::ImportEncodingsResponse> response =
      client->ImportEncodings(std::move(request), *text);
  if (!response.ok()) {
    session->Fail(response.status());
    if (ErrorReason(response.status()) == "AXIS_UNKNOWN" && !session->json) {
      session->PrintError(
          "quantctl: --tensors FILE takes shapes from the model, --axis N or "
          "--block-size PATTERN=N,N,... say it for all");
    }
    return;
  }
  Report(options, *response, session);
}

}  // namespace

void AddImportCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "import",
      "Store the encodings of a file: our own JSON, AIMET encodings, ONNX "
      "parameters, or a compressed-tensors model; exits with 1 when a tensor "
      "had to be left out");
  const auto options = std::make_shared<Options>();
  command
      ->AddArgument("file", &options->file, "FILE",
                    "JSON file, - for stdin; or the folder or safetensors file "
                    "of a compressed-tensors model")
      ->Required();
  options->name.AddOptions(command, /*required=*/true);
  std::vector<std::string> formats = InterchangeFormatNames();
  formats.emplace_back("auto");
  command
      ->AddOption("--format", &options->format, "",
                  "Format of the file; auto tells it from the file")
      ->OneOf(formats)
      ->ShowDefault();
  command->AddOption("--tensors", &options->tensors, "FILE",
                     "Where the shapes of the tensors are, for formats that "
                     "do not say along which dimension scales lie: safetensors "
                     "file or folder, or ONNX model");
  command->AddOption("--axis", &options->axis, "N",
                     "Dimension of the channels where the shape leaves "
                     "several");
  command->AddOption("--block-size", &options->block_sizes, "TEXT",
                     "Block size of the tensors that match: "
                     "[PATTERN=]N,N,...; may be repeated");
  command->AddFlag("--dry-run", &options->dry_run,
                   "Check the file and store nothing");
  command->OnRun([options, session] { Run(*options, session); });
}

}  // namespace quantd::cli
