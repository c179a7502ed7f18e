// The calls that are open, for whoever looks after all of them.

#ifndef QUANTD_SERVER_RPC_CALL_REGISTRY_H_
#define QUANTD_SERVER_RPC_CALL_REGISTRY_H_

#include <atomic>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/parallel/thread_pool.h"
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

// The calls that are open, and no more of them than may be: each takes memory
// that is in no budget, about 15 KB. Thread-safe.
class CallRegistry {
 public:
  // Calls that watch the health have room of their own: they neither take room
  // from other calls nor lose theirs to them.
  enum class Kind { kCall, kWatch };

  // How many calls may be open, of which one caller has at most half; an eighth
  // as many may watch the health, likewise.
  explicit CallRegistry(int64_t limit);

  // Calls Drain of every call. Calls look at draining() by themselves before
  // they take on more.
  void Drain() ABSL_LOCKS_EXCLUDED(mutex_);
  bool draining() const { return draining_.load(); }
  void EndOverdue(const Limits& limits) ABSL_LOCKS_EXCLUDED(mutex_);
  void LookAfterMemory() ABSL_LOCKS_EXCLUDED(mutex_);
  void EndAll() ABSL_LOCKS_EXCLUDED(mutex_);

  // True when the last call was gone before `timeout`.
  bool WaitUntilEmpty(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  // By core::SteadyNow(); infinitely long ago before the first call.
  absl::Duration last_arrival() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Looks after the call until it leaves. `caller` is the group of its
  // CallerShare, which the call holds.
  // Errors: CALL_LIMIT; then the call has to end at once, and does not count.
  absl::Status Enter(WatchedCall* call, core::ThreadPool::Group caller,
                     Kind kind) ABSL_LOCKS_EXCLUDED(mutex_);
  // Deletes the call. The registry is not empty before what the call holds is
  // gone.
  void Leave(WatchedCall* call) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // For the calls of one kind.
  struct Room {
    explicit Room(int64_t limit) : limit(limit) {}
    absl::Status Take(core::ThreadPool::Group caller);
    void Return(core::ThreadPool::Group caller);

    const int64_t limit;
    int64_t count = 0;
    // Number of calls by caller, for callers that have some.
    absl::flat_hash_map<core::ThreadPool::Group, int64_t> counts;
  };
  struct Entry {
    core::ThreadPool::Group caller;
    // Null for a call that was refused.
    Room* room;
  };

  std::atomic<bool> draining_{false};
  mutable absl::Mutex mutex_;
  Room call_room_ ABSL_GUARDED_BY(mutex_);
  Room watch_room_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<WatchedCall*, Entry> calls_ ABSL_GUARDED_BY(mutex_);
  // Number of calls in calls_, and of calls that are being deleted.
  int64_t call_count_ ABSL_GUARDED_BY(mutex_) = 0;
  // When the last one came.
  absl::Duration last_arrival_ ABSL_GUARDED_BY(mutex_) =
      -absl::InfiniteDuration();
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_CALL_REGISTRY_H_
