#include "core/parallel/thread_pool.h"

#include <atomic>
#include <cstdint>
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
    EXPECT_TRUE(pool.HasIdleThread(2));
    // A task goes on in the group that it is of.
    pool.Schedule([&] {
      pool.Schedule([&] {
        EXPECT_EQ(ThreadPool::CurrentGroup(), 2u);
        done.Notify();
      });
    });
  }
  done.WaitForNotification();
  EXPECT_FALSE(pool.HasIdleThread(1));
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
