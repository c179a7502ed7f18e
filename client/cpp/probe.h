// Finds out what a server that closed a connection wanted.

#ifndef QUANTD_CLIENT_CPP_PROBE_H_
#define QUANTD_CLIENT_CPP_PROBE_H_

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/client_options.h"
#include "grpcpp/support/status.h"

namespace quantd::internal {

// FromGrpcStatus, with a probe: where a connection was closed before anything
// was said on it, looks whether TLS is missing, which takes another connection
// and at most 2 s.
absl::Status StatusOf(const grpc::Status& status, const ClientOptions& options,
                      absl::Duration timeout);

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_PROBE_H_
