#include "core/formats/grid.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>

#include "absl/types/span.h"
#include "core/formats/codec.h"
#include "core/formats/number_format.h"

namespace quantd::core {
namespace {

// The largest T that is at most x.
template <typename T>
T RoundDown(double x) {
  const T nearest = static_cast<T>(x);
  return double{nearest} > x
             ? std::nextafter(nearest, -std::numeric_limits<T>::infinity())
             : nearest;
}

template <typename T>
FloatGrid::Limits<T> MakeLimits(const FloatLayout& layout) {
  using Bits = decltype(FloatGrid::Limits<T>::magic_offset);
  constexpr int kMantissaBits = std::numeric_limits<T>::digits - 1;
  FloatGrid::Limits<T> limits;
  // The smallest T that is at least the threshold.
  limits.overflow = -RoundDown<T>(-OverflowThreshold(layout));
  limits.largest = static_cast<T>(LargestFloat(layout));
  limits.smallest_normal = std::ldexp(T{1}, 1 - layout.bias);
  limits.magic_offset = static_cast<Bits>(kMantissaBits - layout.mantissa_bits)
                        << kMantissaBits;
  return limits;
}

}  // namespace

FloatGrid::FloatGrid(const FloatLayout& layout, bool no_saturation)
    : for_float(MakeLimits<float>(layout)),
      for_double(MakeLimits<double>(layout)) {
  const int rest_bits = layout.exponent_bits + layout.mantissa_bits;
  const bool saturate = !no_saturation;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  mantissa_shift = 23 - layout.mantissa_bits;
  sign_shift = 31 - rest_bits;
  exponent_offset = (128 - layout.bias) << layout.mantissa_bits;
  sign_bit = int32_t{1} << rest_bits;
  has_negative_zero = layout.specials != FloatSpecials::kFnuz;
  overflow_code =
      static_cast<int32_t>(EncodeFloat(layout, kInfinity, saturate));
  overflow_value = DecodeFloat(layout, static_cast<uint32_t>(overflow_code));
  overflow_has_sign = !std::isnan(overflow_value);
  nan_code = static_cast<int32_t>(EncodeFloat(layout, kNan, saturate));
  nan_value = DecodeFloat(layout, static_cast<uint32_t>(nan_code));
}

CodebookGrid::CodebookGrid(absl::Span<const float> codebook)
    : count(static_cast<int>(codebook.size())), search_steps(0) {
  while ((1 << search_steps) < count) ++search_steps;
  std::fill(std::begin(entry), std::end(entry), codebook.back());
  std::copy(codebook.begin(), codebook.end(), entry);
  std::fill(std::begin(threshold_float), std::end(threshold_float),
            std::numeric_limits<float>::infinity());
  std::fill(std::begin(threshold_double), std::end(threshold_double),
            std::numeric_limits<double>::infinity());
  for (int k = 0; k + 1 < count; ++k) {
    threshold_double[k] = LargestNearLower(codebook[k], codebook[k + 1]);
    threshold_float[k] = RoundDown<float>(threshold_double[k]);
  }
  std::fill(std::begin(coarse_threshold), std::end(coarse_threshold),
            std::numeric_limits<float>::infinity());
  for (int k = 0; k < 16; ++k) {
    coarse_threshold[k] = threshold_float[16 * k + 15];
  }
  for (int level = 0; level < 4; ++level) {
    for (int k = 0; k < 8; ++k) {
      const int known = k & ((1 << level) - 1);
      level_threshold[level][k] =
          threshold_float[(2 * known + 1) * (8 >> level) - 1];
    }
  }
}

}  // namespace quantd::core
