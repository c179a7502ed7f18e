#include "core/statistics/statistics_state.h"

#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/feature_moments.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/tensor_slice.h"
#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core::statistics_state_test {
namespace {

StatisticsState MakeState(const LayoutCase& layout_case, int mantissa_bits,
                          uint32_t seed) {
  const BlockLayout layout = layout_case.Layout();
  const auto reals =
      MakeReals(ElementType::kFloat32, layout.element_count(), 0.1, true, seed);
  StatisticsState state;
  state.block_size = layout_case.block;
  state.shape = layout_case.shape;
  state.statistics = TensorStatistics(layout.scale_count(), mantissa_bits);
  state.statistics.Update(layout, ElementType::kFloat32, 0,
                          layout.element_count(), reals.data(), nullptr);
  return state;
}

void ExpectSame(const TensorStatistics& got, const TensorStatistics& want) {
  EXPECT_EQ(got.counts().total, want.counts().total);
  EXPECT_EQ(got.counts().nan, want.counts().nan);
  EXPECT_EQ(got.counts().zero, want.counts().zero);
  ASSERT_EQ(got.scale_count(), want.scale_count());
  ASSERT_EQ(got.histograms().size(), want.histograms().size());
  for (int64_t i = 0; i < got.scale_count(); ++i) {
    EXPECT_EQ(got.extremes()[i].min, want.extremes()[i].min) << i;
    EXPECT_EQ(got.extremes()[i].max, want.extremes()[i].max) << i;
    EXPECT_EQ(got.has_non_finite(i), want.has_non_finite(i)) << i;
    EXPECT_TRUE(got.histograms()[i] == want.histograms()[i]) << i;
  }
}

TEST(StatisticsStateTest, MergesWhereFreeDimensionsDiffer) {
  StatisticsState whole = MakeState({{3, 40}, {0, 1}}, 3, 1);
  const StatisticsState part = MakeState({{9, 40}, {0, 1}}, 3, 2);
  ASSERT_TRUE(MergeState(part, &whole).ok());
  EXPECT_EQ(whole.shape, (std::vector<int64_t>{9, 40}));
  EXPECT_EQ(whole.statistics.counts().total, 12 * 40);
  ASSERT_TRUE(MergeState(MakeState({{0, 40}, {0, 1}}, 3, 2), &whole).ok());
  EXPECT_EQ(whole.shape, (std::vector<int64_t>{9, 40}));
}

TEST(StatisticsStateTest, TellsWhetherElementsAreThoseOfWholeTensors) {
  for (const LayoutCase& layout_case : {LayoutCase{{3, 40}, {}},
                                        {{3, 40}, {0, 1}},
                                        {{5, 7, 3}, {2, 0, 2}},
                                        {{0, 4}, {0, 1}},
                                        {{6}, {100}}}) {
    StatisticsState state = MakeState(layout_case, 3, 1);
    EXPECT_TRUE(CheckElementCounts(state).ok()) << layout_case.Name();
    ASSERT_TRUE(MergeState(MakeState(layout_case, 3, 2), &state).ok());
    EXPECT_TRUE(CheckElementCounts(state).ok()) << layout_case.Name();
  }
  // Blocks of other sizes than the shape gives.
  StatisticsState state = MakeState({{6, 4}, {3, 0}}, 3, 1);
  state.block_size = {4, 0};
  EXPECT_EQ(ErrorReason(CheckElementCounts(state)), "STATISTICS_INVALID");
  state.block_size = {0, 2};
  state.shape = {5, 4};
  EXPECT_TRUE(CheckElementCounts(state).ok());
  state.shape = {5, 0};
  EXPECT_EQ(ErrorReason(CheckElementCounts(state)), "STATISTICS_INVALID");
}

// Of the elements of a slice, at the scale indices of the whole.
StatisticsState MakeSliceState(const LayoutCase& layout_case,
                               const TensorSlice& slice) {
  const BlockLayout layout = layout_case.Layout();
  const auto reals =
      MakeReals(ElementType::kFloat32, layout.element_count(), 0.1, true, 1);
  StatisticsState state;
  state.block_size = layout_case.block;
  state.shape = layout_case.shape;
  state.statistics = TensorStatistics(layout.scale_count(), 3);
  slice.ForEachRange(
      0, *ElementCount(slice.shape), [&](int64_t first, int64_t count) {
        state.statistics.Update(layout, ElementType::kFloat32, first, count,
                                reals.data() + first * sizeof(float), nullptr);
      });
  return state;
}

TEST(StatisticsStateTest, WithoutAFiniteElementIsIncomplete) {
  const BlockLayout layout = *BlockLayout::Create({4}, {});
  StatisticsState state{{}, {4}, TensorStatistics(1, 3)};
  EXPECT_EQ(ErrorReason(CheckComplete(state)), "STATISTICS_INCOMPLETE");
  const auto add = [&](std::vector<float> values) {
    state.statistics.Update(layout, ElementType::kFloat32, 0, 4,
                            reinterpret_cast<const uint8_t*>(values.data()),
                            nullptr);
  };
  const float infinity = std::numeric_limits<float>::infinity();
  add({std::nanf(""), infinity, -infinity, infinity});
  EXPECT_EQ(ErrorReason(CheckComplete(state)), "STATISTICS_INCOMPLETE");
  add({0, infinity, infinity, infinity});
  EXPECT_TRUE(CheckComplete(state).ok());
}

TEST(StatisticsStateTest, SlicesAddToTheWhole) {
  const LayoutCase layout_case{{5, 40, 3}, {0, 1, 0}};
  const TensorSlice slices[] = {{{5, 40, 3}, {0, 0, 0}, {5, 7, 3}},
                                {{5, 40, 3}, {0, 7, 0}, {5, 30, 3}},
                                {{5, 40, 3}, {0, 37, 0}, {5, 3, 3}}};
  StatisticsState whole = MakeSliceState(layout_case, slices[2]);
  EXPECT_EQ(ErrorReason(CheckComplete(whole)), "STATISTICS_INCOMPLETE");
  EXPECT_EQ(ErrorReason(CheckElementCounts(whole)), "STATISTICS_INVALID");
  EXPECT_TRUE(CheckElementCounts(whole, &slices[2]).ok());
  EXPECT_EQ(ErrorReason(CheckElementCounts(whole, &slices[1])),
            "STATISTICS_INVALID");
  for (const int i : {0, 1}) {
    const StatisticsState part = MakeSliceState(layout_case, slices[i]);
    EXPECT_TRUE(CheckElementCounts(part, &slices[i]).ok());
    ASSERT_TRUE(MergeState(part, &whole).ok());
  }
  EXPECT_TRUE(CheckComplete(whole).ok());
  ExpectSame(whole.statistics, MakeState(layout_case, 3, 1).statistics);
}

TEST(StatisticsStateTest, MomentsAreThoseOfTheElements) {
  for (const int64_t axis : {0, 1, 2}) {
    const LayoutCase layout_case{{5, 40, 3}, {0, 1, 0}};
    const int64_t count = layout_case.Layout().element_count();
    const auto reals = MakeReals(ElementType::kFloat32, count, 0.1, true, 1);
    const FeatureAxis features = *FeatureAxis::Create(layout_case.shape, axis);
    StatisticsState state = MakeState(layout_case, 3, 1);
    const auto set = [&](int64_t first, int64_t elements) {
      FeatureMoments moments(features.count);
      moments.Update(features, ElementType::kFloat32, first, elements,
                     reals.data() + first * sizeof(float), nullptr);
      state.moments = AxisMoments{axis, moments};
    };
    set(0, count);
    EXPECT_TRUE(CheckMoments(state).ok()) << CheckMoments(state);
    set(0, count - 1);
    EXPECT_EQ(ErrorReason(CheckMoments(state)), "STATISTICS_INVALID");
    // As many, but others.
    state.statistics = MakeState(layout_case, 3, 2).statistics;
    set(0, count);
    EXPECT_EQ(ErrorReason(CheckMoments(state)), "STATISTICS_INVALID");
  }
}

TEST(StatisticsStateTest, MomentsOfASliceAreOfItsFeatures) {
  const LayoutCase layout_case{{4, 10}, {}};
  const TensorSlice slice{{4, 10}, {0, 3}, {4, 5}};
  StatisticsState state = MakeSliceState(layout_case, slice);
  const auto reals = MakeReals(ElementType::kFloat32, 40, 0.1, true, 1);
  FeatureMoments moments(10);
  slice.ForEachRange(0, 20, [&](int64_t first, int64_t count) {
    moments.Update({10, 1}, ElementType::kFloat32, first, count,
                   reals.data() + first * sizeof(float), nullptr);
  });
  state.moments = AxisMoments{1, moments};
  EXPECT_TRUE(CheckMoments(state, &slice).ok()) << CheckMoments(state, &slice);
  const TensorSlice other{{4, 10}, {0, 4}, {4, 5}};
  EXPECT_EQ(ErrorReason(CheckMoments(state, &other)), "STATISTICS_INVALID");
  EXPECT_EQ(ErrorReason(CheckMoments(state)), "STATISTICS_INVALID");
}

TEST(StatisticsStateTest, TakesZerosForPerTensor) {
  StatisticsState whole = MakeState({{3, 40}, {}}, 3, 1);
  EXPECT_TRUE(MergeState(MakeState({{3, 40}, {0, 0}}, 3, 1), &whole).ok());
  EXPECT_EQ(whole.statistics.counts().total, 240);
  EXPECT_EQ(CanonicalBlockSize({0, 0}), std::vector<int64_t>());
  EXPECT_EQ(CanonicalBlockSize({0, 2}), (std::vector<int64_t>{0, 2}));
}

TEST(StatisticsStateTest, RefusesWhatDoesNotGoTogether) {
  const StatisticsState whole = MakeState({{4, 40}, {1, 0}}, 3, 1);
  const LayoutCase others[] = {{{4, 40}, {2, 0}},
                               {{4, 40}, {}},
                               {{5, 40}, {1, 0}},
                               {{4, 40, 1}, {1, 0, 0}}};
  for (const LayoutCase& other : others) {
    StatisticsState copy = whole;
    const absl::Status status = MergeState(MakeState(other, 3, 1), &copy);
    EXPECT_EQ(ErrorReason(status), "STATISTICS_MISMATCH") << other.Name();
    EXPECT_EQ(copy.shape, whole.shape);
    ExpectSame(copy.statistics, whole.statistics);
  }
  EXPECT_EQ(
      ErrorReason(CheckMergeable(whole, MakeState({{4, 40}, {1, 0}}, 4, 1))),
      "STATISTICS_MISMATCH");
  EXPECT_EQ(ErrorReason(CheckMergeable(MakeState({{4}, {}}, 3, 1),
                                       MakeState({{4, 1}, {}}, 3, 1))),
            "STATISTICS_MISMATCH");
}

TEST(StatisticsStateTest, RefusesMoreElementsThanItsSumsHold) {
  StatisticsState whole = MakeState({{10}, {}}, 3, 1);
  StatisticsState part;
  part.shape = {10};
  ElementCounts counts;
  counts.total = counts.nan = MaxElementCount(3) - 10;
  part.statistics = TensorStatistics::FromParts(counts, {{INFINITY, -INFINITY}},
                                                {0}, 3, {Histogram(3)});
  EXPECT_TRUE(CheckMergeable(whole, part).ok());
  ++counts.total;
  part.statistics = TensorStatistics::FromParts(counts, {{INFINITY, -INFINITY}},
                                                {0}, 3, {Histogram(3)});
  EXPECT_EQ(ErrorReason(MergeState(part, &whole)), "STATISTICS_MISMATCH");
  EXPECT_EQ(whole.statistics.counts().total, 10);
}

TEST(StatisticsStateTest, CoarsensToWhatLargerBlocksWouldHave) {
  struct Case {
    std::vector<int64_t> shape, fine, coarse;
  };
  const Case cases[] = {
      {{6, 75}, {1, 32}, {1, 32}},         // the same
      {{6, 75}, {1, 32}, {}},              // per tensor
      {{6, 75}, {1, 32}, {0, 0}},          //
      {{6, 75}, {1, 32}, {1, 0}},          // ragged into channels
      {{6, 75}, {1, 32}, {2, 64}},         // ragged twice
      {{7, 75}, {2, 5}, {6, 15}},          //
      {{6, 75}, {1, 32}, {0, 32}},         //
      {{6, 75}, {1, 32}, {100, 100}},      // beyond the dimensions
      {{6, 75}, {1, 0}, {1, 75}},          // whole by its size
      {{5, 7, 11}, {2, 3, 4}, {4, 0, 8}},  //
      {{}, {}, {}},                        // rank 0
      {{0}, {}, {1}},                      // no scale left
      {{0}, {1}, {}},                      // a scale of no element
      {{0, 4}, {0, 1}, {1, 1}},            //
      {{3, 0, 2}, {1, 0, 0}, {3, 0, 0}},   //
  };
  for (const Case& c : cases) {
    SCOPED_TRACE((LayoutCase{c.shape, c.coarse}).Name());
    const StatisticsState fine = MakeState({c.shape, c.fine}, 4, 1);
    const StatisticsState want = MakeState({c.shape, c.coarse}, 4, 1);
    const auto got = StatisticsAt(fine, c.coarse);
    ASSERT_TRUE(got.ok()) << got.status();
    ExpectSame(*got, want.statistics);
  }
}

TEST(StatisticsStateTest, GivesNothingWhenItIsStopped) {
  const StatisticsState fine = MakeState({{60, 75}, {1, 5}}, 4, 1);
  std::atomic<bool> stopped{false};
  EXPECT_TRUE(StatisticsAt(fine, {2, 0}, StopToken(&stopped)).ok());
  stopped = true;
  EXPECT_TRUE(absl::IsCancelled(
      StatisticsAt(fine, {2, 0}, StopToken(&stopped)).status()));
}

TEST(StatisticsStateTest, RefusesSmallerOrStraddlingBlocks) {
  const StatisticsState state = MakeState({{6, 75}, {2, 32}}, 4, 1);
  for (const std::vector<int64_t>& block :
       {std::vector<int64_t>{1, 32}, {2, 16}, {2, 33}, {3, 0}, {2, 48}}) {
    EXPECT_EQ(ErrorReason(StatisticsAt(state, block).status()),
              "GRANULARITY_TOO_FINE");
  }
  EXPECT_EQ(ErrorReason(StatisticsAt(state, {1}).status()),
            "BLOCK_SIZE_INVALID");
  EXPECT_EQ(ErrorReason(StatisticsAt(state, {-1, 0}).status()),
            "BLOCK_SIZE_INVALID");
}

}  // namespace
}  // namespace quantd::core::statistics_state_test
