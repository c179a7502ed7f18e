#include "client/jobs/quantize_gguf.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/errors.h"
#include "client/cpp/tensor.h"
#include "client/cpp/tensor_stream.h"
#include "client/files/gguf.h"
#include "client/files/gguf_builder.h"
#include "client/files/gguf_types.h"
#include "client/files/safetensors.h"
#include "client/files/shard_index.h"
#include "client/jobs/gguf_output.h"
#include "client/models/gguf_blocks.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::jobs {
namespace {

constexpr char kFileTypeKey[] = "general.file_type";
constexpr char kSplitKeys[] = "split.";
constexpr char kVersionKey[] = "general.quantization_version";
// Version of the layout of blocks.
constexpr uint32_t kVersion = 2;

// The file, whose places follow from shapes and types.
class GgufOutput {
 public:
  GgufOutput(const QuantizeOptions& options, const JobEvents& events,
             QuantizePlan* plan)
      : options_(options),
        events_(events),
        plan_(*plan),
        shard_(*plan->shards[0]) {}

  absl::Status Write(QuantizeServer* server, JobProgress* progress) {
    absl::Status status = MakeEntries();
    if (status.ok()) status = Create();
    if (status.ok()) status = Copy();
    // First what needs a server, which may not be there.
    if (status.ok() && !tasks_.empty()) status = Quantize(server, progress);
    if (status.ok() && !plan_.AnyFailed(shard_)) status = MakeBlocks(progress);
    if (status.ok()) status = events_.CheckStopped();
    if (!status.ok() || plan_.AnyFailed(shard_)) return status;
    shard_.rounded_count =
        std::count(is_rounded_.begin(), is_rounded_.end(), uint8_t{true});
    const absl::StatusOr<uint64_t> size = builder_->Finish();
    if (!size.ok()) return size.status();
    shard_.file_bytes = *size;
    shard_.is_written = true;
    return absl::OkStatus();
  }

 private:
  absl::Status MakeEntries() {
    const absl::flat_hash_set<const files::FileTensor*> selected(
        shard_.selected.begin(), shard_.selected.end());
    const absl::flat_hash_map<const files::FileTensor*, const files::GgufType*>
        blocks(shard_.blocks.begin(), shard_.blocks.end());
    for (const files::FileTensor& tensor : shard_.input.tensors()) {
      const auto made = blocks.find(&tensor);
      if (made != blocks.end()) {
        made_.push_back(entries_.size());
        entries_.push_back({tensor.name, made->second, tensor.shape});
        continue;
      }
      std::optional<EncodingSpec> spec;
      if (selected.contains(&tensor)) spec = plan_.SpecOf(tensor);
      absl::StatusOr<files::GgufEntry> entry =
          GgufEntryOf(options_.output.path, shard_.input, tensor,
                      spec.has_value() ? &*spec : nullptr);
      if (!entry.ok()) return entry.status();
      if (spec.has_value()) {
        tasks_.push_back({&tensor, *spec, &plan_.outcomes.at(tensor.name)});
        quantized_.push_back(entries_.size());
      } else {
        copied_.push_back(entries_.size());
      }
      entries_.push_back(*std::move(entry));
    }
    is_rounded_.resize(tasks_.size());
    return absl::OkStatus();
  }

  // Begins the file with the metadata of the input, or of --metadata.
  absl::Status Create() {
    std::optional<files::GgufReader> given;
    if (!options_.metadata.empty()) {
      absl::StatusOr<files::GgufReader> opened =
          files::GgufReader::Open(options_.metadata);
      if (!opened.ok()) return opened.status();
      given.emplace(*std::move(opened));
    }
    const files::GgufReader* const source =
        given.has_value() ? &*given : shard_.input.gguf();
    if (source == nullptr) {
      events_.Note(absl::StrCat(
          options_.output.path,
          " gets no metadata of a model, without which llama.cpp does not "
          "load it; --metadata FILE.gguf takes those of another file"));
    }
    const std::optional<std::string> file_type = FileTypePair();
    std::vector<std::string> own = {
        files::GgufUint32Pair(kVersionKey, kVersion)};
    if (file_type.has_value()) own.push_back(*file_type);
    std::vector<absl::string_view> pairs(own.begin(), own.end());
    if (source != nullptr) {
      for (const files::GgufPair& pair : source->pairs()) {
        const bool is_replaced =
            pair.key == kVersionKey ||
            (pair.key == kFileTypeKey && file_type.has_value());
        // They say that a model goes on in other files: this one does not.
        if (is_replaced || absl::StartsWith(pair.key, kSplitKeys)) continue;
        pairs.emplace_back(reinterpret_cast<const char*>(pair.bytes.data()),
                           pair.bytes.size());
      }
    }
    absl::StatusOr<std::unique_ptr<files::GgufBuilder>> builder =
        files::GgufBuilder::Create(
            options_.output.path, shard_.if_exists, pairs,
            source != nullptr ? source->alignment() : files::kGgufAlignment,
            entries_);
    if (!builder.ok()) return builder.status();
    builder_ = *std::move(builder);
    return absl::OkStatus();
  }

  // The type that most elements in blocks have; none where none are in blocks,
  // or most in blocks that are only copied here.
  std::optional<std::string> FileTypePair() const {
    std::map<absl::string_view, std::pair<uint64_t, const files::GgufType*>>
        counts;
    for (const files::GgufEntry& entry : entries_) {
      if (entry.type->block_elements == 1) continue;
      auto& [count, type] = counts[entry.type->name];
      type = entry.type;
      count += entry.SizeBytes() / static_cast<uint64_t>(type->block_bytes) *
               static_cast<uint64_t>(type->block_elements);
    }
    const auto most = std::max_element(counts.begin(), counts.end(),
                                       [](const auto& a, const auto& b) {
                                         return a.second.first < b.second.first;
                                       });
    if (most == counts.end()) return std::nullopt;
    const uint32_t file_type = GgufFileType(*most->second.second);
    if (file_type == 0) return std::nullopt;
    return files::GgufUint32Pair(kFileTypeKey, file_type);
  }

  // Writes what is not quantized.
  absl::Status Copy() {
    for (const size_t index : copied_) {
      if (absl::Status s = events_.CheckStopped(); !s.ok()) return s;
      const files::FileTensor& tensor = shard_.input.tensors()[index];
      const std::shared_ptr<const void> hold = tensor.Hold();
      const auto blocks = shard_.input.blocks().find(tensor.name);
      const absl::Span<const uint8_t> data =
          blocks == shard_.input.blocks().end() ? tensor.data
                                                : blocks->second.data;
      const absl::Status status = builder_->Write(index, data);
      if (!status.ok()) return status;
      plan_.outcomes[tensor.name].output_bytes = data.size();
    }
    return absl::OkStatus();
  }

  // Writes the blocks that are made here.
  absl::Status MakeBlocks(JobProgress* progress) {
    for (const size_t index : made_) {
      if (absl::Status s = events_.CheckStopped(); !s.ok()) return s;
      const files::FileTensor& tensor = shard_.input.tensors()[index];
      Outcome& outcome = plan_.outcomes.at(tensor.name);
      v1::ErrorMetrics metrics;
      const absl::StatusOr<std::vector<uint8_t>> blocks =
          MakeGgufBlocks(tensor, *entries_[index].type, &metrics,
                         plan_.importance.importance.WeightsOf(tensor.name),
                         &outcome.coarse_scale_count);
      progress->Add(tensor.data.size(), tensor.name);
      if (!blocks.ok()) {
        outcome.status = blocks.status();
        continue;
      }
      const absl::Status status = builder_->Write(index, *blocks);
      if (!status.ok()) return status;
      outcome.is_quantized = true;
      outcome.format = std::string(entries_[index].type->name);
      outcome.output_bytes = blocks->size();
      if (options_.evaluate) outcome.metrics = metrics;
    }
    return absl::OkStatus();
  }

  absl::Status Quantize(QuantizeServer* server, JobProgress* progress) {
    TensorSink sink;
    sink.write = [this](
                     size_t i,
                     const QuantizeResult& result) -> absl::StatusOr<uint64_t> {
      const size_t index = quantized_[i];
      bool is_rounded = false;
      const absl::StatusOr<std::vector<uint8_t>> blocks =
          PackGguf(*entries_[index].type, result.header.encoding(),
                   result.scales.view(), result.codes, &is_rounded);
      if (!blocks.ok()) return blocks.status();
      is_rounded_[i] = is_rounded;
      const absl::Status status = builder_->Write(index, *blocks);
      if (!status.ok()) return status;
      return blocks->size();
    };
    return server->Quantize(sink, &tasks_, progress);
  }

  const QuantizeOptions& options_;
  const JobEvents& events_;
  QuantizePlan& plan_;
  Shard& shard_;
  // Entries of all tensors of the shard.
  std::vector<files::GgufEntry> entries_;
  // Tensors that are quantized, and their indices among the entries.
  std::vector<TensorTask> tasks_;
  std::vector<size_t> quantized_;
  // By task: true if a minimum was rounded.
  std::vector<uint8_t> is_rounded_;
  // Indices of entries whose blocks are made here, and of the copied ones.
  std::vector<size_t> made_;
  std::vector<size_t> copied_;
  std::unique_ptr<files::GgufBuilder> builder_;
};

// The first type whose blocks are made here; empty for none.
std::string BlockTypeOf(const SpecSet& specs) {
  if (specs.has_base && !specs.base.gguf_type.empty()) {
    return specs.base.gguf_type;
  }
  for (const SpecSet::Override& entry : specs.overrides) {
    if (!entry.spec.gguf_type.empty()) return entry.spec.gguf_type;
  }
  return "";
}

}  // namespace

absl::Status CheckGgufOptions(const QuantizeOptions& options,
                              const SpecSet& specs) {
  const std::string type = BlockTypeOf(specs);
  if (!type.empty() && !options.IsGguf()) {
    return ArgumentInvalidError(absl::StrCat(
        "expected a .gguf file as the output, which alone has ", type));
  }
  if (!type.empty() && options.store) {
    return ArgumentInvalidError(absl::StrCat(
        "expected --no-store with ", type,
        ": quantctl makes its blocks itself, without an encoding to store"));
  }
  if (!type.empty() && options.rounding.IsCompensated()) {
    return ArgumentInvalidError(absl::StrCat(
        "expected --rounding nearest with ", type,
        ": quantctl makes its blocks itself; specs of the server, such as "
        "int4:group:32:scale=float16, can be compensated"));
  }
  if (!options.IsGguf()) {
    return options.metadata.empty()
               ? absl::OkStatus()
               : ArgumentInvalidError(
                     "expected --metadata with a .gguf file as the output");
  }
  if (files::IsFolder(options.input)) {
    return ArgumentInvalidError(
        "expected a file as the input of a .gguf file, got a folder");
  }
  if (options.part.has_value() || options.join || options.keep_going) {
    return ArgumentInvalidError(
        "expected a .gguf file without --part, --join and --keep-going");
  }
  return absl::OkStatus();
}

absl::Status WriteGguf(const QuantizeOptions& options, const JobEvents& events,
                       QuantizeServer* server, QuantizePlan* plan,
                       JobProgress* progress) {
  return GgufOutput(options, events, plan).Write(server, progress);
}

}  // namespace quantd::jobs
