// Listening unix sockets.

#ifndef QUANTD_SERVER_SHARED_MEMORY_UNIX_SOCKET_H_
#define QUANTD_SERVER_SHARED_MEMORY_UNIX_SOCKET_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "server/shared_memory/file_descriptor.h"

namespace quantd::server {

// Its mode is what the umask leaves, as that of gRPC's own. Thread-safe.
class UnixSocket {
 public:
  // Listens at `path`; a socket that was left there, also one that still
  // serves, is replaced. `type` is SOCK_STREAM or SOCK_SEQPACKET.
  // Errors: LISTEN.
  static absl::StatusOr<std::unique_ptr<UnixSocket>> Listen(
      const std::string& path, int type);
  // Removes the socket from where it is, unless another has replaced it.
  ~UnixSocket();

  UnixSocket(const UnixSocket&) = delete;
  UnixSocket& operator=(const UnixSocket&) = delete;

  int fd() const { return socket_.get(); }

  enum class Outcome { kAccepted, kNothing, kExhausted };
  // Takes a connection without waiting for one; it does not block and is not
  // passed on to other programs. kExhausted: there is one, but no room for it
  // in the process or the system; poll() would say so again at once.
  Outcome Accept(FileDescriptor* connection) const;

 private:
  UnixSocket(std::string path, FileDescriptor socket);

  const std::string path_;
  const FileDescriptor socket_;
  // Of the file, to know it again.
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

// Wakes a thread that polls. Thread-safe.
class StopSignal {
 public:
  StopSignal();
  void Send();
  // Readable from Send on.
  int fd() const { return event_.get(); }

 private:
  const FileDescriptor event_;
};

// How long to leave a socket alone whose connections nobody has room for.
constexpr int kExhaustedPauseMs = 100;

// Takes connections on a thread of its own. Thread-safe.
class UnixListener {
 public:
  // Listens at `path`, SOCK_STREAM, and calls `on_connection` for each
  // connection, one at a time.
  // Errors: LISTEN.
  static absl::StatusOr<std::unique_ptr<UnixListener>> Start(
      const std::string& path,
      std::function<void(FileDescriptor)> on_connection);
  // No call of `on_connection` is under way any more.
  ~UnixListener();

 private:
  UnixListener(std::unique_ptr<UnixSocket> socket,
               std::function<void(FileDescriptor)> on_connection);
  void Run();

  const std::unique_ptr<UnixSocket> socket_;
  const std::function<void(FileDescriptor)> on_connection_;
  StopSignal stop_;
  std::thread thread_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_SHARED_MEMORY_UNIX_SOCKET_H_
