#include "client/files/dtype.h"

#include <cstdint>
#include <limits>
#include <optional>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace quantd::files {
namespace {

struct Row {
  Dtype dtype;
  absl::string_view name;
  int64_t size_bytes;
};

// In the order of the enum.
constexpr Row kRows[] = {
    {Dtype::kBool, "BOOL", 1},      {Dtype::kU8, "U8", 1},
    {Dtype::kI8, "I8", 1},          {Dtype::kF8E5M2, "F8_E5M2", 1},
    {Dtype::kF8E4M3, "F8_E4M3", 1}, {Dtype::kI16, "I16", 2},
    {Dtype::kU16, "U16", 2},        {Dtype::kF16, "F16", 2},
    {Dtype::kBF16, "BF16", 2},      {Dtype::kI32, "I32", 4},
    {Dtype::kU32, "U32", 4},        {Dtype::kF32, "F32", 4},
    {Dtype::kF64, "F64", 8},        {Dtype::kI64, "I64", 8},
    {Dtype::kU64, "U64", 8},
};

}  // namespace

int64_t DtypeSizeBytes(Dtype dtype) {
  return kRows[static_cast<int>(dtype)].size_bytes;
}

absl::string_view DtypeName(Dtype dtype) {
  return kRows[static_cast<int>(dtype)].name;
}

std::optional<Dtype> ParseDtype(absl::string_view name) {
  for (const Row& row : kRows) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

std::optional<int64_t> TensorSizeBytes(Dtype dtype,
                                       absl::Span<const int64_t> shape) {
  int64_t size = DtypeSizeBytes(dtype);
  bool is_empty = false;
  for (const int64_t dimension : shape) {
    if (dimension < 0) return std::nullopt;
    if (dimension == 0) {
      is_empty = true;
      continue;
    }
    if (size > std::numeric_limits<int64_t>::max() / dimension) {
      return std::nullopt;
    }
    size *= dimension;
  }
  return is_empty ? 0 : size;
}

}  // namespace quantd::files
