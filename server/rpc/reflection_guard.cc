#include "server/rpc/reflection_guard.h"

#include <memory>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "grpcpp/grpcpp.h"
#include "server/wire/status.h"

namespace quantd::server {
namespace {

using grpc::experimental::InterceptionHookPoints;

class Guard final : public grpc::experimental::Interceptor {
 public:
  Guard(const Authenticator* authenticator,
        grpc::experimental::ServerRpcInfo* info)
      : authenticator_(authenticator), info_(info) {}

  void Intercept(
      grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      status_ = authenticator_->CheckKnown(
          authenticator_->CredentialOf(*info_->server_context()));
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
  grpc::experimental::ServerRpcInfo* const info_;
  absl::Status status_;
};

class GuardFactory final
    : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit GuardFactory(const Authenticator* authenticator)
      : authenticator_(authenticator) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    const bool guarded = absl::StartsWith(info->method(), "/grpc.reflection.");
    return guarded ? new Guard(authenticator_, info) : nullptr;
  }

 private:
  const Authenticator* const authenticator_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>
MakeReflectionGuard(const Authenticator* authenticator) {
  return std::make_unique<GuardFactory>(authenticator);
}

}  // namespace quantd::server
