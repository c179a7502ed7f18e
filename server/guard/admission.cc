#include "server/guard/admission.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>

#include "absl/numeric/bits.h"
#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr absl::Duration kWindow = absl::Seconds(1);
constexpr absl::Duration kMinRetry = absl::Milliseconds(50);
constexpr absl::Duration kMaxRetry = absl::Seconds(5);
// A new value moves an average by a part of its distance.
constexpr int64_t kSmoothing = 8;

// Writers may overtake each other, which loses one value.
void Average(std::atomic<int64_t>* average, int64_t value) {
  const int64_t old = average->load(std::memory_order_relaxed);
  average->store(
      old == 0 ? std::max<int64_t>(value, 1) : old + (value - old) / kSmoothing,
      std::memory_order_relaxed);
}

int SizeIndex(int64_t bytes) {
  return static_cast<int>(
      absl::bit_width(static_cast<uint64_t>(std::max<int64_t>(bytes, 0))));
}

}  // namespace

void Admission::Load::Set(absl::Duration work, absl::Duration spent_work) {
  const int64_t work_ns = absl::ToInt64Nanoseconds(work);
  const int64_t tensor_ns = absl::ToInt64Nanoseconds(work + spent_work);
  if (work_ns == work_ns_ && tensor_ns == tensor_ns_) return;
  if (work_ns > 0) admission_->Add(work_ns, tensor_ns, 1);
  if (work_ns_ > 0) admission_->Add(-work_ns_, tensor_ns_, -1);
  work_ns_ = work_ns;
  tensor_ns_ = tensor_ns;
}

Admission::Admission(int threads, absl::Duration max_delay, int64_t max_tensors)
    : threads_(threads), max_delay_(max_delay), max_tensors_(max_tensors) {}

void Admission::Add(int64_t work_ns, int64_t tensor_ns, int count) {
  Loads& loads = loads_[SizeIndex(tensor_ns)];
  loads.work_ns.fetch_add(work_ns, std::memory_order_relaxed);
  loads.count.fetch_add(count, std::memory_order_relaxed);
  loaded_.fetch_add(count, std::memory_order_relaxed);
}

absl::Duration Admission::Delay(absl::Duration work) const {
  return DelayBy(absl::InfiniteDuration(), work);
}

absl::Duration Admission::DelayBy(absl::Duration below,
                                  absl::Duration work) const {
  const int end = SizeIndex(absl::ToInt64Nanoseconds(below));
  const double most_ns = absl::ToDoubleNanoseconds(work);
  double sum_ns = 0;
  for (int i = 0; i <= end; ++i) {
    const int64_t count = loads_[i].count.load(std::memory_order_relaxed);
    const int64_t work_ns = loads_[i].work_ns.load(std::memory_order_relaxed);
    if (count <= 0) continue;
    sum_ns += std::min(static_cast<double>(work_ns),
                       static_cast<double>(count) * most_ns);
  }
  return absl::Nanoseconds(sum_ns / threads_);
}

absl::Duration Admission::MostDelay(absl::Duration work) {
  constexpr absl::Duration kLeastDelay = absl::Milliseconds(2);
  // Who takes that long waits for others that do, several to a worker, rather
  // than come again and again.
  constexpr absl::Duration kPatientWork = absl::Seconds(1);
  constexpr int kPatience = 4;
  // A queue is a burst for as long as it takes to serve so many.
  constexpr int kBurst = 8;
  // What takes longer than so many is no like.
  constexpr int kLike = 4;
  if (work >= kPatientWork) return std::max(max_delay_, kPatience * work);
  const absl::Duration own = std::max(work / threads_, kLeastDelay);
  const absl::Duration burst_delay = std::max(max_delay_, own);
  const int64_t now_ns = absl::GetCurrentTimeNanos();
  if (DelayBy(kLike * work, work) <= own) {
    calm_ns_.store(now_ns, std::memory_order_relaxed);
    return burst_delay;
  }
  const absl::Duration since =
      absl::Nanoseconds(now_ns - calm_ns_.load(std::memory_order_relaxed));
  return since <= std::max(max_delay_, kBurst * work) ? burst_delay : own;
}

absl::Status Admission::Admit(bool worker_is_idle, absl::Duration work) {
  if (tensors_.load(std::memory_order_relaxed) >= max_tensors_) {
    return core::TensorCountError(max_tensors_, RetryAfter());
  }
  const absl::Duration delay = Delay(work);
  const absl::Duration most = MostDelay(work);
  // Those that were just taken may not have reached a worker yet.
  const bool worker_is_free =
      worker_is_idle && loaded_.load(std::memory_order_relaxed) < threads_;
  if (!worker_is_free && delay > most) {
    return core::OverloadedError(delay, most, RetryAfter());
  }
  admitted_.fetch_add(1, std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::Duration Admission::RetryAfter() {
  const absl::Time now = absl::Now();
  absl::MutexLock lock(&mutex_);
  const absl::Duration window = now - window_start_;
  if (window > kWindow) {
    const int64_t admitted = admitted_.exchange(0, std::memory_order_relaxed);
    refused_per_admitted_ =
        window > 2 * kWindow
            ? 0
            : static_cast<double>(refused_) /
                  static_cast<double>(std::max<int64_t>(admitted, 1));
    refused_ = 0;
    window_start_ = now;
  }
  ++refused_;
  // About as long as it takes until as many have been served as were turned
  // away.
  const absl::Duration delay = (1 + refused_per_admitted_) * max_delay_;
  return std::min(std::max(delay, kMinRetry), kMaxRetry) *
         absl::Uniform(random_, 0.5, 1.5);
}

absl::Duration Admission::FeedTime(Rpc rpc, int64_t bytes) const {
  const auto ns_per_mib = static_cast<double>(
      feed_ns_per_mib_[static_cast<int>(rpc)].load(std::memory_order_relaxed));
  return absl::Nanoseconds(ns_per_mib * static_cast<double>(bytes) / kMiB);
}

absl::Duration Admission::FinishTime(Rpc rpc, int64_t tensor_bytes) const {
  return absl::Nanoseconds(
      finish_ns_[static_cast<int>(rpc)][SizeIndex(tensor_bytes)].load(
          std::memory_order_relaxed));
}

void Admission::Fed(Rpc rpc, int64_t bytes, absl::Duration time) {
  // What opening a tensor takes would distort the rate of small ones.
  constexpr int64_t kMinBytes = 16 << 10;
  if (bytes < kMinBytes) return;
  Average(&feed_ns_per_mib_[static_cast<int>(rpc)],
          static_cast<int64_t>(absl::ToDoubleNanoseconds(time) * kMiB /
                               static_cast<double>(bytes)));
}

void Admission::Finished(Rpc rpc, int64_t tensor_bytes, absl::Duration time) {
  Average(&finish_ns_[static_cast<int>(rpc)][SizeIndex(tensor_bytes)],
          absl::ToInt64Nanoseconds(time));
}

}  // namespace quantd::server
