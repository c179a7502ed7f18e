#include "core/calibrate/prediction.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "core/calibrate/calibrate.h"
#include "core/evaluate/evaluate.h"
#include "gtest/gtest.h"
#include "tests/core/calibrate/calibrate_test_util.h"

namespace quantd::core::prediction_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What the numbers of codes are, with scales that clip or waste some.
Encoding RandomEncoding(const FormatInfo& format, const Sample& sample,
                        std::mt19937* random) {
  Encoding encoding;
  encoding.format = format.format;
  encoding.qmin = format.qmin;
  encoding.qmax = format.qmax;
  if (format.kind == CodeKind::kCodebook && format.codebook.empty()) {
    float entry = -1;
    const int entries = 2 + static_cast<int>((*random)() % format.qmax);
    for (int i = 0; i < entries; ++i) {
      encoding.codebook.push_back(entry);
      entry += std::ldexp(1.0f, -static_cast<int>((*random)() % 12));
    }
    encoding.qmax = entries - 1;
  }
  if (format.kind == CodeKind::kInteger && (*random)() % 4 == 0) {
    encoding.qmin = -encoding.qmax + 1 + format.qmin + format.qmax;
  }
  encoding.exclude_zero = (*random)() % 8 == 0;
  encoding.zero_points_are_real =
      format.kind == CodeKind::kInteger && (*random)() % 4 == 0;
  const double largest =
      format.kind == CodeKind::kCodebook ? 1 : format.max_value;
  for (const Extremes& extremes : sample.statistics.extremes()) {
    double reach =
        extremes.empty() ? 1 : std::max(std::fabs(extremes.min), extremes.max);
    reach = std::max(reach, 1e-30);
    reach *= std::exp2((*random)() % 1000 / 100.0 - 8.0);
    encoding.scale.push_back(
        std::max(static_cast<float>(reach / largest), 0x1p-126f));
    if (encoding.zero_points_are_real) {
      const double codes = double{1} * encoding.qmax - encoding.qmin;
      encoding.real_zero_point.push_back(static_cast<float>(
          encoding.qmin + codes * ((*random)() % 4096) / 4096));
    } else if (format.kind == CodeKind::kInteger) {
      const int32_t codes = encoding.qmax - encoding.qmin + 1;
      int32_t zero_point =
          encoding.qmin + static_cast<int32_t>((*random)() % codes);
      if (encoding.exclude_zero) {
        zero_point += (static_cast<int>((*random)() % 3) - 1) * codes;
      }
      encoding.zero_point.push_back(zero_point);
    }
  }
  return encoding;
}

const char* const kFormats[] = {
    "int2",        "int3",
    "int4",        "int8",
    "int10",       "int16",
    "uint2",       "uint4",
    "uint8",       "uint12",
    "uint16",      "float8_e4m3fn",
    "float8_e5m2", "float8_e4m3fnuz",
    "float6_e2m3", "float6_e3m2",
    "float4_e2m1", "nf4",
    "codebook2",   "codebook8",
};

TEST(PredictionTest, BoundsTheTrueErrorWhateverTheData) {
  std::mt19937 random(1);
  const int rounds = Rounds(10000);
  for (int round = 0; round < rounds; ++round) {
    const Shape shape = kAllShapes[random() % std::size(kAllShapes)];
    const ElementType type =
        kAllElementTypes[random() % std::size(kAllElementTypes)];
    const int mantissa_bits = 2 + static_cast<int>(random() % 9);
    const int64_t count = 1 + random() % (1 << (1 + random() % 12));
    const FormatInfo& format =
        *FindFormatByName(kFormats[random() % std::size(kFormats)]);
    const std::vector<int64_t> block_size =
        random() % 3 == 0 ? std::vector<int64_t>{7} : std::vector<int64_t>{};
    const Sample sample(type, Draw(shape, count, &random), mantissa_bits, {},
                        block_size);
    Encoding encoding = RandomEncoding(format, sample, &random);
    encoding.block_size = block_size;

    const Prediction prediction = *Predict(encoding, sample.statistics);
    const double truth = NaiveSquaredError(sample, encoding).squared;
    SCOPED_TRACE(absl::StrCat("round ", round, " ", format.name, " shape ",
                              static_cast<int>(shape), " type ",
                              static_cast<int>(type), " m ", mantissa_bits,
                              " count ", count));
    ASSERT_LE(prediction.squared_error_low, truth);
    ASSERT_GE(prediction.squared_error_high, truth);
    ASSERT_LE(prediction.squared_error_low, prediction.squared_error);
    ASSERT_GE(prediction.squared_error_high, prediction.squared_error);
    uint64_t finite = 0;
    double signal = 0;
    for (const double x : sample.x) {
      if (!std::isfinite(x)) continue;
      ++finite;
      signal += x * x;
    }
    ASSERT_EQ(prediction.count, finite);
    ASSERT_NEAR(prediction.signal, signal,
                (type == ElementType::kFloat64 ? 1e-6 : 1e-12) * signal);
  }
}

TEST(PredictionTest, AgreesWithTheEvaluatorOnIntegers) {
  std::mt19937 random(2);
  for (int round = 0; round < Rounds(500); ++round) {
    const Sample sample(ElementType::kFloat32,
                        Draw(kAllShapes[round % 8], 3000, &random), 7);
    const FormatInfo& format = *FindFormatByName(kFormats[round % 11]);
    const Encoding encoding = RandomEncoding(format, sample, &random);
    Evaluator evaluator(encoding, sample.layout, sample.type, {});
    evaluator.Update(0, sample.layout.element_count(), sample.reals.data(),
                     nullptr);
    const double truth = evaluator.overall().squared_error;
    EXPECT_NEAR(NaiveSquaredError(sample, encoding).squared, truth,
                1e-12 * truth);
    const Prediction prediction = *Predict(encoding, sample.statistics);
    EXPECT_LE(prediction.squared_error_low, truth);
    EXPECT_GE(prediction.squared_error_high, truth);
  }
}

// Codes of more bits than a float32 has.
TEST(PredictionTest, EstimatesTheRoundingOfFloat32) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal(0, 1);
  std::vector<double> values(20000);
  for (double& value : values) value = normal(random);
  for (const ElementType type :
       {ElementType::kFloat32, ElementType::kBfloat16}) {
    const Sample sample(type, values, 7);
    Encoding encoding;
    encoding.format = FindFormatByName("int32")->format;
    encoding.qmin = -2147483647;
    encoding.qmax = 2147483647;
    encoding.zero_point = {0};
    const Extremes& extremes = sample.statistics.extremes()[0];
    const double reach = std::max(-extremes.min, extremes.max);
    // From codes of 31 bits, of which float32 rounds 7, to those of 15.
    for (const double factor :
         {1., 1.3, 1.5, 1.9, 20., 256., 384., 1228.8, 65536.}) {
      encoding.scale = {static_cast<float>(reach / encoding.qmax * factor)};
      Evaluator evaluator(encoding, sample.layout, sample.type, {});
      evaluator.Update(0, sample.layout.element_count(), sample.reals.data(),
                       nullptr);
      const Prediction prediction = *Predict(encoding, sample.statistics);
      SCOPED_TRACE(factor);
      EXPECT_NEAR(prediction.SqnrDb(), evaluator.overall().SqnrDb(),
                  type == ElementType::kFloat32 ? 0.3 : 3);
      EXPECT_LE(prediction.squared_error_low, prediction.squared_error);
      EXPECT_GE(prediction.squared_error_high, prediction.squared_error);
    }
  }
}

// Bounds that nothing can violate are easy: these are to be of use as well.
TEST(PredictionTest, IsTight) {
  std::mt19937 random(3);
  struct {
    const char* format;
    double most_high_to_low;
    double most_error;
  } const cases[] = {
      {"int4", 1.002, 1e-3},        {"int8", 1.05, 2e-3},
      {"uint8", 1.1, 2e-3},         {"float8_e4m3fn", 1.5, 1e-2},
      {"float4_e2m1", 1.002, 1e-3}, {"nf4", 1.002, 1e-3},
      {"int16", kInfinity, 1e-2},
  };
  const Sample sample(ElementType::kFloat32,
                      Draw(Shape::kNormal, 200000, &random), 7);
  for (const auto& c : cases) {
    const auto calibration = Calibrate(Spec(c.format), sample.layout,
                                       sample.statistics, {}, nullptr);
    ASSERT_TRUE(calibration.ok());
    const Prediction& prediction = *calibration->prediction;
    const double truth =
        NaiveSquaredError(sample, calibration->encoding).squared;
    const double ratio =
        prediction.squared_error_high / prediction.squared_error_low;
    const double error = prediction.squared_error / truth - 1;
    std::printf("%-14s high/low %.5f, expected/true - 1: %.1e\n", c.format,
                ratio, error);
    EXPECT_LE(ratio, c.most_high_to_low) << c.format;
    EXPECT_LE(std::fabs(error), c.most_error) << c.format;
  }
}

TEST(PredictionTest, IsExactWhereBinsAre) {
  std::mt19937 random(4);
  // bfloat16 has 7 mantissa bits: every bin is one value.
  const Sample sample(ElementType::kBfloat16,
                      Draw(Shape::kStudent2, 5000, &random), 7);
  for (const char* format : {"int4", "int16", "float8_e5m2"}) {
    const auto calibration =
        Calibrate(Spec(format), sample.layout, sample.statistics, {}, nullptr);
    ASSERT_TRUE(calibration.ok());
    const double truth =
        NaiveSquaredError(sample, calibration->encoding).squared;
    EXPECT_NEAR(calibration->prediction->squared_error, truth, 1e-3 * truth);
    EXPECT_LT(calibration->prediction->squared_error_high,
              1.1 * calibration->prediction->squared_error_low);
  }
}

TEST(PredictionTest, LeavesOutBlocksUnderAScaleOfNan) {
  const Sample sample(ElementType::kFloat32, {1, INFINITY, 3, 0.7}, 7, {}, {2});
  EncodingSpec spec = Spec("mxfp4_e2m1");
  spec.block_size = {2};
  const auto calibration =
      Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
  ASSERT_TRUE(calibration.ok());
  EXPECT_TRUE(std::isnan(calibration->encoding.scale[0]));
  EXPECT_EQ(calibration->prediction->count, 2u);
  const float seven_tenths = 0.7f;
  EXPECT_NEAR(calibration->prediction->squared_error,
              (0.75 - seven_tenths) * (0.75 - seven_tenths), 1e-12);
}

TEST(PredictionTest, KnowsNoBoundWhereAFormatOverflows) {
  const Sample sample(ElementType::kFloat32, {1, 2, 500}, 7);
  Encoding encoding;
  encoding.format = FindFormatByName("float8_e4m3fn")->format;
  encoding.qmax = 255;
  encoding.scale = {1};
  EXPECT_NEAR(Predict(encoding, sample.statistics)->squared_error, 52 * 52,
              1e-9);
  encoding.no_saturation = true;
  EXPECT_EQ(Predict(encoding, sample.statistics)->squared_error_high,
            kInfinity);
  EXPECT_EQ(Predict(encoding, sample.statistics)->squared_error, kInfinity);
  encoding.scale = {2};
  EXPECT_NEAR(Predict(encoding, sample.statistics)->squared_error_high, 144,
              0.01);
}

TEST(PredictionTest, HoldsForFloat64BeyondFloat32) {
  const std::vector<double> values = {1e39, -3e38, 5, 2e38, 1e38, 3.3e38};
  const Sample sample(ElementType::kFloat64, values, 7);
  Encoding encoding;
  encoding.format = FindFormatByName("int4")->format;
  encoding.qmin = -8;
  encoding.qmax = 7;
  for (const float scale : {4e37f, 1e38f, 1.4e38f}) {
    encoding.scale = {scale};
    const Prediction prediction = *Predict(encoding, sample.statistics);
    const double truth = NaiveSquaredError(sample, encoding).squared;
    EXPECT_LE(prediction.squared_error_low, truth);
    EXPECT_GE(prediction.squared_error_high, truth);
  }
}

TEST(PredictionTest, SaysNothingOfNothing) {
  const Sample sample(ElementType::kFloat32, {NAN, INFINITY}, 5);
  const auto calibration =
      Calibrate(Spec("int8"), sample.layout, sample.statistics, {}, nullptr);
  ASSERT_TRUE(calibration.ok());
  EXPECT_EQ(calibration->prediction->count, 0u);
  EXPECT_EQ(calibration->prediction->MeanSquaredErrorHigh(), 0);
  EXPECT_EQ(calibration->prediction->SqnrDb(), kInfinity);
  EXPECT_EQ(calibration->prediction->NoiseToSignal(), 0);
}

TEST(PredictionTest, IsTheSameForAnyNumberOfThreads) {
  std::mt19937 random(5);
  const Sample sample(ElementType::kFloat32,
                      Draw(Shape::kStudent2, 40 * 64, &random), 3, {40, 64},
                      {1, 0});
  EncodingSpec spec = Spec("int4");
  spec.block_size = {1, 0};
  spec.method = CalibrationMethod::kMse;
  ThreadPool pool(3);
  const auto alone =
      Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
  const auto together =
      Calibrate(spec, sample.layout, sample.statistics, {}, &pool);
  ASSERT_TRUE(alone.ok() && together.ok());
  EXPECT_EQ(alone->encoding, together->encoding);
  EXPECT_EQ(alone->prediction->squared_error,
            together->prediction->squared_error);
  EXPECT_EQ(alone->prediction->squared_error_high,
            together->prediction->squared_error_high);
}

}  // namespace
}  // namespace quantd::core::prediction_test
