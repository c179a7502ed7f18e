#include "server/rpc/stream_account.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/parallel/thread_clock.h"
#include "server/rpc/steps.h"

namespace quantd::server {

StreamAccount::StreamAccount(const RpcEnvironment& env, Rpc rpc,
                             std::shared_ptr<CallerShare> share)
    : env_(env),
      rpc_(rpc),
      share_(std::move(share)),
      transit_(env.budget),
      load_(&share_->admission) {}

void StreamAccount::Hold(int64_t bytes, bool rests) {
  absl::MutexLock lock(&mutex_);
  transit_.Set(bytes);
  rests_ = rests;
  CountLoad();
}

bool StreamAccount::OverShare(int64_t more_bytes) const {
  absl::MutexLock lock(&mutex_);
  return transit_.excessive(more_bytes);
}

absl::Status StreamAccount::Admit(absl::Duration work) {
  absl::MutexLock lock(&mutex_);
  // Load that was counted for the same tensor is no reason to turn it away.
  load_.Set(absl::ZeroDuration());
  absl::Status status = share_->admission.Admit(
      ComputingThreads(env_, share_->group) < env_.pool->thread_count(), work);
  work_ = status.ok() ? work : absl::ZeroDuration();
  spent_ = absl::ZeroDuration();
  CountLoad();
  return status;
}

void StreamAccount::Arrived(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  work_ += FeedTimeLocked(bytes);
}

void StreamAccount::TensorClosed() {
  SearchedAsFed(0, absl::ZeroDuration());
  share_->admission.TensorClosed();
}

void StreamAccount::SearchedAsFed(int64_t bytes, absl::Duration estimate) {
  absl::MutexLock lock(&mutex_);
  search_bytes_ = bytes;
  search_estimate_ = estimate;
}

absl::Duration StreamAccount::FeedTime(int64_t bytes) const {
  absl::MutexLock lock(&mutex_);
  return FeedTimeLocked(bytes);
}

absl::Duration StreamAccount::FeedTimeLocked(int64_t bytes) const {
  if (search_bytes_ == 0) return share_->admission.FeedTime(rpc_, bytes);
  return SearchTime(search_estimate_) *
         (static_cast<double>(bytes) / static_cast<double>(search_bytes_));
}

void StreamAccount::BeginLong() {
  absl::MutexLock lock(&mutex_);
  long_clock_ = core::ThreadClock::OfThisThread();
  long_start_ = long_clock_->Now();
}

void StreamAccount::EndLong() {
  absl::MutexLock lock(&mutex_);
  long_done_ = LongTime();
  // The thread may begin with another.
  long_clock_.reset();
}

void StreamAccount::WorkLeft(absl::Duration work, absl::Duration spent) {
  absl::MutexLock lock(&mutex_);
  long_clock_.reset();
  long_done_ = absl::ZeroDuration();
  work_ = work;
  spent_ = spent;
}

void StreamAccount::CountLoad() {
  if (rests_) {
    load_.Set(absl::ZeroDuration());
  } else {
    // When it takes longer than others did, nobody knows for how long.
    const absl::Duration done = LongTime();
    load_.Set(std::max(work_ - done, done / 4), spent_ + done);
  }
}

absl::Duration StreamAccount::LongTime() const {
  return long_clock_.has_value() ? long_clock_->Now() - long_start_
                                 : long_done_;
}

}  // namespace quantd::server
