// The limit of the transport: the traffic of a stream of tensors over one TCP
// connection on loopback, without any protocol.
//
//   tcp_echo serve UP_BYTES DOWN_BYTES
//   tcp_echo drive PORT UP_BYTES DOWN_BYTES SECONDS
//
// A message up is answered by one down. `serve` prints its port and runs until
// it is ended; `drive` prints what went through, counted in the direction of
// the larger message.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/bench/peers/drive.h"

namespace quantd::bench {
namespace {

// As much as a tensor of the drivers of the other peers.
constexpr size_t kTensorBytes = size_t{16} << 20;

sockaddr_in Loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

bool SendAll(int socket, const char* data, size_t size) {
  while (size > 0) {
    const ssize_t sent = send(socket, data, size, 0);
    if (sent <= 0) return false;
    data += sent;
    size -= static_cast<size_t>(sent);
  }
  return true;
}

bool ReceiveAll(int socket, char* data, size_t size) {
  while (size > 0) {
    const ssize_t got = recv(socket, data, size, 0);
    if (got <= 0) return false;
    data += got;
    size -= static_cast<size_t>(got);
  }
  return true;
}

void SetNoDelay(int socket) {
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

int Serve(size_t up_bytes, size_t down_bytes) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener, 1) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) !=
          0) {
    std::perror("tcp_echo");
    return 1;
  }
  std::printf("%d\n", ntohs(address.sin_port));
  std::fflush(stdout);
  std::vector<char> up(up_bytes);
  const std::vector<char> down(down_bytes);
  for (;;) {
    const int connection = accept(listener, nullptr, nullptr);
    if (connection < 0) return 1;
    SetNoDelay(connection);
    while (ReceiveAll(connection, up.data(), up.size()) &&
           SendAll(connection, down.data(), down.size())) {
    }
    close(connection);
  }
}

int Drive(int port, size_t up_bytes, size_t down_bytes, double seconds) {
  const int connection = socket(AF_INET, SOCK_STREAM, 0);
  const sockaddr_in address = Loopback(port);
  if (connect(connection, reinterpret_cast<const sockaddr*>(&address),
              sizeof(address)) != 0) {
    std::perror("tcp_echo");
    return 1;
  }
  SetNoDelay(connection);
  const Window window(seconds);
  std::thread sender([&] {
    const std::vector<char> tensor(std::max(kTensorBytes, up_bytes), 1);
    size_t offset = 0;
    while (!window.Over(Clock::now()) &&
           SendAll(connection, tensor.data() + offset, up_bytes)) {
      offset += up_bytes;
      if (offset + up_bytes > tensor.size()) offset = 0;
    }
    shutdown(connection, SHUT_WR);
  });
  std::vector<char> output(std::max(kTensorBytes, down_bytes), 1);
  size_t offset = 0;
  int64_t count = 0;
  while (ReceiveAll(connection, output.data() + offset, down_bytes)) {
    if (window.Counts(Clock::now())) ++count;
    offset += down_bytes;
    if (offset + down_bytes > output.size()) offset = 0;
  }
  sender.join();
  close(connection);
  PrintThroughput(count * static_cast<int64_t>(std::max(up_bytes, down_bytes)),
                  window);
  return 0;
}

int Main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  if (argc == 4 && std::strcmp(argv[1], "serve") == 0) {
    return Serve(std::strtoul(argv[2], nullptr, 10),
                 std::strtoul(argv[3], nullptr, 10));
  }
  if (argc == 6 && std::strcmp(argv[1], "drive") == 0) {
    return Drive(std::atoi(argv[2]), std::strtoul(argv[3], nullptr, 10),
                 std::strtoul(argv[4], nullptr, 10), std::atof(argv[5]));
  }
  std::fprintf(stderr,
               "usage: tcp_echo serve UP_BYTES DOWN_BYTES\n"
               "       tcp_echo drive PORT UP_BYTES DOWN_BYTES SECONDS\n");
  return 2;
}

}  // namespace
}  // namespace quantd::bench

int main(int argc, char** argv) { return quantd::bench::Main(argc, argv); }
