// A bound on what requests make the server hold.

#ifndef QUANTD_SERVER_GUARD_MEMORY_BUDGET_H_
#define QUANTD_SERVER_GUARD_MEMORY_BUDGET_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "core/parallel/thread_pool.h"

namespace quantd::server {

// Advice to the client of a call that other calls may make room for.
constexpr char kWayOutWithFewerCalls[] =
    "try again when fewer calls are under way";

// Memory is held in two ways:
//
// - Leases. What a tensor needs is leased before it is allocated, and may be
//   refused.
// - Transit. Messages that arrived and answers that were not read yet are there
//   before anybody can refuse them. They are counted; when they are too much, a
//   stream with more than its share loses its tensor.
//
// Leases belong to callers; the group of the calling thread says to which.
// While one caller waits for memory, the others get no more than an equal
// share. Thread-safe.
class MemoryBudget {
 public:
  // The time since some moment; never goes back.
  using Clock = std::function<absl::Duration()>;

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
    MemoryBudget* budget_ = nullptr;
    int64_t bytes_ = 0;
    // Who took the first of them.
    core::ThreadPool::Group holder_ = 0;
  };

  // Bytes that pass through one stream. Not thread-safe.
  class Transit {
   public:
    explicit Transit(MemoryBudget* budget) : budget_(budget) {}
    ~Transit() { Set(0); }
    Transit(const Transit&) = delete;
    Transit& operator=(const Transit&) = delete;

    // The bytes that are there now. Counted in steps of 256 KiB, and not at
    // all below the first: small streams come in large numbers.
    void Set(int64_t bytes);
    // With `more_bytes`, more is in use than there should be, and this is more
    // than an equal share: the stream has to let its tensor go.
    bool excessive(int64_t more_bytes) const;

   private:
    MemoryBudget* const budget_;
    int64_t bytes_ = 0;
  };

  // `transit_bytes` may be in transit beside the `total_bytes`; only what
  // exceeds that is taken from them.
  explicit MemoryBudget(int64_t total_bytes, int64_t transit_bytes = 0,
                        Clock clock = &core::SteadyNow)
      : total_bytes_(total_bytes),
        free_transit_bytes_(transit_bytes),
        clock_(std::move(clock)) {}

  // Takes `bytes`. Never waits: those who hold memory may need the calling
  // thread to give it back.
  // Errors: MEMORY_BUDGET, with a retry delay if it would fit when others have
  // given back; its text ends with `way_out`, which tells the client what to do
  // instead.
  absl::StatusOr<Lease> Acquire(int64_t bytes, absl::string_view way_out)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Takes `bytes` for `object` until all that was given out for it is gone,
  // once however many hold it; keeps it alive so long. Never null.
  // `lease`  what the caller has for it already; goes back if others have some.
  // Errors: as Acquire.
  absl::StatusOr<std::shared_ptr<const Lease>> AcquireFor(
      std::shared_ptr<const void> object, int64_t bytes,
      absl::string_view way_out, Lease lease)
      ABSL_LOCKS_EXCLUDED(shared_mutex_, mutex_);
  absl::StatusOr<std::shared_ptr<const Lease>> AcquireFor(
      std::shared_ptr<const void> object, int64_t bytes,
      absl::string_view way_out) ABSL_LOCKS_EXCLUDED(shared_mutex_, mutex_) {
    return AcquireFor(std::move(object), bytes, way_out, Lease());
  }

  // Grows `lease` (of this budget, or empty) to `bytes`. Errors: as Acquire.
  absl::Status Grow(Lease* lease, int64_t bytes, absl::string_view way_out)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Like Grow, for memory that is there already, which nobody can refuse.
  void Count(Lease* lease, int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t total_bytes() const { return total_bytes_; }
  // Leases, and what is in transit beyond what is free.
  int64_t used_bytes() const {
    return used_bytes_.load(std::memory_order_relaxed);
  }
  int64_t leased_bytes() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Little is in use: streams may hold what only makes them faster.
  bool roomy() const {
    return used_bytes_.load(std::memory_order_relaxed) < total_bytes_ / 4;
  }
  // More is in use than there should be.
  bool exceeded() const {
    return used_bytes_.load(std::memory_order_relaxed) > total_bytes_;
  }
  // The error for a stream with excessive() transit.
  absl::Status TransitError() const;

 private:
  // Memory that a caller holds. Nobody has group 0: memory without a caller is
  // not limited.
  struct Holder {
    int64_t bytes = 0;
    // When it was last refused what would fit by itself, if it got nothing
    // since.
    absl::Duration refused_at = -absl::InfiniteDuration();
  };

  void Return(core::ThreadPool::Group holder, int64_t bytes)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // True if there is room for the bytes that the holder asks for.
  bool HasRoom(core::ThreadPool::Group holder, int64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Hold(Lease* lease, int64_t more_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Adds what may be negative, and finds the sum anew.
  void Add(int64_t leased_bytes, int64_t transit_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t total_bytes_;
  const int64_t free_transit_bytes_;
  const Clock clock_;
  mutable absl::Mutex mutex_;
  int64_t leased_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t transit_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Holders that have memory, or wait for it.
  absl::flat_hash_map<core::ThreadPool::Group, Holder> holders_
      ABSL_GUARDED_BY(mutex_);
  // Changes under mutex_.
  std::atomic<int64_t> used_bytes_{0};
  // Streams that have something in transit.
  int64_t transit_count_ ABSL_GUARDED_BY(mutex_) = 0;

  absl::Mutex shared_mutex_;
  // Leases by the object that memory was taken for.
  absl::flat_hash_map<const void*, std::weak_ptr<const Lease>> shared_
      ABSL_GUARDED_BY(shared_mutex_);
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_MEMORY_BUDGET_H_
