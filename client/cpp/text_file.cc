#include "client/cpp/text_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace quantd::internal {
namespace {

constexpr size_t kReadBytes = size_t{1} << 16;

// client/files/errors.h has those of the files that hold tensors.
absl::Status UnreadableError(const std::string& path, int error_number) {
  return absl::ErrnoToStatus(error_number,
                             absl::StrCat("FILE_UNREADABLE: ", path));
}

absl::Status UnsupportedError(const std::string& path, absl::string_view what) {
  return absl::UnimplementedError(
      absl::StrCat("FILE_UNSUPPORTED: ", path, ": ", what));
}

absl::StatusOr<std::string> ReadAll(int fd, const std::string& path,
                                    size_t max_bytes) {
  std::string text;
  while (text.size() <= max_bytes) {
    const size_t old_size = text.size();
    text.resize(std::min(old_size + kReadBytes, max_bytes + 1));
    const ssize_t count = read(fd, &text[old_size], text.size() - old_size);
    const int error_number = errno;
    text.resize(old_size + static_cast<size_t>(std::max<ssize_t>(0, count)));
    if (count == 0) return text;
    if (count < 0 && error_number != EINTR) {
      return UnreadableError(path, error_number);
    }
  }
  return UnsupportedError(
      path, absl::StrCat("expected at most ", max_bytes, " bytes, got more"));
}

}  // namespace

absl::StatusOr<std::string> ReadTextFile(const std::string& path,
                                         size_t max_bytes) {
  const int fd =
      open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return UnreadableError(path, errno);
  const absl::Cleanup close_file = [fd] { close(fd); };
  struct stat status;
  if (fstat(fd, &status) != 0) return UnreadableError(path, errno);
  if (!S_ISREG(status.st_mode)) {
    return UnsupportedError(
        path, "expected a regular file, got a folder, a pipe or a device");
  }
  return ReadAll(fd, path, max_bytes);
}

absl::StatusOr<std::string> ReadDocument(const std::string& path) {
  return path == "-" ? ReadAll(STDIN_FILENO, path, kMaxDocumentBytes)
                     : ReadTextFile(path, kMaxDocumentBytes);
}

}  // namespace quantd::internal
