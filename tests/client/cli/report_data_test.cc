#include "client/cli/report_data.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "client/cpp/tensor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quantd/v1/statistics.pb.h"

namespace quantd::cli {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

uint32_t KeyOf(float value, int mantissa_bits) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = (bits & 0x80000000U) != 0 ? ~bits : bits ^ 0x80000000U;
  return bits >> (23 - mantissa_bits);
}

void AddHistogram(const std::vector<float>& values,
                  v1::StatisticsState* state) {
  std::map<uint32_t, uint64_t> counts;
  for (const float value : values) {
    ++counts[KeyOf(value, static_cast<int>(state->mantissa_bits()))];
  }
  v1::Histogram* const histogram = state->add_histograms();
  uint32_t before = 0;
  for (const auto& [key, count] : counts) {
    histogram->add_key_delta(key - before);
    histogram->add_count(count);
    before = key;
  }
}

v1::StatisticsState StateOf(const std::vector<float>& values, double min,
                            double max, uint32_t mantissa_bits = 10) {
  v1::StatisticsState state;
  state.set_mantissa_bits(mantissa_bits);
  state.mutable_statistics()->set_min(min);
  state.mutable_statistics()->set_max(max);
  AddHistogram(values, &state);
  return state;
}

double TotalOf(const Distribution& distribution) {
  return std::accumulate(distribution.counts.begin(), distribution.counts.end(),
                         0.0);
}

TEST(DistributionOfTest, EveryElementIsInItsBin) {
  // Bins of one: from -20 to 100.
  std::vector<float> values = {-20, 100};
  for (int i = 0; i < 120; ++i) {
    values.push_back(static_cast<float>(i) - 19.5F);
  }
  values.push_back(50.5F);
  const Distribution result = DistributionOf(StateOf(values, -20, 100));
  EXPECT_EQ(result.first_edge, -20);
  EXPECT_EQ(result.last_edge, 100);
  std::vector<double> expected(120, 1);
  expected[0] = expected[70] = expected[119] = 2;
  EXPECT_EQ(result.counts, expected);
}

TEST(DistributionOfTest, AllButAThousandthLieBetweenItsEnds) {
  std::vector<float> values;
  for (int i = -5000; i < 5000; ++i) values.push_back(static_cast<float>(i));
  const Distribution result = DistributionOf(StateOf(values, -5000, 4999));
  EXPECT_NEAR(result.low, -4995, 5);
  EXPECT_NEAR(result.high, 4995, 5);
  EXPECT_NEAR(TotalOf(result), 10000, 1e-6);
}

TEST(DistributionOfTest, ABinThatLiesInSeveralIsSharedOutEvenly) {
  // All that begins with the bits of 1.0 lies from 1 to 1.25.
  v1::StatisticsState state = StateOf({1}, 1, 2, /*mantissa_bits=*/2);
  state.mutable_histograms(0)->set_count(0, 3000);
  const Distribution result = DistributionOf(state);
  for (int i = 0; i < 120; ++i) {
    EXPECT_NEAR(result.counts[i], i < 30 ? 100 : 0, 0.01) << i;
  }
  EXPECT_NEAR(TotalOf(result), 3000, 1e-6);
}

TEST(DistributionOfTest, ScaleIndicesAreTakenTogether) {
  v1::StatisticsState state = StateOf({1, 2}, 1, 3);
  AddHistogram({2, 3}, &state);
  const Distribution result = DistributionOf(state);
  EXPECT_NEAR(result.counts[0], 1, 1e-6);
  EXPECT_NEAR(result.counts[60], 2, 1e-6);
  EXPECT_NEAR(result.counts[119], 1, 1e-6);
}

TEST(DistributionOfTest, ATensorOfOneNumberHasABinOfAll) {
  for (const float value : {0.0F, -3.0F, 1e20F, -3e38F, 1e-45F}) {
    const Distribution result =
        DistributionOf(StateOf({value, value}, static_cast<double>(value),
                               static_cast<double>(value)));
    ASSERT_THAT(result.counts, SizeIs(120)) << value;
    EXPECT_EQ(TotalOf(result), 2) << value;
    EXPECT_EQ(result.low, static_cast<double>(value));
    EXPECT_EQ(result.high, static_cast<double>(value));
  }
}

TEST(DistributionOfTest, RangesMayBeAsNarrowOrAsWideAsADoubleTells) {
  constexpr double kLargest = std::numeric_limits<double>::max();
  constexpr double kSmallest = std::numeric_limits<double>::denorm_min();
  for (const auto& [min, max] : std::vector<std::pair<double, double>>{
           {0, kSmallest}, {-kSmallest, kSmallest}, {-kLargest, kLargest}}) {
    const Distribution result = DistributionOf(StateOf({0, 0, 0}, min, max));
    ASSERT_THAT(result.counts, SizeIs(120));
    EXPECT_EQ(TotalOf(result), 3) << min;
  }
}

TEST(DistributionOfTest, AStateThatIsNotSoundHasNoCounts) {
  for (const auto& [min, max] : std::vector<std::pair<double, double>>{
           {kNan, 1}, {0, kNan}, {-kInfinity, 1}, {0, kInfinity}}) {
    EXPECT_THAT(DistributionOf(StateOf({0}, min, max)).counts, IsEmpty());
  }
  v1::StatisticsState state = StateOf({0, 1}, 0, 1);
  state.set_mantissa_bits(24);
  EXPECT_THAT(DistributionOf(state).counts, Each(0));
  state.set_mantissa_bits(std::numeric_limits<uint32_t>::max());
  EXPECT_THAT(DistributionOf(state).counts, Each(0));
  EXPECT_THAT(DistributionOf(v1::StatisticsState()).counts, Each(0));
}

TEST(DistributionOfTest, WhatIsMalformedInAHistogramIsLeftOut) {
  // A key without a count.
  v1::StatisticsState state = StateOf({0, 1}, 0, 1);
  state.mutable_histograms(0)->mutable_count()->RemoveLast();
  EXPECT_EQ(TotalOf(DistributionOf(state)), 1);
  // Keys that no float32 has.
  state = StateOf({0, 1}, 0, 1);
  state.mutable_histograms(0)->set_key_delta(
      1, std::numeric_limits<uint32_t>::max());
  EXPECT_EQ(TotalOf(DistributionOf(state)), 1);
  // Ends the wrong way round, and elements outside of them.
  EXPECT_EQ(TotalOf(DistributionOf(StateOf({0, 1}, 1, 0))), 2);
  EXPECT_EQ(TotalOf(DistributionOf(StateOf({-5, 9}, 0, 1))), 2);
  // Bins that are said to have elements, and have none.
  state = StateOf({0, 1}, 0, 1);
  state.mutable_histograms(0)->set_count(0, 0);
  state.mutable_histograms(0)->set_count(1, 0);
  const Distribution result = DistributionOf(state);
  EXPECT_THAT(result.counts, Each(0));
  EXPECT_EQ(result.low, 0);
}

// As AddHistogram, with the sums that moments are made of.
void AddSums(const std::vector<float>& values, v1::StatisticsState* state) {
  const int low_bits = 23 - static_cast<int>(state->mantissa_bits());
  std::map<uint32_t, std::pair<uint64_t, uint64_t>> sums;
  for (const float value : values) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    const uint64_t low = bits & ((1U << low_bits) - 1);
    auto& sum = sums[KeyOf(value, static_cast<int>(state->mantissa_bits()))];
    sum.first += low;
    sum.second += low * low;
  }
  v1::Histogram* const histogram = state->mutable_histograms(0);
  for (const auto& [key, sum] : sums) {
    histogram->add_low_sum(sum.first);
    histogram->add_low_square_sum(sum.second);
  }
}

TEST(SummaryTest, HasTheMomentsOfTheElementsThemselves) {
  const std::vector<float> values = {-3.14159f, -0.7f, -1e-40f,  0.0f,
                                     1e-6f,     0.1f,  2.71828f, 1e4f};
  for (const uint32_t mantissa_bits : {2u, 7u, 10u}) {
    v1::StatisticsState state =
        StateOf(values, values.front(), values.back(), mantissa_bits);
    AddSums(values, &state);
    const Summary summary = SummaryOf(state, {0.0, 0.5, 1.0});
    double sum = 0;
    double square_sum = 0;
    for (const float value : values) {
      sum += static_cast<double>(value);
      square_sum += static_cast<double>(value) * static_cast<double>(value);
    }
    const double mean = sum / 8;
    EXPECT_NEAR(summary.mean, mean, 1e-12 * mean);
    const double deviation = std::sqrt(square_sum / 8 - mean * mean);
    EXPECT_NEAR(summary.deviation, deviation, 1e-12 * deviation);
    ASSERT_THAT(summary.quantiles, SizeIs(3));
    EXPECT_EQ(summary.quantiles.back(), values.back());
    EXPECT_EQ(summary.quantiles[1], 0);
  }
}

TEST(SummaryTest, OfAStateWithoutElementsIsNone) {
  const Summary summary = SummaryOf(v1::StatisticsState(), {0.5});
  EXPECT_TRUE(std::isnan(summary.mean));
  EXPECT_THAT(summary.quantiles, IsEmpty());
}

}  // namespace
}  // namespace quantd::cli
