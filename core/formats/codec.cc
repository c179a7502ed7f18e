#include "core/formats/codec.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/types/span.h"

namespace quantd::core {
namespace {

uint32_t SignBit(const FloatLayout& layout) {
  return uint32_t{1} << (layout.exponent_bits + layout.mantissa_bits);
}

// The code of the largest number, without a sign.
uint32_t LargestCode(const FloatLayout& layout) {
  const uint32_t all = SignBit(layout) - 1;
  switch (layout.specials) {
    case FloatSpecials::kNan:
      return all - 1;
    case FloatSpecials::kIeee:
      return all - (uint32_t{1} << layout.mantissa_bits);
    case FloatSpecials::kNone:
    case FloatSpecials::kFnuz:
      break;
  }
  return all;
}

uint32_t NanCode(const FloatLayout& layout) {
  switch (layout.specials) {
    case FloatSpecials::kNan:
    case FloatSpecials::kIeee:
      return SignBit(layout) - 1;
    case FloatSpecials::kFnuz:
      return SignBit(layout);
    case FloatSpecials::kNone:
      break;
  }
  return 0;
}

// The number of a code without sign that is not special.
double Magnitude(const FloatLayout& layout, uint32_t code) {
  const uint32_t mantissa = code & ((uint32_t{1} << layout.mantissa_bits) - 1);
  const int exponent = static_cast<int>(code >> layout.mantissa_bits);
  const uint32_t hidden =
      exponent == 0 ? 0 : uint32_t{1} << layout.mantissa_bits;
  return std::ldexp(static_cast<double>(hidden | mantissa),
                    std::max(exponent, 1) - layout.bias - layout.mantissa_bits);
}

}  // namespace

float DecodeFloat(const FloatLayout& layout, uint32_t code) {
  const bool is_negative = (code & SignBit(layout)) != 0;
  const uint32_t rest = code & (SignBit(layout) - 1);
  if (layout.specials == FloatSpecials::kFnuz && is_negative && rest == 0) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  double magnitude = 0;
  if (rest <= LargestCode(layout)) {
    magnitude = Magnitude(layout, rest);
  } else if (layout.specials == FloatSpecials::kIeee &&
             rest == LargestCode(layout) + 1) {
    magnitude = std::numeric_limits<double>::infinity();
  } else {
    return std::numeric_limits<float>::quiet_NaN();
  }
  return static_cast<float>(is_negative ? -magnitude : magnitude);
}

uint32_t EncodeFloat(const FloatLayout& layout, double x, bool saturate) {
  if (std::isnan(x)) return NanCode(layout);
  const uint32_t sign = std::signbit(x) ? SignBit(layout) : 0;
  const double magnitude = std::fabs(x);
  const uint32_t largest = LargestCode(layout);
  if (magnitude >= OverflowThreshold(layout)) {
    if (saturate) return sign | largest;
    if (layout.specials == FloatSpecials::kIeee) return sign | (largest + 1);
    return NanCode(layout);
  }
  // The unit in the last place at x, no smaller than that of subnormals; the
  // exponent of 0 is below all others.
  const int unit =
      std::max(std::ilogb(magnitude), 1 - layout.bias) - layout.mantissa_bits;
  const uint32_t steps =
      static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -unit)));
  // A step past the last mantissa is the next exponent.
  const int biased = unit + layout.mantissa_bits + layout.bias;
  const uint32_t rest =
      ((static_cast<uint32_t>(biased) - 1) << layout.mantissa_bits) + steps;
  if (layout.specials == FloatSpecials::kFnuz && rest == 0) return 0;
  return sign | rest;
}

double LargestFloat(const FloatLayout& layout) {
  return Magnitude(layout, LargestCode(layout));
}

double OverflowThreshold(const FloatLayout& layout) {
  const uint32_t largest = LargestCode(layout);
  const double low = Magnitude(layout, largest);
  // The next number, if the format went on.
  const double high = Magnitude(layout, largest + 1);
  const double middle = (low + high) / 2;
  // A tie goes to the even mantissa, which is the next one's if largest is odd.
  return largest % 2 == 1
             ? middle
             : std::nextafter(middle, std::numeric_limits<double>::infinity());
}

double LargestNearLower(float lower, float upper) {
  const double a = lower;
  const double b = upper;
  const double sum = a + b;
  // Part of the sum that the rounding left out, exactly (Knuth's two-sum). It
  // is at most half a unit, so that the next float64 below is below the true
  // sum.
  const double b_part = sum - a;
  const double rest = (a - (sum - b_part)) + (b - b_part);
  const double middle = sum / 2;
  return rest < 0
             ? std::nextafter(middle, -std::numeric_limits<double>::infinity())
             : middle;
}

uint32_t EncodeCodebook(absl::Span<const float> codebook, double x) {
  if (std::isnan(x)) x = 0;
  const auto above = std::lower_bound(codebook.begin(), codebook.end(), x,
                                      [](float a, double b) { return a < b; });
  if (above == codebook.begin()) return 0;
  const auto index = static_cast<uint32_t>(above - codebook.begin());
  if (above == codebook.end()) return index - 1;
  return x <= LargestNearLower(*(above - 1), *above) ? index - 1 : index;
}

const float* FloatValues(const FormatInfo& format) {
  using Table = std::array<float, 256>;
  static const auto& tables = *[] {
    auto* made = new std::vector<Table>(AllFormats().size());
    for (size_t row = 0; row < AllFormats().size(); ++row) {
      const FormatInfo& info = AllFormats()[row];
      if (info.kind != CodeKind::kFloat) continue;
      const uint32_t mask = (uint32_t{1} << info.bits) - 1;
      for (uint32_t code = 0; code < 256; ++code) {
        (*made)[row][code] = DecodeFloat(info.float_layout, code & mask);
      }
    }
    return made;
  }();
  return tables[&format - AllFormats().data()].data();
}

}  // namespace quantd::core
