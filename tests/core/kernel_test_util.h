// What the tests of the kernels share: data, layouts, targets, and naive
// definitions that use none of core's code for the arithmetic.

#ifndef QUANTD_TESTS_CORE_KERNEL_TEST_UTIL_H_
#define QUANTD_TESTS_CORE_KERNEL_TEST_UTIL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "core/cpu.h"
#include "core/formats/number_format.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"
#include "gtest/gtest.h"

namespace quantd::core {

constexpr ElementType kAllElementTypes[] = {
    ElementType::kFloat32, ElementType::kFloat16, ElementType::kBfloat16,
    ElementType::kFloat64};

// Calls `body` with every SIMD target of this build and machine in use.
template <typename Body>
void ForEachSimdTarget(Body&& body) {
  for (const std::string& target : AvailableSimdTargets()) {
    SCOPED_TRACE(target);
    ASSERT_TRUE(SetSimdTarget(target).ok());
    body();
  }
  ASSERT_TRUE(SetSimdTarget("auto").ok());
}

struct LayoutCase {
  std::vector<int64_t> shape;
  std::vector<int64_t> block;

  std::string Name() const {
    return absl::StrCat("shape [", absl::StrJoin(shape, ","), "] block [",
                        absl::StrJoin(block, ","), "]");
  }
  BlockLayout Layout() const { return *BlockLayout::Create(shape, block); }
};

inline std::vector<LayoutCase> AllLayoutCases() {
  return {
      {{}, {}},                            // rank 0
      {{1}, {1}},                          //
      {{0}, {}},                           // empty, per tensor
      {{0}, {1}},                          // empty, no scale
      {{3, 0, 2}, {1, 0, 0}},              // empty, three scales
      {{700}, {}},                         // per tensor
      {{3, 3000}, {0, 0}},                 // per tensor over blocks
      {{7, 33}, {1, 0}},                   // channel on axis 0
      {{5, 7, 9}, {0, 1, 0}},              // middle axis
      {{40, 37}, {0, 1}},                  // last axis
      {{3, 2500}, {0, 1}},                 // last axis, long
      {{6, 96}, {1, 32}},                  // group 32
      {{4, 75}, {1, 32}},                  // group 32, ragged last
      {{2, 300}, {1, 128}},                // group 128, ragged last
      {{6, 10, 14}, {2, 5, 7}},            // 3-D blocks
      {{5, 7, 11}, {2, 3, 4}},             // 3-D blocks, ragged
      {{9, 5}, {4, 1}},                    // rows of blocks, stepping
      {{5, 8, 3}, {1, 2, 1}},              //
      {{6, 1, 5}, {1, 1, 1}},              // a scale per element
      {{50, 3}, {1, 2}},                   // blocks of 2 and 1
      {{2, 3, 4, 5, 6}, {1, 0, 2, 0, 3}},  //
  };
}

// The formula, from coordinates.
inline int64_t NaiveScaleIndex(const LayoutCase& layout, int64_t element) {
  const size_t rank = layout.shape.size();
  int64_t index = 0;
  std::vector<int64_t> coordinates(rank);
  for (size_t d = rank; d-- > 0;) {
    coordinates[d] = element % layout.shape[d];
    element /= layout.shape[d];
  }
  for (size_t d = 0; d < rank; ++d) {
    const int64_t block = layout.block.empty() || layout.block[d] == 0
                              ? std::max<int64_t>(layout.shape[d], 1)
                              : layout.block[d];
    index = index * ((layout.shape[d] + block - 1) / block) +
            coordinates[d] / block;
  }
  return index;
}

// IEEE halves by their definition.
inline double NaiveHalf(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const double mantissa = bits & 1023;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 31) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  return exponent == 0 ? sign * std::ldexp(mantissa, -24)
                       : sign * std::ldexp(1024 + mantissa, exponent - 25);
}

inline double NaiveReal(ElementType type, const uint8_t* in, int64_t index) {
  switch (type) {
    case ElementType::kFloat64: {
      double value;
      std::memcpy(&value, in + 8 * index, 8);
      return value;
    }
    case ElementType::kFloat32: {
      float value;
      std::memcpy(&value, in + 4 * index, 4);
      return value;
    }
    case ElementType::kFloat16: {
      uint16_t bits;
      std::memcpy(&bits, in + 2 * index, 2);
      return NaiveHalf(bits);
    }
    case ElementType::kBfloat16: {
      uint16_t bits;
      std::memcpy(&bits, in + 2 * index, 2);
      const uint32_t wide = uint32_t{bits} << 16;
      float value;
      std::memcpy(&value, &wide, 4);
      return value;
    }
  }
  return 0;
}

// Stores `value` cut down to the type: any rounding will do for test data.
inline void StoreReal(ElementType type, double value, uint8_t* out,
                      int64_t index) {
  const float single = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &single, 4);
  switch (type) {
    case ElementType::kFloat64:
      std::memcpy(out + 8 * index, &value, 8);
      return;
    case ElementType::kFloat32:
      std::memcpy(out + 4 * index, &single, 4);
      return;
    case ElementType::kBfloat16: {
      uint16_t top = static_cast<uint16_t>(bits >> 16);
      if (std::isnan(value)) top = 0x7FC0;
      std::memcpy(out + 2 * index, &top, 2);
      return;
    }
    case ElementType::kFloat16: {
      uint16_t half = bits >> 31 ? 0x8000 : 0;
      const double magnitude = std::fabs(value);
      if (std::isnan(value)) {
        half |= 0x7E00;
      } else if (magnitude >= 65520) {
        half |= 0x7C00;
      } else if (magnitude < 0x1p-14) {
        half |= static_cast<uint16_t>(magnitude * 0x1p24);
      } else {
        int exponent;
        const double mantissa = std::frexp(magnitude, &exponent);
        half |= static_cast<uint16_t>(
            (exponent + 14) << 10 | (static_cast<int>(mantissa * 2048) & 1023));
      }
      std::memcpy(out + 2 * index, &half, 2);
      return;
    }
  }
}

// Reals around the codes' range: normal values, ties, ends of the range, and,
// when asked, every kind of special value. [count] elements of the type.
inline std::vector<uint8_t> MakeReals(ElementType type, int64_t count,
                                      double scale, bool specials,
                                      uint32_t seed) {
  const double special[] = {std::numeric_limits<double>::quiet_NaN(),
                            std::numeric_limits<double>::infinity(),
                            -std::numeric_limits<double>::infinity(),
                            0.0,
                            -0.0,
                            3e38,
                            -3e38,
                            1e-45,
                            -1e-45,
                            1.1754943508222875e-38,
                            6e-8,
                            65504,
                            1e300};
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, 1);
  std::vector<uint8_t> reals(count * ElementSizeBytes(type));
  for (int64_t i = 0; i < count; ++i) {
    double value = 0;
    switch (random() % 16) {
      case 0:
        value = specials ? special[random() % std::size(special)] : 0;
        break;
      case 1:  // a tie or close to one
        value = (static_cast<int>(random() % 300) - 150 + 0.5) * scale;
        break;
      case 2:
        value = (static_cast<int>(random() % 70000) - 35000 + 0.5) * scale;
        break;
      case 3:
        value = normal(random) * scale * 40000;
        break;
      case 4:
        value = normal(random) * scale * 5;
        break;
      default:
        value = normal(random) * scale * 40;
    }
    if (!specials && !std::isfinite(static_cast<float>(value))) value = 1;
    StoreReal(type, value, reals.data(), i);
  }
  return reals;
}

// A valid encoding for the layout with varied scales and zero points.
inline Encoding MakeEncoding(const FormatInfo& format,
                             const BlockLayout& layout, double scale,
                             bool has_zero_points, uint32_t seed) {
  std::mt19937 random(seed);
  Encoding encoding;
  encoding.format = format.format;
  encoding.qmin = format.qmin;
  encoding.qmax = format.qmax;
  for (int64_t i = 0; i < layout.scale_count(); ++i) {
    encoding.scale.push_back(static_cast<float>(
        scale * std::ldexp(1.0 + random() % 1000 / 1000.0,
                           static_cast<int>(random() % 5) - 2)));
    if (!has_zero_points) continue;
    // Those of int32 are 0.
    encoding.zero_point.push_back(
        IsWideInteger(format)
            ? 0
            : format.qmin + static_cast<int32_t>(
                                random() % (format.qmax - format.qmin + 1)));
  }
  return encoding;
}

// The same with real zero points: within the codes, and codes among them.
inline Encoding MakeRealEncoding(const FormatInfo& format,
                                 const BlockLayout& layout, double scale,
                                 uint32_t seed) {
  Encoding encoding = MakeEncoding(format, layout, scale, false, seed);
  std::mt19937 random(seed);
  encoding.zero_points_are_real = true;
  for (int64_t i = 0; i < layout.scale_count(); ++i) {
    const double step = random() % 4 == 0 ? 1 : 4096;
    const double range = double{1} * format.qmax - format.qmin;
    encoding.real_zero_point.push_back(static_cast<float>(
        format.qmin +
        std::floor(range * step * (random() % 1000) / 1000) / step));
  }
  return encoding;
}

// Round half to even, from the floor.
template <typename T>
T NaiveRound(T x) {
  if (!std::isfinite(x) || std::fabs(x) > 1e15) return x;
  const T floor = std::floor(x);
  const T fraction = x - floor;
  if (fraction < T{0.5}) return floor;
  if (fraction > T{0.5}) return floor + 1;
  return std::fmod(floor, T{2}) == 0 ? floor : floor + 1;
}

// The quotient in the arithmetic type of the element type, as a double.
inline double NaiveQuotient(ElementType type, double x, float scale) {
  if (type == ElementType::kFloat64) return x / double{scale};
  // volatile: the value is to be a float32, whatever the compiler's mind.
  volatile float quotient = static_cast<float>(x) / scale;
  return quotient;
}

// Code of one element, not NaN.
inline int32_t NaiveCode(ElementType type, double x, float scale,
                         int32_t zero_point, int32_t qmin, int32_t qmax) {
  const double code =
      NaiveRound(NaiveQuotient(type, x, scale)) + double{1} * zero_point;
  if (code < qmin) return qmin;
  if (code > qmax) return qmax;
  return static_cast<int32_t>(code);
}

// Codes as bytes, by the words of encoding.proto.
inline std::vector<uint8_t> NaivePack(const FormatInfo& format,
                                      const std::vector<int32_t>& codes) {
  std::vector<uint8_t> bits;
  const int width = format.bits == 2 || format.bits == 4 ? format.bits
                    : format.bits <= 8                   ? 8
                    : format.bits <= 16                  ? 16
                                                         : 32;
  for (const int32_t code : codes) {
    for (int b = 0; b < width; ++b) bits.push_back((code >> b) & 1);
  }
  std::vector<uint8_t> bytes((bits.size() + 7) / 8);
  for (size_t b = 0; b < bits.size(); ++b) {
    bytes[b / 8] |= static_cast<uint8_t>(bits[b] << (b % 8));
  }
  return bytes;
}

}  // namespace quantd::core

#endif  // QUANTD_TESTS_CORE_KERNEL_TEST_UTIL_H_
