// Dequantize: codes > encoding > reals, as they arrive.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/dequantize/dequantize.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/parallel/thread_pool.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/rpc/answer_bytes.h"
#include "server/rpc/caller.h"
#include "server/rpc/code_geometry.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/scale_stream.h"
#include "server/rpc/stream_rpcs.h"
#include "server/rpc/tensor_header.h"
#include "server/rpc/tensor_job.h"
#include "server/shared_memory/region.h"
#include "server/shared_memory/region_registry.h"
#include "server/shared_memory/shared_blocks.h"
#include "server/wire/encoding_proto.h"

namespace quantd::server {
namespace {

// Opens the encoding that a header gives. Errors are at its field.
absl::StatusOr<EncodingSource> OpenSource(const RpcEnvironment& env,
                                          const Caller& caller,
                                          const v1::DequantizeHeader& header) {
  switch (header.encoding_source_case()) {
    case v1::DequantizeHeader::kReference: {
      absl::StatusOr<EncodingSource> source = EncodingSource::Open(
          caller, header.reference(), header.tensor().name());
      if (source.ok()) return source;
      return core::WithField(source.status(), "header.reference");
    }
    case v1::DequantizeHeader::kEncoding: {
      absl::StatusOr<EncodingSource> source =
          EncodingSource::Open(env, header.encoding());
      if (source.ok()) return source;
      return core::WithField(source.status(), "header.encoding");
    }
    case v1::DequantizeHeader::ENCODING_SOURCE_NOT_SET:
      break;
  }
  return core::WithField(core::EncodingMissingError(), "header");
}

class DequantizeJob final : public TensorJob {
 public:
  DequantizeJob(const RpcEnvironment& env, v1::DequantizeHeader request,
                TensorDescription description, EncodingSource source,
                absl::optional<SharedBytes> output)
      : env_(env),
        request_(std::move(request)),
        description_(std::move(description)),
        source_(std::move(source)),
        source_field_(request_.has_reference() ? "header.reference"
                                               : "header.encoding"),
        output_(std::move(output)) {
    // They may be large, and are in the source by now.
    request_.clear_encoding_source();
  }

  StoreUse ResolveUse() const override {
    return source_.waits() ? StoreUse::kRead : StoreUse::kNone;
  }
  bool light() const override {
    return request_.omit_encoding() || !source_.is_large();
  }

  absl::Status Resolve(ChunkWriter* out) override {
    absl::StatusOr<ResolvedEncoding> resolved =
        source_.Resolve(env_, description_,
                        request_.omit_encoding() ? ScaleTransport::kChunks
                                                 : ScaleTransport::kOneMessage);
    if (!resolved.ok()) {
      return core::WithField(resolved.status(), source_field_);
    }
    resolved_ = *std::move(resolved);
    format_ = core::FindFormat(resolved_.encoding->format);
    geometry_ = {description_.element_count,
                 core::ElementSizeBytes(description_.element_type),
                 format_->codes_per_byte(),
                 format_->SizeBytes(format_->codes_per_byte())};
    absl::StatusOr<v1::ByteRange> range =
        CheckRange(request_.has_range() ? &request_.range() : nullptr,
                   geometry_.codes_size_bytes(), geometry_.granule_code_bytes);
    if (!range.ok()) return core::WithField(range.status(), "header.range");
    frame_.begin_bytes = range->begin_bytes();
    frame_.end_bytes = range->end_bytes();
    frame_.unit_bytes = geometry_.granule_code_bytes;
    frame_.granule_bytes = geometry_.granule_code_bytes;
    absl::Status status =
        CheckOutput(output_, RealsOffset(frame_.end_bytes) -
                                 RealsOffset(frame_.begin_bytes));
    if (!status.ok()) return status;
    // Codes whose reals fill one response, if they go there.
    frame_.quantum_bytes =
        CodesOfReals(output_.has_value() ? kSharedQuantumBytes
                                         : env_.limits.response_chunk_bytes);
    first_element_ = geometry_.CodesIndex(frame_.begin_bytes);
    status = OpenIncoming(env_, first_element_,
                          geometry_.CodesIndex(frame_.end_bytes),
                          /*keep_all=*/false, &resolved_);
    if (!status.ok()) return core::WithField(status, source_field_);
    answer_.emplace(output_, RealsOffset(frame_.begin_bytes));

    v1::DequantizeResponseHeader header;
    *header.mutable_name() = request_.tensor().name();
    if (!request_.omit_encoding()) {
      if (resolved_.in_chunks) {
        EncodingWithoutScalesToProto(*resolved_.encoding,
                                     resolved_.chunks_have_zero_points,
                                     header.mutable_encoding());
      } else {
        EncodingToProto(*resolved_.encoding, header.mutable_encoding());
      }
    }
    header.set_etag(resolved_.etag);
    header.mutable_shape()->Assign(description_.shape.begin(),
                                   description_.shape.end());
    header.set_element_type(request_.tensor().element_type());
    header.set_size_bytes(geometry_.reals_size_bytes());
    header.mutable_range()->set_begin_bytes(RealsOffset(frame_.begin_bytes));
    header.mutable_range()->set_end_bytes(RealsOffset(frame_.end_bytes));
    out->SetHeader(header);
    return absl::OkStatus();
  }

  absl::Status PushScales(absl::Span<const std::string> scales) override {
    if (resolved_.incoming == nullptr) return TensorJob::PushScales(scales);
    return resolved_.incoming->Push(scales);
  }

  void BeginQuantum(int64_t offset_bytes, int64_t bytes,
                    ChunkWriter* out) override {
    const int64_t begin = RealsOffset(offset_bytes);
    answer_->Begin(begin, RealsOffset(offset_bytes + bytes) - begin, out);
  }

  absl::Status Feed(int64_t offset_bytes,
                    absl::Span<const uint8_t> data) override {
    absl::Status status =
        Advance(offset_bytes, static_cast<int64_t>(data.size()));
    if (!status.ok()) return status;
    Dequantize(offset_bytes, data, env_.pool);
    return absl::OkStatus();
  }

  absl::Status FeedShared(int64_t offset_bytes,
                          const std::shared_ptr<const Region>& region,
                          absl::Span<const uint8_t> shared,
                          core::ThreadPool* pool, PrivateCopy* copy) override {
    if (absl::Status status = CheckApart(output_, region, shared);
        !status.ok()) {
      return status;
    }
    absl::Status status =
        Advance(offset_bytes, static_cast<int64_t>(shared.size()));
    if (!status.ok()) return status;
    const int64_t end_bytes =
        offset_bytes + static_cast<int64_t>(shared.size());
    const int64_t block_bytes = CodesOfReals(kSharedBlockBytes);
    ForEachBlock(
        pool, shared, block_bytes,
        [&](int64_t block, absl::Span<const uint8_t> codes) {
          Dequantize(offset_bytes + block * block_bytes, codes, nullptr);
        },
        [&](int64_t block) {
          answer_->Made(RealsOffset(
              std::min(offset_bytes + (block + 1) * block_bytes, end_bytes)));
        });
    return absl::OkStatus();
  }

  void EndQuantum() override { answer_->End(env_.metrics); }

  absl::StatusOr<bool> Finish(ChunkWriter* out) override {
    v1::DequantizeSummary summary;
    const int64_t count =
        geometry_.CodesIndex(frame_.end_bytes) - first_element_;
    summary.set_count(count);
    summary.set_checksum_xxh3(answer_->Digest());
    out->SetSummary(summary);
    env_.metrics->Elements(Rpc::kDequantize, format_, count);
    return true;
  }

 private:
  // Makes ready for codes whose scales come in chunks.
  // Errors: SCALE_COUNT.
  absl::Status Advance(int64_t offset_bytes, int64_t bytes) {
    if (resolved_.incoming == nullptr) return absl::OkStatus();
    const int64_t first = geometry_.CodesIndex(offset_bytes);
    return resolved_.incoming->Advance(
        first, geometry_.CodesIndex(offset_bytes + bytes) - first,
        std::numeric_limits<int64_t>::max());
  }

  void Dequantize(int64_t offset_bytes, absl::Span<const uint8_t> codes,
                  core::ThreadPool* pool) {
    const int64_t first = geometry_.CodesIndex(offset_bytes);
    const int64_t last =
        geometry_.CodesIndex(offset_bytes + static_cast<int64_t>(codes.size()));
    core::Dequantize(*resolved_.encoding, *resolved_.layout,
                     description_.element_type, first, last - first,
                     codes.data(), answer_->At(first * geometry_.real_bytes),
                     pool);
  }

  // Bytes of the codes of at most `real_bytes` of reals, at least one granule.
  int64_t CodesOfReals(int64_t real_bytes) const {
    return std::max<int64_t>(1, real_bytes / geometry_.granule_real_bytes()) *
           geometry_.granule_code_bytes;
  }

  // Offset of the real whose codes are at `codes_offset_bytes`.
  int64_t RealsOffset(int64_t codes_offset_bytes) const {
    return geometry_.CodesIndex(codes_offset_bytes) * geometry_.real_bytes;
  }

  const RpcEnvironment& env_;
  v1::DequantizeHeader request_;
  const TensorDescription description_;
  const EncodingSource source_;
  const absl::string_view source_field_;
  // Shared memory for the reals, if they do not go into messages.
  const absl::optional<SharedBytes> output_;
  // From Resolve on.
  ResolvedEncoding resolved_;
  const core::FormatInfo* format_ = nullptr;
  CodeGeometry geometry_;
  int64_t first_element_ = 0;
  absl::optional<AnswerBytes> answer_;
};

class DequantizeRpc final : public TensorRpc {
 public:
  explicit DequantizeRpc(const RpcEnvironment& env) : env_(env) {}

  Rpc id() const override { return Rpc::kDequantize; }

  absl::StatusOr<std::unique_ptr<TensorJob>> Check(
      const std::string& bytes, const Caller& caller) override {
    absl::StatusOr<ParsedHeader<v1::DequantizeHeader>> parsed =
        ParseHeader<v1::DequantizeHeader>(env_, bytes);
    if (!parsed.ok()) return parsed.status();
    v1::DequantizeHeader& header = parsed->header;
    absl::StatusOr<TensorDescription> description =
        CheckDescription(env_, header.tensor());
    if (!description.ok()) return description.status();
    absl::StatusOr<EncodingSource> source = OpenSource(env_, caller, header);
    if (!source.ok()) return source.status();
    absl::StatusOr<absl::optional<SharedBytes>> output =
        FindOutput(header, caller.shared_memory);
    if (!output.ok()) return output.status();
    return std::make_unique<DequantizeJob>(
        env_, std::move(header), *std::move(description), *std::move(source),
        *std::move(output));
  }

 private:
  const RpcEnvironment& env_;
};

}  // namespace

std::unique_ptr<TensorRpc> MakeDequantizeRpc(const RpcEnvironment& env) {
  return std::make_unique<DequantizeRpc>(env);
}

}  // namespace quantd::server
