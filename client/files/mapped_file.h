// A file mapped into memory for reading.

#ifndef QUANTD_CLIENT_FILES_MAPPED_FILE_H_
#define QUANTD_CLIENT_FILES_MAPPED_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace quantd::files {

// Immutable, thread-safe. The file must not be cut short while it is mapped:
// the system then ends the process at the first read behind its end.
class MappedFile {
 public:
  // Errors: FILE_UNREADABLE; FILE_UNSUPPORTED when it is not a regular file.
  static absl::StatusOr<MappedFile> Open(const std::string& path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  absl::Span<const uint8_t> bytes() const { return {data_, size_}; }

 private:
  MappedFile(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  // Null when the file is empty.
  const uint8_t* data_;
  size_t size_;
};

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_MAPPED_FILE_H_
