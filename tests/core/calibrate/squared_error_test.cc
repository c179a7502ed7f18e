#include "core/calibrate/squared_error.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/calibrate/calibrate.h"
#include "gtest/gtest.h"
#include "tests/core/calibrate/calibrate_test_util.h"

namespace quantd::core::squared_error_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

const char* const kFormats[] = {
    "int4", "uint8", "int12", "uint16", "float8_e4m3fn", "float4_e2m1", "nf4"};

TEST(SquaredErrorTest, EstimatesTheSameWithAndWithoutBounds) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const Sample sample(ElementType::kFloat32,
                        Draw(kAllShapes[round % 8], 1000, &random),
                        3 + round % 6);
    const auto calibration =
        Calibrate(Spec(kFormats[round % std::size(kFormats)]), sample.layout,
                  sample.statistics, {}, nullptr);
    ASSERT_TRUE(calibration.ok());
    const Encoding& encoding = calibration->encoding;
    const double scale =
        encoding.scale[0] * (0.3 + static_cast<double>(random() % 100) / 100);
    const int32_t zero_point =
        encoding.zero_point.empty() ? 0 : encoding.zero_point[0];
    const Distribution distribution(sample.statistics.histograms()[0],
                                    sample.statistics.overall());
    const CodeNumbers numbers(encoding);
    const SquaredError bounded =
        BoundSquaredError(numbers, scale, zero_point, distribution);
    const double estimate = EstimateSquaredError(numbers, scale, zero_point,
                                                 distribution, kInfinity);
    ASSERT_NEAR(estimate, bounded.estimate,
                1e-9 * bounded.estimate + 1e-13 * distribution.signal());
    // What stops early is past the limit, and no more than all of it.
    const double limit = estimate / 3;
    const double part =
        EstimateSquaredError(numbers, scale, zero_point, distribution, limit);
    ASSERT_GE(part, limit);
    ASSERT_LE(part, estimate);
  }
}

// Every bin of bfloat16 is one value: clipped elements are known.
TEST(SquaredErrorTest, KnowsThePartOfClippedElements) {
  std::mt19937 random(2);
  for (int round = 0; round < 300; ++round) {
    const Sample sample(ElementType::kBfloat16,
                        Draw(kAllShapes[round % 6], 1000, &random), 7);
    const auto calibration =
        Calibrate(Spec(kFormats[round % std::size(kFormats)]), sample.layout,
                  sample.statistics, {}, nullptr);
    ASSERT_TRUE(calibration.ok());
    Encoding encoding = calibration->encoding;
    encoding.scale[0] *= 0.37f;
    const Distribution distribution(sample.statistics.histograms()[0],
                                    sample.statistics.overall());
    const double clipped = ClippedSquaredError(
        CodeNumbers(encoding), encoding.scale[0],
        encoding.zero_point.empty() ? 0 : encoding.zero_point[0], distribution);
    const double truth = NaiveSquaredError(sample, encoding).clipped;
    ASSERT_NEAR(clipped, truth, 1e-5 * truth + 1e-12 * distribution.signal())
        << round;
  }
}

TEST(SquaredErrorTest, HasEachNumberOnce) {
  Encoding encoding;
  encoding.format = FindFormatByName("float4_e2m1")->format;
  encoding.qmax = 15;
  const CodeNumbers numbers(encoding);
  EXPECT_EQ(numbers.levels, (std::vector<double>{-6, -4, -3, -2, -1.5, -1, -0.5,
                                                 0, 0.5, 1, 1.5, 2, 3, 4, 6}));
  EXPECT_EQ(numbers.middles.front(), -5);
  EXPECT_EQ(numbers.clip_high,
            OverflowThreshold({2, 1, 1, FloatSpecials::kNone}));
  EXPECT_EQ(numbers.overflow, kInfinity);
}

}  // namespace
}  // namespace quantd::core::squared_error_test
