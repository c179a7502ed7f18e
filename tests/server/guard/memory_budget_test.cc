#include "server/guard/memory_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

constexpr char kWayOut[] = "send less at once";

TEST(MemoryBudgetTest, GivesBackWhenALeaseEnds) {
  MemoryBudget budget(100);
  {
    absl::StatusOr<MemoryBudget::Lease> lease =
        budget.Acquire(60, absl::ZeroDuration(), kWayOut);
    ASSERT_TRUE(lease.ok()) << lease.status();
    EXPECT_EQ(lease->bytes(), 60);
    EXPECT_EQ(budget.used_bytes(), 60);
  }
  EXPECT_EQ(budget.used_bytes(), 0);
}

TEST(MemoryBudgetTest, MovingALeaseKeepsItsBytesOnce) {
  MemoryBudget budget(100);
  MemoryBudget::Lease first =
      *budget.Acquire(60, absl::ZeroDuration(), kWayOut);
  MemoryBudget::Lease second = std::move(first);
  EXPECT_EQ(budget.used_bytes(), 60);
  MemoryBudget::Lease third =
      *budget.Acquire(30, absl::ZeroDuration(), kWayOut);
  third = std::move(second);
  EXPECT_EQ(budget.used_bytes(), 60);
  EXPECT_EQ(third.bytes(), 60);
  third.Release();
  third.Release();
  EXPECT_EQ(budget.used_bytes(), 0);
}

TEST(MemoryBudgetTest, TimesOutWithAWayOutAndARetry) {
  MemoryBudget budget(100);
  MemoryBudget::Lease held = *budget.Acquire(60, absl::ZeroDuration(), kWayOut);
  const absl::Time start = absl::Now();
  const absl::Status status =
      budget.Acquire(41, absl::Milliseconds(20), kWayOut).status();
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(20));
  EXPECT_EQ(core::ErrorReason(status), "MEMORY_BUDGET") << status;
  EXPECT_THAT(std::string(status.message()), testing::EndsWith(kWayOut));
  EXPECT_GT(core::ErrorRetryAfter(status), absl::ZeroDuration());
  EXPECT_EQ(budget.used_bytes(), 60);
  EXPECT_TRUE(budget.Acquire(40, absl::ZeroDuration(), kWayOut).ok());
}

TEST(MemoryBudgetTest, RefusesAtOnceWhatNeverFits) {
  MemoryBudget budget(100);
  for (const int64_t bytes :
       {int64_t{101}, std::numeric_limits<int64_t>::max()}) {
    const absl::Status status =
        budget.Acquire(bytes, absl::InfiniteDuration(), kWayOut).status();
    EXPECT_EQ(core::ErrorReason(status), "MEMORY_BUDGET") << status;
    EXPECT_EQ(core::ErrorRetryAfter(status), absl::ZeroDuration());
  }
}

TEST(MemoryBudgetTest, WaitsForOthersToGiveBack) {
  MemoryBudget budget(100);
  MemoryBudget::Lease held = *budget.Acquire(80, absl::ZeroDuration(), kWayOut);
  absl::Notification started;
  std::thread waiter([&] {
    started.Notify();
    absl::StatusOr<MemoryBudget::Lease> lease =
        budget.Acquire(90, absl::InfiniteDuration(), kWayOut);
    ASSERT_TRUE(lease.ok()) << lease.status();
    EXPECT_EQ(budget.used_bytes(), 90);
  });
  started.WaitForNotification();
  held.Release();
  waiter.join();
  EXPECT_EQ(budget.used_bytes(), 0);
}

TEST(MemoryBudgetTest, GrowsALease) {
  MemoryBudget budget(100);
  MemoryBudget::Lease lease;
  ASSERT_TRUE(budget.Grow(&lease, 10, absl::ZeroDuration(), kWayOut).ok());
  ASSERT_TRUE(budget.Grow(&lease, 100, absl::ZeroDuration(), kWayOut).ok());
  EXPECT_EQ(budget.used_bytes(), 100);
  ASSERT_TRUE(budget.Grow(&lease, 50, absl::ZeroDuration(), kWayOut).ok());
  EXPECT_EQ(lease.bytes(), 100);
  const absl::Status status =
      budget.Grow(&lease, 101, absl::ZeroDuration(), kWayOut);
  EXPECT_EQ(core::ErrorReason(status), "MEMORY_BUDGET") << status;
  EXPECT_EQ(lease.bytes(), 100);
  lease.Release();
  EXPECT_EQ(budget.used_bytes(), 0);
}

TEST(MemoryBudgetTest, NeverGivesMoreThanItsTotal) {
  constexpr int64_t kTotal = 10;
  MemoryBudget budget(kTotal);
  std::atomic<int64_t> held{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 5000; ++i) {
        const int64_t bytes = 1 + (i + t) % 7;
        absl::StatusOr<MemoryBudget::Lease> lease =
            budget.Acquire(bytes, absl::InfiniteDuration(), kWayOut);
        ASSERT_TRUE(lease.ok()) << lease.status();
        EXPECT_LE(held.fetch_add(bytes) + bytes, kTotal);
        held.fetch_sub(bytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget.used_bytes(), 0);
}

}  // namespace
}  // namespace quantd::server
