// The beginning of a safetensors file.

#ifndef QUANTD_CLIENT_FILES_SAFETENSORS_HEADER_H_
#define QUANTD_CLIENT_FILES_SAFETENSORS_HEADER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/files/dtype.h"

namespace quantd::files {

// Bytes of the length that the file begins with, and the limit on it.
constexpr size_t kSafetensorsLengthBytes = 8;
constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;
// The name in the header that is no tensor's.
constexpr absl::string_view kSafetensorsMetadataKey = "__metadata__";

// A tensor in the header.
struct SafetensorsEntry {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  uint64_t size_bytes = 0;
};

// The length and the JSON, up to the data, of tensors that lie one behind the
// other. Filled up with spaces to a multiple of 8 bytes, and to `room_bytes` if
// these are more. `path` is for the error.
// Errors: FILE_MALFORMED for a header over the limit.
absl::StatusOr<std::string> SafetensorsHeader(
    const std::string& path, const std::vector<SafetensorsEntry>& entries,
    const std::map<std::string, std::string>& metadata, uint64_t room_bytes);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_SAFETENSORS_HEADER_H_
