// The numbers that the bits of a float16 stand for. Needs no library.

#ifndef QUANTD_CLIENT_FILES_HALF_H_
#define QUANTD_CLIENT_FILES_HALF_H_

#include <cstdint>

#include "absl/base/casts.h"

namespace quantd::files {

// A NaN keeps its bits, and is quiet.
inline float HalfValue(uint16_t bits) {
  // The exponent is 112 too small, which a power of two makes good, also of
  // subnormal numbers; that of infinities and NaN is not.
  constexpr uint32_t kInfinity = 0x0F800000;
  const uint32_t magnitude = (bits & 0x7FFFu) << 13;
  const uint32_t scaled =
      absl::bit_cast<uint32_t>(absl::bit_cast<float>(magnitude) * 0x1p112F);
  const uint32_t quiet = magnitude > kInfinity ? 0x400000 : 0;
  const uint32_t wide =
      magnitude < kInfinity ? scaled : magnitude | 0x7F800000 | quiet;
  return absl::bit_cast<float>(wide | (bits & 0x8000u) << 16);
}

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_HALF_H_
