#include "core/quantize/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "core/errors.h"
#include "core/formats/packing.h"
#include "core/quantize/quantize_kernel.h"
#include "gtest/gtest.h"
#include "tests/core/formats/format_test_util.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core::quantize_test {
namespace {

constexpr uint8_t kCanary = 0xA5;

struct Result {
  std::vector<uint8_t> bytes;
  QuantizeCounts counts;
};

bool operator==(const QuantizeCounts& a, const QuantizeCounts& b) {
  return a.total == b.total && a.clipped_low == b.clipped_low &&
         a.clipped_high == b.clipped_high && a.nan == b.nan &&
         a.positive_infinity == b.positive_infinity &&
         a.negative_infinity == b.negative_infinity;
}

// Quantizes elements [first, first + count) from an odd address, checks that
// not a byte past the codes is touched.
Result RunQuantize(const Encoding& encoding, const BlockLayout& layout,
                   ElementType type, const std::vector<uint8_t>& reals,
                   int64_t first, int64_t count,
                   NanPolicy policy = NanPolicy::kDefault,
                   ThreadPool* pool = nullptr) {
  const FormatInfo& format = *FindFormat(encoding.format);
  const int64_t size = ElementSizeBytes(type);
  std::vector<uint8_t> in(count * size + 1);
  if (count > 0) {
    std::memcpy(in.data() + 1, reals.data() + first * size, count * size);
  }
  const int64_t out_size = format.SizeBytes(count);
  std::vector<uint8_t> out(out_size + 1 + 64, kCanary);
  Result result;
  EXPECT_TRUE(Quantize(encoding, layout, type, policy, first, count,
                       in.data() + 1, out.data() + 1, &result.counts, pool)
                  .ok());
  EXPECT_EQ(out[0], kCanary);
  for (int64_t i = 0; i < 64; ++i) {
    EXPECT_EQ(out[1 + out_size + i], kCanary) << "byte " << i << " past";
  }
  result.bytes.assign(out.begin() + 1, out.begin() + 1 + out_size);
  return result;
}

Result RunScalarDefinition(const Encoding& encoding, const BlockLayout& layout,
                           ElementType type, const std::vector<uint8_t>& reals,
                           int64_t first, int64_t count,
                           NanPolicy policy = NanPolicy::kDefault) {
  const FormatInfo& format = *FindFormat(encoding.format);
  Result result;
  result.bytes.resize(format.SizeBytes(count));
  if (count == 0) return result;
  QuantizeScalar(
      {encoding, format, layout, type, policy, first, count,
       reals.data() + first * ElementSizeBytes(type), result.bytes.data()},
      &result.counts);
  return result;
}

// The code of an element under a real zero point.
int32_t NaiveRealCode(const Encoding& encoding, int64_t scale_index,
                      ElementType type, double x, NanPolicy policy,
                      QuantizeCounts* counts) {
  const float zero_point = encoding.real_zero_point[scale_index];
  const auto clamped = [&](double code) {
    return static_cast<int32_t>(
        std::min<double>(std::max<double>(code, encoding.qmin), encoding.qmax));
  };
  if (std::isnan(x)) {
    ++counts->nan;
    return policy == NanPolicy::kQmin ? encoding.qmin
                                      : clamped(NaiveRound(zero_point));
  }
  counts->positive_infinity += std::isinf(x) && x > 0;
  counts->negative_infinity += std::isinf(x) && x < 0;
  const double quotient = NaiveQuotient(type, x, encoding.scale[scale_index]);
  // volatile: the value is to be a float32, whatever the compiler's mind.
  volatile float narrow = static_cast<float>(quotient) + zero_point;
  const double sum = type == ElementType::kFloat64
                         ? quotient + double{zero_point}
                         : double{narrow};
  const double code = NaiveRound(sum);
  counts->clipped_low += code < encoding.qmin;
  counts->clipped_high += code > encoding.qmax;
  return clamped(code);
}

// By the words of the header, with none of core's arithmetic.
Result RunNaive(const Encoding& encoding, const LayoutCase& layout,
                ElementType type, const std::vector<uint8_t>& reals,
                int64_t first, int64_t count,
                NanPolicy policy = NanPolicy::kDefault) {
  Result result;
  std::vector<int32_t> codes;
  for (int64_t i = first; i < first + count; ++i) {
    const int64_t scale_index = NaiveScaleIndex(layout, i);
    const float scale = encoding.scale[scale_index];
    const int32_t zero_point =
        encoding.zero_point.empty() ? 0 : encoding.zero_point[scale_index];
    const double x = NaiveReal(type, reals.data(), i);
    ++result.counts.total;
    if (!encoding.real_zero_point.empty()) {
      codes.push_back(NaiveRealCode(encoding, scale_index, type, x, policy,
                                    &result.counts));
      continue;
    }
    if (std::isnan(x)) {
      ++result.counts.nan;
      codes.push_back(
          policy == NanPolicy::kQmin
              ? encoding.qmin
              : std::min(std::max(zero_point, encoding.qmin), encoding.qmax));
      continue;
    }
    if (std::isinf(x)) {
      ++(x > 0 ? result.counts.positive_infinity
               : result.counts.negative_infinity);
    }
    const double code =
        NaiveRound(NaiveQuotient(type, x, scale)) + double{1} * zero_point;
    result.counts.clipped_low += code < encoding.qmin;
    result.counts.clipped_high += code > encoding.qmax;
    codes.push_back(
        NaiveCode(type, x, scale, zero_point, encoding.qmin, encoding.qmax));
  }
  result.bytes = NaivePack(*FindFormat(encoding.format), codes);
  return result;
}

void ExpectSame(const Result& got, const Result& want) {
  EXPECT_TRUE(got.counts == want.counts);
  ASSERT_EQ(got.bytes.size(), want.bytes.size());
  for (size_t i = 0; i < got.bytes.size(); ++i) {
    ASSERT_EQ(int{got.bytes[i]}, int{want.bytes[i]}) << "at byte " << i;
  }
}

TEST(QuantizeTest, EqualsTheDefinitionsForEveryFormatTypeAndLayout) {
  for (const LayoutCase& layout_case : AllLayoutCases()) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    for (const FormatInfo& format : AllFormats()) {
      if (format.kind != CodeKind::kInteger) continue;
      SCOPED_TRACE(format.name);
      const double scale = 0.02 * (1 << (8 - std::min(format.bits, 8)));
      for (const ElementType type : kAllElementTypes) {
        SCOPED_TRACE(ElementTypeName(type));
        const bool has_zero_points = format.bits % 2 == 0;
        const Encoding encoding =
            MakeEncoding(format, layout, scale, has_zero_points, 7);
        const auto reals = MakeReals(type, count, scale, true, format.bits);
        const Result want =
            RunNaive(encoding, layout_case, type, reals, 0, count);
        ExpectSame(RunScalarDefinition(encoding, layout, type, reals, 0, count),
                   want);
        ForEachSimdTarget([&] {
          ExpectSame(RunQuantize(encoding, layout, type, reals, 0, count),
                     want);
        });
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(QuantizeTest, EqualsTheDefinitionWithRealZeroPoints) {
  for (const LayoutCase& layout_case : AllLayoutCases()) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    for (const char* name :
         {"int2", "uint2", "int3", "uint4", "int8", "uint8", "int16"}) {
      SCOPED_TRACE(name);
      const FormatInfo& format = *FindFormatByName(name);
      const double scale = 0.02 * (1 << (8 - std::min(format.bits, 8)));
      const Encoding encoding = MakeRealEncoding(format, layout, scale, 7);
      if (layout.scale_count() > 0) {
        ASSERT_TRUE(ValidateEncoding(encoding).ok());
      }
      for (const ElementType type : kAllElementTypes) {
        SCOPED_TRACE(ElementTypeName(type));
        const auto reals = MakeReals(type, count, scale, true, format.bits);
        for (const NanPolicy policy : {NanPolicy::kDefault, NanPolicy::kQmin}) {
          const Result want =
              RunNaive(encoding, layout_case, type, reals, 0, count, policy);
          ExpectSame(RunScalarDefinition(encoding, layout, type, reals, 0,
                                         count, policy),
                     want);
          ForEachSimdTarget([&] {
            ExpectSame(
                RunQuantize(encoding, layout, type, reals, 0, count, policy),
                want);
          });
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// AIMET's grid of int2: -3, -1, 1 and 3.
TEST(QuantizeTest, RoundsTheSumWithARealZeroPoint) {
  Encoding encoding;
  encoding.format = IntegerFormat(2, true).format;
  encoding.scale = {2};
  encoding.real_zero_point = {-0.5f};
  encoding.zero_points_are_real = true;
  encoding.qmin = -2;
  encoding.qmax = 1;
  ASSERT_TRUE(ValidateEncoding(encoding).ok());
  const std::vector<float> x = {-9, -3, -2.25f, -1, -0.25f, 0.25f, 1, 3, 9};
  const std::vector<int32_t> codes = {-2, -2, -2, -1, -1, 0, 0, 1, 1};
  const auto count = static_cast<int64_t>(x.size());
  std::vector<uint8_t> reals(x.size() * 4);
  std::memcpy(reals.data(), x.data(), reals.size());
  const BlockLayout layout = *BlockLayout::Create({count}, {});
  const Result got =
      RunQuantize(encoding, layout, ElementType::kFloat32, reals, 0, count);
  EXPECT_EQ(got.bytes, NaivePack(IntegerFormat(2, true), codes));
  EXPECT_EQ(got.counts.clipped_low, 1);
  EXPECT_EQ(got.counts.clipped_high, 1);
}

TEST(QuantizeTest, KeepsWideCodesWithinTheirEndsAndExact) {
  const FormatInfo& format = IntegerFormat(32, true);
  Encoding encoding;
  encoding.format = format.format;
  encoding.scale = {1};
  const struct {
    double x;
    int32_t qmin;
    int32_t qmax;
    int32_t code;
    int clipped_low;
    int clipped_high;
  } cases[] = {
      {16777217, format.qmin, format.qmax, 16777217, 0, 0},
      {2147483646.5, format.qmin, format.qmax, 2147483646, 0, 0},
      {2147483647, format.qmin, format.qmax, 2147483647, 0, 0},
      {2147483648, format.qmin, format.qmax, 2147483647, 0, 1},
      {-2147483648.0, format.qmin, format.qmax, format.qmin, 0, 0},
      {-2147483649.0, format.qmin, format.qmax, format.qmin, 1, 0},
      {-2147483648.0, -format.qmax, format.qmax, -format.qmax, 1, 0},
      {1e300, -16777217, 16777217, 16777217, 0, 1},
  };
  const BlockLayout layout = *BlockLayout::Create({1}, {});
  for (const auto& c : cases) {
    SCOPED_TRACE(c.x);
    encoding.qmin = c.qmin;
    encoding.qmax = c.qmax;
    ASSERT_TRUE(ValidateEncoding(encoding).ok());
    std::vector<uint8_t> x(8);
    StoreReal(ElementType::kFloat64, c.x, x.data(), 0);
    ForEachSimdTarget([&] {
      const Result got =
          RunQuantize(encoding, layout, ElementType::kFloat64, x, 0, 1);
      EXPECT_EQ(LoadCode(format, got.bytes.data(), 0), c.code);
      EXPECT_EQ(got.counts.clipped_low, c.clipped_low);
      EXPECT_EQ(got.counts.clipped_high, c.clipped_high);
    });
    // As float32 the largest number is 2^31, which is the last code's too: it
    // is not clipped, and stays within the codes.
    StoreReal(ElementType::kFloat32, c.x, x.data(), 0);
    ForEachSimdTarget([&] {
      const Result got =
          RunQuantize(encoding, layout, ElementType::kFloat32, x, 0, 1);
      const int32_t code = LoadCode(format, got.bytes.data(), 0);
      EXPECT_GE(code, c.qmin);
      EXPECT_LE(code, c.qmax);
      if (std::fabs(c.x) < 2147483900) {
        EXPECT_EQ(got.counts.clipped_low + got.counts.clipped_high, 0);
      }
    });
  }
}

TEST(QuantizeTest, EqualsTheDefinitionForEveryLengthAndStart) {
  const LayoutCase cases[] = {{{3, 700}, {}},
                              {{3, 700}, {1, 0}},
                              {{3, 700}, {0, 1}},
                              {{3, 700}, {1, 32}}};
  const int64_t lengths[] = {0,   1,   2,   3,   7,   8,   9,   15,  16,
                             17,  31,  32,  33,  63,  64,  65,  127, 128,
                             129, 255, 256, 257, 511, 513, 1025};
  for (const LayoutCase& layout_case : cases) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    for (const char* name :
         {"int2", "int4", "uint4", "int8", "uint8", "int16", "uint16"}) {
      SCOPED_TRACE(name);
      const FormatInfo& format = *FindFormatByName(name);
      for (const ElementType type : kAllElementTypes) {
        SCOPED_TRACE(ElementTypeName(type));
        const Encoding encoding = MakeEncoding(format, layout, 0.02, true, 3);
        const auto reals =
            MakeReals(type, layout.element_count(), 0.02, true, 5);
        ForEachSimdTarget([&] {
          for (const int64_t first : {0, 4, 20, 696, 704}) {
            for (const int64_t length : lengths) {
              // A packed range ends on a byte, or where the tensor ends.
              if (length % format.codes_per_byte() != 0) continue;
              SCOPED_TRACE(absl::StrCat(first, "+", length));
              ExpectSame(
                  RunQuantize(encoding, layout, type, reals, first, length),
                  RunScalarDefinition(encoding, layout, type, reals, first,
                                      length));
            }
          }
        });
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The codec itself is tested by brute force in codec_test.
TEST(QuantizeTest, EqualsTheDefinitionForFloatsCodebooksAndBlockFormats) {
  for (const LayoutCase& layout_case : AllLayoutCases()) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    for (const FormatInfo& format : AllFormats()) {
      if (format.kind == CodeKind::kInteger &&
          format.scale_type == ScaleType::kDefault) {
        continue;
      }
      SCOPED_TRACE(format.name);
      Encoding encoding = MakeFormatEncoding(format, layout, 0.3, 7);
      for (const ElementType type : kAllElementTypes) {
        SCOPED_TRACE(ElementTypeName(type));
        const auto reals = MakeReals(type, count, 0.1, true, format.bits);
        for (const NanPolicy policy :
             {NanPolicy::kDefault, NanPolicy::kZeroPoint, NanPolicy::kQmin}) {
          for (const bool no_saturation : {false, true}) {
            if (no_saturation && !format.has_nan()) continue;
            encoding.no_saturation = no_saturation;
            const Result want = RunScalarDefinition(encoding, layout, type,
                                                    reals, 0, count, policy);
            ForEachSimdTarget([&] {
              ExpectSame(
                  RunQuantize(encoding, layout, type, reals, 0, count, policy),
                  want);
            });
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(QuantizeTest, EqualsTheDefinitionForFloatsOfEveryLengthAndStart) {
  const LayoutCase cases[] = {
      {{3, 700}, {}}, {{3, 700}, {0, 1}}, {{3, 700}, {1, 32}}};
  for (const LayoutCase& layout_case : cases) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    for (const char* name :
         {"float8_e4m3fn", "mxfp4_e2m1", "nf4", "codebook2", "codebook8"}) {
      SCOPED_TRACE(name);
      const FormatInfo& format = *FindFormatByName(name);
      for (const ElementType type :
           {ElementType::kFloat32, ElementType::kFloat64}) {
        const Encoding encoding = MakeFormatEncoding(format, layout, 0.3, 3);
        const auto reals =
            MakeReals(type, layout.element_count(), 0.1, true, 5);
        ForEachSimdTarget([&] {
          for (const int64_t first : {0, 4, 20, 696, 704}) {
            for (int64_t length = 0; length <= 300;
                 length += length < 70 ? 1 : 23) {
              if (length % format.codes_per_byte() != 0) continue;
              SCOPED_TRACE(absl::StrCat(first, "+", length));
              ExpectSame(
                  RunQuantize(encoding, layout, type, reals, first, length),
                  RunScalarDefinition(encoding, layout, type, reals, first,
                                      length));
            }
          }
        });
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The layouts that have ways of their own: groups that share vectors, more of
// them than are prepared at a time, columns that share scales in tiles or
// several rows at a time, rows that do not begin bytes.
TEST(QuantizeTest, EqualsTheDefinitionForManyGroupsAndColumns) {
  const LayoutCase cases[] = {
      {{3, 9216}, {1, 16}},  {{40, 256}, {1, 64}},    {{9, 1024}, {1, 256}},
      {{9, 1024}, {1, 512}}, {{70, 48}, {1, 48}},     {{5, 1031}, {1, 32}},
      {{4000, 3}, {0, 1}},   {{9, 1500}, {0, 1}},     {{11, 1027}, {0, 1}},
      {{37, 257}, {1, 0}},   {{6, 40, 25}, {0, 1, 0}}};
  for (const LayoutCase& layout_case : cases) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    for (const char* name :
         {"int2", "int4", "int8", "uint8", "int12", "float8_e4m3fn",
          "float8_e5m2fnuz", "float4_e2m1", "nf4", "codebook8"}) {
      SCOPED_TRACE(name);
      const FormatInfo& format = *FindFormatByName(name);
      const Encoding encoding = MakeFormatEncoding(format, layout, 0.05, 11);
      for (const ElementType type :
           {ElementType::kFloat32, ElementType::kBfloat16}) {
        // Clipped elements alone, and all kinds of special ones.
        for (const bool specials : {false, true}) {
          const auto reals = MakeReals(type, count, 0.02, specials, 3);
          for (const int64_t first : {int64_t{0}, int64_t{1000}}) {
            const int64_t n = (count - first) / 4 * 4;
            const Result want =
                RunScalarDefinition(encoding, layout, type, reals, first, n);
            ForEachSimdTarget([&] {
              ExpectSame(RunQuantize(encoding, layout, type, reals, first, n),
                         want);
            });
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// A range within a row that begins in the middle of a byte before it.
TEST(QuantizeTest, EqualsTheDefinitionWithinRowsThatDoNotBeginBytes) {
  const LayoutCase cases[] = {
      {{3, 5003}, {0, 1}}, {{3, 5003}, {1, 32}}, {{3, 5003}, {1, 0}}};
  for (const LayoutCase& layout_case : cases) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    for (const char* name : {"int2", "int4", "float4_e2m1", "nf4"}) {
      SCOPED_TRACE(name);
      const FormatInfo& format = *FindFormatByName(name);
      const Encoding encoding = MakeFormatEncoding(format, layout, 0.05, 11);
      const auto reals = MakeReals(ElementType::kFloat32,
                                   layout.element_count(), 0.02, false, 3);
      for (const int64_t first : {5004, 5100, 10008}) {
        const Result want = RunScalarDefinition(
            encoding, layout, ElementType::kFloat32, reals, first, 4000);
        ForEachSimdTarget([&] {
          ExpectSame(RunQuantize(encoding, layout, ElementType::kFloat32, reals,
                                 first, 4000),
                     want);
        });
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The scales of other elements of the row may be missing.
TEST(QuantizeTest, ReadsTheScalesOfItsElementsAlone) {
  constexpr int64_t kColumns = int64_t{1} << 40;
  const LayoutCase layout_case = {{2, kColumns}, {0, 1}};
  const BlockLayout layout = layout_case.Layout();
  for (const char* name : {"int4", "int8", "float8_e4m3fn", "nf4"}) {
    SCOPED_TRACE(name);
    const FormatInfo& format = *FindFormatByName(name);
    for (const int64_t length : {64, 1500, 5000}) {
      SCOPED_TRACE(length);
      const BlockLayout few = *BlockLayout::Create({length}, {1});
      const Encoding encoding = MakeFormatEncoding(format, few, 0.05, 11);
      const auto reals =
          MakeReals(ElementType::kFloat32, length, 0.02, false, 3);
      const Result want = RunScalarDefinition(
          encoding, few, ElementType::kFloat32, reals, 0, length);
      for (const int64_t column : {int64_t{0}, kColumns - length}) {
        const BlockLayout window = layout.Window(column);
        ForEachSimdTarget([&] {
          Result got;
          got.bytes.resize(format.SizeBytes(length));
          EXPECT_TRUE(Quantize(encoding, window, ElementType::kFloat32,
                               NanPolicy::kDefault, kColumns + column, length,
                               reals.data(), got.bytes.data(), &got.counts,
                               nullptr)
                          .ok());
          ExpectSame(got, want);
        });
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Clean stretches and clipped ones, longer and shorter than what is looked at
// or counted at a time, from every element of a vector on, with numbers among
// them that are not finite or whose quotients overflow.
TEST(QuantizeTest, EqualsTheDefinitionWhereCleanStretchesFollowClippedOnes) {
  constexpr int64_t kCount = 25600;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float specials[] = {std::numeric_limits<float>::quiet_NaN(),
                            kInfinity,
                            -kInfinity,
                            3e38f,
                            -3e38f,
                            1e9f,
                            -1e9f,
                            3e4f,
                            -3e4f};
  const LayoutCase cases[] = {{{4, 6400}, {}},
                              {{4, 6400}, {1, 0}},
                              {{8, 3200}, {0, 1}},
                              {{4, 6400}, {1, 32}}};
  for (const char* name : {"int4", "int8", "uint8", "int16", "float8_e4m3fn",
                           "float4_e2m1", "mxfp4_e2m1", "nf4", "codebook8"}) {
    SCOPED_TRACE(name);
    const FormatInfo& format = *FindFormatByName(name);
    const bool is_integer = format.kind == CodeKind::kInteger;
    for (const LayoutCase& layout_case : cases) {
      SCOPED_TRACE(layout_case.Name());
      const BlockLayout layout = layout_case.Layout();
      Encoding encoding = MakeFormatEncoding(format, layout, 1, 3);
      for (size_t i = 0; i < encoding.scale.size(); ++i) {
        encoding.scale[i] = 1 + 0.25f * static_cast<float>(i % 3);
        if (!encoding.zero_point.empty()) {
          encoding.zero_point[i] = (format.qmin + format.qmax + 1) / 2;
        }
      }
      if (format.scale_type == ScaleType::kE8m0) {
        std::fill(encoding.scale_code.begin(), encoding.scale_code.end(), 127);
        std::fill(encoding.scale.begin(), encoding.scale.end(), 1.0f);
      }
      const double inside = is_integer ? 0.49 * (format.qmax - format.qmin) - 1
                            : format.kind == CodeKind::kFloat ? format.max_value
                                                              : 0.5;
      std::mt19937 random(11);
      std::uniform_real_distribution<double> uniform(-inside, inside);
      std::vector<uint8_t> reals(kCount * sizeof(float));
      for (int64_t i = 0; i < kCount;) {
        // One element in so many is clipped, or clipped or special.
        const int kind = static_cast<int>(random() % 8);
        const uint32_t every = kind < 2 ? 0 : kind < 4 ? 7 : 300;
        const bool has_specials = kind == 4;
        const int64_t lengths[] = {1, 100, 600, 6000};
        const int64_t length =
            1 + static_cast<int64_t>(random()) % lengths[random() % 4];
        const int64_t end = std::min(kCount, i + length);
        for (; i < end; ++i) {
          double x = uniform(random);
          if (every != 0 && random() % every == 0) {
            x *= 100;
            if (has_specials) x = specials[random() % std::size(specials)];
          }
          StoreReal(ElementType::kFloat32, x, reals.data(), i);
        }
      }
      for (int64_t first = 0; first < 64; first += 12) {
        const int64_t n = (kCount - first * 37) / 8 * 8;
        const Result want = RunScalarDefinition(
            encoding, layout, ElementType::kFloat32, reals, first, n);
        EXPECT_GT(want.counts.clipped_low, 0);
        EXPECT_GT(want.counts.clipped_high, 0);
        EXPECT_GT(want.counts.nan, 0);
        ForEachSimdTarget([&] {
          ExpectSame(RunQuantize(encoding, layout, ElementType::kFloat32, reals,
                                 first, n),
                     want);
        });
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Scales that reciprocals do not serve, among others that they do.
TEST(QuantizeTest, EqualsTheDefinitionWhereSomeScalesAreExtreme) {
  const LayoutCase cases[] = {{{20, 640}, {1, 32}},
                              {{20, 640}, {1, 0}},
                              {{20, 640}, {0, 1}},
                              {{8, 1600}, {0, 1}}};
  const float extremes[] = {0x1p-126f, 0x1p-101f, 0x1.8p-80f, 0x1p24f,
                            0x1.8p61f, 0x1p101f,  0x1p127f};
  for (const LayoutCase& layout_case : cases) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    for (const char* name :
         {"int4", "int8", "uint16", "float8_e4m3fn", "float4_e2m1", "nf4"}) {
      SCOPED_TRACE(name);
      const FormatInfo& format = *FindFormatByName(name);
      Encoding encoding = MakeFormatEncoding(format, layout, 0.3, 7);
      const int64_t scales = static_cast<int64_t>(encoding.scale.size());
      for (size_t k = 0; k < std::size(extremes); ++k) {
        encoding.scale[(k * 37 + scales / 2) % scales] = extremes[k];
      }
      auto reals = MakeReals(ElementType::kFloat32, count, 0.1, true, 5);
      for (int64_t i = 0; i < count; i += 3) {
        float x;
        std::memcpy(&x, reals.data() + i * 4, 4);
        x *= encoding.scale[NaiveScaleIndex(layout_case, i)];
        std::memcpy(reals.data() + i * 4, &x, 4);
      }
      const Result want = RunScalarDefinition(
          encoding, layout, ElementType::kFloat32, reals, 0, count);
      ForEachSimdTarget([&] {
        ExpectSame(RunQuantize(encoding, layout, ElementType::kFloat32, reals,
                               0, count),
                   want);
      });
      if (HasFatalFailure()) return;
    }
  }
}

// Quotients that are too small for float32 are +0 if they round to zero, and
// otherwise give a code with their sign.
TEST(QuantizeTest, KeepsTheSignOfTheSmallestQuotients) {
  const LayoutCase cases[] = {
      {{64, 32}, {1, 0}}, {{64, 32}, {1, 32}}, {{32, 64}, {0, 1}}};
  for (const LayoutCase& layout_case : cases) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    for (const char* name :
         {"float8_e4m3fn", "float8_e5m2fnuz", "float4_e2m1", "codebook2"}) {
      SCOPED_TRACE(name);
      const FormatInfo& format = *FindFormatByName(name);
      Encoding encoding = MakeFormatEncoding(format, layout, 0.3, 7);
      if (format.kind == CodeKind::kCodebook) {
        encoding.codebook = {-1, -0x1p-149f, 0x1p-149f, 1};
        encoding.qmax = 3;
      }
      for (size_t k = 0; k < encoding.scale.size(); ++k) {
        encoding.scale[k] = std::ldexp(1.0f + static_cast<float>(k % 8) / 8,
                                       static_cast<int>(k % 27) - 2);
      }
      std::vector<uint8_t> reals(count * 4);
      for (int64_t i = 0; i < count; ++i) {
        const float scale = encoding.scale[NaiveScaleIndex(layout_case, i)];
        // About 2^-150 of the scale, or the smallest number.
        const float least = std::max(std::ldexp(scale, -150), 0x1p-149f);
        const int steps = static_cast<int>(i % 5) - 2;
        const float x =
            (i % 2 ? -1 : 1) * (least + static_cast<float>(steps) * 0x1p-149f);
        std::memcpy(reals.data() + i * 4, &x, 4);
      }
      const Result want = RunScalarDefinition(
          encoding, layout, ElementType::kFloat32, reals, 0, count);
      ForEachSimdTarget([&] {
        ExpectSame(RunQuantize(encoding, layout, ElementType::kFloat32, reals,
                               0, count),
                   want);
      });
      if (HasFatalFailure()) return;
    }
  }
}

// One block of floats and what it gives, by hand.
struct FloatCase {
  const char* format;
  float scale;
  bool no_saturation;
  NanPolicy policy;
  std::vector<float> values;
  std::vector<int32_t> codes;
  int64_t clipped_low;
  int64_t clipped_high;
};

TEST(QuantizeTest, FloatsSaturateOrNotAndTakeNanAsThePolicySays) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr NanPolicy kDefault = NanPolicy::kDefault;
  const std::vector<float> all = {1,     -1,      kInf,    -kInf,
                                  kNan,  448 * 2, 464 * 2, 466 * 2,
                                  1e38f, -1e38f,  -0.0f};
  const FloatCase kCases[] = {
      {"float8_e4m3fn",
       2,
       false,
       kDefault,
       all,
       {0x30, 0xB0, 0x7E, 0xFE, 0x7F, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x00},
       2,
       3},
      {"float8_e4m3fn",
       2,
       true,
       kDefault,
       all,
       {0x30, 0xB0, 0x7F, 0x7F, 0x7F, 0x7E, 0x7E, 0x7F, 0x7F, 0x7F, 0x00},
       2,
       3},
      {"float8_e4m3fn", 2, false, NanPolicy::kZeroPoint, {kNan}, {0}, 0, 0},
      {"float8_e4m3fn", 2, false, NanPolicy::kQmin, {kNan}, {0xFE}, 0, 0},
      {"float8_e5m2",
       1,
       true,
       kDefault,
       {kInf, -kInf, kNan, 57344, 61440, -61440},
       {0x7C, 0xFC, 0x7F, 0x7B, 0x7C, 0xFC},
       2,
       2},
      {"float8_e5m2",
       1,
       false,
       kDefault,
       {61440, -61439, 57344},
       {0x7B, 0xFB, 0x7B},
       0,
       1},
      {"float8_e4m3fnuz",
       1,
       false,
       kDefault,
       {-0.0f, -1e-9f, kNan, kInf, -240, 1},
       {0, 0, 0x80, 0x7F, 0xFF, 0x40},
       0,
       1},
      {"float8_e4m3fnuz",
       1,
       true,
       kDefault,
       {kInf, -kInf, 1e9f},
       {0x80, 0x80, 0x80},
       1,
       2},
      {"float8_e4m3fnuz", 1, false, NanPolicy::kQmin, {kNan}, {0xFF}, 0, 0},
      // 0 .5 1 1.5 2 3 4 6 and the ties between them.
      {"float4_e2m1",
       0.5f,
       false,
       kDefault,
       {0, 0.125f, 0.126f, 0.25f, 0.375f, 0.625f, 0.875f, 1.25f, 1.75f, 2.5f,
        3.4f, 3.5f, -3.5f, kNan, kInf, -0.1f},
       {0, 0, 1, 1, 2, 2, 4, 4, 6, 6, 7, 7, 15, 0, 7, 8},
       1,
       2},
      {"float4_e2m1", 0.5f, false, NanPolicy::kQmin, {kNan}, {15}, 0, 0},
      {"nf4",
       2,
       false,
       kDefault,
       {-2, -2.1f, 2, 2.1f, kNan, kInf, 0.1f, -1e-30f, -1.2f},
       {0, 0, 15, 15, 7, 15, 8, 7, 2},
       1,
       2},
      {"nf4", 2, false, NanPolicy::kQmin, {kNan}, {0}, 0, 0},
  };
  for (const FloatCase& c : kCases) {
    SCOPED_TRACE(c.format);
    const FormatInfo& format = *FindFormatByName(c.format);
    const int64_t count = static_cast<int64_t>(c.values.size());
    const BlockLayout layout = *BlockLayout::Create({count}, {});
    Encoding encoding;
    encoding.format = format.format;
    encoding.scale = {c.scale};
    encoding.qmin = format.qmin;
    encoding.qmax = format.qmax;
    encoding.no_saturation = c.no_saturation;
    std::vector<uint8_t> reals(count * 4);
    std::memcpy(reals.data(), c.values.data(), reals.size());
    ForEachSimdTarget([&] {
      const Result got = RunQuantize(encoding, layout, ElementType::kFloat32,
                                     reals, 0, count, c.policy);
      EXPECT_EQ(got.bytes, NaivePack(format, c.codes));
      EXPECT_EQ(got.counts.clipped_low, c.clipped_low);
      EXPECT_EQ(got.counts.clipped_high, c.clipped_high);
    });
  }
}

// The scale types' blocks, by hand: elements, scales from their codes, codes.
struct BlockCase {
  const char* format;
  std::vector<int64_t> shape;
  std::vector<int64_t> block_size;
  std::vector<int64_t> scale_shape;
  std::vector<uint8_t> scale_code;
  std::vector<float> outer_scale;
  std::vector<int64_t> outer_block_size;
  std::vector<float> values;
  std::vector<int32_t> codes;
  int64_t clipped;
};

TEST(QuantizeTest, BlockFormatsFollowTheirScaleCodes) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const BlockCase kCases[] = {
      // Blocks of 4, the last one ragged: 2^0, 2^-1, NaN (E2M1 has none), and
      // the smallest scale there is.
      {"mxfp4_e2m1",
       {14},
       {4},
       {4},
       {127, 126, 0xFF, 0},
       {},
       {},
       {1, -6, 7, 2.5f, 0.5f, 3, -1.5f, 0.25f, 1, kNan, 5, -5, 0x1.8p-127f,
        -0x1p-128f},
       {2, 15, 7, 4, 2, 7, 13, 1, 0, 0, 0, 0, 3, 9},
       1},
      // E4M3 has NaN: a marked block gives it back.
      {"mxfp8_e4m3",
       {6},
       {4},
       {2},
       {0xFF, 130},
       {},
       {},
       {1, 2, kNan, -1e30f, 8, -8},
       {0x7F, 0x7F, 0x7F, 0x7F, 0x38, 0xB8},
       0},
      // Steps of 2^-6 of the scale, without -128.
      {"mxint8",
       {6},
       {4},
       {2},
       {127, 0xFF},
       {},
       {},
       {1, -1.984375f, -2, 0.0078125f, 3, -3},
       {64, -127, -127, 0, 0, 0},
       1},
      // Two blocks of 3 under scales 2 and 0.5 of an outer 0.25.
      {"nvfp4",
       {5},
       {3},
       {2},
       {0x40, 0x30},
       {0.25f},
       {},
       {3, -0.5f, 0.25f, 0.75f, -0.1f},
       {7, 10, 1, 7, 10},
       0},
      // Channels on axis 0, blocks of 2 along axis 1: per-channel float scales
      // 0.5 and 2, integers 1, 16 and 3, 2.
      {"lpbq",
       {2, 3},
       {1, 2},
       {2, 2},
       {1, 16, 3, 2},
       {0.5f, 2},
       {1, 0},
       {1, -4, 40, 18, -61, 2},
       {2, -8, 5, 3, -8, 0},
       1},
  };
  for (const BlockCase& c : kCases) {
    SCOPED_TRACE(c.format);
    const FormatInfo& format = *FindFormatByName(c.format);
    const BlockLayout layout = *BlockLayout::Create(c.shape, c.block_size);
    const int64_t count = layout.element_count();
    Encoding encoding;
    encoding.format = format.format;
    encoding.block_size = c.block_size;
    encoding.scale_shape = c.scale_shape;
    encoding.scale_type = format.scale_type;
    encoding.scale_code = c.scale_code;
    encoding.outer_scale = c.outer_scale;
    encoding.outer_block_size = c.outer_block_size;
    encoding.qmin = format.qmin;
    encoding.qmax = format.qmax;
    ASSERT_TRUE(DeriveScales(&encoding).ok());
    ASSERT_TRUE(ValidateEncoding(encoding).ok()) << ValidateEncoding(encoding);
    ASSERT_TRUE(CheckEncodingFits(encoding, layout).ok());
    std::vector<uint8_t> reals(count * 4);
    std::memcpy(reals.data(), c.values.data(), reals.size());
    ForEachSimdTarget([&] {
      const Result got =
          RunQuantize(encoding, layout, ElementType::kFloat32, reals, 0, count);
      EXPECT_EQ(got.bytes, NaivePack(format, c.codes));
      EXPECT_EQ(got.counts.clipped_low + got.counts.clipped_high, c.clipped);
      EXPECT_EQ(got.counts.nan,
                std::count_if(c.values.begin(), c.values.end(),
                              [](float x) { return std::isnan(x); }));
    });
  }
}

TEST(QuantizeTest, PadsTheLastByteOfAnOddTensorWithZeros) {
  const LayoutCase layout_case{{5}, {}};
  Encoding encoding;
  encoding.format = FindFormatByName("int4")->format;
  encoding.scale = {1};
  encoding.qmin = -8;
  encoding.qmax = 7;
  std::vector<uint8_t> reals(20);
  for (int i = 0; i < 5; ++i) {
    StoreReal(ElementType::kFloat32, -1 - i, reals.data(), i);
  }
  ForEachSimdTarget([&] {
    EXPECT_EQ(RunQuantize(encoding, layout_case.Layout(), ElementType::kFloat32,
                          reals, 0, 5)
                  .bytes,
              (std::vector<uint8_t>{0xEF, 0xCD, 0x0B}));
  });
}

TEST(QuantizeTest, SaturatesAndMapsNanToZeroPointOrAsThePolicySays) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float values[] = {infinity, -infinity, NAN, 3e38f, -3e38f, 0, -0.0f};
  std::vector<uint8_t> reals(sizeof(values));
  std::memcpy(reals.data(), values, sizeof(values));
  Encoding encoding;
  encoding.format = FindFormatByName("int8")->format;
  encoding.scale = {0.5f};
  encoding.zero_point = {3};
  encoding.qmin = -127;
  encoding.qmax = 127;
  const BlockLayout layout = *BlockLayout::Create({7}, {});
  ForEachSimdTarget([&] {
    const Result by_default =
        RunQuantize(encoding, layout, ElementType::kFloat32, reals, 0, 7);
    EXPECT_EQ(by_default.bytes,
              (std::vector<uint8_t>{127, 0x81, 3, 127, 0x81, 3, 3}));
    EXPECT_EQ(by_default.counts.clipped_low, 2);
    EXPECT_EQ(by_default.counts.clipped_high, 2);
    EXPECT_EQ(by_default.counts.nan, 1);
    EXPECT_EQ(by_default.counts.positive_infinity, 1);
    EXPECT_EQ(by_default.counts.negative_infinity, 1);
    EXPECT_EQ(RunQuantize(encoding, layout, ElementType::kFloat32, reals, 0, 7,
                          NanPolicy::kQmin)
                  .bytes[2],
              0x81);
  });
}

TEST(QuantizeTest, ClampsTheCodeOfNanWhenTheZeroPointIsOutside) {
  std::vector<uint8_t> reals(100 * 4);
  for (int i = 0; i < 100; ++i) {
    StoreReal(ElementType::kFloat32, i % 10 == 0 ? NAN : 1.345 + 0.02 * i,
              reals.data(), i);
  }
  for (const int32_t zero_point : {-163, -kMaxZeroPoint, 300, kMaxZeroPoint}) {
    SCOPED_TRACE(zero_point);
    Encoding encoding;
    encoding.format = FindFormatByName("uint8")->format;
    encoding.scale = {0.0083f};
    encoding.zero_point = {zero_point};
    encoding.qmin = 0;
    encoding.qmax = 255;
    encoding.exclude_zero = true;
    const LayoutCase layout_case{{100}, {}};
    const Result want =
        RunNaive(encoding, layout_case, ElementType::kFloat32, reals, 0, 100);
    EXPECT_EQ(want.bytes[0], zero_point < 0 ? 0 : 255);
    ForEachSimdTarget([&] {
      ExpectSame(RunQuantize(encoding, layout_case.Layout(),
                             ElementType::kFloat32, reals, 0, 100),
                 want);
    });
  }
}

TEST(QuantizeTest, RejectNamesTheSmallestIndexWhateverTheThreads) {
  const int64_t count = 300000;
  const BlockLayout layout = *BlockLayout::Create({count}, {});
  Encoding encoding;
  encoding.format = FindFormatByName("int8")->format;
  encoding.scale = {0.5f};
  encoding.qmin = -128;
  encoding.qmax = 127;
  ThreadPool pool(2);
  std::vector<uint8_t> out(count);
  for (const ElementType type : kAllElementTypes) {
    std::vector<uint8_t> reals(count * ElementSizeBytes(type));
    StoreReal(type, -INFINITY, reals.data(), 131077);
    StoreReal(type, NAN, reals.data(), 131078);
    StoreReal(type, NAN, reals.data(), 270000);
    ForEachSimdTarget([&] {
      for (ThreadPool* p : {static_cast<ThreadPool*>(nullptr), &pool}) {
        QuantizeCounts counts;
        const absl::Status status =
            Quantize(encoding, layout, type, NanPolicy::kReject, 0, count,
                     reals.data(), out.data(), &counts, p);
        EXPECT_EQ(ErrorReason(status), "NON_FINITE_REJECTED");
        EXPECT_NE(ErrorText(status).find("element 131077 is -inf"),
                  absl::string_view::npos)
            << status;
        // The index is the tensor's, not the range's.
        const absl::Status part =
            Quantize(encoding, layout, type, NanPolicy::kReject, 131078, 1000,
                     reals.data() + 131078 * ElementSizeBytes(type), out.data(),
                     &counts, p);
        EXPECT_NE(ErrorText(part).find("element 131078 is nan"),
                  absl::string_view::npos)
            << part;
      }
    });
  }
}

TEST(QuantizeTest, GivesTheSameBytesAndCountsForAnyNumberOfThreads) {
  const LayoutCase cases[] = {
      {{300007}, {}}, {{300, 1001}, {0, 1}}, {{300, 1001}, {1, 32}}};
  ThreadPool pool(2);
  for (const LayoutCase& layout_case : cases) {
    const BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    for (const char* name : {"int2", "uint4", "int8", "int16", "float8_e5m2",
                             "nf4", "mxfp4_e2m1"}) {
      const FormatInfo& format = *FindFormatByName(name);
      const Encoding encoding = MakeFormatEncoding(format, layout, 0.02, 3);
      const auto reals = MakeReals(ElementType::kFloat32, count, 0.02, true, 5);
      const Result alone =
          RunQuantize(encoding, layout, ElementType::kFloat32, reals, 0, count);
      ExpectSame(RunQuantize(encoding, layout, ElementType::kFloat32, reals, 0,
                             count, NanPolicy::kDefault, &pool),
                 alone);
      ExpectSame(RunScalarDefinition(encoding, layout, ElementType::kFloat32,
                                     reals, 0, count),
                 alone);
    }
  }
}

// The quotients that a multiplication by the reciprocal gets wrong: those next
// to a tie.
TEST(QuantizeTest, DividesExactlyNextToEveryTie) {
  std::mt19937 random(11);
  const FormatInfo& format = *FindFormatByName("int8");
  const int64_t kTies = 255;
  const int64_t count = kTies * 5;
  const BlockLayout layout = *BlockLayout::Create({count}, {});
  std::vector<uint8_t> reals(count * 4);
  int64_t differs_from_reciprocal = 0;
  for (int round = 0; round < 4000; ++round) {
    const uint32_t mantissa = round % 8 == 0   ? 0x7FFFFF - random() % 4
                              : round % 8 == 1 ? random() % 4
                                               : random() % 0x800000;
    const int exponent =
        round < 2000 ? 120 : static_cast<int>(1 + random() % 246);
    const uint32_t bits = (static_cast<uint32_t>(exponent) << 23) | mantissa;
    Encoding encoding;
    encoding.format = format.format;
    encoding.qmin = -128;
    encoding.qmax = 127;
    encoding.scale.resize(1);
    std::memcpy(encoding.scale.data(), &bits, 4);
    const float scale = encoding.scale[0];
    for (int64_t tie = 0; tie < kTies; ++tie) {
      float x = static_cast<float>((tie - 127.5) * double{scale});
      x = std::nextafter(std::nextafter(x, -INFINITY), -INFINITY);
      for (int64_t i = 0; i < 5; ++i) {
        StoreReal(ElementType::kFloat32, x, reals.data(), tie * 5 + i);
        volatile float product = x * (1.0f / scale);
        differs_from_reciprocal +=
            std::nearbyint(product) != std::nearbyint(x / scale);
        x = std::nextafter(x, INFINITY);
      }
    }
    const Result want = RunScalarDefinition(
        encoding, layout, ElementType::kFloat32, reals, 0, count);
    ForEachSimdTarget([&] {
      ExpectSame(
          RunQuantize(encoding, layout, ElementType::kFloat32, reals, 0, count),
          want);
    });
    ASSERT_FALSE(HasFatalFailure()) << "scale " << scale;
  }
  // Otherwise the data would prove nothing.
  EXPECT_GT(differs_from_reciprocal, 10000);
}

TEST(QuantizeTest, TakesTheExtremeScales) {
  const LayoutCase layout_case{{4096}, {}};
  for (const float scale :
       {1.17549435e-38f, 0x1p-126f, 0x1p-101f, 0x1p-100f, 0x1p-99f, 0x1p100f,
        0x1.8p100f, 0x1p101f, 1e38f, 3.4028234e38f}) {
    SCOPED_TRACE(scale);
    for (const char* name : {"int2", "uint8", "int16"}) {
      const FormatInfo& format = *FindFormatByName(name);
      Encoding encoding;
      encoding.format = format.format;
      encoding.qmin = format.qmin;
      encoding.qmax = format.qmax;
      encoding.scale = {scale};
      for (const ElementType type :
           {ElementType::kFloat32, ElementType::kFloat64}) {
        const auto reals = MakeReals(type, 4096, scale, true, 9);
        const Result want =
            RunNaive(encoding, layout_case, type, reals, 0, 4096);
        ForEachSimdTarget([&] {
          ExpectSame(
              RunQuantize(encoding, layout_case.Layout(), type, reals, 0, 4096),
              want);
        });
      }
    }
  }
}

// Every pattern of 16 bits, so that the ways to widen agree on all of them.
TEST(QuantizeTest, WidensEveryHalfAndBfloatExactly) {
  const LayoutCase layout_case{{65536}, {}};
  std::vector<uint8_t> reals(65536 * 2);
  for (int i = 0; i < 65536; ++i) {
    reals[2 * i] = static_cast<uint8_t>(i);
    reals[2 * i + 1] = static_cast<uint8_t>(i >> 8);
  }
  for (const ElementType type :
       {ElementType::kFloat16, ElementType::kBfloat16}) {
    for (const float scale : {0x1p-24f, 1e-5f, 0.01f, 2.1f, 1e35f, 1e-38f}) {
      Encoding encoding;
      encoding.format = FindFormatByName("int16")->format;
      encoding.qmin = -32768;
      encoding.qmax = 32767;
      encoding.scale = {std::max(scale, 1.17549435e-38f)};
      const Result want =
          RunNaive(encoding, layout_case, type, reals, 0, 65536);
      ForEachSimdTarget([&] {
        ExpectSame(
            RunQuantize(encoding, layout_case.Layout(), type, reals, 0, 65536),
            want);
      });
    }
  }
}

}  // namespace
}  // namespace quantd::core::quantize_test
