// Reading what a client may change meanwhile.

#ifndef QUANTD_SERVER_SHARED_MEMORY_SHARED_BLOCKS_H_
#define QUANTD_SERVER_SHARED_MEMORY_SHARED_BLOCKS_H_

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "core/parallel/thread_pool.h"

namespace quantd::server {

// How much of a tensor in shared memory is worked on between two looks at what
// else there is to do: small beside a second, large beside starting threads.
constexpr int64_t kSharedQuantumBytes = int64_t{8} << 20;
// What one thread takes at a time: it stays in the second-level cache between
// the copy and the kernel.
constexpr int64_t kSharedBlockBytes = int64_t{256} << 10;

// Copies `in`, block by block on the threads of `pool`, to memory that nobody
// else writes, and calls work(block, copy), which is all that sees the data:
// each byte is read once. Calls in_order(block) once for each block, 0 first,
// never two at a time, soon after the block's work and before returning. `copy`
// holds only during its call.
// Requires: 0 < block_bytes <= kSharedBlockBytes.
void ForEachBlockCopy(
    core::ThreadPool* pool, absl::Span<const uint8_t> in, int64_t block_bytes,
    absl::FunctionRef<void(int64_t block, absl::Span<const uint8_t> copy)> work,
    absl::FunctionRef<void(int64_t block)> in_order);

// A copy of one piece of shared memory after another. Not thread-safe.
class PrivateCopy {
 public:
  // Valid until the next call.
  absl::Span<const uint8_t> Of(absl::Span<const uint8_t> shared,
                               core::ThreadPool* pool);

 private:
  std::unique_ptr<uint8_t[]> buffer_;
  size_t capacity_bytes_ = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_SHARED_MEMORY_SHARED_BLOCKS_H_
