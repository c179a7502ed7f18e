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

// Of the values as they are.
Candidates TryAll(const std::vector<double>& values,
                  const EntropyLevels& levels, const Range& whole, int steps,
                  int bins) {
  const Range span = levels.of_magnitudes ? Range{0, whole.abs_max()}
                     : levels.count == 0
                         ? Range{-whole.abs_max(), whole.abs_max()}
                         : whole;
  const double from = std::clamp(0.0, span.low, span.high);
  std::vector<double> counts(bins, 0.0);
  const auto position = [&](double x) {
    return (x - span.low) * bins / (span.high - span.low);
  };
  for (const double value : values) {
    const double x = levels.of_magnitudes ? std::fabs(value) : value;
    if (x == 0) continue;
    ++counts[std::clamp(static_cast<int>(std::floor(position(x))), 0,
                        bins - 1)];
  }
  Candidates candidates;
  for (int k = 1; k <= steps; ++k) {
    const double fraction = static_cast<double>(k) / steps;
    const Range range = {from + (span.low - from) * fraction,
                         from + (span.high - from) * fraction};
    const int first =
        k == steps || range.low == span.low
            ? 0
            : std::clamp(static_cast<int>(std::floor(position(range.low))), 0,
                         bins - 1);
    const int last =
        k == steps
            ? bins
            : std::clamp(static_cast<int>(std::ceil(position(range.high))), 1,
                         bins);
    const int64_t size = last - first;
    if (k < steps && size < levels.size()) continue;
    std::vector<int> level_of_bin;
    for (int64_t t = 0; t < size; ++t) {
      int64_t level = 0;
      if (levels.count != 0) {
        level = t * levels.count / size;
      } else {
        for (const double boundary : levels.boundaries) {
          level += static_cast<double>(t) >=
                   boundary * static_cast<double>(size) - 0.5;
        }
      }
      level_of_bin.push_back(static_cast<int>(level));
    }
    candidates.ranges.push_back(k == steps ? whole
                                : levels.of_magnitudes
                                    ? Range{-range.high, range.high}
                                    : range);
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
    EntropyLevels levels;
    levels.of_magnitudes = of_magnitudes;
    levels.count =
        of_magnitudes ? int64_t{1} << (bits - 1) : int64_t{1} << bits;
    std::vector<double> cut;
    for (const double x : sample.x) cut.push_back(Cut(x, mantissa_bits));
    const Candidates candidates =
        TryAll(cut, levels, whole, spec.search_steps, spec.entropy_bins);
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
      const double width =
          of_magnitudes ? range.abs_max() : range.high - range.low;
      const float scale = static_cast<float>(width / codes);
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
    // Some with more elements than lanes count.
    const int64_t count = round % 50 == 7
                              ? 4096 + static_cast<int64_t>(random() % 63000)
                              : 1 + random() % (1 << (1 + random() % 12));
    auto values = Draw(shape, count, &random);
    // All but one in one bin.
    if (round % 100 == 7) {
      std::fill(values.begin() + 1, values.end(), 0.001 * values[0]);
    }
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

TEST(EntropyTest, IsNoWorseThanTryingAllRangesOfElements) {
  std::mt19937 random(6);
  const int rounds = Rounds(3000);
  int narrower = 0;
  for (int round = 0; round < rounds; ++round) {
    EntropyLevels levels;
    levels.of_magnitudes = random() % 2 == 0;
    levels.count = 1 + static_cast<int>(random() % (random() % 2 ? 300 : 20));
    if (random() % 3 == 0) {
      const char* formats[] = {"nf4", "float4_e2m1", "float8_e4m3fn"};
      levels = LevelsOf(CodeNumbers(EncodingWithoutScales(
                            Spec(formats[random() % std::size(formats)]),
                            *BlockLayout::Create({1}, {}), false)),
                        true);
    }
    // Down to one element, constant, and of few values.
    std::vector<double> values =
        Draw(kAllShapes[random() % std::size(kAllShapes)], 1 + random() % 150,
             &random);
    const double shift = random() % 3 == 0 ? 40 : 0;
    for (double& x : values) x += shift;
    if (random() % 10 == 0) std::fill(values.begin(), values.end(), values[0]);
    BlockElements elements;
    elements.Assign(ElementType::kFloat64,
                    reinterpret_cast<const uint8_t*>(values.data()),
                    static_cast<int64_t>(values.size()));
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    Range whole = {std::min(*low, 0.0), std::max(*high, 0.0)};
    if (whole.low == whole.high) continue;
    if (random() % 4 == 0 && *low < *high) whole = {*low, *high};
    const int steps = 1 + static_cast<int>(random() % 40);
    const int bins = 1 + static_cast<int>(random() % 400);
    const Candidates candidates = TryAll(values, levels, whole, steps, bins);
    const double least = *std::min_element(candidates.divergence.begin(),
                                           candidates.divergence.end());
    ForEachSimdTarget([&] {
      const Range got = *SearchEntropy(&elements, levels, whole, steps, bins);
      double taken = std::numeric_limits<double>::infinity();
      for (size_t i = 0; i < candidates.ranges.size(); ++i) {
        const Range& range = candidates.ranges[i];
        if (got.low != range.low || got.high != range.high) continue;
        taken = std::min(taken, candidates.divergence[i]);
      }
      ASSERT_LE(taken, least + 1e-9)
          << "round " << round << ": " << levels.size() << " levels, " << bins
          << " bins, " << steps << " steps, " << values.size() << " elements";
      narrower += got.high - got.low < whole.high - whole.low;
    });
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(narrower, rounds / 10);
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

}  // namespace
}  // namespace quantd::core
