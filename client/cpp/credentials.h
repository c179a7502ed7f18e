// The credentials that a client shows to a server, and those that it wants to
// see.

#ifndef QUANTD_CLIENT_CPP_CREDENTIALS_H_
#define QUANTD_CLIENT_CPP_CREDENTIALS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/client_options.h"

namespace grpc {
class ChannelCredentials;
namespace experimental {
class ClientInterceptorFactoryInterface;
}  // namespace experimental
}  // namespace grpc

namespace quantd::internal {

// Reads the files.
// Errors: ARGUMENT_INVALID.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> TlsCredentials(
    const TlsPaths& paths);

using InterceptorFactory =
    grpc::experimental::ClientInterceptorFactoryInterface;

// Sends the token of a file with every call; the file is looked at again once a
// second, and what was there stays when it can't be read.
// Errors: ARGUMENT_INVALID for a file that can't be read or holds no token.
absl::StatusOr<std::unique_ptr<InterceptorFactory>> SendTokenOf(
    const std::string& path);

// True if everything behind `target` is on this machine.
bool IsLocalTarget(absl::string_view target);

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_CREDENTIALS_H_
