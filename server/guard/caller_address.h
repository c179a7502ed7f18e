// Address that a call comes from.

#ifndef QUANTD_SERVER_GUARD_CALLER_ADDRESS_H_
#define QUANTD_SERVER_GUARD_CALLER_ADDRESS_H_

#include <string>

#include "absl/strings/string_view.h"

namespace quantd::server {

// The address of a running call, without the port, by what
// grpc::ServerContext::peer() says of it: "ipv4:10.0.0.1"; "unix" for every
// unix socket.
std::string CallerAddress(absl::string_view peer);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_CALLER_ADDRESS_H_
