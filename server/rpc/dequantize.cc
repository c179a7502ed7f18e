// Dequantize: codes > encoding > reals, as they arrive.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/dequantize/dequantize.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/rpc/code_stream.h"
#include "server/rpc/stream_rpcs.h"
#include "server/rpc/tensor_input.h"
#include "server/rpc/tensor_job.h"
#include "server/wire/encoding_proto.h"

namespace quantd::server {
namespace {

// What a header says of its encoding. Errors are at its field.
absl::StatusOr<EncodingSource> OpenSource(const RpcEnvironment& env,
                                          const v1::DequantizeHeader& header) {
  switch (header.encoding_source_case()) {
    case v1::DequantizeHeader::kReference: {
      absl::StatusOr<EncodingSource> source =
          EncodingSource::Open(env, header.reference(), header.tensor().name());
      if (source.ok()) return source;
      return core::WithField(source.status(), "header.reference");
    }
    case v1::DequantizeHeader::kEncoding: {
      absl::StatusOr<EncodingSource> source =
          EncodingSource::Open(header.encoding());
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
                TensorDescription description, EncodingSource source)
      : env_(env),
        request_(std::move(request)),
        description_(std::move(description)),
        source_(std::move(source)) {
    // It may be large, and is in the source by now.
    if (request_.has_encoding()) request_.mutable_encoding()->Clear();
  }

  bool StartWaits() const override { return source_.waits(); }

  absl::Status Start(ChunkWriter* out) override {
    absl::StatusOr<ResolvedEncoding> resolved =
        source_.Resolve(env_, description_.shape);
    if (!resolved.ok()) {
      return core::WithField(resolved.status(), request_.has_reference()
                                                    ? "header.reference"
                                                    : "header.encoding");
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
    // Codes whose reals fill one response.
    const int64_t granules = std::max<int64_t>(
        1, env_.limits.response_chunk_bytes / geometry_.granule_real_bytes());
    frame_.quantum_bytes = granules * geometry_.granule_code_bytes;
    first_element_ = geometry_.CodesIndex(frame_.begin_bytes);

    v1::DequantizeResponseHeader header;
    *header.mutable_name() = request_.tensor().name();
    if (!request_.omit_encoding()) {
      EncodingToProto(*resolved_.encoding, header.mutable_encoding());
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

  void BeginQuantum(int64_t offset_bytes, int64_t bytes,
                    ChunkWriter* out) override {
    reals_offset_ = RealsOffset(offset_bytes);
    const int64_t size = RealsOffset(offset_bytes + bytes) - reals_offset_;
    reals_ = {out->AddData(reals_offset_, size), static_cast<size_t>(size)};
  }

  absl::Status Consume(int64_t offset_bytes,
                       absl::Span<const uint8_t> data) override {
    const int64_t first = geometry_.CodesIndex(offset_bytes);
    const int64_t last =
        geometry_.CodesIndex(offset_bytes + static_cast<int64_t>(data.size()));
    core::Dequantize(
        *resolved_.encoding, *resolved_.layout, description_.element_type,
        first, last - first, data.data(),
        reals_.data() + (first * geometry_.real_bytes - reals_offset_),
        env_.pool);
    return absl::OkStatus();
  }

  void EndQuantum() override {
    checksum_.Update(reals_);
    env_.metrics->PayloadOut(static_cast<int64_t>(reals_.size()));
  }

  absl::StatusOr<bool> Finish(ChunkWriter* out) override {
    v1::DequantizeSummary summary;
    const int64_t count =
        geometry_.CodesIndex(frame_.end_bytes) - first_element_;
    summary.set_count(count);
    summary.set_checksum_xxh3(checksum_.Digest());
    out->SetSummary(summary);
    env_.metrics->Elements(Rpc::kDequantize, format_, count);
    return true;
  }

 private:
  // Offset of the real whose codes are at `codes_offset_bytes`.
  int64_t RealsOffset(int64_t codes_offset_bytes) const {
    return geometry_.CodesIndex(codes_offset_bytes) * geometry_.real_bytes;
  }

  const RpcEnvironment& env_;
  v1::DequantizeHeader request_;
  const TensorDescription description_;
  const EncodingSource source_;
  // From Start on.
  ResolvedEncoding resolved_;
  const core::FormatInfo* format_ = nullptr;
  CodeGeometry geometry_;
  Checksum checksum_;
  int64_t first_element_ = 0;
  // Reals of the current quantum, and their offset in the tensor.
  absl::Span<uint8_t> reals_;
  int64_t reals_offset_ = 0;
};

class DequantizeRpc final : public TensorRpc {
 public:
  explicit DequantizeRpc(const RpcEnvironment& env) : env_(env) {}

  Rpc id() const override { return Rpc::kDequantize; }

  absl::StatusOr<std::unique_ptr<TensorJob>> Open(
      const std::string& bytes) override {
    absl::StatusOr<v1::DequantizeHeader> header =
        ParseHeader<v1::DequantizeHeader>(bytes);
    if (!header.ok()) return header.status();
    absl::StatusOr<TensorDescription> description =
        CheckDescription(env_, header->tensor());
    if (!description.ok()) return description.status();
    absl::StatusOr<EncodingSource> source = OpenSource(env_, *header);
    if (!source.ok()) return source.status();
    return std::make_unique<DequantizeJob>(
        env_, *std::move(header), *std::move(description), *std::move(source));
  }

 private:
  const RpcEnvironment& env_;
};

}  // namespace

std::unique_ptr<TensorRpc> MakeDequantizeRpc(const RpcEnvironment& env) {
  return std::make_unique<DequantizeRpc>(env);
}

}  // namespace quantd::server
