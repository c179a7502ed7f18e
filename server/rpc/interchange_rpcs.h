// The calls that write and read files of encodings. One file per RPC.

#ifndef QUANTD_SERVER_RPC_INTERCHANGE_RPCS_H_
#define QUANTD_SERVER_RPC_INTERCHANGE_RPCS_H_

#include <string>

#include "absl/status/status.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/encoding_service.pb.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_stream.h"

namespace quantd::server {

// Each takes over a call. `env`, `registry` and `context` must outlive it.
grpc::ServerWriteReactor<v1::ExportEncodingsResponse>* StartExportEncodings(
    const RpcEnvironment& env, StreamRegistry* registry,
    grpc::CallbackServerContext* context,
    const v1::ExportEncodingsRequest& request);
grpc::ServerReadReactor<v1::ImportEncodingsRequest>* StartImportEncodings(
    const RpcEnvironment& env, StreamRegistry* registry,
    grpc::CallbackServerContext* context,
    v1::ImportEncodingsResponse* response);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_INTERCHANGE_RPCS_H_
