// The status of a gRPC call as an error of the catalogue.

#ifndef QUANTD_CLIENT_CPP_GRPC_STATUS_H_
#define QUANTD_CLIENT_CPP_GRPC_STATUS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "grpcpp/support/status.h"

namespace quantd::internal {

// The status of a call to `target` that was not cancelled here. What gRPC
// itself makes of a connection or stream that broke becomes
// SERVER_UNREACHABLE, DEADLINE_EXCEEDED becomes TIMEOUT.
absl::Status FromGrpcStatus(const grpc::Status& status,
                            absl::string_view target, absl::Duration timeout);

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_GRPC_STATUS_H_
