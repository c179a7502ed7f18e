// The error that an encoding will make, from statistics alone.

#ifndef QUANTD_CORE_CALIBRATE_PREDICTION_H_
#define QUANTD_CORE_CALIBRATE_PREDICTION_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/encoding.h"

namespace quantd::core {

// Sums over the finite elements x with x' = dequantize(quantize(x)), less those
// under a scale of NaN. The true sum of (x' - x)^2 lies in [squared_error_low,
// squared_error_high], for tensors of any element type. Where a format that
// does not saturate overflows, squared_error and squared_error_high are +Inf.
struct Prediction {
  uint64_t count = 0;
  double squared_error = 0;
  double squared_error_low = 0;
  double squared_error_high = 0;
  // Sum of x^2, exact up to the rounding of float64.
  double signal = 0;
  // Mantissa bits of the histograms that the prediction comes from.
  int mantissa_bits = 0;

  void Add(const Prediction& other);

  double MeanSquaredError() const;      // 0 when count is 0
  double MeanSquaredErrorLow() const;   // 0 when count is 0
  double MeanSquaredErrorHigh() const;  // 0 when count is 0
  // 10 log10(signal / squared error) in decibels; +Inf without error.
  double SqnrDb() const;
  double SqnrDbLow() const;
  double SqnrDbHigh() const;
  // squared_error / signal, 0 when both are.
  double NoiseToSignal() const;
};

// Gives the same result on every machine, for any number of threads.
// `pool`  spreads the scale indices; may be null.
// Requires: a valid encoding with a scale per scale index of `statistics`,
// which has histograms.
// Errors: CANCELLED.
absl::StatusOr<Prediction> Predict(const Encoding& encoding,
                                   const TensorStatistics& statistics,
                                   ThreadPool* pool = nullptr,
                                   StopToken stop = StopToken());

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_PREDICTION_H_
