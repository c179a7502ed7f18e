#include "client/files/atomic_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/errors.h"
#include "client/files/mapped_file.h"

namespace quantd::files {
namespace {

constexpr int kMaxNames = 100;
constexpr size_t kCopyBytes = size_t{1} << 20;

// The name by which a file without one can be linked.
std::string DescriptorPath(int fd) {
  return absl::StrCat("/proc/self/fd/", fd);
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

// Standard output, a pipe or a device: nothing can be put in its place.
bool IsStream(const std::string& path) {
  struct stat status;
  return path == kStandardOutput ||
         (stat(path.c_str(), &status) == 0 &&
          (S_ISCHR(status.st_mode) || S_ISFIFO(status.st_mode)));
}

// Negative, and errno is set, where the file system has no such files.
int OpenUnnamed(const std::string& folder, int access_mode) {
  return open(folder.c_str(), O_TMPFILE | access_mode | O_CLOEXEC, 0666);
}

std::string TemporaryPath(const std::string& path, int i) {
  return absl::StrCat(path, ".tmp-", getpid(), "-", i);
}

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

absl::Status WriteAllAt(int fd, uint64_t offset_bytes,
                        absl::Span<const uint8_t> bytes,
                        const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = pwrite(fd, bytes.data(), bytes.size(),
                                   static_cast<off_t>(offset_bytes));
    if (written < 0) {
      if (errno == EINTR) continue;
      return FileUnwritableError(path, errno);
    }
    bytes.remove_prefix(static_cast<size_t>(written));
    offset_bytes += static_cast<uint64_t>(written);
  }
  return absl::OkStatus();
}

absl::Status CheckWritable(const std::string& path, IfExists if_exists) {
  struct stat status;
  if (IsStream(path)) return absl::OkStatus();
  if (access(FolderOf(path).c_str(), W_OK | X_OK) != 0) {
    return FileUnwritableError(path, errno);
  }
  if (lstat(path.c_str(), &status) != 0) return absl::OkStatus();
  // A link that leads nowhere is a name that is taken.
  if (stat(path.c_str(), &status) == 0) {
    if (S_ISDIR(status.st_mode)) return FileUnwritableError(path, EISDIR);
    if (!S_ISREG(status.st_mode)) return FileUnwritableError(path, EINVAL);
  }
  return if_exists == IfExists::kRefuse ? FileExistsError(path)
                                        : absl::OkStatus();
}

absl::StatusOr<int> OpenUnnamedFile(const std::string& path) {
  std::string base = path;
  if (IsStream(path)) {
    const char* const folder = std::getenv("TMPDIR");
    base = absl::StrCat(folder == nullptr ? "/tmp" : folder, "/quantctl");
  }
  int fd = OpenUnnamed(FolderOf(base), O_RDWR);
  if (fd >= 0) return fd;
  absl::StrAppend(&base, ".tmp-XXXXXX");
  fd = mkostemp(base.data(), O_CLOEXEC);
  if (fd < 0) return FileUnwritableError(path, errno);
  unlink(base.c_str());
  return fd;
}

absl::StatusOr<AtomicFile> AtomicFile::Create(const std::string& path,
                                              IfExists if_exists) {
  if (absl::Status s = CheckWritable(path, if_exists); !s.ok()) return s;
  if (IsStream(path)) {
    const int fd = path == kStandardOutput
                       ? fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 0)
                       : open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd < 0) return FileUnwritableError(path, errno);
    return AtomicFile(path, if_exists, Kind::kStream, "", fd);
  }
  int fd = OpenUnnamed(FolderOf(path), O_RDWR);
  if (fd >= 0 && access(DescriptorPath(fd).c_str(), F_OK) == 0) {
    return AtomicFile(path, if_exists, Kind::kUnnamed, "", fd);
  }
  if (fd >= 0) close(fd);
  for (int i = 0; i < kMaxNames; ++i) {
    std::string temporary = TemporaryPath(path, i);
    fd = open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0) {
      return AtomicFile(path, if_exists, Kind::kNamed, std::move(temporary),
                        fd);
    }
    if (errno != EEXIST) return FileUnwritableError(path, errno);
  }
  return FileUnwritableError(path, EEXIST);
}

AtomicFile::AtomicFile(std::string path, IfExists if_exists, Kind kind,
                       std::string temporary_path, int fd)
    : path_(std::move(path)),
      if_exists_(if_exists),
      kind_(kind),
      temporary_path_(std::move(temporary_path)),
      fd_(fd) {}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(other.path_),
      if_exists_(other.if_exists_),
      kind_(other.kind_),
      temporary_path_(other.temporary_path_),
      fd_(std::exchange(other.fd_, -1)) {}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  close(fd_);
  if (kind_ == Kind::kNamed) unlink(temporary_path_.c_str());
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

int AtomicFile::Publish() const {
  const char* const path = path_.c_str();
  if (kind_ == Kind::kNamed) {
    // Not every file system that needs a name knows RENAME_NOREPLACE.
    struct stat status;
    if (if_exists_ == IfExists::kRefuse && lstat(path, &status) == 0) {
      return EEXIST;
    }
    return rename(temporary_path_.c_str(), path) == 0 ? 0 : errno;
  }
  const std::string descriptor = DescriptorPath(fd_);
  const auto link_as = [&descriptor](const char* name) {
    return linkat(AT_FDCWD, descriptor.c_str(), AT_FDCWD, name,
                  AT_SYMLINK_FOLLOW) == 0
               ? 0
               : errno;
  };
  int error_number = link_as(path);
  if (error_number != EEXIST || if_exists_ == IfExists::kRefuse) {
    return error_number;
  }
  // A link replaces nothing; a rename does.
  std::string temporary;
  for (int i = 0; i < kMaxNames && error_number == EEXIST; ++i) {
    temporary = TemporaryPath(path_, i);
    error_number = link_as(temporary.c_str());
  }
  if (error_number == 0 && rename(temporary.c_str(), path) != 0) {
    error_number = errno;
    unlink(temporary.c_str());
  }
  return error_number;
}

absl::Status AtomicFile::Commit() {
  absl::Status unchanged = CheckMappedFiles();
  if (!unchanged.ok()) return unchanged;
  int error_number = 0;
  if (kind_ != Kind::kStream) {
    error_number = fsync(fd_) == 0 ? Publish() : errno;
  }
  if (close(std::exchange(fd_, -1)) != 0 && error_number == 0) {
    error_number = errno;
  }
  if (error_number == 0) return absl::OkStatus();
  if (kind_ == Kind::kNamed) unlink(temporary_path_.c_str());
  return error_number == EEXIST ? FileExistsError(path_)
                                : FileUnwritableError(path_, error_number);
}

}  // namespace quantd::files
