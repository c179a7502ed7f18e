#include "core/calibrate/distribution.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/core/calibrate/calibrate_test_util.h"

namespace quantd::core {
namespace {

Distribution DistributionOf(const Sample& sample) {
  return Distribution(sample.statistics.histograms()[0],
                      sample.statistics.overall());
}

TEST(DistributionTest, HasTheElementsOfEachMass) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const Sample sample(ElementType::kFloat32,
                        Draw(kAllShapes[round % 8], 1 + round * 10, &random),
                        2 + round % 9);
    const Distribution distribution = DistributionOf(sample);
    std::vector<double> sorted = sample.x;
    std::sort(sorted.begin(), sorted.end());
    double signal = 0;
    size_t next = 0;
    for (const Mass& mass : distribution.masses()) {
      double sum = 0;
      double spread = 0;
      const size_t begin = next;
      for (; next < begin + static_cast<size_t>(mass.count); ++next) {
        ASSERT_GE(sorted[next], mass.low);
        ASSERT_LE(sorted[next], mass.high);
        sum += sorted[next];
        spread += (sorted[next] - mass.mean) * (sorted[next] - mass.mean);
        signal += sorted[next] * sorted[next];
      }
      const double size = std::max(std::fabs(mass.low), std::fabs(mass.high));
      ASSERT_NEAR(mass.mean, sum / mass.count, 1e-13 * size);
      ASSERT_NEAR(mass.spread, spread, 1e-9 * spread + 1e-24 * size * size);
    }
    EXPECT_EQ(next, sorted.size());
    EXPECT_NEAR(distribution.signal(), signal, 1e-12 * signal);
  }
}

TEST(DistributionTest, GivesBackValuesThatMomentsTell) {
  // One alone, two in a bin, three that are equal, and two and the largest.
  const std::vector<double> values = {-3, 1,       1 + 0x1p-10, 5,    5,
                                      5,  16.0001, 16.000002,   16.02};
  const Distribution distribution =
      DistributionOf(Sample(ElementType::kFloat32, values, 7));
  std::vector<double> points;
  for (const Mass& mass : distribution.masses()) {
    ASSERT_EQ(mass.low, mass.high);
    points.push_back(mass.mean);
  }
  EXPECT_EQ(points, (std::vector<double>{-3, 1, 1 + 0x1p-10, 5, 16.000002f,
                                         16.0001f, 16.02f}));
}

TEST(DistributionTest, SumsAnyMassesAsIfOneByOne) {
  std::mt19937 random(2);
  for (int round = 0; round < 100; ++round) {
    const Sample sample(ElementType::kFloat32,
                        Draw(kAllShapes[round % 8], 2000, &random), 7);
    const Distribution distribution = DistributionOf(sample);
    const auto masses = distribution.masses();
    const size_t first = random() % masses.size();
    const size_t last = first + random() % (masses.size() - first + 1);
    const double value = masses[random() % masses.size()].mean;
    double sum = 0;
    double inner = 0;
    for (size_t i = first; i < last; ++i) {
      const double distance = masses[i].mean - value;
      sum += masses[i].spread + masses[i].count * distance * distance;
      inner = std::max({inner, std::fabs(masses[i].mean), std::fabs(value)});
    }
    EXPECT_NEAR(distribution.SquaredDistance(first, last, value), sum,
                1e-12 * 2000 * inner * inner);
  }
}

TEST(DistributionTest, FindsTheFirstMassAboveANumber) {
  std::mt19937 random(3);
  const Sample sample(ElementType::kFloat32,
                      Draw(Shape::kStudent2, 3000, &random), 5);
  const Distribution distribution = DistributionOf(sample);
  const auto masses = distribution.masses();
  for (int round = 0; round < 2000; ++round) {
    const size_t first = random() % (masses.size() + 1);
    const double x = round % 2 ? masses[random() % masses.size()].high
                               : masses[random() % masses.size()].mean;
    size_t expected = first;
    while (expected < masses.size() && masses[expected].high <= x) ++expected;
    ASSERT_EQ(distribution.FirstAbove(first, x), expected);
  }
}

TEST(DistributionTest, CarriesTheRoundingOfSums) {
  CompensatedSum sum;
  for (const double x : {1.0, 1e100, 1.0, -1e100}) sum.Add(x);
  EXPECT_EQ(sum.value(), 2);
  sum.Add(INFINITY);
  sum.Add(1);
  EXPECT_EQ(sum.value(), INFINITY);
}

}  // namespace
}  // namespace quantd::core
