#include "server/rpc/stream_account.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/parallel/thread_clock.h"
#include "core/parallel/thread_pool.h"
#include "server/guard/admission.h"
#include "server/guard/caller_share.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/rpc_environment.h"
#include "server/wire/rpcs.h"

namespace quantd::server::stream_account_test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr absl::Duration kWork = absl::Seconds(1);
constexpr absl::Duration kStep = absl::Milliseconds(2);

class StreamAccountTest : public ::testing::Test {
 protected:
  StreamAccountTest() {
    env_.budget = &budget_;
    env_.pool = &pool_;
    env_.store_pool = &pool_;
    env_.write_pool = &pool_;
    env_.statistics_pool = &pool_;
    env_.long_pool = &long_pool_;
  }

  // What a tensor like that would wait for.
  absl::Duration Delay() const { return share_->admission.Delay(2 * kWork); }

  core::ThreadPool pool_{1};
  core::ThreadPool long_pool_{1};
  MemoryBudget budget_{4 * kMiB};
  Admission::OpenTensors open_tensors_{16};
  const std::shared_ptr<CallerShare> share_ = std::make_shared<CallerShare>(
      /*group=*/1, /*threads=*/1, absl::Milliseconds(100), &open_tensors_);
  RpcEnvironment env_{};
};

TEST_F(StreamAccountTest, WhatWasAdmittedIsLoadUntilItIsDone) {
  StreamAccount account(env_, Rpc::kQuantize, share_);
  EXPECT_TRUE(account.Admit(kWork).ok());
  EXPECT_EQ(Delay(), kWork);
  StreamAccount other(env_, Rpc::kQuantize, share_);
  EXPECT_EQ(core::ErrorReason(other.Admit(kWork)), "OVERLOADED");
  EXPECT_EQ(Delay(), kWork);
  account.WorkLeft(kWork / 2, absl::ZeroDuration());
  account.Hold(0, /*rests=*/false);
  EXPECT_EQ(Delay(), kWork / 2);
  account.WorkLeft(absl::ZeroDuration(), kWork);
  account.Hold(0, /*rests=*/false);
  EXPECT_EQ(Delay(), absl::ZeroDuration());
}

TEST_F(StreamAccountTest, ATensorDoesNotStandInItsOwnWay) {
  StreamAccount account(env_, Rpc::kQuantize, share_);
  EXPECT_TRUE(account.Admit(kWork).ok());
  EXPECT_TRUE(account.Admit(2 * kWork).ok());
  EXPECT_EQ(Delay(), 2 * kWork);
}

TEST_F(StreamAccountTest, ALongComputationIsLessLoadTheFurtherItIs) {
  StreamAccount account(env_, Rpc::kQuantize, share_);
  const core::ThreadClock clock = core::ThreadClock::OfThisThread();
  const auto compute = [&clock](absl::Duration time) {
    const absl::Duration end = clock.Now() + time;
    while (clock.Now() < end) continue;
  };
  const auto delay = [&] {
    account.Hold(0, /*rests=*/false);
    return Delay();
  };
  EXPECT_TRUE(account.Admit(kWork).ok());
  const absl::Duration begin = clock.Now();
  account.BeginLong();
  compute(kStep);
  const absl::Duration first = delay();
  EXPECT_LE(first, kWork - kStep);
  // By what it had of the processors, and not by the time that went by.
  EXPECT_GE(first, kWork - (clock.Now() - begin));
  compute(kStep);
  EXPECT_LE(delay(), first - kStep);
  account.EndLong();
  const absl::Duration last = delay();
  // What the thread does afterwards is for others.
  compute(kStep);
  EXPECT_EQ(delay(), last);
  account.WorkLeft(kWork, absl::ZeroDuration());
  EXPECT_EQ(delay(), kWork);
}

TEST_F(StreamAccountTest, AStreamThatRestsIsNoLoad) {
  StreamAccount account(env_, Rpc::kQuantize, share_);
  EXPECT_TRUE(account.Admit(kWork).ok());
  account.Hold(0, /*rests=*/true);
  EXPECT_EQ(Delay(), absl::ZeroDuration());
  account.Hold(0, /*rests=*/false);
  EXPECT_EQ(Delay(), kWork);
}

TEST_F(StreamAccountTest, WhatIsHeldIsInTransitUntilTheStreamIsGone) {
  {
    StreamAccount account(env_, Rpc::kQuantize, share_);
    account.Hold(3 * kMiB, /*rests=*/false);
    EXPECT_EQ(budget_.used_bytes(), 3 * kMiB);
    EXPECT_TRUE(account.OverShare(0));
    account.Hold(kMiB, /*rests=*/false);
    EXPECT_FALSE(account.OverShare(0));
    EXPECT_TRUE(account.OverShare(2 * kMiB));
  }
  EXPECT_EQ(budget_.used_bytes(), 0);
}

}  // namespace
}  // namespace quantd::server::stream_account_test
