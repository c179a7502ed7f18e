// Checks that the workers have time for another tensor.

#ifndef QUANTD_SERVER_GUARD_ADMISSION_H_
#define QUANTD_SERVER_GUARD_ADMISSION_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "server/metrics/metrics.h"

namespace quantd::server {

// Refuses tensors that would wait longer than `max_delay` in the worker queue.
// Each caller has an Admission of its own. A tensor queues behind tensors of
// its own length and shorter:
//
// - In a burst it may wait for `max_delay`.
// - When the workers stay busy it may wait for 0.65 - 0.5 / threads of what it
//   takes itself, but at least for a millisecond.
//
// The work that is left counts: the estimate for a tensor, corrected by the
// time that others took, minus the processor time that it has had.
//
// Much longer tensors share the workers with it. They count once there are more
// than five to a worker and they delay it by more than `max_delay`.
//
// The idea is CoDel's (Nichols and Jacobson, 2012): a queue that drains again
// is left alone, a standing one is cut to a target. It was compared with one
// fixed limit, max(max_delay, the tensor's own time), at ten times the load
// that two workers can compute, in two runs each with tensors of 140 ms:
//
//   policy        served a second    p50, ms        p99, ms
//   this one      12.6, 13.1         470, 438       727, 604
//   fixed limit   12.6, 13.5         574, 541       742, 677
//
// Then progress was told by the wall clock. With processor time and learned
// estimates, in runs that took turns on a machine with other work, and to the
// p99 of one tensor at a time in the same run:
//
//   progress by      served a second   p99, ms     to one at a time
//   wall clock       12.3, 13.8        1462, 664   5.8, 4.6
//   processor time   12.1, 11.5        419, 438    2.4, 2.2
//
// Since then the limit of a standing queue is a little lower; see Admit.
//
// Only bytes that have arrived are load: a client that sends slowly, or that
// flow control holds back, costs nobody time. Thread-safe.
class Admission {
 public:
  // How many tensors are open, of how many callers, and how many may be. From
  // half of that on a caller gets no more than an equal share.
  struct OpenTensors {
    explicit OpenTensors(int64_t most) : most(most) {}

    const int64_t most;
    std::atomic<int64_t> count{0};
    std::atomic<int64_t> callers{0};
  };

  // The load of one stream on the workers. Not thread-safe.
  class Load {
   public:
    explicit Load(Admission* admission) : admission_(admission) {}
    ~Load() { Set(absl::ZeroDuration()); }
    Load(const Load&) = delete;
    Load& operator=(const Load&) = delete;

    // How long one worker needs for what the stream has, and has spent on the
    // same tensor before.
    void Set(absl::Duration work,
             absl::Duration spent_work = absl::ZeroDuration());

   private:
    Admission* const admission_;
    int64_t work_ns_ = 0;
    int64_t tensor_ns_ = 0;
  };

  // Estimate for a tensor of which nothing is known.
  static constexpr absl::Duration kUnknownWork = absl::Milliseconds(20);

  // The time since some moment; never goes back.
  using Clock = std::function<absl::Duration()>;

  // `open_tensors`  outlives the object.
  Admission(int threads, absl::Duration max_delay, OpenTensors* open_tensors,
            Clock clock = &core::SteadyNow);

  // Checks that the workers may take on one more tensor, beside what is loaded,
  // that takes one worker as long as `work`. A worker that has nothing to do
  // needs no estimate.
  // Errors: OVERLOADED, with a retry delay that grows with the share that is
  // turned away and differs from call to call, so that clients spread out.
  absl::Status Admit(bool worker_is_idle, absl::Duration work)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // How long what there is delays a tensor that takes one worker as long as
  // `work`: each of the others by no more than that.
  absl::Duration Delay(absl::Duration work) const;

  void TensorOpened() {
    open_tensors_->count.fetch_add(1);
    if (tensors_.fetch_add(1) == 0) open_tensors_->callers.fetch_add(1);
  }
  void TensorClosed() {
    open_tensors_->count.fetch_sub(1);
    if (tensors_.fetch_sub(1) == 1) open_tensors_->callers.fetch_sub(1);
  }

  // How long one worker takes for `bytes` of a tensor, and for what comes when
  // a tensor of `tensor_bytes` is complete; zero while nothing is known.
  // Requires, as below: an RPC that handles tensors.
  absl::Duration FeedTime(Rpc rpc, int64_t bytes) const;
  absl::Duration FinishTime(Rpc rpc, int64_t tensor_bytes) const;
  // How long one worker takes for a search that should take `estimate` by its
  // spec. Estimates are off by a factor that depends on the machine and the
  // data. It is learned from earlier searches of about that length.
  absl::Duration SearchTime(Rpc rpc, absl::Duration estimate) const;
  // Learn from the time that feeding, finishing or searching took.
  void Fed(Rpc rpc, int64_t bytes, absl::Duration time);
  void Finished(Rpc rpc, int64_t tensor_bytes, absl::Duration time);
  void Searched(Rpc rpc, absl::Duration estimate, absl::Duration time);

 private:
  // Powers of two of bytes, and of nanoseconds.
  static constexpr int kSizes = 64;

  // The loads of tensors whose work has the same power of two in all: what is
  // left of it, and all of it.
  struct Loads {
    std::atomic<int64_t> work_ns{0};
    std::atomic<int64_t> tensor_ns{0};
    std::atomic<int64_t> count{0};
  };
  // State that tells if tensors of a size may come as a burst.
  struct Burst {
    bool allowed = true;
    // Goes up while there is hardly a queue for them, and down while there is.
    absl::Duration calm = absl::ZeroDuration();
    // When the last one came.
    absl::Duration last = -absl::InfiniteDuration();
  };

  void Add(int64_t work_ns, int64_t tensor_ns, int count);
  // How long such a tensor stands behind its like, and shorter ones.
  absl::Duration QueueDelay(absl::Duration work) const;
  // True if the caller may open one more tensor.
  bool HasPlace() const;
  // True if such a tensor may be part of a burst.
  bool MayBurst(absl::Duration work, bool is_calm)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // After a tensor was turned away; about `excess` has to be worked off before
  // there is room.
  absl::Duration RetryAfter(absl::Duration excess)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int threads_;
  const absl::Duration max_delay_;
  OpenTensors* const open_tensors_;
  // Number of open tensors of this caller.
  std::atomic<int64_t> tensors_{0};
  const Clock clock_;
  std::array<Loads, kSizes> loads_{};
  // How many are not zero.
  std::atomic<int> loaded_{0};
  // Moving averages.
  std::array<std::atomic<int64_t>, kTensorRpcCount> feed_ns_per_mib_{};
  std::array<std::array<std::atomic<int64_t>, kSizes>, kTensorRpcCount>
      finish_ns_{};
  // Ratios of the time that searches take to their estimates, in parts of
  // kRatioUnit.
  std::array<std::array<std::atomic<int64_t>, kSizes>, kTensorRpcCount>
      search_ratio_{};

  absl::Mutex mutex_;
  absl::BitGen random_ ABSL_GUARDED_BY(mutex_);
  std::array<Burst, kSizes> bursts_ ABSL_GUARDED_BY(mutex_){};
  // Since when tensors are counted, and the outcome of the time before that.
  absl::Duration window_start_ ABSL_GUARDED_BY(mutex_) =
      -absl::InfiniteDuration();
  int64_t admitted_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t refused_ ABSL_GUARDED_BY(mutex_) = 0;
  double refused_per_admitted_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_ADMISSION_H_
