#include "client/cpp/shared_buffers.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/client_options.h"
#include "client/cpp/errors.h"
#include "client/cpp/shared_memory.h"

namespace quantd::internal {
namespace {

constexpr uint64_t kAlignmentBytes = 8;
constexpr size_t kMaxReplyBytes = 4096;

// Closed with the object.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  int get() const { return fd_; }
  void Set(int fd) { fd_ = fd; }
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

absl::Status SystemError(absl::string_view target, absl::string_view what) {
  return SharedMemoryUnavailableError(
      target, absl::StrCat(what, ": ", std::strerror(errno)));
}

// Connects to the control socket of `options.target`.
absl::Status Connect(const ClientOptions& options, int socket) {
  absl::string_view path = options.target;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (!absl::ConsumePrefix(&path, "unix:")) {
    return SharedMemoryUnavailableError(options.target,
                                        "expected a unix socket");
  }
  absl::ConsumePrefix(&path, "//");
  const std::string control = absl::StrCat(path, ".memory");
  if (control.size() >= sizeof(address.sun_path)) {
    return SharedMemoryUnavailableError(options.target,
                                        "the socket's path is too long");
  }
  control.copy(address.sun_path, control.size());
  timeval timeout = absl::ToTimeval(options.timeout);
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  if (connect(socket, reinterpret_cast<const sockaddr*>(&address),
              sizeof(address)) != 0) {
    return SystemError(options.target, control);
  }
  return absl::OkStatus();
}

// Reads a reply and the file that came with it, if any.
absl::StatusOr<v1::RegionReply> ReadReply(const ClientOptions& options,
                                          int socket, FileDescriptor* file) {
  std::array<char, kMaxReplyBytes> bytes;
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t size = 0;
  do {
    size = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (size < 0 && errno == EINTR);
  if (size < 0 && errno == EAGAIN) {
    return TimeoutError(options.target, options.timeout);
  }
  if (size < 0) return SystemError(options.target, "recvmsg");
  if (size == 0) {
    return ServerUnreachableError(options.target,
                                  "it closed the connection for shared memory");
  }
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(header), sizeof(received));
    file->Set(received);
  }
  v1::RegionReply reply;
  if ((message.msg_flags & MSG_TRUNC) != 0 ||
      !reply.ParseFromArray(bytes.data(), static_cast<int>(size))) {
    return ResponseMalformedError("the packet is not a RegionReply");
  }
  return reply;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedBuffer>> SharedBuffers::Allocate(
    const ClientOptions& options, uint64_t size_bytes) {
  if (!options.shared_memory) {
    return ArgumentInvalidError("expected ClientOptions::shared_memory");
  }
  if (size_bytes == 0) {
    return ArgumentInvalidError("expected at least one byte of shared memory");
  }
  FileDescriptor connection(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (connection.get() < 0) return SystemError(options.target, "socket");
  const absl::Status connected = Connect(options, connection.get());
  if (!connected.ok()) return connected;
  v1::RegionRequest request;
  request.set_size_bytes(size_bytes);
  const std::string bytes = request.SerializeAsString();
  // A server that turned the connection away has said why before it closed it.
  if (send(connection.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0 &&
      errno != EPIPE && errno != ECONNRESET) {
    return SystemError(options.target, "send");
  }
  FileDescriptor file(-1);
  const absl::StatusOr<v1::RegionReply> reply =
      ReadReply(options, connection.get(), &file);
  if (!reply.ok()) return reply.status();
  if (reply->has_error()) return FromTensorError(reply->error());
  if (file.get() < 0 || reply->size_bytes() < size_bytes) {
    return ResponseMalformedError("expected a file of the size asked for");
  }
  void* const address =
      mmap(nullptr, reply->size_bytes(), PROT_READ | PROT_WRITE,
           MAP_SHARED | MAP_POPULATE, file.get(), 0);
  if (address == MAP_FAILED) return SystemError(options.target, "mmap");
  return std::unique_ptr<SharedBuffer>(
      new SharedBuffer(connection.Release(), reply->region_id(),
                       {static_cast<uint8_t*>(address), reply->size_bytes()},
                       shared_from_this()));
}

std::optional<v1::SharedSpan> SharedBuffers::Name(
    absl::Span<const uint8_t> bytes) const {
  if (bytes.empty()) return std::nullopt;
  absl::MutexLock lock(&mutex_);
  auto it = buffers_.upper_bound(bytes.data());
  if (it == buffers_.begin()) return std::nullopt;
  const SharedBuffer& buffer = *(--it)->second;
  const uint64_t offset = bytes.data() - buffer.bytes_.data();
  if (offset % kAlignmentBytes != 0 || offset > buffer.bytes_.size() ||
      bytes.size() > buffer.bytes_.size() - offset) {
    return std::nullopt;
  }
  v1::SharedSpan span;
  span.set_region_id(buffer.region_id_);
  span.set_offset_bytes(offset);
  span.set_size_bytes(bytes.size());
  return span;
}

void SharedBuffers::Add(const SharedBuffer* buffer) {
  absl::MutexLock lock(&mutex_);
  buffers_.emplace(buffer->bytes_.data(), buffer);
}

void SharedBuffers::Remove(const SharedBuffer* buffer) {
  absl::MutexLock lock(&mutex_);
  buffers_.erase(buffer->bytes_.data());
}

}  // namespace quantd::internal
