// How codes stand for reals.

#ifndef QUANTD_CORE_TYPES_ENCODING_H_
#define QUANTD_CORE_TYPES_ENCODING_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "core/types/block_layout.h"

namespace quantd::core {

// Zero points outside the codes (exclude_zero) stay within +-kMaxZeroPoint, so
// that q - zero_point is exact in float32.
constexpr int32_t kMaxZeroPoint = 1 << 22;

// How codes stand for reals. Integer formats:
//
//   q  = clamp(rint(x / scale) + zero_point, qmin, qmax)
//   x' = (q - zero_point) * scale
//
// With real zero points the sum is rounded:
//
//   q  = clamp(rint(x / scale + zero_point), qmin, qmax)
//
// Float formats and codebooks: q is the code whose value is nearest to
// x / scale, x' = value(q) * scale; see core/formats/codec.h for ties, overflow
// and NaN. In float32 for float32, float16 and bfloat16 tensors, in float64 for
// float64 ones; rint takes ties to even; ONNX QuantizeLinear opset 25.
struct Encoding {
  NumberFormat format{};
  // Per dimension, 0 for the whole; empty for per tensor. See BlockLayout.
  std::vector<int64_t> block_size;
  // One per scale index, row-major. What quantizing computes with; where the
  // scale type has codes they follow from those, see DeriveScales.
  std::vector<float> scale;
  // Zero points: as many as scales, or none if all are 0. Integer formats only;
  // all 0 with int32.
  std::vector<int32_t> zero_point;
  // Zero points between codes, in place of those: as many as scales, or none.
  // Integer formats other than int32.
  std::vector<float> real_zero_point;
  // Zero points are those of real_zero_point, which may not be here yet.
  bool zero_points_are_real = false;
  // Smallest and largest code that quantizing produces; of float formats and
  // codebooks always those of the format (a codebook's: its entries).
  int32_t qmin = 0;
  int32_t qmax = 0;
  // The range leaves out zero: zero points may lie outside [qmin, qmax].
  bool exclude_zero = false;
  // Scale indices whose data were all zero or empty.
  int64_t degenerate_count = 0;
  // Never kDefault in a valid encoding.
  ScaleType scale_type = ScaleType::kFloat32;
  // Codes of the scales, one per scale index, where HasScaleCodes.
  std::vector<uint8_t> scale_code;
  // Outer scales, one per outer scale index, where HasOuterScales.
  std::vector<float> outer_scale;
  // In elements of the tensor; empty for one outer scale.
  std::vector<int64_t> outer_block_size;
  // Formats whose codebook the encoding carries: ascending, finite, at least 2.
  std::vector<float> codebook;
  // Float formats: overflow becomes infinity or NaN.
  bool no_saturation = false;
  // ceil(shape[d] / block[d]); empty where it is not known, which it must be
  // with more than one outer scale.
  std::vector<int64_t> scale_shape;

  friend bool operator==(const Encoding& a, const Encoding& b);
};

inline bool HasZeroPoints(const Encoding& encoding) {
  return !encoding.zero_point.empty() || !encoding.real_zero_point.empty();
}

// Zero point of a scale index, as a number of either kind; 0 if there are none.
inline double ZeroPointAt(const Encoding& encoding, int64_t index) {
  if (!encoding.real_zero_point.empty()) return encoding.real_zero_point[index];
  return encoding.zero_point.empty() ? 0 : encoding.zero_point[index];
}

// The entries that codes index: the format's or the encoding's. Empty unless
// the format is a codebook.
absl::Span<const float> CodebookOf(const Encoding& encoding);

// Checks an encoding by itself. Errors name the field at fault.
// Errors:
//   FORMAT_UNKNOWN
//   SCALE_INVALID       not finite, not positive, below the smallest normal
//                       float32, or not a value of the scale type; E8M0 scales
//                       may be NaN and subnormal
//   SCALE_COUNT         no scales; another number of zero points, scale codes
//                       or outer scales than expected; scale_shape of another
//                       product
//   SCALE_TYPE_INVALID  not the one that the format prescribes; codes or outer
//                       scales where the type has none; zero points with scale
//                       codes
//   CODEBOOK_INVALID
//   ZERO_POINT_RANGE    also zero points or exclude_zero of a format that is
//                       not integer
//   CODE_RANGE_INVALID  qmin and qmax outside the format, qmin >= qmax, or not
//                       a float format's own; no_saturation where the format
//                       has neither infinity nor NaN
//   BLOCK_SIZE_INVALID  also an outer block that cuts a block, and no
//                       scale_shape with more than one outer scale
absl::Status ValidateEncoding(const Encoding& encoding);

// Like ValidateEncoding, but for an encoding that has no scales, zero points or
// outer scales yet: checks everything else.
// `has_zero_points`  some will come.
absl::Status ValidateWithoutScales(const Encoding& encoding,
                                   bool has_zero_points);

// The scale that a code stands for; see DeriveScales.
// Requires: HasScaleCodes, a known format.
float ScaleOfCode(const Encoding& encoding, uint8_t code, float outer_scale);

// Checks a scale by itself. `code`  where the scale type has codes.
// Errors: SCALE_INVALID, naming `index`, at "scale" or "scale_code".
absl::Status CheckScale(const Encoding& encoding, int64_t index, float scale,
                        uint8_t code);
// Errors: SCALE_INVALID, naming `index`, at "outer_scale".
absl::Status CheckOuterScale(int64_t index, float outer_scale);
// Errors: ZERO_POINT_RANGE, naming `index`, at "zero_point".
// Requires: an integer format.
absl::Status CheckZeroPoint(const Encoding& encoding, int64_t index,
                            int32_t zero_point);
// Like CheckZeroPoint, but for a real zero point, at "real_zero_point".
absl::Status CheckRealZeroPoint(const Encoding& encoding, int64_t index,
                                float zero_point);

// Fills `scale` in from the scale codes and outer scales; does nothing for
// other scale types.
//
//   kE8m0     2^(code - 127 + step_exponent), NaN for kE8m0Nan
//   kE4m3     float32(value(code) * outer)
//   kInteger  float32(code * outer)
//
// Scale index i uses outer scale o[d] = floor(i[d] * block[d] / outer block[d])
// in row-major order.
// Errors: those of ValidateEncoding that concern them.
absl::Status DeriveScales(Encoding* encoding);

// Scales of `scale_shape` as elements and outer blocks as their blocks: the
// scale index of element i is the outer scale index of scale i.
// Errors: BLOCK_SIZE_INVALID.
absl::StatusOr<BlockLayout> OuterLayout(const Encoding& encoding,
                                        absl::Span<const int64_t> scale_shape);

// Size in bytes of so many stored zero points: as codes of the format, real
// ones as float32.
int64_t ZeroPointsSizeBytes(const Encoding& encoding, int64_t count);

// Size in bytes of the stored scales: inner, outer and zero points, where the
// encoding has any. Requires: a valid encoding.
int64_t ScalesSizeBytes(const Encoding& encoding);

// Checks that a valid encoding fits a tensor of that layout, which is that of
// its block size.
// Errors: SCALE_COUNT (another number of scales or outer scales, or another
// scale_shape).
absl::Status CheckEncodingFits(const Encoding& encoding,
                               const BlockLayout& layout);

}  // namespace quantd::core

#endif  // QUANTD_CORE_TYPES_ENCODING_H_
