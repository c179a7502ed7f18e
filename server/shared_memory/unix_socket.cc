#include "server/shared_memory/unix_socket.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"

namespace quantd::server {

absl::StatusOr<std::unique_ptr<UnixSocket>> UnixSocket::Listen(
    const std::string& path, int type) {
  const absl::Status error = core::ListenError(absl::StrCat("unix:", path));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) return error;
  path.copy(address.sun_path, path.size());
  struct stat file {};
  if (lstat(path.c_str(), &file) == 0 && S_ISSOCK(file.st_mode)) {
    unlink(path.c_str());
  }
  FileDescriptor listening(
      socket(AF_UNIX, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (listening.get() < 0 ||
      bind(listening.get(), reinterpret_cast<const sockaddr*>(&address),
           sizeof(address)) != 0) {
    return error;
  }
  std::unique_ptr<UnixSocket> bound(new UnixSocket(path, std::move(listening)));
  if (listen(bound->fd(), SOMAXCONN) != 0) return error;
  return bound;
}

UnixSocket::UnixSocket(std::string path, FileDescriptor socket)
    : path_(std::move(path)), socket_(std::move(socket)) {
  struct stat file {};
  if (lstat(path_.c_str(), &file) == 0) {
    device_ = file.st_dev;
    inode_ = file.st_ino;
  }
}

UnixSocket::~UnixSocket() {
  struct stat file {};
  if (lstat(path_.c_str(), &file) == 0 && file.st_dev == device_ &&
      file.st_ino == inode_) {
    unlink(path_.c_str());
  }
}

UnixSocket::Outcome UnixSocket::Accept(FileDescriptor* connection) const {
  *connection = FileDescriptor(
      accept4(fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (connection->get() >= 0) return Outcome::kAccepted;
  switch (errno) {
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
      return Outcome::kExhausted;
    default:
      return Outcome::kNothing;
  }
}

StopSignal::StopSignal() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void StopSignal::Send() {
  // Fails only when it was sent 2^64 - 1 times before.
  eventfd_write(event_.get(), 1);
}

absl::StatusOr<std::unique_ptr<UnixListener>> UnixListener::Start(
    const std::string& path,
    std::function<void(FileDescriptor)> on_connection) {
  absl::StatusOr<std::unique_ptr<UnixSocket>> socket =
      UnixSocket::Listen(path, SOCK_STREAM);
  if (!socket.ok()) return socket.status();
  std::unique_ptr<UnixListener> listener(
      new UnixListener(*std::move(socket), std::move(on_connection)));
  if (listener->stop_.fd() < 0) {
    return core::ListenError(absl::StrCat("unix:", path));
  }
  listener->thread_ = std::thread([l = listener.get()] { l->Run(); });
  return listener;
}

UnixListener::UnixListener(std::unique_ptr<UnixSocket> socket,
                           std::function<void(FileDescriptor)> on_connection)
    : socket_(std::move(socket)), on_connection_(std::move(on_connection)) {}

UnixListener::~UnixListener() {
  stop_.Send();
  if (thread_.joinable()) thread_.join();
}

void UnixListener::Run() {
  bool pauses = false;
  for (;;) {
    pollfd polled[] = {{stop_.fd(), POLLIN, 0},
                       {pauses ? -1 : socket_->fd(), POLLIN, 0}};
    poll(polled, 2, pauses ? kExhaustedPauseMs : -1);
    if (polled[0].revents != 0) return;
    FileDescriptor connection;
    const UnixSocket::Outcome outcome = socket_->Accept(&connection);
    pauses = outcome == UnixSocket::Outcome::kExhausted;
    if (outcome == UnixSocket::Outcome::kAccepted) {
      on_connection_(std::move(connection));
    }
  }
}

}  // namespace quantd::server
