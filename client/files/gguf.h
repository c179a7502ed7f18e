// The GGUF file format, versions 2 and 3, little-endian.
//
//   "GGUF", u32 version, u64 number of tensors, u64 number of pairs
//   pairs of metadata: string key, u32 type, value
//   of each tensor: string name, u32 rank, u64 extents with the innermost
//     first, u32 type, u64 offset
//   the data, from the next multiple of "general.alignment" (default 32) on;
//   offsets are relative to there
//
// A string is a u64 length and bytes. Blocks of 32 elements along the innermost
// dimension:
//
//   q8_0: float16 d, 32 int8 q;          element i is q[i] * d
//   q4_0: float16 d, 16 bytes of nibbles; element i is (low nibble of byte i
//         - 8) * d, element i + 16 (high nibble of byte i - 8) * d

#ifndef QUANTD_CLIENT_FILES_GGUF_H_
#define QUANTD_CLIENT_FILES_GGUF_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/files/dtype.h"
#include "client/files/mapped_file.h"

namespace quantd::files {

constexpr int64_t kGgufBlock = 32;

enum class GgufType { kPlain, kQ8_0, kQ4_0, kOther };

// A tensor of a file. Plain value.
struct GgufTensor {
  std::string name;
  GgufType type = GgufType::kPlain;
  // Of kPlain.
  Dtype dtype = Dtype::kF32;
  // As the file numbers its types.
  uint32_t type_number = 0;
  // Outermost dimension first. The innermost of blocks is a multiple of 32.
  std::vector<int64_t> shape;
  // As they lie in the file; empty for kOther. Points into its mapping.
  absl::Span<const uint8_t> data;
};

// A checked file, mapped. Immutable, thread-safe.
class GgufReader {
 public:
  // Errors: FILE_UNREADABLE; FILE_UNSUPPORTED for other versions and
  // big-endian files; FILE_MALFORMED.
  static absl::StatusOr<GgufReader> Open(const std::string& path);

  // In the file's order.
  const std::vector<GgufTensor>& tensors() const { return tensors_; }

 private:
  explicit GgufReader(MappedFile file) : file_(std::move(file)) {}

  MappedFile file_;
  std::vector<GgufTensor> tensors_;
};

// The elements, exactly.
// Requires: type is kQ8_0 or kQ4_0.
std::vector<float> DequantizeGguf(const GgufTensor& tensor);

// d of each block in row-major order, exactly.
// Requires: type is kQ8_0 or kQ4_0.
std::vector<float> GgufBlockScales(const GgufTensor& tensor);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_GGUF_H_
