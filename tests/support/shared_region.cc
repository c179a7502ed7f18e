#include "tests/support/shared_region.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/types/optional.h"

namespace quantd::testing {

SharedRegion::SharedRegion(std::string id, uint64_t size_bytes, int file)
    : id_(std::move(id)), file_(file) {
  void* const address = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE,
                             MAP_SHARED | MAP_POPULATE, file, 0);
  if (address == MAP_FAILED) std::abort();
  bytes_ = {static_cast<uint8_t*>(address), size_bytes};
}

SharedRegion::~SharedRegion() {
  munmap(bytes_.data(), bytes_.size());
  close(file_);
}

v1::SharedSpan SharedRegion::Span(uint64_t offset_bytes,
                                  uint64_t size_bytes) const {
  v1::SharedSpan span;
  span.set_region_id(id_);
  span.set_offset_bytes(offset_bytes);
  span.set_size_bytes(size_bytes);
  return span;
}

ControlConnection::ControlConnection(const std::string& address)
    : socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  const std::string path = address.substr(std::strlen("unix:")) + ".memory";
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  path.copy(name.sun_path, sizeof(name.sun_path) - 1);
  if (connect(socket_, reinterpret_cast<const sockaddr*>(&name),
              sizeof(name)) != 0) {
    std::perror(path.c_str());
    std::abort();
  }
}

ControlConnection::~ControlConnection() { Close(); }

bool ControlConnection::Send(const std::string& packet) {
  return send(socket_, packet.data(), packet.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(packet.size());
}

absl::optional<v1::RegionReply> ControlConnection::Receive(int* file) {
  *file = -1;
  std::array<char, 4096> bytes;
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t size = recvmsg(socket_, &message, MSG_CMSG_CLOEXEC);
  if (size <= 0) return absl::nullopt;
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr) {
    std::memcpy(file, CMSG_DATA(header), sizeof(*file));
  }
  v1::RegionReply reply;
  if (!reply.ParseFromArray(bytes.data(), static_cast<int>(size))) {
    return absl::nullopt;
  }
  return reply;
}

std::unique_ptr<SharedRegion> ControlConnection::Allocate(
    uint64_t size_bytes, v1::RegionReply* reply) {
  v1::RegionRequest request;
  request.set_size_bytes(size_bytes);
  // A server that turns the connection away may have closed it by now.
  Send(request.SerializeAsString());
  int file = -1;
  absl::optional<v1::RegionReply> received = Receive(&file);
  if (!received.has_value()) return nullptr;
  if (reply != nullptr) *reply = *received;
  if (received->has_error()) return nullptr;
  return std::make_unique<SharedRegion>(received->region_id(),
                                        received->size_bytes(), file);
}

void ControlConnection::Close() {
  if (socket_ >= 0) close(socket_);
  socket_ = -1;
}

}  // namespace quantd::testing
