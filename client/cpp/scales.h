// Scales as data: raw bytes beside an encoding with scales_in_chunks.

#ifndef QUANTD_CLIENT_CPP_SCALES_H_
#define QUANTD_CLIENT_CPP_SCALES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/tensor.h"

namespace quantd {

// Bytes that the client allocated. Not zeroed first, hence no vector.
struct Buffer {
  std::unique_ptr<uint8_t[]> bytes;
  size_t size_bytes = 0;

  absl::Span<const uint8_t> span() const { return {bytes.get(), size_bytes}; }
};

// The scales of one encoding, little-endian, in row-major order. Somebody else
// owns the bytes. No alignment needed.
struct Scales {
  // In the type that they are stored in: float32, float16, bfloat16, or one
  // byte as v1::Encoding.scale_code has it.
  absl::Span<const uint8_t> scale;
  // int32, or float32 with zero_points_are_real; one for each scale. Empty: all
  // 0.
  absl::Span<const uint8_t> zero_point;
  // float32; only with E4M3 and INTEGER scales.
  absl::Span<const uint8_t> outer_scale;
};

// Scales that own their bytes.
struct ScaleBuffers {
  Buffer scale;
  Buffer zero_point;
  Buffer outer_scale;

  Scales view() const {
    return {scale.span(), zero_point.span(), outer_scale.span()};
  }
};

// Size of a stored scale: 1, 2 or 4 bytes.
int64_t ScaleSizeBytes(v1::ScaleType type);

// True if scales of that type stand under outer scales.
bool HasOuterScales(v1::ScaleType type);

// Number of scales, and of outer scales, of a tensor.
struct ScaleCounts {
  int64_t scale = 0;
  int64_t outer_scale = 0;
};
// Errors: ARGUMENT_INVALID for blocks that do not fit the shape.
absl::StatusOr<ScaleCounts> CountScales(absl::Span<const int64_t> shape,
                                        const Encoding& encoding);

// The scales of an encoding that has them itself.
ScaleBuffers TakeScales(const Encoding& encoding);

// The encoding without its scales and with scales_in_chunks, for those who send
// them beside it.
Encoding WithoutScales(const Encoding& encoding, bool has_zero_points);

// The encoding with these scales in it, and without scales_in_chunks. Of E8M0,
// E4M3 and INTEGER scales only scale_code and outer_scale are set, which is
// what requests need.
Encoding WithScales(const Encoding& encoding, const Scales& scales);

// The block size that a spec comes to.
// Requires: the server takes the spec.
std::vector<int64_t> BlockSizeOf(const EncodingSpec& spec,
                                 const std::vector<int64_t>& shape);

// The encoding that a spec will give, without qmin, qmax and scales, and with
// scales_in_chunks. With unsigned_if_non_negative the format may turn to the
// unsigned one of its width.
// Requires: the server takes the spec.
Encoding ExpectedEncoding(const EncodingSpec& spec,
                          const std::vector<int64_t>& shape);

}  // namespace quantd

#endif  // QUANTD_CLIENT_CPP_SCALES_H_
