#include "server/rpc/quantization_service.h"

#include "server/rpc/stream_rpcs.h"
#include "server/rpc/tensor_stream.h"

namespace quantd::server {

QuantizationService::QuantizationService(const RpcEnvironment& env,
                                         CallRegistry* registry)
    : env_(env),
      registry_(registry),
      calibrate_(MakeCalibrateRpc(env)),
      quantize_(MakeQuantizeRpc(env)),
      dequantize_(MakeDequantizeRpc(env)),
      evaluate_(MakeEvaluateRpc(env)) {}

QuantizationService::Reactor* QuantizationService::Calibrate(
    grpc::CallbackServerContext* context) {
  return TensorStream::Start(env_, calibrate_.get(), registry_, context);
}

QuantizationService::Reactor* QuantizationService::Quantize(
    grpc::CallbackServerContext* context) {
  return TensorStream::Start(env_, quantize_.get(), registry_, context);
}

QuantizationService::Reactor* QuantizationService::Dequantize(
    grpc::CallbackServerContext* context) {
  return TensorStream::Start(env_, dequantize_.get(), registry_, context);
}

QuantizationService::Reactor* QuantizationService::Evaluate(
    grpc::CallbackServerContext* context) {
  return TensorStream::Start(env_, evaluate_.get(), registry_, context);
}

}  // namespace quantd::server
