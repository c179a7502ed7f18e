// How a computation hears that nobody wants its result any more.
//
// Computations are plain functions from top to bottom, and may run for minutes.
// Whoever calls one gives it a thread: a short one runs where its caller is, a
// long one on a thread of lower priority (see RpcEnvironment::long_pool), and
// the kernel shares the processors. Nothing here knows of turns.
//
// Coroutines were the alternative. They need no thread for each computation.
// But every loop down to the innermost would have to say where it may pause,
// and loops that ParallelFor spreads over threads cannot pause. A thread takes
// some 20 microseconds to begin, which is little beside a long computation.

#ifndef QUANTD_CORE_PARALLEL_STOP_TOKEN_H_
#define QUANTD_CORE_PARALLEL_STOP_TOKEN_H_

#include <atomic>

#include "absl/status/status.h"

namespace quantd::core {

// What takes one looks at it every few milliseconds at least, and returns
// CANCELLED soon after it was stopped, without a result. A look costs a load
// from memory. Plain value, thread-safe.
class StopToken {
 public:
  // One that is never stopped.
  StopToken() = default;
  // Stopped from when `*flag` is true, which outlives all copies.
  explicit StopToken(const std::atomic<bool>* flag) : flag_(flag) {}

  bool stopped() const {
    return flag_ != nullptr && flag_->load(std::memory_order_relaxed);
  }

 private:
  const std::atomic<bool>* flag_ = nullptr;
};

// What a computation that was stopped returns.
inline absl::Status StoppedError() {
  return absl::CancelledError("stopped: nobody waits for the result");
}

}  // namespace quantd::core

#endif  // QUANTD_CORE_PARALLEL_STOP_TOKEN_H_
