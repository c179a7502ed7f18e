#include "client/files/atomic_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/errors.h"

namespace quantd::files {
namespace {

constexpr int kMaxNames = 100;
constexpr size_t kCopyBytes = size_t{1} << 20;

}  // namespace

absl::Status WriteAll(int fd, absl::Span<const uint8_t> bytes,
                      const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      return FileUnwritableError(path, errno);
    }
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::StatusOr<AtomicFile> AtomicFile::Create(const std::string& path) {
  for (int i = 0; i < kMaxNames; ++i) {
    std::string temporary = absl::StrCat(path, ".tmp-", getpid(), "-", i);
    const int fd =
        open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0) return AtomicFile(path, std::move(temporary), fd);
    if (errno != EEXIST) return FileUnwritableError(path, errno);
  }
  return FileUnwritableError(path, EEXIST);
}

AtomicFile::AtomicFile(std::string path, std::string temporary_path, int fd)
    : path_(std::move(path)),
      temporary_path_(std::move(temporary_path)),
      fd_(fd) {}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(other.path_),
      temporary_path_(other.temporary_path_),
      fd_(std::exchange(other.fd_, -1)) {}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  close(fd_);
  unlink(temporary_path_.c_str());
}

absl::Status AtomicFile::Append(absl::Span<const uint8_t> bytes) {
  return WriteAll(fd_, bytes, path_);
}

absl::Status AtomicFile::Append(absl::string_view bytes) {
  return Append(absl::MakeConstSpan(
      reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
}

absl::Status AtomicFile::AppendFrom(int fd, uint64_t offset_bytes,
                                    uint64_t size_bytes) {
  const std::unique_ptr<uint8_t[]> buffer(
      new uint8_t[std::min<uint64_t>(size_bytes, kCopyBytes)]);
  while (size_bytes > 0) {
    const ssize_t got =
        pread(fd, buffer.get(), std::min<uint64_t>(size_bytes, kCopyBytes),
              static_cast<off_t>(offset_bytes));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return FileUnwritableError(path_, got < 0 ? errno : EIO);
    const absl::Status status =
        Append(absl::MakeConstSpan(buffer.get(), static_cast<size_t>(got)));
    if (!status.ok()) return status;
    offset_bytes += static_cast<uint64_t>(got);
    size_bytes -= static_cast<uint64_t>(got);
  }
  return absl::OkStatus();
}

absl::Status AtomicFile::Commit() {
  const int fd = std::exchange(fd_, -1);
  int error_number = 0;
  if (fsync(fd) != 0) error_number = errno;
  if (close(fd) != 0 && error_number == 0) error_number = errno;
  if (error_number == 0 &&
      rename(temporary_path_.c_str(), path_.c_str()) != 0) {
    error_number = errno;
  }
  if (error_number == 0) return absl::OkStatus();
  unlink(temporary_path_.c_str());
  return FileUnwritableError(path_, error_number);
}

}  // namespace quantd::files
