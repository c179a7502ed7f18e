// Conversions between the real-valued element types: the definitions that the
// SIMD versions in float_convert-inl.h equal bit for bit.

#ifndef QUANTD_CORE_TYPES_FLOAT_CONVERT_H_
#define QUANTD_CORE_TYPES_FLOAT_CONVERT_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/types/element_type.h"

namespace quantd::core {

// The type that an operation reads as and computes in: double for kFloat64,
// float for the others.
template <typename T>
constexpr bool kIsArithmeticType =
    std::is_same_v<T, float> || std::is_same_v<T, double>;

template <typename To, typename From>
inline To BitsAs(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename T>
inline T LoadUnaligned(const uint8_t* in) {
  T value;
  std::memcpy(&value, in, sizeof(value));
  return value;
}

template <typename T>
inline void StoreUnaligned(T value, uint8_t* out) {
  std::memcpy(out, &value, sizeof(value));
}

// Exact. A signalling NaN becomes quiet, as F16C has it.
inline float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t rest = half & 0x7FFF;
  uint32_t bits;
  if (rest > 0x7C00) {
    bits = 0x7FC00000 | (rest << 13);
  } else if (rest == 0x7C00) {
    bits = 0x7F800000;
  } else if (rest >= 0x0400) {
    bits = (rest << 13) + (uint32_t{127 - 15} << 23);
  } else {
    bits = BitsAs<uint32_t>(static_cast<float>(rest) * 0x1p-24f);
  }
  return BitsAs<float>(bits | sign);
}

// To nearest even, subnormals included; past the largest float16 infinity.
inline uint16_t FloatToHalf(float value) {
  const uint32_t bits = BitsAs<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t rest = bits & 0x7FFFFFFF;
  uint32_t half;
  if (rest > 0x7F800000) {
    half = 0x7E00 | ((rest >> 13) & 0x3FF);
  } else if (rest >= 0x47800000) {  // 2^16
    half = 0x7C00;
  } else if (rest >= 0x38800000) {  // 2^-14
    const uint32_t rebiased = rest - (uint32_t{127 - 15} << 23);
    // A carry out of the mantissa is the right exponent, up to infinity.
    half = (rebiased + 0xFFF + ((rebiased >> 13) & 1)) >> 13;
  } else {
    // The sum's last place is 2^-24, the unit of float16 subnormals.
    half =
        BitsAs<uint32_t>(BitsAs<float>(rest) + 0.5f) - BitsAs<uint32_t>(0.5f);
  }
  return static_cast<uint16_t>(half | sign);
}

// Exact.
inline float BfloatToFloat(uint16_t bfloat) {
  return BitsAs<float>(static_cast<uint32_t>(bfloat) << 16);
}

// To nearest even, subnormals included; past the largest bfloat16 infinity.
inline uint16_t FloatToBfloat(float value) {
  const uint32_t bits = BitsAs<uint32_t>(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) {
    return static_cast<uint16_t>((bits >> 16) | 0x40);
  }
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Element `index` of `in`. T is float, or double for kFloat64.
template <typename T>
inline T LoadElement(ElementType type, const uint8_t* in, int64_t index) {
  static_assert(kIsArithmeticType<T>);
  if constexpr (std::is_same_v<T, double>) {
    return LoadUnaligned<double>(in + index * 8);
  } else {
    switch (type) {
      case ElementType::kFloat16:
        return HalfToFloat(LoadUnaligned<uint16_t>(in + index * 2));
      case ElementType::kBfloat16:
        return BfloatToFloat(LoadUnaligned<uint16_t>(in + index * 2));
      default:
        return LoadUnaligned<float>(in + index * 4);
    }
  }
}

// Rounds `value` to the type and stores it as element `index` of `out`.
template <typename T>
inline void StoreElement(ElementType type, T value, uint8_t* out,
                         int64_t index) {
  static_assert(kIsArithmeticType<T>);
  if constexpr (std::is_same_v<T, double>) {
    StoreUnaligned(value, out + index * 8);
  } else {
    switch (type) {
      case ElementType::kFloat16:
        StoreUnaligned(FloatToHalf(value), out + index * 2);
        return;
      case ElementType::kBfloat16:
        StoreUnaligned(FloatToBfloat(value), out + index * 2);
        return;
      default:
        StoreUnaligned(value, out + index * 4);
    }
  }
}

}  // namespace quantd::core

#endif  // QUANTD_CORE_TYPES_FLOAT_CONVERT_H_
