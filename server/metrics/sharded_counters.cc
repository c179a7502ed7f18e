#include "server/metrics/sharded_counters.h"

#include <atomic>
#include <cstdint>

namespace quantd::server {

// The brackets set every value to 0.
ShardedCounters::ShardedCounters(int count)
    : lines_per_shard_((count + kPerLine - 1) / kPerLine),
      lines_(new Line[kShardCount * lines_per_shard_]()) {}

int64_t ShardedCounters::Sum(int index) const {
  int64_t sum = 0;
  for (int shard = 0; shard < kShardCount; ++shard) {
    sum += lines_[shard * lines_per_shard_ + index / kPerLine]
               .values[index % kPerLine]
               .load(std::memory_order_relaxed);
  }
  return sum;
}

}  // namespace quantd::server
