// Whether the workers have time for another tensor.

#ifndef QUANTD_SERVER_GUARD_ADMISSION_H_
#define QUANTD_SERVER_GUARD_ADMISSION_H_

#include <array>
#include <atomic>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/metrics/metrics.h"

namespace quantd::server {

// Estimates how long the workers need for the data that has arrived, and turns
// new tensors away while that is too long. What has not arrived does not count:
// a client that sends slowly, or that flow control holds back, is no load. A
// tensor's size does not matter to whether it is taken, so that large ones are
// not starved. Thread-safe.
class Admission {
 public:
  // The load of one stream on the workers. Not thread-safe.
  class Load {
   public:
    explicit Load(Admission* admission) : admission_(admission) {}
    ~Load() { Set(absl::ZeroDuration()); }
    Load(const Load&) = delete;
    Load& operator=(const Load&) = delete;

    // How long one worker needs for what the stream has.
    void Set(absl::Duration work);

   private:
    Admission* const admission_;
    int64_t work_ns_ = 0;
  };

  // Takes up to `max_tensors` at once, while work for `threads` workers is done
  // within `max_delay`.
  Admission(int threads, absl::Duration max_delay, int64_t max_tensors);

  // Whether one more tensor may be worked on, beside what is loaded. A worker
  // that has nothing to do needs no estimate.
  // Errors: OVERLOADED, with a retry delay that grows with the share that is
  // turned away and differs from call to call, so that clients spread out.
  absl::Status Admit(bool worker_is_idle) ABSL_LOCKS_EXCLUDED(mutex_);
  // How long the workers need for what there is.
  absl::Duration delay() const;

  void TensorOpened() { tensors_.fetch_add(1, std::memory_order_relaxed); }
  void TensorClosed() { tensors_.fetch_sub(1, std::memory_order_relaxed); }

  // How long one worker takes for `bytes` of a tensor, and for what comes when
  // a tensor of `tensor_bytes` is complete; zero while nothing is known.
  absl::Duration FeedTime(Rpc rpc, int64_t bytes) const;
  absl::Duration FinishTime(Rpc rpc, int64_t tensor_bytes) const;
  // What they took.
  void Fed(Rpc rpc, int64_t bytes, absl::Duration time);
  void Finished(Rpc rpc, int64_t tensor_bytes, absl::Duration time);

 private:
  // Powers of two of bytes.
  static constexpr int kSizes = 64;
  static constexpr int kRpcs = 4;

  bool Busy(bool worker_is_idle) const;
  // After a tensor was turned away.
  absl::Duration RetryAfter() ABSL_LOCKS_EXCLUDED(mutex_);

  const int threads_;
  const int64_t max_delay_ns_;
  const int64_t max_tensors_;
  // Sums over all loads, and how many are not zero.
  std::atomic<int64_t> work_ns_{0};
  std::atomic<int> loaded_{0};
  std::atomic<int64_t> tensors_{0};
  // Since window_start_.
  std::atomic<int64_t> admitted_{0};
  // Moving averages.
  std::array<std::atomic<int64_t>, kRpcs> feed_ns_per_mib_{};
  std::array<std::array<std::atomic<int64_t>, kSizes>, kRpcs> finish_ns_{};

  absl::Mutex mutex_;
  absl::BitGen random_ ABSL_GUARDED_BY(mutex_);
  // Since when tensors are counted, and the outcome of the time before that.
  absl::Time window_start_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t refused_ ABSL_GUARDED_BY(mutex_) = 0;
  double refused_per_admitted_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_ADMISSION_H_
