#include "core/types/portable_log.h"

#include <cmath>
#include <limits>

namespace quantd::core {

double PortableLog(double x) {
  constexpr double kLn2High = 0x1.62e42fefap-1;
  constexpr double kLn2Low = 0x1.cf79abc9e3b3ap-40;
  constexpr double kSqrtHalf = 0.70710678118654752;
  int exponent;
  double mantissa = std::frexp(x, &exponent);
  if (mantissa < kSqrtHalf) {
    mantissa *= 2;
    --exponent;
  }
  // log m = 2 artanh((m - 1) / (m + 1)), as its Taylor series.
  const double t = (mantissa - 1) / (mantissa + 1);
  const double square = t * t;
  constexpr int kLastTerm = 23;
  double series = 0;
  for (int k = kLastTerm; k >= 3; k -= 2) {
    series = (series + 1.0 / k) * square;
  }
  return exponent * kLn2High + (2 * t + (2 * t * series + exponent * kLn2Low));
}

double Decibels(double signal, double noise) {
  constexpr double kLn10 = 2.302585092994046;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (noise == 0) return kInfinity;
  const double ratio = signal / noise;
  if (ratio == 0) return -kInfinity;
  if (!std::isfinite(ratio)) return ratio;
  return 10 * (PortableLog(ratio) / kLn10);
}

}  // namespace quantd::core
