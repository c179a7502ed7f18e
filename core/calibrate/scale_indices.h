// Loops over the scale indices of a tensor.

#ifndef QUANTD_CORE_CALIBRATE_SCALE_INDICES_H_
#define QUANTD_CORE_CALIBRATE_SCALE_INDICES_H_

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"

namespace quantd::core {

// How many a thread takes at a time: small blocks are little work.
constexpr int64_t kScaleIndicesAtOnce = 8;

// How many threads can work at a time, the calling one among them.
inline int64_t LaneCount(ThreadPool* pool) {
  return pool == nullptr ? 1 : int64_t{pool->thread_count()} + 1;
}

// Calls body(i) for indices in [begin, end), in no particular order, on the
// threads of `pool` unless that is null; not for all of them once it is
// stopped.
inline void ForScaleIndices(ThreadPool* pool, int64_t begin, int64_t end,
                            StopToken stop,
                            absl::FunctionRef<void(int64_t)> body) {
  const int64_t batches =
      (end - begin + kScaleIndicesAtOnce - 1) / kScaleIndicesAtOnce;
  std::atomic<int64_t> next{begin};
  ParallelFor(pool, std::min(batches, LaneCount(pool)), [&](int64_t) {
    while (!stop.stopped()) {
      const int64_t first = next.fetch_add(kScaleIndicesAtOnce);
      if (first >= end) return;
      const int64_t last = std::min(end, first + kScaleIndicesAtOnce);
      for (int64_t i = first; i < last; ++i) body(i);
    }
  });
}

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_SCALE_INDICES_H_
