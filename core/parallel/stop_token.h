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
#include <cstdint>

#include "absl/status/status.h"

namespace quantd::core {

// Tells a computation to stop. A computation that takes one looks at it every
// few milliseconds at least, and returns CANCELLED soon after it was stopped,
// without a result. A look costs a load from memory. Plain value, thread-safe.
class StopToken {
 public:
  // One that is never stopped.
  StopToken() = default;
  // Stopped from when `*flag` is true, which outlives all copies.
  explicit StopToken(const std::atomic<bool>* flag) : flag_(flag) {}
  // Stopped after `*looks_left` more looks, each of which takes 1 off, below 0
  // too. `*looks_left` outlives all copies. For tests: what they stop ends at
  // the same step on a slow machine as on a fast one, and they can count.
  static StopToken AfterLooks(std::atomic<int64_t>* looks_left) {
    StopToken token;
    token.looks_left_ = looks_left;
    return token;
  }

  bool stopped() const {
    if (flag_ != nullptr) return flag_->load(std::memory_order_relaxed);
    return looks_left_ != nullptr && looks_left_->fetch_sub(1) <= 0;
  }

 private:
  const std::atomic<bool>* flag_ = nullptr;
  std::atomic<int64_t>* looks_left_ = nullptr;
};

// Status that a stopped computation returns.
inline absl::Status StoppedError() {
  return absl::CancelledError("stopped: nobody waits for the result");
}

}  // namespace quantd::core

#endif  // QUANTD_CORE_PARALLEL_STOP_TOKEN_H_
