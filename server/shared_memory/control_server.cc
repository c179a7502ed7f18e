#include "server/shared_memory/control_server.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "quantd/v1/shared_memory.pb.h"
#include "server/wire/status.h"

namespace quantd::server {
namespace {

// Far more than a request needs.
constexpr size_t kMaxControlRequestBytes = 4096;

// Without waiting; `file` is sent along unless it is -1. False when it can't be
// sent.
bool Send(int socket, const v1::RegionReply& reply, int file) {
  std::string bytes = reply.SerializeAsString();
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  if (file >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &file, sizeof(int));
  }
  return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(bytes.size());
}

v1::RegionReply ErrorReply(const absl::Status& status) {
  v1::RegionReply reply;
  *reply.mutable_error() = ToTensorError(status);
  return reply;
}

}  // namespace

std::string ControlPath(const std::string& path) {
  return absl::StrCat(path, ".memory");
}

absl::StatusOr<std::unique_ptr<ControlServer>> ControlServer::Start(
    const std::vector<std::string>& paths, const Limits& limits,
    RegionRegistry* registry, MemoryBudget* budget, Metrics* metrics) {
  std::unique_ptr<ControlServer> server(
      new ControlServer(limits, registry, budget, metrics));
  for (const std::string& path : paths) {
    absl::StatusOr<std::unique_ptr<ListeningSocket>> socket =
        ListeningSocket::Unix(path, SOCK_SEQPACKET);
    if (!socket.ok()) return socket.status();
    server->sockets_.push_back(*std::move(socket));
  }
  if (server->stop_.fd() < 0)
    return core::ListenError("shared memory", "no descriptor is left");
  server->thread_ = std::thread([s = server.get()] { s->Run(); });
  return server;
}

ControlServer::~ControlServer() {
  stop_.Send();
  if (thread_.joinable()) thread_.join();
  for (Connection& connection : connections_) Close(connection);
}

void ControlServer::Run() {
  bool pauses = false;
  std::vector<pollfd> polled;
  for (;;) {
    polled.clear();
    polled.push_back({stop_.fd(), POLLIN, 0});
    for (const Connection& connection : connections_) {
      polled.push_back({connection.socket.get(), POLLIN | POLLRDHUP, 0});
    }
    for (const std::unique_ptr<ListeningSocket>& socket : sockets_) {
      polled.push_back({pauses ? -1 : socket->fd(), POLLIN, 0});
    }
    if (poll(polled.data(), polled.size(), pauses ? kExhaustedPauseMs : -1) <
        0) {
      continue;
    }
    if (polled[0].revents != 0) return;
    // Serves the connections that were polled; new ones come behind them.
    size_t kept = 0;
    for (size_t i = 0; i < connections_.size(); ++i) {
      const int events = polled[1 + i].revents;
      if (events == 0 || Serve(connections_[i], events)) {
        if (kept != i) connections_[kept] = std::move(connections_[i]);
        ++kept;
      } else {
        Close(connections_[i]);
      }
    }
    connections_.resize(kept);
    pauses = false;
    for (const std::unique_ptr<ListeningSocket>& socket : sockets_) {
      FileDescriptor connection;
      PeerAddress peer;
      const ListeningSocket::Outcome outcome =
          socket->Accept(&connection, &peer);
      if (outcome == ListeningSocket::Outcome::kExhausted) pauses = true;
      if (outcome == ListeningSocket::Outcome::kAccepted) {
        Accept(std::move(connection));
      }
    }
  }
}

void ControlServer::Accept(FileDescriptor socket) {
  const absl::optional<PeerProcess> peer = PeerOfSocket(socket.get());
  if (!peer.has_value()) return;
  if (static_cast<int64_t>(connections_.size()) >= limits_.shared_connections) {
    const absl::Status status = core::RegionLimitError(
        absl::StrCat(limits_.shared_connections,
                     " connections for shared memory are open, which is the "
                     "limit"));
    metrics_->LimitRejected(core::ErrorReason(status));
    Send(socket.get(), ErrorReply(status), -1);
    return;
  }
  connections_.push_back({std::move(socket), *peer, {}});
}

bool ControlServer::Serve(Connection& connection, int events) {
  std::array<char, kMaxControlRequestBytes> buffer;
  const ssize_t size = recv(connection.socket.get(), buffer.data(),
                            buffer.size(), MSG_DONTWAIT | MSG_TRUNC);
  if (size < 0) return errno == EAGAIN || errno == EINTR;
  // Otherwise a packet of no bytes, which is a request.
  constexpr int kHungUp = POLLHUP | POLLRDHUP | POLLERR;
  if (size == 0 && (events & kHungUp) != 0) return false;
  v1::RegionRequest request;
  absl::StatusOr<Region::Created> created;
  if (size > static_cast<ssize_t>(buffer.size()) ||
      !request.ParseFromArray(buffer.data(), static_cast<int>(size))) {
    created = core::MessageMalformedError(
        "the packet is not a message; expected a RegionRequest");
  } else if (static_cast<int64_t>(connection.regions.size()) >=
             limits_.shared_regions) {
    created = core::RegionLimitError(
        absl::StrCat("this connection has ", limits_.shared_regions,
                     " regions, which is the limit"));
  } else {
    created = Region::Create(request.size_bytes(), budget_, metrics_);
  }
  if (!created.ok()) {
    metrics_->LimitRejected(core::ErrorReason(created.status()));
    return Send(connection.socket.get(), ErrorReply(created.status()), -1);
  }
  registry_->Add(created->region, connection.peer);
  connection.regions.push_back(created->region);
  v1::RegionReply reply;
  reply.set_region_id(created->region->id());
  reply.set_size_bytes(created->region->bytes().size());
  return Send(connection.socket.get(), reply, created->file.get());
}

void ControlServer::Close(Connection& connection) {
  for (const std::shared_ptr<const Region>& region : connection.regions) {
    registry_->Remove(*region);
  }
  connection = Connection();
}

}  // namespace quantd::server
