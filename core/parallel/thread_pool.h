// A bounded pool of worker threads.

#ifndef QUANTD_CORE_PARALLEL_THREAD_POOL_H_
#define QUANTD_CORE_PARALLEL_THREAD_POOL_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

#include <functional>

namespace quantd::core {

// Runs tasks first come, first served. Thread-safe.
class ThreadPool {
 public:
  // Starts `thread_count` threads (at least 1).
  explicit ThreadPool(int thread_count);
  // Runs what was scheduled to its end, then joins.
  ~ThreadPool();

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int thread_count() const { return static_cast<int>(threads_.size()); }
  // Whether some thread has nothing to do, at this moment.
  bool has_idle_thread() const {
    return busy_threads_.load(std::memory_order_relaxed) < thread_count();
  }

  // Runs `task` on some worker, soon. Tasks must not throw.
  void Schedule(std::function<void()> task) ABSL_LOCKS_EXCLUDED(mutex_);

  // Calls body(0) ... body(n - 1), each once, on the workers and on the calling
  // thread, in no particular order, and returns when all are done. May be
  // called from a worker: the caller always makes progress by itself.
  void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t)> body)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Work() ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Mutex mutex_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<int> busy_threads_{0};
  std::vector<std::thread> threads_;
};

// pool->ParallelFor, or on the calling thread alone when there is no pool.
void ParallelFor(ThreadPool* pool, int64_t n,
                 absl::FunctionRef<void(int64_t)> body);

}  // namespace quantd::core

#endif  // QUANTD_CORE_PARALLEL_THREAD_POOL_H_
