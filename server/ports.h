// The ports at which gRPC's connections come in.

#ifndef QUANTD_SERVER_PORTS_H_
#define QUANTD_SERVER_PORTS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "server/guard/tls_files.h"
#include "server/metrics/metrics.h"
#include "server/net/acceptor.h"
#include "server/net/connection_table.h"
#include "server/net/listening_socket.h"

namespace quantd::server {

// An address that begins so is the path of a unix socket.
constexpr absl::string_view kUnixScheme = "unix:";

struct PortOptions {
  // "host:port" or "unix:path"; port 0 takes a free one.
  std::vector<std::string> listen;
  // Clients on unix sockets may share memory: calls tell who makes them.
  bool shared_memory = false;
  // Connections at once, of all and of one address.
  int64_t connections = 0;
  int64_t address_connections = 0;
};

// Takes connections in gRPC's place and hands them over: gRPC 1.51 has no limit
// on them, and never takes another once the process was out of descriptors.
// Called in the order in which the methods stand here. Thread-safe.
class Ports {
 public:
  // Listens, but takes nothing yet. `tls`, for host:port, may be null; what is
  // not must outlive the server of gRPC, and `metrics` this.
  // Errors: LISTEN.
  static absl::StatusOr<std::unique_ptr<Ports>> Bind(PortOptions options,
                                                     const TlsFiles* tls,
                                                     Metrics* metrics);

  // host:port or unix:path that is listened on, one per `listen`.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // The server that is built then is the one to pass to Open.
  void AddTo(grpc::ServerBuilder* builder);
  // Takes connections from now on. `server` must outlive this or Close.
  // Errors: LISTEN.
  absl::Status Open(grpc::Server* server);

  // Calls every port, and tells the metrics how many connections there are.
  // Takes up to `timeout` for each.
  // Errors: UNAVAILABLE, with the port and what hindered. `*refused` when it
  // was no more than a limit on connections.
  absl::Status Check(absl::Duration timeout, bool* refused);

  // Takes no connections any more.
  void Close();

 private:
  // One of options_.listen.
  struct Port {
    std::string address;
    bool is_unix = false;
    bool is_secure = false;
    std::vector<std::unique_ptr<ListeningSocket>> sockets;
    // To call its sockets by.
    std::vector<PeerAddress> peers;
    // Null for those that may share memory.
    std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> entrance;
  };
  // Lets one line through now and then.
  class Throttle {
   public:
    bool Allows() ABSL_LOCKS_EXCLUDED(mutex_);

   private:
    absl::Mutex mutex_;
    absl::Duration last_ ABSL_GUARDED_BY(mutex_) = -absl::InfiniteDuration();
  };

  Ports(PortOptions options, const TlsFiles* tls, Metrics* metrics);
  absl::Status Listen();
  void Take(const Port& port, grpc::Server* server, FileDescriptor connection,
            const PeerAddress& peer);

  const PortOptions options_;
  const TlsFiles* const tls_;
  Metrics* const metrics_;
  std::vector<std::string> addresses_;
  std::vector<Port> ports_;
  std::unique_ptr<ConnectionTable> connections_;
  std::atomic<int64_t> refused_{0};
  Throttle refused_log_;
  Throttle exhausted_log_;
  std::unique_ptr<Acceptor> acceptor_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_PORTS_H_
