#include "server/guard/memory_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/errors.h"

namespace quantd::server::memory_budget_test {
namespace {

constexpr char kWayOut[] = "send less at once";

TEST(MemoryBudgetTest, GivesBackWhenALeaseEnds) {
  MemoryBudget budget(100);
  {
    absl::StatusOr<MemoryBudget::Lease> lease = budget.Acquire(60, kWayOut);
    ASSERT_TRUE(lease.ok()) << lease.status();
    EXPECT_EQ(lease->bytes(), 60);
    EXPECT_EQ(budget.used_bytes(), 60);
  }
  EXPECT_EQ(budget.used_bytes(), 0);
}

TEST(MemoryBudgetTest, MovingALeaseKeepsItsBytesOnce) {
  MemoryBudget budget(100);
  MemoryBudget::Lease first = *budget.Acquire(60, kWayOut);
  MemoryBudget::Lease second = std::move(first);
  EXPECT_EQ(budget.used_bytes(), 60);
  MemoryBudget::Lease third = *budget.Acquire(30, kWayOut);
  third = std::move(second);
  EXPECT_EQ(budget.used_bytes(), 60);
  EXPECT_EQ(third.bytes(), 60);
  third.Release();
  third.Release();
  EXPECT_EQ(budget.used_bytes(), 0);
}

TEST(MemoryBudgetTest, RefusesWithAWayOutAndARetry) {
  MemoryBudget budget(100);
  MemoryBudget::Lease held = *budget.Acquire(60, kWayOut);
  const absl::Status status = budget.Acquire(41, kWayOut).status();
  EXPECT_EQ(core::ErrorReason(status), "MEMORY_BUDGET") << status;
  EXPECT_THAT(std::string(status.message()), ::testing::EndsWith(kWayOut));
  EXPECT_GT(core::ErrorRetryAfter(status), absl::ZeroDuration());
  EXPECT_EQ(budget.used_bytes(), 60);
  EXPECT_TRUE(budget.Acquire(40, kWayOut).ok());
}

TEST(MemoryBudgetTest, CountsWhatNobodyCanRefuse) {
  MemoryBudget budget(100);
  MemoryBudget::Lease lease;
  budget.Count(&lease, 60);
  EXPECT_EQ(budget.used_bytes(), 60);
  budget.Count(&lease, 150);
  EXPECT_EQ(lease.bytes(), 150);
  EXPECT_EQ(budget.used_bytes(), 150);
  EXPECT_FALSE(budget.Acquire(1, kWayOut).ok());
  budget.Count(&lease, 20);
  EXPECT_EQ(budget.used_bytes(), 150);
  lease.Release();
  EXPECT_EQ(budget.used_bytes(), 0);
}

TEST(MemoryBudgetTest, GivesNoRetryForWhatNeverFits) {
  MemoryBudget budget(100);
  for (const int64_t bytes :
       {int64_t{101}, std::numeric_limits<int64_t>::max()}) {
    const absl::Status status = budget.Acquire(bytes, kWayOut).status();
    EXPECT_EQ(core::ErrorReason(status), "MEMORY_BUDGET") << status;
    EXPECT_EQ(core::ErrorRetryAfter(status), absl::ZeroDuration());
  }
}

TEST(MemoryBudgetTest, GrowsALease) {
  MemoryBudget budget(100);
  MemoryBudget::Lease lease;
  ASSERT_TRUE(budget.Grow(&lease, 10, kWayOut).ok());
  ASSERT_TRUE(budget.Grow(&lease, 100, kWayOut).ok());
  EXPECT_EQ(budget.used_bytes(), 100);
  ASSERT_TRUE(budget.Grow(&lease, 50, kWayOut).ok());
  EXPECT_EQ(lease.bytes(), 100);
  const absl::Status status = budget.Grow(&lease, 101, kWayOut);
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
            budget.Acquire(bytes, kWayOut);
        if (!lease.ok()) continue;
        EXPECT_LE(held.fetch_add(bytes) + bytes, kTotal);
        held.fetch_sub(bytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget.used_bytes(), 0);
}

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(MemoryBudgetTest, CountsWhatIsInTransitBeyondWhatIsFree) {
  MemoryBudget budget(16 * kMiB, /*transit_bytes=*/4 * kMiB);
  {
    MemoryBudget::Transit first(&budget);
    MemoryBudget::Transit second(&budget);
    first.Set(3 * kMiB);
    EXPECT_EQ(budget.used_bytes(), 0);
    second.Set(3 * kMiB - 1);
    EXPECT_EQ(budget.used_bytes(), 2 * kMiB);
    EXPECT_TRUE(budget.roomy());
    EXPECT_FALSE(second.excessive(6 * kMiB));
    EXPECT_TRUE(second.excessive(6 * kMiB + 1));
    // Too little to count.
    second.Set(1000);
    EXPECT_EQ(budget.used_bytes(), 0);
    second.Set(13 * kMiB);
    EXPECT_EQ(budget.used_bytes(), 12 * kMiB);
    EXPECT_FALSE(budget.roomy());
    EXPECT_EQ(budget.leased_bytes(), 0);
    EXPECT_FALSE(budget.Acquire(5 * kMiB, kWayOut).ok());
    EXPECT_TRUE(budget.Acquire(4 * kMiB, kWayOut).ok());
  }
  EXPECT_EQ(budget.used_bytes(), 0);
}

TEST(MemoryBudgetTest, TransitIsExcessiveBeyondAnEqualShareOnly) {
  MemoryBudget budget(16 * kMiB, /*transit_bytes=*/4 * kMiB);
  const absl::StatusOr<MemoryBudget::Lease> lease =
      budget.Acquire(8 * kMiB, kWayOut);
  MemoryBudget::Transit large(&budget);
  MemoryBudget::Transit small(&budget);
  MemoryBudget::Transit none(&budget);
  large.Set(10 * kMiB);
  small.Set(2 * kMiB);
  EXPECT_FALSE(budget.exceeded());
  EXPECT_FALSE(large.excessive(0));
  small.Set(3 * kMiB);
  EXPECT_TRUE(budget.exceeded());
  EXPECT_TRUE(large.excessive(0));
  EXPECT_FALSE(small.excessive(0));
  EXPECT_FALSE(none.excessive(0));
  const absl::Status status = budget.TransitError();
  EXPECT_EQ(core::ErrorReason(status), "MEMORY_BUDGET");
  EXPECT_GT(core::ErrorRetryAfter(status), absl::ZeroDuration());
  large.Set(0);
  EXPECT_FALSE(budget.exceeded());
}

TEST(MemoryBudgetTest, TakesForAnObjectOnce) {
  MemoryBudget budget(100);
  std::weak_ptr<int> alive;
  {
    auto object = std::make_shared<int>();
    alive = object;
    auto first = budget.AcquireFor(object, 60, "");
    ASSERT_TRUE(first.ok());
    auto second = budget.AcquireFor(object, 60, "");
    ASSERT_TRUE(second.ok());
    EXPECT_EQ(budget.used_bytes(), 60);
    EXPECT_TRUE(absl::IsResourceExhausted(
        budget.AcquireFor(std::make_shared<int>(), 60, "").status()));
    first->reset();
    EXPECT_EQ(budget.used_bytes(), 60);
    second->reset();
    EXPECT_EQ(budget.used_bytes(), 0);
    auto third = budget.AcquireFor(object, 60, "");
    ASSERT_TRUE(third.ok());
    EXPECT_EQ(budget.used_bytes(), 60);
    object.reset();
    EXPECT_FALSE(alive.expired());
  }
  EXPECT_TRUE(alive.expired());
  EXPECT_EQ(budget.used_bytes(), 0);
}

TEST(MemoryBudgetTest, TakesAnObjectOverThatIsPaidFor) {
  MemoryBudget budget(100);
  const auto object = std::make_shared<int>();
  absl::StatusOr<MemoryBudget::Lease> lease = budget.Acquire(60, "");
  ASSERT_TRUE(lease.ok());
  auto first = budget.AcquireFor(object, 60, "", *std::move(lease));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(budget.used_bytes(), 60);
  lease = budget.Acquire(40, "");
  ASSERT_TRUE(lease.ok());
  auto second = budget.AcquireFor(object, 60, "", *std::move(lease));
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(budget.used_bytes(), 60);
  first->reset();
  second->reset();
  EXPECT_EQ(budget.used_bytes(), 0);
}

TEST(MemoryBudgetTest, GivesAnEqualShareWhileSomebodyWaits) {
  absl::Duration now;
  MemoryBudget budget(100, 0, [&] { return now; });
  const auto acquire = [&](core::ThreadPool::Group caller, int64_t bytes) {
    const core::ThreadPool::GroupScope scope(caller);
    return budget.Acquire(bytes, "wait");
  };
  // Alone, all of it.
  absl::StatusOr<MemoryBudget::Lease> first = acquire(1, 60);
  absl::StatusOr<MemoryBudget::Lease> second = acquire(1, 40);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_FALSE(acquire(2, 30).ok());
  // What becomes free is for who waits.
  second->Release();
  EXPECT_FALSE(acquire(1, 40).ok());
  absl::StatusOr<MemoryBudget::Lease> other = acquire(2, 30);
  ASSERT_TRUE(other.ok());
  // And who has more than a share waits for who has less.
  first->Release();
  EXPECT_FALSE(acquire(2, 30).ok());
  first = acquire(1, 40);
  ASSERT_TRUE(first.ok());
  EXPECT_FALSE(acquire(1, 20).ok());
  EXPECT_TRUE(acquire(1, 10).ok());
  // Who was refused and went away is forgotten.
  now += absl::Seconds(10);
  EXPECT_TRUE(acquire(1, 20).ok());
  first->Release();
  // Nor do those that have nothing wait for each other.
  other->Release();
  EXPECT_FALSE(budget.Acquire(101, "wait").ok());
  absl::StatusOr<MemoryBudget::Lease> held = budget.Acquire(50, "wait");
  EXPECT_FALSE(acquire(1, 60).ok());
  EXPECT_FALSE(acquire(2, 60).ok());
  held->Release();
  EXPECT_TRUE(acquire(1, 60).ok());
  EXPECT_TRUE(acquire(2, 60).ok());
  // What has no caller is limited by the total alone, and nobody waits for it.
  EXPECT_TRUE(budget.Acquire(100, "wait").ok());
  now += absl::Seconds(10);
  first = acquire(1, 60);
  ASSERT_TRUE(first.ok());
  EXPECT_FALSE(budget.Acquire(50, "wait").ok());
  EXPECT_TRUE(acquire(1, 40).ok());
}

}  // namespace
}  // namespace quantd::server::memory_budget_test
