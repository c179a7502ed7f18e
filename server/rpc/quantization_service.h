// The streaming service: raw bytes in, a TensorStream per call.

#ifndef QUANTD_SERVER_RPC_QUANTIZATION_SERVICE_H_
#define QUANTD_SERVER_RPC_QUANTIZATION_SERVICE_H_

#include <memory>

#include "grpcpp/grpcpp.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "server/rpc/call_registry.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_job.h"

namespace quantd::server {

// Thread-safe.
class QuantizationService final
    : public v1::QuantizationService::WithRawCallbackMethod_Calibrate<
          v1::QuantizationService::WithRawCallbackMethod_Quantize<
              v1::QuantizationService::WithRawCallbackMethod_Dequantize<
                  v1::QuantizationService::WithRawCallbackMethod_Evaluate<
                      v1::QuantizationService::Service>>>> {
 public:
  using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

  // Both must outlive the service.
  QuantizationService(const RpcEnvironment& env, CallRegistry* registry);

  Reactor* Calibrate(grpc::CallbackServerContext* context) override;
  Reactor* Quantize(grpc::CallbackServerContext* context) override;
  Reactor* Dequantize(grpc::CallbackServerContext* context) override;
  Reactor* Evaluate(grpc::CallbackServerContext* context) override;

 private:
  const RpcEnvironment& env_;
  CallRegistry* const registry_;
  const std::unique_ptr<TensorRpc> calibrate_;
  const std::unique_ptr<TensorRpc> quantize_;
  const std::unique_ptr<TensorRpc> dequantize_;
  const std::unique_ptr<TensorRpc> evaluate_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_QUANTIZATION_SERVICE_H_
