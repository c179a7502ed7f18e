// What the tests of the evaluators share.

#ifndef QUANTD_TESTS_CORE_EVALUATE_EVALUATE_TEST_UTIL_H_
#define QUANTD_TESTS_CORE_EVALUATE_EVALUATE_TEST_UTIL_H_

#include "core/evaluate/evaluate.h"
#include "gtest/gtest.h"

namespace quantd::core {

// To the last bit.
inline void ExpectSame(const ErrorSums& got, const ErrorSums& want) {
  EXPECT_EQ(got.count, want.count);
  EXPECT_EQ(got.non_finite, want.non_finite);
  EXPECT_EQ(got.clipped_low, want.clipped_low);
  EXPECT_EQ(got.clipped_high, want.clipped_high);
  EXPECT_EQ(got.zero_flushed, want.zero_flushed);
  EXPECT_EQ(got.squared_error, want.squared_error);
  EXPECT_EQ(got.absolute_error, want.absolute_error);
  EXPECT_EQ(got.relative_error, want.relative_error);
  EXPECT_EQ(got.signal, want.signal);
  EXPECT_EQ(got.reconstructed, want.reconstructed);
  EXPECT_EQ(got.product, want.product);
  EXPECT_EQ(got.max_absolute_error, want.max_absolute_error);
  EXPECT_EQ(got.max_relative_error, want.max_relative_error);
}

}  // namespace quantd::core

#endif  // QUANTD_TESTS_CORE_EVALUATE_EVALUATE_TEST_UTIL_H_
