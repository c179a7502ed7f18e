// The safetensors file format: a JSON header and the bytes of the tensors.
//
//   u64 little-endian N, at most 100,000,000
//   N bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}}, padded
//     with spaces; "__metadata__" maps strings to strings
//   the data
//
// Offsets are relative to the data. Tensors fill the rest of the file without
// hole or overlap.

#ifndef QUANTD_CLIENT_FILES_SAFETENSORS_H_
#define QUANTD_CLIENT_FILES_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/atomic_file.h"
#include "client/files/dtype.h"
#include "client/files/lazy_bytes.h"
#include "client/files/mapped_file.h"

namespace quantd::files {

// A tensor of a file. `data` points into the file's mapping.
struct FileTensor {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  absl::Span<const uint8_t> data;
  // Makes `data` on use; null for those of a mapping.
  std::shared_ptr<LazyBytes> lazy = nullptr;

  // Keep what this returns for as long as `data` are read.
  std::shared_ptr<const void> Hold() const {
    return lazy == nullptr ? nullptr : lazy->Hold();
  }
};

// A tensor of a file that is not read, and why.
struct UnreadTensor {
  std::string name;
  std::string why;
};

// The most common reason.
constexpr absl::string_view kTypeNotKnown =
    "its type is none that quantctl knows";

// A checked file, mapped. Immutable, thread-safe.
class SafetensorsReader {
 public:
  // Errors: FILE_UNREADABLE, FILE_UNSUPPORTED, FILE_MALFORMED.
  static absl::StatusOr<SafetensorsReader> Open(const std::string& path);

  // In order of their data.
  const std::vector<FileTensor>& tensors() const { return tensors_; }
  // Null when there is none of that name.
  const FileTensor* Find(absl::string_view name) const;
  const std::map<std::string, std::string>& metadata() const {
    return metadata_;
  }
  // XXH3 of the data, all of which this reads.
  uint64_t DataChecksum() const;

 private:
  explicit SafetensorsReader(MappedFile file) : file_(std::move(file)) {}

  MappedFile file_;
  std::vector<FileTensor> tensors_;
  std::map<std::string, std::string> metadata_;
  absl::flat_hash_map<std::string, size_t> index_;
};

// Writes a file that appears complete or not at all. Tensors with wider
// elements come first, so that every tensor is aligned to its elements; among
// equals the order is that of Add. Not thread-safe.
class SafetensorsWriter {
 public:
  // `path` as AtomicFile takes it.
  // Errors: FILE_EXISTS, FILE_UNWRITABLE.
  static absl::StatusOr<SafetensorsWriter> Create(const std::string& path,
                                                  IfExists if_exists);

  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) = delete;
  ~SafetensorsWriter();

  // Copies the data to disk.
  // Errors: FILE_MALFORMED for a name that is taken or "__metadata__", or data
  // that do not fit the shape; FILE_UNWRITABLE.
  absl::Status Add(const std::string& name, Dtype dtype,
                   const std::vector<int64_t>& shape,
                   absl::Span<const uint8_t> data);
  // Adds a tensor like Add, but the data are read at Finish and must stay until
  // then.
  absl::Status AddView(const std::string& name, Dtype dtype,
                       const std::vector<int64_t>& shape,
                       absl::Span<const uint8_t> data);
  void SetMetadata(const std::string& key, const std::string& value);

  // Writes the file. Nothing may follow. Returns its size in bytes.
  // Errors: FILE_EXISTS, FILE_UNWRITABLE; FILE_MALFORMED for a header over the
  // limit.
  absl::StatusOr<uint64_t> Finish();

 private:
  struct Entry {
    std::string name;
    Dtype dtype;
    std::vector<int64_t> shape;
    uint64_t size_bytes;
    // Place of the data: in memory, or in the spool from offset_bytes.
    const uint8_t* data;
    uint64_t offset_bytes;
  };

  SafetensorsWriter(std::string path, IfExists if_exists, int spool_fd);
  absl::Status Check(const std::string& name, Dtype dtype,
                     const std::vector<int64_t>& shape, size_t size_bytes);

  const std::string path_;
  const IfExists if_exists_;
  // A file without a name that holds what Add was given: the header, whose
  // size is not known before the last tensor, must come first.
  int spool_fd_;
  uint64_t spool_bytes_ = 0;
  std::vector<Entry> entries_;
  absl::flat_hash_set<std::string> names_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_SAFETENSORS_H_
