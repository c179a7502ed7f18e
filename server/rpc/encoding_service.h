// The service of stored encodings and statistics: ordinary messages over the
// stores.

#ifndef QUANTD_SERVER_RPC_ENCODING_SERVICE_H_
#define QUANTD_SERVER_RPC_ENCODING_SERVICE_H_

#include <deque>
#include <functional>
#include <string>

#include "grpcpp/impl/service_type.h"
#include "server/metrics/metrics.h"
#include "server/rpc/call_registry.h"
#include "server/rpc/encoding_call.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/unary_call.h"

namespace quantd::server {

// Calls run on the store's pool, what they compute on the workers. Thread-safe.
class EncodingService final : public grpc::Service {
 public:
  // Both must outlive the service.
  EncodingService(const RpcEnvironment& env, CallRegistry* registry);

 private:
  // `start` begins a call of the RPC.
  void Add(Rpc rpc, std::function<EncodingCall*(const CallArguments&)> start);
  template <typename Request, typename Response>
  void AddUnary(Rpc rpc, absl::Status (*body)(const UnaryContext& context,
                                              const Request& request,
                                              Response* response));

  const RpcEnvironment& env_;
  CallRegistry* const registry_;
  // Paths of the methods; gRPC keeps pointers to them.
  std::deque<std::string> paths_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_ENCODING_SERVICE_H_
