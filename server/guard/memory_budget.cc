#include "server/guard/memory_budget.h"

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

// What a client is told to wait when the budget is full for now.
constexpr absl::Duration kRetryAfter = absl::Seconds(1);

}  // namespace

MemoryBudget::Lease::Lease(Lease&& other) noexcept
    : budget_(std::exchange(other.budget_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

MemoryBudget::Lease& MemoryBudget::Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    Release();
    budget_ = std::exchange(other.budget_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

MemoryBudget::Lease::~Lease() { Release(); }

void MemoryBudget::Lease::Release() {
  if (budget_ != nullptr && bytes_ > 0) budget_->Return(bytes_);
  budget_ = nullptr;
  bytes_ = 0;
}

absl::StatusOr<MemoryBudget::Lease> MemoryBudget::Acquire(
    int64_t bytes, absl::string_view way_out) {
  Lease lease;
  if (absl::Status status = Grow(&lease, bytes, way_out); !status.ok()) {
    return status;
  }
  return lease;
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
  if (more > total_bytes_ - used_bytes_) {
    return core::MemoryBudgetError(total_bytes_, way_out, kRetryAfter);
  }
  used_bytes_ += more;
  lease->budget_ = this;
  lease->bytes_ = bytes;
  return absl::OkStatus();
}

int64_t MemoryBudget::used_bytes() const {
  absl::MutexLock lock(&mutex_);
  return used_bytes_;
}

void MemoryBudget::Return(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  used_bytes_ -= bytes;
}

}  // namespace quantd::server
