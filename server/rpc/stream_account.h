// Load that one stream puts on the server.

#ifndef QUANTD_SERVER_RPC_STREAM_ACCOUNT_H_
#define QUANTD_SERVER_RPC_STREAM_ACCOUNT_H_

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/parallel/thread_clock.h"
#include "server/guard/admission.h"
#include "server/guard/caller_share.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/rpc_environment.h"
#include "server/wire/rpcs.h"

namespace quantd::server {

// Tells the Admission of the caller what the workers have to do for a stream,
// and the memory budget what the stream holds in transit. Thread-safe.
class StreamAccount {
 public:
  // `rpc`  one that handles tensors.
  StreamAccount(const RpcEnvironment& env, Rpc rpc,
                std::shared_ptr<CallerShare> share);

  const CallerShare& share() const { return *share_; }

  // Counts the bytes that the stream holds. While it `rests`, because its
  // client does not read or it ends, there is nothing to do for it.
  void Hold(int64_t bytes, bool rests) ABSL_LOCKS_EXCLUDED(mutex_);
  // The stream holds more than its share while memory is used up, with
  // `more_bytes`: it has to give up its tensor.
  bool OverShare(int64_t more_bytes) const ABSL_LOCKS_EXCLUDED(mutex_);

  // Checks that there is time for a tensor that takes a worker as long as
  // `work`; counts that as the stream's work if so.
  // Errors: OVERLOADED.
  absl::Status Admit(absl::Duration work) ABSL_LOCKS_EXCLUDED(mutex_);
  // More bytes came of the open tensor.
  void Arrived(int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // The calling thread begins with a long computation, and ends it: what it
  // computes in between is done, until WorkLeft is called.
  void BeginLong() ABSL_LOCKS_EXCLUDED(mutex_);
  void EndLong() ABSL_LOCKS_EXCLUDED(mutex_);
  // Sets the work that is left after a task, and the time that was spent on the
  // tensor's end by now.
  void WorkLeft(absl::Duration work, absl::Duration spent)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // A tensor begins, and ends.
  void TensorOpened() { share_->admission.TensorOpened(); }
  void TensorClosed() ABSL_LOCKS_EXCLUDED(mutex_);
  // The open tensor is searched as its `bytes` are fed, which should take
  // `estimate`.
  void SearchedAsFed(int64_t bytes, absl::Duration estimate)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // About how long one worker takes; see Admission.
  absl::Duration FeedTime(int64_t bytes) const ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Duration FinishTime(int64_t tensor_bytes) const {
    return share_->admission.FinishTime(rpc_, tensor_bytes);
  }
  absl::Duration SearchTime(absl::Duration estimate) const {
    return share_->admission.SearchTime(rpc_, estimate);
  }
  // How long it took.
  void Fed(int64_t bytes, absl::Duration time) {
    share_->admission.Fed(rpc_, bytes, time);
  }
  void Finished(int64_t tensor_bytes, absl::Duration time) {
    share_->admission.Finished(rpc_, tensor_bytes, time);
  }
  void Searched(absl::Duration estimate, absl::Duration time) {
    share_->admission.Searched(rpc_, estimate, time);
  }

 private:
  absl::Duration FeedTimeLocked(int64_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountLoad() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Processor time that the long computation has had, if there is one.
  absl::Duration LongTime() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const RpcEnvironment& env_;
  const Rpc rpc_;
  const std::shared_ptr<CallerShare> share_;

  mutable absl::Mutex mutex_;
  MemoryBudget::Transit transit_ ABSL_GUARDED_BY(mutex_);
  Admission::Load load_ ABSL_GUARDED_BY(mutex_);
  bool rests_ ABSL_GUARDED_BY(mutex_) = false;
  // Bytes and search time of the open tensor, if it is searched as it is fed.
  int64_t search_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Duration search_estimate_ ABSL_GUARDED_BY(mutex_);
  // Work that is left for the open tensor.
  absl::Duration work_ ABSL_GUARDED_BY(mutex_);
  // Time that workers have spent on its end.
  absl::Duration spent_ ABSL_GUARDED_BY(mutex_);
  // The clock of the thread that computes, and its time when it began.
  absl::optional<core::ThreadClock> long_clock_ ABSL_GUARDED_BY(mutex_);
  absl::Duration long_start_ ABSL_GUARDED_BY(mutex_);
  // Processor time of the computation that ended.
  absl::Duration long_done_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_STREAM_ACCOUNT_H_
