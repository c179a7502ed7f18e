// Codes to and from bytes, one at a time: the definition that the SIMD versions
// in packing-inl.h equal byte for byte.

#ifndef QUANTD_CORE_FORMATS_PACKING_H_
#define QUANTD_CORE_FORMATS_PACKING_H_

#include <cstdint>

#include "core/formats/number_format.h"

namespace quantd::core {

// Stores code `index`. Packed formats: the byte's other bits are kept, so that
// the bytes must start out as zero.
inline void StoreCode(const FormatInfo& format, int32_t code, int64_t index,
                      uint8_t* out) {
  const uint32_t bits = static_cast<uint32_t>(code);
  if (format.storage_bits == 16) {
    out[index * 2] = static_cast<uint8_t>(bits);
    out[index * 2 + 1] = static_cast<uint8_t>(bits >> 8);
  } else if (format.storage_bits == 8) {
    out[index] = static_cast<uint8_t>(bits);
  } else {
    const int64_t per_byte = format.codes_per_byte();
    const int shift = static_cast<int>(index % per_byte) * format.storage_bits;
    const uint32_t mask = (1u << format.storage_bits) - 1;
    out[index / per_byte] |= static_cast<uint8_t>((bits & mask) << shift);
  }
}

// Loads code `index`.
inline int32_t LoadCode(const FormatInfo& format, const uint8_t* in,
                        int64_t index) {
  uint32_t bits;
  if (format.storage_bits == 16) {
    bits = in[index * 2] | (static_cast<uint32_t>(in[index * 2 + 1]) << 8);
  } else if (format.storage_bits == 8) {
    bits = in[index];
  } else {
    const int64_t per_byte = format.codes_per_byte();
    const int shift = static_cast<int>(index % per_byte) * format.storage_bits;
    bits = (in[index / per_byte] >> shift) & ((1u << format.storage_bits) - 1);
  }
  if (!format.is_signed) return static_cast<int32_t>(bits);
  const uint32_t sign = 1u << (format.storage_bits - 1);
  return static_cast<int32_t>(bits ^ sign) - static_cast<int32_t>(sign);
}

}  // namespace quantd::core

#endif  // QUANTD_CORE_FORMATS_PACKING_H_
