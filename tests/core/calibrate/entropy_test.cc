#include "core/calibrate/entropy.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/calibrate/calibrate.h"
#include "gtest/gtest.h"
#include "tests/core/calibrate/calibrate_test_util.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core {
namespace {

// x cut to the 9 + m bits that a histogram keeps.
double Cut(double x, int mantissa_bits) {
  const float single = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &single, sizeof(bits));
  bits &= ~((uint32_t{1} << (23 - mantissa_bits)) - 1);
  float cut;
  std::memcpy(&cut, &bits, sizeof(cut));
  return cut;
}

// The divergence as entropy.h words it, bin after bin.
double NaiveDivergence(const std::vector<double>& counts, int first, int last,
                       const std::vector<int>& level_of_bin) {
  const int size = last - first;
  std::vector<double> p(counts.begin() + first, counts.begin() + last);
  const std::vector<double> inside = p;
  for (int t = 0; t < static_cast<int>(counts.size()); ++t) {
    if (t < first) p[0] += counts[t];
    if (t >= last) p[size - 1] += counts[t];
  }
  std::vector<double> q(size, 0.0);
  const int levels = level_of_bin.back() + 1;
  for (int level = 0; level < levels; ++level) {
    double sum = 0;
    int filled = 0;
    for (int t = 0; t < size; ++t) {
      if (level_of_bin[t] != level) continue;
      sum += inside[t];
      filled += p[t] > 0;
    }
    if (sum == 0) sum = 0.5;
    for (int t = 0; t < size; ++t) {
      if (level_of_bin[t] == level && p[t] > 0) q[t] = sum / filled;
    }
  }
  double p_sum = 0, q_sum = 0;
  for (int t = 0; t < size; ++t) {
    p_sum += p[t];
    q_sum += q[t];
  }
  double divergence = 0;
  for (int t = 0; t < size; ++t) {
    if (p[t] > 0) {
      divergence += p[t] / p_sum * std::log(p[t] / p_sum / (q[t] / q_sum));
    }
  }
  return divergence;
}

struct Candidates {
  std::vector<Range> ranges;
  std::vector<double> divergence;
};

Candidates TryAll(const Sample& sample, int mantissa_bits, int64_t levels,
                  bool of_magnitudes, const Range& whole, int steps, int bins) {
  const double low = of_magnitudes ? 0 : whole.low;
  const double high = of_magnitudes ? whole.abs_max() : whole.high;
  std::vector<double> counts(bins, 0.0);
  const auto position = [&](double x) {
    return (x - low) * bins / (high - low);
  };
  for (const double x : sample.x) {
    const double cut = Cut(of_magnitudes ? std::fabs(x) : x, mantissa_bits);
    if (cut == 0) continue;
    ++counts[std::clamp(static_cast<int>(std::floor(position(cut))), 0,
                        bins - 1)];
  }
  Candidates candidates;
  for (int k = 1; k <= steps; ++k) {
    const double fraction = static_cast<double>(k) / steps;
    const Range range = {low * fraction, high * fraction};
    const int first =
        k == steps
            ? 0
            : std::clamp(static_cast<int>(std::floor(position(range.low))), 0,
                         bins - 1);
    const int last =
        k == steps
            ? bins
            : std::clamp(static_cast<int>(std::ceil(position(range.high))), 1,
                         bins);
    const int64_t size = last - first;
    if (k < steps && size < levels) continue;
    std::vector<int> level_of_bin;
    for (int64_t t = 0; t < size; ++t) {
      level_of_bin.push_back(static_cast<int>(t * levels / size));
    }
    candidates.ranges.push_back(range);
    candidates.divergence.push_back(
        NaiveDivergence(counts, first, last, level_of_bin));
  }
  return candidates;
}

TEST(EntropyTest, IsNoWorseThanTryingAllRangesOnTheCutElements) {
  std::mt19937 random(1);
  const int rounds = Rounds(700);
  int narrower = 0;
  for (int round = 0; round < rounds; ++round) {
    const int bits = 2 + static_cast<int>(random() % 6);
    const bool of_magnitudes = random() % 2 == 0;
    EncodingSpec spec;
    spec.format = IntegerFormat(bits, true).format;
    spec.symmetry = of_magnitudes ? Symmetry::kStrict : Symmetry::kAsymmetric;
    spec.method = CalibrationMethod::kEntropy;
    spec.search_steps = 2 + static_cast<int>(random() % 30);
    spec.entropy_bins = 16 + static_cast<int>(random() % 500);
    const int mantissa_bits = 3 + 2 * static_cast<int>(random() % 3);
    const Shape shape = kAllShapes[random() % std::size(kAllShapes)];
    const Sample sample(
        ElementType::kFloat32,
        Draw(shape, 1 + random() % (1 << (1 + random() % 12)), &random),
        mantissa_bits);
    const Extremes extremes = sample.statistics.overall();
    if (extremes.min == 0 && extremes.max == 0) continue;
    const Range whole = {std::min(extremes.min, 0.0),
                         std::max(extremes.max, 0.0)};
    const int64_t levels =
        of_magnitudes ? int64_t{1} << (bits - 1) : int64_t{1} << bits;
    const Candidates candidates =
        TryAll(sample, mantissa_bits, levels, of_magnitudes, whole,
               spec.search_steps, spec.entropy_bins);
    const double least = *std::min_element(candidates.divergence.begin(),
                                           candidates.divergence.end());
    const auto calibration =
        Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
    ASSERT_TRUE(calibration.ok());
    // The candidate that was taken, by its scale.
    double taken = std::numeric_limits<double>::infinity();
    const int codes = of_magnitudes ? (1 << (bits - 1)) - 1 : (1 << bits) - 1;
    for (size_t i = 0; i < candidates.ranges.size(); ++i) {
      const Range& range = candidates.ranges[i];
      const float scale = static_cast<float>((range.high - range.low) / codes);
      if (scale == calibration->encoding.scale[0]) {
        taken = candidates.divergence[i];
        narrower += i + 1 < candidates.ranges.size();
      }
    }
    ASSERT_LE(taken, least + 1e-9) << "round " << round << " bits " << bits
                                   << " magnitudes " << of_magnitudes;
  }
  // The test means little where the whole range always wins.
  EXPECT_GT(narrower, rounds / 10);
}

TEST(EntropyTest, EverySimdTargetFindsTheSameRangeOfElements) {
  std::mt19937 random(4);
  int narrower = 0;
  for (int round = 0; round < Rounds(400); ++round) {
    // As many levels as a power of two and others, and those of floats.
    EntropyLevels levels;
    levels.of_magnitudes = random() % 2 == 0;
    levels.count = random() % 2 == 0 ? int64_t{1} << (random() % 9)
                                     : 1 + static_cast<int>(random() % 40);
    if (random() % 3 == 0) {
      levels = LevelsOf(CodeNumbers(EncodingWithoutScales(
                            Spec(random() % 2 == 0 ? "nf4" : "float8_e4m3fn"),
                            *BlockLayout::Create({1}, {}), false)),
                        true);
    }
    const Shape shape = kAllShapes[random() % std::size(kAllShapes)];
    auto values =
        Draw(shape, 1 + random() % (1 << (1 + random() % 12)), &random);
    const double shift = random() % 4 == 0 ? 1 : 0;
    for (double& x : values) x += shift;
    const bool is_double = random() % 2 == 0;
    const std::vector<float> floats(values.begin(), values.end());
    BlockElements elements;
    elements.Assign(is_double ? ElementType::kFloat64 : ElementType::kFloat32,
                    is_double ? reinterpret_cast<const uint8_t*>(values.data())
                              : reinterpret_cast<const uint8_t*>(floats.data()),
                    static_cast<int64_t>(values.size()));
    Range whole = {0, 0};
    for (int64_t i = 0; i < elements.count(); ++i) {
      whole.low = std::min(whole.low, elements.at(i));
      whole.high = std::max(whole.high, elements.at(i));
    }
    if (whole.low == whole.high) continue;
    // Ranges that leave out zero.
    if (shift != 0 && random() % 2 == 0) whole.low = 0.25 * whole.high;
    const int steps =
        random() % 2 == 0 ? 0 : 1 + static_cast<int>(random() % 90);
    const int bins =
        random() % 2 == 0 ? 0 : 1 + static_cast<int>(random() % 300);
    const auto search = [&] {
      return *SearchEntropy(&elements, levels, whole, steps, bins);
    };
    ASSERT_TRUE(SetSimdTarget("scalar").ok());
    const Range want = search();
    narrower += want.high < whole.high;
    ForEachSimdTarget([&] {
      const Range got = search();
      ASSERT_EQ(got.low, want.low) << "round " << round;
      ASSERT_EQ(got.high, want.high) << "round " << round;
    });
    if (HasFailure()) return;
  }
  EXPECT_GT(narrower, Rounds(400) / 10);
}

TEST(EntropyTest, IsNotMovedByZeros) {
  std::mt19937 random(3);
  std::vector<double> values = Draw(Shape::kNormal, 5000, &random);
  for (double& x : values) x = std::fabs(x);
  std::vector<double> with_zeros = values;
  with_zeros.resize(4 * values.size(), 0.0);
  for (const char* format : {"uint8", "int8", "uint4", "float8_e4m3fn"}) {
    EncodingSpec spec = Spec(format);
    spec.method = CalibrationMethod::kEntropy;
    const Sample sparse(ElementType::kFloat32, with_zeros, 7);
    const Sample dense(ElementType::kFloat32, values, 7);
    const auto of_sparse =
        Calibrate(spec, sparse.layout, sparse.statistics, {}, nullptr);
    const auto of_dense =
        Calibrate(spec, dense.layout, dense.statistics, {}, nullptr);
    ASSERT_TRUE(of_sparse.ok() && of_dense.ok());
    EXPECT_EQ(of_sparse->encoding.scale, of_dense->encoding.scale) << format;
  }
}

TEST(EntropyTest, CutsOutliersOff) {
  std::mt19937 random(2);
  std::vector<double> values = Draw(Shape::kNormal, 20000, &random);
  double size = 0;
  for (const double x : values) size = std::max(size, std::fabs(x));
  values[7] = 30 * size;
  const Sample sample(ElementType::kFloat32, values, 7);
  for (const char* format :
       {"int4", "int8", "uint4", "float4_e2m1", "nf4", "int12"}) {
    EncodingSpec spec = Spec(format);
    spec.method = CalibrationMethod::kEntropy;
    const auto entropy =
        Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
    spec.method = CalibrationMethod::kMinMax;
    const auto whole =
        Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
    ASSERT_TRUE(entropy.ok() && whole.ok());
    EXPECT_LT(entropy->encoding.scale[0], whole->encoding.scale[0]) << format;
  }
}

TEST(EntropyTest, KnowsTheLevelsOfEveryFormat) {
  Encoding encoding;
  const auto levels = [&](const char* name, bool is_symmetric) {
    const FormatInfo& format = *FindFormatByName(name);
    encoding.format = format.format;
    encoding.qmin = format.qmin;
    encoding.qmax = format.qmax;
    return LevelsOf(CodeNumbers(encoding), is_symmetric);
  };
  EXPECT_EQ(levels("int8", true).size(), 128);
  EXPECT_TRUE(levels("int8", true).of_magnitudes);
  EXPECT_EQ(levels("int8", false).size(), 256);
  EXPECT_FALSE(levels("int8", false).of_magnitudes);
  EXPECT_EQ(levels("uint16", false).size(), 65536);
  EXPECT_EQ(levels("uint4", true).size(), 16);
  // -6, -4, -3, -2, -1.5, -1, -0.5, 0 and so on.
  const EntropyLevels e2m1 = levels("float4_e2m1", true);
  ASSERT_EQ(e2m1.size(), 15);
  EXPECT_EQ(e2m1.boundaries[0], (-5.0 / 6 + 1) / 2);
  EXPECT_EQ(e2m1.boundaries[13], (5.0 / 6 + 1) / 2);
}

TEST(EntropyTest, TakesLogarithmsThatAreAsGoodAsTheLibrarys) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 100000; ++i) {
    const double x = std::ldexp(1.0 + (random() >> 12) * 0x1p-52,
                                static_cast<int>(random() % 200) - 100);
    ASSERT_NEAR(PortableLog(x), std::log(x),
                0x1p-51 * std::max(1.0, std::fabs(std::log(x))));
  }
  for (const double near : {1 - 0x1p-53, 1.0, 1 + 0x1p-52, 1 + 0x1p-30}) {
    EXPECT_NEAR(PortableLog(near), std::log(near),
                0x1p-51 * std::fabs(std::log(near)));
  }
}

}  // namespace
}  // namespace quantd::core
