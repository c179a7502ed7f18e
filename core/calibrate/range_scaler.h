// From the range of a block to its scale, as it will be stored.

#ifndef QUANTD_CORE_CALIBRATE_RANGE_SCALER_H_
#define QUANTD_CORE_CALIBRATE_RANGE_SCALER_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "core/calibrate/encoding_spec.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "core/types/encoding.h"

namespace quantd::core {

struct Range {
  double low;
  double high;

  // Magnitude of the larger end.
  double abs_max() const;
};

struct BlockScale {
  float scale;
  int32_t zero_point;
  // Only if the scale type has codes.
  uint8_t code;
  // Replaces zero_point where the encoding has real ones.
  float real_zero_point = 0;

  friend bool operator==(const BlockScale& a, const BlockScale& b) {
    return a.scale == b.scale && a.zero_point == b.zero_point &&
           a.code == b.code && a.real_zero_point == b.real_zero_point;
  }
};

// Makes room for so many zero points, of the kind that the encoding has.
void ResizeZeroPoints(size_t count, Encoding* encoding);
// Sets the zero point of a scale index if the encoding has room for it.
inline void SetZeroPoint(int64_t index, const BlockScale& scale,
                         Encoding* encoding) {
  if (!encoding->zero_point.empty()) {
    encoding->zero_point[index] = scale.zero_point;
  } else if (!encoding->real_zero_point.empty()) {
    encoding->real_zero_point[index] = scale.real_zero_point;
  }
}

// The formulas are those of calibrate.h. Immutable, thread-safe.
class RangeScaler {
 public:
  // `encoding` has the format, qmin, qmax, codebook, exclude_zero and
  // zero_points_are_real.
  // Requires: a valid spec.
  RangeScaler(const EncodingSpec& spec, const Encoding& encoding);

  bool is_symmetric() const { return is_symmetric_; }
  // Each end of a range counts, not the larger one alone: asymmetric ranges,
  // and those of AIMET's symmetry.
  bool has_two_ends() const { return !is_symmetric_ || is_aimet_; }
  // The number that the end of a symmetric range is taken to, in scales.
  double largest() const { return largest_; }
  // A scale is what the range gives, rounded to float32.
  bool has_plain_scales() const {
    return !power_of_two_scale_ && (scale_type_ == ScaleType::kDefault ||
                                    scale_type_ == ScaleType::kFloat32);
  }
  // The widest range that searches try, in whole ranges.
  double widest() const { return widest_; }
  // Trying this many ranges, evenly from the whole one to the widest, meets
  // every scale in between; 0 where scales are too fine for that.
  // `outer`  as for Scale.
  int CoarseSteps(float outer) const;
  bool has_outer_scales() const { return HasOuterScales(scale_type_); }

  // The magnitude that a symmetric scale takes to largest(): the larger end of
  // the range. With AIMET's symmetry the lower end, which is taken to qmin,
  // counts as much as the upper end with the same scale.
  double Magnitude(const Range& range) const;

  // The range as it is taken: with zero, unless the spec leaves it out.
  Range Extend(const Range& range) const;

  // The scale of the range. `outer` is the outer scale of the block, or 0 while
  // it is not known: then the result is the float32 scale before it is split in
  // two.
  // Requires: a range that is not [0, 0].
  // Errors: SCALE_OVERFLOW, ZERO_POINT_RANGE, both naming `index`.
  absl::StatusOr<BlockScale> Scale(int64_t index, const Range& range,
                                   float outer) const;

  // True if scales are the powers of two that FLOOR gives.
  bool floors_powers_of_two() const;
  // Then equals Scale, for a range up to `abs_max` in magnitude.
  // Requires: 0 < abs_max, finite.
  BlockScale FlooredPowerOfTwo(float abs_max) const;

  // True if E4m3Scale gives the scale of a range from its magnitude.
  bool has_e4m3_scales() const;
  // Then equals Scale. Requires: 0 < magnitude; an outer scale.
  BlockScale E4m3Scale(double magnitude, float outer) const;

  // The scale of an outer block whose ranges have magnitudes up to `magnitude`.
  // Errors: SCALE_OVERFLOW, naming `index`, one of its scale indices.
  absl::StatusOr<float> OuterScale(int64_t index, double magnitude) const;

  // The scale of a block with zeros only.
  // `outer_is_zero`  its whole outer block has zeros only.
  BlockScale DegenerateScale(float outer, bool outer_is_zero) const;

  // The scale of a block with an element that is not finite, if that has a
  // code.
  BlockScale NanScale() const;

 private:
  absl::StatusOr<BlockScale> ScaleAsymmetric(int64_t index,
                                             const Range& range) const;
  absl::StatusOr<float> RoundScale(int64_t index, double scale) const;
  absl::StatusOr<BlockScale> PowerOfTwo(int64_t index, double abs_max) const;
  BlockScale FromCode(uint8_t code, float outer) const;

  ScaleType scale_type_;
  MxScaleRule mx_scale_rule_;
  bool is_symmetric_;
  bool is_aimet_;
  bool exclude_zero_;
  bool zero_points_are_real_;
  bool power_of_two_scale_;
  int integer_scale_max_;
  int32_t qmin_;
  int32_t qmax_;
  double largest_;
  double widest_;
  int step_exponent_;
  // Mantissa bits of the format's numbers, for the rule EVEN.
  int mantissa_bits_;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_RANGE_SCALER_H_
