// What the tests of the evaluators share.

#ifndef QUANTD_TESTS_CORE_EVALUATE_EVALUATE_TEST_UTIL_H_
#define QUANTD_TESTS_CORE_EVALUATE_EVALUATE_TEST_UTIL_H_

#include <cmath>
#include <limits>

#include "core/evaluate/evaluate.h"
#include "core/types/element_type.h"
#include "gtest/gtest.h"

namespace quantd::core {

constexpr ErrorSumSet kAllSumSets[] = {ErrorSumSet::kAll, ErrorSumSet::kNoise};

// Rounded to the arithmetic type of the element type, where it is finite there.
inline double NaiveInType(ElementType type, double value) {
  if (type == ElementType::kFloat64) return value;
  // volatile: the value is to be a float32, whatever the compiler's mind.
  volatile float single = static_cast<float>(value);
  return std::isfinite(single) ? single : value;
}

// |e / x| of e = |e|. Rounding float64's difference or quotient of two float32
// to float32 is rounding the exact one: float64 has more than twice the digits.
inline double NaiveRelative(ElementType type, double x, double error) {
  if (x == 0) return 0;
  const double relative = NaiveInType(type, error) / std::fabs(x);
  const bool is_wide =
      NaiveInType(type, error) > std::numeric_limits<float>::max();
  return is_wide ? relative : NaiveInType(type, relative);
}

// To the last bit, what the set has.
inline void ExpectSame(const ErrorSums& got, const ErrorSums& want,
                       ErrorSumSet sums = ErrorSumSet::kAll) {
  EXPECT_EQ(got.count, want.count);
  EXPECT_EQ(got.non_finite, want.non_finite);
  EXPECT_EQ(got.clipped_low, want.clipped_low);
  EXPECT_EQ(got.clipped_high, want.clipped_high);
  EXPECT_EQ(got.squared_error, want.squared_error);
  EXPECT_EQ(got.signal, want.signal);
  EXPECT_EQ(got.max_absolute_error, want.max_absolute_error);
  if (sums == ErrorSumSet::kNoise) return;
  EXPECT_EQ(got.zero_flushed, want.zero_flushed);
  EXPECT_EQ(got.absolute_error, want.absolute_error);
  EXPECT_EQ(got.relative_error, want.relative_error);
  EXPECT_EQ(got.reconstructed, want.reconstructed);
  EXPECT_EQ(got.product, want.product);
  EXPECT_EQ(got.max_relative_error, want.max_relative_error);
}

}  // namespace quantd::core

#endif  // QUANTD_TESTS_CORE_EVALUATE_EVALUATE_TEST_UTIL_H_
