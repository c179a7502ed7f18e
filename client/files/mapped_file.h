// A file mapped into memory for reading.

#ifndef QUANTD_CLIENT_FILES_MAPPED_FILE_H_
#define QUANTD_CLIENT_FILES_MAPPED_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace quantd::files {

struct Mapping;

// The bytes of a tensor in a mapped file.
struct TensorBytes {
  std::string name;
  absl::Span<const uint8_t> bytes;
};

// Immutable, thread-safe. The file must not be cut short while it is mapped:
// the system then ends the process at the first read behind its end, by SIGBUS;
// see ExplainCutFiles.
class MappedFile {
 public:
  // Errors: FILE_UNREADABLE; FILE_UNSUPPORTED when it is not a regular file.
  static absl::StatusOr<MappedFile> Open(const std::string& path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  absl::Span<const uint8_t> bytes() const { return {data_, size_}; }

  // Lets errors name the tensor that was cut off; bytes that are not of the
  // file are left out. To be called once, before other threads read.
  void SetTensors(std::vector<TensorBytes> tensors);

 private:
  MappedFile(const uint8_t* data, size_t size, Mapping* mapping)
      : data_(data), size_(size), mapping_(mapping) {}

  // Null when the file is empty; so is mapping_.
  const uint8_t* data_;
  size_t size_;
  Mapping* mapping_;
};

// Checks that no file that is mapped was changed in its place since, by its
// size and its time of modification; after ExplainCutFiles, also none that was
// mapped and is not any more. A file that another one took the place of has not
// changed. Thread-safe. Errors: FILE_CHANGED, of the first that was found.
absl::Status CheckMappedFiles();

// From now on a read behind the end of a mapped file ends the process with the
// exit code, after a line on stderr that begins with `program` and tells of
// FILE_CHANGED. To be called once.
void ExplainCutFiles(const char* program, int exit_code);

// Ends the process the same way, with what CheckMappedFiles found. To be called
// after ExplainCutFiles. Thread-safe: one line is written, however many threads
// find the change.
[[noreturn]] void EndOverChangedFile(const absl::Status& changed);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_MAPPED_FILE_H_
