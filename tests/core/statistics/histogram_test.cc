#include "core/statistics/histogram.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "absl/numeric/int128.h"
#include "core/types/float_convert.h"
#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"
#include "tests/core/statistics/naive_histogram.h"

namespace quantd::core::histogram_test {
namespace {

// Every kind of pattern: normal values, any exponent, zeros, NaN, infinities.
std::vector<float> MakeFloats(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> x(count);
  for (float& value : x) {
    switch (random() % 8) {
      case 0:
        value = BitsAs<float>(static_cast<uint32_t>(random()));
        break;
      case 1:
        value = random() % 2 ? 0.0f : -0.0f;
        break;
      case 2:
        value = random() % 2 ? 1.5f : INFINITY;
        break;
      default:
        value = normal(random);
    }
  }
  return x;
}

NaiveHistogram Naive(const std::vector<float>& x, int mantissa_bits) {
  NaiveHistogram histogram;
  for (const float value : x) NaiveAdd(value, mantissa_bits, &histogram);
  return histogram;
}

TEST(HistogramTest, EqualsItsDescriptionHoweverItIsFilled) {
  for (int m = kMinMantissaBits; m <= kMaxMantissaBits; ++m) {
    SCOPED_TRACE(m);
    for (const int64_t count : {0, 1, 2, 3, 127, 128, 129, 300, 5000}) {
      SCOPED_TRACE(count);
      const std::vector<float> x =
          MakeFloats(count, static_cast<uint32_t>(count));
      const NaiveHistogram want = Naive(x, m);
      ForEachSimdTarget([&] {
        Histogram whole(m);
        whole.Add(x.data(), count);
        ExpectEqual(whole, want);

        Histogram one_by_one(m);
        for (int64_t i = count; i-- > 0;) one_by_one.Add(&x[i], 1);
        ExpectEqual(one_by_one, want);
        EXPECT_TRUE(one_by_one == whole);

        Histogram by_bins(m);
        whole.ForEachBin([&](uint32_t key, const HistogramBin& bin) {
          by_bins.AddBin(key, bin);
        });
        ExpectEqual(by_bins, want);
        EXPECT_TRUE(by_bins == whole);
      });
      if (HasFailure()) return;
    }
  }
}

TEST(HistogramTest, MergesWhateverTheRepresentations) {
  for (const int m : {2, 7}) {
    for (const int64_t a : {0, 5, 100, 1000}) {
      for (const int64_t b : {0, 7, 128, 3000}) {
        std::vector<float> x = MakeFloats(a, 1);
        const std::vector<float> y = MakeFloats(b, 2);
        Histogram merged(m), other(m);
        merged.Add(x.data(), a);
        other.Add(y.data(), b);
        merged.Merge(other);
        x.insert(x.end(), y.begin(), y.end());
        ExpectEqual(merged, Naive(x, m));
        EXPECT_EQ(other == merged, a == 0);
      }
    }
  }
}

TEST(HistogramTest, MergesIntoItself) {
  const std::vector<float> x = MakeFloats(90, 1);
  std::vector<float> twice = x;
  twice.insert(twice.end(), x.begin(), x.end());
  Histogram histogram(7);
  histogram.Add(x.data(), 90);
  histogram.Merge(histogram);
  ExpectEqual(histogram, Naive(twice, 7));
}

TEST(HistogramTest, CopiesAreOfTheirOwn) {
  for (const int64_t count : {20, 2000}) {
    const std::vector<float> x = MakeFloats(count, 3);
    Histogram histogram(5);
    histogram.Add(x.data(), count);
    Histogram copy(histogram);
    EXPECT_TRUE(copy == histogram);
    copy.Add(x.data(), count);
    EXPECT_FALSE(copy == histogram);
    ExpectEqual(histogram, Naive(x, 5));
    copy = histogram;
    EXPECT_TRUE(copy == histogram);
  }
}

TEST(HistogramTest, ComparesByContent) {
  const float a[] = {1.0f, 1.0001f}, b[] = {1.0f, 1.0002f};
  Histogram x(2), y(2), z(3);
  x.Add(a, 2);
  y.Add(b, 2);
  EXPECT_FALSE(x == y);
  EXPECT_FALSE(Histogram(2) == z);
  EXPECT_TRUE(Histogram(2) == Histogram(2));
}

// So many elements with the largest low bits that no 64 bits hold the squares.
TEST(HistogramTest, CountsBeyond64Bits) {
  for (const int m : {2, 3, 7, 10}) {
    const uint64_t low = (uint64_t{1} << (23 - m)) - 1;
    const auto bin_of = [&](uint64_t count) {
      return HistogramBin{count, count * low, absl::uint128(count) * low * low};
    };
    const uint32_t key = HistogramKey(1.0f, m);
    const uint32_t next = HistogramKey(2.0f, m);
    for (int shift = 16; shift <= 41; ++shift) {
      const uint64_t count = uint64_t{1} << shift;
      Histogram histogram(m);
      histogram.AddBin(next, bin_of(3));
      histogram.AddBin(key, bin_of(count));
      Histogram copy(histogram);
      for (int i = 0; i < 3; ++i) histogram.Merge(copy);
      ExpectEqual(histogram, {{key, bin_of(4 * count)}, {next, bin_of(12)}});
      // A wide one into a narrow one.
      Histogram small(m);
      small.AddBin(next, bin_of(5));
      small.Merge(histogram);
      ExpectEqual(small, {{key, bin_of(4 * count)}, {next, bin_of(17)}});
      if (HasFailure()) return;
    }
  }
}

TEST(HistogramTest, HoldsMoreElementsThanATable) {
  // All in one bin with the largest low bits.
  const float x = BitsAs<float>(uint32_t{0x3F9FFFFF});
  const uint64_t low = 0x1FFFFF;
  const std::vector<float> many((1 << 20) + 5, x);
  ForEachSimdTarget([&] {
    Histogram histogram(2);
    histogram.Add(many.data(), static_cast<int64_t>(many.size()));
    ExpectEqual(histogram, {{HistogramKey(x, 2),
                             {many.size(), many.size() * low,
                              absl::uint128(many.size()) * low * low}}});
  });
}

TEST(HistogramTest, EdgesAndMomentsOfABinAreThoseOfItsElements) {
  std::mt19937 random(1);
  for (int m = kMinMantissaBits; m <= kMaxMantissaBits; ++m) {
    for (int i = 0; i < 2000; ++i) {
      const float x = BitsAs<float>(static_cast<uint32_t>(random()));
      if (!std::isfinite(x)) continue;
      Histogram histogram(m);
      histogram.Add(&x, 1);
      histogram.ForEachBin([&](uint32_t key, const HistogramBin& bin) {
        EXPECT_EQ(key, HistogramKey(x, m));
        const BinEdges edges = HistogramBinEdges(key, m);
        EXPECT_LE(edges.low, x);
        EXPECT_GE(edges.high, x);
        EXPECT_EQ(edges.base + static_cast<double>(bin.low_sum) * edges.unit,
                  x);
        const Moments moments = BinMoments(edges, bin);
        EXPECT_EQ(moments.sum, x);
        EXPECT_EQ(moments.square_sum, double{x} * x);
      });
    }
  }
}

TEST(HistogramTest, MomentsAgreeWithLongDouble) {
  std::mt19937 random(1);
  std::lognormal_distribution<float> values(0, 3);
  for (const int m : {2, 3, 5, 7, 10}) {
    Histogram histogram(m);
    long double sum = 0, magnitude = 0, square_sum = 0;
    std::vector<float> x(200000);
    for (float& value : x) {
      value = values(random) * (random() % 3 == 0 ? -1.0f : 1.0f);
      sum += value;
      magnitude += std::fabs(value);
      square_sum += static_cast<long double>(value) * value;
    }
    histogram.Add(x.data(), static_cast<int64_t>(x.size()));
    const Moments moments = HistogramMoments(histogram);
    EXPECT_LE(std::fabs(moments.sum - sum), 1e-15L * magnitude);
    EXPECT_LE(std::fabs(moments.square_sum - square_sum), 1e-15L * square_sum);
  }
}

TEST(HistogramTest, KeepsSmallFloatsExactly) {
  for (const auto& [type, m] : {std::pair(ElementType::kBfloat16, 7),
                                std::pair(ElementType::kFloat16, 10)}) {
    Histogram histogram(m);
    std::vector<bool> is_seen(1 << 16);
    for (uint32_t bits = 0; bits < (1 << 16); ++bits) {
      const float x = type == ElementType::kBfloat16
                          ? BfloatToFloat(static_cast<uint16_t>(bits))
                          : HalfToFloat(static_cast<uint16_t>(bits));
      histogram.Add(&x, 1);
    }
    uint64_t bins = 0;
    histogram.ForEachBin([&, m = m](uint32_t key, const HistogramBin& bin) {
      ++bins;
      const BinEdges edges = HistogramBinEdges(key, m);
      // float16's subnormals are normal float32 with few bits.
      EXPECT_EQ(bin.low_sum, 0u);
      // Both zeros are in one bin.
      EXPECT_EQ(bin.count, edges.base == 0 ? 2u : 1u);
    });
    EXPECT_EQ(bins, type == ElementType::kBfloat16 ? 2 * 255 * 128 - 1u
                                                   : 2 * 31 * 1024 - 1u);
  }
}

TEST(HistogramTest, TakesAboutTheMemoryOfFewElements) {
  const std::vector<float> x(32, 1.25f);
  Histogram histogram(3);
  histogram.Add(x.data(), 32);
  EXPECT_LE(histogram.memory_bytes(), 32 * 4 + 40);
  Histogram nothing(3);
  const std::vector<float> nan(5000, NAN);
  const int64_t empty_bytes = nothing.memory_bytes();
  for (int i = 0; i < 100; ++i) nothing.Add(nan.data() + i, 50);
  nothing.Add(nan.data(), 5000);
  EXPECT_EQ(nothing.memory_bytes(), empty_bytes);
  EXPECT_EQ(nothing.count(), 0u);
}

TEST(HistogramTest, TakesTheMemoryOfItsBins) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> x(1 << 20);
  for (float& value : x) value = normal(random);
  Histogram histogram(7);
  histogram.Add(x.data(), static_cast<int64_t>(x.size()));
  int64_t bins = 0;
  histogram.ForEachBin([&](uint32_t, const HistogramBin&) { ++bins; });
  EXPECT_LE(histogram.memory_bytes(), bins * 30 + 100);
}

}  // namespace
}  // namespace quantd::core::histogram_test
