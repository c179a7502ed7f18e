// Encodings of every format for tests, and what their codes stand for, by the
// specifications and with none of core's arithmetic.

#ifndef QUANTD_TESTS_CORE_FORMATS_FORMAT_TEST_UTIL_H_
#define QUANTD_TESTS_CORE_FORMATS_FORMAT_TEST_UTIL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"
#include "tests/core/kernel_test_util.h"
#include "tests/support/sanitizers.h"

namespace quantd::core {

// How many random inputs a test takes: fewer where each is slow.
#if !defined(NDEBUG) || defined(__SANITIZE_ADDRESS__) || \
    defined(__SANITIZE_THREAD__)
constexpr bool kIsSlowBuild = true;
#else
constexpr bool kIsSlowBuild = false;
#endif

// A small float by its specification: OCP OFP8 1.0, OCP MX 1.0, and for FNUZ
// the table of ONNX's "Float stored in 8 bits".
struct NaiveFloat {
  const char* name;
  int exponent_bits;
  int mantissa_bits;
  int bias;
  // The patterns without their sign bit; -1 for none.
  int infinity;
  int first_nan;
  bool is_fnuz;

  int bits() const { return 1 + exponent_bits + mantissa_bits; }
  int sign_bit() const { return 1 << (bits() - 1); }
  // The pattern of the largest number.
  int largest() const {
    if (infinity >= 0) return infinity - 1;
    return first_nan >= 0 ? first_nan - 1 : sign_bit() - 1;
  }

  double Magnitude(int pattern) const {
    const int exponent = pattern >> mantissa_bits;
    const double fraction =
        (pattern & ((1 << mantissa_bits) - 1)) * std::pow(2.0, -mantissa_bits);
    return exponent == 0 ? fraction * std::pow(2.0, 1 - bias)
                         : (1 + fraction) * std::pow(2.0, exponent - bias);
  }

  double Decode(int code) const {
    const int pattern = code & (sign_bit() - 1);
    const double sign = code & sign_bit() ? -1 : 1;
    if (is_fnuz && code == sign_bit()) return std::nan("");
    if (pattern == infinity) {
      return sign * std::numeric_limits<double>::infinity();
    }
    if (first_nan >= 0 && pattern >= first_nan) return std::nan("");
    return sign * Magnitude(pattern);
  }
};

constexpr NaiveFloat kNaiveFloats[] = {
    {"float8_e4m3fn", 4, 3, 7, -1, 0x7F, false},
    {"float8_e5m2", 5, 2, 15, 0x7C, 0x7D, false},
    {"float8_e4m3fnuz", 4, 3, 8, -1, -1, true},
    {"float8_e5m2fnuz", 5, 2, 16, -1, -1, true},
    {"float6_e2m3", 2, 3, 1, -1, -1, false},
    {"float6_e3m2", 3, 2, 3, -1, -1, false},
    {"float4_e2m1", 2, 1, 1, -1, -1, false},
};

// The specification of a row's codes, null for none: the block formats are
// named after their floats.
inline const NaiveFloat* FindNaiveFloat(const FormatInfo& format) {
  const std::string name =
      format.name == "nvfp4" ? "nvfp4_e2m1" : std::string(format.name);
  const std::string suffix = name.substr(name.find('_') + 1);
  for (const NaiveFloat& naive : kNaiveFloats) {
    const std::string naive_name(naive.name);
    if (naive_name == name) return &naive;
    const std::string naive_suffix =
        naive_name.substr(naive_name.find('_') + 1);
    if (format.scale_type != ScaleType::kDefault &&
        (naive_suffix == suffix || naive_suffix == suffix + "fn")) {
      return &naive;
    }
  }
  return nullptr;
}

// A codebook of so many random entries of magnitudes up to about 1.
inline std::vector<float> RandomCodebook(int count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.4f);
  std::vector<float> codebook;
  while (static_cast<int>(codebook.size()) < count) {
    codebook.push_back(normal(random));
    std::sort(codebook.begin(), codebook.end());
    codebook.erase(std::unique(codebook.begin(), codebook.end()),
                   codebook.end());
  }
  return codebook;
}

// As MakeEncoding, of any format: with a codebook where it needs one, and under
// E8M0 the scales that only those may be, NaN and subnormal.
inline Encoding MakeFormatEncoding(const FormatInfo& format,
                                   const BlockLayout& layout, double scale,
                                   uint32_t seed) {
  std::mt19937 random(seed);
  const bool is_integer = format.kind == CodeKind::kInteger;
  const bool has_zero_points = is_integer && format.bits % 2 == 0 &&
                               format.scale_type == ScaleType::kDefault;
  Encoding encoding =
      MakeEncoding(format, layout, scale, has_zero_points, seed);
  if (format.kind == CodeKind::kCodebook && format.codebook.empty()) {
    // Not a power of two of entries.
    encoding.codebook = RandomCodebook((1 << format.bits) - 1, seed);
    encoding.qmax = static_cast<int32_t>(encoding.codebook.size()) - 1;
  }
  if (format.scale_type == ScaleType::kE8m0) {
    encoding.scale_type = ScaleType::kE8m0;
    for (float& s : encoding.scale) {
      int exponent;
      std::frexp(s, &exponent);
      const int kind = static_cast<int>(random() % 10);
      int code = exponent + 127;
      if (kind == 0) code = kE8m0Nan;
      if (kind == 1) code = static_cast<int>(random() % 8);
      if (kind == 2) code = 254 - static_cast<int>(random() % 4);
      encoding.scale_code.push_back(static_cast<uint8_t>(code));
      s = code == kE8m0Nan
              ? std::numeric_limits<float>::quiet_NaN()
              : std::ldexp(1.0f, code - 127 + format.step_exponent);
    }
  }
  return encoding;
}

}  // namespace quantd::core

#endif  // QUANTD_TESTS_CORE_FORMATS_FORMAT_TEST_UTIL_H_
