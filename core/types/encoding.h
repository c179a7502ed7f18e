// How codes stand for reals.

#ifndef QUANTD_CORE_TYPES_ENCODING_H_
#define QUANTD_CORE_TYPES_ENCODING_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/formats/number_format.h"
#include "core/types/block_layout.h"

namespace quantd::core {

// Zero points outside the codes (exclude_zero) stay within +-kMaxZeroPoint, so
// that q - zero_point is exact in float32.
constexpr int32_t kMaxZeroPoint = 1 << 22;

//   q  = clamp(rint(x / scale) + zero_point, qmin, qmax)
//   x' = (q - zero_point) * scale
//
// in float32 for float32, float16 and bfloat16 tensors, in float64 for float64
// ones; ties to even; ONNX QuantizeLinear opset 25.
struct Encoding {
  NumberFormat format{};
  // Per dimension, 0 for the whole; empty for per tensor. See BlockLayout.
  std::vector<int64_t> block_size;
  // One per scale index, row-major.
  std::vector<float> scale;
  // As many as scales, or none: all 0.
  std::vector<int32_t> zero_point;
  // Smallest and largest code that quantizing produces.
  int32_t qmin = 0;
  int32_t qmax = 0;
  // The range leaves out zero: zero points may lie outside [qmin, qmax].
  bool exclude_zero = false;
  // Scale indices whose data were all zero or empty.
  int64_t degenerate_count = 0;

  friend bool operator==(const Encoding& a, const Encoding& b);
};

// Checks an encoding by itself.
// Errors: FORMAT_UNKNOWN, FORMAT_NOT_IMPLEMENTED, SCALE_INVALID (not finite,
// not positive, below the smallest normal float32), SCALE_COUNT (none, or
// zero points neither as many nor none), ZERO_POINT_RANGE, CODE_RANGE_INVALID
// (qmin and qmax outside the format, or qmin >= qmax), BLOCK_SIZE_INVALID.
absl::Status ValidateEncoding(const Encoding& encoding);

// Checks that a valid encoding fits a tensor of that layout.
// Errors: SCALE_COUNT.
absl::Status CheckEncodingFits(const Encoding& encoding,
                               const BlockLayout& layout);

}  // namespace quantd::core

#endif  // QUANTD_CORE_TYPES_ENCODING_H_
