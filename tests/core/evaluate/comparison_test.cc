#include "core/evaluate/comparison.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "tests/core/evaluate/evaluate_test_util.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core::comparison_test {
namespace {

// `reference` and `test` element by element.
std::vector<uint8_t> Interleave(ElementType type,
                                const std::vector<uint8_t>& reference,
                                const std::vector<uint8_t>& test) {
  const int64_t size = ElementSizeBytes(type);
  std::vector<uint8_t> pairs;
  for (size_t at = 0; at < reference.size(); at += size) {
    pairs.insert(pairs.end(), &reference[at], &reference[at] + size);
    pairs.insert(pairs.end(), &test[at], &test[at] + size);
  }
  return pairs;
}

// Leaves of 1,024, element k in lane k mod 16, the tree, leaves in order.
ErrorSums Naive(ElementType type, const std::vector<uint8_t>& pairs) {
  const int64_t count = pairs.size() / ElementSizeBytes(type) / 2;
  ErrorSums sums;
  for (int64_t leaf = 0; leaf < count; leaf += 1024) {
    double lanes[6][16] = {};
    for (int64_t i = leaf; i < std::min(count, leaf + 1024); ++i) {
      const double x = NaiveReal(type, pairs.data(), 2 * i);
      const double y = NaiveReal(type, pairs.data(), 2 * i + 1);
      if (!std::isfinite(x) || !std::isfinite(y)) {
        ++sums.non_finite;
        continue;
      }
      const double error = std::fabs(y - x);
      const double relative = NaiveRelative(type, x, error);
      const double terms[6] = {error * error, error, relative,
                               x * x,         y * y, x * y};
      for (int t = 0; t < 6; ++t) lanes[t][(i - leaf) % 16] += terms[t];
      ++sums.count;
      sums.zero_flushed += x != 0 && y == 0;
      sums.max_absolute_error = std::max(sums.max_absolute_error, error);
      sums.max_relative_error = std::max(sums.max_relative_error, relative);
    }
    double* totals[6] = {&sums.squared_error,  &sums.absolute_error,
                         &sums.relative_error, &sums.signal,
                         &sums.reconstructed,  &sums.product};
    for (int t = 0; t < 6; ++t) {
      const double* l = lanes[t];
      double pair[8], quad[4];
      for (int i = 0; i < 8; ++i) pair[i] = l[i] + l[i + 8];
      for (int i = 0; i < 4; ++i) quad[i] = pair[i] + pair[i + 4];
      *totals[t] += (quad[0] + quad[2]) + (quad[1] + quad[3]);
    }
  }
  return sums;
}

// Finite float64 whose squares are finite.
std::vector<uint8_t> Reals(ElementType type, int64_t count, uint32_t seed) {
  auto reals = MakeReals(type, count, 0.05, true, seed);
  for (int64_t i = 0; i < count; ++i) {
    if (NaiveReal(type, reals.data(), i) == 1e300) {
      StoreReal(type, 1, reals.data(), i);
    }
  }
  return reals;
}

TEST(ComparisonTest, EqualsTheDefinitionToTheLastBit) {
  ThreadPool pool(2);
  for (const ElementType type : kAllElementTypes) {
    SCOPED_TRACE(ElementTypeName(type));
    for (const int64_t count : {0, 1, 3, 17, 1023, 1024, 1025, 200007}) {
      SCOPED_TRACE(count);
      const auto pairs =
          Interleave(type, Reals(type, count, 1), Reals(type, count, 2));
      const ErrorSums want = Naive(type, pairs);
      ForEachSimdTarget([&] {
        for (ThreadPool* p : {static_cast<ThreadPool*>(nullptr), &pool}) {
          for (const int64_t chunk : {count + 1, int64_t{1024 * 30}}) {
            for (const ErrorSumSet sums : kAllSumSets) {
              Comparison comparison(type, false, sums);
              for (int64_t first = 0; first < count; first += chunk) {
                comparison.Update(
                    first, std::min(chunk, count - first),
                    pairs.data() + 2 * first * ElementSizeBytes(type), p);
              }
              ExpectSame(comparison.overall(), want, sums);
            }
          }
        }
      });
      if (HasFailure()) return;
    }
  }
}

TEST(ComparisonTest, EqualsTheEvaluatorOnTheSamePairs) {
  const BlockLayout layout = *BlockLayout::Create({30000}, {});
  Encoding encoding =
      MakeEncoding(*FindFormatByName("int8"), layout, 0.05, false, 1);
  encoding.scale = {0.0625f};
  const auto reals = MakeReals(ElementType::kFloat32, 30000, 0.05, false, 1);
  std::vector<uint8_t> restored(reals.size());
  for (int64_t i = 0; i < 30000; ++i) {
    const double x = NaiveReal(ElementType::kFloat32, reals.data(), i);
    const int32_t code =
        NaiveCode(ElementType::kFloat32, x, 0.0625f, 0, -128, 127);
    StoreReal(ElementType::kFloat32, code * 0.0625, restored.data(), i);
  }
  Evaluator evaluator(encoding, layout, ElementType::kFloat32,
                      EvaluateOptions{false, true});
  evaluator.Update(0, 30000, reals.data(), nullptr);
  Comparison comparison(ElementType::kFloat32, true);
  comparison.Update(0, 30000,
                    Interleave(ElementType::kFloat32, reals, restored).data(),
                    nullptr);
  ErrorSums want = evaluator.overall();
  EXPECT_GT(want.clipped_low, 0);
  want.clipped_low = want.clipped_high = 0;
  ExpectSame(comparison.overall(), want);
  EXPECT_EQ(comparison.distribution().kl_divergence,
            evaluator.distribution().kl_divergence);
  EXPECT_EQ(comparison.distribution().zero, evaluator.distribution().zero);
  EXPECT_EQ(comparison.distribution().count, evaluator.distribution().count);
}

TEST(ComparisonTest, APairWithANonFiniteElementIsLeftOut) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const float pairs[] = {1, 2, nan, 1, 1, infinity, nan, nan, 4, 4};
  ForEachSimdTarget([&] {
    Comparison comparison(ElementType::kFloat32, true);
    comparison.Update(0, 5, reinterpret_cast<const uint8_t*>(pairs), nullptr);
    EXPECT_EQ(comparison.overall().count, 2);
    EXPECT_EQ(comparison.overall().non_finite, 3);
    EXPECT_EQ(comparison.overall().squared_error, 1);
    EXPECT_EQ(comparison.overall().signal, 17);
    EXPECT_EQ(comparison.distribution().zero, 1);
    EXPECT_EQ(comparison.distribution().count, std::vector<int64_t>{1});
    // The statistics are of the reference alone, and of all of it.
    EXPECT_EQ(comparison.reference().counts().total, 5);
    EXPECT_EQ(comparison.reference().counts().nan, 2);
    EXPECT_EQ(comparison.reference().counts().positive_infinity, 0);
    EXPECT_EQ(comparison.reference().overall().min, 1);
    EXPECT_EQ(comparison.reference().overall().max, 4);
  });
}

}  // namespace
}  // namespace quantd::core::comparison_test
