#include "tests/support/cutting_proxy.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"

namespace quantd::testing {
namespace {

// How often a thread looks whether the proxy ends.
constexpr int kLookMs = 20;

void Check(bool holds, const char* what) {
  if (holds) return;
  std::perror(what);
  std::abort();
}

sockaddr_in Loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// False once `from` has ended or `to` takes no more.
bool PassOn(int from, int to, int64_t* bytes) {
  std::vector<char> buffer(64 << 10);
  const ssize_t got = recv(from, buffer.data(), buffer.size(), 0);
  if (got <= 0) return false;
  *bytes += got;
  for (ssize_t sent = 0; sent < got;) {
    const ssize_t more =
        send(to, buffer.data() + sent, got - sent, MSG_NOSIGNAL);
    if (more <= 0) return false;
    sent += more;
  }
  return true;
}

}  // namespace

CuttingProxy::CuttingProxy(const std::string& target, int cuts,
                           int64_t most_bytes, uint32_t seed)
    : target_port_(std::atoi(target.substr(target.rfind(':') + 1).c_str())),
      most_bytes_(most_bytes),
      cuts_left_(cuts),
      random_(seed) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  Check(listener_ >= 0, "socket");
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  Check(bind(listener_, any, size) == 0, "bind");
  Check(listen(listener_, 16) == 0, "listen");
  Check(getsockname(listener_, any, &size) == 0, "getsockname");
  address_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  acceptor_ = std::thread([this] { Accept(); });
}

CuttingProxy::~CuttingProxy() {
  is_over_ = true;
  acceptor_.join();
  for (std::thread& connection : connections_) connection.join();
  close(listener_);
}

void CuttingProxy::Accept() {
  while (!is_over_) {
    pollfd ready = {listener_, POLLIN, 0};
    if (poll(&ready, 1, kLookMs) <= 0) continue;
    const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) continue;
    int64_t cut_bytes = std::numeric_limits<int64_t>::max();
    if (cuts_left_ > 0) {
      cut_bytes =
          std::uniform_int_distribution<int64_t>(1, most_bytes_)(random_);
    }
    connections_.emplace_back(
        [this, client, cut_bytes] { Pass(client, cut_bytes); });
  }
}

void CuttingProxy::Pass(int client, int64_t cut_bytes) {
  const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = Loopback(target_port_);
  bool passes = connect(server, reinterpret_cast<const sockaddr*>(&address),
                        sizeof(address)) == 0;
  int64_t up = 0;
  int64_t down = 0;
  while (passes && !is_over_) {
    pollfd ready[] = {{client, POLLIN, 0}, {server, POLLIN, 0}};
    if (poll(ready, 2, kLookMs) <= 0) continue;
    if (ready[0].revents != 0) passes = PassOn(client, server, &up);
    if (passes && ready[1].revents != 0) {
      passes = PassOn(server, client, &down);
    }
    if (up >= cut_bytes) {
      --cuts_left_;
      break;
    }
  }
  close(client);
  close(server);
}

}  // namespace quantd::testing
