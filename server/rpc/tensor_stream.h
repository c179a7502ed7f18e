// A stream of tensors: the reactor behind the four streaming RPCs.

#ifndef QUANTD_SERVER_RPC_TENSOR_STREAM_H_
#define QUANTD_SERVER_RPC_TENSOR_STREAM_H_

#include <atomic>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "grpcpp/grpcpp.h"
#include "server/guard/access_list.h"
#include "server/guard/caller_share.h"
#include "server/guard/limits.h"
#include "server/rpc/call_registry.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/steps.h"
#include "server/rpc/stream_account.h"
#include "server/rpc/stream_transport.h"
#include "server/rpc/stream_watchdog.h"
#include "server/rpc/tensor_job.h"
#include "server/rpc/tensor_sequence.h"

namespace quantd::server {

// One call of a streaming RPC. Puts its parts together: the transport has the
// messages, the sequence the tensors, the account what they cost, the watchdog
// the time. Decides itself who works on the stream next.
//
// There is one task at a time. It works on one message, in quanta of bounded
// size, on a thread for steps of that kind. If message and job are light, one
// of gRPC's own threads does it. These threads also admit tensors: a tensor
// that is refused hears of it at once, without waiting for a worker, and the
// rest of it is dropped. While too many answers wait for the client, no task
// begins, and so nothing is read.
//
// gRPC's callbacks and the task share the state under mutex_; the sequence is
// the task's alone.
class TensorStream final : public StreamTransport::Reactor,
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
  void OnDone() override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  TensorStream(const RpcEnvironment& env, TensorRpc* rpc,
               CallRegistry* registry, grpc::CallbackServerContext* context,
               Credential credential, std::shared_ptr<CallerShare> share);

  void Drain() override ABSL_LOCKS_EXCLUDED(mutex_);
  void EndIfOverdue(const Limits& limits) override ABSL_LOCKS_EXCLUDED(mutex_);
  void LookAfterMemory() override ABSL_LOCKS_EXCLUDED(mutex_);
  void EndNow() override ABSL_LOCKS_EXCLUDED(mutex_);

  // Starts what the state allows: a task, a write, a read, the end.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Sends an empty message where the client has waited for long, and asked to
  // be told that its tensor is worked on.
  void TellProgress(absl::Duration interval)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends a stream that has nothing to do when that is the time for it.
  void EndIfIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // When there is work that is light, or nothing yet but a message to look at,
  // claims it: the caller, one of gRPC's callbacks, has to call Work(kLight).
  bool ClaimLightWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // True if there is something to do for a task.
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // True if as many answers wait for the client as may.
  bool QueueIsFull() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndWith(absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tells the account what the stream holds.
  void Count() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The task: a step, or what of it a thread for steps of that kind may do.
  void Work(StepKind kind) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the task; on a worker when it was long.
  void EndWork(absl::Status status, bool end_of_stream)
      ABSL_LOCKS_EXCLUDED(mutex_);

  const RpcEnvironment& env_;
  const Rpc rpc_;
  grpc::CallbackServerContext* const context_;
  // The call has the metadata that asks for it.
  const bool tells_progress_;
  StreamWatchdog watchdog_;
  StreamAccount account_;
  // The end is set: what is computed is of no use.
  std::atomic<bool> stopped_{false};
  // Keeps the stream alive until OnDone; tasks hold another reference.
  std::shared_ptr<TensorStream> self_;

  // Used by the task only, of which there is one at a time.
  TensorSequence tensors_;

  absl::Mutex mutex_;
  StreamTransport transport_ ABSL_GUARDED_BY(mutex_);
  // There is a task.
  bool working_ ABSL_GUARDED_BY(mutex_) = false;
  // Time of the last answer or progress message to the client.
  absl::Duration told_time_ ABSL_GUARDED_BY(mutex_) = core::SteadyNow();
  // State after the last task.
  TensorSequence::Outlook outlook_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_TENSOR_STREAM_H_
