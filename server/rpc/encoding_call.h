// A call of EncodingService, whatever its shape.

#ifndef QUANTD_SERVER_RPC_ENCODING_CALL_H_
#define QUANTD_SERVER_RPC_ENCODING_CALL_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "google/protobuf/message.h"
#include "grpcpp/grpcpp.h"
#include "server/guard/caller_share.h"
#include "server/guard/limits.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/call_registry.h"
#include "server/rpc/caller.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/steps.h"
#include "server/rpc/unexpected.h"

namespace quantd::server {

// Up to this size memory is not charged. So small calls, which come in large
// numbers, go on while tensors have used up the budget.
constexpr int64_t kUnchargedBytes = int64_t{64} << 10;

// Arguments of every call of EncodingService; all outlives the call.
struct CallArguments {
  const RpcEnvironment& env;
  CallRegistry* registry;
  grpc::CallbackServerContext* context;
};

// How long a client may take for an answer: the idle timeout, and up to a
// second for each MiB.
absl::Duration SendTime(int64_t bytes, absl::Duration idle_timeout);

// Takes messages up and sends messages down, in steps: each ends by starting
// the next step, or by ending the call.
//
// gRPC is told that every call is a stream of bytes in both directions. On the
// wire a unary call looks the same. So the caller is known before a byte of the
// request is read, and its size before it is parsed. Thread-safe.
class EncodingCall
    : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
      public std::enable_shared_from_this<EncodingCall>,
      protected WatchedCall {
 public:
  // Starts a call of a subclass, made with `arguments` and `more`. It deletes
  // itself at its end.
  template <typename Call, typename... More>
  static EncodingCall* Start(const CallArguments& arguments, More&&... more) {
    CallRegistry* const registry = arguments.registry;
    const std::shared_ptr<EncodingCall> call(
        new Call(arguments, std::forward<More>(more)...),
        [registry](EncodingCall* gone) { registry->Leave(gone); });
    call->Begin();
    return call.get();
  }

  ~EncodingCall() override = default;

  void OnReadDone(bool ok) final ABSL_LOCKS_EXCLUDED(mutex_);
  void OnWriteDone(bool ok) final ABSL_LOCKS_EXCLUDED(mutex_);
  void OnCancel() final;
  void OnDone() final ABSL_LOCKS_EXCLUDED(mutex_);

 protected:
  // `request`  what messages up are parsed into; a member of the subclass.
  EncodingCall(const CallArguments& arguments, Rpc rpc,
               google::protobuf::Message* request);

  const RpcEnvironment& env() const { return env_; }
  // By the access file as it was at the last MayGoOn. Requires: in a step.
  const Caller& caller() const { return *caller_; }
  // The result is of no use any more: the client is gone, or the server does
  // not wait any longer.
  bool stopped() const { return stopped_.load(); }
  core::StopToken stop() const { return core::StopToken(&stopped_); }

  // The step after a message up: `more` with a request, else after the last.
  // On a worker, or on gRPC's thread after a light one.
  virtual void Took(bool more) = 0;
  // The step after a message down was taken by the client, on gRPC's thread.
  virtual void Sent() = 0;

  // The caller's.
  core::ThreadPool::Group group() const { return share_->group; }

  // False when the call is of no more use; then it has been ended.
  bool IsWanted();
  // Like IsWanted, for a moment at which nothing is lost if the call ends. So
  // it also ends if the server drains, if the call is too old, or if the caller
  // may no longer make it.
  bool MayGoOn();
  // The error for which MayGoOn would end the call, for use within a long step;
  // does not end the call.
  absl::Status CheckGoesOn();

  // Schedules a step of that kind in the caller's group, whichever thread asks
  // for it. An exception, which the step can throw only before it hands the
  // call over, ends the call.
  template <typename Step>
  void Schedule(StepKind kind, Step step) {
    const core::ThreadPool::GroupScope scope(group());
    server::Schedule(env_, kind, [self = shared_from_this(), kind, step] {
      self->RunStep(step, kind);
    });
  }

  // Each step ends with one of these, once.
  void Read() ABSL_LOCKS_EXCLUDED(mutex_);
  void Write(const google::protobuf::Message& response)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void End(absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the call with the only message down.
  void EndWith(const google::protobuf::Message& response)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Begin();
  template <typename Step>
  void RunStep(Step step, StepKind kind = StepKind::kLight) {
    absl::Status status = Guarded(RpcNameOf(rpc_).method, [&] {
      step();
      return absl::OkStatus();
    });
    if (status.ok()) return;
    if (!IsLowPriority(kind)) return End(std::move(status));
    const core::ThreadPool::GroupScope scope(group());
    server::Schedule(
        env_, StepKind::kQuantum,
        [self = shared_from_this(), status] { self->End(status); });
  }
  void TakeRequest(bool more);
  absl::Status ParseRequest();
  // Into response_bytes_, charged to the budget while it waits.
  absl::Status Serialize(const google::protobuf::Message& response);
  // For as long as a client may take for what is in response_bytes_.
  void BeginSending() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLocked(absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends a call that waits for a request.
  void EndRead(absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  void Drain() final ABSL_LOCKS_EXCLUDED(mutex_);
  void EndNow() final ABSL_LOCKS_EXCLUDED(mutex_);
  void EndIfOverdue(const Limits& limits) final ABSL_LOCKS_EXCLUDED(mutex_);

  const RpcEnvironment& env_;
  const Rpc rpc_;
  CallRegistry* const registry_;
  grpc::CallbackServerContext* const context_;
  google::protobuf::Message* const request_;
  const Credential credential_;
  const std::shared_ptr<CallerShare> share_;
  const absl::Duration start_time_ = core::SteadyNow();
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> out_of_time_{false};
  // Either of them.
  std::atomic<bool> stopped_{false};
  // Keeps the call alive until OnDone.
  std::shared_ptr<EncodingCall> self_;

  // Used by the steps, one at a time.
  absl::StatusOr<Caller> caller_;
  // The messages that came and that are under way, and their leases.
  grpc::ByteBuffer request_bytes_;
  grpc::ByteBuffer response_bytes_;
  MemoryBudget::Lease arrival_lease_;
  MemoryBudget::Lease request_lease_;
  MemoryBudget::Lease response_lease_;

  // Steps hand over what they have left with it.
  absl::Mutex mutex_;
  // A request is waited for; whoever sets it to false goes on with the call.
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Duration read_start_time_ ABSL_GUARDED_BY(mutex_);
  // When the client must have taken what is under way.
  absl::Duration send_end_time_ ABSL_GUARDED_BY(mutex_) =
      absl::InfiniteDuration();
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_ENCODING_CALL_H_
