// Writes a GGUF file, version 3, whose tensors come in pieces, from many
// threads.

#ifndef QUANTD_CLIENT_FILES_GGUF_BUILDER_H_
#define QUANTD_CLIENT_FILES_GGUF_BUILDER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/atomic_file.h"
#include "client/files/gguf_types.h"

namespace quantd::files {

// The bytes of a pair of metadata with a number, a text, or a list of texts.
std::string GgufUint32Pair(absl::string_view key, uint32_t value);
std::string GgufTextPair(absl::string_view key, absl::string_view value);
std::string GgufTextsPair(absl::string_view key,
                          absl::Span<const absl::string_view> values);

// A tensor that the file will have. Plain value.
struct GgufEntry {
  std::string name;
  const GgufType* type;
  // Outermost dimension first.
  std::vector<int64_t> shape;

  // Requires: CheckGgufEntry.
  uint64_t SizeBytes() const;
};

// Checks that ggml can read such a tensor: a name of fewer than 64 bytes, at
// most 4 dimensions, none of them 0, whole blocks.
// Errors: FILE_UNSUPPORTED; `path` is for the text.
absl::Status CheckGgufEntry(const std::string& path, const GgufEntry& entry);

// A file that appears complete or not at all. Finish and Create are for one
// thread; Write is thread-safe.
class GgufBuilder {
 public:
  // `pairs` are those of the metadata, as GgufPair has their bytes; if
  // general.alignment is among them, `alignment` is its value. `path` as
  // AtomicFile takes it.
  // Requires: CheckGgufEntry, for every entry.
  // Errors: FILE_EXISTS, FILE_UNWRITABLE; FILE_MALFORMED for a name that comes
  // twice.
  static absl::StatusOr<std::unique_ptr<GgufBuilder>> Create(
      const std::string& path, IfExists if_exists,
      const std::vector<absl::string_view>& pairs, uint32_t alignment,
      const std::vector<GgufEntry>& entries);
  ~GgufBuilder();

  // Writes a whole tensor.
  // Errors: FILE_MALFORMED for data of another size; FILE_UNWRITABLE.
  absl::Status Write(size_t index, absl::Span<const uint8_t> data);

  // Puts the file in its place. Nothing may follow. Returns its size in bytes.
  // Errors: FILE_EXISTS, FILE_UNWRITABLE.
  absl::StatusOr<uint64_t> Finish();

 private:
  struct Place {
    uint64_t begin_bytes;
    uint64_t size_bytes;
  };

  GgufBuilder(std::string path, AtomicFile file)
      : path_(std::move(path)), file_(std::move(file)) {}

  const std::string path_;
  AtomicFile file_;
  // Descriptor of file_, or of a file without a name where file_ is written as
  // data come.
  int fd_ = -1;
  std::vector<Place> places_;
  uint64_t size_bytes_ = 0;
};

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_GGUF_BUILDER_H_
