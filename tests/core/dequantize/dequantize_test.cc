#include "core/dequantize/dequantize.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/dequantize/dequantize_kernel.h"
#include "core/types/float_convert.h"
#include "gtest/gtest.h"
#include "tests/core/formats/format_test_util.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core {
namespace {

constexpr uint8_t kCanary = 0xA5;

std::vector<uint8_t> RunDequantize(const Encoding& encoding,
                                   const BlockLayout& layout, ElementType type,
                                   const std::vector<uint8_t>& codes,
                                   int64_t first, int64_t count,
                                   ThreadPool* pool = nullptr) {
  const FormatInfo& format = *FindFormat(encoding.format);
  const int64_t begin = format.SizeBytes(first);
  const int64_t in_size = format.SizeBytes(count);
  // From an odd address, with no byte to spare.
  std::vector<uint8_t> in(in_size + 1);
  std::copy_n(codes.begin() + begin, in_size, in.begin() + 1);
  const int64_t out_size = count * ElementSizeBytes(type);
  std::vector<uint8_t> out(out_size + 1 + 64, kCanary);
  Dequantize(encoding, layout, type, first, count, in.data() + 1,
             out.data() + 1, pool);
  EXPECT_EQ(out[0], kCanary);
  for (int64_t i = 0; i < 64; ++i) {
    EXPECT_EQ(out[1 + out_size + i], kCanary) << "byte " << i << " past";
  }
  return {out.begin() + 1, out.begin() + 1 + out_size};
}

std::vector<uint8_t> RunScalarDefinition(const Encoding& encoding,
                                         const BlockLayout& layout,
                                         ElementType type,
                                         const std::vector<uint8_t>& codes,
                                         int64_t first, int64_t count) {
  const FormatInfo& format = *FindFormat(encoding.format);
  std::vector<uint8_t> out(count * ElementSizeBytes(type));
  DequantizeScalar({encoding, format, layout, type, first, count,
                    codes.data() + format.SizeBytes(first), out.data()});
  return out;
}

// Random codes of the format, not only those in [qmin, qmax] of an encoding.
std::vector<int32_t> RandomCodes(const FormatInfo& format, int64_t count) {
  std::mt19937 random(format.bits);
  std::vector<int32_t> codes(count);
  const int64_t levels = int64_t{format.qmax} - format.qmin + 1;
  for (int32_t& code : codes) {
    code = static_cast<int32_t>(format.qmin +
                                static_cast<int64_t>(random()) % levels);
  }
  return codes;
}

// The nearest value of a 16-bit float type to `x` by trying the patterns next
// to the truncated one; ties to the even pattern.
uint16_t NaiveNarrow(ElementType type, float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(double{x});
  const uint16_t infinity = type == ElementType::kFloat16 ? 0x7C00 : 0x7F80;
  uint16_t low = 0;
  uint16_t high = infinity;
  const auto value = [&](uint16_t bits) {
    // Rounding treats infinity as the next number there would be.
    if (bits == infinity) {
      return type == ElementType::kFloat16 ? 0x1p16 : 0x1p128;
    }
    const uint8_t bytes[8] = {static_cast<uint8_t>(bits),
                              static_cast<uint8_t>(bits >> 8)};
    return NaiveReal(type, bytes, 0);
  };
  while (high - low > 1) {
    const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
    (value(middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - value(low);
  const double above = value(high) - magnitude;
  const uint16_t nearest =
      below < above || (below == above && low % 2 == 0) ? low : high;
  return nearest | sign;
}

TEST(DequantizeTest, EqualsTheDefinitionsForEveryFormatTypeAndLayout) {
  for (const LayoutCase& layout_case : AllLayoutCases()) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    for (const FormatInfo& format : AllFormats()) {
      if (format.kind != CodeKind::kInteger) continue;
      SCOPED_TRACE(format.name);
      const Encoding encoding =
          MakeEncoding(format, layout, 0.013, format.bits % 2 == 0, 7);
      const std::vector<int32_t> codes = RandomCodes(format, count);
      const std::vector<uint8_t> bytes = NaivePack(format, codes);
      for (const ElementType type : kAllElementTypes) {
        SCOPED_TRACE(ElementTypeName(type));
        std::vector<uint8_t> want(count * ElementSizeBytes(type));
        for (int64_t i = 0; i < count; ++i) {
          const int64_t scale_index = NaiveScaleIndex(layout_case, i);
          const int32_t difference =
              codes[i] - (encoding.zero_point.empty()
                              ? 0
                              : encoding.zero_point[scale_index]);
          const float scale = encoding.scale[scale_index];
          const float single = static_cast<float>(difference) * scale;
          switch (type) {
            case ElementType::kFloat64: {
              const double real = difference * double{scale};
              std::memcpy(want.data() + 8 * i, &real, 8);
              break;
            }
            case ElementType::kFloat32:
              std::memcpy(want.data() + 4 * i, &single, 4);
              break;
            default: {
              const uint16_t narrow = NaiveNarrow(type, single);
              std::memcpy(want.data() + 2 * i, &narrow, 2);
            }
          }
        }
        EXPECT_EQ(RunScalarDefinition(encoding, layout, type, bytes, 0, count),
                  want);
        ForEachSimdTarget([&] {
          EXPECT_EQ(RunDequantize(encoding, layout, type, bytes, 0, count),
                    want);
        });
        if (HasFailure()) return;
      }
    }
  }
}

TEST(DequantizeTest, TakesTheDifferenceFromRealZeroPoints) {
  for (const LayoutCase& layout_case : AllLayoutCases()) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    for (const char* name : {"int2", "uint4", "int8", "uint16"}) {
      SCOPED_TRACE(name);
      const FormatInfo& format = *FindFormatByName(name);
      const Encoding encoding = MakeRealEncoding(format, layout, 0.013, 7);
      const std::vector<int32_t> codes = RandomCodes(format, count);
      const std::vector<uint8_t> bytes = NaivePack(format, codes);
      for (const ElementType type :
           {ElementType::kFloat32, ElementType::kFloat64}) {
        std::vector<uint8_t> want(count * ElementSizeBytes(type));
        for (int64_t i = 0; i < count; ++i) {
          const int64_t scale_index = NaiveScaleIndex(layout_case, i);
          const float zero_point = encoding.real_zero_point[scale_index];
          const float scale = encoding.scale[scale_index];
          // volatile: the value is to be a float32, whatever the compiler's
          // mind.
          volatile float difference = static_cast<float>(codes[i]) - zero_point;
          const double real =
              type == ElementType::kFloat64
                  ? (double{1} * codes[i] - double{zero_point}) * double{scale}
                  : double{difference * scale};
          StoreReal(type, real, want.data(), i);
        }
        EXPECT_EQ(RunScalarDefinition(encoding, layout, type, bytes, 0, count),
                  want);
        ForEachSimdTarget([&] {
          EXPECT_EQ(RunDequantize(encoding, layout, type, bytes, 0, count),
                    want);
        });
        if (HasFailure()) return;
      }
    }
  }
}

TEST(DequantizeTest, RoundsWideCodesToTheNearestFloatOnce) {
  Encoding encoding;
  encoding.format = IntegerFormat(32, true).format;
  encoding.qmin = std::numeric_limits<int32_t>::min();
  encoding.qmax = std::numeric_limits<int32_t>::max();
  encoding.scale = {0.75f};
  ASSERT_TRUE(ValidateEncoding(encoding).ok());
  // 2^24 and its neighbours, of which the odd ones are ties; and the ends.
  const std::vector<int32_t> codes = {16777216,  16777217,   16777219,
                                      -16777217, 2147483647, -2147483647 - 1};
  const std::vector<uint8_t> bytes = NaivePack(IntegerFormat(32, true), codes);
  const auto count = static_cast<int64_t>(codes.size());
  const BlockLayout layout = *BlockLayout::Create({count}, {});
  const float floats[] = {16777216,  16777216,   16777220,
                          -16777216, 2147483648, -2147483648};
  ForEachSimdTarget([&] {
    const std::vector<uint8_t> out =
        RunDequantize(encoding, layout, ElementType::kFloat32, bytes, 0, count);
    const std::vector<uint8_t> exact =
        RunDequantize(encoding, layout, ElementType::kFloat64, bytes, 0, count);
    for (int64_t i = 0; i < count; ++i) {
      EXPECT_EQ(NaiveReal(ElementType::kFloat32, out.data(), i),
                floats[i] * 0.75f)
          << codes[i];
      EXPECT_EQ(NaiveReal(ElementType::kFloat64, exact.data(), i),
                codes[i] * 0.75)
          << codes[i];
    }
  });
}

TEST(DequantizeTest, EqualsTheDefinitionForEveryLengthAndStart) {
  const LayoutCase cases[] = {{{3, 700}, {}},
                              {{3, 700}, {1, 0}},
                              {{3, 700}, {0, 1}},
                              {{3, 700}, {1, 32}}};
  for (const LayoutCase& layout_case : cases) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    for (const char* name :
         {"int2", "uint2", "int4", "uint4", "int8", "uint8", "int16"}) {
      SCOPED_TRACE(name);
      const FormatInfo& format = *FindFormatByName(name);
      const Encoding encoding = MakeEncoding(format, layout, 0.02, true, 3);
      const std::vector<uint8_t> bytes =
          NaivePack(format, RandomCodes(format, layout.element_count()));
      for (const ElementType type : kAllElementTypes) {
        SCOPED_TRACE(ElementTypeName(type));
        ForEachSimdTarget([&] {
          for (const int64_t first : {0, 4, 20, 696, 704}) {
            for (int64_t length = 0; length <= 133; ++length) {
              if (length % format.codes_per_byte() != 0) continue;
              EXPECT_EQ(
                  RunDequantize(encoding, layout, type, bytes, first, length),
                  RunScalarDefinition(encoding, layout, type, bytes, first,
                                      length))
                  << first << "+" << length;
            }
          }
        });
        if (HasFailure()) return;
      }
    }
  }
}

// What a code stands for under scale 1, by the specifications.
double NaiveValue(const FormatInfo& format, const Encoding& encoding,
                  int32_t code) {
  if (format.kind == CodeKind::kInteger) return code;
  if (format.kind == CodeKind::kCodebook) {
    const auto& codebook = format.codebook.empty()
                               ? absl::MakeConstSpan(encoding.codebook)
                               : format.codebook;
    return code < static_cast<int32_t>(codebook.size()) ? codebook[code]
                                                        : std::nan("");
  }
  const NaiveFloat* naive = FindNaiveFloat(format);
  if (naive != nullptr) return naive->Decode(code & ((1 << format.bits) - 1));
  ADD_FAILURE() << format.name;
  return 0;
}

// Equal to the last bit, or both NaN.
bool SameReal(ElementType type, const uint8_t* a, const uint8_t* b,
              int64_t index) {
  const double x = NaiveReal(type, a, index);
  const double y = NaiveReal(type, b, index);
  return std::isnan(x) ? std::isnan(y)
                       : x == y && std::signbit(x) == std::signbit(y);
}

TEST(DequantizeTest, EqualsTheDefinitionsForFloatsCodebooksAndBlockFormats) {
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
      const Encoding encoding = MakeFormatEncoding(format, layout, 0.3, 7);
      const std::vector<int32_t> codes = RandomCodes(format, count);
      std::vector<uint8_t> bytes = NaivePack(format, codes);
      if (format.bits == 6) {
        // Bits that are no part of a code.
        for (size_t i = 0; i < bytes.size(); i += 3) bytes[i] |= 0xC0;
      }
      for (const ElementType type : kAllElementTypes) {
        SCOPED_TRACE(ElementTypeName(type));
        std::vector<uint8_t> want(count * ElementSizeBytes(type));
        for (int64_t i = 0; i < count; ++i) {
          const float scale = encoding.scale[NaiveScaleIndex(layout_case, i)];
          const double value = NaiveValue(format, encoding, codes[i]);
          if (type == ElementType::kFloat64) {
            StoreReal(type, value * scale, want.data(), i);
            continue;
          }
          const float product = static_cast<float>(value) * scale;
          if (type == ElementType::kFloat32 || std::isnan(product)) {
            StoreReal(type, product, want.data(), i);
          } else {
            const uint16_t narrow = NaiveNarrow(type, product);
            std::memcpy(want.data() + 2 * i, &narrow, 2);
          }
        }
        const std::vector<uint8_t> scalar =
            RunScalarDefinition(encoding, layout, type, bytes, 0, count);
        for (int64_t i = 0; i < count; ++i) {
          ASSERT_TRUE(SameReal(type, scalar.data(), want.data(), i))
              << "element " << i << " code " << codes[i];
        }
        ForEachSimdTarget([&] {
          EXPECT_TRUE(RunDequantize(encoding, layout, type, bytes, 0, count) ==
                      scalar);
        });
        if (HasFailure()) return;
      }
    }
  }
}

TEST(DequantizeTest, GivesNaNForWholeMarkedBlocksAndPastACodebook) {
  const BlockLayout layout = *BlockLayout::Create({6}, {4});
  Encoding encoding;
  encoding.format = FindFormatByName("mxint8")->format;
  encoding.block_size = {4};
  encoding.scale_type = ScaleType::kE8m0;
  encoding.scale_code = {kE8m0Nan, 128};
  encoding.qmin = -127;
  encoding.qmax = 127;
  ASSERT_TRUE(DeriveScales(&encoding).ok());
  Encoding codebook;
  codebook.format = FindFormatByName("codebook4")->format;
  codebook.codebook = {-1, 0.25f, 3};
  codebook.scale = {2, 2};
  codebook.qmax = 2;
  ForEachSimdTarget([&] {
    const auto marked = RunDequantize(encoding, layout, ElementType::kFloat32,
                                      {0, 1, 127, 0x81, 64, 0xFF}, 0, 6);
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(
          std::isnan(NaiveReal(ElementType::kFloat32, marked.data(), i)));
    }
    EXPECT_EQ(NaiveReal(ElementType::kFloat32, marked.data(), 4), 2.0);
    EXPECT_EQ(NaiveReal(ElementType::kFloat32, marked.data(), 5), -0.03125);
    const auto entries = RunDequantize(codebook, layout, ElementType::kFloat32,
                                       {0x10, 0x32, 0x0F}, 0, 6);
    const double want[] = {-2, 0.5, 6, NAN, NAN, -2};
    for (int i = 0; i < 6; ++i) {
      const double got = NaiveReal(ElementType::kFloat32, entries.data(), i);
      EXPECT_TRUE(got == want[i] || (std::isnan(got) && std::isnan(want[i])))
          << i << " " << got;
    }
  });
}

TEST(DequantizeTest, EqualsTheDefinitionForFloatsOfEveryLengthAndStart) {
  const LayoutCase cases[] = {
      {{3, 700}, {}}, {{3, 700}, {0, 1}}, {{3, 700}, {1, 32}}};
  for (const LayoutCase& layout_case : cases) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    for (const char* name : {"float8_e5m2", "nf4", "codebook2", "codebook8"}) {
      SCOPED_TRACE(name);
      const FormatInfo& format = *FindFormatByName(name);
      const Encoding encoding = MakeFormatEncoding(format, layout, 0.3, 3);
      const std::vector<uint8_t> bytes =
          NaivePack(format, RandomCodes(format, layout.element_count()));
      for (const ElementType type : kAllElementTypes) {
        ForEachSimdTarget([&] {
          for (const int64_t first : {0, 4, 20, 696, 704}) {
            for (int64_t length = 0; length <= 133; ++length) {
              if (length % format.codes_per_byte() != 0) continue;
              EXPECT_EQ(
                  RunDequantize(encoding, layout, type, bytes, first, length),
                  RunScalarDefinition(encoding, layout, type, bytes, first,
                                      length))
                  << first << "+" << length;
            }
          }
        });
        if (HasFailure()) return;
      }
    }
  }
}

// Products that overflow and underflow the 16-bit types, and ties between
// their values.
TEST(DequantizeTest, RoundsToNearestEvenWithSubnormalsAndInfinity) {
  const int64_t count = 65536;
  const BlockLayout layout = *BlockLayout::Create({count}, {});
  const FormatInfo& format = *FindFormatByName("int16");
  std::vector<int32_t> codes(count);
  for (int64_t i = 0; i < count; ++i)
    codes[i] = static_cast<int32_t>(i) - 32768;
  const std::vector<uint8_t> bytes = NaivePack(format, codes);
  Encoding encoding;
  encoding.format = format.format;
  encoding.qmin = format.qmin;
  encoding.qmax = format.qmax;
  for (const float scale :
       {1.0f, 2.1f, 0x1p-25f, 0x1p-26f, 0x1p-29f, 1e-7f, 0.25f, 1.17549435e-38f,
        1e33f, 1e38f, 0x1p-126f, 0x1p-120f}) {
    SCOPED_TRACE(scale);
    encoding.scale = {scale};
    for (const ElementType type :
         {ElementType::kFloat16, ElementType::kBfloat16}) {
      std::vector<uint8_t> want(count * 2);
      for (int64_t i = 0; i < count; ++i) {
        const uint16_t narrow =
            NaiveNarrow(type, static_cast<float>(codes[i]) * scale);
        std::memcpy(want.data() + 2 * i, &narrow, 2);
      }
      ForEachSimdTarget([&] {
        EXPECT_TRUE(RunDequantize(encoding, layout, type, bytes, 0, count) ==
                    want);
      });
    }
  }
}

TEST(DequantizeTest, GivesTheSameBytesForAnyNumberOfThreads) {
  const LayoutCase cases[] = {
      {{300007}, {}}, {{300, 1001}, {0, 1}}, {{300, 1001}, {1, 32}}};
  ThreadPool pool(2);
  for (const LayoutCase& layout_case : cases) {
    const BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    for (const char* name :
         {"int2", "uint4", "int8", "int16", "float8_e5m2", "nf4"}) {
      const FormatInfo& format = *FindFormatByName(name);
      const Encoding encoding = MakeFormatEncoding(format, layout, 0.02, 3);
      const std::vector<uint8_t> bytes =
          NaivePack(format, RandomCodes(format, count));
      const auto alone = RunDequantize(encoding, layout, ElementType::kFloat32,
                                       bytes, 0, count);
      EXPECT_TRUE(RunDequantize(encoding, layout, ElementType::kFloat32, bytes,
                                0, count, &pool) == alone);
      EXPECT_TRUE(RunScalarDefinition(encoding, layout, ElementType::kFloat32,
                                      bytes, 0, count) == alone);
    }
  }
}

TEST(DequantizeTest, TakesCodesOutsideOfTheRangeAsTheyAre) {
  Encoding encoding;
  encoding.format = FindFormatByName("int8")->format;
  encoding.scale = {0.5f};
  encoding.qmin = -127;
  encoding.qmax = 127;
  const BlockLayout layout = *BlockLayout::Create({1}, {});
  ForEachSimdTarget([&] {
    const auto out =
        RunDequantize(encoding, layout, ElementType::kFloat32, {0x80}, 0, 1);
    EXPECT_EQ(NaiveReal(ElementType::kFloat32, out.data(), 0), -64.0);
  });
}

}  // namespace
}  // namespace quantd::core
