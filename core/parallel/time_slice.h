// How long a piece of work may take before others have their turn.

#ifndef QUANTD_CORE_PARALLEL_TIME_SLICE_H_
#define QUANTD_CORE_PARALLEL_TIME_SLICE_H_

#include <chrono>

#include "absl/time/time.h"

namespace quantd::core {

// A stretch of time from now on. What is computed must not depend on where it
// is cut into slices. Plain value, thread-safe.
class TimeSlice {
 public:
  // Requires: a finite length.
  explicit TimeSlice(absl::Duration length)
      : end_(Clock::now() + absl::ToChronoNanoseconds(length)) {}

  // One that is never over.
  static TimeSlice Endless() { return TimeSlice(Clock::time_point::max()); }

  // Reads a clock, which takes some 30 ns.
  bool over() const { return Clock::now() >= end_; }

 private:
  using Clock = std::chrono::steady_clock;

  explicit TimeSlice(Clock::time_point end) : end_(end) {}

  Clock::time_point end_;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_PARALLEL_TIME_SLICE_H_
