#include "core/calibrate/range_search.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "core/calibrate/calibrate.h"
#include "core/calibrate/prediction.h"
#include "core/evaluate/evaluate.h"
#include "gtest/gtest.h"
#include "tests/core/calibrate/calibrate_test_util.h"

namespace quantd::core::range_search_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The encoding of a range by the formulas, without core's code.
Encoding NaiveEncoding(const EncodingSpec& spec, double low, double high) {
  const FormatInfo& format = *FindFormat(spec.format);
  Encoding encoding;
  encoding.format = spec.format;
  encoding.qmin = format.qmin;
  encoding.qmax = format.qmax;
  const bool is_asymmetric =
      spec.symmetry == Symmetry::kAsymmetric ||
      (spec.symmetry == Symmetry::kDefault && !format.is_signed &&
       format.kind == CodeKind::kInteger);
  const double least = std::numeric_limits<float>::min();
  if (is_asymmetric) {
    const float scale = static_cast<float>(
        std::max(least, (high - low) / (format.qmax - format.qmin)));
    encoding.scale = {scale};
    encoding.zero_point = {static_cast<int32_t>(std::clamp<double>(
        format.qmin - NaiveRound(low / scale), format.qmin, format.qmax))};
    return encoding;
  }
  if (format.kind == CodeKind::kInteger) encoding.qmin = -format.qmax;
  encoding.scale = {static_cast<float>(std::max(
      least, std::max(std::fabs(low), std::fabs(high)) / format.max_value))};
  return encoding;
}

// By how much sums of clipped elements may be off: what the bins at the ends of
// the numbers could have at most.
double ClippedDoubt(const Sample& sample, const Encoding& encoding) {
  const Distribution distribution(sample.statistics.histograms()[0],
                                  sample.statistics.overall());
  const CodeNumbers numbers(encoding);
  const double scale = encoding.scale[0];
  const int32_t zero_point =
      encoding.zero_point.empty() ? 0 : encoding.zero_point[0];
  double doubt = 0;
  for (const Mass& mass : distribution.masses()) {
    for (const auto& [clip, number] :
         {std::pair{numbers.clip_low, numbers.lowest()},
          std::pair{numbers.clip_high, numbers.highest()}}) {
      const double at = (clip - zero_point) * scale;
      const double end = (number - zero_point) * scale;
      const double rounding = 1e-6 * std::fabs(at);
      if (mass.low > at + rounding || mass.high < at - rounding) continue;
      const double furthest =
          std::max(std::fabs(mass.low - end), std::fabs(mass.high - end));
      doubt += mass.count * furthest * furthest;
    }
  }
  return doubt;
}

struct Judged {
  double truth;
  // Above and below the expected error, for certain.
  double above;
  double below;
};

Judged Judge(const Sample& sample, const Encoding& encoding, double gamma) {
  double squared = NaiveSquaredError(sample, encoding).squared;
  if (FindFormat(encoding.format)->kind == CodeKind::kInteger) {
    Evaluator evaluator(encoding, sample.layout, sample.type, {});
    evaluator.Update(0, sample.layout.element_count(), sample.reals.data(),
                     nullptr);
    squared = evaluator.overall().squared_error;
  }
  const Prediction prediction = *Predict(encoding, sample.statistics);
  Judged judged = {squared,
                   prediction.squared_error_high - prediction.squared_error,
                   prediction.squared_error - prediction.squared_error_low};
  if (gamma != 1) {
    judged.truth += (gamma - 1) * NaiveSquaredError(sample, encoding).clipped;
    const double doubt = std::fabs(gamma - 1) * ClippedDoubt(sample, encoding);
    judged.above += doubt;
    judged.below += doubt;
  }
  return judged;
}

TEST(RangeSearchTest, IsNoWorseThanTryingAllRangesOnTheData) {
  std::mt19937 random(1);
  const int rounds = Rounds(1200);
  double most_loss = 0;
  for (int round = 0; round < rounds; ++round) {
    const char* const formats[] = {"int4",  "int8",          "uint4",
                                   "uint8", "float4_e2m1",   "int3",
                                   "int6",  "float8_e4m3fn", "nf4"};
    EncodingSpec spec = Spec(formats[round % std::size(formats)]);
    const FormatInfo& format = *FindFormat(spec.format);
    if (format.kind == CodeKind::kInteger && format.is_signed &&
        random() % 2 == 0) {
      spec.symmetry = Symmetry::kAsymmetric;
    }
    spec.method =
        random() % 2 ? CalibrationMethod::kMse : CalibrationMethod::kSqnr;
    spec.gamma = random() % 3 ? 3 : 0.5;
    const double gamma =
        spec.method == CalibrationMethod::kSqnr ? spec.gamma : 1;
    const bool has_two_ends = EffectiveSymmetry(spec) == Symmetry::kAsymmetric;
    spec.search_steps = has_two_ends ? 2 + random() % 6 : 2 + random() % 40;
    spec.block_size = {0};
    const Shape shape = kAllShapes[random() % std::size(kAllShapes)];
    const int64_t count = 1 + random() % (1 << (1 + random() % 11));
    const int mantissa_bits = 3 + 2 * static_cast<int>(random() % 3);
    const Sample sample(ElementType::kFloat32, Draw(shape, count, &random),
                        mantissa_bits);
    SCOPED_TRACE(absl::StrCat("round ", round, " ", format.name, " shape ",
                              static_cast<int>(shape), " count ", count, " m ",
                              mantissa_bits, " gamma ", gamma));
    const auto calibration =
        Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
    ASSERT_TRUE(calibration.ok()) << calibration.status();
    const Extremes extremes = sample.statistics.overall();
    if (extremes.min == 0 && extremes.max == 0) continue;

    const double low = std::min(extremes.min, 0.0);
    const double high = std::max(extremes.max, 0.0);
    const double abs_max = std::max(-low, high);
    Judged best = {kInfinity, 0, 0};
    const int steps = spec.search_steps;
    const int most = static_cast<int>(steps * NaiveWidest(spec));
    for (int i = 1; i <= most; ++i) {
      for (int j = has_two_ends ? 1 : steps; j <= steps; ++j) {
        const Encoding candidate =
            has_two_ends
                ? NaiveEncoding(spec, low * i / steps, high * j / steps)
                : NaiveEncoding(spec, -abs_max * i / steps,
                                abs_max * i / steps);
        const Judged judged = Judge(sample, candidate, gamma);
        if (judged.truth < best.truth) best = judged;
      }
    }
    const Judged chosen = Judge(sample, calibration->encoding, gamma);
    ASSERT_LE(chosen.truth,
              best.truth + chosen.above + best.below + 1e-9 * best.truth);
    most_loss = std::max(most_loss, chosen.truth / best.truth - 1);
  }
  std::printf("at most %.2g%% above the best candidate\n", 100 * most_loss);
}

TEST(RangeSearchTest, RefinesBetweenTheNeighboursOfTheBest) {
  std::mt19937 random(2);
  const Sample sample(ElementType::kFloat32,
                      Draw(Shape::kNormal, 20000, &random), 7);
  constexpr int kSteps = 4;
  for (const Symmetry symmetry : {Symmetry::kStrict, Symmetry::kAsymmetric}) {
    EncodingSpec spec = Spec("int4", symmetry);
    spec.method = CalibrationMethod::kMse;
    spec.search_steps = kSteps;
    const auto refined =
        Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
    ASSERT_TRUE(refined.ok());
    double best = kInfinity;
    const Extremes whole = sample.statistics.overall();
    for (int i = 1; i <= kSteps; ++i) {
      for (int j = 1; j <= kSteps; ++j) {
        const Encoding candidate =
            NaiveEncoding(spec, whole.min * i / kSteps, whole.max * j / kSteps);
        best = std::min(best, NaiveSquaredError(sample, candidate).squared);
      }
    }
    EXPECT_LT(NaiveSquaredError(sample, refined->encoding).squared,
              0.99 * best);
  }
}

TEST(RangeSearchTest, CutsOutliersOffThatMinMaxKeeps) {
  std::mt19937 random(3);
  std::vector<double> values = Draw(Shape::kNormal, 50000, &random);
  double size = 0;
  for (const double x : values) size = std::max(size, std::fabs(x));
  values[7] = 20 * size;
  const Sample sample(ElementType::kFloat32, values, 7);
  double before = 0;
  for (const CalibrationMethod method :
       {CalibrationMethod::kMinMax, CalibrationMethod::kMse}) {
    EncodingSpec spec = Spec("int4");
    spec.method = method;
    const auto calibration =
        Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
    ASSERT_TRUE(calibration.ok());
    const double error =
        NaiveSquaredError(sample, calibration->encoding).squared;
    if (method == CalibrationMethod::kMse) {
      EXPECT_LT(error, before / 2);
    }
    before = error;
  }
}

TEST(RangeSearchTest, TriesPowersOfTwoAloneWhereScalesAre) {
  std::mt19937 random(4);
  for (int round = 0; round < 50; ++round) {
    const Sample sample(ElementType::kFloat32,
                        Draw(kAllShapes[round % 8], 500, &random), 7);
    if (sample.statistics.overall().max == 0) continue;
    EncodingSpec spec = Spec("int4");
    spec.power_of_two_scale = true;
    spec.method = CalibrationMethod::kMse;
    const auto searched =
        Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
    spec.method = CalibrationMethod::kMinMax;
    const auto whole =
        Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
    ASSERT_TRUE(searched.ok() && whole.ok());
    int exponent;
    EXPECT_EQ(std::frexp(searched->encoding.scale[0], &exponent), 0.5f);
    double best = kInfinity;
    Encoding candidate = whole->encoding;
    Judged judged{};
    for (int k = 0; k < 8; ++k) {
      candidate.scale[0] = std::ldexp(whole->encoding.scale[0], -k);
      const Judged now = Judge(sample, candidate, 1);
      if (now.truth < best) {
        best = now.truth;
        judged = now;
      }
    }
    const Judged chosen = Judge(sample, searched->encoding, 1);
    EXPECT_LE(chosen.truth, best + chosen.above + judged.below + 1e-9 * best);
  }
}

TEST(RangeSearchTest, LeavesZeroOutWhereTheSpecDoes) {
  std::mt19937 random(5);
  std::normal_distribution<double> normal(0, 1);
  std::vector<double> values;
  for (int i = 0; i < 5000; ++i) values.push_back(50 + normal(random));
  values.push_back(80);
  const Sample sample(ElementType::kFloat32, values, 10);
  EncodingSpec spec = Spec("uint8");
  spec.exclude_zero = true;
  spec.method = CalibrationMethod::kMse;
  const auto searched =
      Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
  spec.method = CalibrationMethod::kMinMax;
  const auto whole =
      Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
  ASSERT_TRUE(searched.ok() && whole.ok());
  EXPECT_LT(searched->encoding.zero_point[0], 0);
  EXPECT_LE(NaiveSquaredError(sample, searched->encoding).squared,
            NaiveSquaredError(sample, whole->encoding).squared);
}

TEST(RangeSearchTest, BestOfIsNoWorseThanEachOfItsMethods) {
  std::mt19937 random(6);
  for (int round = 0; round < 80; ++round) {
    const Sample sample(ElementType::kFloat32,
                        Draw(kAllShapes[round % 8], 64 * 20, &random), 5,
                        {20, 64}, {1, 0});
    EncodingSpec spec = Spec(round % 2 ? "int4" : "uint8");
    spec.block_size = {1, 0};
    spec.objective = round % 3 ? Objective::kMse : Objective::kSqnr;
    spec.methods = {CalibrationMethod::kMinMax, CalibrationMethod::kPercentile,
                    CalibrationMethod::kEntropy, CalibrationMethod::kSqnr};
    spec.tail_fraction = 0.05;
    const std::vector<CalibrationMethod> methods = spec.methods;
    spec.method = CalibrationMethod::kBestOf;
    const auto best =
        Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
    ASSERT_TRUE(best.ok()) << best.status();
    spec.methods.clear();
    std::vector<Encoding> encodings;
    for (const CalibrationMethod method : methods) {
      spec.method = method;
      const auto one =
          Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
      ASSERT_TRUE(one.ok());
      if (spec.objective == Objective::kMse) {
        EXPECT_LE(best->prediction->squared_error,
                  one->prediction->squared_error * (1 + 1e-9));
      }
      encodings.push_back(one->encoding);
    }
    // Each scale index takes that of one of the methods.
    for (size_t i = 0; i < 20; ++i) {
      EXPECT_TRUE(std::any_of(
          encodings.begin(), encodings.end(), [&](const Encoding& encoding) {
            return encoding.scale[i] == best->encoding.scale[i];
          }));
    }
  }
}

TEST(RangeSearchTest, TakesARangeWhereEveryErrorIsBeyondFloat64) {
  // The rule FLOOR clips -3.9 under all of its scales.
  EncodingSpec spec = Spec("mxfp4_e2m1");
  spec.method = CalibrationMethod::kSqnr;
  spec.gamma = std::numeric_limits<double>::max();
  for (const double size : {1.0, 0x1p100}) {
    std::vector<double> x = {1, 3, -1.5, 0.25, -3.9};
    for (double& value : x) value *= size;
    const Sample sample(ElementType::kFloat32, x, 3);
    const auto calibration =
        Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
    EXPECT_TRUE(calibration.ok()) << calibration.status();
  }
}

}  // namespace
}  // namespace quantd::core::range_search_test
