#include "core/types/element_type.h"

#include "absl/strings/string_view.h"

namespace quantd::core {

absl::string_view ElementTypeName(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return "float32";
    case ElementType::kFloat16:
      return "float16";
    case ElementType::kBfloat16:
      return "bfloat16";
    case ElementType::kFloat64:
      return "float64";
  }
  return "unknown";
}

}  // namespace quantd::core
