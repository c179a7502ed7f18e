#include "core/calibrate/prediction.h"

#include <cmath>
#include <limits>

namespace quantd::core {
namespace {

double Mean(double sum, uint64_t count) {
  return count == 0 ? 0 : sum / static_cast<double>(count);
}

double Decibels(double signal, double squared_error) {
  if (squared_error == 0) return std::numeric_limits<double>::infinity();
  return 10 * std::log10(signal / squared_error);
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

Prediction Predict(const Encoding& encoding,
                   const TensorStatistics& statistics) {
  return Prediction();
}

}  // namespace quantd::core
