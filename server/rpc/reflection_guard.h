// Reflection for those whom the server knows.

#ifndef QUANTD_SERVER_RPC_REFLECTION_GUARD_H_
#define QUANTD_SERVER_RPC_REFLECTION_GUARD_H_

#include <memory>

#include "grpcpp/support/server_interceptor.h"
#include "server/rpc/caller.h"

namespace quantd::server {

// gRPC's own reflection service asks nobody who calls. With this, whoever is
// not known to `authenticator`, which must outlive the server, gets empty
// messages and in the end the error. Health stays open to all, balancers among
// them, and says nothing but whether the server serves.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>
MakeReflectionGuard(const Authenticator* authenticator);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_REFLECTION_GUARD_H_
