// How scales are stored.

#ifndef QUANTD_CORE_FORMATS_SCALE_TYPE_H_
#define QUANTD_CORE_FORMATS_SCALE_TYPE_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace quantd::core {

// The values are those of quantd.v1.ScaleType.
enum class ScaleType : int {
  kDefault = 0,  // what the format prescribes, otherwise kFloat32
  kFloat32 = 1,
  kFloat16 = 2,
  kBfloat16 = 3,
  kE8m0 = 4,     // 2^(byte - 127), 0xFF is NaN
  kE4m3 = 5,     // value of an E4M3FN byte, under outer scales
  kInteger = 6,  // 1 to kMaxIntegerScale, under outer scales
};

constexpr int kMaxIntegerScale = 128;
constexpr uint8_t kE8m0Nan = 0xFF;

// The scale is kept as one byte, and follows from it.
constexpr bool HasScaleCodes(ScaleType type) {
  return type == ScaleType::kE8m0 || type == ScaleType::kE4m3 ||
         type == ScaleType::kInteger;
}

// The byte is multiplied by an outer float32 scale.
constexpr bool HasOuterScales(ScaleType type) {
  return type == ScaleType::kE4m3 || type == ScaleType::kInteger;
}

// Name as users write it, and as quantd.v1.ScaleType has it after
// "SCALE_TYPE_".
constexpr absl::string_view ScaleTypeName(ScaleType type) {
  switch (type) {
    case ScaleType::kDefault:
      return "UNSPECIFIED";
    case ScaleType::kFloat32:
      return "FLOAT32";
    case ScaleType::kFloat16:
      return "FLOAT16";
    case ScaleType::kBfloat16:
      return "BFLOAT16";
    case ScaleType::kE8m0:
      return "E8M0";
    case ScaleType::kE4m3:
      return "E4M3";
    case ScaleType::kInteger:
      return "INTEGER";
  }
  return "UNKNOWN";
}

// Size in bytes of a stored scale.
constexpr int64_t ScaleSizeBytes(ScaleType type) {
  switch (type) {
    case ScaleType::kDefault:
    case ScaleType::kFloat32:
      return 4;
    case ScaleType::kFloat16:
    case ScaleType::kBfloat16:
      return 2;
    case ScaleType::kE8m0:
    case ScaleType::kE4m3:
    case ScaleType::kInteger:
      return 1;
  }
  return 0;
}

}  // namespace quantd::core

#endif  // QUANTD_CORE_FORMATS_SCALE_TYPE_H_
