// Time that a thread has had of the processors.

#ifndef QUANTD_CORE_PARALLEL_THREAD_CLOCK_H_
#define QUANTD_CORE_PARALLEL_THREAD_CLOCK_H_

#include <pthread.h>
#include <time.h>

#include "absl/time/time.h"

namespace quantd::core {

// Runs while its thread computes, and stands while that waits for a processor.
// Any thread may read it. Plain value, thread-safe.
class ThreadClock {
 public:
  static ThreadClock OfThisThread() {
    ThreadClock clock;
    if (pthread_getcpuclockid(pthread_self(), &clock.id_) != 0) {
      clock.id_ = CLOCK_MONOTONIC;
    }
    return clock;
  }

  // The time that the thread has computed; zero when it has ended.
  absl::Duration Now() const {
    timespec time{};
    if (clock_gettime(id_, &time) != 0) return absl::ZeroDuration();
    return absl::DurationFromTimespec(time);
  }

 private:
  ThreadClock() = default;

  clockid_t id_ = CLOCK_MONOTONIC;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_PARALLEL_THREAD_CLOCK_H_
