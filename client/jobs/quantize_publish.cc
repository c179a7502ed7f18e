#include "client/jobs/quantize_publish.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "client/files/errors.h"
#include "client/files/safetensors.h"
#include "client/jobs/quantize_outcome.h"
#include "client/jobs/quantize_resume.h"
#include "client/models/quantized_layout.h"
#include "client/models/tensor_input.h"
#include "client/models/text.h"

namespace quantd::jobs {
namespace {

using TensorSet = absl::flat_hash_set<std::string>;

// Looks at the encodings of one run. Not thread-safe.
class Publisher {
 public:
  Publisher(const QuantizeOptions& options, const QuantizePlan& plan,
            const DraftRevision& draft, Client* client)
      : options_(options), plan_(plan), draft_(draft), client_(client) {}

  absl::Status Check() const {
    const absl::StatusOr<TensorSet> drafted = draft_.Tensors(client_);
    if (!drafted.ok()) return drafted.status();
    if (plan_.part.has_value() || !options_.IsCompressed()) {
      return absl::OkStatus();
    }
    const absl::StatusOr<bool> is_published = IsPublished(*drafted);
    if (!is_published.ok()) return is_published.status();
    for (const std::unique_ptr<Shard>& shard : plan_.shards) {
      if (*is_published || !(shard->is_kept || options_.join)) continue;
      const std::vector<std::string> missing = Missing(*shard, *drafted);
      if (!missing.empty()) return LackingError(*shard, missing.size());
    }
    return absl::OkStatus();
  }

  // *is_lacking says whether the draft is known not to have all encodings.
  absl::Status Publish(bool* is_lacking) const {
    const absl::StatusOr<TensorSet> drafted = draft_.Tensors(client_);
    if (!drafted.ok()) return drafted.status();
    const absl::StatusOr<bool> is_published = IsPublished(*drafted);
    if (!is_published.ok()) return is_published.status();
    if (*is_published) return absl::OkStatus();
    for (const std::unique_ptr<Shard>& shard : plan_.shards) {
      const std::vector<std::string> missing = Missing(*shard, *drafted);
      if (missing.empty()) continue;
      *is_lacking = true;
      const absl::Status status = PutMissing(*shard, missing);
      if (!status.ok()) return status;
    }
    *is_lacking = false;
    return draft_.Publish(client_);
  }

 private:
  // True if an earlier run has done it all.
  absl::StatusOr<bool> IsPublished(const TensorSet& drafted) const {
    if (!drafted.empty() ||
        !std::all_of(plan_.shards.begin(), plan_.shards.end(),
                     [](const auto& shard) { return shard->is_kept; })) {
      return false;
    }
    const absl::StatusOr<TensorSet> there = draft_.TargetTensors(client_);
    if (!there.ok()) return there.status();
    return std::all_of(
        plan_.shards.begin(), plan_.shards.end(),
        [&](const auto& shard) { return Missing(*shard, *there).empty(); });
  }

  // The tensors of a shard whose encodings are not there.
  std::vector<std::string> Missing(const Shard& shard,
                                   const TensorSet& there) const {
    std::vector<std::string> missing;
    for (const files::FileTensor* const tensor : shard.selected) {
      if (plan_.outcomes.at(tensor->name).is_quantized &&
          !there.contains(tensor->name)) {
        missing.push_back(tensor->name);
      }
    }
    return missing;
  }

  absl::Status LackingError(const Shard& shard, size_t count) const {
    return files::FileIncompleteError(
        shard.output_path,
        absl::StrCat("revision ", draft_.revision(), " lacks the encodings of ",
                     CountText(count),
                     " of its tensors, which are not read back from such a "
                     "file; ",
                     options_.join ? "do its parts again with "
                                   : "quantize it again with ",
                     plan_.is_folder ? "--restart" : "--force"));
  }

  // Puts encodings into the draft from the file that was written: those that an
  // earlier run published, or that somebody deleted.
  absl::Status PutMissing(const Shard& shard,
                          const std::vector<std::string>& missing) const {
    if (options_.IsCompressed() || options_.IsGguf() ||
        options_.output.IsStandardOutput()) {
      return LackingError(shard, missing.size());
    }
    const absl::StatusOr<TensorInput> written =
        TensorInput::Open(shard.output_path);
    if (!written.ok()) return written.status();
    for (const std::string& name : missing) {
      const auto json =
          written->metadata().find(absl::StrCat(kQuantizedKeyPrefix, name));
      const absl::StatusOr<QuantizedTensor> quantized =
          ReadQuantized(*written, shard.output_path, name,
                        json == written->metadata().end() ? "" : json->second);
      if (!quantized.ok()) return quantized.status();
      Encoding encoding = quantized->Whole();
      // The server sets the scale shape like this where it knows the shape.
      const std::vector<int64_t> block_size(encoding.block_size().begin(),
                                            encoding.block_size().end());
      const absl::StatusOr<std::vector<int64_t>> scale_shape =
          ScaleShape(quantized->shape, block_size);
      if (!scale_shape.ok()) return scale_shape.status();
      encoding.mutable_scale_shape()->Assign(scale_shape->begin(),
                                             scale_shape->end());
      const absl::Status status =
          client_->PutEncoding(draft_.NameOf(name), encoding, "").status();
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  const QuantizeOptions& options_;
  const QuantizePlan& plan_;
  const DraftRevision& draft_;
  Client* const client_;
};

}  // namespace

absl::StatusOr<std::string> DraftKeyOf(const QuantizeOptions& options,
                                       const QuantizePlan& plan,
                                       Client* client) {
  const std::string shared = RunKey(plan);
  if (!options.store || plan.part.has_value() || options.join) {
    return shared;
  }
  const std::string own = OwnRunKey(plan, options.output.path);
  if (std::none_of(plan.shards.begin(), plan.shards.end(),
                   [](const auto& shard) { return shard->is_kept; })) {
    return own;
  }
  const absl::StatusOr<TensorSet> drafted =
      DraftRevision(options.name, own).Tensors(client);
  if (!drafted.ok()) return drafted.status();
  return drafted->empty() ? shared : own;
}

absl::Status CheckDraft(const QuantizeOptions& options,
                        const QuantizePlan& plan, const DraftRevision& draft,
                        Client* client) {
  return Publisher(options, plan, draft, client).Check();
}

absl::Status PublishDraft(const QuantizeOptions& options,
                          const DraftRevision& draft, Client* client,
                          QuantizePlan* plan) {
  const absl::Status status =
      Publisher(options, *plan, draft, client).Publish(&plan->is_lacking);
  plan->is_published = status.ok();
  return status;
}

}  // namespace quantd::jobs
