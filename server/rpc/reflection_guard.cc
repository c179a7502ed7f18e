#include "server/rpc/reflection_guard.h"

#include <memory>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "grpcpp/grpcpp.h"
#include "server/guard/limits.h"
#include "server/wire/status.h"

namespace quantd::server {
namespace {

using grpc::experimental::InterceptionHookPoints;

// A stream of reflection: short, or it is ended.
class ReflectionStream final : public WatchedCall {
 public:
  explicit ReflectionStream(grpc::ServerContextBase* context)
      : context_(context) {}

  void EndIfOverdue(const Limits& limits) override {
    if (core::SteadyNow() - start_time_ >= limits.idle_timeout) {
      context_->TryCancel();
    }
  }
  void Drain() override { context_->TryCancel(); }
  void EndNow() override { context_->TryCancel(); }

 private:
  grpc::ServerContextBase* const context_;
  const absl::Duration start_time_ = core::SteadyNow();
};

class Guard final : public grpc::experimental::Interceptor {
 public:
  Guard(const Authenticator* authenticator, CallRegistry* registry,
        grpc::experimental::ServerRpcInfo* info)
      : authenticator_(authenticator), registry_(registry), info_(info) {}
  // gRPC's context is still there.
  ~Guard() override {
    if (stream_ != nullptr) registry_->Leave(stream_);
  }

  void Intercept(
      grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      grpc::ServerContextBase* const context = info_->server_context();
      status_ =
          authenticator_->CheckKnown(authenticator_->CredentialOf(*context));
      stream_ = new ReflectionStream(context);
      registry_->Enter(stream_);
      // Those that were there have been told.
      if (registry_->draining()) stream_->Drain();
    }
    if (!status_.ok()) {
      if (methods->QueryInterceptionHookPoint(
              InterceptionHookPoints::PRE_SEND_MESSAGE)) {
        methods->GetSerializedSendMessage()->Clear();
      }
      if (methods->QueryInterceptionHookPoint(
              InterceptionHookPoints::PRE_SEND_STATUS)) {
        methods->ModifySendStatus(ToGrpcStatus(status_));
      }
    }
    methods->Proceed();
  }

 private:
  const Authenticator* const authenticator_;
  CallRegistry* const registry_;
  grpc::experimental::ServerRpcInfo* const info_;
  absl::Status status_;
  // The registry deletes it.
  ReflectionStream* stream_ = nullptr;
};

class GuardFactory final
    : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  GuardFactory(const Authenticator* authenticator, CallRegistry* registry)
      : authenticator_(authenticator), registry_(registry) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    const bool guarded = absl::StartsWith(info->method(), "/grpc.reflection.");
    return guarded ? new Guard(authenticator_, registry_, info) : nullptr;
  }

 private:
  const Authenticator* const authenticator_;
  CallRegistry* const registry_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>
MakeReflectionGuard(const Authenticator* authenticator,
                    CallRegistry* registry) {
  return std::make_unique<GuardFactory>(authenticator, registry);
}

}  // namespace quantd::server
