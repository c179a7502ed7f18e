// The tensor of a stream that is open.

#ifndef QUANTD_SERVER_RPC_OPEN_TENSOR_H_
#define QUANTD_SERVER_RPC_OPEN_TENSOR_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/caller.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/steps.h"
#include "server/rpc/stream_account.h"
#include "server/rpc/tensor_job.h"
#include "server/shared_memory/region.h"
#include "server/wire/chunk_reader.h"
#include "server/wire/chunk_writer.h"
#include "server/wire/envelope.h"

namespace quantd::server {

// Messages up to this size are looked at on gRPC's threads.
constexpr int64_t kLightMessageBytes = 8 << 10;

// Leads one tensor through its life: Admit, Check, Resolve, Feed as often as
// there is something to feed, Finish until it answers true, Close. Asks before
// each whether there is time and memory, and measures what it takes. After an
// error only Close is called. Calls come one at a time, on any thread.
class OpenTensor {
 public:
  // All outlive the object. `stopped`  nobody waits for the tensor any more.
  OpenTensor(const RpcEnvironment& env, TensorRpc* rpc, StreamAccount* account,
             const std::atomic<bool>* stopped);

  // Checks that there is time for the tensor, with the `data_bytes` that came
  // beside its header in a message of `message_bytes`. If not, it may be served
  // all the same if it turns out to be light.
  // Errors: OVERLOADED for a large message.
  absl::Status Admit(int64_t data_bytes, int64_t message_bytes);
  // Reads its header.
  // Errors: those of TensorRpc::Check, OVERLOADED.
  absl::Status Check(const std::string& header, const Caller& caller,
                     int64_t data_bytes);
  // Finds what the header names, and takes the data that came beside it.
  // Errors: those of TensorJob::Resolve and Push, OVERLOADED.
  absl::Status Resolve(const RequestEnvelope& message, ChunkWriter* out);
  // Takes a further message, which stays until needs_message().
  // Errors: those of TensorJob::PushScales and ChunkReader::Push.
  absl::Status Push(const RequestEnvelope& message);
  // Hands scales that wait, and a quantum of what is ready, to the job, if
  // there is memory for it; if not, the tensor waits for some. `region`  that
  // the data are in, if they are shared. `over_share`  the stream has more
  // memory than it may have. Errors: those of the job, MEMORY_BUDGET.
  absl::Status Feed(const std::shared_ptr<const Region>& region,
                    bool over_share, ChunkWriter* out);
  // The next part of its end, if there is memory for it; true after the last.
  // Errors: as Feed.
  absl::StatusOr<bool> Finish(bool over_share, ChunkWriter* out);
  // Counts the tensor's outcome.
  void Close(bool ok);

  // It has a job.
  bool checked() const { return job_ != nullptr; }
  // It knows its frame.
  bool resolved() const { return reader_.has_value(); }
  // Bytes to feed. Requires: resolved().
  int64_t ready_bytes() const { return reader_->ready_bytes(); }
  // Nothing of the last message is left to be done.
  bool needs_message() const {
    return resolved() && ready_bytes() == 0 && scales_.empty();
  }
  // Keeps what is left of the last message, which may go. Requires:
  // needs_message().
  void Retain() { reader_->Retain(); }
  // All bytes are fed, its answer is not complete.
  bool finishing() const {
    return resolved() && reader_->complete() && scales_.empty();
  }
  // Errors: TENSOR_INCOMPLETE unless all bytes came. Requires: resolved().
  absl::Status CheckComplete() const { return reader_->CheckComplete(); }
  // It waits for memory; the step that waits is tried again.
  bool waits_for_memory() const {
    return memory_wait_start_ != -absl::InfiniteDuration();
  }
  // It failed because the stream had too much memory.
  bool cut_off() const { return cut_off_; }
  // The kind of its next step.
  // Requires: checked().
  StepKind next_step() const;
  // How long a worker needs for the bytes that have arrived; `data_bytes` with
  // the header unless it is resolved.
  absl::Duration PendingWork(int64_t data_bytes) const;
  // Time of the workers that its end took until now.
  absl::Duration finish_time() const { return finish_time_; }

 private:
  // The use that its next step makes of a store.
  StoreUse store_use() const {
    if (!checked()) return StoreUse::kNone;
    if (!resolved()) return job_->ResolveUse();
    return finishing() ? job_->FinishUse() : StoreUse::kNone;
  }
  bool waits() const { return store_use() != StoreUse::kNone; }
  // Bytes that come of it, as far as is known. Requires: checked().
  int64_t size_bytes() const {
    return job_->frame().end_bytes - job_->frame().begin_bytes;
  }
  // Requires: checked().
  bool searches_as_fed() const {
    return job_->feed_search_time() > absl::ZeroDuration() && size_bytes() > 0;
  }
  // How long for its end, if it has so many bytes.
  absl::Duration FinishTime(int64_t bytes) const;
  // Reserve and PushScales answer false when the tensor has to wait for memory:
  // for a while, without a thread.
  // Errors: MEMORY_BUDGET.
  absl::StatusOr<bool> Reserve(int64_t bytes, bool over_share);
  // Hands `scales_` to the job. Errors: those of TensorJob::PushScales.
  absl::StatusOr<bool> PushScales();
  // True if the step that asked for memory, and was answered `status`, can go
  // on; false if it waits.
  absl::StatusOr<bool> HasMemory(absl::Status status);

  const RpcEnvironment& env_;
  TensorRpc* const rpc_;
  StreamAccount* const account_;
  const std::atomic<bool>* const stopped_;
  const absl::Duration start_time_;
  std::unique_ptr<TensorJob> job_;
  absl::optional<ChunkReader> reader_;
  // Scales of the last message, until the job has them.
  absl::Span<const std::string> scales_;
  // Memory of the scales while they wait for memory.
  MemoryBudget::Lease scales_lease_;
  // Time of feeding the tensor, if it is searched meanwhile.
  absl::Duration feed_search_time_;
  absl::Duration finish_time_;
  // Why it may only be served if it is light.
  absl::Status light_only_;
  // Infinite past if it does not wait.
  absl::Duration memory_wait_start_ = -absl::InfiniteDuration();
  bool cut_off_ = false;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_OPEN_TENSOR_H_
