// The service of stored encodings and statistics: ordinary messages over the
// stores.

#ifndef QUANTD_SERVER_RPC_ENCODING_SERVICE_H_
#define QUANTD_SERVER_RPC_ENCODING_SERVICE_H_

#include <functional>

#include "absl/status/status.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_stream.h"

namespace quantd::server {

// Calls run on the store's pool, what they compute on the workers. Thread-safe.
class EncodingService final : public v1::EncodingService::CallbackService {
 public:
  // Both must outlive the service.
  EncodingService(const RpcEnvironment& env, StreamRegistry* registry);

  grpc::ServerUnaryReactor* ListEncodings(
      grpc::CallbackServerContext* context,
      const v1::ListEncodingsRequest* request,
      v1::ListEncodingsResponse* response) override;
  grpc::ServerUnaryReactor* GetEncoding(
      grpc::CallbackServerContext* context,
      const v1::GetEncodingRequest* request,
      v1::GetEncodingResponse* response) override;
  grpc::ServerUnaryReactor* PutEncoding(
      grpc::CallbackServerContext* context,
      const v1::PutEncodingRequest* request,
      v1::PutEncodingResponse* response) override;
  grpc::ServerUnaryReactor* DeleteEncoding(
      grpc::CallbackServerContext* context,
      const v1::DeleteEncodingRequest* request,
      v1::DeleteEncodingResponse* response) override;
  grpc::ServerUnaryReactor* ListModels(
      grpc::CallbackServerContext* context,
      const v1::ListModelsRequest* request,
      v1::ListModelsResponse* response) override;
  grpc::ServerUnaryReactor* ListRevisions(
      grpc::CallbackServerContext* context,
      const v1::ListRevisionsRequest* request,
      v1::ListRevisionsResponse* response) override;

  grpc::ServerWriteReactor<v1::ComputeEncodingsResponse>* ComputeEncodings(
      grpc::CallbackServerContext* context,
      const v1::ComputeEncodingsRequest* request) override;
  grpc::ServerWriteReactor<v1::SweepResponse>* Sweep(
      grpc::CallbackServerContext* context,
      const v1::SweepRequest* request) override;
  grpc::ServerUnaryReactor* GetStatistics(
      grpc::CallbackServerContext* context,
      const v1::GetStatisticsRequest* request,
      v1::GetStatisticsResponse* response) override;
  grpc::ServerUnaryReactor* ListStatistics(
      grpc::CallbackServerContext* context,
      const v1::ListStatisticsRequest* request,
      v1::ListStatisticsResponse* response) override;
  grpc::ServerUnaryReactor* DeleteStatistics(
      grpc::CallbackServerContext* context,
      const v1::DeleteStatisticsRequest* request,
      v1::DeleteStatisticsResponse* response) override;

  grpc::ServerWriteReactor<v1::ExportEncodingsResponse>* ExportEncodings(
      grpc::CallbackServerContext* context,
      const v1::ExportEncodingsRequest* request) override;
  grpc::ServerReadReactor<v1::ImportEncodingsRequest>* ImportEncodings(
      grpc::CallbackServerContext* context,
      v1::ImportEncodingsResponse* response) override;

 private:
  // Runs `body` on the store's pool and ends the call with its status.
  grpc::ServerUnaryReactor* Run(
      Rpc rpc, grpc::CallbackServerContext* context,
      std::function<absl::Status(const Caller&)> body);

  const RpcEnvironment& env_;
  StreamRegistry* const registry_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_ENCODING_SERVICE_H_
