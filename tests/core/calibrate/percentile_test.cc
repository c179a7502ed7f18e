#include "core/calibrate/percentile.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/calibrate/calibrate.h"
#include "gtest/gtest.h"
#include "tests/core/calibrate/calibrate_test_util.h"
#include "tests/support/paths.h"

namespace quantd::core {
namespace {

// numpy.quantile of sorted data, from its manual: method "linear".
double NaiveQuantile(const std::vector<double>& sorted, double fraction) {
  const double position = fraction * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  const double t = position - static_cast<double>(below);
  return sorted[below] * (1 - t) + sorted[above] * t;
}

// Half of the bin that x is in: relative to it, 2^-(m + 1) at most.
double HalfBin(double x, int mantissa_bits) {
  return std::fabs(x) * std::ldexp(1.0, -mantissa_bits - 1) + 0x1p-127;
}

void ExpectQuantilesNear(std::vector<double> x, int mantissa_bits,
                         const Distribution& distribution) {
  std::sort(x.begin(), x.end());
  ASSERT_EQ(distribution.count(), x.size());
  for (uint64_t rank = 0; rank < x.size();
       rank += 1 + rank / 20 + x.size() / 1000) {
    const Interval interval = OrderStatistic(distribution, rank);
    ASSERT_LE(interval.low, x[rank]) << "rank " << rank;
    ASSERT_GE(interval.high, x[rank]) << "rank " << rank;
    ASSERT_NEAR(interval.middle(), x[rank], HalfBin(x[rank], mantissa_bits));
  }
  EXPECT_EQ(OrderStatistic(distribution, 0).middle(), x.front());
  EXPECT_EQ(OrderStatistic(distribution, x.size() - 1).middle(), x.back());
  for (const double fraction :
       {0.0, 0.0005, 0.001, 0.01, 0.25, 0.5, 0.9, 0.99, 0.999, 0.9999, 1.0}) {
    const double truth = NaiveQuantile(x, fraction);
    const size_t below =
        static_cast<size_t>(fraction * static_cast<double>(x.size() - 1));
    const size_t above = std::min(below + 1, x.size() - 1);
    ASSERT_NEAR(Quantile(distribution, fraction), truth,
                std::max(HalfBin(x[below], mantissa_bits),
                         HalfBin(x[above], mantissa_bits)))
        << "fraction " << fraction;
  }
}

void ExpectQuantilesNear(const Sample& sample) {
  const Histogram& histogram = sample.statistics.histograms()[0];
  const Extremes extremes = sample.statistics.overall();
  const int m = histogram.mantissa_bits();
  ExpectQuantilesNear(sample.x, m, Distribution(histogram, extremes));
  std::vector<double> magnitudes;
  for (const double x : sample.x) magnitudes.push_back(std::fabs(x));
  std::sort(magnitudes.begin(), magnitudes.end());
  const Distribution folded = Distribution::OfMagnitudes(histogram, extremes);
  ASSERT_EQ(folded.count(), magnitudes.size());
  for (const double fraction :
       {0.0, 0.001, 0.01, 0.1, 0.3, 0.9, 0.99, 0.999, 1.0}) {
    const size_t rank = static_cast<size_t>(
        fraction * static_cast<double>(magnitudes.size() - 1));
    const Interval interval = OrderStatistic(folded, rank);
    ASSERT_LE(interval.low, magnitudes[rank]);
    ASSERT_GE(interval.high, magnitudes[rank]);
    ASSERT_LE(interval.high - interval.low, 2 * HalfBin(magnitudes[rank], m));
  }
  ASSERT_EQ(Quantile(folded, 1), magnitudes.back());
}

TEST(PercentileTest, IsWithinHalfABinOfTheSortedData) {
  std::mt19937 random(1);
  const int rounds = Rounds(1500);
  for (int round = 0; round < rounds; ++round) {
    const Shape shape = kAllShapes[round % std::size(kAllShapes)];
    const int64_t count = 1 + random() % (1 << (1 + random() % 12));
    const int mantissa_bits = 2 + static_cast<int>(random() % 9);
    SCOPED_TRACE(absl::StrCat("round ", round, " shape ",
                              static_cast<int>(shape), " count ", count, " m ",
                              mantissa_bits));
    const ElementType type =
        random() % 4 ? ElementType::kFloat32 : ElementType::kBfloat16;
    const Sample sample(type, Draw(shape, count, &random), mantissa_bits);
    ASSERT_NO_FATAL_FAILURE(ExpectQuantilesNear(sample));
  }
}

TEST(PercentileTest, IsWithinHalfABinOnActivations) {
  const auto tensors =
      ReadSafetensors(TestDataFolder() + "/digits-cnn/activations.safetensors");
  ASSERT_EQ(tensors.size(), 4u);
  for (const auto& [name, values] : tensors) {
    SCOPED_TRACE(name);
    const Sample sample(ElementType::kFloat32, values, 7);
    ASSERT_NO_FATAL_FAILURE(ExpectQuantilesNear(sample));
  }
}

TEST(PercentileTest, IsExactWhereBinsHaveOneOrTwoValues) {
  std::mt19937 random(2);
  for (int round = 0; round < 300; ++round) {
    std::vector<double> values = Draw(Shape::kNormal, 12, &random);
    // A pair that shares a bin.
    values.push_back(values[0] * (1 + 0x1p-20));
    const Sample sample(ElementType::kFloat32, values, 10);
    std::vector<double> sorted = sample.x;
    std::sort(sorted.begin(), sorted.end());
    const Distribution distribution(sample.statistics.histograms()[0],
                                    sample.statistics.overall());
    for (size_t rank = 0; rank < sorted.size(); ++rank) {
      EXPECT_EQ(OrderStatistic(distribution, rank).middle(), sorted[rank]);
    }
  }
}

absl::StatusOr<Calibration> CalibratePercentile(
    const std::vector<double>& values, double tail_fraction, Tail tail,
    Symmetry symmetry) {
  EncodingSpec spec = Spec("int8", symmetry);
  spec.method = CalibrationMethod::kPercentile;
  spec.tail_fraction = tail_fraction;
  spec.tail = tail;
  const Sample sample(ElementType::kFloat32, values, 7);
  return Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
}

TEST(PercentileTest, CutsOffTheTailThatIsAskedFor) {
  std::vector<double> values;
  for (int i = -20; i <= 80; ++i) values.push_back(i);
  const auto scale = [&](Tail tail, Symmetry symmetry) {
    return CalibratePercentile(values, 0.1, tail, symmetry)->encoding.scale[0];
  };
  const Symmetry both_sides = Symmetry::kStrict;
  // |x|: 0, twice 1 to 20, 21 to 80; rank 90 of 0 to 100 is 70.
  EXPECT_EQ(scale(Tail::kDefault, both_sides), static_cast<float>(70 / 127.0));
  EXPECT_EQ(scale(Tail::kMagnitude, both_sides),
            static_cast<float>(70 / 127.0));
  EXPECT_EQ(scale(Tail::kBoth, both_sides), static_cast<float>(75 / 127.0));
  EXPECT_EQ(scale(Tail::kUpper, both_sides), static_cast<float>(70 / 127.0));
  EXPECT_EQ(scale(Tail::kLower, both_sides), static_cast<float>(10 / 127.0));
  const Symmetry free = Symmetry::kAsymmetric;
  EXPECT_EQ(scale(Tail::kDefault, free), static_cast<float>(90 / 255.0));
  EXPECT_EQ(scale(Tail::kBoth, free), static_cast<float>(90 / 255.0));
  EXPECT_EQ(scale(Tail::kMagnitude, free), static_cast<float>(140 / 255.0));
  EXPECT_EQ(scale(Tail::kUpper, free), static_cast<float>(90 / 255.0));
  EXPECT_EQ(scale(Tail::kLower, free), static_cast<float>(90 / 255.0));
}

TEST(PercentileTest, TakesTheWholeRangeWhereTheQuantileIsZero) {
  std::vector<double> values(1000, 0.0);
  values[3] = 2;
  for (const Symmetry symmetry : {Symmetry::kStrict, Symmetry::kAsymmetric}) {
    const auto calibration =
        CalibratePercentile(values, 0.01, Tail::kDefault, symmetry);
    ASSERT_TRUE(calibration.ok());
    EXPECT_EQ(
        calibration->encoding.scale[0],
        static_cast<float>(2.0 / (symmetry == Symmetry::kStrict ? 127 : 255)));
    EXPECT_EQ(calibration->encoding.degenerate_count, 0);
  }
}

TEST(PercentileTest, EqualsThePrintedExample) {
  std::ifstream file(OraclesFolder() + "/seed_tables.json");
  const auto tables = nlohmann::json::parse(file);
  bool found = false;
  for (const auto& c : tables["cases"]) {
    if (c["name"] != "seed001_percentile_99_9") continue;
    found = true;
    const auto calibration =
        CalibratePercentile(c["x"].get<std::vector<double>>(),
                            1 - c["percentile"].get<double>() / 100,
                            Tail::kUpper, Symmetry::kStrict);
    ASSERT_TRUE(calibration.ok());
    const double alpha = c["alpha"];
    EXPECT_NEAR(calibration->encoding.scale[0] * 127.0, alpha, 2e-7);
    // All of the printed digits, those of a float32.
    const Sample sample(ElementType::kFloat32,
                        c["x"].get<std::vector<double>>(), 7);
    EXPECT_EQ(static_cast<float>(
                  Quantile(Distribution(sample.statistics.histograms()[0],
                                        sample.statistics.overall()),
                           0.999)),
              static_cast<float>(alpha));
  }
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace quantd::core
