// Element types of tensor files.

#ifndef QUANTD_CLIENT_FILES_DTYPE_H_
#define QUANTD_CLIENT_FILES_DTYPE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace quantd::files {

enum class Dtype {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kF64,
  kI64,
  kU64,
  // Two float32.
  kC64,
  // Elements of 4 and 6 bits without gaps, the first one in the lowest bits.
  kF4,
  kF6E2M3,
  kF6E3M2,
};

// Size of an element: 1, 2, 4 or 8. Those below a byte count as 1.
int64_t DtypeSizeBytes(Dtype dtype);

// True if scales of that type may be powers of two: byte b is 2^(b - 127).
bool IsPowerScale(Dtype dtype);

// Name that safetensors uses, e.g. "BF16", and back.
absl::string_view DtypeName(Dtype dtype);
std::optional<Dtype> ParseDtype(absl::string_view name);

// Size in bytes of a tensor; nothing for a negative dimension, when a product
// does not fit in 63 bits, or when the elements fill no whole bytes.
std::optional<int64_t> TensorSizeBytes(Dtype dtype,
                                       absl::Span<const int64_t> shape);

// The value of two bytes of kF16. A NaN keeps its bits, and is quiet.
float ReadHalf(const uint8_t* bytes);

constexpr float kMostHalf = 65504;
// The bits of the nearest kF16; of two, the even one.
// Requires: finite, at most kMostHalf in magnitude.
uint16_t NearestHalf(float value);

// Elements of kF16, kBF16, kF32 or kF64 as `to`, kF32 or kF64, which holds them
// exactly.
// Requires: `data` are whole elements, and `to` is not narrower.
std::vector<uint8_t> Widen(Dtype from, absl::Span<const uint8_t> data,
                           Dtype to);

// How many elements of kF16, kBF16, kF32 or kF64 are infinite.
// Requires: `data` are whole elements.
uint64_t CountInfinities(Dtype dtype, absl::Span<const uint8_t> data);
// The largest number of such a type.
double LargestNumber(Dtype dtype);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_DTYPE_H_
