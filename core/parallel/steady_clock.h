// A clock for time-outs and ages.

#ifndef QUANTD_CORE_PARALLEL_STEADY_CLOCK_H_
#define QUANTD_CORE_PARALLEL_STEADY_CLOCK_H_

#include <chrono>

#include "absl/time/time.h"

namespace quantd::core {

// The time since some moment. Nobody can set this clock: a step of the clock on
// the wall neither ends what is young nor keeps what is old. A duration, so
// that the compiler refuses to mix it with times of day. Thread-safe.
inline absl::Duration SteadyNow() {
  return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

}  // namespace quantd::core

#endif  // QUANTD_CORE_PARALLEL_STEADY_CLOCK_H_
