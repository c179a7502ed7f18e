// A bounded pool of worker threads.

#ifndef QUANTD_CORE_PARALLEL_THREAD_POOL_H_
#define QUANTD_CORE_PARALLEL_THREAD_POOL_H_

#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

#include <functional>

namespace quantd::core {

// Runs tasks. Those of one group run first come, first served, `thread_count`
// of them at a time. Groups do not wait for each other: each has that many
// threads for itself, and the kernel shares the processors among them. Past
// `most_threads` in all, groups take turns. Thread-safe.
class ThreadPool {
 public:
  // Whose work a task is.
  using Group = int64_t;

  // While it lives, what the thread schedules is of that group. A task begins
  // in its own.
  class GroupScope {
   public:
    explicit GroupScope(Group group);
    ~GroupScope();
    GroupScope(const GroupScope&) = delete;
    GroupScope& operator=(const GroupScope&) = delete;

   private:
    const Group outer_;
  };

  // The group of what the calling thread does; 0 outside of all.
  static Group CurrentGroup();

  // `thread_count`  of one group, at least 1; threads start as tasks come, one
  //                 ahead of them, and from each other: a thread is as nice as
  //                 the one that starts it.
  // `nice`          how much nicer than the calling thread they are: what they
  //                 compute leaves the processors to others first.
  explicit ThreadPool(int thread_count, int most_threads = 0, int nice = 0);
  // Runs what was scheduled to its end, then joins.
  ~ThreadPool();

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Most threads that one group has at a time.
  int thread_count() const { return thread_count_; }
  // How many tasks of the group run at this moment.
  int BusyThreads(Group group) const ABSL_LOCKS_EXCLUDED(mutex_);

  // Runs `task` on some worker, soon. Tasks must not throw.
  void Schedule(std::function<void()> task) ABSL_LOCKS_EXCLUDED(mutex_);

  // Calls body(0) ... body(n - 1), each once, on the workers and on the calling
  // thread, in no particular order, and returns when all are done. May be
  // called from a worker: the caller always makes progress by itself. What a
  // call throws is thrown here, on whatever thread it was; indices that nobody
  // has begun with then are left out.
  void ParallelFor(int64_t n, absl::FunctionRef<void(int64_t)> body)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // The tasks of a group.
  struct Queue {
    std::deque<std::function<void()>> tasks;
    // How many of its tasks run.
    int running = 0;
    // It is in ready_.
    bool is_ready = false;
  };

  void Work() ABSL_LOCKS_EXCLUDED(mutex_);
  // Lines the group up if it has a task that may run.
  void LineUp(Group group, Queue* queue) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::function<void()> TakeTask(Group group)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndTask(Group group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddThread() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int thread_count_;
  const int most_threads_;
  // Priority of the pool's threads; 0 if they are as nice as all.
  const int priority_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<Group, Queue> queues_ ABSL_GUARDED_BY(mutex_);
  // Groups whose next task may run, in the order of their turns.
  std::deque<Group> ready_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // Threads without a task, and those that start.
  int idle_threads_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
};

// pool->ParallelFor, or on the calling thread alone when there is no pool.
void ParallelFor(ThreadPool* pool, int64_t n,
                 absl::FunctionRef<void(int64_t)> body);

}  // namespace quantd::core

#endif  // QUANTD_CORE_PARALLEL_THREAD_POOL_H_
