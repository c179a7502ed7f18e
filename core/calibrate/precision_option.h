// Effects of a spec on one tensor.

#ifndef QUANTD_CORE_CALIBRATE_PRECISION_OPTION_H_
#define QUANTD_CORE_CALIBRATE_PRECISION_OPTION_H_

#include <cstdint>
#include <vector>

namespace quantd::core {

struct PrecisionOption {
  int spec_index;
  int64_t size_bytes;
  // sum e^2 / sum x^2.
  double noise_to_signal;

  // noise_to_signal as a number that can be added and subtracted: a value that
  // is not finite is worse than anything.
  double noise() const {
    constexpr double kMost = 1e200;
    return noise_to_signal < kMost ? noise_to_signal : kMost;
  }
};

// The options of one tensor; at least one.
using TensorOptions = std::vector<PrecisionOption>;

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_PRECISION_OPTION_H_
