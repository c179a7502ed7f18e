// The GGUF file format, versions 2 and 3, little-endian.
//
//   "GGUF", u32 version, u64 number of tensors, u64 number of pairs
//   for each pair of metadata: string key, u32 type, value
//   for each tensor: string name, u32 rank, u64 extents with the innermost
//     first, u32 type, u64 offset
//   the data
//
// The data begin at a multiple of the alignment: "general.alignment" of the
// metadata, a power of two from 8 to 1 MiB, 32 by default. Offsets are relative
// to there and multiples of the alignment. No two tensors overlap.
//
// A string is a u64 length and bytes. gguf_types.h has the types.

#ifndef QUANTD_CLIENT_FILES_GGUF_H_
#define QUANTD_CLIENT_FILES_GGUF_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/gguf_types.h"
#include "client/files/mapped_file.h"

namespace quantd::files {

// Alignment of the data, where the metadata do not say another.
constexpr uint32_t kGgufAlignment = 32;

// A tensor of a file. Plain value.
struct GgufTensor {
  std::string name;
  // Null for one that is not known.
  const GgufType* type = nullptr;
  // Number of the type in the file.
  uint32_t type_number = 0;
  // Outermost dimension first. The innermost has whole blocks.
  std::vector<int64_t> shape;
  // Bytes as they lie in the file; empty without a type. Points into its
  // mapping.
  absl::Span<const uint8_t> data;
};

// A pair of metadata. Plain value.
struct GgufPair {
  std::string key;
  // Key, type and value as they lie in the file. Points into its mapping.
  absl::Span<const uint8_t> bytes;
};

// A checked file, mapped. Immutable, thread-safe.
class GgufReader {
 public:
  // Errors: FILE_UNREADABLE; FILE_UNSUPPORTED for other versions and
  // big-endian files; FILE_MALFORMED.
  static absl::StatusOr<GgufReader> Open(const std::string& path);

  // In the file's order.
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  const std::vector<GgufPair>& pairs() const { return pairs_; }
  // Alignment of the data.
  uint32_t alignment() const { return alignment_; }

  // Checks that the file has all tensors of its model, as far as its metadata
  // tell. `path` is for the error. Errors: FILE_UNSUPPORTED.
  absl::Status CheckWhole(const std::string& path) const;

 private:
  explicit GgufReader(MappedFile file) : file_(std::move(file)) {}

  // The value of a number among the metadata.
  std::optional<uint64_t> IntegerOf(absl::string_view key) const;

  MappedFile file_;
  std::vector<GgufTensor> tensors_;
  std::vector<GgufPair> pairs_;
  uint32_t alignment_ = 0;
};

// The elements, the same bits as ggml makes of them.
// Requires: a type that is not plain.
std::vector<float> DequantizeGguf(const GgufTensor& tensor);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_GGUF_H_
