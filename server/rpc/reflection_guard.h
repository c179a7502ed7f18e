// Reflection for those whom the server knows, and not for ever.

#ifndef QUANTD_SERVER_RPC_REFLECTION_GUARD_H_
#define QUANTD_SERVER_RPC_REFLECTION_GUARD_H_

#include <memory>

#include "grpcpp/support/server_interceptor.h"
#include "server/rpc/call_registry.h"
#include "server/rpc/caller.h"

namespace quantd::server {

// gRPC's own reflection service asks nobody who calls, and holds a thread for
// each of its streams. With this, whoever is not known to `authenticator` gets
// empty messages and in the end the error, and a stream ends with the idle
// timeout, whatever it does. Both arguments must outlive the server. Health
// stays open to all, balancers among them, and says nothing but whether the
// server serves.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>
MakeReflectionGuard(const Authenticator* authenticator, CallRegistry* registry);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_REFLECTION_GUARD_H_
