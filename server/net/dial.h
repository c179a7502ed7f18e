// Calling one's own port, as callers do.

#ifndef QUANTD_SERVER_NET_DIAL_H_
#define QUANTD_SERVER_NET_DIAL_H_

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/net/listening_socket.h"

namespace quantd::server {

// Checks that gRPC answers the first bytes of a connection to `address`: those
// of HTTP/2, or with `secure` those of TLS.
// Errors: UNAVAILABLE, with what hindered, in words.
absl::Status Dial(const PeerAddress& address, bool secure,
                  absl::Duration timeout);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_NET_DIAL_H_
