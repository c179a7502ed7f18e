// Types of the real-valued elements that quantd reads and writes.
//
// In memory, as on the wire, elements are little-endian and need no alignment.

#ifndef QUANTD_CORE_TYPES_ELEMENT_TYPE_H_
#define QUANTD_CORE_TYPES_ELEMENT_TYPE_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace quantd::core {

// The values are those of quantd.v1.ElementType.
enum class ElementType : int {
  kFloat32 = 1,
  kFloat16 = 2,
  kBfloat16 = 3,
  kFloat64 = 4,
};

// Size of an element in bytes: 2, 4 or 8.
constexpr int64_t ElementSizeBytes(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return 4;
    case ElementType::kFloat64:
      return 8;
    case ElementType::kFloat16:
    case ElementType::kBfloat16:
      return 2;
  }
  return 0;
}

// "float32", "float16", "bfloat16" or "float64".
absl::string_view ElementTypeName(ElementType type);

}  // namespace quantd::core

#endif  // QUANTD_CORE_TYPES_ELEMENT_TYPE_H_
