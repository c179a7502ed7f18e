// Loops over the scale indices of a tensor.

#ifndef QUANTD_CORE_CALIBRATE_SCALE_INDICES_H_
#define QUANTD_CORE_CALIBRATE_SCALE_INDICES_H_

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "core/parallel/thread_pool.h"
#include "core/parallel/time_slice.h"

namespace quantd::core {

// How many a thread takes at a time: small blocks are little work.
constexpr int64_t kScaleIndicesAtOnce = 8;

// How many threads can work at a time, the calling one among them.
inline int64_t LaneCount(ThreadPool* pool) {
  return pool == nullptr ? 1 : int64_t{pool->thread_count()} + 1;
}

// Calls body(i) for indices from `begin` on, in no particular order, on the
// threads of `pool` unless that is null, until it gets to `end` or the slice is
// over; for some of them in any case. Returns where to go on: the body was
// called for all indices before.
inline int64_t ForScaleIndices(ThreadPool* pool, int64_t begin, int64_t end,
                               const TimeSlice& slice,
                               absl::FunctionRef<void(int64_t)> body) {
  std::atomic<int64_t> next{begin};
  const int64_t batches =
      (end - begin + kScaleIndicesAtOnce - 1) / kScaleIndicesAtOnce;
  ParallelFor(pool, std::min(batches, LaneCount(pool)), [&](int64_t) {
    do {
      const int64_t first = next.fetch_add(kScaleIndicesAtOnce);
      if (first >= end) return;
      const int64_t last = std::min(end, first + kScaleIndicesAtOnce);
      for (int64_t i = first; i < last; ++i) body(i);
    } while (!slice.over());
  });
  return std::min(end, next.load());
}

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_SCALE_INDICES_H_
