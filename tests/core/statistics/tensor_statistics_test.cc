#include "core/statistics/tensor_statistics.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"
#include "tests/core/statistics/naive_histogram.h"

namespace quantd::core::tensor_statistics_test {
namespace {

void ExpectSame(const TensorStatistics& got, const TensorStatistics& want) {
  EXPECT_EQ(got.counts().total, want.counts().total);
  EXPECT_EQ(got.counts().nan, want.counts().nan);
  EXPECT_EQ(got.counts().positive_infinity, want.counts().positive_infinity);
  EXPECT_EQ(got.counts().negative_infinity, want.counts().negative_infinity);
  EXPECT_EQ(got.counts().zero, want.counts().zero);
  ASSERT_EQ(got.extremes().size(), want.extremes().size());
  for (size_t i = 0; i < got.extremes().size(); ++i) {
    const Extremes& a = got.extremes()[i];
    const Extremes& b = want.extremes()[i];
    // The bits, so that -0 is told from +0.
    ASSERT_EQ(std::memcmp(&a, &b, sizeof(a)), 0)
        << "scale index " << i << ": [" << a.min << ", " << a.max
        << "], expected [" << b.min << ", " << b.max << "]";
    ASSERT_EQ(got.has_non_finite(i), want.has_non_finite(i)) << i;
  }
  ASSERT_EQ(got.histograms().size(), want.histograms().size());
  for (size_t i = 0; i < got.histograms().size(); ++i) {
    ASSERT_TRUE(got.histograms()[i] == want.histograms()[i]) << i;
  }
}

// Naive counts, extremes and histograms.
struct Expected {
  ElementCounts counts;
  std::vector<Extremes> extremes;
  std::vector<bool> non_finite;
  std::vector<NaiveHistogram> histograms;
};

Expected Naive(const LayoutCase& layout_case, ElementType type,
               const std::vector<uint8_t>& reals, int mantissa_bits) {
  Expected expected;
  const BlockLayout layout = layout_case.Layout();
  expected.extremes.assign(layout.scale_count(),
                           {std::numeric_limits<double>::infinity(),
                            -std::numeric_limits<double>::infinity()});
  expected.non_finite.resize(layout.scale_count());
  expected.histograms.resize(layout.scale_count());
  for (int64_t i = 0; i < layout.element_count(); ++i) {
    const double x = NaiveReal(type, reals.data(), i);
    ++expected.counts.total;
    expected.counts.zero += x == 0;
    expected.counts.nan += std::isnan(x);
    expected.counts.positive_infinity += x == INFINITY;
    expected.counts.negative_infinity += x == -INFINITY;
    if (!std::isfinite(x)) {
      expected.non_finite[NaiveScaleIndex(layout_case, i)] = true;
      continue;
    }
    NaiveAdd(x, mantissa_bits,
             &expected.histograms[NaiveScaleIndex(layout_case, i)]);
    Extremes& extremes = expected.extremes[NaiveScaleIndex(layout_case, i)];
    extremes.min = std::min(extremes.min, x);
    extremes.max = std::max(extremes.max, x);
  }
  return expected;
}

TEST(TensorStatisticsTest, EqualsTheDefinitionForEveryTypeAndLayout) {
  for (const LayoutCase& layout_case : AllLayoutCases()) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    for (const ElementType type : kAllElementTypes) {
      SCOPED_TRACE(ElementTypeName(type));
      for (const bool specials : {false, true}) {
        const auto reals =
            MakeReals(type, layout.element_count(), 0.1, specials, 3);
        constexpr int kMantissaBits = 4;
        const Expected want = Naive(layout_case, type, reals, kMantissaBits);
        ForEachSimdTarget([&] {
          TensorStatistics got(layout.scale_count(), kMantissaBits);
          got.Update(layout, type, 0, layout.element_count(), reals.data(),
                     nullptr);
          EXPECT_EQ(got.counts().total, want.counts.total);
          EXPECT_EQ(got.counts().nan, want.counts.nan);
          EXPECT_EQ(got.counts().zero, want.counts.zero);
          EXPECT_EQ(got.counts().positive_infinity,
                    want.counts.positive_infinity);
          EXPECT_EQ(got.counts().negative_infinity,
                    want.counts.negative_infinity);
          for (size_t i = 0; i < want.extremes.size(); ++i) {
            ASSERT_EQ(got.has_non_finite(i), want.non_finite[i]) << i;
            ExpectEqual(got.histograms()[i], want.histograms[i]);
            ASSERT_EQ(got.extremes()[i].min, want.extremes[i].min) << i;
            ASSERT_EQ(got.extremes()[i].max, want.extremes[i].max) << i;
            ASSERT_FALSE(got.extremes()[i].min == 0 &&
                         std::signbit(got.extremes()[i].min));
            ASSERT_FALSE(got.extremes()[i].max == 0 &&
                         std::signbit(got.extremes()[i].max));
          }
        });
        if (HasFailure()) return;
      }
    }
  }
}

TEST(TensorStatisticsTest, DoesNotDependOnTargetThreadsOrChunking) {
  const LayoutCase cases[] = {
      {{300007}, {}},         {{300, 1001}, {0, 1}},
      {{3, 100003}, {0, 1}},  {{30, 10001}, {1, 0}},
      {{300, 1001}, {1, 32}}, {{4, 25, 1001, 3}, {1, 2, 0, 1}}};
  ThreadPool pool(2);
  for (const LayoutCase& layout_case : cases) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    for (const ElementType type : kAllElementTypes) {
      SCOPED_TRACE(ElementTypeName(type));
      const auto reals = MakeReals(type, count, 0.1, true, 3);
      const int m = DefaultMantissaBits(layout.scale_count());
      ASSERT_TRUE(SetSimdTarget("scalar").ok());
      TensorStatistics want(layout.scale_count(), m);
      want.Update(layout, type, 0, count, reals.data(), nullptr);
      ForEachSimdTarget([&] {
        TensorStatistics threaded(layout.scale_count(), m);
        threaded.Update(layout, type, 0, count, reals.data(), &pool);
        ExpectSame(threaded, want);
        TensorStatistics chunked(layout.scale_count(), m);
        TensorStatistics other(layout.scale_count(), m);
        for (int64_t first = 0; first < count; first += 77777) {
          (first % 2 == 0 ? chunked : other)
              .Update(layout, type, first,
                      std::min<int64_t>(77777, count - first),
                      reals.data() + first * ElementSizeBytes(type), nullptr);
        }
        chunked.Merge(other);
        ExpectSame(chunked, want);
      });
    }
  }
}

TEST(TensorStatisticsTest, MakesZeroExtremesPositive) {
  const BlockLayout per_tensor = *BlockLayout::Create({40}, {});
  const BlockLayout per_element = *BlockLayout::Create({40}, {1});
  std::vector<uint8_t> reals(40 * 4);
  for (int i = 0; i < 40; ++i) {
    StoreReal(ElementType::kFloat32, i % 3 == 0 ? 0.0 : -0.0, reals.data(), i);
  }
  ForEachSimdTarget([&] {
    for (const BlockLayout* layout : {&per_tensor, &per_element}) {
      TensorStatistics statistics(layout->scale_count());
      statistics.Update(*layout, ElementType::kFloat32, 0, 40, reals.data(),
                        nullptr);
      EXPECT_EQ(statistics.counts().zero, 40);
      for (const Extremes& extremes : statistics.extremes()) {
        EXPECT_FALSE(std::signbit(extremes.min));
        EXPECT_FALSE(std::signbit(extremes.max));
      }
    }
  });
}

TEST(TensorStatisticsTest, HasNoExtremesWithoutAFiniteElement) {
  const BlockLayout layout = *BlockLayout::Create({3}, {});
  std::vector<uint8_t> reals(12);
  StoreReal(ElementType::kFloat32, NAN, reals.data(), 0);
  StoreReal(ElementType::kFloat32, INFINITY, reals.data(), 1);
  StoreReal(ElementType::kFloat32, -INFINITY, reals.data(), 2);
  ForEachSimdTarget([&] {
    TensorStatistics statistics(1);
    EXPECT_TRUE(statistics.overall().empty());
    statistics.Update(layout, ElementType::kFloat32, 0, 3, reals.data(),
                      nullptr);
    EXPECT_TRUE(statistics.overall().empty());
    EXPECT_TRUE(statistics.extremes()[0].empty());
    EXPECT_EQ(statistics.counts().total, 3);
    EXPECT_EQ(statistics.counts().nan, 1);
    EXPECT_EQ(statistics.counts().positive_infinity, 1);
    EXPECT_EQ(statistics.counts().negative_infinity, 1);
  });
}

TEST(TensorStatisticsTest, OverallSpansAllScaleIndices) {
  const BlockLayout layout = *BlockLayout::Create({2, 2}, {1, 0});
  std::vector<uint8_t> reals(16);
  const double values[] = {1, 2, -3, -1};
  for (int i = 0; i < 4; ++i) {
    StoreReal(ElementType::kFloat32, values[i], reals.data(), i);
  }
  TensorStatistics statistics(2);
  statistics.Update(layout, ElementType::kFloat32, 0, 4, reals.data(), nullptr);
  EXPECT_EQ(statistics.extremes()[0].min, 1);
  EXPECT_EQ(statistics.extremes()[1].max, -1);
  EXPECT_EQ(statistics.overall().min, -3);
  EXPECT_EQ(statistics.overall().max, 2);
}

int64_t HistogramBytes(const TensorStatistics& statistics) {
  int64_t bytes = 0;
  for (const Histogram& histogram : statistics.histograms()) {
    bytes += histogram.memory_bytes();
  }
  return bytes;
}

TEST(TensorStatisticsTest, KnowsItsMemoryAfterEveryChange) {
  ThreadPool pool(2);
  for (const LayoutCase& layout_case :
       {LayoutCase{{300, 1001}, {}}, LayoutCase{{300, 1001}, {1, 0}},
        LayoutCase{{300, 1001}, {0, 1}}, LayoutCase{{300, 1001}, {1, 32}}}) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    const auto reals = MakeReals(ElementType::kFloat32, count, 0.1, true, 3);
    TensorStatistics statistics(layout.scale_count(), 3);
    const int64_t fixed =
        statistics.memory_bytes() - HistogramBytes(statistics);
    const auto expect_exact = [&] {
      const int64_t more =
          statistics.memory_bytes() - fixed - HistogramBytes(statistics);
      EXPECT_GE(more, 0);
      // Marks of non-finite elements take a bit each, in words.
      EXPECT_LE(more, layout.scale_count() / 8 + 16);
    };
    for (int i = 0; i < 3; ++i) {
      statistics.Update(layout, ElementType::kFloat32, 0, count, reals.data(),
                        &pool);
      expect_exact();
    }
    statistics.Merge(TensorStatistics(statistics));
    expect_exact();
  }
}

TEST(TensorStatisticsTest, DoesNotGrowByNonFiniteElements) {
  const BlockLayout layout = *BlockLayout::Create({64, 1024}, {0, 1});
  std::vector<uint8_t> reals(64 * 1024 * 4);
  for (int i = 0; i < 64 * 1024; ++i) {
    StoreReal(ElementType::kFloat32, i % 2 ? NAN : INFINITY, reals.data(), i);
  }
  TensorStatistics statistics(1024, 7);
  const int64_t empty_bytes = statistics.memory_bytes();
  statistics.Update(layout, ElementType::kFloat32, 0, 64 * 1024, reals.data(),
                    nullptr);
  EXPECT_LE(statistics.memory_bytes(), empty_bytes + 1024 / 8);
  for (int i = 0; i < 1024; ++i) EXPECT_TRUE(statistics.has_non_finite(i));
}

TEST(TensorStatisticsTest, KeepsBlocksInAboutTheMemoryOfTheirElements) {
  const BlockLayout layout = *BlockLayout::Create({256, 1024}, {1, 32});
  const int64_t count = layout.element_count();
  const auto reals = MakeReals(ElementType::kFloat32, count, 0.1, false, 3);
  TensorStatistics statistics(layout.scale_count(), 3);
  statistics.Update(layout, ElementType::kFloat32, 0, count, reals.data(),
                    nullptr);
  EXPECT_LE(statistics.memory_bytes(), count * 4 * 3 / 2);
}

TEST(TensorStatisticsTest, CoarsensToTheStatisticsOfLargerBlocks) {
  const BlockLayout fine = *BlockLayout::Create({6, 1000}, {1, 100});
  const BlockLayout coarse = *BlockLayout::Create({6, 1000}, {2, 0});
  const auto reals = MakeReals(ElementType::kFloat32, 6000, 0.1, true, 3);
  TensorStatistics from(60, 5), want(3, 5);
  from.Update(fine, ElementType::kFloat32, 0, 6000, reals.data(), nullptr);
  want.Update(coarse, ElementType::kFloat32, 0, 6000, reals.data(), nullptr);
  TensorStatistics got = from.Outline(3);
  for (int i = 0; i < 60; ++i) got.MergeScaleIndex(from, i, i / 20);
  ExpectSame(got, want);
}

TEST(TensorStatisticsTest, IsMadeFromItsParts) {
  const BlockLayout layout = *BlockLayout::Create({4, 50}, {1, 0});
  const auto reals = MakeReals(ElementType::kFloat32, 200, 0.1, true, 3);
  TensorStatistics want(4, 5);
  want.Update(layout, ElementType::kFloat32, 0, 200, reals.data(), nullptr);
  std::vector<int64_t> non_finite;
  for (int i = 0; i < 4; ++i) {
    if (want.has_non_finite(i)) non_finite.push_back(i);
  }
  const TensorStatistics got = TensorStatistics::FromParts(
      want.counts(), {want.extremes().begin(), want.extremes().end()},
      non_finite, 5, {want.histograms().begin(), want.histograms().end()});
  ExpectSame(got, want);
  EXPECT_EQ(got.mantissa_bits(), 5);
}

}  // namespace
}  // namespace quantd::core::tensor_statistics_test
