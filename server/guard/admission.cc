#include "server/guard/admission.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "absl/numeric/bits.h"
#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "server/guard/size_text.h"

namespace quantd::server {
namespace {

constexpr absl::Duration kWindow = absl::Seconds(1);
constexpr absl::Duration kMinRetry = absl::Milliseconds(50);
constexpr absl::Duration kMaxRetry = absl::Seconds(5);
// Whoever knows that it takes minutes should still look in between.
constexpr absl::Duration kMaxExcess = absl::Seconds(20);
// A new value moves an average by a part of its distance.
constexpr int64_t kSmoothing = 8;
// Unit of ratios that are kept as integers.
constexpr int64_t kRatioUnit = 1024;

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

Admission::Admission(int threads, absl::Duration max_delay,
                     OpenTensors* open_tensors, Clock clock)
    : threads_(threads),
      max_delay_(max_delay),
      open_tensors_(open_tensors),
      clock_(std::move(clock)) {}

void Admission::Add(int64_t work_ns, int64_t tensor_ns, int count) {
  Loads& loads = loads_[SizeIndex(tensor_ns)];
  loads.work_ns.fetch_add(work_ns, std::memory_order_relaxed);
  loads.tensor_ns.fetch_add(count * tensor_ns, std::memory_order_relaxed);
  loads.count.fetch_add(count, std::memory_order_relaxed);
  loaded_.fetch_add(count, std::memory_order_relaxed);
}

absl::Duration Admission::Delay(absl::Duration work) const {
  const double most_ns = absl::ToDoubleNanoseconds(work);
  double sum_ns = 0;
  for (const Loads& loads : loads_) {
    const int64_t count = loads.count.load(std::memory_order_relaxed);
    const int64_t work_ns = loads.work_ns.load(std::memory_order_relaxed);
    if (count <= 0) continue;
    sum_ns += std::min(static_cast<double>(work_ns),
                       static_cast<double>(count) * most_ns);
  }
  return absl::Nanoseconds(sum_ns / threads_);
}

absl::Duration Admission::QueueDelay(absl::Duration work) const {
  const double own_ns = absl::ToDoubleNanoseconds(work);
  double sum_ns = 0;
  for (const Loads& loads : loads_) {
    const int64_t count = loads.count.load(std::memory_order_relaxed);
    const int64_t work_ns = loads.work_ns.load(std::memory_order_relaxed);
    const int64_t tensor_ns = loads.tensor_ns.load(std::memory_order_relaxed);
    if (count <= 0 || work_ns <= 0 || tensor_ns <= 0) continue;
    // A longer tensor has the same part of itself left for a shorter one as for
    // its like, so that neither has to give way to the other. The longer it is,
    // the less it counts, because it takes turns only.
    const double ratio = std::min(1.0, own_ns * static_cast<double>(count) /
                                           static_cast<double>(tensor_ns));
    sum_ns += static_cast<double>(work_ns) * ratio * ratio;
  }
  return absl::Nanoseconds(sum_ns / threads_);
}

bool Admission::MayBurst(absl::Duration work, bool is_calm) {
  // Calm for a third of the time is calm enough.
  constexpr int kCalmWeight = 2;
  // Tells a spell from one tensor that comes late by chance.
  constexpr int kLeastTensors = 8;
  const absl::Duration most = std::max(max_delay_, kCalmWeight * work);
  const absl::Duration now = clock_();
  Burst& burst = bursts_[SizeIndex(absl::ToInt64Nanoseconds(work))];
  const absl::Duration since = now - burst.last;
  const absl::Duration step = std::min(since, most / kLeastTensors);
  burst.last = now;
  if (since >= most) {
    burst.calm = most;
  } else if (is_calm) {
    burst.calm = std::min(burst.calm + kCalmWeight * step, most);
  } else {
    burst.calm = std::max(burst.calm - step, absl::ZeroDuration());
  }
  if (burst.calm == most) burst.allowed = true;
  if (burst.calm == absl::ZeroDuration()) burst.allowed = false;
  return burst.allowed;
}

bool Admission::HasPlace() const {
  const int64_t most = open_tensors_->most;
  const int64_t count = open_tensors_->count.load();
  if (count < most / 2) return true;
  const int64_t own = tensors_.load();
  const int64_t callers = open_tensors_->callers.load() + (own == 0 ? 1 : 0);
  return count < most && own < (most + callers - 1) / callers;
}

absl::Status Admission::Admit(bool worker_is_idle, absl::Duration work) {
  // So many longer tensors may share a worker.
  constexpr int kPatience = 5;
  // Shorter than that, tensors take less than it takes to hand them over.
  constexpr absl::Duration kLeastDelay = absl::Milliseconds(1);
  absl::MutexLock lock(&mutex_);
  if (!HasPlace()) {
    return core::TensorCountError(open_tensors_->most,
                                  RetryAfter(absl::ZeroDuration()));
  }
  const absl::Duration queued = QueueDelay(work);
  // A tensor and a bit for each worker. With more of them some would take twice
  // their own time: the kernel does not share processors evenly.
  const absl::Duration own =
      std::max(work * (0.65 - 0.5 / threads_), kLeastDelay);
  const bool may_burst = MayBurst(work, queued <= own / 2);
  // Tensors that were just admitted may not have reached a worker yet.
  if (!worker_is_idle || loaded_.load(std::memory_order_relaxed) >= threads_) {
    const absl::Duration most_queued =
        may_burst ? std::max(own, max_delay_) : own;
    if (queued > most_queued) {
      return core::OverloadedError(queued, most_queued,
                                   RetryAfter(queued - most_queued));
    }
    const absl::Duration delay = Delay(work);
    const absl::Duration most = std::max(max_delay_, kPatience * work);
    if (delay > most) {
      return core::OverloadedError(delay, most, RetryAfter(delay - most));
    }
  }
  ++admitted_;
  return absl::OkStatus();
}

absl::Duration Admission::RetryAfter(absl::Duration excess) {
  const absl::Duration now = clock_();
  const absl::Duration window = now - window_start_;
  if (window > kWindow) {
    refused_per_admitted_ =
        window > 2 * kWindow
            ? 0
            : static_cast<double>(refused_) /
                  static_cast<double>(std::max<int64_t>(admitted_, 1));
    admitted_ = 0;
    refused_ = 0;
    window_start_ = now;
  }
  ++refused_;
  // About as long as it takes until as many have been served as were turned
  // away.
  const absl::Duration delay = (1 + refused_per_admitted_) * max_delay_;
  return std::max(std::min(std::max(delay, kMinRetry), kMaxRetry),
                  std::min(excess, kMaxExcess)) *
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

absl::Duration Admission::SearchTime(Rpc rpc, absl::Duration estimate) const {
  const int64_t ns = absl::ToInt64Nanoseconds(estimate);
  const int64_t ratio =
      search_ratio_[static_cast<int>(rpc)][SizeIndex(ns)].load(
          std::memory_order_relaxed);
  return ratio == 0 ? estimate
                    : estimate * (static_cast<double>(ratio) / kRatioUnit);
}

void Admission::Fed(Rpc rpc, int64_t bytes, absl::Duration time) {
  // The time of opening a tensor would distort the rate of small ones.
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

void Admission::Searched(Rpc rpc, absl::Duration estimate,
                         absl::Duration time) {
  if (estimate <= absl::ZeroDuration()) return;
  const int64_t ns = absl::ToInt64Nanoseconds(estimate);
  Average(
      &search_ratio_[static_cast<int>(rpc)][SizeIndex(ns)],
      static_cast<int64_t>(absl::FDivDuration(time, estimate) * kRatioUnit));
}

}  // namespace quantd::server
