// The kernels divide without a division. What they make of x / scale must be
// what float32 division makes of it, above all next to ties: that is where a
// quotient one unit off in its last place becomes another code.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/cpu.h"
#include "core/formats/number_format.h"
#include "core/quantize/quantize.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"
#include "gtest/gtest.h"

namespace quantd::core {
namespace {

// Scales to test, and the SIMD targets to test them on; by default a few on
// all.
constexpr char kScalesVariable[] = "QUANTD_DIVISION_SCALES";
constexpr char kTargetsVariable[] = "QUANTD_DIVISION_TARGETS";
#ifdef __OPTIMIZE__
constexpr int kDefaultScales = 24;
constexpr int kHardStride = 1;
#else
// A hundred times slower: one of each kind of scale.
constexpr int kDefaultScales = 12;
constexpr int kHardStride = 50;
#endif

// Inputs of a set, and how many go through the kernel at a time.
constexpr int64_t kInputs = 1'000'000;
constexpr int64_t kBlock = 50'000;
static_assert(kInputs % kBlock == 0);

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t ToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

int ScaleCount() {
  int count = kDefaultScales;
  const char* const text = std::getenv(kScalesVariable);
  if (text != nullptr && !absl::SimpleAtoi(text, &count)) {
    ADD_FAILURE() << kScalesVariable << " is not a number: " << text;
  }
  return count;
}

std::vector<std::string> Targets() {
  const char* const text = std::getenv(kTargetsVariable);
  if (text == nullptr) return AvailableSimdTargets();
  return absl::StrSplit(text, ',');
}

// The n-th scale: those that are hard, and between them random ones.
float MakeScale(int n, std::mt19937_64& random) {
  const auto mantissa = static_cast<uint32_t>(random() % (1 << 23));
  // Of normal numbers.
  const auto any_exponent = static_cast<uint32_t>(1 + random() % 254);
  const auto common_exponent = static_cast<uint32_t>(127 - 20 + random() % 24);
  switch (n % 12) {
    case 0:  // all ones: the reciprocal is a tie away from a power of two
      return FromBits(any_exponent << 23 | 0x7FFFFF);
    case 1:
      return FromBits(any_exponent << 23);
    case 2:  // next to a power of two
      return FromBits((any_exponent << 23) + (random() % 2 ? 1 : 0x7FFFFE));
    case 3:  // next to subnormal numbers
      return FromBits(static_cast<uint32_t>(1 + random() % 3) << 23 | mantissa);
    case 4:  // huge: the reciprocal is subnormal, ties are infinite
      return FromBits(static_cast<uint32_t>(250 + random() % 5) << 23 |
                      mantissa);
    case 5:  // about 2^-100 and 2^100, where the division takes over
      return FromBits(
          static_cast<uint32_t>((random() % 2 ? 27 : 227) - 1 + random() % 3)
              << 23 |
          (random() % 2 ? mantissa : 0));
    case 6:
    case 7:
      return FromBits(any_exponent << 23 | mantissa);
    default:
      return FromBits(common_exponent << 23 | mantissa);
  }
}

// Inputs one unit in the last place after the other about (k + 0.5) * scale,
// for all k of at most `ties` in magnitude, both signs.
std::vector<float> MakeInputs(float scale, int ties, std::mt19937_64& random) {
  std::vector<float> x(kInputs);
  const int64_t steps = kInputs / (2 * ties);
  int64_t i = 0;
  for (int k = -ties; k < ties; ++k) {
    const auto tie = static_cast<float>((k + 0.5) * scale);
    const uint32_t first = ToBits(tie) - static_cast<uint32_t>(steps / 2);
    for (int64_t step = 0; step < steps; ++step, ++i) {
      const uint32_t bits = first + static_cast<uint32_t>(step);
      // What lies behind infinity is NaN.
      x[i] = (bits & 0x7FFFFFFF) > 0x7F800000
                 ? FromBits((bits & 0x80000000) | 0x7F800000)
                 : FromBits(bits);
    }
  }
  // The rest anywhere in the range and a little beyond it.
  for (; i < kInputs; ++i) {
    const double unit = static_cast<double>(random() >> 11) * 0x1p-53;
    x[i] = static_cast<float>((unit * 2 - 1) * 1.1 * ties * scale);
  }
  return x;
}

// rint(x / scale) in float32, within what any format can tell apart.
void Divide(const float* x, int64_t count, float scale, int32_t* rounded) {
  // The low bits of the sum hold the nearest integer, the even one at a tie.
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
  constexpr float kLimit = 1 << 21;
  for (int64_t i = 0; i < count; ++i) {
    float quotient = x[i] / scale;
    quotient = quotient < kLimit ? quotient : kLimit;
    quotient = quotient > -kLimit ? quotient : -kLimit;
    rounded[i] = static_cast<int32_t>((quotient + kMagic) - kMagic);
  }
}

template <typename Code>
struct Expected {
  std::vector<Code> codes;
  int64_t clipped_low = 0;
  int64_t clipped_high = 0;
};

template <typename Code>
void Clamp(const std::vector<int32_t>& rounded, int32_t zero_point,
           Expected<Code>* expected) {
  constexpr int32_t kMin = std::numeric_limits<Code>::min();
  constexpr int32_t kMax = std::numeric_limits<Code>::max();
  expected->codes.resize(rounded.size());
  int32_t low = 0;
  int32_t high = 0;
  for (size_t i = 0; i < rounded.size(); ++i) {
    const int32_t code = rounded[i] + zero_point;
    low += code < kMin;
    high += code > kMax;
    expected->codes[i] =
        static_cast<Code>(std::min(std::max(code, kMin), kMax));
  }
  expected->clipped_low = low;
  expected->clipped_high = high;
}

// One scale for `count` elements.
Encoding MakeEncoding(const char* format, std::vector<float> scale,
                      int32_t zero_point) {
  const FormatInfo& info = *FindFormatByName(format);
  Encoding encoding;
  encoding.format = info.format;
  encoding.qmin = info.qmin;
  encoding.qmax = info.qmax;
  encoding.scale_type = ScaleType::kFloat32;
  encoding.zero_point.assign(scale.size(), zero_point);
  encoding.scale = std::move(scale);
  return encoding;
}

// Compares a block's codes and counts with the division's on every target.
// False at the first difference.
template <typename Code>
bool Agrees(const char* format, float scale, int32_t zero_point,
            const std::vector<float>& x, int64_t begin,
            const std::vector<int32_t>& rounded,
            const std::vector<std::string>& targets) {
  static std::vector<Code> codes(kBlock);
  static Expected<Code> expected;
  Clamp(rounded, zero_point, &expected);
  const Encoding encoding = MakeEncoding(format, {scale}, zero_point);
  const BlockLayout layout = *BlockLayout::Create({kBlock}, {});
  for (const std::string& target : targets) {
    EXPECT_TRUE(SetSimdTarget(target).ok()) << target;
    QuantizeCounts counts;
    EXPECT_TRUE(
        Quantize(encoding, layout, ElementType::kFloat32, NanPolicy::kDefault,
                 0, kBlock, reinterpret_cast<const uint8_t*>(x.data() + begin),
                 reinterpret_cast<uint8_t*>(codes.data()), &counts, nullptr)
            .ok());
    if (counts.clipped_low != expected.clipped_low ||
        counts.clipped_high != expected.clipped_high) {
      ADD_FAILURE() << format << " on " << target << ", scale bits "
                    << ToBits(scale) << ", zero point " << zero_point
                    << ": clipped " << counts.clipped_low << " and "
                    << counts.clipped_high << ", expected "
                    << expected.clipped_low << " and " << expected.clipped_high;
      return false;
    }
    if (codes == expected.codes) continue;
    const auto at =
        std::mismatch(codes.begin(), codes.end(), expected.codes.begin())
            .first -
        codes.begin();
    ADD_FAILURE() << format << " on " << target << ", scale bits "
                  << ToBits(scale) << ", zero point " << zero_point
                  << ", x bits " << ToBits(x[begin + at]) << ": code "
                  << int{codes[at]} << ", expected " << int{expected.codes[at]};
    return false;
  }
  return true;
}

TEST(DivisionTest, CodesAreThoseOfFloat32Division) {
  std::mt19937_64 random(20);
  const int scales = ScaleCount();
  const std::vector<std::string> targets = Targets();
  for (const std::string& target : targets) {
    ASSERT_TRUE(SetSimdTarget(target).ok()) << target;
  }
  std::vector<int32_t> rounded(kBlock);
  for (int n = 0; n < scales; ++n) {
    const float scale = MakeScale(n, random);
    const auto zero_point8 = static_cast<int32_t>(random() % 256);
    const auto zero_point16 = static_cast<int32_t>(random() % 65536) - 32768;
    // All codes of 8 bits with any zero point, then of 16 bits.
    for (const int ties : {384, 66000}) {
      const std::vector<float> x = MakeInputs(scale, ties, random);
      for (int64_t begin = 0; begin < kInputs; begin += kBlock) {
        Divide(x.data() + begin, kBlock, scale, rounded.data());
        const bool agrees =
            ties == 384 ? Agrees<int8_t>("int8", scale, 0, x, begin, rounded,
                                         targets) &&
                              Agrees<int8_t>("int8", scale, zero_point8 - 128,
                                             x, begin, rounded, targets) &&
                              Agrees<uint8_t>("uint8", scale, zero_point8, x,
                                              begin, rounded, targets)
                        : Agrees<int16_t>("int16", scale, 0, x, begin, rounded,
                                          targets) &&
                              Agrees<int16_t>("int16", scale, zero_point16, x,
                                              begin, rounded, targets);
        ASSERT_TRUE(agrees) << "scale " << n << " of " << scales;
      }
    }
  }
  ASSERT_TRUE(SetSimdTarget("auto").ok());
}

TEST(DivisionTest, TheReferenceRoundsAsIeeeDoes) {
  std::mt19937_64 random(21);
  const float scale = 0.0247f;
  const std::vector<float> x = MakeInputs(scale, 66000, random);
  std::vector<int32_t> rounded(kInputs);
  Divide(x.data(), kInputs, scale, rounded.data());
  for (int64_t i = 0; i < kInputs; ++i) {
    ASSERT_EQ(rounded[i], std::nearbyint(x[i] / scale)) << i;
  }
}

// A quotient next to the middle between a tie and its neighbour.
struct HardQuotient {
  float x;
  float scale;
};

// All quotients x / scale up to 2^16, up to powers of two on either side, that
// come within 2^-21 of a unit in the last place of the middle between a tie
// k + 0.5 and one of its neighbours. A division that is not correctly rounded
// gives another code only there. In half units the middle is an odd W of 25
// bits; with X and S the mantissas of x and scale, X * 2^e = S * W - j with a
// small j, so that S is j / W modulo 2^e, for e = 24 and e = 25.
std::vector<HardQuotient> HardQuotients() {
  constexpr int kMostHalfUnits = 8;
  std::vector<HardQuotient> all;
  for (int k = 0; k < 65536; ++k) {
    const float tie = static_cast<float>(k) + 0.5f;
    for (const float toward : {0.0f, 1e9f}) {
      const double middle =
          (double{tie} + double{std::nextafter(tie, toward)}) / 2;
      int exponent;
      const auto w =
          static_cast<uint64_t>(std::ldexp(std::frexp(middle, &exponent), 25));
      uint64_t inverse = 1;
      for (int i = 0; i < 6; ++i) inverse *= 2 - w * inverse;
      for (const int e : {24, 25}) {
        for (int j = -kMostHalfUnits; j <= kMostHalfUnits; ++j) {
          const uint64_t s = (static_cast<uint64_t>(int64_t{j}) * inverse) &
                             ((uint64_t{1} << e) - 1);
          if (j == 0 || s >> 23 != 1) continue;
          const uint64_t x = (s * w - static_cast<uint64_t>(int64_t{j})) >> e;
          if (x >> 23 != 1) continue;
          all.push_back({std::ldexp(static_cast<float>(x), e - 48 + exponent),
                         std::ldexp(static_cast<float>(s), -23)});
        }
      }
    }
  }
  return all;
}

TEST(DivisionTest, CodesOfTheHardestQuotientsAreThoseOfTheDivision) {
  std::vector<HardQuotient> hard;
  const std::vector<HardQuotient> all = HardQuotients();
  ASSERT_GT(all.size(), 700'000u);
  for (size_t i = 0; i < all.size(); i += kHardStride) hard.push_back(all[i]);
  // Long enough for every vector loop, and with a tail.
  constexpr int64_t kRow = 67;
  constexpr int64_t kRows = 4096;
  std::vector<float> x(kRows * kRow);
  std::vector<int16_t> codes(x.size());
  std::vector<int16_t> expected(x.size());
  for (size_t first = 0; first < hard.size(); first += kRows) {
    const int64_t rows = std::min<int64_t>(kRows, hard.size() - first);
    std::vector<float> scale;
    for (int64_t row = 0; row < rows; ++row) {
      const HardQuotient& q = hard[first + row];
      scale.push_back(q.scale);
      const float rounded = std::nearbyint(q.x / q.scale);
      for (int64_t i = 0; i < kRow; ++i) {
        // Both signs; a zero point of -32768 takes in 2^16 positive codes.
        x[row * kRow + i] = i % 2 ? -q.x : q.x;
        expected[row * kRow + i] = static_cast<int16_t>(std::clamp(
            (i % 2 ? -rounded : rounded) - 32768, -32768.f, 32767.f));
      }
    }
    const Encoding encoding = MakeEncoding("int16", scale, -32768);
    const BlockLayout layout = *BlockLayout::Create({rows, kRow}, {1, 0});
    for (const std::string& target : AvailableSimdTargets()) {
      ASSERT_TRUE(SetSimdTarget(target).ok());
      QuantizeCounts counts;
      ASSERT_TRUE(
          Quantize(encoding, layout, ElementType::kFloat32, NanPolicy::kDefault,
                   0, rows * kRow, reinterpret_cast<const uint8_t*>(x.data()),
                   reinterpret_cast<uint8_t*>(codes.data()), &counts, nullptr)
              .ok());
      for (int64_t i = 0; i < rows * kRow; ++i) {
        ASSERT_EQ(codes[i], expected[i]) << target << ": " << ToBits(x[i])
                                         << " / " << ToBits(scale[i / kRow]);
      }
    }
  }
  ASSERT_TRUE(SetSimdTarget("auto").ok());
}

// Every way to scale: one for a row, for groups within a vector, for columns.
// Small floats have their ties at powers of two times those of integers, down
// to half of their smallest number.
TEST(DivisionTest, CodesOfTheHardestQuotientsDoNotDependOnFormatOrLayout) {
  std::vector<HardQuotient> hard;
  for (const HardQuotient& q : HardQuotients()) {
    if (q.x / q.scale < 256) hard.push_back(q);
  }
  ASSERT_GT(hard.size(), 2'000u);
  constexpr int64_t kGroup = 32;
  const int64_t groups = static_cast<int64_t>(hard.size());
  std::vector<float> scale;
  for (const HardQuotient& q : hard) scale.push_back(q.scale);
  struct Case {
    BlockLayout layout;
    bool is_columns;
  };
  const Case cases[] = {
      {*BlockLayout::Create({groups, kGroup}, {1, 0}), false},
      {*BlockLayout::Create({groups * kGroup}, {kGroup}), false},
      {*BlockLayout::Create({kGroup, groups}, {0, 1}), true}};
  const std::vector<std::string> targets = AvailableSimdTargets();
  for (const char* format : {"int8", "uint8", "int16", "float8_e4m3fn",
                             "float8_e5m2", "float8_e4m3fnuz", "float6_e2m3",
                             "float6_e3m2", "float4_e2m1", "codebook8"}) {
    SCOPED_TRACE(format);
    Encoding encoding = MakeEncoding(format, scale, 0);
    if (FindFormatByName(format)->kind != CodeKind::kInteger) {
      encoding.zero_point.clear();
    }
    if (FindFormatByName(format)->kind == CodeKind::kCodebook) {
      for (int k = 0; k < 256; ++k) {
        encoding.codebook.push_back(static_cast<float>(k));
      }
    }
    for (const Case& c : cases) {
      std::vector<float> x(groups * kGroup);
      for (int64_t g = 0; g < groups; ++g) {
        for (int64_t i = 0; i < kGroup; ++i) {
          // From 2^3 to 2^-12 times the quotient, both signs.
          x[c.is_columns ? i * groups + g : g * kGroup + i] = std::ldexp(
              i % 2 ? -hard[g].x : hard[g].x, 3 - static_cast<int>(i / 2));
        }
      }
      const int64_t size = FindFormatByName(format)->SizeBytes(groups * kGroup);
      std::vector<uint8_t> expected(size);
      std::vector<uint8_t> codes(size);
      for (size_t t = targets.size(); t-- > 0;) {
        ASSERT_TRUE(SetSimdTarget(targets[t]).ok());
        QuantizeCounts counts;
        ASSERT_TRUE(Quantize(encoding, c.layout, ElementType::kFloat32,
                             NanPolicy::kDefault, 0, groups * kGroup,
                             reinterpret_cast<const uint8_t*>(x.data()),
                             codes.data(), &counts, nullptr)
                        .ok());
        // The last one is the scalar definition.
        if (t + 1 == targets.size()) expected = codes;
        ASSERT_TRUE(codes == expected) << targets[t];
      }
    }
  }
  ASSERT_TRUE(SetSimdTarget("auto").ok());
}

// Why the kernels may take one corrected product for the quotient: in none of
// the cases above does a second correction change the code, while without the
// first one in four is wrong.
TEST(DivisionTest, OneCorrectionOfTheProductIsEnough) {
  int64_t product_differs = 0;
  int64_t one_differs = 0;
  int64_t two_differ = 0;
  for (const HardQuotient& q : HardQuotients()) {
    const float y = 1.0f / q.scale;
    const float code = std::nearbyint(q.x / q.scale);
    const float product = q.x * y;
    const float one = std::fma(std::fma(-product, q.scale, q.x), y, product);
    const float two = std::fma(std::fma(-one, q.scale, q.x), y, one);
    product_differs += std::nearbyint(product) != code;
    one_differs += std::nearbyint(one) != code;
    two_differ += std::nearbyint(two) != code;
  }
  EXPECT_GT(product_differs, 150'000);
  EXPECT_EQ(one_differs, 0);
  EXPECT_EQ(two_differ, 0);
}

}  // namespace
}  // namespace quantd::core
