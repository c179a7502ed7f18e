// From absl::Status to what goes over the wire: the one place that does it.

#ifndef QUANTD_SERVER_WIRE_STATUS_H_
#define QUANTD_SERVER_WIRE_STATUS_H_

#include "absl/status/status.h"
#include "grpcpp/support/status.h"
#include "quantd/v1/tensor.pb.h"

namespace quantd::server {

// The message stays "REASON: text"; reason, field and retry delay also go into
// google.rpc.ErrorInfo, BadRequest and RetryInfo details. A status that is not
// from the error catalogue becomes INTERNAL.
grpc::Status ToGrpcStatus(const absl::Status& status);

// Like ToGrpcStatus, as the end of one tensor.
v1::TensorError ToTensorError(const absl::Status& status);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_WIRE_STATUS_H_
