#include "core/calibrate/prediction.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/calibrate/distribution.h"
#include "core/calibrate/scale_indices.h"
#include "core/calibrate/squared_error.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/histogram.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/encoding.h"
#include "core/types/portable_log.h"

namespace quantd::core {
namespace {

double Mean(double sum, uint64_t count) {
  return count == 0 ? 0 : sum / static_cast<double>(count);
}

// Widens the bounds of exact arithmetic by what arithmetic really does to e =
// x' - x. With u = 2^-24, the rounding of float32:
//
//   the quotient x / scale is off by u |x / scale|, so that an element that
//   close to a boundary lands on the wrong side: 2 u |x|;
//   the product is off by u |x'|, which is at most u (|x| + |e|);
//   an element of a float64 tensor is off by u |x| from what its histogram has;
//   results below the smallest normal number are off by 2^-150;
//   with a real zero point the sum that is rounded is off by u of itself, of
//   at most `largest_code` in magnitude where it is not clipped anyway, and so
//   is the difference from the code, by u |x'|.
//
// The last but one comes instead of the first two. Deviations add up as
// root-sum-squares do (triangle inequality).
SquaredError Widen(const SquaredError& exact, const Distribution& distribution,
                   const Extremes& extremes, double scale,
                   double largest_code) {
  constexpr double kUnit = 0x1p-24;
  constexpr double kRelative = 3.0625 * kUnit;
  constexpr double kAbsolute = 0x1p-148;
  constexpr double kLargest = std::numeric_limits<float>::max();
  const double count = static_cast<double>(distribution.count());
  double deviation = kRelative * std::sqrt(distribution.signal()) +
                     kAbsolute * (1 + scale) * std::sqrt(count);
  if (largest_code > 0) {
    deviation += 1.0625 * kUnit * std::sqrt(distribution.signal()) +
                 3 * kUnit * largest_code * scale * std::sqrt(count);
  }
  // Elements that float32 cannot hold are in the histogram as its largest.
  const double beyond =
      std::max({0.0, extremes.max - kLargest, -extremes.min - kLargest});
  if (beyond > 0) deviation += beyond * std::sqrt(count);

  // The rounding of sums in float64, here and wherever the truth is computed.
  const double sums =
      0x1p-36 + 0x1p-52 * static_cast<double>(distribution.masses().size());
  const double low = std::sqrt(exact.low) * (1 - kUnit) - deviation;
  const double high = std::sqrt(exact.high) * (1 + kUnit) + deviation;
  return {low > 0 ? low * low * (1 - sums) : 0, exact.estimate,
          high * high * (1 + sums)};
}

// Error that float32 adds to the estimate of int32, whose codes have more bits
// than a float32. The quotient x / scale, then an integer at most half a step
// away, times the scale is x + e, with e uniform in [-w, w] and w half a step
// of the code: of 1, or of the spacing of float32 there. The product is rounded
// to the spacing d of float32 at x, of which x is a multiple. So with h = w / d
// the error is d times the nearest integer to a uniform number in [-h, h]. With
// K = floor(h + 1/2) the mean of that integer's square is
//
//   (2 sum_{k < K} k^2 + 2 K^2 (h - K + 1/2)) / 2h
//
// where k counts the integers whose neighbourhoods of 1/2 lie within [-h, h].
// Uniform and independent rounding errors are Widrow's model (Widrow and
// Kollar, Quantization Noise, 2008, chapter 12 for floats). The estimate of
// exact arithmetic has the (scale / 2)^2 / 3 of each element.
double RoundingOfFloats(double scale, const Distribution& distribution) {
  constexpr double kMostHalfSteps = 0x1p10;
  // A spacing is 2^-23 of the power of two below.
  const auto spacing = [](double x) {
    return std::max(std::ldexp(1.0, std::ilogb(x) - 23), 0x1p-149);
  };
  double sum = 0;
  for (const Mass& mass : distribution.masses()) {
    const double magnitude = std::fabs(mass.mean);
    const double code = magnitude / scale;
    // Codes of 0, and clipped ones.
    if (!(code >= 0.5) || code > 0x1p31) continue;
    const double at_x = spacing(magnitude);
    const double h = std::max(spacing(code), 1.0) * scale / 2 / at_x;
    // The rest is negligible beside the steps.
    if (h > kMostHalfSteps) continue;
    const double k = std::floor(h + 0.5);
    const double square =
        ((k - 1) * k * (2 * k - 1) / 6 + k * k * (h - k + 0.5)) / h;
    sum +=
        mass.count * std::max(0.0, at_x * at_x * square - scale * scale / 12);
  }
  return sum;
}

Prediction PredictScaleIndex(const CodeNumbers& numbers, double scale,
                             double zero_point, double largest_code,
                             const Extremes& extremes,
                             const Distribution& distribution) {
  Prediction prediction;
  if (std::isnan(scale) || distribution.count() == 0) return prediction;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  SquaredError error =
      Widen(BoundSquaredError(numbers, scale, zero_point, distribution),
            distribution, extremes, scale, largest_code);
  if (numbers.is_integer && numbers.qmax >= 1 << 24) {
    error.estimate = std::min(
        error.estimate + RoundingOfFloats(scale, distribution), error.high);
  }
  const double min = distribution.masses().front().low;
  const double max = distribution.masses().back().high;
  const double magnitude = std::max(-min, max);
  const double overflow = numbers.overflow * scale;
  if (magnitude >= overflow * (1 - 0x1p-20)) {
    error.low = 0;
    error.high = kInfinity;
    if (magnitude >= overflow * (1 + 0x1p-20)) error.estimate = kInfinity;
  }
  // x' may overflow float32 at either end of the numbers: only for elements
  // that are nearer to the end than to zero.
  constexpr double kLargest = std::numeric_limits<float>::max();
  const double low_end = numbers.lowest() * scale - zero_point * scale;
  const double high_end = numbers.highest() * scale - zero_point * scale;
  if ((low_end < -kLargest && 2 * min <= low_end) ||
      (high_end > kLargest && 2 * max >= high_end)) {
    error.low = 0;
    error.high = kInfinity;
  }
  prediction.count = distribution.count();
  prediction.squared_error = error.estimate;
  prediction.squared_error_low = error.low;
  prediction.squared_error_high = error.high;
  prediction.signal = distribution.signal();
  return prediction;
}

}  // namespace

void Prediction::Add(const Prediction& other) {
  count += other.count;
  squared_error += other.squared_error;
  squared_error_low += other.squared_error_low;
  squared_error_high += other.squared_error_high;
  signal += other.signal;
}

double Prediction::MeanSquaredError() const {
  return Mean(squared_error, count);
}

double Prediction::MeanSquaredErrorLow() const {
  return Mean(squared_error_low, count);
}

double Prediction::MeanSquaredErrorHigh() const {
  return Mean(squared_error_high, count);
}

double Prediction::SqnrDb() const { return Decibels(signal, squared_error); }

double Prediction::SqnrDbLow() const {
  return Decibels(signal, squared_error_high);
}

double Prediction::SqnrDbHigh() const {
  return Decibels(signal, squared_error_low);
}

double Prediction::NoiseToSignal() const {
  if (squared_error == 0) return 0;
  return squared_error / signal;
}

absl::StatusOr<Prediction> Predict(const Encoding& encoding,
                                   const TensorStatistics& statistics,
                                   ThreadPool* pool, StopToken stop) {
  const CodeNumbers numbers(encoding);
  // See Widen.
  const double largest_code =
      encoding.zero_points_are_real
          ? std::max(std::fabs(static_cast<double>(encoding.qmin)),
                     std::fabs(static_cast<double>(encoding.qmax)))
          : 0;
  const absl::Span<const Histogram> histograms = statistics.histograms();
  const auto count = static_cast<int64_t>(histograms.size());
  Prediction whole;
  CompensatedSum squared_error;
  CompensatedSum squared_error_low;
  CompensatedSum squared_error_high;
  CompensatedSum signal;
  // Sums are taken in the order of the scale indices.
  constexpr int64_t kAtOnce = 4096;
  std::vector<Prediction> parts(static_cast<size_t>(std::min(kAtOnce, count)));
  for (int64_t begin = 0; begin < count; begin += kAtOnce) {
    const int64_t end = std::min(begin + kAtOnce, count);
    ForScaleIndices(pool, begin, end, stop, [&](int64_t i) {
      const Extremes& extremes = statistics.extremes()[i];
      parts[i - begin] = PredictScaleIndex(
          numbers, encoding.scale[i], ZeroPointAt(encoding, i), largest_code,
          extremes, Distribution(histograms[i], extremes));
    });
    if (stop.stopped()) return StoppedError();
    for (int64_t i = begin; i < end; ++i) {
      const Prediction& part = parts[i - begin];
      whole.count += part.count;
      squared_error.Add(part.squared_error);
      squared_error_low.Add(part.squared_error_low);
      squared_error_high.Add(part.squared_error_high);
      signal.Add(part.signal);
    }
  }
  whole.squared_error = squared_error.value();
  whole.squared_error_low = squared_error_low.value();
  whole.squared_error_high = squared_error_high.value();
  whole.signal = signal.value();
  whole.mantissa_bits = statistics.mantissa_bits();
  return whole;
}

}  // namespace quantd::core
