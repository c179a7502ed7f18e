#include "server/guard/admission.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "server/metrics/metrics.h"
#include "tests/support/sanitizers.h"

namespace quantd::server {
namespace {

constexpr absl::Duration kDelay = absl::Milliseconds(100);
// No simulation gets there.
Admission::OpenTensors* Many() {
  static auto* const many = new Admission::OpenTensors(1000);
  return many;
}
constexpr bool kAllBusy = false;
constexpr absl::Duration kWork = absl::Milliseconds(100);

// Simulations have one thread, and the same outcome wherever they run:
// sanitizers learn enough from a part of them.
std::vector<int> SimulatedThreads() {
  if (testing::kSanitized) return {1};
  return {1, 8};
}

TEST(AdmissionTest, TakesTensorsWhileAWorkerIsFree) {
  Admission admission(/*threads=*/2, kDelay, Many());
  EXPECT_TRUE(admission.Admit(/*worker_is_idle=*/true, kWork).ok());
  std::vector<std::unique_ptr<Admission::Load>> loads;
  const auto add = [&] {
    loads.push_back(std::make_unique<Admission::Load>(&admission));
    loads.back()->Set(kWork);
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
  absl::Duration now;
  Admission admission(/*threads=*/2, kDelay, Many(), [&] { return now; });
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

// Whatever they take themselves, and however long those have been there.
TEST(AdmissionTest, LetsShorterTensorsPassLongOnes) {
  for (const int milliseconds : {1, 20, 50, 200, 500, 900, 1100, 5000}) {
    const absl::Duration work = absl::Milliseconds(milliseconds);
    absl::Duration now;
    Admission admission(/*threads=*/2, kDelay, Many(), [&] { return now; });
    std::vector<std::unique_ptr<Admission::Load>> loads;
    for (int i = 0; i < 4; ++i) {
      loads.push_back(std::make_unique<Admission::Load>(&admission));
      // Nobody knows how long they will take; they took long enough.
      loads.back()->Set(absl::Minutes(1), absl::Minutes(4));
    }
    EXPECT_EQ(admission.Delay(work), 2 * work);
    for (int i = 0; i < 100; ++i) {
      now += work / 4;
      EXPECT_TRUE(admission.Admit(kAllBusy, work).ok()) << work;
    }
  }
}

// Whatever a tensor takes itself, so that none waits for ever in favour of
// others.
TEST(AdmissionTest, LetsOnlySoManyLongTensorsShareAWorker) {
  for (const int milliseconds : {20, 100, 500, 5000}) {
    const absl::Duration work = absl::Milliseconds(milliseconds);
    Admission admission(/*threads=*/2, kDelay, Many());
    std::vector<std::unique_ptr<Admission::Load>> loads;
    while (admission.Admit(kAllBusy, work).ok()) {
      ASSERT_LT(loads.size(), 100);
      loads.push_back(std::make_unique<Admission::Load>(&admission));
      loads.back()->Set(absl::Hours(10));
    }
    EXPECT_EQ(loads.size(), 11) << work;
  }
}

TEST(AdmissionTest, LetsNoQueueStand) {
  constexpr absl::Duration kShort = absl::Milliseconds(20);
  constexpr absl::Duration kTiny = absl::Microseconds(10);
  absl::Duration now;
  Admission admission(/*threads=*/1, kDelay, Many(), [&] { return now; });
  std::vector<std::unique_ptr<Admission::Load>> loads;
  for (int i = 0; i < 4; ++i) {
    loads.push_back(std::make_unique<Admission::Load>(&admission));
    loads.back()->Set(kShort);
  }
  // A burst may wait for the whole delay, for as long as that.
  const absl::Duration begin = now;
  while (admission.Admit(kAllBusy, kShort).ok()) {
    now += absl::Milliseconds(1);
    ASSERT_LT(now - begin, absl::Seconds(1));
    // That these have no queue is no calm for the others.
    EXPECT_TRUE(admission.Admit(/*worker_is_idle=*/true, kTiny).ok());
  }
  EXPECT_EQ(now - begin, kDelay);
  EXPECT_EQ(admission.Admit(kAllBusy, kShort).message(),
            "OVERLOADED: the workers are 80ms behind, expected at most 3ms");
  // The first tensors of another size are a burst.
  EXPECT_TRUE(admission.Admit(kAllBusy, 2 * kShort).ok());
  // Nor is one that is served calm, but none standing there for a while.
  loads.clear();
  EXPECT_TRUE(admission.Admit(kAllBusy, kShort).ok());
  const auto add = [&] {
    loads.push_back(std::make_unique<Admission::Load>(&admission));
    loads.back()->Set(kShort);
  };
  add();
  EXPECT_FALSE(admission.Admit(kAllBusy, kShort).ok());
  loads.clear();
  for (absl::Duration calm; calm <= kDelay / 2; calm += kDelay / 20) {
    now += kDelay / 20;
    EXPECT_TRUE(admission.Admit(kAllBusy, kShort).ok());
  }
  for (int i = 0; i < 5; ++i) add();
  EXPECT_TRUE(admission.Admit(kAllBusy, kShort).ok());
}

// Workers that take turns at tensors of several sizes. Of each ten times as
// many come as the workers could serve of it alone.
class Simulation {
 public:
  // What came of the tensors of one size, without the first burst.
  struct Outcome {
    absl::Duration work;
    std::vector<absl::Duration> latencies{};
  };

  Simulation(int threads, const std::vector<absl::Duration>& works)
      : admission_(threads, kDelay, Many(), [this] { return now_; }),
        slices_(threads) {
    for (const absl::Duration work : works) outcomes_.push_back({work});
  }

  std::vector<Outcome> Run(absl::Duration time) {
    std::vector<absl::Duration> arrivals(outcomes_.size());
    while (now_ < kBurst + time) {
      StartSlices();
      const auto arrival = absl::c_min_element(arrivals);
      const auto first = absl::c_min_element(
          slices_,
          [](const Slice& a, const Slice& b) { return a.end < b.end; });
      if (first->end <= *arrival) {
        now_ = first->end;
        EndSlice(&*first);
      } else {
        now_ = *arrival;
        const auto size = static_cast<size_t>(arrival - arrivals.begin());
        Arrive(&outcomes_[size]);
        *arrival += outcomes_[size].work *
                    std::exponential_distribution<double>()(random_) /
                    (10.0 * static_cast<double>(slices_.size()));
      }
    }
    return std::move(outcomes_);
  }

 private:
  static constexpr absl::Duration kBurst = absl::Seconds(1);
  static constexpr absl::Duration kTurn = absl::Milliseconds(2);

  struct Tensor {
    Outcome* outcome;
    absl::Duration start;
    absl::Duration left;
    std::unique_ptr<Admission::Load> load;
  };
  // What a worker does.
  struct Slice {
    absl::optional<Tensor> tensor;
    absl::Duration end = absl::InfiniteDuration();
  };

  void Arrive(Outcome* outcome) {
    const bool idle = absl::c_any_of(
        slices_, [](const Slice& slice) { return !slice.tensor.has_value(); });
    if (!admission_.Admit(idle, outcome->work).ok()) return;
    ready_.push_back({outcome, now_, outcome->work,
                      std::make_unique<Admission::Load>(&admission_)});
    ready_.back().load->Set(outcome->work);
  }

  void StartSlices() {
    for (Slice& slice : slices_) {
      if (slice.tensor.has_value() || ready_.empty()) continue;
      slice.tensor = std::move(ready_.front());
      ready_.pop_front();
      slice.end = now_ + std::min(kTurn, slice.tensor->left);
    }
  }

  void EndSlice(Slice* slice) {
    Tensor tensor = *std::move(slice->tensor);
    *slice = Slice();
    tensor.left -= std::min(kTurn, tensor.left);
    tensor.load->Set(tensor.left, tensor.outcome->work - tensor.left);
    if (tensor.left > absl::ZeroDuration()) {
      ready_.push_back(std::move(tensor));
    } else if (now_ > kBurst) {
      tensor.outcome->latencies.push_back(now_ - tensor.start);
    }
  }

  absl::Duration now_;
  std::mt19937 random_{7};
  std::vector<Outcome> outcomes_;
  Admission admission_;
  // Go before the admission that their loads are of.
  std::vector<Slice> slices_;
  std::deque<Tensor> ready_;
};

TEST(AdmissionTest, ServesAsManyAsWithoutOverloadAboutAsFast) {
  std::vector<int> sizes = {1, 2, 5, 20, 50, 120, 1000, 10000};
  if (testing::kSanitized) sizes.resize(5);
  for (const int threads : SimulatedThreads()) {
    for (const int milliseconds : sizes) {
      const absl::Duration work = absl::Milliseconds(milliseconds);
      const absl::Duration time =
          std::max(absl::Seconds(2), 200 * work / threads);
      std::vector<Simulation::Outcome> outcomes =
          Simulation(threads, {work}).Run(time);
      std::vector<absl::Duration>& latencies = outcomes[0].latencies;
      absl::c_sort(latencies);
      const double served = static_cast<double>(latencies.size());
      EXPECT_GE(served * work, 0.9 * threads * time)
          << threads << " threads, " << work;
      EXPECT_LE(latencies[latencies.size() * 99 / 100], 2 * work)
          << threads << " threads, " << work;
    }
  }
}

TEST(AdmissionTest, ServesSomeOfEverySize) {
  std::vector<std::vector<int>> mixes = {{100, 400},
                                         {2, 100},
                                         {30, 33, 35},
                                         {500, 10000},
                                         {1, 3, 10, 30, 100, 300, 1000},
                                         {50, 500, 5000},
                                         {10, 20, 40, 80, 160, 320}};
  if (testing::kSanitized) mixes.resize(3);
  for (const int threads : SimulatedThreads()) {
    for (const std::vector<int>& mix : mixes) {
      std::vector<absl::Duration> works;
      for (const int milliseconds : mix) {
        works.push_back(absl::Milliseconds(milliseconds));
      }
      const absl::Duration time = 50 * works.back() / threads;
      for (const Simulation::Outcome& outcome :
           Simulation(threads, works).Run(time)) {
        EXPECT_GE(static_cast<double>(outcome.latencies.size()) * outcome.work,
                  0.3 / static_cast<double>(mix.size()) * threads * time)
            << threads << " threads, " << outcome.work << " of " << mix.size()
            << " sizes";
      }
    }
  }
}

TEST(AdmissionTest, LimitsHowManyTensorsAreOpen) {
  Admission::OpenTensors open(/*most=*/2);
  Admission admission(/*threads=*/2, kDelay, &open);
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

TEST(AdmissionTest, GivesCallersAnEqualShareOfTheTensorsThatMayBeOpen) {
  Admission::OpenTensors open(/*most=*/8);
  Admission greedy(/*threads=*/2, kDelay, &open);
  Admission modest(/*threads=*/2, kDelay, &open);
  const auto opens = [&](Admission& caller) {
    if (!caller.Admit(kAllBusy, kWork).ok()) return false;
    caller.TensorOpened();
    return true;
  };
  // Alone, all of them.
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(opens(greedy));
  EXPECT_FALSE(opens(modest));
  greedy.TensorClosed();
  EXPECT_TRUE(opens(modest));
  greedy.TensorClosed();
  EXPECT_FALSE(opens(greedy));
  EXPECT_TRUE(opens(modest));
}

TEST(AdmissionTest, SpreadsThoseThatItTurnsAway) {
  // Delays grow from one second to the next where most are turned away.
  const absl::Duration now;
  Admission admission(/*threads=*/1, kDelay, Many(), [&] { return now; });
  Admission::Load load(&admission);
  Admission::Load other(&admission);
  load.Set(kWork);
  other.Set(kWork);
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
  Admission admission(/*threads=*/1, kDelay, Many());
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

TEST(AdmissionTest, LearnsHowFarEstimatesOfSearchesAreOff) {
  Admission admission(/*threads=*/1, kDelay, Many());
  EXPECT_EQ(admission.SearchTime(Rpc::kQuantize, kWork), kWork);
  for (int i = 0; i < 100; ++i) {
    admission.Searched(Rpc::kQuantize, kWork, 3 * kWork);
  }
  EXPECT_EQ(admission.SearchTime(Rpc::kQuantize, kWork), 3 * kWork);
  // As far for those that are about as long.
  EXPECT_EQ(admission.SearchTime(Rpc::kQuantize, kWork * 1.1), 3.3 * kWork);
  // Of another length, of another RPC, and what is no search.
  EXPECT_EQ(admission.SearchTime(Rpc::kQuantize, 4 * kWork), 4 * kWork);
  EXPECT_EQ(admission.SearchTime(Rpc::kEvaluate, kWork), kWork);
  admission.Searched(Rpc::kQuantize, absl::ZeroDuration(), kWork);
  EXPECT_EQ(admission.SearchTime(Rpc::kQuantize, absl::ZeroDuration()),
            absl::ZeroDuration());
}

TEST(AdmissionTest, CountsLoadsOfManyThreads) {
  Admission admission(/*threads=*/1, kDelay, Many());
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
