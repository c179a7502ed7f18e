#include "client/cpp/probe.h"

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client_options.h"
#include "client/cpp/credentials.h"
#include "client/cpp/errors.h"
#include "client/cpp/grpc_status.h"
#include "grpc/grpc.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "grpcpp/support/status.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/encoding_service.pb.h"

namespace quantd::internal {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(2);

// True if the server there shakes hands in TLS, whatever comes of it.
bool SpeaksTls(const std::string& target) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  if (IsLocalTarget(target)) arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  const std::shared_ptr<grpc::Channel> channel = grpc::CreateCustomChannel(
      target, grpc::SslCredentials(grpc::SslCredentialsOptions()), arguments);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  v1::ListModelsResponse response;
  const absl::Status status =
      FromGrpcStatus(v1::EncodingService::NewStub(channel)->ListModels(
                         &context, v1::ListModelsRequest(), &response),
                     target, kPatience);
  // Without its authority it is not believed; with it, it answers something.
  return IsServerUnreachable(status)
             ? UnreachableCauseOf(status) == UnreachableCause::kUntrusted
             : !absl::IsDeadlineExceeded(status);
}

}  // namespace

absl::Status StatusOf(const grpc::Status& status, const ClientOptions& options,
                      absl::Duration timeout) {
  absl::Status result = FromGrpcStatus(status, options.target, timeout);
  // gRPC makes no connection of such credentials, and has none to tell of.
  if (options.tls.has_value() && IsServerUnreachable(result) &&
      absl::StrContains(status.error_message(), "empty address list")) {
    return ServerUnreachableError(options.target, status.error_message(),
                                  UnreachableCause::kTlsFilesUnusable);
  }
  if (UnreachableCauseOf(result) != UnreachableCause::kClosed) return result;
  if (options.tls.has_value()) {
    return ServerUnreachableError(options.target, result.message(),
                                  UnreachableCause::kWantsCertificate);
  }
  if (!absl::StartsWith(options.target, "unix") && SpeaksTls(options.target)) {
    return ServerUnreachableError(options.target, result.message(),
                                  UnreachableCause::kWantsTls);
  }
  return result;
}

}  // namespace quantd::internal
