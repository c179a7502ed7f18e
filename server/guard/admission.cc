#include "server/guard/admission.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

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

void Admission::Load::Set(absl::Duration work) {
  const int64_t work_ns = absl::ToInt64Nanoseconds(work);
  if (work_ns == work_ns_) return;
  admission_->work_ns_.fetch_add(work_ns - work_ns_, std::memory_order_relaxed);
  admission_->loaded_.fetch_add((work_ns > 0 ? 1 : 0) - (work_ns_ > 0 ? 1 : 0),
                                std::memory_order_relaxed);
  work_ns_ = work_ns;
}

Admission::Admission(int threads, absl::Duration max_delay, int64_t max_tensors)
    : threads_(threads),
      max_delay_ns_(absl::ToInt64Nanoseconds(max_delay)),
      max_tensors_(max_tensors) {}

bool Admission::Busy(bool worker_is_idle) const {
  // Those that were just taken may not have reached a worker yet.
  const bool worker_is_free =
      worker_is_idle && loaded_.load(std::memory_order_relaxed) < threads_;
  return !worker_is_free &&
         work_ns_.load(std::memory_order_relaxed) / threads_ > max_delay_ns_;
}

absl::Duration Admission::delay() const {
  return absl::Nanoseconds(work_ns_.load(std::memory_order_relaxed) / threads_);
}

absl::Status Admission::Admit(bool worker_is_idle) {
  const bool full = tensors_.load(std::memory_order_relaxed) >= max_tensors_;
  if (!full && !Busy(worker_is_idle)) {
    admitted_.fetch_add(1, std::memory_order_relaxed);
    return absl::OkStatus();
  }
  const absl::Duration retry_after = RetryAfter();
  return full ? core::TensorCountError(max_tensors_, retry_after)
              : core::OverloadedError(delay(), absl::Nanoseconds(max_delay_ns_),
                                      retry_after);
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
  const absl::Duration delay =
      (1 + refused_per_admitted_) * absl::Nanoseconds(max_delay_ns_);
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
