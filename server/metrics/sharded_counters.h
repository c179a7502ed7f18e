// Counters that many threads add to and few read.

#ifndef QUANTD_SERVER_METRICS_SHARDED_COUNTERS_H_
#define QUANTD_SERVER_METRICS_SHARDED_COUNTERS_H_

#include <atomic>
#include <cstdint>
#include <memory>

namespace quantd::server {

// `count` counters, all 0 at first. Each thread adds to one of a few copies
// of them, which share no cache line; a read sums the copies. Thread-safe.
class ShardedCounters {
 public:
  explicit ShardedCounters(int count);

  // Requires: 0 <= index < count.
  void Add(int index, int64_t amount) {
    lines_[ThreadShard() * lines_per_shard_ + index / kPerLine]
        .values[index % kPerLine]
        .fetch_add(amount, std::memory_order_relaxed);
  }

  // Sees every Add that happened before.
  // Requires: 0 <= index < count.
  int64_t Sum(int index) const;

 private:
  static constexpr int kShardCount = 16;
  static constexpr int kPerLine = 8;

  struct alignas(64) Line {
    std::atomic<int64_t> values[kPerLine];
  };

  static int ThreadShard() {
    static std::atomic<int> next{0};
    static thread_local const int shard =
        next.fetch_add(1, std::memory_order_relaxed) % kShardCount;
    return shard;
  }

  const int lines_per_shard_;
  const std::unique_ptr<Line[]> lines_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_METRICS_SHARDED_COUNTERS_H_
