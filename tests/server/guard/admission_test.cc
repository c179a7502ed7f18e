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

namespace quantd::server {
namespace {

constexpr absl::Duration kDelay = absl::Milliseconds(100);
constexpr int64_t kMany = 1000;
constexpr bool kAllBusy = false;

TEST(AdmissionTest, TakesTensorsWhileAWorkerIsFree) {
  Admission admission(/*threads=*/2, kDelay, kMany);
  EXPECT_TRUE(admission.Admit(/*worker_is_idle=*/true).ok());
  Admission::Load load(&admission);
  load.Set(absl::Hours(1));
  EXPECT_TRUE(admission.Admit(/*worker_is_idle=*/true).ok());
  // One tensor may keep all of them busy.
  EXPECT_FALSE(admission.Admit(/*worker_is_idle=*/false).ok());
  // The second is on its way to the worker that seems idle.
  Admission::Load next(&admission);
  next.Set(absl::Hours(1));
  EXPECT_FALSE(admission.Admit(/*worker_is_idle=*/true).ok());
}

TEST(AdmissionTest, TurnsTensorsAwayWhileTheWorkersAreTooFarBehind) {
  Admission admission(/*threads=*/2, kDelay, kMany);
  Admission::Load first(&admission);
  Admission::Load second(&admission);
  first.Set(kDelay);
  second.Set(kDelay);
  EXPECT_EQ(admission.delay(), kDelay);
  EXPECT_TRUE(admission.Admit(kAllBusy).ok());
  {
    Admission::Load third(&admission);
    third.Set(absl::Milliseconds(4));
    const absl::Status status = admission.Admit(kAllBusy);
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_EQ(status.message(),
              "OVERLOADED: the workers are 102ms behind, expected at most "
              "100ms");
    EXPECT_GT(core::ErrorRetryAfter(status), absl::ZeroDuration());
  }
  EXPECT_TRUE(admission.Admit(kAllBusy).ok());
  first.Set(absl::ZeroDuration());
  EXPECT_EQ(admission.delay(), kDelay / 2);
}

TEST(AdmissionTest, LimitsHowManyTensorsAreOpen) {
  Admission admission(/*threads=*/2, kDelay, /*max_tensors=*/2);
  admission.TensorOpened();
  EXPECT_TRUE(admission.Admit(kAllBusy).ok());
  admission.TensorOpened();
  const absl::Status status = admission.Admit(kAllBusy);
  EXPECT_EQ(status.message(),
            "OVERLOADED: 2 tensors are open, which is the limit");
  EXPECT_GT(core::ErrorRetryAfter(status), absl::ZeroDuration());
  admission.TensorClosed();
  EXPECT_TRUE(admission.Admit(kAllBusy).ok());
}

TEST(AdmissionTest, SpreadsThoseThatItTurnsAway) {
  Admission admission(/*threads=*/1, kDelay, kMany);
  Admission::Load load(&admission);
  load.Set(2 * kDelay);
  std::set<absl::Duration> delays;
  for (int i = 0; i < 100; ++i) {
    delays.insert(core::ErrorRetryAfter(admission.Admit(kAllBusy)));
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
        admission.Admit(kAllBusy).IgnoreError();
        load.Set(absl::Milliseconds(i / 2));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(admission.delay(), absl::ZeroDuration());
  EXPECT_TRUE(admission.Admit(kAllBusy).ok());
}

}  // namespace
}  // namespace quantd::server
