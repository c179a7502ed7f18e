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
  if (format.storage_bits == 32) {
    for (int byte = 0; byte < 4; ++byte) {
      out[index * 4 + byte] = static_cast<uint8_t>(bits >> (8 * byte));
    }
  } else if (format.storage_bits == 16) {
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
  uint32_t bits = 0;
  if (format.storage_bits == 32) {
    for (int byte = 0; byte < 4; ++byte) {
      bits |= static_cast<uint32_t>(in[index * 4 + byte]) << (8 * byte);
    }
  } else if (format.storage_bits == 16) {
    bits = in[index * 2] | (static_cast<uint32_t>(in[index * 2 + 1]) << 8);
  } else if (format.storage_bits == 8) {
    bits = in[index];
  } else {
    const int64_t per_byte = format.codes_per_byte();
    const int shift = static_cast<int>(index % per_byte) * format.storage_bits;
    bits = (in[index / per_byte] >> shift) & ((1u << format.storage_bits) - 1);
  }
  if (!format.is_signed) return static_cast<int32_t>(bits);
  const int64_t sign = int64_t{1} << (format.storage_bits - 1);
  return static_cast<int32_t>((int64_t{bits} ^ sign) - sign);
}

}  // namespace quantd::core

#endif  // QUANTD_CORE_FORMATS_PACKING_H_
