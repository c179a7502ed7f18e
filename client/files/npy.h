// The .npy file format, versions 1.0 to 3.0: one array.

#ifndef QUANTD_CLIENT_FILES_NPY_H_
#define QUANTD_CLIENT_FILES_NPY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/files/atomic_file.h"
#include "client/files/dtype.h"
#include "client/files/mapped_file.h"

namespace quantd::files {

// A checked file, mapped. Immutable, thread-safe.
class NpyReader {
 public:
  // Reads booleans, integers and floats of 1 to 8 bytes, little-endian, in C
  // order.
  // Errors: FILE_UNREADABLE; FILE_UNSUPPORTED for Fortran order, big-endian
  // and other types; FILE_MALFORMED.
  static absl::StatusOr<NpyReader> Open(const std::string& path);

  Dtype dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  absl::Span<const uint8_t> data() const { return data_; }

 private:
  explicit NpyReader(MappedFile file) : file_(std::move(file)) {}

  MappedFile file_;
  Dtype dtype_ = Dtype::kF32;
  std::vector<int64_t> shape_;
  absl::Span<const uint8_t> data_;
};

// Writes version 1.0 (2.0 where the header needs it); the file appears
// complete or not at all. Returns its size in bytes.
// Errors: FILE_UNSUPPORTED for bfloat16 and 8-bit floats; FILE_MALFORMED when
// the data do not fit the shape; FILE_EXISTS, FILE_UNWRITABLE.
absl::StatusOr<uint64_t> WriteNpy(const std::string& path, IfExists if_exists,
                                  Dtype dtype,
                                  const std::vector<int64_t>& shape,
                                  absl::Span<const uint8_t> data);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_NPY_H_
