#include "client/cpp/scale_receiver.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/element_bytes.h"
#include "client/cpp/errors.h"
#include "client/cpp/scale_chunks.h"
#include "client/cpp/scales.h"

namespace quantd::internal {

void ScaleReceiver::Reset(uint64_t size_bytes, Part* part) {
  part->size_bytes = size_bytes;
  part->received_bytes = 0;
  if (part->hash == nullptr) part->hash.reset(XXH3_createState());
  XXH3_64bits_reset(part->hash.get());
}

absl::Status ScaleReceiver::Begin(absl::Span<const int64_t> shape,
                                  Encoding* encoding) {
  const absl::StatusOr<ScaleCounts> counts = CountScales(shape, *encoding);
  if (!counts.ok()) return ResponseMalformedError(ErrorText(counts.status()));
  is_inline_ = !encoding->scales_in_chunks();
  ScaleBuffers taken;
  if (is_inline_) {
    taken = TakeScales(*encoding);
    *encoding =
        WithoutScales(*encoding, encoding->zero_point_size() > 0 ||
                                     encoding->real_zero_point_size() > 0);
  }
  encoding_ = *encoding;
  sink_status_ = absl::OkStatus();
  buffers_ = ScaleBuffers();
  const auto scale_count = static_cast<uint64_t>(counts->scale);
  Reset(scale_count *
            static_cast<uint64_t>(ScaleSizeBytes(ScaleTypeOf(*encoding))),
        &scale_);
  Reset(encoding->chunks_have_zero_points() ? scale_count * sizeof(int32_t) : 0,
        &zero_point_);
  Reset(static_cast<uint64_t>(counts->outer_scale) * sizeof(float),
        &outer_scale_);
  if (!is_inline_) return absl::OkStatus();
  absl::Status status = Take(taken.outer_scale.span(), sinks_.outer_scale,
                             &outer_scale_, &buffers_.outer_scale);
  status.Update(
      Take(taken.scale.span(), sinks_.scale, &scale_, &buffers_.scale));
  status.Update(Take(taken.zero_point.span(), sinks_.zero_point, &zero_point_,
                     &buffers_.zero_point));
  return status;
}

absl::Status ScaleReceiver::Take(absl::Span<const uint8_t> bytes,
                                 const Sink& sink, Part* part, Buffer* buffer) {
  if (bytes.empty()) return absl::OkStatus();
  if (bytes.size() > part->size_bytes - part->received_bytes) {
    return ResponseMalformedError(absl::StrCat(
        "expected scales of ", part->size_bytes, " bytes, got more"));
  }
  if (!sink) {
    if (buffer->bytes == nullptr) {
      buffer->bytes.reset(new uint8_t[part->size_bytes]);
      buffer->size_bytes = part->size_bytes;
    }
    std::memcpy(buffer->bytes.get() + part->received_bytes, bytes.data(),
                bytes.size());
  } else if (sink_status_.ok()) {
    sink_status_ = sink(part->received_bytes, bytes);
  }
  part->received_bytes += bytes.size();
  return absl::OkStatus();
}

absl::Status ScaleReceiver::Accept(absl::string_view bytes) {
  v1::ScaleChunk chunk;
  if (is_inline_ ||
      !chunk.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return ResponseMalformedError("expected scales in chunks");
  }
  const auto scale_bytes =
      static_cast<uint64_t>(ScaleSizeBytes(ScaleTypeOf(encoding_)));
  const absl::StatusOr<uint64_t> count = CountOfChunk(encoding_, chunk);
  if (!count.ok()) return count.status();
  const uint64_t first = scale_.received_bytes / scale_bytes;
  const uint64_t first_outer = outer_scale_.received_bytes / sizeof(float);
  if ((*count > 0 && chunk.first() != first) ||
      (!chunk.outer_scale().empty() && chunk.first_outer() != first_outer)) {
    return ResponseMalformedError(absl::StrCat(
        "expected scales from ", first, " and outer scales from ", first_outer,
        ", got ", chunk.first(), " and ", chunk.first_outer()));
  }
  const absl::Span<const uint8_t> scale = BytesOf(chunk.scale());
  const absl::Span<const uint8_t> outer = BytesOf(chunk.outer_scale());
  const absl::Span<const uint8_t> narrow = BytesOf(chunk.zero_point());
  XXH3_64bits_update(scale_.hash.get(), scale.data(), scale.size());
  XXH3_64bits_update(outer_scale_.hash.get(), outer.data(), outer.size());
  XXH3_64bits_update(zero_point_.hash.get(), narrow.data(), narrow.size());
  absl::Status status =
      Take(outer, sinks_.outer_scale, &outer_scale_, &buffers_.outer_scale);
  status.Update(Take(scale, sinks_.scale, &scale_, &buffers_.scale));
  if (!narrow.empty() && status.ok()) {
    const std::vector<int32_t> wide = WidenZeroPoints(encoding_, narrow);
    status = Take(BytesOf(wide), sinks_.zero_point, &zero_point_,
                  &buffers_.zero_point);
  }
  return status;
}

absl::Status ScaleReceiver::Finish(const v1::QuantizeSummary& summary) const {
  for (const Part* const part : {&scale_, &zero_point_, &outer_scale_}) {
    if (part->received_bytes != part->size_bytes) {
      return ResponseMalformedError(
          absl::StrCat("expected scales of ", part->size_bytes, " bytes, got ",
                       part->received_bytes));
    }
  }
  if (!sink_status_.ok() || is_inline_) return sink_status_;
  const auto check = [](uint64_t expected, const Part& part) {
    const uint64_t got = XXH3_64bits_digest(part.hash.get());
    return expected == got ? absl::OkStatus()
                           : ChecksumMismatchError(expected, got);
  };
  absl::Status status = check(summary.scale_checksum_xxh3(), scale_);
  if (zero_point_.size_bytes > 0) {
    status.Update(check(summary.zero_point_checksum_xxh3(), zero_point_));
  }
  if (outer_scale_.size_bytes > 0) {
    status.Update(check(summary.outer_scale_checksum_xxh3(), outer_scale_));
  }
  return status;
}

}  // namespace quantd::internal
