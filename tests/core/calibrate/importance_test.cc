#include "core/calibrate/importance.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/calibrate/block_quantizer.h"
#include "core/calibrate/block_search.h"
#include "core/calibrate/calibrate.h"
#include "core/calibrate/encoding_spec.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/held_tensor.h"
#include "gtest/gtest.h"
#include "tests/core/calibrate/calibrate_test_util.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core::importance_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<double> DrawWeights(int64_t count, std::mt19937* random) {
  std::lognormal_distribution<double> log_normal(0, 2);
  std::vector<double> weights;
  for (int64_t i = 0; i < count; ++i) {
    weights.push_back((*random)() % 9 == 0 ? 0 : log_normal(*random));
  }
  return weights;
}

// A matrix and a weight for each index of an axis, with all that searches need.
struct Case {
  Case(const EncodingSpec& spec_in, const std::vector<int64_t>& shape,
       const std::vector<double>& values, int64_t axis,
       const std::vector<double>& weights,
       ElementType type = ElementType::kFloat32)
      : spec(*ResolveSpec(spec_in, shape)),
        sample(type, values, 0, shape, spec.block_size),
        held(sample.layout, type, sample.layout.element_count(),
             {sample.reals.data()}),
        importance(*Importance::Create(shape, axis, weights)) {}

  absl::StatusOr<Calibration> Run(ThreadPool* pool = nullptr,
                                  bool is_weighed = true) const {
    return Calibrate(spec, sample.layout, sample.statistics, {}, pool,
                     StopToken(), &held, {},
                     is_weighed ? &importance : nullptr);
  }

  const EncodingSpec spec;
  const Sample sample;
  const HeldTensor held;
  const Importance importance;
};

EncodingSpec Searching(const char* format, std::vector<int64_t> block_size,
                       CalibrationMethod method = CalibrationMethod::kMse) {
  EncodingSpec spec = Spec(format);
  spec.method = method;
  spec.block_size = std::move(block_size);
  return spec;
}

// The error of one block under a scale, by the definition.
double NaiveWeighedError(const Encoding& encoding, double scale,
                         double zero_point, const std::vector<double>& x,
                         const std::vector<double>& weights) {
  const std::vector<double> numbers = NaiveNumbers(encoding);
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    double least = kInfinity;
    for (const double number : numbers) {
      least = std::min(least, std::fabs(x[i] - scale * (number - zero_point)));
    }
    sum += weights[i] * least * least;
  }
  return sum;
}

TEST(ImportanceTest, GivesEachElementTheWeightOfItsIndex) {
  const std::vector<int64_t> shape = {3, 4, 5};
  for (int64_t axis = -3; axis < 3; ++axis) {
    SCOPED_TRACE(axis);
    const auto at = static_cast<size_t>(axis < 0 ? axis + 3 : axis);
    std::vector<float> weights;
    for (int64_t i = 0; i < shape[at]; ++i) {
      weights.push_back(static_cast<float>(i) + 0.5f);
    }
    const auto importance = Importance::Create(shape, axis, weights);
    ASSERT_TRUE(importance.ok()) << importance.status();
    const auto want = [&](int64_t element) {
      const int64_t index[] = {element / 20, element / 5 % 4, element % 5};
      return static_cast<double>(index[at]) + 0.5;
    };
    for (int64_t first = 0; first < 60; ++first) {
      for (int64_t count = 0; first + count <= 60; ++count) {
        std::vector<double> got(static_cast<size_t>(count) + 1, -1);
        importance->Copy(first, count, got.data());
        for (int64_t i = 0; i < count; ++i) ASSERT_EQ(got[i], want(first + i));
        ASSERT_EQ(got.back(), -1);
      }
    }
  }
}

// Of the last axis: the inputs of a convolution are unfolded.
TEST(ImportanceTest, GivesEachElementOfARowItsWeight) {
  std::vector<double> weights(20);
  std::iota(weights.begin(), weights.end(), 0.5);
  const auto importance = Importance::Create({3, 4, 5}, -1, weights);
  ASSERT_TRUE(importance.ok()) << importance.status();
  std::vector<double> got(60);
  importance->Copy(0, 60, got.data());
  for (size_t i = 0; i < 60; ++i) EXPECT_EQ(got[i], weights[i % 20]) << i;
  EXPECT_FALSE(Importance::Create({3, 4, 5}, 1, weights).ok());
  EXPECT_NE(Importance::Create({3, 4, 5}, -1, std::vector<double>(4, 1))
                .status()
                .message()
                .find("expected 5, one for each index of axis 2, or 20"),
            absl::string_view::npos);
}

TEST(ImportanceTest, RefusesWeightsThatAreNone) {
  const auto message = [](std::vector<double> weights, int64_t axis = 1) {
    const auto importance = Importance::Create({2, 3}, axis, weights);
    EXPECT_EQ(importance.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(importance.status().message());
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(message({1, 2}), "2 weights of importance, expected 3"));
  EXPECT_TRUE(has(message({1, 2, 3}, 2), "axis"));
  EXPECT_TRUE(has(message({1, 2, 3}, -3), "axis"));
  EXPECT_TRUE(has(message({1, -1, 3}), "weight 1"));
  EXPECT_TRUE(has(message({1, 2, kInfinity}), "weight 2"));
  EXPECT_TRUE(has(message({std::nan(""), 2, 3}), "weight 0"));
  // A vector has no rows, of which one number would do.
  EXPECT_FALSE(Importance::Create({3}, 0, std::vector<double>{1}).ok());
}

// Of all ranges of a fine grid none is better by .05%, over all blocks.
TEST(ImportanceTest, FindsTheLeastWeighedError) {
  std::mt19937 random(3);
  constexpr int64_t kRows = 24, kColumns = 64;
  for (const char* format : {"int4", "int3", "uint4", "nf4", "float4_e2m1"}) {
    for (const Shape shape : {Shape::kNormal, Shape::kStudent2}) {
      SCOPED_TRACE(absl::StrCat(format, " shape ", static_cast<int>(shape)));
      const auto weights = DrawWeights(kColumns, &random);
      const Case run(Searching(format, {1, 32}), {kRows, kColumns},
                     Draw(shape, kRows * kColumns, &random), -1, weights);
      const auto weighed = run.Run();
      const auto plain = run.Run(nullptr, false);
      ASSERT_TRUE(weighed.ok() && plain.ok()) << weighed.status();
      const Encoding& encoding = weighed->encoding;
      double got = 0, want = 0, without = 0;
      for (int64_t block = 0; block < kRows * 2; ++block) {
        const auto at = static_cast<size_t>(block * 32);
        const std::vector<double> x(run.sample.x.begin() + at,
                                    run.sample.x.begin() + at + 32);
        const std::vector<double> w(weights.begin() + at % kColumns,
                                    weights.begin() + at % kColumns + 32);
        const auto error = [&](const Encoding& of) {
          return NaiveWeighedError(
              of, of.scale[block],
              of.zero_point.empty() ? 0 : of.zero_point[block], x, w);
        };
        got += error(encoding);
        without += error(plain->encoding);
        double least = kInfinity;
        const double low = std::min(0.0, *std::min_element(x.begin(), x.end()));
        const double high =
            std::max(0.0, *std::max_element(x.begin(), x.end()));
        if (encoding.zero_point.empty()) {
          const std::vector<double> numbers = NaiveNumbers(encoding);
          const double unit =
              std::max(-low, high) / std::max(-numbers.front(), numbers.back());
          const double widest = NaiveWidest(run.spec);
          for (double k = 1; k <= 500 * widest; ++k) {
            const auto scale = static_cast<float>(unit * k / 500);
            least =
                std::min(least, NaiveWeighedError(encoding, scale, 0, x, w));
          }
        } else {
          for (double i = 0; i <= 40; ++i) {
            for (double j = 0; j <= 40; ++j) {
              if (i + j == 0) continue;
              const double scale =
                  (high * j - low * i) / 40 / (encoding.qmax - encoding.qmin);
              const double zero_point = std::clamp<double>(
                  encoding.qmin - std::nearbyint(low * i / 40 / scale),
                  encoding.qmin, encoding.qmax);
              least = std::min(
                  least, NaiveWeighedError(encoding, scale, zero_point, x, w));
            }
          }
        }
        want += least;
      }
      EXPECT_LE(got, 1.0005 * want);
      EXPECT_LT(got, 0.98 * without);
    }
  }
}

// Weights that are alike, and those without an element, change nothing.
TEST(ImportanceTest, ChangesNothingWhereAllCountTheSame) {
  std::mt19937 random(5);
  for (const char* format : {"int4", "uint8", "nf4", "nvfp4", "mxfp4_e2m1"}) {
    for (const double weight : {0.0, 1.0, 0x1p-700, 0x1p900}) {
      SCOPED_TRACE(absl::StrCat(format, " weight ", weight));
      const Case run(Searching(format, {1, 32}, CalibrationMethod::kSqnr),
                     {8, 96}, Draw(Shape::kStudent2, 8 * 96, &random), 1,
                     std::vector<double>(96, weight));
      const auto got = run.Run();
      const auto want = run.Run(nullptr, false);
      ASSERT_TRUE(got.ok() && want.ok());
      EXPECT_EQ(got->encoding.scale, want->encoding.scale);
      EXPECT_EQ(got->encoding.zero_point, want->encoding.zero_point);
    }
  }
}

// The same by the quantizer, on every target, with any number of threads, and
// with elements that are not finite: their weights go with them.
TEST(ImportanceTest, GivesTheSameScalesEverywhere) {
  std::mt19937 random(7);
  ThreadPool pool(3);
  const std::vector<int64_t> shape = {40, 70};
  for (const auto& [format, block_size, axis] :
       {std::tuple("int4", std::vector<int64_t>{1, 35}, int64_t{1}),
        std::tuple("uint8", std::vector<int64_t>{1, 0}, int64_t{-1}),
        std::tuple("int8", std::vector<int64_t>{0, 1}, int64_t{0}),
        std::tuple("nf4", std::vector<int64_t>{8, 7}, int64_t{1}),
        std::tuple("int16", std::vector<int64_t>{0, 0}, int64_t{0})}) {
    for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat64,
                                   ElementType::kFloat16}) {
      SCOPED_TRACE(absl::StrCat(format, " type ", static_cast<int>(type)));
      std::vector<double> values = Draw(Shape::kNormal, 40 * 70, &random);
      const double size = *std::max_element(values.begin(), values.end());
      for (double& x : values) x /= size;
      std::vector<double> others = values;
      for (size_t i = 3; i < values.size(); i += 50) {
        values[i] = i % 100 == 3 ? std::nan("") : kInfinity;
        // Zeros are codes of their own: they cost nothing.
        others[i] = 0;
      }
      const auto weights =
          DrawWeights(shape[axis < 0 ? axis + 2 : axis], &random);
      const EncodingSpec spec =
          Searching(format, block_size, CalibrationMethod::kMse);
      const Case run(spec, shape, values, axis, weights, type);
      const Case other(spec, shape, others, axis, weights, type);
      ASSERT_TRUE(SetSimdTarget("scalar").ok());
      const auto want = run.Run();
      ASSERT_TRUE(want.ok()) << want.status();
      ForEachSimdTarget([&] {
        const auto got = run.Run(&pool);
        ASSERT_TRUE(got.ok());
        EXPECT_EQ(got->encoding.scale, want->encoding.scale);
        EXPECT_EQ(got->encoding.zero_point, want->encoding.zero_point);
        ASSERT_TRUE(BlockQuantizer::Takes(run.spec, run.sample.layout, false));
        const auto quantizer =
            *BlockQuantizer::Create(run.spec, run.sample.layout, type,
                                    NanPolicy::kDefault, {}, &run.importance);
        ASSERT_TRUE(quantizer
                        ->Add(0, run.sample.layout.element_count(),
                              run.sample.reals.data(), nullptr, &pool)
                        .ok());
        EXPECT_EQ(quantizer->encoding().scale, want->encoding.scale);
        EXPECT_EQ(quantizer->encoding().zero_point, want->encoding.zero_point);
      });
      const auto without = other.Run();
      ASSERT_TRUE(without.ok());
      // But where two ranges are as good, up to rounding.
      size_t same = 0;
      const std::vector<float>& scales = want->encoding.scale;
      for (size_t i = 0; i < scales.size(); ++i) {
        same += without->encoding.scale[i] == scales[i];
      }
      EXPECT_GE(same, scales.size() * 9 / 10);
    }
  }
}

// Also of blocks that would be searched on a histogram without weights.
TEST(ImportanceTest, SearchesLongRowsOnTheirElements) {
  std::mt19937 random(11);
  constexpr int64_t kColumns = 20000;
  const auto weights = DrawWeights(kColumns, &random);
  const Case run(Searching("nf4", {1, 0}), {2, kColumns},
                 Draw(Shape::kNormal, 2 * kColumns, &random), 1, weights);
  ASSERT_FALSE(IsSearchedDirectly(run.spec, run.sample.layout));
  const auto got = run.Run();
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->mantissa_bits, 0);
  for (size_t row = 0; row < 2; ++row) {
    const auto begin = run.sample.x.begin() + row * kColumns;
    const std::vector<double> x(begin, begin + kColumns);
    double unit = 0;
    for (const double value : x) unit = std::max(unit, std::fabs(value));
    double least = kInfinity;
    for (int k = 40; k <= 120; ++k) {
      least = std::min(least, NaiveWeighedError(got->encoding, unit * k / 120,
                                                0, x, weights));
    }
    EXPECT_LE(NaiveWeighedError(got->encoding, got->encoding.scale[row], 0, x,
                                weights),
              1.0005 * least);
  }
}

TEST(ImportanceTest, RefusesWhatItCannotWeigh) {
  const auto refuses = [](const EncodingSpec& spec, std::vector<int64_t> shape,
                          const char* part) {
    const absl::Status status = CheckTakesImportance(
        spec, *BlockLayout::Create(shape, spec.block_size));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(status.message()).find(part), std::string::npos)
        << status;
  };
  refuses(Searching("int4", {1, 32}, CalibrationMethod::kMinMax), {2, 64},
          "mse, sqnr or best-of");
  refuses(Searching("int4", {1, 32}, CalibrationMethod::kEntropy), {2, 64},
          "mse, sqnr or best-of");
  refuses(Searching("int4", {0, 0}), {2, kMaxDirectElements},
          "expected at most 65536");
  // Statistics do not have the elements.
  std::mt19937 random(13);
  const Case run(Searching("int4", {1, 32}), {2, 64},
                 Draw(Shape::kNormal, 128, &random), 1,
                 std::vector<double>(64, 1));
  const Sample sample(ElementType::kFloat32, run.sample.x, 7, {2, 64}, {1, 32});
  const auto status =
      Calibrate(run.spec, sample.layout, sample.statistics, {}, nullptr,
                StopToken(), nullptr, {}, &run.importance)
          .status();
  EXPECT_NE(std::string(status.message()).find("quantize the tensor itself"),
            std::string::npos)
      << status;
}

}  // namespace
}  // namespace quantd::core::importance_test
