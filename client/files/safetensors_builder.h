// Writes a safetensors file whose tensors come in pieces, from many threads.

#ifndef QUANTD_CLIENT_FILES_SAFETENSORS_BUILDER_H_
#define QUANTD_CLIENT_FILES_SAFETENSORS_BUILDER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/files/atomic_file.h"
#include "client/files/dtype.h"

namespace quantd::files {

// A file that appears complete or not at all. Its bytes follow from its
// tensors, their order and the room for the header alone, not from when the
// data came.
//
// First every tensor is reserved, then PlaceAll gives each its place in the
// file, so that data are written once and where they stay. Tensors with wider
// elements come first; among equals the order is that of `order`. What turns
// out otherwise, such as a tensor that is left out, costs Finish a copy of the
// file.
//
// Reserve and PlaceAll are for one thread, and so is Finish; what is between
// them is thread-safe.
class SafetensorsBuilder {
 public:
  // `path` as AtomicFile takes it.
  // Errors: FILE_EXISTS, FILE_UNWRITABLE.
  static absl::StatusOr<std::unique_ptr<SafetensorsBuilder>> Create(
      const std::string& path, IfExists if_exists);
  ~SafetensorsBuilder();

  // Takes a tensor's name and size; returns its index.
  // Errors: FILE_MALFORMED for a name that is taken or "__metadata__", or a
  // shape without a size.
  absl::StatusOr<size_t> Reserve(uint64_t order, const std::string& name,
                                 Dtype dtype,
                                 const std::vector<int64_t>& shape);
  // Size of the data that were reserved.
  uint64_t reserved_bytes() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Size of the header, with these metadata, of what was reserved.
  // Errors: FILE_MALFORMED for one over the limit.
  absl::StatusOr<uint64_t> HeaderBytes(
      const std::map<std::string, std::string>& metadata) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Leaves `header_bytes` for the header, which is filled up with spaces; a
  // longer one costs a copy.
  // Errors: FILE_UNWRITABLE.
  absl::Status PlaceAll(uint64_t header_bytes);

  // Writes bytes of a tensor from `offset_bytes` on. The same bytes may come
  // twice.
  // Errors: FILE_MALFORMED for bytes behind the tensor; FILE_UNWRITABLE.
  absl::Status Write(size_t index, uint64_t offset_bytes,
                     absl::Span<const uint8_t> bytes);
  // Adds a whole tensor that was not reserved.
  // Errors: of Reserve; FILE_MALFORMED for data that do not fit the shape;
  // FILE_UNWRITABLE.
  absl::Status Add(uint64_t order, const std::string& name, Dtype dtype,
                   const std::vector<int64_t>& shape,
                   absl::Span<const uint8_t> data) ABSL_LOCKS_EXCLUDED(mutex_);
  // Leaves a reserved tensor out of the file; its name is free again.
  void Drop(size_t index) ABSL_LOCKS_EXCLUDED(mutex_);
  // Requires: a type of the same size.
  void SetDtype(size_t index, Dtype dtype) ABSL_LOCKS_EXCLUDED(mutex_);
  void SetMetadata(const std::string& key, const std::string& value)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // XXH3 of the data as the file will have them, which this reads back. No
  // tensor may change after it.
  // Errors: FILE_UNWRITABLE.
  absl::StatusOr<uint64_t> DataChecksum() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Writes the header and puts the file in its place. Nothing may follow.
  // Returns its size in bytes.
  // Errors: FILE_EXISTS, FILE_UNWRITABLE; FILE_MALFORMED for a header over the
  // limit.
  absl::StatusOr<uint64_t> Finish() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    uint64_t order;
    std::string name;
    Dtype dtype;
    std::vector<int64_t> shape;
    uint64_t size_bytes;
    // In fd_.
    uint64_t place_bytes = 0;
    bool is_dropped = false;
  };

  SafetensorsBuilder(std::string path, IfExists if_exists)
      : path_(std::move(path)), if_exists_(if_exists) {}
  // Indices of the tensors of the file, in order.
  std::vector<size_t> Order() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::string> Header(
      const std::vector<size_t>& indices,
      const std::map<std::string, std::string>& metadata,
      uint64_t room_bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Entry> MakeEntry(uint64_t order, const std::string& name,
                                  Dtype dtype,
                                  const std::vector<int64_t>& shape)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string path_;
  const IfExists if_exists_;
  // Set for a file that can be written at any place; otherwise the data wait in
  // fd_, a file without a name.
  std::optional<AtomicFile> file_;
  int fd_ = -1;
  uint64_t header_bytes_ = 0;

  mutable absl::Mutex mutex_;
  // The tensors; those that PlaceAll saw keep their place.
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_set<std::string> names_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::string> metadata_ ABSL_GUARDED_BY(mutex_);
  // End of the data in fd_, where the next tensor that is added goes.
  uint64_t end_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Places of the reserved tensors, in fd_; they need no lock.
  struct Place {
    uint64_t begin_bytes;
    uint64_t size_bytes;
  };
  std::vector<Place> places_;
};

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_SAFETENSORS_BUILDER_H_
