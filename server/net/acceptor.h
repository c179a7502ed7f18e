// Taking connections.

#ifndef QUANTD_SERVER_NET_ACCEPTOR_H_
#define QUANTD_SERVER_NET_ACCEPTOR_H_

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "server/net/file_descriptor.h"
#include "server/net/listening_socket.h"
#include "server/net/stop_signal.h"

namespace quantd::server {

// Takes the connections of some sockets on a thread of its own. While there is
// no room for another in the process or the system, they wait; a tenth of a
// second after there is again, they are taken. Thread-safe.
class Acceptor {
 public:
  struct Port {
    std::unique_ptr<ListeningSocket> socket;
    // Called with each connection, for one at a time of all ports.
    std::function<void(FileDescriptor connection, const PeerAddress& peer)>
        on_connection;
  };

  // `on_exhausted` is called while connections wait so.
  // Errors: LISTEN.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Start(
      std::vector<Port> ports, std::function<void()> on_exhausted);
  // Closes the sockets. No call is under way any more.
  ~Acceptor();

 private:
  Acceptor(std::vector<Port> ports, std::function<void()> on_exhausted);
  void Run();
  // All that have come, but not without end. False when there is no room.
  static bool AcceptFrom(const Port& port);

  const std::vector<Port> ports_;
  const std::function<void()> on_exhausted_;
  StopSignal stop_;
  std::thread thread_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_NET_ACCEPTOR_H_
