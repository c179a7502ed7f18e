// Histograms by their description, with none of core's code.

#ifndef QUANTD_TESTS_CORE_STATISTICS_NAIVE_HISTOGRAM_H_
#define QUANTD_TESTS_CORE_STATISTICS_NAIVE_HISTOGRAM_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>

#include "core/statistics/histogram.h"
#include "gtest/gtest.h"

namespace quantd::core {

using NaiveHistogram = std::map<uint32_t, HistogramBin>;

inline void NaiveAdd(double x, int mantissa_bits, NaiveHistogram* histogram) {
  if (!std::isfinite(x)) return;
  float single = static_cast<float>(x);
  if (std::isinf(single)) {
    single = std::copysign(std::numeric_limits<float>::max(), single);
  }
  if (single == 0) single = 0;
  uint32_t bits;
  std::memcpy(&bits, &single, sizeof(bits));
  const uint32_t ordered = bits >> 31 ? ~bits : bits + 0x80000000;
  const uint32_t unit = uint32_t{1} << (23 - mantissa_bits);
  const uint64_t low = bits % unit;
  HistogramBin& bin = (*histogram)[ordered / unit];
  ++bin.count;
  bin.low_sum += low;
  bin.low_square_sum += low * low;
}

inline void ExpectEqual(const Histogram& got, const NaiveHistogram& want) {
  uint64_t count = 0;
  auto next = want.begin();
  got.ForEachBin([&](uint32_t key, const HistogramBin& bin) {
    ASSERT_NE(next, want.end()) << "key " << key;
    ASSERT_EQ(key, next->first);
    ASSERT_EQ(bin.count, next->second.count) << "key " << key;
    ASSERT_EQ(bin.low_sum, next->second.low_sum) << "key " << key;
    ASSERT_TRUE(bin.low_square_sum == next->second.low_square_sum)
        << "key " << key;
    count += bin.count;
    ++next;
  });
  EXPECT_TRUE(next == want.end());
  EXPECT_EQ(got.count(), count);
}

}  // namespace quantd::core

#endif  // QUANTD_TESTS_CORE_STATISTICS_NAIVE_HISTOGRAM_H_
