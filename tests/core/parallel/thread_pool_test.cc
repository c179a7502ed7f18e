#include "core/parallel/thread_pool.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"

namespace quantd::core {
namespace {

TEST(ThreadPoolTest, HasAtLeastOneThread) {
  EXPECT_EQ(ThreadPool(0).thread_count(), 1);
  EXPECT_EQ(ThreadPool(-3).thread_count(), 1);
  EXPECT_EQ(ThreadPool(3).thread_count(), 3);
}

TEST(ThreadPoolTest, ItsThreadsAreAsNiceAsTheyShouldBe) {
  const int here = getpriority(PRIO_PROCESS, 0);
  int on_worker = 0;
  int on_nice_worker = 0;
  {
    ThreadPool pool(1);
    pool.Schedule([&] { on_worker = getpriority(PRIO_PROCESS, 0); });
    ThreadPool nice_pool(1, 0, /*nice=*/3);
    nice_pool.Schedule([&] { on_nice_worker = getpriority(PRIO_PROCESS, 0); });
  }
  EXPECT_EQ(on_worker, here);
  EXPECT_EQ(on_nice_worker, std::min(here + 3, 19));
  EXPECT_EQ(getpriority(PRIO_PROCESS, 0), here);
}

TEST(ThreadPoolTest, RunsTasksInTheOrderTheyCame) {
  std::vector<int> order;
  {
    ThreadPool pool(1);
    for (int i = 0; i < 100; ++i) {
      pool.Schedule([&order, i] { order.push_back(i); });
    }
  }
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[i], i);
}

TEST(ThreadPoolTest, RunsWhatWasScheduledBeforeItIsDestroyed) {
  std::atomic<int> done{0};
  {
    ThreadPool pool(2);
    for (int i = 0; i < 1000; ++i) pool.Schedule([&] { ++done; });
  }
  EXPECT_EQ(done, 1000);
}

TEST(ThreadPoolTest, CallsEachIndexOnce) {
  ThreadPool pool(3);
  for (const int64_t n : {0, 1, 2, 3, 4, 100, 10000}) {
    std::vector<std::atomic<int>> calls(n);
    pool.ParallelFor(n, [&](int64_t i) { ++calls[i]; });
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(calls[i], 1) << i << " of " << n;
  }
}

TEST(ThreadPoolTest, RunsASingleIndexOnTheCallingThread) {
  ThreadPool pool(2);
  std::thread::id id;
  pool.ParallelFor(1, [&](int64_t) { id = std::this_thread::get_id(); });
  EXPECT_EQ(id, std::this_thread::get_id());
}

TEST(ThreadPoolTest, UsesItsThreads) {
  ThreadPool pool(1);
  // Each waits for the other: one thread alone would never return.
  absl::Notification reached[2];
  pool.ParallelFor(2, [&](int64_t i) {
    reached[i].Notify();
    reached[1 - i].WaitForNotification();
  });
}

TEST(ThreadPoolTest, ReturnsOnlyWhenTheWorkersAreDoneToo) {
  ThreadPool pool(1);
  absl::Notification reached[2];
  std::atomic<int> done{0};
  const std::thread::id caller = std::this_thread::get_id();
  pool.ParallelFor(2, [&](int64_t i) {
    reached[i].Notify();
    reached[1 - i].WaitForNotification();
    // The caller would be back long before the worker is.
    if (std::this_thread::get_id() != caller) {
      for (int k = 0; k < 100000; ++k) std::this_thread::yield();
    }
    ++done;
  });
  EXPECT_EQ(done, 2);
}

TEST(ThreadPoolTest, ThrowsOnTheCallingThreadWhatAHelperThrew) {
  ThreadPool pool(1);
  const std::thread::id caller = std::this_thread::get_id();
  absl::Notification reached[2];
  std::atomic<int64_t> calls{0};
  const auto body = [&](int64_t i) {
    ++calls;
    if (i > 1) return;
    // Each waits for the other, so that one of them is on the helper.
    reached[i].Notify();
    reached[1 - i].WaitForNotification();
    if (std::this_thread::get_id() != caller) throw std::runtime_error("no");
  };
  try {
    pool.ParallelFor(2, body);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "no");
  }
  EXPECT_EQ(calls, 2);
}

TEST(ThreadPoolTest, TakesNoMoreIndicesAfterAnException) {
  ThreadPool pool(3);
  for (int round = 0; round < 100; ++round) {
    std::atomic<int64_t> calls{0};
    EXPECT_THROW(pool.ParallelFor(int64_t{1} << 40,
                                  [&](int64_t i) {
                                    ++calls;
                                    if (i == 5) throw std::bad_alloc();
                                  }),
                 std::bad_alloc);
    EXPECT_GE(calls, 6);
  }
  // The pool goes on.
  std::atomic<int64_t> calls{0};
  pool.ParallelFor(100, [&](int64_t) { ++calls; });
  EXPECT_EQ(calls, 100);
}

TEST(ThreadPoolTest, NestsWithoutDeadlockWhenEveryWorkerWaits) {
  ThreadPool pool(2);
  std::atomic<int64_t> calls{0};
  pool.ParallelFor(16, [&](int64_t) {
    pool.ParallelFor(
        16, [&](int64_t) { pool.ParallelFor(4, [&](int64_t) { ++calls; }); });
  });
  EXPECT_EQ(calls, 16 * 16 * 4);
}

TEST(ThreadPoolTest, FinishesALoopWhileAllWorkersAreBusy) {
  ThreadPool pool(1);
  absl::Notification release;
  pool.Schedule([&] { release.WaitForNotification(); });
  int64_t calls = 0;
  pool.ParallelFor(8, [&](int64_t) { ++calls; });
  EXPECT_EQ(calls, 8);
  release.Notify();
}

TEST(ThreadPoolTest, ServesManyCallersAtOnce) {
  ThreadPool pool(2);
  std::atomic<int64_t> calls{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        pool.ParallelFor(10, [&](int64_t) { ++calls; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(calls, 4 * 200 * 10);
}

TEST(ThreadPoolTest, GroupsDoNotWaitForEachOther) {
  ThreadPool pool(1, /*most_threads=*/2);
  absl::Notification stop;
  {
    const ThreadPool::GroupScope scope(1);
    for (int i = 0; i < 3; ++i) {
      pool.Schedule([&] { stop.WaitForNotification(); });
    }
  }
  absl::Notification done;
  {
    const ThreadPool::GroupScope scope(2);
    EXPECT_EQ(pool.BusyThreads(2), 0);
    // A task goes on in the group that it is of.
    pool.Schedule([&] {
      pool.Schedule([&] {
        EXPECT_EQ(ThreadPool::CurrentGroup(), 2u);
        done.Notify();
      });
    });
  }
  done.WaitForNotification();
  EXPECT_EQ(pool.BusyThreads(1), 1);
  stop.Notify();
}

TEST(ThreadPoolTest, GroupsTakeTurnsWhereThereAreNoMoreThreads) {
  std::vector<int> order;
  {
    ThreadPool pool(1);
    absl::Notification start;
    pool.Schedule([&] { start.WaitForNotification(); });
    for (const int group : {1, 2, 3}) {
      const ThreadPool::GroupScope scope(group);
      for (int i = 0; i < 2; ++i) {
        pool.Schedule([&order, group] { order.push_back(group); });
      }
    }
    start.Notify();
  }
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3, 1, 2, 3}));
}

}  // namespace
}  // namespace quantd::core
