// When a stream has to end though nothing went wrong.

#ifndef QUANTD_SERVER_RPC_STREAM_WATCHDOG_H_
#define QUANTD_SERVER_RPC_STREAM_WATCHDOG_H_

#include <atomic>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "server/guard/limits.h"
#include "server/rpc/call_registry.h"

namespace quantd::server {

// Knows how old a stream is and whether the server drains. A stream ends
// between two tensors when it is as old as it may be, and at once at twice that
// age. Thread-safe.
class StreamWatchdog {
 public:
  // `stream_age`  how old a stream may be.
  // `registry`    outlives the object.
  // `start_time`  of the stream; tests have it in the past.
  StreamWatchdog(const CallRegistry* registry, absl::Duration stream_age,
                 absl::Duration start_time = core::SteadyNow());

  absl::Duration age() const { return core::SteadyNow() - start_time_; }

  // Checks that the stream may take on another tensor.
  // Errors: DRAINING, STREAM_AGE.
  absl::Status CheckMayOpen() const;
  // Checks that the stream may stay, with nothing open and nothing to do since
  // that time. A client may be about to end it by itself while the server
  // drains: it has a moment for that.
  // Errors: as CheckMayOpen.
  absl::Status CheckMayIdle(absl::Duration since) const;
  // Looks at the stream's age: once it is too old, CheckMayOpen fails. Checks
  // that the stream may finish its tensor.
  // Errors: STREAM_AGE.
  absl::Status CheckAge();

 private:
  const CallRegistry* const registry_;
  const absl::Duration stream_age_;
  const absl::Duration start_time_;
  std::atomic<bool> old_{false};
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_STREAM_WATCHDOG_H_
