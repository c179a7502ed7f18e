// Who is at the other end of a unix socket.

#ifndef QUANTD_SERVER_SHARED_MEMORY_PEER_PROCESS_H_
#define QUANTD_SERVER_SHARED_MEMORY_PEER_PROCESS_H_

#include <sys/types.h>

#include "absl/strings/string_view.h"
#include "absl/types/optional.h"

namespace quantd::server {

// A process as the kernel knew it when it connected (SO_PEERCRED). Processes of
// other pid namespaces all have pid 0: only their users distinguish them.
struct PeerProcess {
  pid_t pid = 0;
  uid_t uid = 0;

  friend bool operator==(const PeerProcess& a, const PeerProcess& b) {
    return a.pid == b.pid && a.uid == b.uid;
  }
};

// None unless `socket` is a connected unix socket.
absl::optional<PeerProcess> PeerOfSocket(int socket);

// Process that makes a running call, by what grpc::ServerContext::peer() says
// of the call; none unless its connection came by such a socket of a server
// that shares memory.
absl::optional<PeerProcess> PeerOfCall(absl::string_view peer);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_SHARED_MEMORY_PEER_PROCESS_H_
