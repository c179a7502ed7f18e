// The four streaming RPCs: what each does with a tensor. One file per RPC.

#ifndef QUANTD_SERVER_RPC_STREAM_RPCS_H_
#define QUANTD_SERVER_RPC_STREAM_RPCS_H_

#include <memory>

#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_job.h"

namespace quantd::server {

// `env` must outlive the RPC.
std::unique_ptr<TensorRpc> MakeCalibrateRpc(const RpcEnvironment& env);
std::unique_ptr<TensorRpc> MakeQuantizeRpc(const RpcEnvironment& env);
std::unique_ptr<TensorRpc> MakeDequantizeRpc(const RpcEnvironment& env);
std::unique_ptr<TensorRpc> MakeEvaluateRpc(const RpcEnvironment& env);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_STREAM_RPCS_H_
