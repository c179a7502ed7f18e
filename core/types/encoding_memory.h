// The memory that an encoding takes.

#ifndef QUANTD_CORE_TYPES_ENCODING_MEMORY_H_
#define QUANTD_CORE_TYPES_ENCODING_MEMORY_H_

#include <cstdint>

#include "core/formats/scale_type.h"
#include "core/types/encoding.h"

namespace quantd::core {

// In bytes, the encoding itself included, without what the allocator adds.
inline int64_t MemoryBytes(const Encoding& encoding) {
  const auto bytes = [](const auto& values) {
    return static_cast<int64_t>(values.size() * sizeof(values[0]));
  };
  return static_cast<int64_t>(sizeof(Encoding)) + bytes(encoding.block_size) +
         bytes(encoding.scale) + bytes(encoding.zero_point) +
         bytes(encoding.real_zero_point) + bytes(encoding.scale_code) +
         bytes(encoding.outer_scale) + bytes(encoding.outer_block_size) +
         bytes(encoding.codebook) + bytes(encoding.scale_shape);
}

// Bytes that each scale of an encoding takes of MemoryBytes.
inline int64_t MemoryPerScale(ScaleType scale_type, bool has_zero_points) {
  return static_cast<int64_t>(sizeof(float) +
                              (has_zero_points ? sizeof(int32_t) : 0)) +
         (HasScaleCodes(scale_type) ? 1 : 0);
}

// Most that MemoryPerScale returns.
constexpr int64_t kMostMemoryPerScale =
    sizeof(float) + sizeof(int32_t) + sizeof(uint8_t);

}  // namespace quantd::core

#endif  // QUANTD_CORE_TYPES_ENCODING_MEMORY_H_
