// The calls that are open, for whoever looks after all of them.

#ifndef QUANTD_SERVER_RPC_CALL_REGISTRY_H_
#define QUANTD_SERVER_RPC_CALL_REGISTRY_H_

#include <atomic>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/guard/limits.h"

namespace quantd::server {

// A call that the registry looks after. Thread-safe.
class WatchedCall {
 public:
  virtual ~WatchedCall() = default;
  // Ends the call if its client took or sent nothing for too long, or if the
  // call has been open for too long.
  virtual void EndIfOverdue(const Limits& limits) = 0;
  // Lets a call that waits for memory try again.
  virtual void LookAfterMemory() {}
  // The server drains: ends the call with DRAINING if it waits for its client
  // to send something.
  virtual void Drain() = 0;
  // Ends the call with DRAINING as soon as what it is doing allows.
  virtual void EndNow() = 0;
};

// The calls that are open. Thread-safe.
class CallRegistry {
 public:
  // Calls Drain of every call. Calls look at draining() by themselves before
  // they take on more.
  void Drain() ABSL_LOCKS_EXCLUDED(mutex_);
  bool draining() const { return draining_.load(); }
  void EndOverdue(const Limits& limits) ABSL_LOCKS_EXCLUDED(mutex_);
  void LookAfterMemory() ABSL_LOCKS_EXCLUDED(mutex_);
  void EndAll() ABSL_LOCKS_EXCLUDED(mutex_);

  // True when the last call was gone before `timeout`.
  bool WaitUntilEmpty(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until no call comes for that long, at most for `timeout`.
  void WaitUntilQuiet(absl::Duration quiet, absl::Duration timeout)
      ABSL_LOCKS_EXCLUDED(mutex_);

  void Enter(WatchedCall* call) ABSL_LOCKS_EXCLUDED(mutex_);
  // Deletes the call. The registry is not empty before what the call holds is
  // gone.
  void Leave(WatchedCall* call) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  std::atomic<bool> draining_{false};
  absl::Mutex mutex_;
  absl::flat_hash_set<WatchedCall*> calls_ ABSL_GUARDED_BY(mutex_);
  // Those, and the ones that are being deleted.
  int64_t call_count_ ABSL_GUARDED_BY(mutex_) = 0;
  // When the last one came.
  absl::Duration last_arrival_ ABSL_GUARDED_BY(mutex_) =
      -absl::InfiniteDuration();
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_CALL_REGISTRY_H_
