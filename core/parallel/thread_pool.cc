#include "core/parallel/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

namespace quantd::core {
namespace {

// What the threads of one ParallelFor share. Helpers that start after the last
// index was taken still hold it, but never touch `body`.
class SharedLoop {
 public:
  SharedLoop(int64_t n, absl::FunctionRef<void(int64_t)> body)
      : n_(n), body_(body), unfinished_(n) {}

  // Takes indices until there are none.
  void Run() ABSL_LOCKS_EXCLUDED(mutex_) {
    int64_t finished = 0;
    for (int64_t i = next_.fetch_add(1); i < n_; i = next_.fetch_add(1)) {
      body_(i);
      ++finished;
    }
    if (finished == 0) return;
    absl::MutexLock lock(&mutex_);
    unfinished_ -= finished;
  }

  void Wait() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](int64_t* unfinished) { return *unfinished == 0; }, &unfinished_));
  }

 private:
  const int64_t n_;
  const absl::FunctionRef<void(int64_t)> body_;
  std::atomic<int64_t> next_{0};
  absl::Mutex mutex_;
  int64_t unfinished_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

ThreadPool::ThreadPool(int thread_count) {
  const int count = std::max(thread_count, 1);
  threads_.reserve(count);
  for (int i = 0; i < count; ++i) {
    threads_.emplace_back([this] { Work(); });
  }
}

ThreadPool::~ThreadPool() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Schedule(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  queue_.push_back(std::move(task));
}

void ThreadPool::ParallelFor(int64_t n, absl::FunctionRef<void(int64_t)> body) {
  if (n <= 0) return;
  if (n == 1) {
    body(0);
    return;
  }
  const auto loop = std::make_shared<SharedLoop>(n, body);
  const int64_t helpers = std::min<int64_t>(n - 1, thread_count());
  {
    absl::MutexLock lock(&mutex_);
    for (int64_t i = 0; i < helpers; ++i) {
      queue_.push_back([loop] { loop->Run(); });
    }
  }
  loop->Run();
  // Only indices that some thread is running are left, so this ends even if
  // every worker waits here.
  loop->Wait();
}

void ThreadPool::Work() {
  for (;;) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(
          +[](ThreadPool* pool) ABSL_NO_THREAD_SAFETY_ANALYSIS {
            return pool->stopping_ || !pool->queue_.empty();
          },
          this));
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    busy_threads_.fetch_add(1, std::memory_order_relaxed);
    task();
    busy_threads_.fetch_sub(1, std::memory_order_relaxed);
  }
}

void ParallelFor(ThreadPool* pool, int64_t n,
                 absl::FunctionRef<void(int64_t)> body) {
  if (pool != nullptr) return pool->ParallelFor(n, body);
  for (int64_t i = 0; i < n; ++i) body(i);
}

}  // namespace quantd::core
