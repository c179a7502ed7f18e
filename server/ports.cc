#include "server/ports.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/server_posix.h"
#include "server/logging.h"
#include "server/net/dial.h"
#include "server/tls_credentials.h"

namespace quantd::server {
namespace {

// How often it is told that connections are refused, or wait.
constexpr absl::Duration kLogInterval = absl::Minutes(1);
// Share of the connections that is left to unix sockets, one in this many: for
// who looks after the server when strangers have taken all others.
constexpr int64_t kUnixShare = 16;

// gRPC does the same to those that it takes itself: what a peer does not
// acknowledge for as long as a ping may take ends the connection.
void TuneTcp(int fd) {
  constexpr unsigned kUserTimeoutMs = 20'000;
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUserTimeoutMs,
             sizeof(kUserTimeoutMs));
}

}  // namespace

bool Ports::Throttle::Allows() {
  const absl::Duration now = core::SteadyNow();
  absl::MutexLock lock(&mutex_);
  if (now - last_ < kLogInterval) return false;
  last_ = now;
  return true;
}

absl::StatusOr<std::unique_ptr<Ports>> Ports::Bind(PortOptions options,
                                                   const TlsFiles* tls,
                                                   Metrics* metrics) {
  std::unique_ptr<Ports> ports(new Ports(std::move(options), tls, metrics));
  if (absl::Status s = ports->Listen(); !s.ok()) return s;
  return ports;
}

Ports::Ports(PortOptions options, const TlsFiles* tls, Metrics* metrics)
    : options_(std::move(options)), tls_(tls), metrics_(metrics) {}

absl::Status Ports::Listen() {
  bool has_unix = false;
  for (const std::string& address : options_.listen) {
    Port port;
    absl::string_view path = address;
    if (absl::ConsumePrefix(&path, kUnixScheme)) {
      has_unix = true;
      port.is_unix = true;
      port.address = address;
      absl::StatusOr<std::unique_ptr<ListeningSocket>> socket =
          ListeningSocket::Unix(std::string(path), SOCK_STREAM);
      if (!socket.ok()) return socket.status();
      port.sockets.push_back(*std::move(socket));
    } else {
      absl::StatusOr<std::vector<std::unique_ptr<ListeningSocket>>> sockets =
          ListeningSocket::Tcp(address);
      if (!sockets.ok()) return sockets.status();
      port.is_secure = tls_ != nullptr;
      port.sockets = *std::move(sockets);
      port.address = absl::StrCat(address.substr(0, address.rfind(':')), ":",
                                  port.sockets[0]->port());
    }
    for (const std::unique_ptr<ListeningSocket>& socket : port.sockets) {
      port.peers.push_back(socket->address());
    }
    addresses_.push_back(port.address);
    ports_.push_back(std::move(port));
  }
  connections_ = std::make_unique<ConnectionTable>(
      options_.connections, options_.address_connections,
      has_unix ? options_.connections / kUnixShare : 0);
  return absl::OkStatus();
}

void Ports::AddTo(grpc::ServerBuilder* builder) {
  for (Port& port : ports_) {
    if (port.is_unix && options_.shared_memory) continue;
    port.entrance = builder->experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        port.is_secure ? MakeTlsCredentials(tls_)
                       : grpc::InsecureServerCredentials());
  }
}

absl::Status Ports::Open(grpc::Server* server) {
  std::vector<Acceptor::Port> accepted;
  for (Port& port : ports_) {
    for (std::unique_ptr<ListeningSocket>& socket : port.sockets) {
      accepted.push_back(
          {std::move(socket), [this, &port, server](FileDescriptor connection,
                                                    const PeerAddress& peer) {
             Take(port, server, std::move(connection), peer);
           }});
    }
    port.sockets.clear();
  }
  absl::StatusOr<std::unique_ptr<Acceptor>> acceptor =
      Acceptor::Start(std::move(accepted), [this] {
        if (!exhausted_log_.Allows()) return;
        Log(LogLevel::kWarning,
            "out of descriptors: connections wait until others end");
      });
  if (!acceptor.ok()) return acceptor.status();
  acceptor_ = *std::move(acceptor);
  metrics_->Connections(0, options_.connections);
  return absl::OkStatus();
}

void Ports::Take(const Port& port, grpc::Server* server,
                 FileDescriptor connection, const PeerAddress& peer) {
  const ConnectionTable::Outcome outcome =
      connections_->Add(connection.get(), peer);
  if (outcome != ConnectionTable::Outcome::kAdded) {
    refused_.fetch_add(1);
    const bool is_full = outcome == ConnectionTable::Outcome::kFull;
    metrics_->LimitRejected(is_full ? "CONNECTION_LIMIT" : "ADDRESS_LIMIT");
    if (refused_log_.Allows()) {
      Log(LogLevel::kWarning,
          is_full ? "refusing connections: there are as many as may be"
                  : "refusing connections of an address that has its share",
          {{"limit",
            is_full ? options_.connections : options_.address_connections}});
    }
    return;
  }
  if (!port.is_unix) TuneTcp(connection.get());
  if (port.entrance == nullptr) {
    // Such calls name their connection, and through it the process.
    grpc::AddInsecureChannelFromFd(server, connection.Release());
    return;
  }
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters given;
  given.fd = connection.Release();
  port.entrance->HandleNewConnection(&given);
}

absl::Status Ports::Check(absl::Duration timeout, bool* refused) {
  *refused = false;
  metrics_->Connections(connections_->CountOpen(), options_.connections);
  for (const Port& port : ports_) {
    for (const PeerAddress& peer : port.peers) {
      const int64_t refused_before = refused_.load();
      const absl::Status status = Dial(peer, port.is_secure, timeout);
      if (status.ok()) continue;
      *refused = refused_.load() != refused_before;
      if (*refused) {
        return absl::UnavailableError(absl::StrCat(
            "UNREACHABLE: ", port.address,
            " takes no more connections: ", connections_->CountOpen(),
            " are open, as many as --connections or --address-connections"
            " allows"));
      }
      return absl::UnavailableError(
          absl::StrCat("UNREACHABLE: nobody answers on ", port.address, ": ",
                       status.message()));
    }
  }
  return absl::OkStatus();
}

void Ports::Close() { acceptor_.reset(); }

}  // namespace quantd::server
