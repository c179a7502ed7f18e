#include "server/net/listening_socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

constexpr absl::string_view kInUse = "address already in use";

std::string WhyNot(int error_number) {
  return error_number == EADDRINUSE ? std::string(kInUse)
                                    : std::strerror(error_number);
}

// Somebody takes connections at a unix socket.
bool IsServed(const sockaddr_un& address, int type) {
  const FileDescriptor probe(
      socket(AF_UNIX, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  // Whatever else hinders, there is somebody.
  return connect(probe.get(), reinterpret_cast<const sockaddr*>(&address),
                 sizeof(address)) == 0 ||
         (errno != ECONNREFUSED && errno != ENOENT);
}

PeerAddress ToPeerAddress(const sockaddr* address, socklen_t size) {
  PeerAddress copy;
  std::memcpy(&copy.address, address, size);
  copy.size = size;
  return copy;
}

// All addresses of IPv6, and of IPv4 too.
PeerAddress Everywhere() {
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  any.sin6_addr = in6addr_any;
  return ToPeerAddress(reinterpret_cast<const sockaddr*>(&any), sizeof(any));
}

bool IsWildcard(const PeerAddress& peer) {
  if (peer.address.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(peer.address).sin_addr.s_addr ==
           htonl(INADDR_ANY);
  }
  return IN6_IS_ADDR_UNSPECIFIED(
      &reinterpret_cast<const sockaddr_in6&>(peer.address).sin6_addr);
}

void SetPort(PeerAddress* peer, int port) {
  const uint16_t network_port = htons(static_cast<uint16_t>(port));
  if (peer->address.ss_family == AF_INET) {
    reinterpret_cast<sockaddr_in&>(peer->address).sin_port = network_port;
  } else {
    reinterpret_cast<sockaddr_in6&>(peer->address).sin6_port = network_port;
  }
}

// The host and the port of host:port or [host]:port.
bool Split(absl::string_view address, std::string* host, int* port) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), port) || *port < 0 ||
      *port > 65535) {
    return false;
  }
  absl::string_view name = address.substr(0, colon);
  if (absl::ConsumePrefix(&name, "[") && !absl::ConsumeSuffix(&name, "]")) {
    return false;
  }
  *host = std::string(name);
  return true;
}

std::vector<PeerAddress> Resolve(const std::string& host) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found,
                                                             &freeaddrinfo);
  std::vector<PeerAddress> addresses;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    if (one->ai_family != AF_INET && one->ai_family != AF_INET6) continue;
    addresses.push_back(ToPeerAddress(one->ai_addr, one->ai_addrlen));
  }
  return addresses;
}

// None, and errno, when that does not work.
FileDescriptor BindTcp(const PeerAddress& local) {
  constexpr int kOn = 1;
  FileDescriptor listening(socket(
      local.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int fd = listening.get();
  const int v6_only = IsWildcard(local) ? 0 : 1;
  if (fd < 0 ||
      setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &kOn, sizeof(kOn)) != 0 ||
      // Connections have it from here.
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &kOn, sizeof(kOn)) != 0 ||
      (local.address.ss_family == AF_INET6 &&
       setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &v6_only, sizeof(v6_only)) !=
           0) ||
      bind(fd, reinterpret_cast<const sockaddr*>(&local.address), local.size) !=
          0 ||
      listen(fd, SOMAXCONN) != 0) {
    const int why = errno;
    listening = FileDescriptor();
    errno = why;
  }
  return listening;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ListeningSocket>> ListeningSocket::Unix(
    const std::string& path, int type) {
  const auto error = [&path](absl::string_view why) {
    return core::ListenError(absl::StrCat("unix:", path), why);
  };
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return error(absl::StrCat("expected a path of 1 to ",
                              sizeof(address.sun_path) - 1, " bytes"));
  }
  path.copy(address.sun_path, path.size());
  // If two servers start at once, one looks when the other serves. Without the
  // right to read the folder there is no such order.
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "."
                             : slash == 0               ? "/"
                                                        : path.substr(0, slash);
  const FileDescriptor folder_lock(
      open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder_lock.get() >= 0) flock(folder_lock.get(), LOCK_EX);
  struct stat file {};
  if (lstat(path.c_str(), &file) == 0 && S_ISSOCK(file.st_mode)) {
    if (IsServed(address, type)) return error(kInUse);
    unlink(path.c_str());
  }
  FileDescriptor listening(
      socket(AF_UNIX, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (listening.get() < 0 ||
      bind(listening.get(), reinterpret_cast<const sockaddr*>(&address),
           sizeof(address)) != 0) {
    return error(WhyNot(errno));
  }
  std::unique_ptr<ListeningSocket> bound(
      new ListeningSocket(std::move(listening), path));
  if (listen(bound->fd(), SOMAXCONN) != 0) return error(WhyNot(errno));
  return bound;
}

absl::StatusOr<std::vector<std::unique_ptr<ListeningSocket>>>
ListeningSocket::Tcp(const std::string& address) {
  std::string host;
  int port = 0;
  if (!Split(address, &host, &port)) {
    return core::ListenError(address, "no host:port");
  }
  std::vector<PeerAddress> locals = Resolve(host);
  if (!locals.empty() && IsWildcard(locals[0])) {
    // If there is no IPv6, the address that was asked for remains.
    locals.insert(locals.begin(), Everywhere());
  }
  std::vector<std::unique_ptr<ListeningSocket>> sockets;
  const bool any_port = port == 0;
  std::string why = "the host has no address";
  for (PeerAddress& local : locals) {
    SetPort(&local, port);
    FileDescriptor socket = BindTcp(local);
    if (socket.get() < 0) {
      // Another server's, or an address that this machine does not have.
      const int error_number = errno;
      why = WhyNot(error_number);
      if (error_number == EADDRINUSE && !any_port) {
        return core::ListenError(address, why);
      }
      continue;
    }
    sockets.push_back(std::unique_ptr<ListeningSocket>(
        new ListeningSocket(std::move(socket), "")));
    port = sockets[0]->port();
    if (IsWildcard(local)) break;
  }
  if (sockets.empty()) return core::ListenError(address, why);
  return sockets;
}

ListeningSocket::ListeningSocket(FileDescriptor socket, std::string path)
    : socket_(std::move(socket)), path_(std::move(path)) {
  struct stat file {};
  if (!path_.empty() && lstat(path_.c_str(), &file) == 0) {
    device_ = file.st_dev;
    inode_ = file.st_ino;
  }
}

ListeningSocket::~ListeningSocket() {
  struct stat file {};
  if (!path_.empty() && lstat(path_.c_str(), &file) == 0 &&
      file.st_dev == device_ && file.st_ino == inode_) {
    unlink(path_.c_str());
  }
}

PeerAddress ListeningSocket::address() const {
  PeerAddress local;
  local.size = sizeof(local.address);
  if (getsockname(fd(), reinterpret_cast<sockaddr*>(&local.address),
                  &local.size) != 0) {
    return PeerAddress();
  }
  if (path_.empty() && IsWildcard(local)) {
    // Both take connections of IPv4, which every machine has.
    const int bound_port = port();
    sockaddr_in loopback{};
    loopback.sin_family = AF_INET;
    loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    local = ToPeerAddress(reinterpret_cast<const sockaddr*>(&loopback),
                          sizeof(loopback));
    SetPort(&local, bound_port);
  }
  return local;
}

int ListeningSocket::port() const {
  sockaddr_storage local{};
  socklen_t size = sizeof(local);
  if (getsockname(fd(), reinterpret_cast<sockaddr*>(&local), &size) != 0) {
    return 0;
  }
  return ntohs(local.ss_family == AF_INET
                   ? reinterpret_cast<const sockaddr_in&>(local).sin_port
                   : reinterpret_cast<const sockaddr_in6&>(local).sin6_port);
}

ListeningSocket::Outcome ListeningSocket::Accept(FileDescriptor* connection,
                                                 PeerAddress* peer) const {
  peer->size = sizeof(peer->address);
  *connection =
      FileDescriptor(accept4(fd(), reinterpret_cast<sockaddr*>(&peer->address),
                             &peer->size, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (connection->get() >= 0) return Outcome::kAccepted;
  switch (errno) {
    case EAGAIN:
    // EINTR, ECONNABORTED and EPERM are of the one connection alone.
    case EINTR:
    case ECONNABORTED:
    case EPERM:
      return Outcome::kNothing;
    default:
      return Outcome::kExhausted;
  }
}

}  // namespace quantd::server
