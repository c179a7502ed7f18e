// A call that answers a message per tensor.

#ifndef QUANTD_SERVER_RPC_TENSORWISE_CALL_H_
#define QUANTD_SERVER_RPC_TENSORWISE_CALL_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "grpcpp/grpcpp.h"
#include "server/rpc/caller.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_stream.h"
#include "server/wire/status.h"

namespace quantd::server {

// Makes one message at a time, and the next one when the client has taken it:
// Load on the store's pool, Compute on the workers, Store on the store's pool.
// Between steps it ends when the client is gone or the server is out of time,
// between tensors also when it drains. The steps follow one another; deletes
// itself at the end.
template <typename Response>
class TensorwiseCall : public grpc::ServerWriteReactor<Response>,
                       private WatchedCall {
 public:
  // All arguments must outlive the call.
  TensorwiseCall(const RpcEnvironment& env, Rpc rpc, StreamRegistry* registry,
                 grpc::CallbackServerContext* context)
      : env_(env),
        rpc_(rpc),
        registry_(registry),
        context_(context),
        caller_(env.authenticator->Authenticate(
            *context, env.authenticator->CredentialOf(*context), rpc)) {
    env_.metrics->RpcStarted(rpc_);
  }

  // To be called once, when the object is complete.
  void Begin() {
    registry_->Enter(this);
    if (!caller_.ok()) return End(caller_.status());
    env_.store_pool->Schedule([this] { LoadStep(); });
  }

  void OnWriteDone(bool ok) final {
    // The exchange also hands the next step what the last one has written.
    write_start_ns_.exchange(0);
    if (!ok) return End(absl::CancelledError());
    env_.store_pool->Schedule([this] { LoadStep(); });
  }

  void OnCancel() final { cancelled_.store(true); }

  void OnDone() final {
    // After OnCancel, if that was called, is done with the call.
    cancelled_.exchange(true);
    registry_->Leave(this);
    int code = static_cast<int>(end_.code());
    if (context_->IsCancelled()) {
      const bool late =
          context_->deadline() <= std::chrono::system_clock::now();
      code = late ? grpc::StatusCode::DEADLINE_EXCEEDED
                  : grpc::StatusCode::CANCELLED;
    }
    env_.metrics->RpcHandled(rpc_, code, absl::Now() - start_time_);
    delete this;
  }

 protected:
  ~TensorwiseCall() override = default;

  const RpcEnvironment& env() const { return env_; }
  // Requires: in a step.
  const Caller& caller() const { return *caller_; }
  // What is computed is of no use: the client is gone, or the server does not
  // wait any longer.
  bool stopped() const { return cancelled_.load() || out_of_time_.load(); }

  // Reads what the next message needs; false when there is no further one. An
  // error ends the call.
  virtual absl::StatusOr<bool> Load() = 0;
  // Does the next part of the message, of bounded size; answers whether that
  // was the last.
  virtual bool Compute(Response* response) = 0;
  // Whether Store is to be called.
  virtual bool stores() const { return false; }
  virtual void Store(Response* response) {}

 private:
  bool Stopped() {
    if (cancelled_.load()) {
      End(absl::CancelledError());
    } else if (out_of_time_.load()) {
      End(core::DrainingError());
    } else {
      return false;
    }
    return true;
  }

  void LoadStep() {
    if (Stopped()) return;
    if (registry_->draining()) return End(core::DrainingError());
    absl::StatusOr<bool> more = Load();
    if (Stopped()) return;
    if (!more.ok()) return End(more.status());
    if (!*more) return End(absl::OkStatus());
    response_.Clear();
    env_.pool->Schedule([this] { ComputeStep(); });
  }

  void ComputeStep() {
    if (Stopped()) return;
    if (!Compute(&response_)) {
      env_.pool->Schedule([this] { ComputeStep(); });
    } else if (stores()) {
      env_.store_pool->Schedule([this] { StoreStep(); });
    } else {
      Write();
    }
  }

  void StoreStep() {
    if (Stopped()) return;
    Store(&response_);
    Write();
  }

  void Write() {
    write_start_ns_.store(absl::GetCurrentTimeNanos());
    this->StartWrite(&response_);
  }

  void End(absl::Status status) {
    env_.metrics->LimitRejected(core::ErrorReason(status));
    end_ = std::move(status);
    this->Finish(ToGrpcStatus(end_));
  }

  void EndNow() final { out_of_time_.store(true); }

  // A client that does not read.
  void EndIfIdle(absl::Duration idle_timeout) final {
    const int64_t start_ns = write_start_ns_.load();
    if (start_ns != 0 && absl::Nanoseconds(absl::GetCurrentTimeNanos() -
                                           start_ns) >= idle_timeout) {
      context_->TryCancel();
    }
  }

  const RpcEnvironment& env_;
  const Rpc rpc_;
  StreamRegistry* const registry_;
  grpc::CallbackServerContext* const context_;
  const absl::StatusOr<Caller> caller_;
  const absl::Time start_time_ = absl::Now();
  std::atomic<bool> cancelled_{false};
  // The server does not wait any longer.
  std::atomic<bool> out_of_time_{false};
  // When the write that is under way began; 0 when none is.
  std::atomic<int64_t> write_start_ns_{0};
  // Used by the steps, one at a time.
  Response response_;
  absl::Status end_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_TENSORWISE_CALL_H_
