// Makes blocks of those types of ggml whose scales are integers under float16
// numbers of a super-block of 256 elements:
//
//   q4_K, q5_K  8 blocks of 32. scale and minimum are 0 to 63; d, dmin float16
//               x' = (d * scale) * code - dmin * minimum
//   q6_K        16 blocks of 16. scale is -128 to 127; d float16
//               x' = (d * scale) * code, codes -32 to 31
//
// x' is what the decoders of gguf_types.h compute, and so what ggml computes.

#ifndef QUANTD_CLIENT_FILES_GGUF_ENCODERS_H_
#define QUANTD_CLIENT_FILES_GGUF_ENCODERS_H_

#include <cstdint>

#include "client/files/gguf_types.h"

namespace quantd::files {

// The largest magnitude that encoders take: its scale fits in float16 whatever
// else a block has.
constexpr float kMostGgufElement = 0x1p21F;

// Writes one block: searches for the scales and minima with the least squared
// error. The bytes depend on the elements alone: sums have a fixed order.
// Requires: type.block_elements elements, finite, at most kMostGgufElement in
// magnitude. Thread-safe.
using GgufEncoder = void (*)(const float* elements, uint8_t* block);

// Null for a type that has none.
GgufEncoder FindGgufEncoder(const GgufType& type);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_GGUF_ENCODERS_H_
