// Sockets that connections come to.

#ifndef QUANTD_SERVER_NET_LISTENING_SOCKET_H_
#define QUANTD_SERVER_NET_LISTENING_SOCKET_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/net/file_descriptor.h"

namespace quantd::server {

// Who is at the other end of a connection, as accept() tells it.
struct PeerAddress {
  sockaddr_storage address{};
  socklen_t size = 0;
};

// Thread-safe.
class ListeningSocket {
 public:
  // Listens at `path`; `type` is SOCK_STREAM or SOCK_SEQPACKET. A socket that
  // nobody serves any more is replaced. Its mode is what the umask leaves.
  // Errors: LISTEN, also when somebody serves there.
  static absl::StatusOr<std::unique_ptr<ListeningSocket>> Unix(
      const std::string& path, int type);
  // Listens at host:port, with one socket for each address that the host stands
  // for and this machine has; all take the same port, also one taken for 0.
  // 0.0.0.0 and [::] stand for all addresses of IPv4 and IPv6.
  // Errors: LISTEN.
  static absl::StatusOr<std::vector<std::unique_ptr<ListeningSocket>>> Tcp(
      const std::string& address);
  // Removes a unix socket from where it is, unless another has replaced it.
  ~ListeningSocket();

  ListeningSocket(const ListeningSocket&) = delete;
  ListeningSocket& operator=(const ListeningSocket&) = delete;

  int fd() const { return socket_.get(); }
  // Address at which a connection of this machine gets here.
  PeerAddress address() const;
  // Port of a TCP socket.
  int port() const;

  enum class Outcome { kAccepted, kNothing, kExhausted };
  // Takes a connection without waiting for one; it does not block and is not
  // passed on to other programs. kExhausted: there is one, but the process or
  // the system has no room for it, or the socket is broken. poll() then returns
  // at once, so wait a little.
  Outcome Accept(FileDescriptor* connection, PeerAddress* peer) const;

 private:
  ListeningSocket(FileDescriptor socket, std::string path);

  const FileDescriptor socket_;
  // Empty for TCP.
  const std::string path_;
  // Device and inode of the file, to know it again.
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

// How long to leave a socket alone whose connections nobody has room for.
constexpr int kExhaustedPauseMs = 100;

}  // namespace quantd::server

#endif  // QUANTD_SERVER_NET_LISTENING_SOCKET_H_
