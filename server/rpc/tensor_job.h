// The work of a streaming RPC on one tensor.

#ifndef QUANTD_SERVER_RPC_TENSOR_JOB_H_
#define QUANTD_SERVER_RPC_TENSOR_JOB_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "server/metrics/metrics.h"
#include "server/rpc/caller.h"
#include "server/shared_memory/region.h"
#include "server/shared_memory/shared_blocks.h"
#include "server/wire/chunk_writer.h"

namespace quantd::server {

// The use that a call of a job makes of a store, for which it waits; of
// several, the last.
enum class StoreUse { kNone, kRead, kReadStatistics, kWrite, kLongWrite };

// The bytes that come up, and the portions in which a job takes them.
struct TensorFrame {
  // The bytes of the tensor that come, [begin_bytes, end_bytes).
  int64_t begin_bytes = 0;
  int64_t end_bytes = 0;
  // Chunks are cut at multiples of this.
  int64_t unit_bytes = 1;
  // Feed is called with multiples of this; only the tensor's end may be
  // shorter.
  int64_t granule_bytes = 1;
  // Most bytes between BeginQuantum and the next; a multiple of granule_bytes.
  int64_t quantum_bytes = 1;
  // Feed is called once for a quantum, which pays where its blocks are searched
  // on several threads.
  bool joins_quantum = false;
};

// One tensor of one stream, from its header to its summary. Calls come one at a
// time, on any thread, in this order:
//
//   StopWhen, Resolve
//   for each quantum: Reserve, BeginQuantum, Feed or FeedShared once or more,
//     EndQuantum
//   Reserve(0) and Finish, until Finish answers true
//
// After an error nothing more is called; only Reserve and PushScales may be
// tried again, if it is MEMORY_BUDGET with a retry delay. Calls are short and
// do not wait. Exceptions are announced by FinishIsLong, ResolveUse and
// FinishUse.
class TensorJob {
 public:
  virtual ~TensorJob() = default;

  // Long calls may end early, with any error, once nobody wants the result any
  // more: when `stopped`, which outlives the job.
  void StopWhen(const std::atomic<bool>* stopped) { stopped_ = stopped; }

  // The use that the next call of Resolve or Finish makes of a store. Unless
  // that is none, the call comes on a thread that may wait and runs no kernel.
  virtual StoreUse ResolveUse() const { return StoreUse::kNone; }
  virtual StoreUse FinishUse() const { return StoreUse::kNone; }
  // The next call of Finish may take more than kShortWork: it is made on a
  // thread for that, and looks at stop().
  virtual bool FinishIsLong() const { return false; }
  // Calls for data of a few KiB take no more than some microseconds, except
  // where they wait for a store.
  virtual bool light() const { return false; }

  // Finds what the header names, such as the encoding.
  virtual absl::Status Resolve(ChunkWriter* out) { return absl::OkStatus(); }

  // Takes scales that came beside the next bytes, serialized as in
  // RequestEnvelope. Called after Resolve, before those bytes are fed.
  // Errors: SCALE_COUNT by default: none are expected. After MEMORY_BUDGET it
  // may be called again with the same `scales`, and goes on where it stopped.
  virtual absl::Status PushScales(absl::Span<const std::string> scales) {
    return core::ScaleShapeError(
        "scales came, expected none without an encoding with scales_in_chunks");
  }

  // About how long one worker searches for ranges when all bytes are there.
  // Resolve may correct this and the next, downwards.
  absl::Duration search_time() const { return search_time_; }
  // About how long one worker searches while all bytes of the frame are fed.
  absl::Duration feed_search_time() const { return feed_search_time_; }
  // Feeding does nothing else of note.
  bool feed_only_searches() const { return feed_only_searches_; }

  // Valid after Resolve.
  const TensorFrame& frame() const { return frame_; }

  // Takes the memory that the next `bytes`, or with 0 the next call of Finish
  // will need.
  // Errors: MEMORY_BUDGET.
  virtual absl::Status Reserve(int64_t bytes) { return absl::OkStatus(); }
  // The next `bytes` from `offset_bytes` on are about to be fed.
  virtual void BeginQuantum(int64_t offset_bytes, int64_t bytes,
                            ChunkWriter* out) {}
  virtual absl::Status Feed(int64_t offset_bytes,
                            absl::Span<const uint8_t> data) = 0;
  // Like Feed, for `shared` data, part of `region`, which the client may change
  // at any time. By default works on a copy, which `copy` makes.
  virtual absl::Status FeedShared(int64_t offset_bytes,
                                  const std::shared_ptr<const Region>& region,
                                  absl::Span<const uint8_t> shared,
                                  core::ThreadPool* pool, PrivateCopy* copy) {
    return Feed(offset_bytes, copy->Of(shared, pool));
  }
  virtual void EndQuantum() {}

  // All bytes were fed: does the next part of what is left, up to a message
  // for the client at most, and answers whether that was the last.
  virtual absl::StatusOr<bool> Finish(ChunkWriter* out) = 0;

 protected:
  core::StopToken stop() const { return core::StopToken(stopped_); }

  TensorFrame frame_;
  absl::Duration search_time_;
  absl::Duration feed_search_time_;
  bool feed_only_searches_ = true;

 private:
  const std::atomic<bool>* stopped_ = nullptr;
};

// One of the four streaming RPCs. Thread-safe.
class TensorRpc {
 public:
  virtual ~TensorRpc() = default;

  virtual Rpc id() const = 0;
  // Checks the serialized header of a tensor of `caller`, without waiting.
  virtual absl::StatusOr<std::unique_ptr<TensorJob>> Check(
      const std::string& header, const Caller& caller) = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_TENSOR_JOB_H_
