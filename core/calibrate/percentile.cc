#include "core/calibrate/percentile.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/calibrate/distribution.h"

namespace quantd::core {

Interval OrderStatistic(const Distribution& distribution, uint64_t rank) {
  const auto ranks = distribution.rank();
  const size_t index = static_cast<size_t>(
      std::upper_bound(ranks.begin(), ranks.end() - 1, rank) - ranks.begin() -
      1);
  const Mass& mass = distribution.masses()[index];
  if (mass.low == mass.high) return {mass.low, mass.high};
  const double n = mass.count;
  const double k = static_cast<double>(rank - ranks[index] + 1);
  const double deviation = std::sqrt(mass.variance);
  // With all others as far away as they can be.
  const double above = std::min(deviation * std::sqrt((k - 1) / (n - k + 1)),
                                (k - 1) / (n - k + 1) * (mass.mean - mass.low));
  const double below = std::min(deviation * std::sqrt((n - k) / k),
                                (n - k) / k * (mass.high - mass.mean));
  // Covers the rounding of float64.
  const double slack =
      0x1p-48 * std::max(std::fabs(mass.low), std::fabs(mass.high));
  return {std::max(mass.low, mass.mean - below - slack),
          std::min(mass.high, mass.mean + above + slack)};
}

double Quantile(const Distribution& distribution, double fraction) {
  const uint64_t last = distribution.count() - 1;
  const double position = fraction * static_cast<double>(last);
  const uint64_t rank =
      std::min(static_cast<uint64_t>(std::floor(position)), last);
  const double t = position - static_cast<double>(rank);
  const double a = OrderStatistic(distribution, rank).middle();
  if (t <= 0 || rank == last) return a;
  const double b = OrderStatistic(distribution, rank + 1).middle();
  // numpy counts from the nearer end.
  return t < 0.5 ? a + (b - a) * t : b - (b - a) * (1 - t);
}

}  // namespace quantd::core
