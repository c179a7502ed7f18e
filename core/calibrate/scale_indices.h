// Loops over the scale indices of a tensor.

#ifndef QUANTD_CORE_CALIBRATE_SCALE_INDICES_H_
#define QUANTD_CORE_CALIBRATE_SCALE_INDICES_H_

#include <algorithm>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "core/parallel/thread_pool.h"

namespace quantd::core {

// Calls body(0) ... body(count - 1) in no particular order, on the threads of
// `pool` unless that is null, several at a time: small blocks are little work.
inline void ForEachScaleIndex(ThreadPool* pool, int64_t count,
                              absl::FunctionRef<void(int64_t)> body) {
  constexpr int64_t kAtOnce = 8;
  ParallelFor(pool, (count + kAtOnce - 1) / kAtOnce, [&](int64_t task) {
    const int64_t end = std::min(count, (task + 1) * kAtOnce);
    for (int64_t i = task * kAtOnce; i < end; ++i) body(i);
  });
}

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_SCALE_INDICES_H_
