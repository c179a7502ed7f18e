#include "server/rpc/builtin_guard.h"

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/parallel/steady_clock.h"
#include "grpcpp/grpcpp.h"
#include "server/guard/caller_share.h"
#include "server/guard/limits.h"
#include "server/wire/status.h"

namespace quantd::server {
namespace {

using grpc::experimental::InterceptionHookPoints;
using Kind = CallRegistry::Kind;

constexpr absl::string_view kReflectionService = "/grpc.reflection.";
constexpr absl::string_view kWatchMethod = "/grpc.health.v1.Health/Watch";

// A stream of reflection is short, or it is ended; who watches the health may
// stay.
class BuiltinStream final : public WatchedCall {
 public:
  BuiltinStream(grpc::ServerContextBase* context, Kind kind,
                std::shared_ptr<CallerShare> share)
      : context_(context), kind_(kind), share_(std::move(share)) {}

  void EndIfOverdue(const Limits& limits) override {
    if (kind_ == Kind::kCall &&
        core::SteadyNow() - start_time_ >= limits.idle_timeout) {
      context_->TryCancel();
    }
  }
  void Drain() override { context_->TryCancel(); }
  void EndNow() override { context_->TryCancel(); }

  const CallerShare& share() const { return *share_; }

 private:
  grpc::ServerContextBase* const context_;
  const Kind kind_;
  const std::shared_ptr<CallerShare> share_;
  const absl::Duration start_time_ = core::SteadyNow();
};

class BuiltinGuard final : public grpc::experimental::Interceptor {
 public:
  BuiltinGuard(const RpcEnvironment& env, CallRegistry* registry,
               grpc::experimental::ServerRpcInfo* info)
      : env_(env),
        registry_(registry),
        info_(info),
        kind_(info->method() == kWatchMethod ? Kind::kWatch : Kind::kCall) {}
  // gRPC's context is still there.
  ~BuiltinGuard() override {
    if (stream_ != nullptr) registry_->Leave(stream_);
  }

  void Intercept(
      grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      Begin();
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
  void Begin() {
    grpc::ServerContextBase* const context = info_->server_context();
    const Credential credential = env_.authenticator->CredentialOf(*context);
    stream_ = new BuiltinStream(
        context, kind_,
        env_.shares->Find(env_.authenticator->ShareName(*context, credential)));
    const absl::Status entered =
        registry_->Enter(stream_, stream_->share().group, kind_);
    if (!entered.ok()) {
      env_.metrics->LimitRejected(core::ErrorReason(entered));
      stream_->EndNow();
    }
    if (kind_ == Kind::kCall) {
      status_ = env_.authenticator->CheckKnown(*context, credential);
    }
    // Calls that were there when the drain began have been told.
    if (registry_->draining()) stream_->Drain();
  }

  const RpcEnvironment& env_;
  CallRegistry* const registry_;
  grpc::experimental::ServerRpcInfo* const info_;
  const Kind kind_;
  absl::Status status_;
  // The registry deletes it.
  BuiltinStream* stream_ = nullptr;
};

class GuardFactory final
    : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  GuardFactory(const RpcEnvironment& env, CallRegistry* registry)
      : env_(env), registry_(registry) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    const bool guarded = info->method() == kWatchMethod ||
                         absl::StartsWith(info->method(), kReflectionService);
    return guarded ? new BuiltinGuard(env_, registry_, info) : nullptr;
  }

 private:
  const RpcEnvironment& env_;
  CallRegistry* const registry_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>
MakeBuiltinGuard(const RpcEnvironment& env, CallRegistry* registry) {
  return std::make_unique<GuardFactory>(env, registry);
}

}  // namespace quantd::server
