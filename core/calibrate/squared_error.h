// Costs of quantizing, from a distribution.
//
// Codes stand for numbers, and x' is the one nearest to x. A boundary b lies
// halfway between two neighbours, which are a step d apart. Let v be the number
// just below the first boundary of a bin. Summed over the boundaries in the
// bin,
//
//   (x' - x)^2 = (x - v)^2 - 2 sum d (x - b)+
//
// The moments of the bin give all of it exactly but the hinges (x - b)+. The
// sum of a hinge over elements of known count, mean, variance and support has
// sharp bounds (De Vylder and Goovaerts, 1982, for stop-loss premiums).

#ifndef QUANTD_CORE_CALIBRATE_SQUARED_ERROR_H_
#define QUANTD_CORE_CALIBRATE_SQUARED_ERROR_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "core/calibrate/distribution.h"
#include "core/types/encoding.h"

namespace quantd::core {

// The numbers that the codes of an encoding stand for, before scale and zero
// point. Immutable, thread-safe.
struct CodeNumbers {
  // Requires: a valid format, qmin and qmax, and codebook.
  explicit CodeNumbers(const Encoding& encoding);

  // Integers: all of qmin to qmax. Otherwise empty and the rest is used.
  bool is_integer;
  int32_t qmin;
  int32_t qmax;
  // Ascending.
  std::vector<double> levels;
  // [levels - 1] halfway between them.
  std::vector<double> middles;
  // Elements beyond are clipped.
  double clip_low = 0;
  double clip_high = 0;
  // Magnitudes from here on become infinity or NaN.
  double overflow = std::numeric_limits<double>::infinity();

  double lowest() const { return is_integer ? qmin : levels.front(); }
  double highest() const { return is_integer ? qmax : levels.back(); }
};

// A sum of (x' - x)^2, and bounds that hold if arithmetic were exact.
struct SquaredError {
  double low = 0;
  // Elements of a bin spread uniformly with its mean and variance.
  double estimate = 0;
  double high = 0;
};

// Over a distribution, under one scale and zero point (0 unless integer).
SquaredError BoundSquaredError(const CodeNumbers& numbers, double scale,
                               double zero_point,
                               const Distribution& distribution);

// The estimate alone, in less time: it sums the bins between two boundaries at
// once. The result differs by rounding. Stops once it is past `limit`.
double EstimateSquaredError(const CodeNumbers& numbers, double scale,
                            double zero_point, const Distribution& distribution,
                            double limit);

// The estimate of the part of that sum that clipped elements have.
double ClippedSquaredError(const CodeNumbers& numbers, double scale,
                           double zero_point, const Distribution& distribution);

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_SQUARED_ERROR_H_
