#include "core/calibrate/range_scaler.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/calibrate/encoding_spec.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "core/types/encoding.h"
#include "core/types/float_convert.h"

namespace quantd::core {
namespace {

constexpr float kSmallestNormal = std::numeric_limits<float>::min();
constexpr int kFloatMantissaBits = 23;
constexpr int kDoubleMantissaBits = 52;
constexpr int kDoubleBias = 1023;
constexpr int kE8m0Bias = 127;
constexpr int kMaxE8m0 = 254;

constexpr int kE4m3MantissaBits = 3;
constexpr int kE4m3Bias = 7;
constexpr double kLargestE4m3 = 448;
constexpr double kSmallestNormalE4m3 = 0x1p-6;
constexpr uint8_t kE4m3One = 0x38;
constexpr uint8_t kE4m3SmallestNormal = 0x08;
// Differences of the bits of a float64 from the code of the same number.
constexpr int kE4m3Shift = kDoubleMantissaBits - kE4m3MantissaBits;
constexpr uint64_t kE4m3Offset = uint64_t{kDoubleBias - kE4m3Bias}
                                 << kE4m3MantissaBits;

// 2^exponent, from its bits: ldexp and frexp took most of the time of scales.
// Requires: a normal float64.
double PowerOf2(int exponent) {
  return BitsAs<double>(static_cast<uint64_t>(exponent + kDoubleBias)
                        << kDoubleMantissaBits);
}

// floor(log2(x)).
// Requires: x > 0, a normal float64, as every float32 is.
int FloorLog2(double x) {
  return static_cast<int>(BitsAs<uint64_t>(x) >> kDoubleMantissaBits) -
         kDoubleBias;
}

// Requires: the same.
int CeilLog2(double x) {
  const int floor = FloorLog2(x);
  return x == PowerOf2(floor) ? floor : floor + 1;
}

// EncodeFloat and DecodeFloat of E4M3, for normal numbers above zero alone:
// those took most of the time of scales.
// The code of the number nearest to x, or of that at the end where x is beyond.
uint8_t EncodeE4m3(double x) {
  const auto bits =
      BitsAs<uint64_t>(std::clamp(x, kSmallestNormalE4m3, kLargestE4m3));
  // Half a step, or just less where the number below is even. A step past the
  // last mantissa is the next exponent.
  const uint64_t half =
      (uint64_t{1} << (kE4m3Shift - 1)) - 1 + ((bits >> kE4m3Shift) & 1);
  return static_cast<uint8_t>(((bits + half) >> kE4m3Shift) - kE4m3Offset);
}

double DecodeE4m3(uint8_t code) {
  return BitsAs<double>((code + kE4m3Offset) << kE4m3Shift);
}

// To the next value of a 16-bit type: its bits are in the order of its values.
// Requires: x > 0.
template <typename ToBits, typename FromBits>
float RoundUp(float x, ToBits to_bits, FromBits from_bits) {
  const uint16_t nearest = to_bits(x);
  return from_bits(from_bits(nearest) < x ? nearest + 1 : nearest);
}

int DefaultIntegerScaleMax(int value) {
  constexpr int kDefault = 16;
  return value == 0 ? kDefault : value;
}

}  // namespace

double Range::abs_max() const {
  return std::max(std::fabs(low), std::fabs(high));
}

void ResizeZeroPoints(size_t count, Encoding* encoding) {
  if (encoding->zero_points_are_real) {
    encoding->real_zero_point.resize(count);
  } else {
    encoding->zero_point.resize(count);
  }
}

RangeScaler::RangeScaler(const EncodingSpec& spec, const Encoding& encoding)
    : scale_type_(EffectiveScaleType(spec)),
      mx_scale_rule_(spec.mx_scale_rule),
      is_symmetric_(EffectiveSymmetry(spec) != Symmetry::kAsymmetric),
      is_aimet_(spec.symmetry == Symmetry::kAimet),
      exclude_zero_(encoding.exclude_zero),
      zero_points_are_real_(encoding.zero_points_are_real),
      power_of_two_scale_(spec.power_of_two_scale),
      integer_scale_max_(DefaultIntegerScaleMax(spec.integer_scale_max)),
      qmin_(encoding.qmin),
      qmax_(encoding.qmax),
      widest_(WidestRange(spec)),
      step_exponent_(FindFormat(encoding.format)->step_exponent) {
  const FormatInfo& format = *FindFormat(encoding.format);
  mantissa_bits_ = format.bits - 2;
  switch (format.kind) {
    case CodeKind::kInteger:
      largest_ =
          EffectiveSymmetry(spec) == Symmetry::kHalfStep && format.is_signed
              ? qmax_ + 0.5
              : qmax_;
      break;
    case CodeKind::kFloat:
      largest_ = format.max_value;
      mantissa_bits_ = format.float_layout.mantissa_bits;
      break;
    case CodeKind::kCodebook:
      largest_ = std::max(std::fabs(double{CodebookOf(encoding).front()}),
                          std::fabs(double{CodebookOf(encoding).back()}));
      break;
  }
}

double RangeScaler::Magnitude(const Range& range) const {
  // Unsigned codes have no lower end.
  if (!is_aimet_ || qmin_ == 0) return range.abs_max();
  return std::max(range.high, range.low * qmax_ / qmin_);
}

Range RangeScaler::Extend(const Range& range) const {
  if (exclude_zero_ && range.low != range.high) return range;
  return {std::min(range.low, 0.0), std::max(range.high, 0.0)};
}

absl::StatusOr<BlockScale> RangeScaler::Scale(int64_t index, const Range& range,
                                              float outer) const {
  if (!is_symmetric_) return ScaleAsymmetric(index, range);
  const double magnitude = Magnitude(range);
  if (scale_type_ == ScaleType::kE8m0) return PowerOfTwo(index, magnitude);
  if (outer == 0) {
    const absl::StatusOr<float> scale = RoundScale(index, magnitude / largest_);
    if (!scale.ok()) return scale.status();
    return BlockScale{*scale, 0, 0};
  }
  if (scale_type_ == ScaleType::kE4m3) return E4m3Scale(magnitude, outer);
  const double ratio = magnitude / largest_ / double{outer};
  return FromCode(static_cast<uint8_t>(std::clamp<double>(
                      std::nearbyint(ratio), 1, integer_scale_max_)),
                  outer);
}

int RangeScaler::CoarseSteps(float outer) const {
  if (scale_type_ == ScaleType::kE8m0 || power_of_two_scale_) return 1;
  // No two codes are nearer to each other than a sixteenth of the smaller.
  constexpr int kE4m3Steps = 2 << kE4m3MantissaBits;
  return scale_type_ == ScaleType::kE4m3 && outer != 0 ? kE4m3Steps : 0;
}

bool RangeScaler::has_e4m3_scales() const {
  return scale_type_ == ScaleType::kE4m3 && is_symmetric_ && !is_aimet_;
}

BlockScale RangeScaler::E4m3Scale(double magnitude, float outer) const {
  const uint8_t code = EncodeE4m3(magnitude / largest_ / double{outer});
  return {static_cast<float>(DecodeE4m3(code) * double{outer}), 0, code};
}

absl::StatusOr<BlockScale> RangeScaler::ScaleAsymmetric(
    int64_t index, const Range& range) const {
  const bool contains_zero = range.low <= 0 && range.high >= 0;
  const absl::StatusOr<float> scale =
      RoundScale(index, (range.high - range.low) / (qmax_ - qmin_));
  if (!scale.ok()) return scale.status();
  // A real one as a float32, so that the checks are of what is stored.
  double zero_point =
      zero_points_are_real_
          ? static_cast<float>(qmin_ - range.low / double{*scale})
          : qmin_ - std::nearbyint(range.low / double{*scale});
  if (!exclude_zero_ || contains_zero) {
    zero_point = std::clamp<double>(zero_point, qmin_, qmax_);
  } else if (!(std::fabs(zero_point) <= kMaxZeroPoint)) {
    return ZeroPointRangeError(
        absl::StrCat("zero point ", index, " would be ", zero_point,
                     ", expected one within +-", kMaxZeroPoint,
                     "; the range is too far from zero for its width"));
  }
  if (zero_points_are_real_) {
    return BlockScale{*scale, 0, 0, static_cast<float>(zero_point)};
  }
  return BlockScale{*scale, static_cast<int32_t>(zero_point), 0};
}

absl::StatusOr<float> RangeScaler::RoundScale(int64_t index,
                                              double scale) const {
  constexpr double kLargest = std::numeric_limits<float>::max();
  // Written so that NaN and what would round to infinity fail.
  if (!(scale < kLargest * (1 + 0x1p-25))) {
    return ScaleOverflowError(index, scale);
  }
  float rounded = std::max(static_cast<float>(scale), kSmallestNormal);
  if (power_of_two_scale_) {
    rounded = std::ldexp(1.0f, CeilLog2(rounded));
  }
  if (scale_type_ == ScaleType::kFloat16) {
    rounded = RoundUp(rounded, FloatToHalf, HalfToFloat);
  } else if (scale_type_ == ScaleType::kBfloat16) {
    rounded = RoundUp(rounded, FloatToBfloat, BfloatToFloat);
  }
  if (!std::isfinite(rounded)) {
    return ScaleOverflowError(index, scale,
                              scale_type_ == ScaleType::kFloat16 ? "float16"
                              : scale_type_ == ScaleType::kBfloat16
                                  ? "bfloat16"
                                  : "float32");
  }
  return rounded;
}

absl::StatusOr<BlockScale> RangeScaler::PowerOfTwo(int64_t index,
                                                   double abs_max) const {
  constexpr double kLargest = std::numeric_limits<float>::max();
  if (!(abs_max < kLargest * (1 + 0x1p-25))) {
    return ScaleOverflowError(index, abs_max);
  }
  const double amax = std::max(static_cast<float>(abs_max),
                               std::numeric_limits<float>::denorm_min());
  const int emax = FloorLog2(largest_) + step_exponent_;
  int exponent = 0;
  switch (mx_scale_rule_) {
    case MxScaleRule::kDefault:
    case MxScaleRule::kFloor:
      exponent = FloorLog2(amax) - emax;
      break;
    case MxScaleRule::kCeil:
      exponent = CeilLog2(amax) - emax;
      break;
    case MxScaleRule::kEven: {
      // Half a unit of the last mantissa bit that is kept; a carry out of the
      // mantissa is the next exponent.
      const double unit =
          std::ldexp(1.0, FloorLog2(amax) -
                              std::min(mantissa_bits_, kFloatMantissaBits - 1));
      exponent = FloorLog2(amax + unit / 2) - emax;
      break;
    }
    case MxScaleRule::kRceil: {
      // The least e with amax <= largest * 2^(e + step), without a quotient
      // that might round.
      const double largest = std::ldexp(largest_, step_exponent_);
      exponent = FloorLog2(amax) - emax - 1;
      while (amax > std::ldexp(largest, exponent)) ++exponent;
      break;
    }
  }
  const int code = std::max(exponent + kE8m0Bias, 0);
  if (code > kMaxE8m0) {
    return ScaleOverflowError(index, std::ldexp(1.0, exponent));
  }
  return FromCode(static_cast<uint8_t>(code), 0);
}

BlockScale RangeScaler::FromCode(uint8_t code, float outer) const {
  double scale = 0;
  switch (scale_type_) {
    case ScaleType::kE8m0:
      scale = PowerOf2(code - kE8m0Bias + step_exponent_);
      break;
    case ScaleType::kE4m3:
      scale = DecodeE4m3(code) * double{outer};
      break;
    default:
      scale = double{outer} * code;
      break;
  }
  return {static_cast<float>(scale), 0, code};
}

bool RangeScaler::floors_powers_of_two() const {
  return scale_type_ == ScaleType::kE8m0 && !is_aimet_ &&
         (mx_scale_rule_ == MxScaleRule::kDefault ||
          mx_scale_rule_ == MxScaleRule::kFloor);
}

BlockScale RangeScaler::FlooredPowerOfTwo(float abs_max) const {
  // The exponent of a subnormal number is too large by this, which makes no
  // difference: its code is 0 either way, as no emax is negative.
  const int exponent =
      static_cast<int>(BitsAs<uint32_t>(abs_max) >> kFloatMantissaBits);
  const int emax = FloorLog2(largest_) + step_exponent_;
  return FromCode(static_cast<uint8_t>(std::max(exponent - emax, 0)), 0);
}

absl::StatusOr<float> RangeScaler::OuterScale(int64_t index,
                                              double magnitude) const {
  if (magnitude == 0) return 1.0f;
  constexpr double kLargest = std::numeric_limits<float>::max();
  const bool is_e4m3 = scale_type_ == ScaleType::kE4m3;
  const double largest_code = is_e4m3 ? kLargestE4m3 : integer_scale_max_;
  const double outer = is_e4m3 ? magnitude / (largest_ * largest_code)
                               : magnitude / largest_ / largest_code;
  // The largest scale of the block has to be a float32 as well.
  if (!(outer * largest_code < kLargest * (1 - 0x1p-20))) {
    return ScaleOverflowError(index, outer * largest_code);
  }
  // So that no scale is below the smallest normal float32.
  const double least =
      is_e4m3 ? kSmallestNormal / kSmallestNormalE4m3 : double{kSmallestNormal};
  return static_cast<float>(std::max(outer, least));
}

BlockScale RangeScaler::DegenerateScale(float outer, bool outer_is_zero) const {
  switch (scale_type_) {
    case ScaleType::kE8m0:
      return FromCode(0, outer);
    case ScaleType::kE4m3:
      return FromCode(outer_is_zero ? kE4m3One : kE4m3SmallestNormal, outer);
    case ScaleType::kInteger:
      return FromCode(1, outer);
    default: {
      const int32_t zero_point =
          is_symmetric_ ? 0 : std::clamp(0, qmin_, qmax_);
      return {1, zero_points_are_real_ ? 0 : zero_point, 0,
              zero_points_are_real_ ? static_cast<float>(zero_point) : 0};
    }
  }
}

BlockScale RangeScaler::NanScale() const {
  return {std::numeric_limits<float>::quiet_NaN(), 0, kE8m0Nan};
}

}  // namespace quantd::core
