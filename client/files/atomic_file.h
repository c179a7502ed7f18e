// A file that appears complete or not at all.

#ifndef QUANTD_CLIENT_FILES_ATOMIC_FILE_H_
#define QUANTD_CLIENT_FILES_ATOMIC_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace quantd::files {

// Writes to a temporary file beside `path`, which Commit renames over it.
// Without Commit the temporary file is removed. Not thread-safe.
class AtomicFile {
 public:
  // Errors of all: FILE_UNWRITABLE.
  static absl::StatusOr<AtomicFile> Create(const std::string& path);

  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  absl::Status Append(absl::Span<const uint8_t> bytes);
  absl::Status Append(absl::string_view bytes);
  // Appends `size_bytes` of another open file from `offset_bytes`.
  absl::Status AppendFrom(int fd, uint64_t offset_bytes, uint64_t size_bytes);

  // Makes the file durable and visible.
  absl::Status Commit();

 private:
  AtomicFile(std::string path, std::string temporary_path, int fd);

  const std::string path_;
  const std::string temporary_path_;
  // Negative once committed or moved from.
  int fd_;
};

// Writes all bytes to `fd`; `path` is for the error.
// Errors: FILE_UNWRITABLE.
absl::Status WriteAll(int fd, absl::Span<const uint8_t> bytes,
                      const std::string& path);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_ATOMIC_FILE_H_
