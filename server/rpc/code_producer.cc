#include "server/rpc/code_producer.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/parallel/thread_pool.h"
#include "core/quantize/quantize.h"
#include "core/types/block_layout.h"
#include "core/types/scale_window.h"
#include "server/rpc/provenance.h"
#include "server/shared_memory/region_registry.h"
#include "server/shared_memory/shared_blocks.h"
#include "server/wire/encoding_proto.h"
#include "server/wire/names.h"

namespace quantd::server {

absl::StatusOr<QuantizeTask> CheckQuantizeTask(const RpcEnvironment& env,
                                               const v1::QuantizeHeader& header,
                                               const Caller& caller) {
  absl::StatusOr<TensorDescription> description =
      CheckDescription(env, header.tensor());
  if (!description.ok()) return description.status();
  if (!v1::NanPolicy_IsValid(header.nan_policy())) {
    return core::WithField(
        core::EnumUnknownError("NanPolicy", header.nan_policy()),
        "header.nan_policy");
  }
  absl::StatusOr<absl::optional<SharedBytes>> output =
      FindOutput(header, caller.shared_memory);
  if (!output.ok()) return output.status();
  QuantizeTask task;
  task.output = *std::move(output);
  task.name = header.tensor().name();
  task.description = *std::move(description);
  task.nan_policy = static_cast<core::NanPolicy>(header.nan_policy());
  task.omit_encoding = header.omit_encoding();
  task.scales_in_chunks = header.scales_in_chunks();
  if (header.store() && task.description.slice.has_value()) {
    return core::WithField(
        core::ShapeInvalidError(
            "a slice with store, expected the whole tensor: its encoding is "
            "not that of the tensor"),
        "header.tensor.global_shape");
  }
  if (header.store() && !header.has_reference()) {
    absl::StatusOr<EncodingKey> key = KeyFromProto(task.name);
    if (!key.ok()) {
      return core::WithField(key.status(), "header.tensor.name");
    }
    absl::Status status = env.authenticator->CheckWrite(caller, key->model);
    if (!status.ok()) return core::WithField(status, "header.tensor.name");
    task.store_key = *std::move(key);
    task.store = caller.encodings;
    task.put = header.has_spec() ? MadeOfElements(env, header.spec())
                                 : MadeByClient(env);
  }
  return task;
}
CodeGeometry QuantizeGeometry(const TensorDescription& description,
                              const core::FormatInfo& format) {
  return {description.element_count,
          core::ElementSizeBytes(description.element_type),
          format.codes_per_byte(), format.SizeBytes(format.codes_per_byte())};
}

int64_t QuantumRealBytes(const RpcEnvironment& env, const QuantizeTask& task,
                         const CodeGeometry& geometry) {
  const int64_t granules =
      task.output.has_value()
          ? kSharedQuantumBytes / geometry.granule_real_bytes()
          : std::min(
                env.limits.chunk_bytes / geometry.granule_real_bytes(),
                env.limits.response_chunk_bytes / geometry.granule_code_bytes);
  return std::max<int64_t>(1, granules) * geometry.granule_real_bytes();
}

CodeProducer::CodeProducer(const RpcEnvironment& env, const QuantizeTask& task,
                           ResolvedEncoding resolved,
                           const v1::ByteRange& range)
    : env_(env),
      task_(task),
      resolved_(std::move(resolved)),
      format_(*core::FindFormat(resolved_.encoding->format)),
      geometry_(QuantizeGeometry(task.description, format_)),
      range_(range),
      answer_(task.output, geometry_.CodesOffsetOfReal(range.begin_bytes())) {
  if (!task.scales_in_chunks) return;
  const int64_t first = ElementOf(range.begin_bytes());
  const int64_t count = ElementOf(range.end_bytes()) - first;
  absl::StatusOr<core::BlockLayout> outer_layout =
      OuterLayoutOf(*resolved_.encoding, *resolved_.layout);
  // An encoding that was calibrated, or checked, has one.
  if (!outer_layout.ok()) return;
  scale_answer_.emplace(env, *std::move(outer_layout),
                        count > 0 ? resolved_.layout->ScaleBounds(first, count)
                                  : core::BlockLayout::ScaleRange{0, 0});
}

void CodeProducer::WriteHeader(ChunkWriter* out, int mantissa_bits) const {
  v1::QuantizeResponseHeader header;
  header.set_mantissa_bits(static_cast<uint32_t>(mantissa_bits));
  *header.mutable_name() = task_.name;
  if (!task_.omit_encoding) SetEncoding(header.mutable_encoding());
  header.set_etag(resolved_.etag);
  header.mutable_shape()->Assign(task_.description.shape.begin(),
                                 task_.description.shape.end());
  header.set_size_bytes(geometry_.codes_size_bytes());
  header.mutable_range()->set_begin_bytes(
      geometry_.CodesOffsetOfReal(range_.begin_bytes()));
  header.mutable_range()->set_end_bytes(
      geometry_.CodesOffsetOfReal(range_.end_bytes()));
  out->SetHeader(header);
}

void CodeProducer::Begin(int64_t offset_bytes, int64_t bytes,
                         ChunkWriter* out) {
  SendScales(ElementOf(offset_bytes), ElementOf(bytes), out);
  const int64_t begin = geometry_.CodesOffsetOfReal(offset_bytes);
  answer_.Begin(begin,
                geometry_.CodesOffsetOfReal(offset_bytes + bytes) - begin, out);
}

absl::Status CodeProducer::Quantize(int64_t offset_bytes,
                                    absl::Span<const uint8_t> data,
                                    core::QuantizeCounts* counts,
                                    core::ThreadPool* pool) {
  const int64_t first = offset_bytes / geometry_.real_bytes;
  return core::Quantize(
      *resolved_.encoding, *resolved_.layout, task_.description.element_type,
      task_.nan_policy, first,
      static_cast<int64_t>(data.size()) / geometry_.real_bytes, data.data(),
      answer_.At(geometry_.CodesOffset(first)), counts, pool);
}

absl::Status CodeProducer::Advance(int64_t offset_bytes, int64_t bytes) {
  if (resolved_.incoming == nullptr) return absl::OkStatus();
  return resolved_.incoming->Advance(ElementOf(offset_bytes), ElementOf(bytes),
                                     scale_answer_.has_value()
                                         ? scale_answer_->next()
                                         : std::numeric_limits<int64_t>::max());
}

absl::Status CodeProducer::QuantizeShared(int64_t offset_bytes,
                                          absl::Span<const uint8_t> shared) {
  const int64_t block_bytes =
      kSharedBlockBytes - kSharedBlockBytes % geometry_.granule_real_bytes();
  const int64_t end_bytes = offset_bytes + static_cast<int64_t>(shared.size());
  const int64_t blocks =
      (end_bytes - offset_bytes + block_bytes - 1) / block_bytes;
  std::vector<core::QuantizeCounts> counts(blocks);
  std::vector<absl::Status> statuses(blocks);
  ForEachBlock(
      env_.pool, shared, block_bytes,
      [&](int64_t block, absl::Span<const uint8_t> part) {
        statuses[block] = Quantize(offset_bytes + block * block_bytes, part,
                                   &counts[block], nullptr);
      },
      [&](int64_t block) {
        answer_.Made(geometry_.CodesOffsetOfReal(
            std::min(offset_bytes + (block + 1) * block_bytes, end_bytes)));
      });
  for (int64_t block = 0; block < blocks; ++block) {
    if (!statuses[block].ok()) return statuses[block];
    counts_.Merge(counts[block]);
  }
  return absl::OkStatus();
}

void CodeProducer::Take(int64_t offset_bytes, absl::Span<const uint8_t> codes) {
  std::memcpy(answer_.At(geometry_.CodesOffsetOfReal(offset_bytes)),
              codes.data(), codes.size());
}

void CodeProducer::SendScales(int64_t end, const core::Encoding& encoding,
                              int64_t first, ChunkWriter* out) {
  if (!scale_answer_.has_value()) return;
  scale_answer_->SendUpTo(end, encoding, first, 0, out);
}

void CodeProducer::WriteSummary(ChunkWriter* out, absl::string_view etag,
                                int64_t degenerate_count) const {
  v1::QuantizeSummary summary;
  summary.set_etag(std::string(etag));
  if (scale_answer_.has_value()) {
    summary.set_degenerate_count(degenerate_count);
    scale_answer_->WriteSummary(&summary);
  }
  summary.set_count(counts_.total);
  summary.set_clipped_low_count(counts_.clipped_low);
  summary.set_clipped_high_count(counts_.clipped_high);
  summary.set_nan_count(counts_.nan);
  summary.set_positive_infinity_count(counts_.positive_infinity);
  summary.set_negative_infinity_count(counts_.negative_infinity);
  summary.set_checksum_xxh3(answer_.Digest());
  if (output_noise_.has_value())
    *summary.mutable_output_noise() = *output_noise_;
  out->SetSummary(summary);
  env_.metrics->Elements(Rpc::kQuantize, &format_, counts_.total);
  env_.metrics->NonFinite(counts_.nan + counts_.positive_infinity +
                          counts_.negative_infinity);
  // The infinities, all of which are clipped, were counted above.
  env_.metrics->Clipped(counts_.clipped_low + counts_.clipped_high -
                        counts_.positive_infinity - counts_.negative_infinity);
}

void CodeProducer::SetEncoding(v1::Encoding* proto) const {
  const core::Encoding& encoding = *resolved_.encoding;
  if (!task_.scales_in_chunks && !resolved_.in_chunks) {
    return EncodingToProto(encoding, proto);
  }
  EncodingWithoutScalesToProto(encoding,
                               resolved_.in_chunks
                                   ? resolved_.chunks_have_zero_points
                                   : core::HasZeroPoints(encoding),
                               proto);
  const absl::Span<const int64_t> shape = resolved_.layout->scale_shape();
  proto->mutable_scale_shape()->Assign(shape.begin(), shape.end());
}

void CodeProducer::SendScales(int64_t first, int64_t count, ChunkWriter* out) {
  if (!scale_answer_.has_value() || count == 0) return;
  const int64_t end = resolved_.layout->ScaleBounds(first, count).end;
  if (resolved_.incoming == nullptr) {
    scale_answer_->SendUpTo(end, *resolved_.encoding, 0, 0, out);
    return;
  }
  const core::ScaleWindow& window = resolved_.incoming->window();
  scale_answer_->SendUpTo(std::min(end, window.end()), window.encoding(),
                          window.begin(), window.first_outer(), out);
}

}  // namespace quantd::server
