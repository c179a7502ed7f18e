// A bound on what requests make the server hold.

#ifndef QUANTD_SERVER_GUARD_MEMORY_BUDGET_H_
#define QUANTD_SERVER_GUARD_MEMORY_BUDGET_H_

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace quantd::server {

// Thread-safe.
class MemoryBudget {
 public:
  // Bytes held of a budget; given back when destroyed. Movable. Not
  // thread-safe.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&& other) noexcept;
    ~Lease();

    int64_t bytes() const { return bytes_; }
    // Gives everything back.
    void Release();

   private:
    friend class MemoryBudget;
    Lease(MemoryBudget* budget, int64_t bytes)
        : budget_(budget), bytes_(bytes) {}

    MemoryBudget* budget_ = nullptr;
    int64_t bytes_ = 0;
  };

  explicit MemoryBudget(int64_t total_bytes) : total_bytes_(total_bytes) {}

  // Takes `bytes`. Never waits: those who hold memory may need the calling
  // thread to give it back.
  // Errors: MEMORY_BUDGET, with a retry delay if it would fit when others have
  // given back; its text ends with `way_out`, which tells the client what to do
  // instead.
  absl::StatusOr<Lease> Acquire(int64_t bytes, absl::string_view way_out)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Grows `lease` (of this budget, or empty) to `bytes`. Errors: as Acquire.
  absl::Status Grow(Lease* lease, int64_t bytes, absl::string_view way_out)
      ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t total_bytes() const { return total_bytes_; }
  int64_t used_bytes() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Return(int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  const int64_t total_bytes_;
  mutable absl::Mutex mutex_;
  int64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_MEMORY_BUDGET_H_
