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
constexpr int64_t kSharedQuantumBytes = int64_t{16} << 20;
// Bytes that one thread takes at a time: its results are still in the
// second-level cache when they are looked at again.
constexpr int64_t kSharedBlockBytes = int64_t{256} << 10;

// Cuts `in` into parts of `block_bytes` and calls work(block, part) for each on
// the threads of `pool`. Calls in_order(block) once for each block, soon after
// its work: in ascending order, one at a time, all before returning.
void ForEachBlock(
    core::ThreadPool* pool, absl::Span<const uint8_t> in, int64_t block_bytes,
    absl::FunctionRef<void(int64_t block, absl::Span<const uint8_t> part)> work,
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
