#include "core/calibrate/calibrate.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/numeric/int128.h"
#include "core/errors.h"
#include "gtest/gtest.h"
#include "tests/core/calibrate/calibrate_test_util.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core::calibrate_test {
namespace {

constexpr float kSmallestNormal = 1.17549435e-38f;
constexpr int kMantissaBits = 7;

absl::StatusOr<Calibration> TryCalibrate(
    const EncodingSpec& spec, const std::vector<double>& values,
    ElementType type = ElementType::kFloat64) {
  const Sample sample(type, values, kMantissaBits, {}, spec.block_size);
  return Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
}

Encoding Calibrated(const EncodingSpec& spec, const std::vector<double>& values,
                    ElementType type = ElementType::kFloat64) {
  absl::StatusOr<Calibration> calibration = TryCalibrate(spec, values, type);
  EXPECT_TRUE(calibration.ok()) << calibration.status();
  const Encoding& encoding = calibration->encoding;
  EXPECT_TRUE(ValidateEncoding(encoding).ok()) << ValidateEncoding(encoding);
  return encoding;
}

TEST(CalibrateTest, DividesTheRangeByTheCodesWhenAsymmetric) {
  const Encoding encoding =
      Calibrated(Spec("int8", Symmetry::kAsymmetric), {-1.0, 3.0});
  EXPECT_EQ(encoding.scale, (std::vector<float>{4.0f / 255}));
  // -128 - rint(-1 / (4 / 255)) = -128 + 64.
  EXPECT_EQ(encoding.zero_point, (std::vector<int32_t>{-64}));
  EXPECT_EQ(encoding.qmin, -128);
  EXPECT_EQ(encoding.qmax, 127);
  EXPECT_EQ(encoding.degenerate_count, 0);
}

TEST(CalibrateTest, ExtendsTheRangeToContainZero) {
  const Encoding above = Calibrated(Spec("uint8"), {2.0, 5.1});
  EXPECT_EQ(above.scale[0], static_cast<float>(5.1 / 255));
  EXPECT_EQ(above.zero_point[0], 0);
  const Encoding below = Calibrated(Spec("uint8"), {-5.1, -2.0});
  EXPECT_EQ(below.scale[0], static_cast<float>(5.1 / 255));
  EXPECT_EQ(below.zero_point[0], 255);
}

TEST(CalibrateTest, LeavesTheRangeWhereItIsWithExcludeZero) {
  EncodingSpec spec = Spec("uint8");
  spec.exclude_zero = true;
  const Encoding encoding = Calibrated(spec, {1.345, 3.453});
  EXPECT_EQ(encoding.scale[0], static_cast<float>((3.453 - 1.345) / 255));
  EXPECT_EQ(encoding.zero_point[0], -163);
  EXPECT_TRUE(encoding.exclude_zero);
}

TEST(CalibrateTest, ExtendsASingleValueEvenWithExcludeZero) {
  EncodingSpec spec = Spec("uint8");
  spec.exclude_zero = true;
  const Encoding encoding = Calibrated(spec, {5.1, 5.1, 5.1});
  EXPECT_EQ(encoding.scale[0], static_cast<float>(5.1 / 255));
  EXPECT_EQ(encoding.zero_point[0], 0);
  EXPECT_EQ(encoding.degenerate_count, 0);
}

TEST(CalibrateTest, RefusesARangeTooFarFromZeroForItsWidth) {
  EncodingSpec spec = Spec("uint8");
  spec.exclude_zero = true;
  const auto far = TryCalibrate(spec, {1e6, 1e6 + 1});
  EXPECT_EQ(ErrorReason(far.status()), "ZERO_POINT_RANGE");
  EXPECT_TRUE(TryCalibrate(spec, {1e4, 1e4 + 1}).ok());
}

TEST(CalibrateTest, GivesAllZeroAndEmptyScaleOneAndFlagsThem) {
  for (const char* format : {"int8", "uint8", "int4"}) {
    for (const Symmetry symmetry :
         {Symmetry::kDefault, Symmetry::kAsymmetric}) {
      for (const std::vector<double>& values :
           {std::vector<double>{0, -0.0}, std::vector<double>{},
            std::vector<double>{NAN, INFINITY}}) {
        const Encoding encoding = Calibrated(Spec(format, symmetry), values);
        EXPECT_EQ(encoding.scale, (std::vector<float>{1}));
        EXPECT_EQ(encoding.degenerate_count, 1);
        if (!encoding.zero_point.empty()) {
          EXPECT_EQ(encoding.zero_point[0], 0);
        }
      }
    }
  }
}

TEST(CalibrateTest, TakesFromZeroToAConstant) {
  const Encoding positive =
      Calibrated(Spec("int8", Symmetry::kAsymmetric), {2.55, 2.55});
  EXPECT_EQ(positive.scale[0], static_cast<float>(2.55 / 255));
  EXPECT_EQ(positive.zero_point[0], -128);
  const Encoding negative =
      Calibrated(Spec("int8", Symmetry::kAsymmetric), {-2.55});
  EXPECT_EQ(negative.scale[0], static_cast<float>(2.55 / 255));
  EXPECT_EQ(negative.zero_point[0], 127);
}

TEST(CalibrateTest, GoesNoLowerThanTheSmallestNormalScale) {
  for (const Symmetry symmetry : {Symmetry::kAsymmetric, Symmetry::kStrict}) {
    EXPECT_EQ(Calibrated(Spec("int8", symmetry), {1e-45}).scale[0],
              kSmallestNormal);
    EXPECT_EQ(Calibrated(Spec("int8", symmetry), {1e-320}).scale[0],
              kSmallestNormal);
  }
}

TEST(CalibrateTest, FindsTheZeroPointWithTheRoundedScaleInFloat64) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal(0, 1);
  for (int round = 0; round < 2000; ++round) {
    const double a = normal(random), b = normal(random);
    for (const char* name : {"int4", "uint8", "int16", "uint16"}) {
      const FormatInfo& format = *FindFormatByName(name);
      const Encoding encoding =
          Calibrated(Spec(name, Symmetry::kAsymmetric), {a, b});
      const double low = std::min({a, b, 0.0});
      const double high = std::max({a, b, 0.0});
      const float scale =
          static_cast<float>((high - low) / (format.qmax - format.qmin));
      ASSERT_EQ(encoding.scale[0], scale);
      const double zero_point = std::min<double>(
          std::max<double>(format.qmin - NaiveRound(low / double{scale}),
                           format.qmin),
          format.qmax);
      ASSERT_EQ(encoding.zero_point[0], zero_point);
    }
  }
}

TEST(CalibrateTest, IsStrictByDefaultForSignedFormats) {
  for (const Symmetry symmetry : {Symmetry::kDefault, Symmetry::kStrict}) {
    const Encoding encoding = Calibrated(Spec("int8", symmetry), {-2.0, 1.0});
    EXPECT_EQ(encoding.scale[0], static_cast<float>(2.0 / 127));
    EXPECT_EQ(encoding.qmin, -127);
    EXPECT_EQ(encoding.qmax, 127);
    EXPECT_TRUE(encoding.zero_point.empty());
  }
  const Encoding int2 = Calibrated(Spec("int2"), {-2.0, 1.0});
  EXPECT_EQ(int2.scale[0], 2.0f);
  EXPECT_EQ(int2.qmin, -1);
  EXPECT_EQ(int2.qmax, 1);
}

TEST(CalibrateTest, IsAsymmetricByDefaultForUnsignedFormats) {
  const Encoding encoding = Calibrated(Spec("uint4"), {-1.0, 2.0});
  EXPECT_EQ(encoding.scale[0], static_cast<float>(3.0 / 15));
  EXPECT_EQ(encoding.zero_point[0], 5);
}

TEST(CalibrateTest, KeepsTheLowestCodeWithFullRangeAndHalfStep) {
  const Encoding full = Calibrated(Spec("int8", Symmetry::kFullRange), {2.0});
  EXPECT_EQ(full.scale[0], static_cast<float>(2.0 / 127));
  EXPECT_EQ(full.qmin, -128);
  const Encoding half = Calibrated(Spec("int8", Symmetry::kHalfStep), {2.0});
  EXPECT_EQ(half.scale[0], static_cast<float>(2.0 / 255 * 2));
  EXPECT_EQ(half.qmin, -128);
  EXPECT_EQ(half.qmax, 127);
}

// As AIMET computes it, in float32, on all 2^b codes.
TEST(CalibrateTest, TakesEachEndToItsOwnLastCodeWithAimetsSymmetry) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal(0, 1);
  for (int round = 0; round < 2000; ++round) {
    const float a = normal(random), b = normal(random);
    const float low = std::min({a, b, 0.0f});
    const float high = std::max({a, b, 0.0f});
    for (const char* name : {"int2", "int4", "int8", "int13", "int16"}) {
      const FormatInfo& format = *FindFormatByName(name);
      const Encoding encoding =
          Calibrated(Spec(name, Symmetry::kAimet), {a, b});
      const float scale = std::max(high / static_cast<float>(format.qmax),
                                   low / static_cast<float>(format.qmin));
      ASSERT_EQ(encoding.scale[0], scale) << name << " " << a << " " << b;
      EXPECT_EQ(encoding.qmin, format.qmin);
      EXPECT_EQ(encoding.qmax, format.qmax);
      EXPECT_TRUE(encoding.zero_point.empty());
    }
  }
  EncodingSpec spec = Spec("int8", Symmetry::kAimet);
  spec.unsigned_if_non_negative = true;
  EXPECT_EQ(Calibrated(spec, {0.0, 2.0}).scale[0],
            static_cast<float>(2.0 / 255));
  // Codes of MXINT8 are symmetric by themselves.
  EXPECT_EQ(Calibrated(Spec("mxint8", Symmetry::kAimet), {-2.0, 1.0}),
            Calibrated(Spec("mxint8"), {-2.0, 1.0}));
}

TEST(CalibrateTest, KeepsBothEndsByThemselvesWithAimetsSymmetry) {
  EncodingSpec spec = Spec("int8", Symmetry::kAimet);
  spec.method = CalibrationMethod::kFixedRange;
  spec.range_min = -12.8;
  spec.range_max = 1.27;
  EXPECT_EQ(Calibrated(spec, {1.0}).scale[0], 0.1f);
  std::vector<double> values;
  for (int i = -100; i <= 100; ++i) values.push_back(i < 0 ? 4 * i : i);
  spec = Spec("int8", Symmetry::kAimet);
  spec.method = CalibrationMethod::kPercentile;
  spec.tail_fraction = 0.02;
  // 1% at either end.
  EXPECT_FLOAT_EQ(Calibrated(spec, values).scale[0], 4 * 98.0f / 128);
  spec.tail = Tail::kUpper;
  EXPECT_FLOAT_EQ(Calibrated(spec, values).scale[0], 4 * 100.0f / 128);
  spec.tail = Tail::kMagnitude;
  EXPECT_FLOAT_EQ(Calibrated(spec, values).scale[0], 4 * 96.0f / 127);
  // Searches begin with the whole range, and shrink both ends alike.
  for (const CalibrationMethod method :
       {CalibrationMethod::kMse, CalibrationMethod::kSqnr,
        CalibrationMethod::kEntropy}) {
    spec = Spec("int8", Symmetry::kAimet);
    spec.method = method;
    EXPECT_LE(Calibrated(spec, values).scale[0], 4 * 100.0f / 128);
  }
}

// AIMET's codes of LPBQ err less than strict ones: they have -8.
TEST(CalibrateTest, AimetsSymmetryIsTheBetterOneForLpbq) {
  std::mt19937 random(12);
  const Sample sample(ElementType::kFloat32,
                      Draw(Shape::kNormal, 64 * 64 * 8, &random), 7, {64, 512},
                      {1, 64});
  const auto error = [&sample](Symmetry symmetry, CalibrationMethod method) {
    EncodingSpec spec = Spec("lpbq", symmetry);
    spec.block_size = {1, 64};
    spec.outer_block_size = {1, 0};
    spec.method = method;
    const auto calibration =
        Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
    EXPECT_TRUE(calibration.ok()) << calibration.status();
    const Encoding& encoding = calibration->encoding;
    // The largest integer scale of each channel is taken.
    for (size_t i = 0; i < encoding.scale_code.size(); i += 8) {
      EXPECT_EQ(*std::max_element(encoding.scale_code.begin() + i,
                                  encoding.scale_code.begin() + i + 8),
                16);
    }
    return NaiveSquaredError(sample, encoding).squared;
  };
  for (const CalibrationMethod method :
       {CalibrationMethod::kMinMax, CalibrationMethod::kMse}) {
    EXPECT_LT(error(Symmetry::kAimet, method),
              0.97 * error(Symmetry::kStrict, method));
  }
}

TEST(CalibrateTest, TurnsUnsignedWhenNothingIsNegativeAndThatIsAskedFor) {
  EncodingSpec spec = Spec("int8");
  spec.unsigned_if_non_negative = true;
  const Encoding encoding = Calibrated(spec, {0.0, -0.0, 2.0});
  EXPECT_EQ(FindFormat(encoding.format)->name, "uint8");
  EXPECT_EQ(encoding.scale[0], static_cast<float>(2.0 / 255));
  EXPECT_EQ(encoding.qmin, 0);
  EXPECT_EQ(encoding.qmax, 255);
  for (const double negative : {-1e-300, double{-INFINITY}}) {
    const Encoding stays = Calibrated(spec, {negative, 2.0});
    EXPECT_EQ(FindFormat(stays.format)->name, "int8");
    EXPECT_EQ(stays.scale[0], static_cast<float>(2.0 / 127));
  }
  spec.unsigned_if_non_negative = false;
  EXPECT_EQ(FindFormat(Calibrated(spec, {2.0}).format)->name, "int8");
}

TEST(CalibrateTest, LooksAtEachScaleIndexByItself) {
  EncodingSpec spec = Spec("int8", Symmetry::kAsymmetric);
  spec.block_size = {2};
  const Encoding encoding = Calibrated(spec, {0, 0, -1, 1, 0, 2.55});
  EXPECT_EQ(encoding.block_size, spec.block_size);
  EXPECT_EQ(encoding.scale,
            (std::vector<float>{1, static_cast<float>(2.0 / 255),
                                static_cast<float>(2.55 / 255)}));
  // -128 - rint(-127.5) is a tie: the rounded scale decides.
  EXPECT_EQ(encoding.zero_point[0], 0);
  EXPECT_EQ(encoding.zero_point[2], -128);
  EXPECT_EQ(encoding.degenerate_count, 1);
}

TEST(CalibrateTest, IgnoresNonFiniteElements) {
  const Encoding encoding = Calibrated(Spec("int8"), {NAN, INFINITY, 1.27});
  EXPECT_EQ(encoding.scale[0], static_cast<float>(1.27 / 127));
}

TEST(CalibrateTest, RefusesAScaleBeyondFloat32) {
  for (const Symmetry symmetry : {Symmetry::kAsymmetric, Symmetry::kStrict}) {
    for (const double huge : {1e300, std::numeric_limits<double>::max()}) {
      const auto encoding = TryCalibrate(Spec("int8", symmetry), {-huge, huge});
      EXPECT_EQ(ErrorReason(encoding.status()), "SCALE_OVERFLOW");
    }
  }
  // The widest float32 range fits with the fewest codes.
  const double largest = std::numeric_limits<float>::max();
  for (const Symmetry symmetry :
       {Symmetry::kAsymmetric, Symmetry::kStrict, Symmetry::kHalfStep}) {
    Calibrated(Spec("int2", symmetry), {-largest, largest});
  }
}

// States come from outside: parts that do not belong together give some
// encoding or an error.
TEST(CalibrateTest, SurvivesStatisticsThatContradictThemselves) {
  std::mt19937_64 random(7);
  const double values[] = {0,    1,        -1,        1e-320, 1e300, -1e300,
                           3e38, INFINITY, -INFINITY, NAN,    1e-40, 0.1};
  const char* const formats[] = {"int4",  "uint8",       "int16", "mxfp4_e2m1",
                                 "nvfp4", "float8_e5m2", "nf4",   "lpbq"};
  for (int round = 0; round < Rounds(3000); ++round) {
    const int mantissa_bits = 2 + static_cast<int>(random() % 9);
    std::vector<Histogram> histograms(2, Histogram(mantissa_bits));
    for (Histogram& histogram : histograms) {
      for (int i = 0, bins = static_cast<int>(random() % 6); i < bins; ++i) {
        const uint32_t key =
            HistogramKey(static_cast<float>(std::ldexp(
                             random() % 1000 - 500.0,
                             static_cast<int>(random() % 200) - 100)),
                         mantissa_bits);
        HistogramBin bin;
        bin.count = random() >> (random() % 64);
        bin.low_sum = random() >> (random() % 64);
        bin.low_square_sum =
            absl::MakeUint128(random() >> (random() % 64), random()) >>
            (random() % 128);
        histogram.AddBin(key, bin);
      }
    }
    std::vector<Extremes> extremes;
    for (int i = 0; i < 2; ++i) {
      extremes.push_back({values[random() % std::size(values)],
                          values[random() % std::size(values)]});
    }
    const TensorStatistics statistics = TensorStatistics::FromParts(
        {}, extremes, {}, mantissa_bits, histograms);
    const BlockLayout layout = *BlockLayout::Create({2, 8}, {1, 0});
    EncodingSpec spec = Spec(formats[random() % std::size(formats)]);
    spec.block_size = {1, 0};
    spec.search_steps = 5;
    for (int method = 1; method <= 5; ++method) {
      spec.method = static_cast<CalibrationMethod>(method);
      const auto calibration = Calibrate(spec, layout, statistics, {}, nullptr);
      if (calibration.ok()) {
        EXPECT_EQ(calibration->encoding.scale.size(), 2u);
      }
    }
  }
}

// What was calibrated on clips nothing, and errs by half a step at most.
TEST(CalibrateTest, CoversTheDataItSaw) {
  std::mt19937 random(5);
  std::normal_distribution<double> normal(0, 1);
  for (int round = 0; round < 200; ++round) {
    std::vector<double> values;
    for (int i = 0; i < 50; ++i) {
      values.push_back(static_cast<float>(normal(random) + round % 7 - 3));
    }
    for (const char* name : {"int2", "int4", "uint8", "int8", "int16"}) {
      const Encoding encoding = Calibrated(Spec(name), values);
      const double half_step = 0.5 * encoding.scale[0];
      for (const double x : values) {
        const int32_t zero_point =
            encoding.zero_point.empty() ? 0 : encoding.zero_point[0];
        const int32_t code =
            NaiveCode(ElementType::kFloat32, x, encoding.scale[0], zero_point,
                      encoding.qmin, encoding.qmax);
        // At the ends the rounded zero point costs up to another half.
        const double steps = encoding.zero_point.empty() ? 1 : 2;
        // The scale and the quotient are rounded to float32.
        const double rounding = std::fabs(x) * 0x1p-22;
        EXPECT_LE(
            std::fabs((code - zero_point) * double{encoding.scale[0]} - x),
            half_step * steps + rounding);
      }
    }
  }
}

}  // namespace
}  // namespace quantd::core::calibrate_test
