// A file descriptor with an owner.

#ifndef QUANTD_SERVER_NET_FILE_DESCRIPTOR_H_
#define QUANTD_SERVER_NET_FILE_DESCRIPTOR_H_

#include <unistd.h>

#include <utility>

namespace quantd::server {

// Closed with the object. Not thread-safe.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  // Takes over `fd`; -1 is none.
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.Release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      Close();
      fd_ = other.Release();
    }
    return *this;
  }
  ~FileDescriptor() { Close(); }

  int get() const { return fd_; }
  // The caller's from now on.
  int Release() { return std::exchange(fd_, -1); }

 private:
  void Close() {
    if (fd_ >= 0) close(fd_);
  }

  int fd_ = -1;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_NET_FILE_DESCRIPTOR_H_
