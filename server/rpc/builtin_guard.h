// Limits for the services that gRPC brings along: reflection and health.

#ifndef QUANTD_SERVER_RPC_BUILTIN_GUARD_H_
#define QUANTD_SERVER_RPC_BUILTIN_GUARD_H_

#include <memory>

#include "grpcpp/support/server_interceptor.h"
#include "server/rpc/call_registry.h"
#include "server/rpc/rpc_environment.h"

namespace quantd::server {

// gRPC's own services ask nobody who calls, and keep a stream for as long as
// its client likes. With this,
//   - streams of reflection and of Health.Watch count in the registry. They are
//     cancelled where it has no room for them, and when it drains;
//   - reflection gives empty messages to whoever is not known, and in the end
//     the error. Its streams hold a thread each, so they end with the idle
//     timeout, whatever they do.
// Health stays open to all, balancers among them: it says nothing but whether
// the server serves. The arguments must outlive the server.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>
MakeBuiltinGuard(const RpcEnvironment& env, CallRegistry* registry);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_BUILTIN_GUARD_H_
