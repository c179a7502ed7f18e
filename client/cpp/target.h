// How the address of a server is written.

#ifndef QUANTD_CLIENT_CPP_TARGET_H_
#define QUANTD_CLIENT_CPP_TARGET_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quantd {

// The target as gRPC takes it:
//
//   HOST, HOST:PORT            the port is 8430 where none is given; an IPv6
//                              address with a port is [ADDRESS]:PORT
//   /PATH                      unix:/PATH
//   unix:PATH, unix-abstract:NAME, vsock:CID:PORT, xds:///NAME   as they are
//   dns:HOST, dns:///HOST, ipv4:HOST,HOST, ipv6:[HOST],[HOST]    each host with
//                              or without a port
//
// The Python client has the same rule; tests/data/targets.txt has examples
// for both.
// Errors: ARGUMENT_INVALID, e.g. for a URL or several hosts without "ipv4:".
absl::StatusOr<std::string> ParseTarget(absl::string_view text);

}  // namespace quantd

#endif  // QUANTD_CLIENT_CPP_TARGET_H_
