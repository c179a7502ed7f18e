// Quantiles from histograms.

#ifndef QUANTD_CORE_CALIBRATE_PERCENTILE_H_
#define QUANTD_CORE_CALIBRATE_PERCENTILE_H_

#include <cstdint>

#include "core/calibrate/distribution.h"

namespace quantd::core {

// An interval that certainly holds a number.
struct Interval {
  double low;
  double high;

  double middle() const { return low + (high - low) / 2; }
};

// The element of that rank in ascending order, from 0. Exact where the element
// is known. Otherwise within its bin, which count, mean and variance of the bin
// narrow down. Of n elements with mean u and standard deviation s, the k-th is
// within (Hawkins, 1971)
//
//   [u - s sqrt((n - k) / k), u + s sqrt((k - 1) / (n - k + 1))]
//
// Requires: rank < count.
Interval OrderStatistic(const Distribution& distribution, uint64_t rank);

// numpy's default: linear between the order statistics on either side of rank
// fraction * (count - 1). Each is taken in the middle of its interval. So the
// result is off by at most half a bin.
// Requires: 0 <= fraction <= 1; count > 0.
double Quantile(const Distribution& distribution, double fraction);

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_PERCENTILE_H_
