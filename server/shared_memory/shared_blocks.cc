#include "server/shared_memory/shared_blocks.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"

namespace quantd::server {
namespace {

// Calls in_order for blocks that are done in any order. Thread-safe.
class Sequencer {
 public:
  Sequencer(int64_t blocks, absl::FunctionRef<void(int64_t)> in_order)
      : in_order_(in_order), done_(blocks) {}

  void Done(int64_t block) ABSL_LOCKS_EXCLUDED(mutex_) {
    done_[block].store(true);
    // Who holds the mutex goes on with this block, or the last one does.
    if (!mutex_.TryLock()) return;
    Advance();
    mutex_.Unlock();
  }

  // Requires: all blocks are done.
  void Finish() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    Advance();
  }

 private:
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    while (next_ < done_.size() && done_[next_].load()) {
      in_order_(static_cast<int64_t>(next_));
      ++next_;
    }
  }

  const absl::FunctionRef<void(int64_t)> in_order_;
  std::vector<std::atomic<bool>> done_;
  absl::Mutex mutex_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
};

absl::Span<const uint8_t> Block(absl::Span<const uint8_t> bytes, int64_t index,
                                int64_t block_bytes) {
  return bytes.subspan(index * block_bytes, block_bytes);
}

int64_t BlockCount(absl::Span<const uint8_t> bytes, int64_t block_bytes) {
  return (static_cast<int64_t>(bytes.size()) + block_bytes - 1) / block_bytes;
}

}  // namespace

void ForEachBlock(
    core::ThreadPool* pool, absl::Span<const uint8_t> in, int64_t block_bytes,
    absl::FunctionRef<void(int64_t, absl::Span<const uint8_t>)> work,
    absl::FunctionRef<void(int64_t)> in_order) {
  const int64_t blocks = BlockCount(in, block_bytes);
  Sequencer sequencer(blocks, in_order);
  core::ParallelFor(pool, blocks, [&](int64_t block) {
    work(block, Block(in, block, block_bytes));
    sequencer.Done(block);
  });
  sequencer.Finish();
}

absl::Span<const uint8_t> PrivateCopy::Of(absl::Span<const uint8_t> shared,
                                          core::ThreadPool* pool) {
  if (shared.size() > capacity_bytes_) {
    buffer_.reset(new uint8_t[shared.size()]);
    capacity_bytes_ = shared.size();
  }
  core::ParallelFor(pool, BlockCount(shared, kSharedBlockBytes),
                    [&](int64_t index) {
                      const absl::Span<const uint8_t> part =
                          Block(shared, index, kSharedBlockBytes);
                      std::memcpy(buffer_.get() + index * kSharedBlockBytes,
                                  part.data(), part.size());
                    });
  return {buffer_.get(), shared.size()};
}

}  // namespace quantd::server
