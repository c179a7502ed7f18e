#include "core/calibrate/search_time.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "absl/time/time.h"
#include "core/calibrate/encoding_spec.h"
#include "core/formats/number_format.h"

namespace quantd::core {
namespace {

// Of 16,384 elements in blocks of 4, as measured.
constexpr int64_t kElements = 16 << 10;
constexpr int64_t kScales = kElements / 4;

EncodingSpec Int8(CalibrationMethod method,
                  Symmetry symmetry = Symmetry::kStrict) {
  EncodingSpec spec;
  spec.format = FindFormatByName("int8")->format;
  spec.symmetry = symmetry;
  spec.method = method;
  return spec;
}

double Milliseconds(const EncodingSpec& spec, int64_t scales = kScales) {
  return absl::ToDoubleMilliseconds(SearchTime(spec, scales, kElements));
}

TEST(SearchTimeTest, TellsMillisecondsFromMinutes) {
  EXPECT_EQ(Milliseconds(Int8(CalibrationMethod::kMinMax)), 0);
  EXPECT_EQ(Milliseconds(Int8(CalibrationMethod::kPercentile)), 0);
  EXPECT_NEAR(Milliseconds(Int8(CalibrationMethod::kMse)), 35, 15);
  EXPECT_NEAR(Milliseconds(Int8(CalibrationMethod::kEntropy)), 40, 15);
  EncodingSpec spec = Int8(CalibrationMethod::kMse, Symmetry::kAsymmetric);
  EXPECT_NEAR(Milliseconds(spec), 240, 80);
  spec.search_steps = 128;
  EXPECT_NEAR(Milliseconds(spec), 3800, 1000);
  const double mse = Milliseconds(spec);
  spec.method = CalibrationMethod::kBestOf;
  spec.methods = {CalibrationMethod::kMinMax, CalibrationMethod::kMse,
                  CalibrationMethod::kSqnr};
  EXPECT_DOUBLE_EQ(Milliseconds(spec), 2 * mse);
  // Not valid: int8 has no outer scales.
  spec.outer_block_size = {kElements};
  EXPECT_EQ(Milliseconds(spec), 0);
}

TEST(SearchTimeTest, TakesLessWhereElementsAreAtHand) {
  constexpr int64_t kCount = 1 << 20;
  constexpr int64_t kGroups = kCount / 128;
  EncodingSpec spec = Int8(CalibrationMethod::kMse);
  spec.format = FindFormatByName("int4")->format;
  const auto milliseconds = [&](int64_t scales) {
    return absl::ToDoubleMilliseconds(SearchTime(spec, scales, kCount, true));
  };
  // As measured.
  EXPECT_NEAR(milliseconds(kGroups), 12, 6);
  EXPECT_NEAR(milliseconds(kCount >> 15), 8, 4);
  // Not of longer rows, and not of one large block.
  EXPECT_EQ(SearchTime(spec, kCount >> 16, kCount, true),
            SearchTime(spec, kCount >> 16, kCount));
  EXPECT_EQ(SearchTime(spec, 1, kCount, true), SearchTime(spec, 1, kCount));
  spec.method = CalibrationMethod::kEntropy;
  EXPECT_NEAR(milliseconds(kGroups), 60, 30);
  spec.symmetry = Symmetry::kAsymmetric;
  EXPECT_NEAR(milliseconds(kGroups), 90, 45);
  spec.format = FindFormatByName("int8")->format;
  EXPECT_NEAR(milliseconds(kGroups), 1000, 500);
  EXPECT_NEAR(milliseconds(kCount / 8), 1700, 800);
  // No more than the levels, of many elements.
  EXPECT_NEAR(milliseconds(kCount / 4096), 30, 15);
  spec.method = CalibrationMethod::kMse;
  EXPECT_NEAR(milliseconds(kGroups), 100, 50);
  EXPECT_NEAR(milliseconds(kCount / 8), 750, 350);
  spec.method = CalibrationMethod::kPercentile;
  EXPECT_EQ(milliseconds(kGroups), 0);
}

TEST(SearchTimeTest, CountsTheSearchForOuterScales) {
  EncodingSpec spec = Int8(CalibrationMethod::kMse);
  const double once = Milliseconds(spec);
  spec.format = FindFormatByName("lpbq")->format;
  spec.block_size = {1, 64};
  spec.outer_block_size = {1, 0};
  EXPECT_DOUBLE_EQ(Milliseconds(spec), 2 * once);
}

TEST(SearchTimeTest, GrowsWithBinsUpToThoseOfAHistogram) {
  const EncodingSpec spec = Int8(CalibrationMethod::kMse);
  EXPECT_LT(Milliseconds(spec, kScales) / kScales, Milliseconds(spec, 16) / 16);
  EXPECT_DOUBLE_EQ(Milliseconds(spec, 16), 16 * Milliseconds(spec, 1));
  EXPECT_EQ(SearchTime(spec, 0, 0), absl::ZeroDuration());
}

}  // namespace
}  // namespace quantd::core
