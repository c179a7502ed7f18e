// Calibrating in threads, until it is stopped, and what is held.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/calibrate/calibrate.h"
#include "core/calibrate/entropy.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/scale_indices.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/held_tensor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/core/calibrate/calibrate_test_util.h"

namespace quantd::core::calibrator_test {
namespace {

void ExpectSame(const Calibration& got, const Calibration& want) {
  EXPECT_EQ(got.encoding, want.encoding);
  ASSERT_EQ(got.prediction.has_value(), want.prediction.has_value());
  if (!got.prediction.has_value()) return;
  EXPECT_EQ(got.prediction->count, want.prediction->count);
  EXPECT_EQ(got.prediction->squared_error, want.prediction->squared_error);
  EXPECT_EQ(got.prediction->squared_error_low,
            want.prediction->squared_error_low);
  EXPECT_EQ(got.prediction->squared_error_high,
            want.prediction->squared_error_high);
  EXPECT_EQ(got.prediction->signal, want.prediction->signal);
}

std::vector<double> Values(int64_t count) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal(0, 1);
  std::vector<double> values;
  // Every fifth row has nothing but zeros.
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(i / 32 % 5 == 0 ? 0 : normal(random));
  }
  return values;
}

TEST(CalibratorTest, GivesTheSameBitsOnAnyNumberOfThreads) {
  const std::vector<int64_t> block_size = {1, 32};
  const Sample sample(ElementType::kFloat32, Values(100 * 64), 5, {100, 64},
                      block_size);
  EncodingSpec best = Spec("int4", Symmetry::kAsymmetric);
  best.method = CalibrationMethod::kBestOf;
  best.methods = {CalibrationMethod::kMinMax, CalibrationMethod::kMse,
                  CalibrationMethod::kEntropy, CalibrationMethod::kPercentile};
  std::vector<EncodingSpec> specs = {best};
  for (const auto method :
       {CalibrationMethod::kMinMax, CalibrationMethod::kPercentile,
        CalibrationMethod::kMse, CalibrationMethod::kSqnr,
        CalibrationMethod::kEntropy}) {
    for (const char* format : {"int8", "uint4", "nvfp4", "lpbq", "nf4",
                               "float8_e4m3fn", "mxfp4_e2m1"}) {
      specs.push_back(Spec(format));
      specs.back().method = method;
      specs.back().search_steps = 24;
    }
  }
  ThreadPool pool(3);
  for (EncodingSpec& spec : specs) {
    SCOPED_TRACE(static_cast<int>(spec.format));
    SCOPED_TRACE(static_cast<int>(spec.method));
    spec.block_size = block_size;
    const auto resolved = ResolveSpec(spec, {100, 64});
    ASSERT_TRUE(resolved.ok()) << resolved.status();
    const auto want =
        Calibrate(*resolved, sample.layout, sample.statistics, {}, nullptr);
    ASSERT_TRUE(want.ok()) << want.status();
    const auto got =
        Calibrate(*resolved, sample.layout, sample.statistics, {}, &pool);
    ASSERT_TRUE(got.ok()) << got.status();
    ExpectSame(*got, *want);
  }
}

// Stops a calibration at several of its looks at the stop token. It must look
// at least `least_looks` times on the whole, so that it works little between
// two looks. Once it is stopped it must end within few more looks.
void ExpectStopsAnywhere(const EncodingSpec& spec, const Sample& sample,
                         ThreadPool* pool, int64_t least_looks,
                         const HeldTensor* held = nullptr) {
  std::atomic<int64_t> looks_left{0};
  const auto calibrate = [&](int64_t looks) {
    looks_left = looks;
    return Calibrate(spec, sample.layout, sample.statistics, {}, pool,
                     StopToken::AfterLooks(&looks_left), held)
        .status();
  };
  constexpr int64_t kNever = int64_t{1} << 40;
  const absl::Status whole = calibrate(kNever);
  ASSERT_TRUE(whole.ok()) << whole;
  const int64_t all_looks = kNever - looks_left;
  EXPECT_GE(all_looks, least_looks);
  // Each thread may begin with some more scales, and looks some times for each.
  const int64_t most_after = 100 * LaneCount(pool);
  for (int64_t looks = all_looks / 2; looks > 0; looks /= 8) {
    SCOPED_TRACE(looks);
    const absl::Status stopped = calibrate(looks);
    EXPECT_TRUE(absl::IsCancelled(stopped)) << stopped;
    EXPECT_LE(-looks_left, most_after);
  }
}

TEST(CalibratorTest, StopsWithinOneSearch) {
  const Sample sample(ElementType::kFloat32, Values(1 << 18), 10);
  ThreadPool pool(2);
  EncodingSpec spec = Spec("int16", Symmetry::kAsymmetric);
  spec.search_steps = 64;
  // There is one scale, for which 64 * 64 ranges are tried.
  constexpr int64_t kLeastLooks = 1000;
  for (const auto method :
       {CalibrationMethod::kMse, CalibrationMethod::kSqnr}) {
    SCOPED_TRACE(static_cast<int>(method));
    spec.method = method;
    ExpectStopsAnywhere(spec, sample, &pool, kLeastLooks);
  }
  spec.methods = {CalibrationMethod::kMinMax, CalibrationMethod::kMse};
  spec.method = CalibrationMethod::kBestOf;
  ExpectStopsAnywhere(spec, sample, &pool, kLeastLooks);
}

TEST(CalibratorTest, StopsWithinOneSearchForEntropy) {
  const Sample sample(ElementType::kFloat32, Values(1 << 12), 7);
  const EntropyLevels levels{8, {}, false};
  const std::atomic<bool> stopped{true};
  EXPECT_TRUE(
      absl::IsCancelled(SearchEntropy(sample.statistics.histograms()[0], levels,
                                      Range{-10, 10}, 0, 0, StopToken(&stopped))
                            .status()));
}

TEST(CalibratorTest, StopsBetweenScaleIndices) {
  const std::vector<int64_t> block_size = {1, 64};
  constexpr int64_t kScales = 1 << 14;
  const std::vector<int64_t> shape = {kScales, 64};
  const Sample sample(ElementType::kFloat32, Values(shape[0] * shape[1]), 0,
                      shape, block_size);
  const HeldTensor held(sample.layout, sample.type, shape[0] * shape[1],
                        {sample.reals.data()});
  EncodingSpec spec = Spec("uint8", Symmetry::kAsymmetric);
  spec.block_size = block_size;
  spec.method = CalibrationMethod::kMse;
  ThreadPool pool(2);
  ExpectStopsAnywhere(spec, sample, &pool, /*least_looks=*/kScales, &held);
  ExpectStopsAnywhere(spec, sample, nullptr, /*least_looks=*/kScales, &held);
}

TEST(CalibratorTest, GivesNothingWhenItWasStoppedBefore) {
  const Sample sample(ElementType::kFloat32, Values(1000), 7);
  const std::atomic<bool> stopped{true};
  for (const char* format : {"int8", "nvfp4", "mxfp4_e2m1"}) {
    EXPECT_TRUE(absl::IsCancelled(Calibrate(Spec(format), sample.layout,
                                            sample.statistics, {}, nullptr,
                                            StopToken(&stopped))
                                      .status()));
  }
}

TEST(CalibratorTest, NamesTheFirstScaleIndexAtFaultOnAnyThreads) {
  EncodingSpec spec = Spec("int4");
  spec.block_size = {16};
  spec.method = CalibrationMethod::kMse;
  spec.scale_type = ScaleType::kFloat16;
  std::vector<double> values(16 * 1000, 1.0);
  for (int64_t block = 300; block < 1000; ++block) {
    for (int64_t i = 0; i < 16; ++i) values[block * 16 + i] = 1e20;
  }
  const Sample sample(ElementType::kFloat32, values, 5, {16 * 1000},
                      spec.block_size);
  ThreadPool pool(3);
  for (int round = 0; round < 20; ++round) {
    const auto got =
        Calibrate(spec, sample.layout, sample.statistics, {}, &pool);
    ASSERT_THAT(std::string(got.status().message()),
                ::testing::HasSubstr("scale 300 "));
  }
}

// The tensor of a sample in two pieces.
HeldTensor HeldIn(const Sample& sample) {
  const int64_t half = sample.layout.element_count() / 2 + 1;
  return HeldTensor(
      sample.layout, sample.type, half,
      {sample.reals.data(),
       sample.reals.data() + half * ElementSizeBytes(sample.type)});
}

// Of blocks that are too large to be searched directly.
TEST(CalibratorTest, AHeldTensorIsAsGoodAsItsHistograms) {
  ThreadPool pool(3);
  const struct {
    std::vector<int64_t> shape;
    std::vector<int64_t> block_size;
  } layouts[] = {
      {{3, 66000}, {1, 0}}, {{66000, 3}, {0, 1}}, {{4, 66000}, {2, 33000}}};
  for (const auto& [shape, block_size] : layouts) {
    for (const int bits : {0, 3, 10}) {
      const Sample fine(ElementType::kBfloat16, Values(shape[0] * shape[1]),
                        bits == 0 ? 7 : bits, shape, block_size);
      const Sample none(ElementType::kBfloat16, Values(shape[0] * shape[1]), 0,
                        shape, block_size);
      const HeldTensor held = HeldIn(none);
      for (const auto method :
           {CalibrationMethod::kMinMax, CalibrationMethod::kPercentile,
            CalibrationMethod::kMse, CalibrationMethod::kEntropy}) {
        for (const char* format : {"int8", "uint4", "nvfp4", "lpbq"}) {
          EncodingSpec spec = Spec(format);
          spec.method = method;
          spec.search_steps = 12;
          spec.block_size = block_size;
          spec.mantissa_bits = bits;
          const auto want =
              Calibrate(spec, fine.layout, fine.statistics, {}, nullptr);
          const auto got = Calibrate(spec, none.layout, none.statistics, {},
                                     &pool, StopToken(), &held);
          ASSERT_TRUE(want.ok() && got.ok()) << got.status();
          EXPECT_EQ(got->encoding, want->encoding);
          EXPECT_EQ(got->mantissa_bits, want->mantissa_bits);
          EXPECT_EQ(got->mantissa_bits, method == CalibrationMethod::kMinMax ? 0
                                        : bits == 0                          ? 7
                                                    : bits);
          EXPECT_FALSE(got->prediction.has_value());
          EXPECT_EQ(want->prediction->mantissa_bits, bits == 0 ? 7 : bits);
        }
      }
    }
  }
}

// Channels of 1,000 elements, by how many channels there are.
TEST(CalibratorTest, AHeldTensorIsAsGoodWithManyScalesAsWithFew) {
  std::mt19937 random(5);
  for (const int64_t channels : {256, 257, 1024}) {
    SCOPED_TRACE(channels);
    const int64_t count = 1000;
    const Sample sample(ElementType::kFloat32,
                        Draw(Shape::kStudent2, channels * count, &random), 0,
                        {channels, count}, {1, 0});
    const HeldTensor held = HeldIn(sample);
    EncodingSpec spec = Spec("int8");
    spec.block_size = {1, 0};
    spec.method = CalibrationMethod::kPercentile;
    spec.tail_fraction = 0.01;
    const auto percentile = Calibrate(spec, sample.layout, sample.statistics,
                                      {}, nullptr, StopToken(), &held);
    ASSERT_TRUE(percentile.ok()) << percentile.status();
    spec = Spec("int4");
    spec.block_size = {1, 0};
    spec.method = CalibrationMethod::kMse;
    const auto mse = Calibrate(spec, sample.layout, sample.statistics, {},
                               nullptr, StopToken(), &held);
    ASSERT_TRUE(mse.ok()) << mse.status();
    for (int64_t i = 0; i < channels; i += 32) {
      std::vector<double> x(sample.x.begin() + i * count,
                            sample.x.begin() + (i + 1) * count);
      std::vector<double> magnitudes;
      for (const double value : x) magnitudes.push_back(std::fabs(value));
      std::sort(magnitudes.begin(), magnitudes.end());
      const double position = 0.99 * (count - 1);
      const auto rank = static_cast<size_t>(position);
      const double quantile =
          magnitudes[rank] + (magnitudes[rank + 1] - magnitudes[rank]) *
                                 (position - static_cast<double>(rank));
      EXPECT_NEAR(127 * percentile->encoding.scale[i], quantile,
                  0.004 * quantile);
      // Beside the ranges that the search tries, on the elements themselves.
      const auto error = [&x](double scale) {
        double sum = 0;
        for (const double value : x) {
          const double q = std::clamp(std::nearbyint(value / scale), -7.0, 7.0);
          sum += (q * scale - value) * (q * scale - value);
        }
        return sum;
      };
      double least = std::numeric_limits<double>::infinity();
      for (int k = 1; k <= 1000; ++k) {
        least = std::min(least, error(magnitudes.back() / 7 * k / 1000));
      }
      EXPECT_LT(error(mse->encoding.scale[i]), 1.01 * least);
    }
  }
}

TEST(CalibratorTest, RefusesToSearchFinerThanTheStatisticsAre) {
  const Sample sample(ElementType::kFloat32, Values(1000), 5);
  EncodingSpec spec = Spec("int8");
  spec.mantissa_bits = 6;
  EXPECT_TRUE(
      Calibrate(spec, sample.layout, sample.statistics, {}, nullptr).ok());
  spec.method = CalibrationMethod::kMse;
  const auto refused =
      Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
  EXPECT_EQ(ErrorReason(refused.status()), "METHOD_INVALID");
  spec.mantissa_bits = 3;
  const auto taken =
      Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(taken->mantissa_bits, 5);
  for (const int bits : {1, 11, -1}) {
    spec.mantissa_bits = bits;
    EXPECT_EQ(ErrorReason(ValidateSpec(spec)), "METHOD_INVALID") << bits;
  }
}

}  // namespace
}  // namespace quantd::core::calibrator_test
