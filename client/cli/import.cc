#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/interchange.h"
#include "client/cli/printable.h"
#include "client/cli/session.h"
#include "client/cli/tensor_options.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/cpp/text_file.h"
#include "client/files/coded_tensor.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/gguf.h"
#include "client/files/gguf_types.h"
#include "client/files/onnx_tensors.h"
#include "client/files/safetensors.h"
#include "client/files/shard_index.h"
#include "client/jobs/revision_name.h"
#include "client/models/compressed_reader.h"
#include "client/models/plain_input.h"
#include "client/models/quantized_checkpoint.h"
#include "client/models/tensor_input.h"
#include "client/models/text.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

struct ImportOptions {
  jobs::RevisionName name;
  std::string file;
  std::string format = "auto";
  std::string tensors;
  std::vector<std::string> block_sizes;
  std::optional<int> axis;
  bool dry_run = false;
};

// Hints of the file that has the tensors.
absl::Status AddShapes(const std::string& path,
                       v1::ImportEncodingsRequest* request) {
  const auto add = [request](const std::string& name, const auto& shape) {
    v1::TensorHint* const hint = request->add_hints();
    hint->set_pattern(name);
    for (const int64_t size : shape) hint->add_shape(size);
  };
  if (IsOnnxPath(path)) {
    // The files of its data may be elsewhere.
    const absl::StatusOr<files::OnnxTensors> model =
        files::OnnxTensors::Open(path, files::OnnxTensors::OtherFiles::kLeave);
    if (!model.ok()) return model.status();
    for (const files::FileTensor& tensor : model->tensors()) {
      add(tensor.name, tensor.shape);
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

void ReportImport(const ImportOptions& options,
                  const v1::ImportEncodingsResponse& response,
                  const std::string& format, Session* session) {
  const std::vector<v1::InterchangeLoss> losses(response.losses().begin(),
                                                response.losses().end());
  const uint64_t untold_count = response.loss_count() - losses.size();
  // The server drops others before those of tensors that are left out.
  const bool may_leave_out =
      untold_count != 0 &&
      absl::c_all_of(losses, [](const v1::InterchangeLoss& loss) {
        return loss.left_out();
      });
  if (AnyLeftOut(losses) || may_leave_out) session->Note(kServerError);
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
  if (untold_count != 0) {
    session->PrintError(absl::StrCat(
        "quantctl: ", CountText(untold_count), " more losses are not told; ",
        may_leave_out ? "tensors of these may be left out"
                      : "none of these tensors is left out"));
  }
  session->Print(
      absl::StrCat(CountText(response.encoding_count()), " encodings of ",
                   format, options.dry_run ? " would be" : "", " stored under ",
                   Printable(options.name.model), "\n"));
}

// The outcome of each tensor of a file, in a response as if the server had read
// the file.
class ImportByTensor {
 public:
  ImportByTensor(const ImportOptions& options, Client* client)
      : options_(options), client_(client) {}

  v1::ImportEncodingsResponse& response() { return response_; }

  void AddLoss(const std::string& tensor, absl::string_view what,
               bool left_out) {
    v1::InterchangeLoss* const loss = response_.add_losses();
    loss->set_tensor(tensor);
    loss->set_what(std::string(what));
    loss->set_left_out(left_out);
    response_.set_loss_count(response_.loss_count() + 1);
  }

  // Stores an encoding. Errors: only those that are not the tensor's, but
  // everybody's.
  absl::Status Store(const std::string& tensor, const Encoding& encoding) {
    if (!options_.dry_run) {
      const absl::StatusOr<v1::StoredEncoding> stored =
          client_->PutEncoding(options_.name.NameOf(tensor), encoding, "");
      if (!stored.ok()) {
        if (ExitCodeOf(stored.status()) == kUnreachable) {
          return stored.status();
        }
        AddLoss(tensor, stored.status().message(), /*left_out=*/true);
        return absl::OkStatus();
      }
    }
    response_.set_encoding_count(response_.encoding_count() + 1);
    return absl::OkStatus();
  }

 private:
  const ImportOptions& options_;
  Client* const client_;
  v1::ImportEncodingsResponse response_;
};

// A type of GGUF whose blocks are codes of a format of quantd: d in float16,
// then codes of the format's range.
struct GgufFormat {
  absl::string_view type;
  v1::NumberFormat format;
  // Under negative scales codes go up to one more: the scales are then positive
  // and the format the next wider one, with codes to both sides alike.
  v1::NumberFormat wider_format;
  int32_t most;
};
constexpr GgufFormat kGgufFormats[] = {
    {"q8_0", v1::NUMBER_FORMAT_INT8, v1::NUMBER_FORMAT_INT9, 128},
    {"q5_0", v1::NUMBER_FORMAT_INT5, v1::NUMBER_FORMAT_INT6, 16},
    {"q4_0", v1::NUMBER_FORMAT_INT4, v1::NUMBER_FORMAT_INT5, 8},
};

// Null for a type whose blocks are no codes of a format.
const GgufFormat* FindGgufFormat(const files::GgufType& type) {
  for (const GgufFormat& row : kGgufFormats) {
    if (row.type == type.name) return &row;
  }
  return nullptr;
}

// The encoding of the blocks of a GGUF file. A scale of 0 is 1, whose codes are
// all 0.
Encoding GgufEncoding(const files::GgufTensor& tensor, const GgufFormat& format,
                      bool* is_finite, bool* is_widened) {
  const size_t block_bytes = static_cast<size_t>(tensor.type->block_bytes);
  std::vector<float> scales(tensor.data.size() / block_bytes);
  *is_finite = true;
  *is_widened = false;
  for (size_t b = 0; b < scales.size(); ++b) {
    const float scale = files::ReadHalf(&tensor.data[b * block_bytes]);
    *is_finite = *is_finite && std::isfinite(scale);
    *is_widened = *is_widened || scale < 0;
    scales[b] = scale == 0 ? 1 : std::fabs(scale);
  }
  Encoding encoding;
  encoding.set_format(*is_widened ? format.wider_format : format.format);
  if (*is_widened) {
    encoding.set_qmin(-format.most);
    encoding.set_qmax(format.most);
  }
  const int64_t block = tensor.type->block_elements;
  for (size_t d = 1; d < tensor.shape.size(); ++d) encoding.add_block_size(1);
  encoding.add_block_size(block);
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    const bool is_last = d + 1 == tensor.shape.size();
    encoding.add_scale_shape(is_last ? tensor.shape[d] / block
                                     : tensor.shape[d]);
  }
  encoding.mutable_scale()->Assign(scales.begin(), scales.end());
  encoding.set_scale_type(v1::SCALE_TYPE_FLOAT16);
  return encoding;
}

// The types of kGgufFormats.
std::string GgufFormatNames() {
  return absl::StrJoin(kGgufFormats, ", ",
                       [](std::string* text, const GgufFormat& row) {
                         absl::StrAppend(text, row.type);
                       });
}

void ImportGguf(const ImportOptions& options, Session* session) {
  const absl::StatusOr<files::GgufReader> reader =
      files::GgufReader::Open(options.file);
  if (!reader.ok()) return session->Fail(reader.status());
  const absl::Status whole = reader->CheckWhole(options.file);
  if (!whole.ok()) return session->Fail(whole);
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  ImportByTensor imported(options, client.get());
  for (const files::GgufTensor& tensor : reader->tensors()) {
    if (tensor.type != nullptr && tensor.type->IsPlain()) continue;
    const GgufFormat* const format =
        tensor.type == nullptr ? nullptr : FindGgufFormat(*tensor.type);
    if (format == nullptr) {
      imported.AddLoss(
          tensor.name,
          tensor.type == nullptr
              ? absl::StrCat("GGUF type ", tensor.type_number, " is not known")
              : absl::StrCat("GGUF type ", tensor.type->name,
                             " is no format of quantd; those that are: ",
                             GgufFormatNames()),
          /*left_out=*/true);
      continue;
    }
    bool is_finite = false;
    bool is_widened = false;
    const Encoding encoding =
        GgufEncoding(tensor, *format, &is_finite, &is_widened);
    if (!is_finite) {
      imported.AddLoss(tensor.name, "a scale is infinite or NaN",
                       /*left_out=*/true);
      continue;
    }
    if (is_widened) {
      imported.AddLoss(
          tensor.name,
          absl::StrCat("negative scales became positive ones, under which "
                       "codes go from ",
                       -format->most, " to ", format->most, ": ",
                       FormatName(format->wider_format), " in place of ",
                       FormatName(format->format)),
          /*left_out=*/false);
    }
    const absl::Status status = imported.Store(tensor.name, encoding);
    if (!status.ok()) return session->Fail(status);
  }
  ReportImport(options, imported.response(), "gguf", session);
}

// The encodings of a compressed-tensors model, which are in its tensors.
void ImportCompressed(const ImportOptions& options, Session* session) {
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
  ImportByTensor imported(options, client.get());
  for (const QuantizedTensor& tensor : *tensors) {
    if (tensor.divisor.has_value()) {
      imported.AddLoss(tensor.name,
                       "the inverse of weight_global_scale is rounded: reals "
                       "may differ in the last bit from those of readers that "
                       "divide by it",
                       /*left_out=*/false);
    }
    if (!tensor.column_groups.empty()) {
      imported.AddLoss(tensor.name,
                       "weight_g_idx has the groups in another order, which no "
                       "encoding says",
                       /*left_out=*/true);
      continue;
    }
    const absl::Status status = imported.Store(tensor.name, tensor.Whole());
    if (!status.ok()) return session->Fail(status);
  }
  ReportImport(options, imported.response(),
               InterchangeFormatName(v1::INTERCHANGE_FORMAT_COMPRESSED_TENSORS),
               session);
}

// The encodings of FP8, NVFP4, MXFP4, GPTQ and AWQ checkpoints, likewise.
void ImportCheckpoint(const ImportOptions& options, Session* session) {
  const absl::StatusOr<TensorInput> input = TensorInput::Open(options.file);
  if (!input.ok()) return session->Fail(input.status());
  const absl::StatusOr<std::vector<files::CodedTensor>> tensors =
      ReadCheckpoint(*input, options.file);
  if (!tensors.ok()) return session->Fail(tensors.status());
  if (tensors->empty()) return ImportCompressed(options, session);
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  ImportByTensor imported(options, client.get());
  for (const files::CodedTensor& tensor : *tensors) {
    if (!tensor.note.empty()) {
      imported.AddLoss(tensor.name, tensor.note, /*left_out=*/false);
    }
    const absl::StatusOr<Encoding> encoding = EncodingOf(tensor, options.file);
    if (!encoding.ok()) {
      imported.AddLoss(tensor.name, ErrorText(encoding.status()),
                       /*left_out=*/true);
      continue;
    }
    const absl::Status status = imported.Store(tensor.name, *encoding);
    if (!status.ok()) return session->Fail(status);
  }
  ReportImport(options, imported.response(), "checkpoint", session);
}

void RunImport(const ImportOptions& options, Session* session) {
  if (IsGgufPath(options.file)) return ImportGguf(options, session);
  if (files::IsFolder(options.file) ||
      absl::EndsWithIgnoreCase(options.file, ".safetensors")) {
    const absl::StatusOr<std::string> method = QuantizationMethod(options.file);
    if (!method.ok()) return session->Fail(method.status());
    return *method == kCompressedMethod ? ImportCompressed(options, session)
                                        : ImportCheckpoint(options, session);
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
  const absl::StatusOr<std::string> text = internal::ReadDocument(options.file);
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
  ReportImport(options, *response, InterchangeFormatName(response->format()),
               session);
}

}  // namespace

void AddImportCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "import",
      "Store the encodings of a file: our own JSON, AIMET encodings, ONNX "
      "parameters, or a model that is quantized; exits with 1 when a tensor "
      "had to be left out, or may have been because losses are too many to "
      "tell");
  const auto options = std::make_shared<ImportOptions>();
  command
      ->AddArgument(
          "file", &options->file, "FILE",
          "JSON file, - for stdin; the folder or safetensors file of "
          "a compressed-tensors, FP8, NVFP4, MXFP4, GPTQ or AWQ model; or a "
          ".gguf file, whose q8_0, q5_0 and q4_0 blocks have encodings")
      ->Required();
  AddRevisionOptions(command, /*required=*/true, &options->name);
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
  command->AddOption("--block-size", &options->block_sizes, "[PATTERN=]N,N,...",
                     "Block size of the tensors that match, a number for each "
                     "dimension; may be repeated");
  command->AddFlag("--dry-run", &options->dry_run,
                   "Check the file and store nothing");
  command->AddExample(
      "quantctl import net.encodings --model acme/copy \\\n"
      "  --tensors model.safetensors");
  command->AddExample("quantctl import llm-w4a16/ --model acme/llm");
  command->OnRun([options, session] { RunImport(*options, session); });
}

}  // namespace quantd::cli
