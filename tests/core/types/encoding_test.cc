#include "core/types/encoding.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "core/types/block_layout.h"
#include "gtest/gtest.h"

namespace quantd::core {
namespace {

Encoding ValidEncoding() {
  Encoding encoding;
  encoding.format = FindFormatByName("int8")->format;
  encoding.scale = {0.5f, 0.25f};
  encoding.zero_point = {0, -3};
  encoding.qmin = -128;
  encoding.qmax = 127;
  return encoding;
}

std::string Reason(const Encoding& encoding) {
  return std::string(ErrorReason(ValidateEncoding(encoding)));
}

TEST(EncodingTest, AcceptsAValidOne) {
  EXPECT_TRUE(ValidateEncoding(ValidEncoding()).ok());
}

TEST(EncodingTest, RefusesScalesThatAreNotPositiveNormalNumbers) {
  for (const float scale : {0.0f, -0.0f, -1.0f, NAN, INFINITY, -INFINITY,
                            1.17549421e-38f, 1e-45f}) {
    Encoding encoding = ValidEncoding();
    encoding.scale[1] = scale;
    const absl::Status status = ValidateEncoding(encoding);
    EXPECT_EQ(ErrorReason(status), "SCALE_INVALID") << scale;
    EXPECT_NE(status.message().find("scale 1 "), absl::string_view::npos);
  }
  Encoding encoding = ValidEncoding();
  encoding.scale[1] = std::numeric_limits<float>::min();
  EXPECT_TRUE(ValidateEncoding(encoding).ok());
  encoding.scale[1] = std::numeric_limits<float>::max();
  EXPECT_TRUE(ValidateEncoding(encoding).ok());
}

TEST(EncodingTest, RefusesWrongCounts) {
  Encoding encoding = ValidEncoding();
  encoding.zero_point.pop_back();
  EXPECT_EQ(Reason(encoding), "SCALE_COUNT");
  encoding.zero_point.clear();
  EXPECT_EQ(Reason(encoding), "");
  encoding.scale.clear();
  EXPECT_EQ(Reason(encoding), "SCALE_COUNT");
}

TEST(EncodingTest, ZeroPointsOfInt32AreZero) {
  Encoding encoding = ValidEncoding();
  encoding.format = FindFormatByName("int32")->format;
  encoding.qmin = std::numeric_limits<int32_t>::min();
  encoding.qmax = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(Reason(encoding), "ZERO_POINT_RANGE");
  encoding.exclude_zero = true;
  EXPECT_EQ(Reason(encoding), "ZERO_POINT_RANGE");
  encoding.exclude_zero = false;
  encoding.zero_point = {0, 0};
  EXPECT_EQ(Reason(encoding), "");
  EXPECT_EQ(ScalesSizeBytes(encoding), 2 * 4 + 2 * 4);
  encoding.zero_point.clear();
  EXPECT_EQ(Reason(encoding), "");
}

TEST(EncodingTest, TakesRealZeroPointsOfIntegersAlone) {
  Encoding encoding = ValidEncoding();
  encoding.zero_point.clear();
  encoding.zero_points_are_real = true;
  EXPECT_EQ(Reason(encoding), "SCALE_COUNT");
  encoding.real_zero_point = {-128, 126.75f};
  EXPECT_EQ(Reason(encoding), "");
  EXPECT_TRUE(HasZeroPoints(encoding));
  EXPECT_EQ(ZeroPointAt(encoding, 1), 126.75);
  EXPECT_EQ(ScalesSizeBytes(encoding), 2 * 4 + 2 * 4);
  for (const float wrong : {-128.5f, 127.25f, NAN, INFINITY}) {
    Encoding changed = encoding;
    changed.real_zero_point[1] = wrong;
    EXPECT_EQ(Reason(changed), "ZERO_POINT_RANGE") << wrong;
    EXPECT_EQ(ErrorField(ValidateEncoding(changed)), "real_zero_point");
    changed.exclude_zero = true;
    EXPECT_EQ(Reason(changed), std::isfinite(wrong) ? "" : "ZERO_POINT_RANGE");
  }
  Encoding both = encoding;
  both.zero_point = {0, 0};
  EXPECT_EQ(Reason(both), "ZERO_POINT_RANGE");
  Encoding e8m0 = encoding;
  e8m0.scale_type = ScaleType::kE8m0;
  e8m0.scale_code = {127, 127};
  e8m0.scale = {1, 1};
  EXPECT_EQ(Reason(e8m0), "SCALE_TYPE_INVALID");
  Encoding wide = encoding;
  wide.format = FindFormatByName("int32")->format;
  EXPECT_EQ(Reason(wide), "ZERO_POINT_RANGE");
  Encoding nf4;
  nf4.format = FindFormatByName("nf4")->format;
  nf4.qmax = 15;
  nf4.scale = {1};
  nf4.real_zero_point = {0};
  nf4.zero_points_are_real = true;
  EXPECT_EQ(Reason(nf4), "ZERO_POINT_RANGE");
  Encoding outline = encoding;
  outline.scale.clear();
  outline.real_zero_point.clear();
  EXPECT_TRUE(ValidateWithoutScales(outline, true).ok());
  EXPECT_EQ(ErrorReason(ValidateWithoutScales(outline, false)),
            "ZERO_POINT_RANGE");
}

TEST(EncodingTest, RefusesZeroPointsOutsideOfTheCodes) {
  Encoding encoding = ValidEncoding();
  encoding.qmin = -127;
  encoding.zero_point[1] = -128;
  EXPECT_EQ(Reason(encoding), "ZERO_POINT_RANGE");
  encoding.exclude_zero = true;
  EXPECT_EQ(Reason(encoding), "");
  encoding.zero_point[1] = kMaxZeroPoint;
  EXPECT_EQ(Reason(encoding), "");
  encoding.zero_point[1] = -kMaxZeroPoint - 1;
  EXPECT_EQ(Reason(encoding), "ZERO_POINT_RANGE");
}

TEST(EncodingTest, RefusesAMissingZeroPointThatWouldBeOutside) {
  Encoding encoding = ValidEncoding();
  encoding.zero_point.clear();
  encoding.qmin = 1;
  EXPECT_EQ(Reason(encoding), "ZERO_POINT_RANGE");
}

TEST(EncodingTest, RefusesCodeRangesOutsideOfTheFormat) {
  for (const auto& [qmin, qmax] :
       {std::pair{-129, 127}, {-128, 128}, {5, 5}, {6, 5}}) {
    Encoding encoding = ValidEncoding();
    encoding.qmin = qmin;
    encoding.qmax = qmax;
    EXPECT_EQ(Reason(encoding), "CODE_RANGE_INVALID") << qmin << " " << qmax;
  }
}

TEST(EncodingTest, RefusesUnknownFormatsAndNegativeBlocks) {
  Encoding encoding = ValidEncoding();
  encoding.block_size = {1, -1};
  EXPECT_EQ(Reason(encoding), "BLOCK_SIZE_INVALID");
  encoding.format = static_cast<NumberFormat>(21);
  EXPECT_EQ(Reason(encoding), "FORMAT_UNKNOWN");
  encoding.format = NumberFormat{};
  EXPECT_EQ(Reason(encoding), "FORMAT_UNKNOWN");
}

// An encoding of a format with its own scale type or codebook.
Encoding OfFormat(const char* name) {
  const FormatInfo& format = *FindFormatByName(name);
  Encoding encoding;
  encoding.format = format.format;
  encoding.qmin = format.qmin;
  encoding.qmax = format.qmax;
  if (format.scale_type != ScaleType::kDefault) {
    encoding.scale_type = format.scale_type;
  }
  return encoding;
}

// Two rows of three blocks of 16 along the last axis, and an outer scale per
// row.
Encoding Nvfp4() {
  Encoding encoding = OfFormat("nvfp4");
  encoding.block_size = {1, 16};
  encoding.scale_shape = {2, 3};
  encoding.scale_code = {0x38, 0x40, 0x7E, 0x30, 0x01, 0x3C};
  encoding.outer_scale = {0.5f, 3};
  encoding.outer_block_size = {1, 0};
  EXPECT_TRUE(DeriveScales(&encoding).ok()) << DeriveScales(&encoding);
  return encoding;
}

Encoding Mxfp4() {
  Encoding encoding = OfFormat("mxfp4_e2m1");
  encoding.scale_code = {0, 1, 127, 254, kE8m0Nan};
  encoding.block_size = {32};
  EXPECT_TRUE(DeriveScales(&encoding).ok()) << DeriveScales(&encoding);
  return encoding;
}

Encoding Lpbq() {
  Encoding encoding = OfFormat("lpbq");
  encoding.scale_code = {1, 16, 128};
  encoding.outer_scale = {0.1f};
  EXPECT_TRUE(DeriveScales(&encoding).ok()) << DeriveScales(&encoding);
  return encoding;
}

Encoding Codebook() {
  Encoding encoding = OfFormat("codebook4");
  encoding.codebook = {-1, 0, 0.5f};
  encoding.qmax = 2;
  encoding.scale = {2};
  return encoding;
}

TEST(EncodingTest, DerivesScalesFromCodesAndOuterScales) {
  const Encoding nvfp4 = Nvfp4();
  EXPECT_EQ(nvfp4.scale,
            (std::vector<float>{0.5f, 1, 224, 1.5f, 0x1p-9f * 3, 4.5f}));
  const Encoding mxfp4 = Mxfp4();
  EXPECT_EQ(mxfp4.scale[0], 0x1p-127f);
  EXPECT_EQ(mxfp4.scale[1], 0x1p-126f);
  EXPECT_EQ(mxfp4.scale[2], 1.0f);
  EXPECT_EQ(mxfp4.scale[3], 0x1p127f);
  EXPECT_TRUE(std::isnan(mxfp4.scale[4]));
  Encoding mxint8 = OfFormat("mxint8");
  mxint8.scale_code = {0, 127, 254};
  ASSERT_TRUE(DeriveScales(&mxint8).ok());
  EXPECT_EQ(mxint8.scale, (std::vector<float>{0x1p-133f, 0x1p-6f, 0x1p121f}));
  EXPECT_EQ(Lpbq().scale, (std::vector<float>{0.1f, 16 * 0.1f, 128 * 0.1f}));
  for (const Encoding& encoding : {nvfp4, mxfp4, mxint8, Lpbq(), Codebook()}) {
    EXPECT_TRUE(ValidateEncoding(encoding).ok()) << ValidateEncoding(encoding);
    EXPECT_TRUE(encoding == encoding);
  }
}

// Rows in pairs, the last one alone; blocks of 4 in fours, the last one ragged.
TEST(EncodingTest, MapsScalesToOuterScalesByTheirBlocks) {
  Encoding encoding = OfFormat("nvfp4");
  encoding.block_size = {1, 4};
  encoding.outer_block_size = {2, 16};
  const BlockLayout layout = *BlockLayout::Create({3, 22}, {1, 4});
  encoding.scale_shape = {3, 6};
  encoding.scale_code.assign(18, 0x38);
  encoding.outer_scale = {1, 2, 3, 4};
  ASSERT_TRUE(DeriveScales(&encoding).ok()) << DeriveScales(&encoding);
  EXPECT_EQ(encoding.scale, (std::vector<float>{1, 1, 1, 1, 2, 2,  //
                                                1, 1, 1, 1, 2, 2,  //
                                                3, 3, 3, 3, 4, 4}));
  EXPECT_EQ(Reason(encoding), "");
  EXPECT_TRUE(CheckEncodingFits(encoding, layout).ok());
  // As many scales, in another shape.
  EXPECT_EQ(ErrorReason(CheckEncodingFits(
                encoding, *BlockLayout::Create({6, 12}, {1, 4}))),
            "SCALE_COUNT");
  // Every scale's block lies in the outer block of its elements.
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t column = 0; column < 22; ++column) {
      EXPECT_EQ(encoding.scale[row * 6 + column / 4],
                encoding.outer_scale[row / 2 * 2 + column / 16]);
    }
  }
}

TEST(EncodingTest, TakesOneOuterScaleWithoutAShape) {
  Encoding encoding = Nvfp4();
  encoding.scale_shape.clear();
  encoding.outer_scale = {2};
  encoding.outer_block_size.clear();
  ASSERT_TRUE(DeriveScales(&encoding).ok());
  EXPECT_EQ(Reason(encoding), "");
  const BlockLayout layout = *BlockLayout::Create({2, 48}, {1, 16});
  EXPECT_TRUE(CheckEncodingFits(encoding, layout).ok());
  // The tensor turns out to have two.
  encoding.outer_block_size = {1, 0};
  EXPECT_EQ(Reason(encoding), "");
  EXPECT_EQ(ErrorReason(CheckEncodingFits(encoding, layout)), "SCALE_COUNT");
}

TEST(EncodingTest, TakesFormatsUnderScalesOfEveryType) {
  for (const char* name : {"int4", "float8_e4m3fn", "nf4"}) {
    for (int type = 1; type <= 6; ++type) {
      Encoding encoding = OfFormat(name);
      encoding.scale_type = static_cast<ScaleType>(type);
      if (HasScaleCodes(encoding.scale_type)) encoding.scale_code = {100, 90};
      if (HasOuterScales(encoding.scale_type)) encoding.outer_scale = {0.25f};
      encoding.scale = {0.5f, 2};
      ASSERT_TRUE(DeriveScales(&encoding).ok());
      EXPECT_EQ(Reason(encoding), "") << name << type;
    }
  }
}

TEST(EncodingTest, ComparesScalesThatAreNan) {
  Encoding other = Mxfp4();
  EXPECT_TRUE(other == Mxfp4());
  other.scale[4] = 1;
  EXPECT_FALSE(other == Mxfp4());
}

TEST(EncodingTest, NamesTheFieldAtFault) {
  using E = Encoding;
  const struct {
    const char* what;
    Encoding base;
    std::function<void(E*)> change;
    const char* reason;
    const char* field;
  } kCases[] = {
      {"default type", ValidEncoding(),
       [](E* e) { e->scale_type = ScaleType::kDefault; }, "SCALE_TYPE_INVALID",
       "scale_type"},
      {"type 7", ValidEncoding(), [](E* e) { e->scale_type = ScaleType{7}; },
       "SCALE_TYPE_INVALID", "scale_type"},
      {"float scales of MX", Mxfp4(),
       [](E* e) { e->scale_type = ScaleType::kFloat32; }, "SCALE_TYPE_INVALID",
       "scale_type"},
      {"codes of float scales", ValidEncoding(),
       [](E* e) {
         e->scale_code = {1, 2};
       },
       "SCALE_TYPE_INVALID", "scale_code"},
      {"outer scales of float scales", ValidEncoding(),
       [](E* e) { e->outer_scale = {1}; }, "SCALE_TYPE_INVALID", "outer_scale"},
      {"outer scales of E8M0", Mxfp4(), [](E* e) { e->outer_scale = {1}; },
       "SCALE_TYPE_INVALID", "outer_scale"},
      {"outer blocks of E8M0", Mxfp4(), [](E* e) { e->outer_block_size = {0}; },
       "SCALE_TYPE_INVALID", "outer_block_size"},
      {"zero points with codes", Lpbq(),
       [](E* e) {
         e->zero_point = {0, 0, 0};
       },
       "SCALE_TYPE_INVALID", "zero_point"},
      {"zero points of floats", Codebook(), [](E* e) { e->zero_point = {0}; },
       "ZERO_POINT_RANGE", "zero_point"},
      {"exclude_zero of floats", Codebook(),
       [](E* e) { e->exclude_zero = true; }, "ZERO_POINT_RANGE",
       "exclude_zero"},
      {"no codes", Mxfp4(), [](E* e) { e->scale_code.clear(); }, "SCALE_COUNT",
       "scale_code"},
      {"a scale too few", Mxfp4(), [](E* e) { e->scale.pop_back(); },
       "SCALE_COUNT", "scale"},
      {"a scale that is not its code's", Mxfp4(), [](E* e) { e->scale[2] = 2; },
       "SCALE_INVALID", "scale"},
      {"a number for NaN", Mxfp4(), [](E* e) { e->scale[4] = 2; },
       "SCALE_INVALID", "scale"},
      {"no outer scale", Nvfp4(), [](E* e) { e->outer_scale.clear(); },
       "SCALE_COUNT", "outer_scale"},
      {"an outer scale too many", Nvfp4(),
       [](E* e) { e->outer_scale.push_back(1); }, "SCALE_COUNT", "outer_scale"},
      {"outer scale 0", Nvfp4(), [](E* e) { e->outer_scale[1] = 0; },
       "SCALE_INVALID", "outer_scale"},
      {"outer scale NaN", Nvfp4(), [](E* e) { e->outer_scale[1] = NAN; },
       "SCALE_INVALID", "outer_scale"},
      {"E4M3 scale 0", Nvfp4(), [](E* e) { e->scale_code[0] = 0; },
       "SCALE_INVALID", "scale_code"},
      {"E4M3 scale below 0", Nvfp4(), [](E* e) { e->scale_code[0] = 0xB8; },
       "SCALE_INVALID", "scale_code"},
      {"E4M3 scale NaN", Nvfp4(), [](E* e) { e->scale_code[0] = 0x7F; },
       "SCALE_INVALID", "scale_code"},
      {"a subnormal product", Nvfp4(),
       [](E* e) { e->outer_scale[1] = 0x1p-126f; }, "SCALE_INVALID",
       "scale_code"},
      {"an infinite product", Nvfp4(),
       [](E* e) { e->outer_scale[0] = 0x1p127f; }, "SCALE_INVALID",
       "scale_code"},
      {"integer 0", Lpbq(), [](E* e) { e->scale_code[0] = 0; }, "SCALE_INVALID",
       "scale_code"},
      {"integer 129", Lpbq(), [](E* e) { e->scale_code[2] = 129; },
       "SCALE_INVALID", "scale_code"},
      {"two outer scales without a shape", Nvfp4(),
       [](E* e) { e->scale_shape.clear(); }, "BLOCK_SIZE_INVALID",
       "scale_shape"},
      {"scale shape of another product", Nvfp4(),
       [](E* e) {
         e->scale_shape = {2, 4};
       },
       "SCALE_COUNT", "scale_shape"},
      {"scale shape of another rank", Nvfp4(),
       [](E* e) { e->scale_shape = {6}; }, "BLOCK_SIZE_INVALID", "scale_shape"},
      {"scale shape below 0", Nvfp4(),
       [](E* e) {
         e->scale_shape = {-2, -3};
       },
       "BLOCK_SIZE_INVALID", "scale_shape"},
      {"scale shape of 2^80", Nvfp4(),
       [](E* e) {
         e->scale_shape = {int64_t{1} << 40, int64_t{1} << 40};
       },
       "BLOCK_SIZE_INVALID", "scale_shape"},
      {"scale shape of a whole dimension", ValidEncoding(),
       [](E* e) {
         e->block_size = {0};
         e->scale_shape = {2};
       },
       "BLOCK_SIZE_INVALID", "scale_shape"},
      {"outer block that cuts a block", Nvfp4(),
       [](E* e) {
         e->outer_block_size = {1, 24};
       },
       "BLOCK_SIZE_INVALID", "outer_block_size"},
      {"outer block of another rank", Nvfp4(),
       [](E* e) { e->outer_block_size = {0}; }, "BLOCK_SIZE_INVALID",
       "outer_block_size"},
      {"outer block below 0", Nvfp4(),
       [](E* e) {
         e->outer_block_size = {-1, 0};
       },
       "BLOCK_SIZE_INVALID", "outer_block_size"},
      {"no codebook", Codebook(), [](E* e) { e->codebook.clear(); },
       "CODEBOOK_INVALID", "codebook"},
      {"one entry", Codebook(),
       [](E* e) {
         e->codebook = {1};
         e->qmax = 0;
       },
       "CODEBOOK_INVALID", "codebook"},
      {"17 entries", Codebook(),
       [](E* e) {
         e->codebook.clear();
         for (int k = 0; k < 17; ++k) e->codebook.push_back(k);
         e->qmax = 16;
       },
       "CODEBOOK_INVALID", "codebook"},
      {"entries that do not ascend", Codebook(),
       [](E* e) { e->codebook[1] = -1; }, "CODEBOOK_INVALID", "codebook"},
      {"an entry NaN", Codebook(), [](E* e) { e->codebook[2] = NAN; },
       "CODEBOOK_INVALID", "codebook"},
      {"an infinite entry", Codebook(), [](E* e) { e->codebook[2] = INFINITY; },
       "CODEBOOK_INVALID", "codebook"},
      {"a codebook of integers", ValidEncoding(),
       [](E* e) {
         e->codebook = {0, 1};
       },
       "CODEBOOK_INVALID", "codebook"},
      {"codes past the entries", Codebook(), [](E* e) { e->qmax = 15; },
       "CODE_RANGE_INVALID", "qmax"},
      {"codes from 1", Codebook(), [](E* e) { e->qmin = 1; },
       "CODE_RANGE_INVALID", "qmin"},
      {"no_saturation of integers", ValidEncoding(),
       [](E* e) { e->no_saturation = true; }, "CODE_RANGE_INVALID",
       "no_saturation"},
      {"no_saturation of E2M1", Nvfp4(), [](E* e) { e->no_saturation = true; },
       "CODE_RANGE_INVALID", "no_saturation"},
  };
  for (const auto& c : kCases) {
    Encoding encoding = c.base;
    c.change(&encoding);
    const absl::Status status = ValidateEncoding(encoding);
    EXPECT_EQ(ErrorReason(status), c.reason) << c.what << status;
    EXPECT_EQ(ErrorField(status), c.field) << c.what;
  }
}

TEST(EncodingTest, RefusesScalesThatTheirTypeDoesNotHold) {
  const struct {
    ScaleType type;
    float good;
    float bad;
  } kCases[] = {{ScaleType::kFloat16, 0x1.004p0f, 0x1.002p0f},
                {ScaleType::kFloat16, 0x1p-24f, 0x1p-25f},
                {ScaleType::kFloat16, 65504, 65505},
                {ScaleType::kFloat16, 1, 65536},
                {ScaleType::kBfloat16, 0x1.02p0f, 0x1.01p0f},
                {ScaleType::kBfloat16, 0x1p-126f, 0x1p-127f}};
  for (const auto& c : kCases) {
    Encoding encoding = ValidEncoding();
    encoding.scale_type = c.type;
    encoding.scale[1] = c.good;
    EXPECT_EQ(Reason(encoding), "") << c.good;
    encoding.scale[1] = c.bad;
    EXPECT_EQ(Reason(encoding), "SCALE_INVALID") << c.bad;
  }
}

TEST(EncodingTest, CountsTheBytesOfStoredScales) {
  EXPECT_EQ(ScalesSizeBytes(ValidEncoding()), 2 * 4 + 2 * 1);
  Encoding encoding = ValidEncoding();
  encoding.zero_point.clear();
  encoding.scale_type = ScaleType::kBfloat16;
  EXPECT_EQ(ScalesSizeBytes(encoding), 2 * 2);
  EXPECT_EQ(ScalesSizeBytes(Mxfp4()), 5);
  EXPECT_EQ(ScalesSizeBytes(Nvfp4()), 6 + 2 * 4);
  encoding.format = FindFormatByName("uint4")->format;
  encoding.zero_point = {0, 0};
  EXPECT_EQ(ScalesSizeBytes(encoding), 2 * 2 + 1);
}

TEST(EncodingTest, FitsALayoutWithAsManyScales) {
  const Encoding encoding = ValidEncoding();
  EXPECT_TRUE(
      CheckEncodingFits(encoding, *BlockLayout::Create({2, 5}, {1, 0})).ok());
  EXPECT_EQ(ErrorReason(
                CheckEncodingFits(encoding, *BlockLayout::Create({2, 5}, {}))),
            "SCALE_COUNT");
}

TEST(EncodingTest, ComparesEveryField) {
  const Encoding one = ValidEncoding();
  const auto differs = [&](auto change) {
    Encoding other = one;
    change(&other);
    return !(one == other);
  };
  EXPECT_TRUE(one == ValidEncoding());
  EXPECT_TRUE(differs([](Encoding* e) { e->format = NumberFormat{4}; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->block_size = {1}; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->scale[0] = 3; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->zero_point[0] = 3; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->qmin = 3; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->qmax = 3; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->exclude_zero = true; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->degenerate_count = 1; }));
  EXPECT_TRUE(
      differs([](Encoding* e) { e->scale_type = ScaleType::kBfloat16; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->scale_code = {1}; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->outer_scale = {1}; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->outer_block_size = {1}; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->codebook = {1}; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->no_saturation = true; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->scale_shape = {1}; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->scale.push_back(1); }));
}

}  // namespace
}  // namespace quantd::core
