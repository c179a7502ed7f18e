// Reading a small file whole.

#ifndef QUANTD_SERVER_GUARD_TEXT_FILE_H_
#define QUANTD_SERVER_GUARD_TEXT_FILE_H_

#include <cstddef>
#include <fstream>
#include <string>

#include "absl/types/optional.h"

namespace quantd::server {

// None for a file that can't be read, a directory among them.
inline absl::optional<std::string> ReadTextFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::nullopt;
  std::string text;
  char part[4096];
  while (file.read(part, sizeof(part)) || file.gcount() > 0) {
    text.append(part, static_cast<size_t>(file.gcount()));
  }
  if (file.bad()) return absl::nullopt;
  return text;
}

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_TEXT_FILE_H_
