// Reading a small file whole.

#ifndef QUANTD_SERVER_GUARD_TEXT_FILE_H_
#define QUANTD_SERVER_GUARD_TEXT_FILE_H_

#include <cstddef>
#include <string>

#include "absl/types/optional.h"

namespace quantd::server {

// Files of access rules and certificates are far smaller.
constexpr size_t kMaxTextFileBytes = size_t{16} << 20;

// None for what is not a regular file of at most kMaxTextFileBytes, or can't be
// read. Does not wait for a writer, as of a FIFO.
absl::optional<std::string> ReadTextFile(const std::string& path);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_TEXT_FILE_H_
