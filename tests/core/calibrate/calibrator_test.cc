// Calibrating in slices: the same bits wherever time cuts.

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "core/calibrate/calibrate.h"
#include "core/errors.h"
#include "core/parallel/thread_pool.h"
#include "core/parallel/time_slice.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/core/calibrate/calibrate_test_util.h"

namespace quantd::core {
namespace {

// Calibrates in slices that are over at once; counts them.
absl::StatusOr<Calibration> CalibrateInSlices(const EncodingSpec& spec,
                                              const Sample& sample,
                                              ThreadPool* pool, int* slices) {
  auto calibrator =
      Calibrator::Create(spec, sample.layout, sample.statistics, {});
  if (!calibrator.ok()) return calibrator.status();
  for (*slices = 1;; ++*slices) {
    const auto done = (*calibrator)->Run(TimeSlice(absl::ZeroDuration()), pool);
    if (!done.ok()) return done.status();
    if (*done) return (*calibrator)->Take();
  }
}

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

TEST(CalibratorTest, GivesTheSameBitsInSlicesOfAnyLength) {
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
    for (ThreadPool* threads : {static_cast<ThreadPool*>(nullptr), &pool}) {
      int slices = 0;
      const auto got = CalibrateInSlices(*resolved, sample, threads, &slices);
      ASSERT_TRUE(got.ok()) << got.status();
      ExpectSame(*got, *want);
      // A batch of 8 in each thread, and the prediction on top.
      EXPECT_GE(slices, 200 / 8 / 4);
    }
  }
}

TEST(CalibratorTest, PausesWithinOneSearch) {
  const Sample sample(ElementType::kFloat32, Values(1 << 16), 7);
  ThreadPool pool(2);
  for (const auto method : {CalibrationMethod::kMse, CalibrationMethod::kSqnr,
                            CalibrationMethod::kEntropy}) {
    SCOPED_TRACE(static_cast<int>(method));
    EncodingSpec spec = Spec("int16", Symmetry::kAsymmetric);
    spec.method = method;
    spec.search_steps = 100;
    // More levels than bins would end the search at once.
    if (method == CalibrationMethod::kEntropy) {
      spec.format = FindFormatByName("int4")->format;
    } else {
      spec.search_steps = 12;
    }
    const auto want =
        Calibrate(spec, sample.layout, sample.statistics, {}, nullptr);
    ASSERT_TRUE(want.ok()) << want.status();
    int slices = 0;
    const auto got = CalibrateInSlices(spec, sample, &pool, &slices);
    ASSERT_TRUE(got.ok()) << got.status();
    ExpectSame(*got, *want);
    EXPECT_GE(slices, 50);
  }
}

TEST(CalibratorTest, NamesTheFirstScaleIndexAtFaultInSlicesToo) {
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
    int slices = 0;
    const auto got = CalibrateInSlices(spec, sample, &pool, &slices);
    ASSERT_THAT(std::string(got.status().message()),
                testing::HasSubstr("scale 300 "));
    // Nothing is taken after it.
    EXPECT_LT(slices, 60);
  }
}

}  // namespace
}  // namespace quantd::core
