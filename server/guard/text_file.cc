#include "server/guard/text_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/types/optional.h"

namespace quantd::server {

absl::optional<std::string> ReadTextFile(const std::string& path) {
  const int file =
      open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file < 0) return absl::nullopt;
  const absl::Cleanup close_file = [file] { close(file); };
  struct stat status;
  if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    return absl::nullopt;
  }
  std::string text;
  char part[4096];
  while (text.size() <= kMaxTextFileBytes) {
    const ssize_t got = read(file, part, sizeof(part));
    if (got == 0) return text;
    if (got < 0 && errno != EINTR) return absl::nullopt;
    if (got > 0) text.append(part, static_cast<size_t>(got));
  }
  return absl::nullopt;
}

}  // namespace quantd::server
