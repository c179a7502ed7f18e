#include "server/guard/memory_budget.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

// Time that a client is told to wait when the budget is full for now.
constexpr absl::Duration kRetryAfter = absl::Seconds(1);

// For so long a caller that was refused is taken to try again.
constexpr absl::Duration kPatience = absl::Seconds(2);

constexpr int64_t kTransitStepBytes = 256 << 10;

}  // namespace

MemoryBudget::Lease::Lease(Lease&& other) noexcept
    : budget_(std::exchange(other.budget_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      holder_(other.holder_) {}

MemoryBudget::Lease& MemoryBudget::Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    Release();
    budget_ = std::exchange(other.budget_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    holder_ = other.holder_;
  }
  return *this;
}

MemoryBudget::Lease::~Lease() { Release(); }

void MemoryBudget::Lease::Release() {
  if (budget_ != nullptr && bytes_ > 0) budget_->Return(holder_, bytes_);
  budget_ = nullptr;
  bytes_ = 0;
}

void MemoryBudget::Transit::Set(int64_t bytes) {
  const int64_t counted = bytes < kTransitStepBytes
                              ? 0
                              : (bytes + kTransitStepBytes - 1) /
                                    kTransitStepBytes * kTransitStepBytes;
  if (counted == bytes_) return;
  absl::MutexLock lock(&budget_->mutex_);
  budget_->Add(0, counted - bytes_);
  budget_->transit_count_ += (counted > 0 ? 1 : 0) - (bytes_ > 0 ? 1 : 0);
  bytes_ = counted;
}

bool MemoryBudget::Transit::excessive(int64_t more_bytes) const {
  if (bytes_ == 0) return false;
  absl::MutexLock lock(&budget_->mutex_);
  // The rest is for what comes on top of every byte that is counted: messages
  // that are not complete yet, and what the allocator keeps.
  const int64_t limit_bytes =
      std::min(budget_->total_bytes_ - budget_->leased_bytes_,
               budget_->total_bytes_ / 2);
  const int64_t beyond_bytes = std::max<int64_t>(
      0, budget_->transit_bytes_ - budget_->free_transit_bytes_);
  if (beyond_bytes + more_bytes <= limit_bytes) return false;
  return bytes_ + more_bytes >
         (limit_bytes + budget_->free_transit_bytes_) / budget_->transit_count_;
}

absl::Status MemoryBudget::TransitError() const {
  return core::MemoryBudgetError(
      total_bytes_, "read the answers as they come, or send less at once",
      kRetryAfter);
}

absl::StatusOr<MemoryBudget::Lease> MemoryBudget::Acquire(
    int64_t bytes, absl::string_view way_out) {
  Lease lease;
  if (absl::Status status = Grow(&lease, bytes, way_out); !status.ok()) {
    return status;
  }
  return lease;
}

absl::StatusOr<std::shared_ptr<const MemoryBudget::Lease>>
MemoryBudget::AcquireFor(std::shared_ptr<const void> object, int64_t bytes,
                         absl::string_view way_out, Lease lease) {
  const void* const key = object.get();
  absl::MutexLock lock(&shared_mutex_);
  if (const auto it = shared_.find(key); it != shared_.end()) {
    if (std::shared_ptr<const Lease> shared = it->second.lock()) return shared;
  }
  if (absl::Status s = Grow(&lease, bytes, way_out); !s.ok()) return s;
  std::shared_ptr<const Lease> shared(
      new Lease(std::move(lease)),
      [this, object = std::move(object)](const Lease* gone) {
        delete gone;
        absl::MutexLock lock(&shared_mutex_);
        // Another may have been made for the object since.
        const auto it = shared_.find(object.get());
        if (it != shared_.end() && it->second.expired()) shared_.erase(it);
      });
  shared_[key] = shared;
  return shared;
}

absl::Status MemoryBudget::Grow(Lease* lease, int64_t bytes,
                                absl::string_view way_out) {
  if (bytes <= lease->bytes_) return absl::OkStatus();
  // No retry makes room for what is larger than the whole budget.
  if (bytes > total_bytes_) {
    return core::MemoryBudgetError(total_bytes_, way_out, absl::ZeroDuration());
  }
  const int64_t more = bytes - lease->bytes_;
  absl::MutexLock lock(&mutex_);
  if (lease->bytes_ == 0) lease->holder_ = core::ThreadPool::CurrentGroup();
  if (!HasRoom(lease->holder_, more)) {
    return core::MemoryBudgetError(total_bytes_, way_out, kRetryAfter);
  }
  Hold(lease, more);
  return absl::OkStatus();
}

bool MemoryBudget::HasRoom(core::ThreadPool::Group holder, int64_t bytes) {
  const bool fits = bytes <= total_bytes_ - used_bytes();
  if (holder == 0) return fits;
  const absl::Duration now = clock_();
  int64_t waiting = 0;
  for (const auto& [other, has] : holders_) {
    if (other != holder && now - has.refused_at < kPatience) ++waiting;
  }
  Holder& own = holders_[holder];
  // Two that have nothing and ask for more than that must not hinder each
  // other.
  const bool has_share = waiting == 0 || own.bytes == 0 ||
                         own.bytes + bytes <= total_bytes_ / (waiting + 1);
  const bool has_room = fits && has_share;
  own.refused_at = has_room ? -absl::InfiniteDuration() : now;
  return has_room;
}

void MemoryBudget::Hold(Lease* lease, int64_t more_bytes) {
  Add(more_bytes, 0);
  if (lease->holder_ != 0) holders_[lease->holder_].bytes += more_bytes;
  lease->budget_ = this;
  lease->bytes_ += more_bytes;
}

void MemoryBudget::Count(Lease* lease, int64_t bytes) {
  if (bytes <= lease->bytes_) return;
  absl::MutexLock lock(&mutex_);
  if (lease->bytes_ == 0) lease->holder_ = core::ThreadPool::CurrentGroup();
  Hold(lease, bytes - lease->bytes_);
}

int64_t MemoryBudget::leased_bytes() const {
  absl::MutexLock lock(&mutex_);
  return leased_bytes_;
}

void MemoryBudget::Return(core::ThreadPool::Group holder, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  Add(-bytes, 0);
  const auto found = holders_.find(holder);
  if (found == holders_.end()) return;
  found->second.bytes -= bytes;
  if (found->second.bytes == 0 &&
      clock_() - found->second.refused_at >= kPatience) {
    holders_.erase(found);
  }
}

void MemoryBudget::Add(int64_t leased_bytes, int64_t transit_bytes) {
  leased_bytes_ += leased_bytes;
  transit_bytes_ += transit_bytes;
  used_bytes_.store(
      leased_bytes_ +
          std::max<int64_t>(0, transit_bytes_ - free_transit_bytes_),
      std::memory_order_relaxed);
}

}  // namespace quantd::server
