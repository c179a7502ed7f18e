#include "server/guard/caller_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace quantd::server {
namespace {

constexpr char kUnix[] = "unix";

// Address of the peer of a connected socket.
std::string AddressOfSocket(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  char text[INET6_ADDRSTRLEN] = "";
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return "";
  }
  if (address.ss_family == AF_INET) {
    sockaddr_in ipv4;
    std::memcpy(&ipv4, &address, sizeof(ipv4));
    inet_ntop(AF_INET, &ipv4.sin_addr, text, sizeof(text));
    return absl::StrCat("ipv4:", text);
  }
  if (address.ss_family == AF_INET6) {
    sockaddr_in6 ipv6;
    std::memcpy(&ipv6, &address, sizeof(ipv6));
    inet_ntop(AF_INET6, &ipv6.sin6_addr, text, sizeof(text));
    return absl::StrCat("ipv6:", text);
  }
  return kUnix;
}

}  // namespace

std::string CallerAddress(absl::string_view peer) {
  // gRPC names a connection that it was given by its file descriptor.
  absl::string_view rest = peer;
  int socket = -1;
  if (absl::ConsumePrefix(&rest, "fd:") && absl::SimpleAtoi(rest, &socket)) {
    return AddressOfSocket(socket);
  }
  if (absl::StartsWith(peer, kUnix)) return kUnix;
  return std::string(peer.substr(0, peer.rfind(':')));
}

}  // namespace quantd::server
