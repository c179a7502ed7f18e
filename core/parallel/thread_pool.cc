#include "core/parallel/thread_pool.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

namespace quantd::core {
namespace {

// So many groups may come and go without anything being allocated.
constexpr size_t kKeptQueues = 64;

thread_local ThreadPool::Group current_group = 0;

// State that the threads of one ParallelFor share. Helpers that start after the
// last index was taken still hold it, but never touch `body`. After an
// exception no index is taken any more.
class SharedLoop {
 public:
  SharedLoop(int64_t n, absl::FunctionRef<void(int64_t)> body)
      : n_(n), body_(body), unfinished_(n) {}

  // Takes indices until there are none.
  void Run() ABSL_LOCKS_EXCLUDED(mutex_) {
    int64_t finished = 0;
    std::exception_ptr thrown;
    for (int64_t i = next_.fetch_add(1); i < n_; i = next_.fetch_add(1)) {
      ++finished;
      try {
        body_(i);
      } catch (...) {
        thrown = std::current_exception();
        // Counts the indices that nobody will take.
        finished += std::max<int64_t>(0, n_ - next_.exchange(n_));
      }
    }
    if (finished == 0) return;
    absl::MutexLock lock(&mutex_);
    unfinished_ -= finished;
    if (thrown_ == nullptr) thrown_ = std::move(thrown);
  }

  // Throws what a call of the body threw, if any did: the first that ended.
  void Wait() ABSL_LOCKS_EXCLUDED(mutex_) {
    std::exception_ptr thrown;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(
          +[](int64_t* unfinished) { return *unfinished == 0; }, &unfinished_));
      thrown = std::move(thrown_);
    }
    if (thrown != nullptr) std::rethrow_exception(std::move(thrown));
  }

 private:
  const int64_t n_;
  const absl::FunctionRef<void(int64_t)> body_;
  std::atomic<int64_t> next_{0};
  absl::Mutex mutex_;
  int64_t unfinished_ ABSL_GUARDED_BY(mutex_);
  std::exception_ptr thrown_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

ThreadPool::GroupScope::GroupScope(Group group)
    : outer_(std::exchange(current_group, group)) {}

ThreadPool::GroupScope::~GroupScope() { current_group = outer_; }

ThreadPool::Group ThreadPool::CurrentGroup() { return current_group; }

ThreadPool::ThreadPool(int thread_count, int most_threads, int nice)
    : thread_count_(std::max(thread_count, 1)),
      most_threads_(std::max(thread_count_, most_threads)),
      priority_(nice > 0 ? getpriority(PRIO_PROCESS, 0) + nice : 0) {
  absl::MutexLock lock(&mutex_);
  AddThread();
}

ThreadPool::~ThreadPool() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

int ThreadPool::BusyThreads(Group group) const {
  absl::MutexLock lock(&mutex_);
  const auto it = queues_.find(group);
  return it == queues_.end() ? 0 : it->second.running;
}

void ThreadPool::Schedule(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  Queue& queue = queues_[current_group];
  queue.tasks.push_back(std::move(task));
  LineUp(current_group, &queue);
}

void ThreadPool::LineUp(Group group, Queue* queue) {
  if (queue->is_ready || queue->tasks.empty() ||
      queue->running == thread_count_) {
    return;
  }
  queue->is_ready = true;
  ready_.push_back(group);
}

void ThreadPool::AddThread() {
  if (stopping_ || static_cast<int>(threads_.size()) == most_threads_) return;
  try {
    threads_.emplace_back([this] { Work(); });
    ++idle_threads_;
  } catch (const std::system_error&) {
    // The system has no more for us: those that are there take turns.
    if (threads_.empty()) throw;
  }
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
    Queue& queue = queues_[current_group];
    for (int64_t i = 0; i < helpers; ++i) {
      queue.tasks.push_back([loop] { loop->Run(); });
    }
    LineUp(current_group, &queue);
  }
  loop->Run();
  // Only indices that some thread is running are left, so this ends even if
  // every worker waits here.
  loop->Wait();
}

void ThreadPool::Work() {
  // On Linux of this thread alone.
  if (priority_ != 0) setpriority(PRIO_PROCESS, 0, priority_);
  mutex_.Lock();
  for (;;) {
    mutex_.Await(absl::Condition(
        +[](ThreadPool* pool) ABSL_NO_THREAD_SAFETY_ANALYSIS {
          return pool->stopping_ || !pool->ready_.empty();
        },
        this));
    // A group that has tasks, but is not ready, has threads that see to them.
    if (ready_.empty()) break;
    --idle_threads_;
    const Group group = ready_.front();
    ready_.pop_front();
    std::function<void()> task = TakeTask(group);
    // For the next task, whoever schedules that.
    if (idle_threads_ <= static_cast<int>(ready_.size())) AddThread();
    mutex_.Unlock();
    {
      const GroupScope scope(group);
      task();
      // Destroys the task within its group: things that it holds may schedule
      // something as they go.
      task = nullptr;
    }
    mutex_.Lock();
    ++idle_threads_;
    EndTask(group);
  }
  mutex_.Unlock();
}

std::function<void()> ThreadPool::TakeTask(Group group) {
  Queue& queue = queues_[group];
  queue.is_ready = false;
  std::function<void()> task = std::move(queue.tasks.front());
  queue.tasks.pop_front();
  ++queue.running;
  LineUp(group, &queue);
  return task;
}

void ThreadPool::EndTask(Group group) {
  Queue& queue = queues_[group];
  --queue.running;
  LineUp(group, &queue);
  if (queue.running == 0 && queue.tasks.empty() &&
      queues_.size() > kKeptQueues) {
    queues_.erase(group);
  }
}

void ParallelFor(ThreadPool* pool, int64_t n,
                 absl::FunctionRef<void(int64_t)> body) {
  if (pool != nullptr) return pool->ParallelFor(n, body);
  for (int64_t i = 0; i < n; ++i) body(i);
}

}  // namespace quantd::core
