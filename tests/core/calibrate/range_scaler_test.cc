#include "core/calibrate/range_scaler.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/calibrate/calibrate.h"
#include "core/errors.h"
#include "core/formats/codec.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/core/calibrate/calibrate_test_util.h"

namespace quantd::core::range_scaler_test {
namespace {

absl::StatusOr<Calibration> TryCalibrate(
    const EncodingSpec& spec, const std::vector<double>& values,
    std::vector<int64_t> shape = {}, ElementType type = ElementType::kFloat32) {
  if (shape.empty()) shape = {static_cast<int64_t>(values.size())};
  const auto resolved = ResolveSpec(spec, shape);
  if (!resolved.ok()) return resolved.status();
  const Sample sample(type, values, 7, shape, resolved->block_size);
  return Calibrate(*resolved, sample.layout, sample.statistics, {}, nullptr);
}

// Also checks that scales follow from their codes, as encodings are validated.
Encoding Calibrated(const EncodingSpec& spec, const std::vector<double>& values,
                    const std::vector<int64_t>& shape = {},
                    ElementType type = ElementType::kFloat32) {
  const auto calibration = TryCalibrate(spec, values, shape, type);
  EXPECT_TRUE(calibration.ok()) << calibration.status();
  EXPECT_TRUE(ValidateEncoding(calibration->encoding).ok())
      << ValidateEncoding(calibration->encoding);
  Encoding derived = calibration->encoding;
  EXPECT_TRUE(DeriveScales(&derived).ok());
  for (size_t i = 0; i < derived.scale.size(); ++i) {
    EXPECT_EQ(std::memcmp(&derived.scale[i], &calibration->encoding.scale[i],
                          sizeof(float)),
              0);
  }
  return calibration->encoding;
}

uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// The byte by integer arithmetic on the bits of amax, normal; formats as (emax,
// mantissa bits, largest number).
struct MxFormat {
  const char* name;
  int emax;
  int mantissa_bits;
  float largest;
};
constexpr MxFormat kMxFormats[] = {
    {"mxfp8_e4m3", 8, 3, 448}, {"mxfp8_e5m2", 15, 2, 57344},
    {"mxfp6_e2m3", 2, 3, 7.5}, {"mxfp6_e3m2", 4, 2, 28},
    {"mxfp4_e2m1", 2, 1, 6},   {"mxint8", 0, 6, 127.0f / 64},
};

int NaiveE8m0(const MxFormat& format, MxScaleRule rule, float amax) {
  const uint32_t bits = Bits(amax);
  const int exponent = static_cast<int>(bits >> 23);
  const bool has_mantissa = (bits & 0x7FFFFF) != 0;
  int byte = 0;
  switch (rule) {
    case MxScaleRule::kDefault:
    case MxScaleRule::kFloor:
      byte = exponent - format.emax;
      break;
    case MxScaleRule::kCeil:
      byte = exponent + has_mantissa - format.emax;
      break;
    case MxScaleRule::kEven: {
      const uint32_t half = 1u << (23 - format.mantissa_bits - 1);
      byte = static_cast<int>((bits + half) >> 23) - format.emax;
      break;
    }
    case MxScaleRule::kRceil: {
      // Mantissas as integers: does amax fit under the largest number at
      // amax's own exponent?
      const uint32_t most = Bits(format.largest) & 0x7FFFFF;
      byte = exponent - format.emax + ((bits & 0x7FFFFF) > most);
      break;
    }
  }
  return std::clamp(byte, 0, 254);
}

TEST(RangeScalerTest, FindsE8m0ScalesByEachRule) {
  std::mt19937 random(1);
  for (const MxFormat& format : kMxFormats) {
    for (const MxScaleRule rule :
         {MxScaleRule::kDefault, MxScaleRule::kFloor, MxScaleRule::kCeil,
          MxScaleRule::kEven, MxScaleRule::kRceil}) {
      EncodingSpec spec = Spec(format.name);
      spec.mx_scale_rule = rule;
      std::vector<double> values;
      std::vector<int> expected;
      for (int block = 0; block < 300; ++block) {
        // Any normal float32, or one next to where the rules turn.
        float amax =
            FromBits((1 + random() % 254) << 23 | random() % (1 << 23));
        if (block % 3 == 0) {
          const uint32_t turns[] = {
              0,
              1,
              0x7FFFFF,
              Bits(format.largest) & 0x7FFFFF,
              (Bits(format.largest) & 0x7FFFFF) + 1,
              0x800000 - (1u << (22 - format.mantissa_bits)),
              0x7FFFFF - (1u << (22 - format.mantissa_bits))};
          amax = FromBits((60 + random() % 100) << 23 |
                          turns[random() % std::size(turns)]);
        }
        for (int i = 0; i < 31; ++i) {
          values.push_back(amax * static_cast<double>(random() % 100) / 150);
        }
        values.push_back(block % 2 ? amax : -amax);
        expected.push_back(NaiveE8m0(format, rule, amax));
      }
      const Encoding encoding = Calibrated(spec, values, {300, 32});
      ASSERT_EQ(encoding.scale_code.size(), expected.size());
      const int step = std::string(format.name) == "mxint8" ? -6 : 0;
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(encoding.scale_code[i], expected[i])
            << format.name << " rule " << static_cast<int>(rule) << " amax "
            << values[32 * i + 31];
        ASSERT_EQ(encoding.scale[i],
                  std::ldexp(1.0f, expected[i] - 127 + step));
      }
    }
  }
}

TEST(RangeScalerTest, ClipsNothingWithRceil) {
  for (const MxFormat& format : kMxFormats) {
    EncodingSpec spec = Spec(format.name);
    spec.mx_scale_rule = MxScaleRule::kRceil;
    for (const float amax : {1.0f, 1.9f, 447.9f, 448.0f, 448.1f, 6.0f, 6.1f,
                             1.984375f, 1.99f, 3e38f, 1e-30f}) {
      const Encoding encoding = Calibrated(spec, {amax}, {1, 1});
      const double unit = std::ldexp(1.0, encoding.scale_code[0] - 127);
      EXPECT_LE(amax, unit * format.largest) << format.name;
      EXPECT_GT(amax, unit / 2 * format.largest) << format.name;
    }
  }
}

TEST(RangeScalerTest, MarksMxBlocksThatAreNotFiniteOrZero) {
  const Encoding encoding = Calibrated(
      [] {
        EncodingSpec spec = Spec("mxfp8_e4m3");
        spec.block_size = {1, 2};
        return spec;
      }(),
      {1, NAN, 0, -0.0, INFINITY, -INFINITY, NAN, 0, 1e-44, 0}, {5, 2});
  EXPECT_EQ(encoding.scale_code, (std::vector<uint8_t>{255, 0, 255, 255, 0}));
  EXPECT_TRUE(std::isnan(encoding.scale[0]));
  EXPECT_EQ(encoding.scale[1], 0x1p-127f);
  EXPECT_EQ(encoding.degenerate_count, 1);
  EXPECT_EQ(encoding.scale_type, ScaleType::kE8m0);
  EXPECT_EQ(encoding.scale_shape, (std::vector<int64_t>{5, 1}));
}

TEST(RangeScalerTest, GivesE8m0ToOtherFormatsByTheirLargestNumber) {
  EncodingSpec spec = Spec("int8");
  spec.scale_type = ScaleType::kE8m0;
  // The largest is 127, of exponent 6: 2^(6 - 6).
  EXPECT_EQ(Calibrated(spec, {100}).scale[0], 1.0f);
  spec.mx_scale_rule = MxScaleRule::kRceil;
  EXPECT_EQ(Calibrated(spec, {127}).scale[0], 1.0f);
  EXPECT_EQ(Calibrated(spec, {127.5}).scale[0], 2.0f);
  spec = Spec("codebook2");
  spec.scale_type = ScaleType::kE8m0;
  spec.codebook = {-0.25, 0, 0.125};
  EXPECT_EQ(Calibrated(spec, {1}).scale[0], 4.0f);
  EXPECT_EQ(ErrorReason(TryCalibrate(spec, {3e38}).status()), "SCALE_OVERFLOW");
  spec = Spec("mxfp4_e2m1");
  EXPECT_EQ(
      ErrorReason(
          TryCalibrate(spec, {1e39}, {1, 1}, ElementType::kFloat64).status()),
      "SCALE_OVERFLOW");
}

// NVFP4 by hand: one float scale over E4M3 scales of blocks of 16.
TEST(RangeScalerTest, SplitsNvfp4ScalesInTwo) {
  std::vector<double> values(64, 0.0);
  values[3] = 2688;       // 6 * 448: the largest block has outer scale 1, 448
  values[16] = -6;        // 1.0
  values[32] = 6 * 1.06;  // 1.06 rounds to 1.0, in steps of 1/8
  const Encoding encoding = Calibrated(Spec("nvfp4"), values, {1, 64});
  EXPECT_EQ(encoding.outer_scale, std::vector<float>{1});
  // 448 is 0x7E, 1.0 is 0x38, 2^-6 is 0x08: the least, for the block of zeros.
  EXPECT_EQ(encoding.scale_code,
            (std::vector<uint8_t>{0x7E, 0x38, 0x38, 0x08}));
  EXPECT_EQ(encoding.scale, (std::vector<float>{448, 1, 1, 0x1p-6f}));
  EXPECT_EQ(encoding.degenerate_count, 1);

  std::mt19937 random(2);
  for (int round = 0; round < 200; ++round) {
    const std::vector<double> drawn =
        Draw(kAllShapes[round % 8], 16 * 30, &random);
    const Encoding e = Calibrated(Spec("nvfp4"), drawn, {10, 48});
    double amax = 0;
    std::vector<double> block_amax(30, 0.0);
    for (int i = 0; i < 480; ++i) {
      const double x = std::fabs(static_cast<float>(drawn[i]));
      amax = std::max(amax, x);
      block_amax[i / 16] = std::max(block_amax[i / 16], x);
    }
    if (amax == 0) continue;
    const float outer = static_cast<float>(amax / 2688);
    ASSERT_EQ(e.outer_scale, std::vector<float>{outer});
    for (int b = 0; b < 30; ++b) {
      // The nearest E4M3 number, of all of them.
      const double wanted =
          std::clamp(block_amax[b] / 6 / outer, 0x1p-6, 448.0);
      double best = std::numeric_limits<double>::infinity();
      for (uint32_t code = 1; code < 127; ++code) {
        best = std::min(
            best, std::fabs(DecodeFloat({4, 3, 7, FloatSpecials::kNan}, code) -
                            wanted));
      }
      const double got =
          DecodeFloat({4, 3, 7, FloatSpecials::kNan}, e.scale_code[b]);
      ASSERT_EQ(std::fabs(got - wanted), best);
      ASSERT_EQ(e.scale[b], static_cast<float>(got * outer));
    }
  }
}

TEST(RangeScalerTest, GivesAllZerosOfOuterBlocksScaleOne) {
  const Encoding nvfp4 = Calibrated(Spec("nvfp4"), {0, 0}, {1, 2});
  EXPECT_EQ(nvfp4.outer_scale, std::vector<float>{1});
  EXPECT_EQ(nvfp4.scale, std::vector<float>{1});
  EXPECT_EQ(nvfp4.degenerate_count, 1);
  const Encoding lpbq = Calibrated(Spec("lpbq"), {0, 0, 7, 7}, {2, 2});
  EXPECT_EQ(lpbq.scale[0], 1.0f);
  EXPECT_EQ(lpbq.degenerate_count, 1);
  // Tiny ones stay above the smallest normal float32.
  for (const char* format : {"nvfp4", "lpbq"}) {
    const Encoding tiny = Calibrated(Spec(format), {1e-40, 0}, {1, 2});
    EXPECT_GE(tiny.scale[0], std::numeric_limits<float>::min());
  }
}

// LPBQ by hand: per channel outer = largest block scale / 16, integers of 1 to
// 16.
TEST(RangeScalerTest, SplitsLpbqScalesInTwo) {
  EncodingSpec spec = Spec("lpbq");
  spec.block_size = {1, 2};
  const Encoding encoding =
      Calibrated(spec,
                 {112, 0, -7, 3, 0.1, 0, 56, 1,      // scales 16, 1, ~0, 8
                  0.7, 0.1, 0.35, 0, 0.7, 0, 0, 0},  // 0.1, 0.05, 0.1, none
                 {2, 8});
  EXPECT_EQ(encoding.qmin, -7);
  EXPECT_EQ(encoding.outer_block_size, (std::vector<int64_t>{1, 0}));
  ASSERT_EQ(encoding.outer_scale.size(), 2u);
  EXPECT_EQ(encoding.outer_scale[0], 1.0f);
  EXPECT_EQ(encoding.outer_scale[1],
            static_cast<float>(static_cast<double>(0.7f) / 7 / 16));
  EXPECT_EQ(encoding.scale_code,
            (std::vector<uint8_t>{16, 1, 1, 8, 16, 8, 16, 1}));
  EXPECT_EQ(encoding.scale[0], 16.0f);
  EXPECT_EQ(encoding.scale[3], 8.0f);
  EXPECT_EQ(encoding.scale_shape, (std::vector<int64_t>{2, 4}));

  spec.integer_scale_max = 4;
  EXPECT_EQ(Calibrated(spec, {112, 0, -7, 3, 0.1, 0, 56, 1}, {1, 8}).scale_code,
            (std::vector<uint8_t>{4, 1, 1, 2}));
}

TEST(RangeScalerTest, KeepsOuterBlocksApart) {
  EncodingSpec spec = Spec("lpbq");
  spec.block_size = {1, 2, 2};
  spec.outer_block_size = {2, 4, 0};
  // Scales [3, 3, 2] under outer scales [2, 1, 1] of 2 x 2 x 2 scales: the
  // last in each dimension is cut short, which 4 of 6 rows makes 2 of.
  std::vector<double> values(3 * 6 * 4, 0.0);
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 6; ++j) {
      for (int k = 0; k < 4; ++k) {
        values[(i * 6 + j) * 4 + k] = 7 * (1 + i) * (1 + j / 2);
      }
    }
  }
  const Encoding encoding = Calibrated(spec, values, {3, 6, 4});
  // Largest scales: i of {0,1} with j / 2 of {0,1}: 4, with 2: 6; i = 2: 6, 9.
  EXPECT_EQ(encoding.outer_scale,
            (std::vector<float>{4 / 16.f, 6 / 16.f, 6 / 16.f, 9 / 16.f}));
  for (size_t i = 0; i < 18; ++i) {
    const double wanted = (1.0 + i / 6) * (1 + i / 2 % 3);
    EXPECT_NEAR(encoding.scale[i], wanted, 0.3) << i;
  }
}

TEST(RangeScalerTest, SearchesWithScalesAsTheyAreStored) {
  std::mt19937 random(3);
  for (const char* format : {"nvfp4", "lpbq", "mxfp4_e2m1"}) {
    const Sample sample(ElementType::kFloat32,
                        Draw(Shape::kNormal, 64 * 64, &random), 5, {64, 64},
                        ResolveSpec(Spec(format), {64, 64})->block_size);
    EncodingSpec spec = *ResolveSpec(Spec(format), {64, 64});
    if (EffectiveScaleType(spec) == ScaleType::kE8m0) {
      spec.mx_scale_rule = MxScaleRule::kRceil;
    }
    const auto whole =
        Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
    spec.method = CalibrationMethod::kMse;
    const auto searched =
        Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
    ASSERT_TRUE(whole.ok() && searched.ok());
    EXPECT_TRUE(ValidateEncoding(searched->encoding).ok());
    EXPECT_LT(NaiveSquaredError(sample, searched->encoding).squared,
              NaiveSquaredError(sample, whole->encoding).squared)
        << format;
  }
}

TEST(RangeScalerTest, RoundsHalfPrecisionScalesUp) {
  std::mt19937 random(4);
  for (int round = 0; round < 2000; ++round) {
    const double x = std::ldexp(1 + random() % 100000 / 1e5,
                                static_cast<int>(random() % 29) - 10);
    for (const ScaleType type : {ScaleType::kFloat16, ScaleType::kBfloat16}) {
      for (const char* format : {"int8", "uint4", "float8_e4m3fn"}) {
        EncodingSpec spec = Spec(format);
        const float exact = Calibrated(spec, {x}).scale[0];
        spec.scale_type = type;
        const float scale = Calibrated(spec, {x}).scale[0];
        // ValidateEncoding has seen that the type holds it; no smaller one is
        // above the exact scale.
        const double unit = std::ldexp(
            1.0, std::ilogb(exact) - (type == ScaleType::kFloat16 ? 10 : 7));
        ASSERT_GE(scale, exact);
        ASSERT_LT(scale, exact + std::max(unit, 0x1p-24));
      }
    }
  }
  EncodingSpec spec = Spec("int8");
  spec.scale_type = ScaleType::kFloat16;
  EXPECT_EQ(Calibrated(spec, {1e-20}).scale[0], 0x1p-24f);
  EXPECT_EQ(ErrorReason(TryCalibrate(spec, {65520 * 127.0}).status()),
            "SCALE_OVERFLOW");
  spec.scale_type = ScaleType::kBfloat16;
  EXPECT_EQ(
      ErrorReason(TryCalibrate(spec, {3.4e38 * 127}, {}, ElementType::kFloat64)
                      .status()),
      "SCALE_OVERFLOW");
}

TEST(RangeScalerTest, RoundsUpToPowersOfTwo) {
  EncodingSpec spec = Spec("int8");
  spec.power_of_two_scale = true;
  EXPECT_EQ(Calibrated(spec, {127}).scale[0], 1.0f);
  EXPECT_EQ(Calibrated(spec, {127.01}).scale[0], 2.0f);
  EXPECT_EQ(Calibrated(spec, {-0.3}).scale[0], 0x1p-8f);
  spec = Spec("uint8");
  spec.power_of_two_scale = true;
  const Encoding encoding = Calibrated(spec, {-1, 3});
  // 4 / 255 becomes 1 / 32; the zero point is -rint(-1 * 32).
  EXPECT_EQ(encoding.scale[0], 0x1p-5f);
  EXPECT_EQ(encoding.zero_point[0], 32);
}

TEST(RangeScalerTest, TakesTheLargestMagnitudeToTheLargestNumber) {
  EXPECT_EQ(Calibrated(Spec("float8_e4m3fn"), {-3, 1}).scale[0],
            static_cast<float>(3.0 / 448));
  EXPECT_EQ(Calibrated(Spec("float4_e2m1"), {3}).scale[0], 0.5f);
  EXPECT_EQ(Calibrated(Spec("nf4"), {-3, 1}, {2}).scale[0], 3.0f);
  EncodingSpec spec = Spec("codebook4");
  spec.codebook = {-0.5, 0, 0.2f, 2};
  const Encoding encoding = Calibrated(spec, {-3, 1});
  EXPECT_EQ(encoding.scale[0], 1.5f);
  EXPECT_EQ(encoding.codebook, spec.codebook);
  EXPECT_EQ(encoding.qmax, 3);
  spec = Spec("float8_e5m2");
  spec.no_saturation = true;
  EXPECT_TRUE(Calibrated(spec, {1}).no_saturation);
}

TEST(RangeScalerTest, TakesAFixedRangeWhateverTheData) {
  EncodingSpec spec = Spec("uint8");
  spec.method = CalibrationMethod::kFixedRange;
  spec.range_min = -1;
  spec.range_max = 1.55;
  for (const std::vector<double>& values :
       {std::vector<double>{5}, std::vector<double>{0},
        std::vector<double>{NAN}}) {
    const Encoding encoding = Calibrated(spec, values);
    EXPECT_EQ(encoding.scale[0], static_cast<float>(2.55 / 255));
    EXPECT_EQ(encoding.zero_point[0], 100);
    EXPECT_EQ(encoding.degenerate_count, 0);
  }
  spec.range_min = 0.5;
  EXPECT_EQ(Calibrated(spec, {5}).scale[0], static_cast<float>(1.55 / 255));
  spec.exclude_zero = true;
  EXPECT_EQ(Calibrated(spec, {5}).scale[0], static_cast<float>(1.05 / 255));
  spec = Spec("int8");
  spec.method = CalibrationMethod::kFixedRange;
  spec.range_min = -2.54;
  spec.range_max = 1;
  EXPECT_EQ(Calibrated(spec, {5}).scale[0], static_cast<float>(2.54 / 127));
}

TEST(RangeScalerTest, TakesTheMovingAverageWhereThereIsOne) {
  EncodingSpec spec = Spec("uint8");
  spec.block_size = {1, 0};
  spec.method = CalibrationMethod::kMovingAverage;
  const Sample sample(ElementType::kFloat32, {-1, 1.55, 0, 5.1}, 0, {2, 2},
                      spec.block_size);
  const double infinity = std::numeric_limits<double>::infinity();
  const std::vector<Extremes> average = {{-0.5, 0.775}, {infinity, -infinity}};
  const auto calibration =
      Calibrate(spec, sample.layout, sample.statistics, average, nullptr);
  ASSERT_TRUE(calibration.ok());
  EXPECT_EQ(calibration->encoding.scale,
            (std::vector<float>{
                static_cast<float>(1.275 / 255),
                static_cast<float>(static_cast<double>(5.1f) / 255)}));
  EXPECT_FALSE(calibration->prediction.has_value());
  const auto without =
      Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
  ASSERT_TRUE(without.ok());
  EXPECT_EQ(without->encoding.scale[0],
            static_cast<float>((1 + static_cast<double>(1.55f)) / 255));
}

TEST(RangeScalerTest, SearchesInTheUnsignedFormatWhereDataIsNotNegative) {
  std::mt19937 random(5);
  const Sample sample(ElementType::kFloat32, Draw(Shape::kRelu, 5000, &random),
                      7);
  EncodingSpec spec = Spec("int4");
  spec.unsigned_if_non_negative = true;
  for (const CalibrationMethod method :
       {CalibrationMethod::kPercentile, CalibrationMethod::kMse,
        CalibrationMethod::kSqnr, CalibrationMethod::kEntropy}) {
    spec.method = method;
    const auto calibration =
        Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
    ASSERT_TRUE(calibration.ok());
    const Encoding& encoding = calibration->encoding;
    EXPECT_EQ(FindFormat(encoding.format)->name, "uint4");
    EXPECT_LE(encoding.scale[0],
              static_cast<float>(sample.statistics.overall().max / 15));
    EXPECT_LE(calibration->prediction->squared_error_low,
              NaiveSquaredError(sample, encoding).squared);
  }
}

TEST(RangeScalerTest, NeedsHistogramsOnlyWhereTheMethodDoes) {
  const Sample sample(ElementType::kFloat32, {1, 2}, 0);
  EncodingSpec spec = Spec("int8");
  EXPECT_TRUE(
      Calibrate(spec, sample.layout, sample.statistics, {}, nullptr).ok());
  spec.method = CalibrationMethod::kMse;
  EXPECT_EQ(
      ErrorReason(Calibrate(spec, sample.layout, sample.statistics, {}, nullptr)
                      .status()),
      "METHOD_INVALID");
}

// The first index is at fault long after the last, which another thread has.
TEST(RangeScalerTest, NamesTheFirstScaleIndexAtFault) {
  std::mt19937 random(6);
  constexpr int64_t kBlock = 20000;
  EncodingSpec spec = Spec("int12");
  spec.block_size = {kBlock};
  spec.method = CalibrationMethod::kEntropy;
  spec.scale_type = ScaleType::kFloat16;
  std::vector<double> values(8 * kBlock, 0.0);
  std::normal_distribution<double> normal(0, 1e20);
  for (int64_t i = 0; i < kBlock; ++i) values[i] = normal(random);
  values.push_back(1e20);
  const Sample sample(ElementType::kFloat32, values, 7, {8 * kBlock + 1},
                      spec.block_size);
  ThreadPool pool(3);
  for (int round = 0; round < 20; ++round) {
    const auto calibration =
        Calibrate(spec, sample.layout, sample.statistics, {}, &pool);
    ASSERT_THAT(std::string(calibration.status().message()),
                ::testing::HasSubstr("scale 0 "));
  }
}

TEST(RangeScalerTest, TakesTheNearestE4m3Scale) {
  std::mt19937_64 random(19);
  const FloatLayout e4m3 = {4, 3, 7, FloatSpecials::kNan};
  const EncodingSpec spec = *ResolveSpec(Spec("nvfp4"), {16});
  const BlockLayout layout = *BlockLayout::Create({16}, spec.block_size);
  const RangeScaler scaler(spec, EncodingWithoutScales(spec, layout, false));
  ASSERT_TRUE(scaler.has_e4m3_scales());
  const auto expect_nearest = [&](double ratio, float outer) {
    const double magnitude = ratio * scaler.largest() * outer;
    const double taken = magnitude / scaler.largest() / outer;
    const uint32_t want =
        EncodeFloat(e4m3, std::clamp(taken, 0x1p-6, 448.0), true);
    const BlockScale scale = scaler.E4m3Scale(magnitude, outer);
    ASSERT_EQ(scale.code, want) << "ratio " << ratio;
    ASSERT_EQ(scale.scale,
              static_cast<float>(double{DecodeFloat(e4m3, want)} * outer));
    ASSERT_EQ(scale, *scaler.Scale(0, {-magnitude, 0}, outer));
  };
  for (uint32_t code = 1; code < 127; ++code) {
    const double number = DecodeFloat(e4m3, code);
    const double middle = (number + DecodeFloat(e4m3, code + 1)) / 2;
    for (const float outer : {1.0f, 0x1p-20f}) {
      for (const double x : {number, middle}) {
        if (!(x > 0)) continue;
        expect_nearest(x, outer);
        expect_nearest(std::nextafter(x, 0), outer);
        expect_nearest(std::nextafter(x, 1e9), outer);
      }
    }
  }
  for (int i = 0; i < 10000; ++i) {
    expect_nearest(std::ldexp(1 + static_cast<double>(random() >> 12) * 0x1p-52,
                              static_cast<int>(random() % 24) - 12),
                   0.3f);
  }
}

}  // namespace
}  // namespace quantd::core::range_scaler_test
