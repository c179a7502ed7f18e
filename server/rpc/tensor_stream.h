// A stream of tensors: the reactor behind the four streaming RPCs.

#ifndef QUANTD_SERVER_RPC_TENSOR_STREAM_H_
#define QUANTD_SERVER_RPC_TENSOR_STREAM_H_

#include <atomic>
#include <deque>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "grpcpp/grpcpp.h"
#include "server/guard/admission.h"
#include "server/guard/caller_share.h"
#include "server/guard/limits.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/call_registry.h"
#include "server/rpc/caller.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_job.h"
#include "server/shared_memory/region.h"
#include "server/wire/chunk_reader.h"
#include "server/wire/chunk_writer.h"
#include "server/wire/envelope.h"

namespace quantd::server {

// How far a client may send ahead of what the server reads, at most: about one
// chunk.
constexpr int64_t kLookAheadBytes = int64_t{1} << 20;

// One call of a streaming RPC. Reads one message ahead; works on one message
// at a time, in quanta of bounded size: on the worker pool; where a tensor
// waits for a store on the store's pool; where its end takes long on a thread
// for that; and where message and job are light on gRPC's own thread, because
// changing threads would take longer. There tensors are admitted too, so that
// one that is turned away need not wait for a worker to hear of it, and what
// comes of it is dropped. Stops working (and so reading) while kMaxQueuedBytes
// wait for the client to read them, or fewer when memory is short.
//
// gRPC's callbacks and one worker task share the state under mutex_; what only
// the task uses is marked so. gRPC never runs callbacks from within Start* or
// Finish here, so those are called with the mutex held.
class TensorStream final
    : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
      public std::enable_shared_from_this<TensorStream>,
      private WatchedCall {
 public:
  // Takes over a call, which leaves the registry at its end. All arguments must
  // outlive it.
  static TensorStream* Start(const RpcEnvironment& env, TensorRpc* rpc,
                             CallRegistry* registry,
                             grpc::CallbackServerContext* context);

  ~TensorStream() override = default;

  void OnReadDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnCancel() override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDone() override;

 private:
  // What bounds the memory of a stream whose client does not read; the answer
  // of one more quantum may come on top.
  static constexpr int64_t kMaxQueuedBytes = int64_t{2} << 20;
  // The same, when a quarter of the memory budget is in use.
  static constexpr int64_t kShortQueuedBytes = int64_t{256} << 10;
  // What a queued message takes beside its bytes.
  static constexpr int64_t kQueuedMessageBytes = 512;
  // Messages up to this size are looked at on gRPC's threads.
  static constexpr size_t kLightMessageBytes = 8 << 10;

  // Where a step of the work is done.
  enum class Place { kTransport, kWorker, kStore, kLong };

  // A message for the client.
  struct Answer {
    grpc::ByteBuffer message;
    // What it counts for in queued_bytes_.
    int64_t charge_bytes;
  };

  // A message being worked on; the envelope points into the buffer.
  struct Message {
    grpc::ByteBuffer buffer;
    RequestEnvelope envelope;
    bool parsed = false;
    // Its tensor was admitted, but not opened yet.
    bool admitted = false;
    bool opened = false;
    // Of `shared`, which the envelope's data then points into.
    std::shared_ptr<const Region> region;
  };

  TensorStream(const RpcEnvironment& env, TensorRpc* rpc,
               CallRegistry* registry, grpc::CallbackServerContext* context);

  // Starts what the state allows: a read, a write, the worker task, the end.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // When there is work that is light, or nothing yet but a message to look at,
  // claims it: the caller, one of gRPC's callbacks, has to call
  // Work(kTransport).
  bool ClaimLightWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the task has something to do.
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // As many answers wait for the client as may.
  bool QueueIsFull() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndWith(absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Drain() override ABSL_LOCKS_EXCLUDED(mutex_);
  void EndIfOverdue(const Limits& limits) override ABSL_LOCKS_EXCLUDED(mutex_);
  void LookAfterMemory() override ABSL_LOCKS_EXCLUDED(mutex_);
  void EndNow() override ABSL_LOCKS_EXCLUDED(mutex_);
  // Tells the admission what the workers have to do for the stream: nothing
  // while its client does not read, and once it ends.
  void CountLoad() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // How long a worker would have needed for what the long computation that is
  // under way, if any, has done by now.
  absl::Duration LongTime() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tells the memory budget what the stream holds.
  void CountTransit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The worker task: one quantum of work, or what of it may be done in that
  // place; kStore: one step that waits for a store; kLong: one that takes long.
  void Work(Place place) ABSL_LOCKS_EXCLUDED(mutex_);
  // What the task ends with; again on a worker when it was long.
  void EndWork(absl::Status status, bool end_of_stream)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Works on message_, or on the end of the open tensor. An error ends the
  // stream.
  absl::Status DoQuantum(Place place);
  // Takes message_ apart, and admits and opens the tensor of its header, if
  // any; a large one is opened on a worker only.
  absl::Status OpenMessage(Place place);
  // A tensor begins. False when it was turned away.
  bool AdmitTensor();
  // Whether there is time for the open tensor, as far as it is known; counts
  // its load if there is.
  // Errors: OVERLOADED.
  absl::Status AskAdmission() ABSL_LOCKS_EXCLUDED(mutex_);
  void OpenTensor(const std::string& header);
  // How long a worker needs for what has arrived of the open tensor, without
  // the inbox.
  absl::Duration PendingWork() const;
  // How long for the end of the open tensor, which has so many bytes.
  absl::Duration FinishTime(int64_t bytes) const;
  Admission& admission() const { return share_->admission; }
  // Makes the data of message_ those of its `shared`.
  // Errors: REGION_NOT_FOUND, REGION_INVALID.
  absl::Status FindShared();
  // Starts the open tensor and gives it the data that came with its header.
  void StartTensor();
  // One quantum of the open tensor's bytes.
  void FeedTensor();
  // The next step of the open tensor's end.
  void FinishTensor();
  // Whether the open tensor has the memory for its next quantum. If not, the
  // stream waits for it for a while, without a thread; then the tensor fails.
  bool ReserveMemory(int64_t bytes);
  void FailTensor(const absl::Status& status);
  void CloseTensor(bool ok);
  // The open tensor knows its frame.
  bool started() const { return reader_.has_value(); }
  // Bytes that come of the open tensor, which has started.
  int64_t size_bytes() const {
    return job_->frame().end_bytes - job_->frame().begin_bytes;
  }
  // All of them are there.
  bool arrived() const {
    return started() && reader_->position_bytes() + reader_->ready_bytes() ==
                            job_->frame().end_bytes;
  }
  // All bytes of the open tensor are consumed, its answer is not complete.
  bool finishing() const { return started() && reader_->complete(); }
  // The open tensor's next step waits for a store.
  bool waits() const {
    return job_ != nullptr && (started() ? finishing() && job_->FinishWaits()
                                         : job_->StartWaits());
  }
  // Where the task has to go on.
  Place NextPlace() const {
    if (waits()) return Place::kStore;
    return finishing() && job_->FinishIsLong() ? Place::kLong : Place::kWorker;
  }
  // The open tensor's next step may be done in that place.
  bool MayRun(Place place) const {
    const Place next = NextPlace();
    return place == next ||
           (place == Place::kTransport && next == Place::kWorker &&
            job_->light() && message_->region == nullptr);
  }

  const RpcEnvironment& env_;
  TensorRpc* const rpc_;
  CallRegistry* const registry_;
  grpc::CallbackServerContext* const context_;
  const absl::Duration start_time_;
  const Credential credential_;
  const std::shared_ptr<CallerShare> share_;

  // Older than it should be: the stream ends as soon as no tensor is open.
  std::atomic<bool> old_{false};
  // end_ is set: what is computed is of no use.
  std::atomic<bool> stopped_{false};

  // Keeps the stream alive until OnDone; tasks hold another reference.
  std::shared_ptr<TensorStream> self_;

  // Used by the worker task only, of which there is one at a time.
  Caller caller_;
  absl::optional<Message> message_;
  // A tensor began and has not ended; it has a job once it is opened.
  bool tensor_open_ = false;
  std::unique_ptr<TensorJob> job_;
  absl::optional<ChunkReader> reader_;
  ChunkWriter writer_;
  absl::Duration tensor_start_time_;
  // What the end of the open tensor took of the workers until now.
  absl::Duration finish_time_;
  // Why the open tensor may only be served if it is light.
  absl::Status light_only_;
  // The stream had too much memory when the task began.
  bool excessive_ = false;
  // It lost its last tensor for that.
  bool cut_off_ = false;
  // The last tensor failed: chunks are dropped until the next header.
  bool skipping_ = false;
  // Since when the open tensor waits for memory; infinite past if it does not.
  absl::Duration memory_wait_start_ = -absl::InfiniteDuration();

  absl::Mutex mutex_;
  grpc::ByteBuffer read_buffer_ ABSL_GUARDED_BY(mutex_);
  absl::optional<grpc::ByteBuffer> inbox_ ABSL_GUARDED_BY(mutex_);
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool reads_done_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Answer> writes_ ABSL_GUARDED_BY(mutex_);
  int64_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  // Of the write that is under way.
  absl::Duration write_start_time_ ABSL_GUARDED_BY(mutex_);
  // A write has completed.
  bool has_written_ ABSL_GUARDED_BY(mutex_) = false;
  bool working_ ABSL_GUARDED_BY(mutex_) = false;
  // What the last task left: more to do, and a tensor that is open.
  bool has_more_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_tensor_ ABSL_GUARDED_BY(mutex_) = false;
  // Chunks are dropped.
  bool skips_ ABSL_GUARDED_BY(mutex_) = false;
  // What the workers have to do for the open tensor, and with the inbox.
  absl::Duration pending_work_ ABSL_GUARDED_BY(mutex_);
  // What they have done for its end.
  absl::Duration spent_work_ ABSL_GUARDED_BY(mutex_);
  // When a long computation began.
  absl::optional<absl::Duration> long_start_ ABSL_GUARDED_BY(mutex_);
  Admission::Load load_ ABSL_GUARDED_BY(mutex_);
  // Bytes of message_.
  int64_t message_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  MemoryBudget::Transit transit_ ABSL_GUARDED_BY(mutex_);
  // Of the next task.
  Place next_place_ ABSL_GUARDED_BY(mutex_) = Place::kWorker;
  // The open tensor waits for memory; Wake ends it.
  bool parked_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Duration last_progress_ ABSL_GUARDED_BY(mutex_);
  // Set once: how the call ends, when what is queued has been written.
  absl::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_TENSOR_STREAM_H_
