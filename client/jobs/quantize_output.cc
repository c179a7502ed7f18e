#include "client/jobs/quantize_output.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/errors.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "client/cpp/tensor_stream.h"
#include "client/files/errors.h"
#include "client/files/json.h"
#include "client/files/safetensors.h"
#include "client/files/safetensors_builder.h"
#include "client/jobs/quantize_outcome.h"
#include "client/jobs/quantize_parts.h"
#include "client/models/compressed_model.h"
#include "client/models/compressed_place.h"
#include "client/models/compressed_tensors.h"
#include "client/models/quantized_layout.h"
#include "client/models/tensor_input.h"
#include "nlohmann/json.hpp"

namespace quantd::jobs {
namespace {

// Data from which a file's header gets room before its text is known; below
// that, copying the file costs nothing.
constexpr uint64_t kRoomFromBytes = uint64_t{16} << 20;
// Room for base64 of v1::ErrorMetrics without a distribution.
constexpr size_t kMetricsRoom = 400;
// Behind all that is quantized.
constexpr uint64_t kFirstCopiedOrder = uint64_t{1} << 32;

// Names that are not UTF-8 become such.
std::string DumpText(const files::Json& json) {
  return json.dump(-1, ' ', false, files::Json::error_handler_t::replace);
}

// The place in the file of one quantized tensor.
struct TensorPlace {
  uint64_t order;
  // One of these, as the layout has it.
  std::unique_ptr<QuantizedPlace> plain = nullptr;
  std::unique_ptr<CompressedPlace> compressed = nullptr;
};

// One file. Not thread-safe.
class Output {
 public:
  Output(const QuantizeOptions& options, const JobEvents& events,
         const Target& target, QuantizePlan* plan)
      : options_(options),
        events_(events),
        target_(target),
        shard_(*target.shard),
        plan_(*plan) {}

  absl::Status Write(QuantizeServer* server, QuantizeFolder* folder,
                     JobProgress* progress) {
    absl::StatusOr<std::unique_ptr<files::SafetensorsBuilder>> builder =
        files::SafetensorsBuilder::Create(target_.path, target_.part.has_value()
                                                            ? target_.if_exists
                                                            : shard_.if_exists);
    // Since the plan was made.
    if (ErrorReason(builder.status()) == "FILE_EXISTS" &&
        IsWrittenElsewhere()) {
      builder = files::SafetensorsBuilder::Create(target_.path,
                                                  files::IfExists::kReplace);
    }
    if (!builder.ok()) return builder.status();
    builder_ = *std::move(builder);
    absl::Status status = Reserve();
    if (!status.ok()) return status;

    absl::Status copy_status;
    std::thread copier([this, &copy_status] { copy_status = Copy(); });
    status = options_.join ? TakeParts() : Quantize(server, progress);
    copier.join();
    status.Update(copy_status);
    if (status.ok()) status = events_.CheckStopped();
    if (!status.ok()) return status;
    const bool has_failed = plan_.AnyFailed(shard_);
    if (has_failed && !options_.keep_going) return absl::OkStatus();
    for (const auto& [tensor, index] : copies_) {
      plan_.outcomes[tensor->name].output_bytes = tensor->data.size();
    }
    status = CopyFailed();
    if (!status.ok()) return status;
    status = SetMetadata(has_failed);
    if (!status.ok()) return status;
    if (!target_.part.has_value()) {
      status = folder->Clear();
      if (!status.ok()) return status;
    }
    absl::StatusOr<uint64_t> size = builder_->Finish();
    if (ErrorReason(size.status()) == "FILE_EXISTS" && IsWrittenElsewhere()) {
      size = SizeOfFile();
    }
    if (!size.ok()) return size.status();
    shard_.file_bytes = *size;
    shard_.is_written = true;
    return absl::OkStatus();
  }

 private:
  // True if the file has come by another process, which does the same.
  bool IsWrittenElsewhere() const {
    if (shard_.run.empty()) return false;
    const absl::StatusOr<files::SafetensorsReader> there =
        files::SafetensorsReader::Open(target_.path);
    return there.ok() && MetadataOf(*there, kRunKey) == shard_.run;
  }

  absl::StatusOr<uint64_t> SizeOfFile() const {
    struct stat status;
    if (stat(target_.path.c_str(), &status) != 0) {
      return files::FileUnreadableError(target_.path, errno);
    }
    return static_cast<uint64_t>(status.st_size);
  }

  // True if later runs are to know the file.
  bool HasRecords() const {
    return plan_.is_folder || target_.part.has_value();
  }

  // Reserves a place for all that the file will have.
  absl::Status Reserve() {
    const absl::flat_hash_set<const files::FileTensor*> selected(
        target_.tensors.begin(), target_.tensors.end());
    uint64_t order = 0;
    for (const files::FileTensor& tensor : shard_.input.tensors()) {
      ++order;
      if (!selected.contains(&tensor)) continue;
      const absl::Status status = ReserveQuantized(order, tensor);
      if (!status.ok()) return status;
    }
    order = kFirstCopiedOrder;
    for (const files::FileTensor& tensor : shard_.input.tensors()) {
      ++order;
      if (target_.part.has_value() || selected.contains(&tensor)) continue;
      const absl::StatusOr<size_t> index =
          builder_->Reserve(order, tensor.name, tensor.dtype, tensor.shape);
      if (!index.ok()) return index.status();
      copies_.emplace_back(&tensor, *index);
    }
    for (const CompressedData& data : shard_.cache) {
      if (target_.part.has_value()) break;
      const absl::StatusOr<size_t> index = builder_->Reserve(
          ++order, data.part.name, data.part.dtype, data.part.shape);
      if (!index.ok()) return index.status();
      cache_.emplace_back(&data, *index);
    }
    if (builder_->reserved_bytes() < kRoomFromBytes) {
      return builder_->PlaceAll(0);
    }
    const absl::StatusOr<uint64_t> room = builder_->HeaderBytes(MostMetadata());
    return room.ok() ? builder_->PlaceAll(*room) : room.status();
  }

  absl::Status ReserveQuantized(uint64_t order,
                                const files::FileTensor& tensor) {
    const EncodingSpec spec = plan_.SpecOf(tensor);
    const Encoding expected = ExpectedEncoding(spec, tensor.shape);
    TensorPlace place = {order};
    if (options_.IsCompressed()) {
      absl::StatusOr<std::unique_ptr<CompressedPlace>> compressed =
          CompressedPlace::Reserve(order, tensor, expected, options_.PacksAll(),
                                   plan_.inputs.at(tensor.name),
                                   builder_.get());
      if (!compressed.ok()) return compressed.status();
      place.compressed = *std::move(compressed);
    } else {
      absl::StatusOr<std::unique_ptr<QuantizedPlace>> plain =
          QuantizedPlace::Reserve(order, tensor.name,
                                  *ElementTypeOf(tensor.dtype), tensor.shape,
                                  expected, builder_.get());
      if (!plain.ok()) return plain.status();
      place.plain = *std::move(plain);
    }
    tasks_.push_back({&tensor, spec, &plan_.outcomes.at(tensor.name)});
    places_.push_back(std::move(place));
    return absl::OkStatus();
  }

  // At least as long as what SetMetadata will set, whatever becomes of the
  // tensors. It follows from the input and the options alone, so that the file
  // does too.
  std::map<std::string, std::string> MostMetadata() const {
    std::map<std::string, std::string> metadata = shard_.input.metadata();
    files::Json records = files::Json::object();
    files::Json modules = files::Json::object();
    for (size_t i = 0; i < tasks_.size(); ++i) {
      const files::FileTensor& tensor = *tasks_[i].tensor;
      const ElementType element_type = *ElementTypeOf(tensor.dtype);
      Encoding encoding = ExpectedEncoding(tasks_[i].spec, tensor.shape);
      encoding.set_qmin(INT32_MIN);
      encoding.set_qmax(INT32_MIN);
      if (options_.IsCompressed()) {
        metadata[absl::StrCat(kElementTypeKeyPrefix, tensor.name)] =
            std::string(ElementTypeName(element_type));
        modules[std::string(ModuleOf(tensor.name))] =
            places_[i].compressed->expected_module();
      } else {
        metadata[absl::StrCat(kQuantizedKeyPrefix, tensor.name)] = absl::StrCat(
            "u", QuantizedMetadata(element_type, tensor.shape, encoding));
      }
      records[tensor.name] = MostRecord(tensor.name, encoding);
    }
    if (options_.IsCompressed()) {
      metadata["format"] = "pt";
      metadata[kRoundedKey] = absl::StrCat(tasks_.size());
      // "symmetric" may turn to false, which has one letter more.
      metadata[kModulesKey] =
          absl::StrCat(DumpText(modules), std::string(tasks_.size(), ' '));
    }
    if (HasRecords()) {
      metadata[kCommandKey] = shard_.command;
      metadata[kRunKey] = shard_.run;
      metadata[kChecksumKey] = ChecksumText(0);
      metadata[kTensorsKey] = DumpText(records);
    }
    if (target_.part.has_value()) metadata[kPartKey] = PartText(*target_.part);
    return metadata;
  }

  // The longest that a tensor can have.
  files::Json MostRecord(const std::string& tensor,
                         const Encoding& encoding) const {
    Outcome most;
    // The unsigned format of that width has one letter more.
    most.format = absl::StrCat("u", FormatName(encoding.format()));
    most.output_bytes = UINT64_MAX;
    most.clipped_low_count = UINT64_MAX;
    most.clipped_high_count = UINT64_MAX;
    most.nan_count = UINT64_MAX;
    most.infinity_count = UINT64_MAX;
    most.coarse_scale_count = UINT64_MAX;
    most.mantissa_bits = UINT64_MAX;
    most.is_compensated = plan_.roundings.count(tensor) > 0;
    if (most.is_compensated) {
      v1::OutputNoise& noise = most.output_noise.emplace();
      noise.set_noise_to_signal(1);
      noise.set_source(v1::OUTPUT_NOISE_SOURCE_GRAM);
      noise.set_clipped_input_count(UINT64_MAX);
    }
    files::Json record = RecordOf(most);
    if (options_.evaluate) record["metrics"] = std::string(kMetricsRoom, 'x');
    return record;
  }

  // Writes what is not quantized.
  absl::Status Copy() const {
    absl::Status status;
    for (const auto& [tensor, index] : copies_) {
      const std::shared_ptr<const void> hold = tensor->Hold();
      status.Update(builder_->Write(index, 0, tensor->data));
    }
    for (const auto& [data, index] : cache_) {
      status.Update(builder_->Write(index, 0, data->data));
    }
    return status;
  }

  absl::Status Quantize(QuantizeServer* server, JobProgress* progress) {
    TensorSink sink;
    sink.set_sinks = [this](size_t i, QuantizeJob* job) {
      if (places_[i].plain != nullptr) places_[i].plain->SetSinks(job);
    };
    sink.write = [this](size_t i, const QuantizeResult& result) {
      return places_[i].plain != nullptr
                 ? places_[i].plain->Finish(result.header.encoding())
                 : places_[i].compressed->Finish(result);
    };
    return server->Quantize(sink, &tasks_, progress);
  }

  // Takes all of it from the files of its parts, which are there and belong
  // together.
  absl::Status TakeParts() {
    for (const Part& part : FindParts(shard_)) {
      const std::string path = PartPath(shard_, part);
      const absl::StatusOr<files::SafetensorsReader> reader =
          files::SafetensorsReader::Open(path);
      if (!reader.ok()) return reader.status();
      const absl::Status intact = CheckData(*reader, path);
      if (!intact.ok()) return intact;
      std::optional<ModuleRecords> modules;
      if (options_.IsCompressed()) {
        modules = ReadModules(*reader);
        if (!modules.has_value()) {
          return files::FileMalformedError(
              path, "expected the schemes of its modules");
        }
        joined_rounded_count_ += modules->rounded_count;
      }
      const files::Json records =
          files::ParseJson(MetadataOf(*reader, kTensorsKey));
      for (size_t i = 0; i < tasks_.size(); ++i) {
        if (!records.contains(tasks_[i].tensor->name)) continue;
        const absl::Status status = places_[i].plain != nullptr
                                        ? places_[i].plain->CopyFrom(*reader)
                                        : places_[i].compressed->CopyFrom(
                                              *reader, path, modules->modules);
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  // Tensors that failed stay as they were.
  absl::Status CopyFailed() {
    for (size_t i = 0; i < tasks_.size(); ++i) {
      if (tasks_[i].outcome->is_quantized) continue;
      if (places_[i].plain != nullptr) places_[i].plain->Drop();
      if (places_[i].compressed != nullptr) places_[i].compressed->Drop();
      const files::FileTensor& tensor = *tasks_[i].tensor;
      const std::shared_ptr<const void> hold = tensor.Hold();
      const absl::Status status =
          builder_->Add(kFirstCopiedOrder + places_[i].order, tensor.name,
                        tensor.dtype, tensor.shape, tensor.data);
      if (!status.ok()) return status;
      tasks_[i].outcome->output_bytes = tensor.data.size();
    }
    return absl::OkStatus();
  }

  absl::Status SetMetadata(bool has_failed) {
    for (const auto& [key, value] : shard_.input.metadata()) {
      builder_->SetMetadata(key, value);
    }
    if (options_.IsCompressed()) SetModules();
    if (HasRecords()) {
      builder_->SetMetadata(kCommandKey, shard_.command);
      // One that failed in part is done again.
      if (!has_failed) {
        const absl::StatusOr<uint64_t> checksum = builder_->DataChecksum();
        if (!checksum.ok()) return checksum.status();
        builder_->SetMetadata(kRunKey, shard_.run);
        builder_->SetMetadata(kChecksumKey, ChecksumText(*checksum));
        builder_->SetMetadata(kTensorsKey, RecordsText());
      }
    }
    if (target_.part.has_value()) {
      builder_->SetMetadata(kPartKey, PartText(*target_.part));
    }
    return absl::OkStatus();
  }

  void SetModules() {
    shard_.rounded_count = joined_rounded_count_;
    for (size_t i = 0; i < tasks_.size(); ++i) {
      const files::FileTensor& tensor = *tasks_[i].tensor;
      const CompressedModel& model = places_[i].compressed->model();
      shard_.modules.update(model.modules());
      shard_.rounded_count += model.rounded_count();
      builder_->SetMetadata(
          absl::StrCat(kElementTypeKeyPrefix, tensor.name),
          std::string(ElementTypeName(*ElementTypeOf(tensor.dtype))));
    }
    builder_->SetMetadata(kRoundedKey, absl::StrCat(shard_.rounded_count));
    builder_->SetMetadata("format", "pt");
    builder_->SetMetadata(kModulesKey, DumpText(shard_.modules));
  }

  std::string RecordsText() const {
    files::Json records = files::Json::object();
    for (const TensorTask& task : tasks_) {
      if (task.outcome->is_quantized) {
        records[task.tensor->name] = RecordOf(*task.outcome);
      }
    }
    return DumpText(records);
  }

  const QuantizeOptions& options_;
  const JobEvents& events_;
  const Target& target_;
  Shard& shard_;
  QuantizePlan& plan_;
  std::unique_ptr<files::SafetensorsBuilder> builder_;
  // Quantized tensors, and their places.
  std::vector<TensorTask> tasks_;
  std::vector<TensorPlace> places_;
  // Other tensors, with their indices in the builder.
  std::vector<std::pair<const files::FileTensor*, size_t>> copies_;
  // Shard::cache, with the indices in the builder.
  std::vector<std::pair<const CompressedData*, size_t>> cache_;
  // See CompressedModel; of the parts that were taken.
  int64_t joined_rounded_count_ = 0;
};

}  // namespace

absl::Status WriteSafetensors(const QuantizeOptions& options,
                              const JobEvents& events, const Target& target,
                              QuantizeServer* server, QuantizeFolder* folder,
                              QuantizePlan* plan, JobProgress* progress) {
  return Output(options, events, target, plan).Write(server, folder, progress);
}

}  // namespace quantd::jobs
