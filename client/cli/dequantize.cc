#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/output_options.h"
#include "client/cli/progress.h"
#include "client/cli/session.h"
#include "client/cli/streams.h"
#include "client/cli/table.h"
#include "client/cli/tensor_notes.h"
#include "client/cpp/client.h"
#include "client/cpp/element_bytes.h"
#include "client/cpp/errors.h"
#include "client/files/coded_tensor.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/gguf.h"
#include "client/files/json.h"
#include "client/files/npy.h"
#include "client/files/safetensors.h"
#include "client/files/safetensors_builder.h"
#include "client/files/shard_index.h"
#include "client/jobs/connections.h"
#include "client/jobs/errors.h"
#include "client/jobs/model_folder.h"
#include "client/jobs/output.h"
#include "client/models/coded_input.h"
#include "client/models/compressed_reader.h"
#include "client/models/compressed_tensors.h"
#include "client/models/element_counter.h"
#include "client/models/model_config.h"
#include "client/models/plain_input.h"
#include "client/models/quantized_checkpoint.h"
#include "client/models/quantized_layout.h"
#include "client/models/tensor_engine.h"
#include "client/models/tensor_input.h"
#include "client/models/text.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

// The tensors of an output folder.
constexpr char kModelFile[] = "model.safetensors";
constexpr size_t kMostInlineScaleBytes = 256 << 10;
// Bytes of floats that are decoded in memory at a time.
constexpr int64_t kDecodeBytes = 4 << 20;

struct DequantizeOptions {
  std::string input;
  jobs::OutputOptions output;
  bool keep_going = false;
  StreamsOption streams;
};

struct DequantizeOutcome {
  std::string name;
  std::vector<int64_t> shape;
  // Empty for one that is left out.
  std::string dtype;
  std::string result;
  uint64_t input_bytes = 0;
  uint64_t output_bytes = 0;
  absl::Status status;
  // See files::CodedTensor.
  std::string note;
  // Infinities of the output: its type may be too narrow, or a code infinity.
  uint64_t infinity_count = 0;
};

// Counts the infinite elements of an output.
ElementCounter InfinityCounter(files::Dtype dtype) {
  return {static_cast<size_t>(files::DtypeSizeBytes(dtype)),
          [dtype](absl::Span<const uint8_t> elements) {
            return files::CountInfinities(dtype, elements);
          }};
}

// A tensor of the output that no server is called for: decoded here, or copied.
struct LocalTensor {
  // Without the count of infinities.
  DequantizeOutcome outcome;
  files::Dtype dtype;
  bool is_copy = false;
  // Gives the elements to `write`, as many at a time as are in memory.
  std::function<absl::Status(const Sink& write)> produce;
};

LocalTensor CopyOf(const std::string& name, const std::vector<int64_t>& shape,
                   files::Dtype dtype, absl::Span<const uint8_t> data) {
  LocalTensor local;
  local.outcome.name = name;
  local.outcome.shape = shape;
  local.outcome.dtype = std::string(DtypeName(dtype));
  local.outcome.result = "copied";
  local.outcome.input_bytes = local.outcome.output_bytes = data.size();
  local.dtype = dtype;
  local.is_copy = true;
  local.produce = [data](const Sink& write) { return write(0, data); };
  return local;
}

// One run of `quantctl dequantize`. Not thread-safe.
class Dequantizer {
 public:
  Dequantizer(const DequantizeOptions& options, Session* session)
      : options_(options), session_(*session) {}

  void Run() {
    if (IsGgufPath(options_.input)) return RunGguf();
    RunFile();
    // Does nothing where the folder has something in it.
    if (is_made_ && !is_written_) rmdir(folder_.c_str());
  }

 private:
  void RunFile() {
    const absl::StatusOr<TensorInput> input = TensorInput::Open(options_.input);
    if (!input.ok()) return session_.Fail(input.status());
    absl::Status status = TakeFolder();
    if (status.ok()) {
      status = CheckOutputFile(options_.output, input->paths(),
                               IsNpy() ? ".npy" : ".safetensors", &session_);
    }
    if (status.ok()) status = ReadAll(*input);
    if (!status.ok()) return FailEarly(status, &session_);
    for (const files::FileTensor& tensor : input->tensors()) {
      if (consumed_.contains(tensor.name)) continue;
      local_.push_back(
          CopyOf(tensor.name, tensor.shape, tensor.dtype, tensor.data));
    }
    std::optional<jobs::Connections> connections;
    if (!tensors_.empty()) {
      absl::StatusOr<jobs::Connections> opened =
          options_.streams.Connect(session_);
      if (!opened.ok()) return session_.FailUsage(opened.status());
      connections = *std::move(opened);
    }
    const jobs::Connections* const server =
        connections.has_value() ? &*connections : nullptr;
    Complete(IsNpy() ? WriteNpy(server)
                     : WriteFile(PlainMetadata(*input), server));
  }

  // Of a folder, with the name of a folder for the output, which ends with "/",
  // the tensors go to a file in it. Makes the folder where there is none.
  // Errors: ARGUMENT_INVALID, FILE_MALFORMED of config.json, FILE_UNWRITABLE.
  absl::Status TakeFolder() {
    if (!absl::EndsWith(options_.output.path, "/") ||
        !files::IsFolder(options_.input)) {
      return absl::OkStatus();
    }
    folder_ = options_.output.path;
    if (jobs::IsSameFile(options_.input, folder_)) {
      return ArgumentInvalidError("expected another folder than the input");
    }
    for (const std::string& name : jobs::FilesIn(folder_)) {
      if (name == kModelFile || (!absl::EndsWith(name, ".safetensors") &&
                                 name != files::kShardIndexName)) {
        continue;
      }
      return ArgumentInvalidError(absl::StrCat(
          "expected a folder without weights of others, which loaders would "
          "take for a part of the model, but ",
          files::PathIn(folder_, name), " is there"));
    }
    options_.output.path = files::PathIn(folder_, kModelFile);
    absl::StatusOr<files::Json> config =
        ReadConfig(options_.input, kModelConfigName);
    if (!config.ok()) return config.status();
    config_ = *std::move(config);
    RemoveQuantization(&config_);
    is_made_ = mkdir(folder_.c_str(), 0777) == 0;
    return is_made_ || errno == EEXIST
               ? absl::OkStatus()
               : files::FileUnwritableError(folder_, errno);
  }

  // Writes what goes with the tensors of a folder, and reports.
  void Complete(absl::Status status) {
    if (status.ok() && is_written_ && !folder_.empty()) {
      status = WriteBeside();
    }
    if (!status.ok()) return session_.Fail(status);
    Report();
  }

  absl::Status WriteBeside() {
    jobs::FilesBeside beside;
    beside.from = options_.input;
    beside.to = folder_;
    beside.force = options_.output.force;
    beside.is_replaced = [](const std::string& name) {
      return name == kModelConfigName || name == files::kShardIndexName ||
             absl::EndsWith(name, ".safetensors");
    };
    const absl::StatusOr<std::string> left_out = jobs::CopyFilesBeside(beside);
    if (!left_out.ok()) return left_out.status();
    if (!left_out->empty() && !session_.quiet) {
      session_.PrintError(absl::StrCat("quantctl: ", *left_out));
    }
    if (config_.empty()) return absl::OkStatus();
    return jobs::WriteModelConfig(config_, folder_);
  }

  bool IsNpy() const { return IsNpyPath(options_.output.path); }

  // Blocks of GGUF are decoded here, one tensor at a time. No server is called.
  void RunGguf() {
    const absl::StatusOr<files::GgufReader> reader =
        files::GgufReader::Open(options_.input);
    if (!reader.ok()) return session_.Fail(reader.status());
    absl::Status status = reader->CheckWhole(options_.input);
    if (!status.ok()) return session_.Fail(status);
    status = CheckOutputFile(options_.output, {options_.input},
                             IsNpy() ? ".npy" : ".safetensors", &session_);
    if (status.ok()) status = CheckGgufTypes(*reader);
    if (!status.ok()) return FailEarly(status, &session_);
    for (const files::GgufTensor& tensor : reader->tensors()) {
      if (tensor.type != nullptr) local_.push_back(LocalOf(tensor));
    }
    status = IsNpy() ? WriteNpy(nullptr) : WriteFile({}, nullptr);
    if (!status.ok()) return session_.Fail(status);
    std::vector<DequantizeOutcome> written = std::move(outcomes_);
    outcomes_.clear();
    auto next = written.begin();
    for (const files::GgufTensor& tensor : reader->tensors()) {
      if (tensor.type != nullptr) {
        outcomes_.push_back(std::move(*next++));
        continue;
      }
      DequantizeOutcome& outcome = outcomes_.emplace_back();
      outcome.name = tensor.name;
      outcome.shape = tensor.shape;
      outcome.result = "left out";
    }
    Report();
    for (const files::GgufTensor& tensor : reader->tensors()) {
      if (tensor.type != nullptr) continue;
      ReportUnread({tensor.name, std::string(files::kTypeNotKnown)}, &session_);
    }
  }

  absl::Status CheckGgufTypes(const files::GgufReader& reader) const {
    for (const files::GgufTensor& tensor : reader.tensors()) {
      if (tensor.type != nullptr || (options_.keep_going && !IsNpy())) continue;
      return files::FileUnsupportedError(
          options_.input,
          absl::StrCat(
              "tensor ", files::QuotedName(tensor.name), " is of GGUF type ",
              tensor.type_number, ", which quantctl does not know",
              IsNpy() ? "" : "; --keep-going leaves such tensors out"));
    }
    return absl::OkStatus();
  }

  // Gives the elements to `write`, a few MiB at a time.
  static absl::Status Decode(const files::CodedTensor& tensor,
                             const Sink& write) {
    const int64_t count = tensor.row_count();
    const int64_t row_bytes = tensor.row_bytes();
    const int64_t step =
        std::max<int64_t>(1, kDecodeBytes / std::max<int64_t>(1, row_bytes));
    const std::shared_ptr<const void> hold = tensor.Hold();
    std::vector<uint8_t> elements(
        static_cast<size_t>(std::min(step, count) * row_bytes));
    for (int64_t begin = 0; begin < count; begin += step) {
      const int64_t end = std::min(count, begin + step);
      const absl::Span<uint8_t> part = absl::MakeSpan(elements).subspan(
          0, static_cast<size_t>((end - begin) * row_bytes));
      tensor.DecodeRows(begin, end, part);
      const absl::Status status =
          write(static_cast<uint64_t>(begin * row_bytes), part);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Bytes of all the parts of a tensor.
  static uint64_t CodeBytes(const TensorInput& input,
                            const files::CodedTensor& tensor) {
    uint64_t size = 0;
    for (const std::string& part : tensor.parts) {
      const files::FileTensor* const found = input.Find(part);
      if (found != nullptr) size += found->data.size();
    }
    return size;
  }

  // `tensor` must stay.
  static LocalTensor LocalOf(const TensorInput& input,
                             const files::CodedTensor& tensor) {
    LocalTensor local;
    local.outcome.name = tensor.name;
    local.outcome.shape = tensor.shape;
    local.outcome.dtype = std::string(DtypeName(tensor.dtype));
    local.outcome.result = tensor.layout;
    local.outcome.input_bytes = CodeBytes(input, tensor);
    local.outcome.output_bytes =
        static_cast<uint64_t>(tensor.row_count() * tensor.row_bytes());
    local.outcome.note = tensor.note;
    local.dtype = tensor.dtype;
    local.produce = [&tensor](const Sink& write) {
      return Decode(tensor, write);
    };
    return local;
  }

  // `tensor` must stay.
  static LocalTensor LocalOf(const files::GgufTensor& tensor) {
    if (tensor.type->IsPlain()) {
      return CopyOf(tensor.name, tensor.shape, *tensor.type->dtype,
                    tensor.data);
    }
    LocalTensor local;
    local.outcome.name = tensor.name;
    local.outcome.shape = tensor.shape;
    local.outcome.dtype = std::string(DtypeName(files::Dtype::kF32));
    local.outcome.result = std::string(tensor.type->name);
    local.outcome.input_bytes = tensor.data.size();
    local.outcome.output_bytes =
        static_cast<uint64_t>(ElementCount(tensor.shape).value_or(0)) *
        sizeof(float);
    local.dtype = files::Dtype::kF32;
    local.produce = [&tensor](const Sink& write) {
      return write(0, BytesOf(files::DequantizeGguf(tensor)));
    };
    return local;
  }

  bool AnyFailed() const {
    return std::any_of(
        outcomes_.begin(), outcomes_.end(),
        [](const DequantizeOutcome& outcome) { return !outcome.status.ok(); });
  }

  // Errors end the run and leave no output file; so does a tensor that fails,
  // unless the run is to keep going. What the server dequantizes comes first.
  // `server`  null where it dequantizes nothing.
  absl::Status WriteFile(const std::map<std::string, std::string>& metadata,
                         const jobs::Connections* server) {
    const absl::StatusOr<std::unique_ptr<files::SafetensorsBuilder>> builder =
        files::SafetensorsBuilder::Create(options_.output.path,
                                          options_.output.if_exists());
    if (!builder.ok()) return builder.status();
    std::vector<size_t> places;
    const auto reserve = [&](const std::string& name, files::Dtype dtype,
                             const std::vector<int64_t>& shape) {
      const absl::StatusOr<size_t> place =
          (*builder)->Reserve(places.size(), name, dtype, shape);
      if (place.ok()) places.push_back(*place);
      return place.status();
    };
    absl::Status status;
    for (const QuantizedTensor& tensor : tensors_) {
      status.Update(
          reserve(tensor.name, DtypeOf(tensor.element_type), tensor.shape));
    }
    for (const LocalTensor& local : local_) {
      status.Update(
          reserve(local.outcome.name, local.dtype, local.outcome.shape));
    }
    if (!status.ok()) return status;
    for (const auto& [key, value] : metadata) {
      (*builder)->SetMetadata(key, value);
    }
    const absl::StatusOr<uint64_t> header_bytes =
        (*builder)->HeaderBytes(metadata);
    if (!header_bytes.ok()) return header_bytes.status();
    status = (*builder)->PlaceAll(*header_bytes);
    Progress progress(TotalBytes(), !session_.quiet);
    if (status.ok() && server != nullptr) {
      status = DequantizeAll(places, *server, builder->get(), &progress);
    }
    if (!status.ok()) return status;
    if (AnyFailed() && !options_.keep_going) return absl::OkStatus();
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (!outcomes_[i].status.ok()) (*builder)->Drop(places[i]);
    }
    for (size_t i = 0; i < local_.size(); ++i) {
      const size_t place = places[tensors_.size() + i];
      status = Produce(local_[i], [&](uint64_t offset_bytes,
                                      absl::Span<const uint8_t> bytes) {
        return (*builder)->Write(place, offset_bytes, bytes);
      });
      if (!status.ok()) return status;
      if (!local_[i].is_copy) {
        progress.Add(local_[i].outcome.input_bytes, local_[i].outcome.name);
      }
    }
    status = (*builder)->Finish().status();
    is_written_ = status.ok();
    return status;
  }

  // Of all tensors but for those that are copied.
  uint64_t TotalBytes() const {
    uint64_t size = 0;
    for (const QuantizedTensor& tensor : tensors_) size += tensor.codes.size();
    for (const LocalTensor& local : local_) {
      size += local.is_copy ? 0 : local.outcome.input_bytes;
    }
    return size;
  }

  // Gives the elements to `write`, and adds the outcome.
  absl::Status Produce(const LocalTensor& local, const Sink& write) {
    ElementCounter infinities = InfinityCounter(local.dtype);
    const absl::Status status = local.produce(
        [&](uint64_t offset_bytes, absl::Span<const uint8_t> bytes) {
          if (!local.is_copy) infinities.Add(offset_bytes, bytes);
          return write(offset_bytes, bytes);
        });
    outcomes_.push_back(local.outcome);
    outcomes_.back().infinity_count = infinities.count();
    return status;
  }

  // Writes the only tensor.
  absl::Status WriteNpy(const jobs::Connections* server) {
    const size_t count = tensors_.size() + local_.size();
    if (count != 1) {
      return files::FileUnsupportedError(
          options_.output.path,
          absl::StrCat(".npy holds one tensor, the file has ", count));
    }
    const auto write = [this](files::Dtype dtype,
                              absl::Span<const uint8_t> elements) {
      const absl::Status status =
          files::WriteNpy(options_.output.path, options_.output.if_exists(),
                          dtype, outcomes_[0].shape, elements)
              .status();
      is_written_ = status.ok();
      return status;
    };
    if (server != nullptr) {
      const std::shared_ptr<const void> hold = tensors_[0].Hold();
      const absl::StatusOr<DequantizeResult> result =
          server->first()->Dequantize(MakeJob(tensors_[0]));
      if (!result.ok()) return result.status();
      const files::Dtype dtype = DtypeOf(tensors_[0].element_type);
      outcomes_.push_back(OutcomeOf(tensors_[0], result));
      outcomes_[0].infinity_count =
          files::CountInfinities(dtype, result->elements);
      return write(dtype, result->elements);
    }
    if (local_[0].is_copy) {
      return files::FileUnsupportedError(
          options_.input, "expected a quantized tensor, got a plain one");
    }
    std::vector<uint8_t> elements;
    const absl::Status status =
        Produce(local_[0], [&elements](uint64_t /*offset_bytes*/,
                                       absl::Span<const uint8_t> bytes) {
          elements.insert(elements.end(), bytes.begin(), bytes.end());
          return absl::OkStatus();
        });
    return status.ok() ? write(local_[0].dtype, elements) : status;
  }

  absl::Status ReadAll(const TensorInput& input) {
    absl::StatusOr<std::vector<QuantizedTensor>> tensors =
        ReadAllQuantized(input, options_.input);
    if (!tensors.ok()) return tensors.status();
    tensors_ = *std::move(tensors);
    std::string method;
    if (tensors_.empty()) {
      absl::StatusOr<std::string> found = QuantizationMethod(options_.input);
      if (!found.ok()) return found.status();
      method = *std::move(found);
    }
    if (method == kCompressedMethod) {
      absl::StatusOr<std::vector<QuantizedTensor>> compressed =
          ReadCompressed(input, options_.input);
      if (!compressed.ok()) return compressed.status();
      tensors_ = *std::move(compressed);
      if (const absl::Status status = DecodeUnsaid(); !status.ok()) {
        return status;
      }
    } else if (tensors_.empty()) {
      absl::StatusOr<std::vector<files::CodedTensor>> coded =
          ReadCheckpoint(input, options_.input);
      if (!coded.ok()) return coded.status();
      coded_ = *std::move(coded);
    }
    for (const QuantizedTensor& tensor : tensors_) {
      consumed_.insert(tensor.parts.begin(), tensor.parts.end());
    }
    for (const files::CodedTensor& tensor : coded_) {
      consumed_.insert(tensor.parts.begin(), tensor.parts.end());
      local_.push_back(LocalOf(input, tensor));
    }
    const files::FileTensor* const codes =
        consumed_.empty() ? FindCodes(input) : nullptr;
    if (codes != nullptr) {
      return files::FileUnsupportedError(
          options_.input,
          absl::StrCat(
              "tensor ", files::QuotedName(codes->name),
              method.empty() && absl::EndsWith(codes->name, ".weight_packed")
                  ? " is of compressed-tensors, whose config.json is "
                    "missing"
                  : " is quantized in a way that is not read"));
    }
    if (consumed_.empty()) {
      return files::FileMalformedError(
          options_.input,
          "expected tensors that quantctl quantized, those of a "
          "compressed-tensors model with its config.json, or FP8, NVFP4, "
          "MXFP4, GPTQ or AWQ with their scales, got none");
    }
    return absl::OkStatus();
  }

  // Groups of columns in another order, scales that are divided, and tensors
  // that have no scale, are decoded here: no encoding says them to a server.
  absl::Status DecodeUnsaid() {
    if (std::all_of(tensors_.begin(), tensors_.end(),
                    [](const QuantizedTensor& tensor) {
                      return tensor.column_groups.empty() &&
                             !tensor.divisor.has_value() &&
                             !tensor.codes.empty();
                    })) {
      return absl::OkStatus();
    }
    for (const QuantizedTensor& tensor : tensors_) {
      absl::StatusOr<files::CodedTensor> coded =
          CodedTensorOf(tensor, options_.input);
      if (!coded.ok()) return coded.status();
      coded_.push_back(*std::move(coded));
    }
    tensors_.clear();
    return absl::OkStatus();
  }

  static DequantizeJob MakeJob(const QuantizedTensor& tensor) {
    DequantizeJob job;
    // The encoding rides along, so the name is for messages only; one that
    // the server does not allow must not get in the way.
    job.tensor.element_type = tensor.element_type;
    job.tensor.shape = tensor.shape;
    job.tensor.data = tensor.codes;
    // Few scales go in the header, where a retry can go on in the middle.
    if (tensor.scales.has_value() &&
        tensor.scales->scale.size() > kMostInlineScaleBytes) {
      job.source = tensor.encoding;
      job.scales = tensor.scales;
    } else {
      job.source = tensor.Whole();
    }
    job.omit_encoding = true;
    return job;
  }

  // Writes the elements of each tensor to its place, as they come.
  absl::Status DequantizeAll(const std::vector<size_t>& places,
                             const jobs::Connections& connections,
                             files::SafetensorsBuilder* builder,
                             Progress* progress) {
    outcomes_.resize(tensors_.size());
    absl::Mutex mutex;
    // Keep the codes of the tensors under way in memory.
    std::vector<std::shared_ptr<const void>> holds(tensors_.size());
    std::vector<ElementCounter> infinities;
    for (const QuantizedTensor& tensor : tensors_) {
      infinities.push_back(InfinityCounter(DtypeOf(tensor.element_type)));
    }
    internal::DequantizeEngine::Work work;
    work.count = tensors_.size();
    work.size_bytes = [this](size_t i) { return tensors_[i].codes.size(); };
    work.make_job = [&](size_t i) {
      holds[i] = tensors_[i].Hold();
      DequantizeJob job = MakeJob(tensors_[i]);
      job.sink = [builder, place = places[i], counter = &infinities[i]](
                     uint64_t offset_bytes, absl::Span<const uint8_t> bytes) {
        counter->Add(offset_bytes, bytes);
        return builder->Write(place, offset_bytes, bytes);
      };
      return job;
    };
    work.take = [&](size_t i, const absl::StatusOr<DequantizeResult>& result,
                    EvaluateStream*) {
      holds[i] = nullptr;
      outcomes_[i] = OutcomeOf(tensors_[i], result);
      outcomes_[i].infinity_count = infinities[i].count();
      absl::MutexLock lock(&mutex);
      progress->Add(tensors_[i].codes.size(), tensors_[i].name);
      return jobs::EndsJob(result.status()) ? result.status()
                                            : absl::OkStatus();
    };
    return internal::DequantizeEngine(connections.clients()).Run(work);
  }

  static DequantizeOutcome OutcomeOf(
      const QuantizedTensor& tensor,
      const absl::StatusOr<DequantizeResult>& result) {
    DequantizeOutcome outcome;
    outcome.name = tensor.name;
    outcome.shape = tensor.shape;
    outcome.dtype = std::string(DtypeName(DtypeOf(tensor.element_type)));
    outcome.result = result.ok() ? FormatName(tensor.encoding.format())
                                 : std::string("failed");
    outcome.input_bytes = tensor.codes.size();
    if (result.ok()) outcome.output_bytes = result->header.size_bytes();
    outcome.status = result.status();
    return outcome;
  }

  void Report() {
    Json list = Json::array();
    Table table;
    table.AddColumn("TENSOR", Table::Align::kLeft);
    table.AddColumn("SHAPE", Table::Align::kLeft);
    table.AddColumn("DTYPE", Table::Align::kLeft);
    table.AddColumn("FROM", Table::Align::kLeft);
    table.AddColumn("BEFORE", Table::Align::kBytes);
    table.AddColumn("AFTER", Table::Align::kBytes);
    for (const DequantizeOutcome& outcome : outcomes_) {
      if (!outcome.status.ok()) session_.Note(kServerError);
      Json json = {{"name", outcome.name},
                   {"shape", outcome.shape},
                   {"dtype", outcome.dtype.empty() ? Json(nullptr)
                                                   : Json(outcome.dtype)},
                   {"from", outcome.result},
                   {"bytes_before", outcome.input_bytes},
                   {"bytes_after", outcome.output_bytes},
                   {"infinity_count", outcome.infinity_count}};
      if (!outcome.status.ok()) json["error"] = ErrorJson(outcome.status);
      if (!outcome.note.empty()) json["note"] = outcome.note;
      list.push_back(std::move(json));
      table.AddRow({outcome.name, ShapeText(outcome.shape),
                    outcome.dtype.empty() ? "-" : outcome.dtype, outcome.result,
                    BytesCell(outcome.input_bytes),
                    BytesCell(outcome.output_bytes)});
    }
    std::vector<std::string> notes;
    std::vector<TensorError> errors;
    for (const DequantizeOutcome& outcome : outcomes_) {
      if (!outcome.note.empty()) {
        notes.push_back(absl::StrCat("quantctl: tensor ", outcome.name, ": ",
                                     outcome.note));
      }
      if (outcome.infinity_count > 0) {
        const std::optional<files::Dtype> dtype =
            files::ParseDtype(outcome.dtype);
        notes.push_back(absl::StrCat(
            "quantctl: tensor ", outcome.name, ": ",
            CountText(outcome.infinity_count),
            " elements are infinite: their codes are infinity, or beyond ",
            outcome.dtype, ", which has at most ", files::LargestNumber(*dtype),
            " in magnitude"));
      }
      if (!outcome.status.ok()) {
        errors.push_back({outcome.name, outcome.status});
      }
    }
    if (session_.json) {
      session_.PrintJson({{"input", options_.input},
                          {"output", options_.output.path},
                          {"written", is_written_},
                          {"failed_count", errors.size()},
                          {"retries", session_.retries()},
                          {"tensors", list}});
    } else {
      session_.Print(table.Render(StdoutHasStyle()));
      PrintNotes(notes, &session_);
      PrintTensorErrors(errors, &session_);
    }
    if (errors.empty()) return;
    session_.PrintError(absl::StrCat(
        "quantctl: ", CountText(errors.size()), " of ",
        CountText(tensors_.size()), " tensors failed",
        is_written_ ? absl::StrCat("; ", options_.output.path, " lacks them")
                    : absl::StrCat(", so ", options_.output.path,
                                   " is not written; --keep-going leaves "
                                   "such tensors out")));
  }

  DequantizeOptions options_;
  Session& session_;
  // The folder of the output and its config.json; empty without one.
  std::string folder_;
  files::Json config_;
  bool is_made_ = false;
  // Tensors that the server dequantizes.
  std::vector<QuantizedTensor> tensors_;
  // All others, and what those that are decoded here are made of.
  std::vector<LocalTensor> local_;
  std::vector<files::CodedTensor> coded_;
  // Names of codes and what lies beside them: not copied.
  absl::flat_hash_set<std::string> consumed_;
  std::vector<DequantizeOutcome> outcomes_;
  bool is_written_ = false;
};

}  // namespace

void AddDequantizeCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "dequantize",
      "Turn a file that `quantize` wrote back into plain tensors of the type "
      "that they had, and blocks of GGUF and FP8, NVFP4, MXFP4, GPTQ and AWQ "
      "checkpoints into float32; nothing is written when a tensor fails");
  const auto options = std::make_shared<DequantizeOptions>();
  command
      ->AddArgument("file", &options->input, "FILE",
                    "safetensors file, the folder of a model, or .gguf file")
      ->Required();
  AddOutputOptions(command,
                   "safetensors file, .npy for a single tensor, or - for "
                   "standard output. A name that ends with / is a folder, for "
                   "that of a model: with config.json and a tokenizer, as "
                   "other programs load it",
                   &options->output)
      ->Required();
  command->AddFlag("--keep-going", &options->keep_going,
                   "Write the output even if tensors fail, without these");
  options->streams.AddOption(command);
  command->AddExample(
      "quantctl dequantize model.int8.safetensors -o restored.safetensors");
  command->AddExample(
      "quantctl dequantize model.q4_k_m.gguf -o restored.safetensors",
      "any of ggml's types; calls no server");
  command->AddExample("quantctl dequantize llm-awq/ -o llm/",
                      "of a checkpoint of AWQ, GPTQ, ModelOpt, GPT-OSS or FP8; "
                      "calls no server");
  command->OnRun([options, session] { Dequantizer(*options, session).Run(); });
}

}  // namespace quantd::cli
