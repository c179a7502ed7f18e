#include "server/guard/admission.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "server/metrics/metrics.h"
#include "tests/support/metric_value.h"

namespace quantd::server {
namespace {

constexpr absl::Duration kDelay = absl::Milliseconds(100);
constexpr int64_t kMany = 1000;
constexpr bool kAllBusy = false;
constexpr absl::Duration kWork = absl::Milliseconds(100);

TEST(AdmissionTest, TakesTensorsWhileAWorkerIsFree) {
  Admission admission(/*threads=*/2, kDelay, kMany);
  EXPECT_TRUE(admission.Admit(/*worker_is_idle=*/true, kWork).ok());
  std::vector<std::unique_ptr<Admission::Load>> loads;
  const auto add = [&] {
    loads.push_back(std::make_unique<Admission::Load>(&admission));
    loads.back()->Set(absl::Hours(1));
  };
  add();
  EXPECT_TRUE(admission.Admit(/*worker_is_idle=*/true, kWork).ok());
  add();
  add();
  // The third is on its way to the worker that seems idle.
  EXPECT_FALSE(admission.Admit(/*worker_is_idle=*/true, kWork).ok());
  EXPECT_FALSE(admission.Admit(/*worker_is_idle=*/false, kWork).ok());
}

TEST(AdmissionTest, TurnsTensorsAwayWhileTheWorkersAreTooFarBehind) {
  Admission admission(/*threads=*/2, kDelay, kMany);
  // From here on for a while, a queue is a burst.
  EXPECT_TRUE(admission.Admit(kAllBusy, kWork).ok());
  Admission::Load first(&admission);
  Admission::Load second(&admission);
  first.Set(kDelay);
  second.Set(kDelay);
  EXPECT_EQ(admission.Delay(kWork), kDelay);
  EXPECT_TRUE(admission.Admit(kAllBusy, kWork).ok());
  {
    Admission::Load third(&admission);
    third.Set(absl::Milliseconds(4));
    const absl::Status status = admission.Admit(kAllBusy, kWork);
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_EQ(status.message(),
              "OVERLOADED: the workers are 102ms behind, expected at most "
              "100ms");
    EXPECT_GT(core::ErrorRetryAfter(status), absl::ZeroDuration());
  }
  EXPECT_TRUE(admission.Admit(kAllBusy, kWork).ok());
  first.Set(absl::ZeroDuration());
  EXPECT_EQ(admission.Delay(kWork), kDelay / 2);
}

// Long enough for a machine that stalls.
constexpr absl::Duration kLongDelay = absl::Seconds(9);

TEST(AdmissionTest, LetsShortTensorsPassLongOnes) {
  constexpr absl::Duration kShort = absl::Milliseconds(900);
  Admission admission(/*threads=*/1, kLongDelay, kMany);
  EXPECT_TRUE(admission.Admit(kAllBusy, kShort).ok());
  Admission::Load first(&admission);
  Admission::Load second(&admission);
  first.Set(absl::Minutes(1));
  second.Set(absl::Minutes(2));
  EXPECT_EQ(admission.Delay(kShort), 2 * kShort);
  EXPECT_EQ(admission.Delay(absl::Seconds(90)), absl::Seconds(150));
  // As many short ones as there is time for.
  std::vector<std::unique_ptr<Admission::Load>> loads;
  while (admission.Admit(kAllBusy, kShort).ok()) {
    ASSERT_LT(loads.size(), 100);
    loads.push_back(std::make_unique<Admission::Load>(&admission));
    loads.back()->Set(kShort);
  }
  EXPECT_EQ(loads.size(), 9);
}

TEST(AdmissionTest, LetsLongTensorsShareAWorker) {
  constexpr absl::Duration kMinute = absl::Minutes(1);
  Admission admission(/*threads=*/1, kDelay, kMany);
  std::vector<std::unique_ptr<Admission::Load>> loads;
  while (admission.Admit(kAllBusy, kMinute).ok()) {
    ASSERT_LT(loads.size(), 100);
    loads.push_back(std::make_unique<Admission::Load>(&admission));
    loads.back()->Set(kMinute);
  }
  EXPECT_EQ(loads.size(), 5);
}

// What is much longer is no queue that short ones stand in, however long it has
// been there.
TEST(AdmissionTest, LetsShortTensorsPassLongOnesForEver) {
  constexpr absl::Duration kShort = absl::Milliseconds(20);
  Admission admission(/*threads=*/2, kDelay, kMany);
  std::vector<std::unique_ptr<Admission::Load>> loads;
  for (int i = 0; i < 4; ++i) {
    loads.push_back(std::make_unique<Admission::Load>(&admission));
    // Nobody knows how long they will take; they took long enough.
    loads.back()->Set(absl::Milliseconds(100), absl::Milliseconds(400));
  }
  EXPECT_EQ(admission.Delay(kShort), 2 * kShort);
  EXPECT_TRUE(admission.Admit(kAllBusy, kShort).ok());
}

// A burst may wait for the whole delay; what comes when all have waited for as
// long as that waits no longer than it takes.
TEST(AdmissionTest, LetsNoQueueStand) {
  constexpr absl::Duration kMost = absl::Seconds(1);
  constexpr absl::Duration kShort = absl::Milliseconds(100);
  Admission admission(/*threads=*/1, kMost, kMany);
  Admission::Load load(&admission);
  EXPECT_TRUE(admission.Admit(kAllBusy, kShort).ok());
  std::vector<std::unique_ptr<Admission::Load>> loads;
  for (int i = 0; i < 5; ++i) {
    loads.push_back(std::make_unique<Admission::Load>(&admission));
    loads.back()->Set(kShort);
  }
  EXPECT_TRUE(admission.Admit(kAllBusy, kShort).ok());
  absl::Status status;
  EXPECT_TRUE(quantd::testing::PollUntil(absl::Seconds(20), [&] {
    status = admission.Admit(kAllBusy, kShort);
    return !status.ok();
  }));
  EXPECT_EQ(status.message(),
            "OVERLOADED: the workers are 500ms behind, expected at most 100ms");
  loads.resize(1);
  EXPECT_TRUE(admission.Admit(kAllBusy, kShort).ok());
  // That was calm: a burst again.
  loads[0]->Set(5 * kShort);
  EXPECT_TRUE(admission.Admit(kAllBusy, 5 * kShort).ok());
}

TEST(AdmissionTest, LimitsHowManyTensorsAreOpen) {
  Admission admission(/*threads=*/2, kDelay, /*max_tensors=*/2);
  admission.TensorOpened();
  EXPECT_TRUE(admission.Admit(kAllBusy, kWork).ok());
  admission.TensorOpened();
  const absl::Status status = admission.Admit(kAllBusy, kWork);
  EXPECT_EQ(status.message(),
            "OVERLOADED: 2 tensors are open, which is the limit");
  EXPECT_GT(core::ErrorRetryAfter(status), absl::ZeroDuration());
  admission.TensorClosed();
  EXPECT_TRUE(admission.Admit(kAllBusy, kWork).ok());
}

TEST(AdmissionTest, SpreadsThoseThatItTurnsAway) {
  Admission admission(/*threads=*/1, kDelay, kMany);
  Admission::Load load(&admission);
  Admission::Load other(&admission);
  load.Set(2 * kDelay);
  other.Set(2 * kDelay);
  std::set<absl::Duration> delays;
  for (int i = 0; i < 100; ++i) {
    delays.insert(core::ErrorRetryAfter(admission.Admit(kAllBusy, kWork)));
  }
  EXPECT_GE(*delays.begin(), kDelay / 2);
  EXPECT_LE(*delays.rbegin(), 3 * kDelay / 2);
  EXPECT_GT(delays.size(), 10);
}

TEST(AdmissionTest, LearnsWhatTensorsTake) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  Admission admission(/*threads=*/1, kDelay, kMany);
  EXPECT_EQ(admission.FeedTime(Rpc::kQuantize, kMiB), absl::ZeroDuration());
  EXPECT_EQ(admission.FinishTime(Rpc::kQuantize, kMiB), absl::ZeroDuration());
  admission.Fed(Rpc::kQuantize, kMiB, absl::Milliseconds(2));
  EXPECT_EQ(admission.FeedTime(Rpc::kQuantize, kMiB / 2),
            absl::Milliseconds(1));
  for (int i = 0; i < 100; ++i) {
    admission.Finished(Rpc::kQuantize, kMiB, absl::Milliseconds(50));
  }
  EXPECT_EQ(admission.FinishTime(Rpc::kQuantize, kMiB), absl::Milliseconds(50));
  // Of another size, of another RPC.
  EXPECT_EQ(admission.FinishTime(Rpc::kQuantize, 4 * kMiB),
            absl::ZeroDuration());
  EXPECT_EQ(admission.FinishTime(Rpc::kCalibrate, kMiB), absl::ZeroDuration());
}

TEST(AdmissionTest, CountsLoadsOfManyThreads) {
  Admission admission(/*threads=*/1, kDelay, kMany);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&admission] {
      for (int i = 0; i < 1000; ++i) {
        Admission::Load load(&admission);
        load.Set(absl::Milliseconds(i));
        admission.Admit(kAllBusy, kWork).IgnoreError();
        load.Set(absl::Milliseconds(i / 2));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(admission.Delay(kWork), absl::ZeroDuration());
  EXPECT_TRUE(admission.Admit(kAllBusy, kWork).ok());
}

}  // namespace
}  // namespace quantd::server
