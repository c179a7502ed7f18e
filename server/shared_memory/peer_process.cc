#include "server/shared_memory/peer_process.h"

#include <sys/socket.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"

namespace quantd::server {

absl::optional<PeerProcess> PeerOfSocket(int socket) {
  int domain = 0;
  socklen_t domain_size = sizeof(domain);
  ucred credentials{};
  socklen_t credentials_size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &domain_size) != 0 ||
      domain != AF_UNIX ||
      getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials,
                 &credentials_size) != 0) {
    return absl::nullopt;
  }
  return PeerProcess{credentials.pid, credentials.uid};
}

absl::optional<PeerProcess> PeerOfCall(absl::string_view peer) {
  // gRPC names a connection that it was given, and only such a one, by its file
  // descriptor, and keeps that open as long as a call of the connection lives.
  int socket = -1;
  if (!absl::ConsumePrefix(&peer, "fd:") || !absl::SimpleAtoi(peer, &socket)) {
    return absl::nullopt;
  }
  return PeerOfSocket(socket);
}

}  // namespace quantd::server
