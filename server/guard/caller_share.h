// Share that each caller has of the server.

#ifndef QUANTD_SERVER_GUARD_CALLER_SHARE_H_
#define QUANTD_SERVER_GUARD_CALLER_SHARE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/parallel/thread_pool.h"
#include "server/guard/admission.h"

namespace quantd::server {

// One caller is a name of the access file or, where there is none, an address.
// Thread-safe.
struct CallerShare {
  CallerShare(core::ThreadPool::Group group, int threads,
              absl::Duration max_delay, Admission::OpenTensors* open_tensors)
      : group(group), admission(threads, max_delay, open_tensors) {}

  // Group of the caller's tasks.
  const core::ThreadPool::Group group;
  // Its tensors wait for its own tensors, not for those of others.
  Admission admission;
};

// Shares the workers among callers: each has threads of its own, between which
// the kernel shares the processors, and its tensors are admitted as if there
// were no others. Thread-safe.
class CallerShares {
 public:
  // `threads`, `max_delay`  of each caller's Admission.
  // `max_tensors`           of all callers.
  CallerShares(int threads, absl::Duration max_delay, int64_t max_tensors);

  // The share of a caller; it goes before the object does.
  std::shared_ptr<CallerShare> Find(absl::string_view caller)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // The longest of all callers'; see Admission::Delay.
  absl::Duration Delay(absl::Duration work) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const int threads_;
  const absl::Duration max_delay_;
  Admission::OpenTensors open_tensors_;
  mutable absl::Mutex mutex_;
  core::ThreadPool::Group last_group_ ABSL_GUARDED_BY(mutex_) = 0;
  // Shares that are in use, and some that were: they know how long tensors
  // take.
  absl::flat_hash_map<std::string, std::shared_ptr<CallerShare>> shares_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_CALLER_SHARE_H_
