// Makes blocks of ggml's types. Those of 32 elements have a float16 scale d,
// and some a float16 minimum m:
//
//   q4_0, q5_0, q8_0  x' = d * code, codes of two's complement
//   q4_1, q5_1        x' = d * code + m, codes from 0 on
//
// In others scales are integers under float16 numbers of a super-block of 256
// elements:
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

struct GgufEncoder {
  // The largest magnitude that it takes: its scale and minimum fit in float16
  // whatever else a block has.
  float most_element;
  // Writes one block: searches for the scales and minima with the least squared
  // error, that of each element multiplied by its weight. The bytes depend on
  // these alone: sums have a fixed order. Thread-safe.
  // `elements`  [type.block_elements], finite, at most most_element in
  //             magnitude.
  // `weights`   [type.block_elements], above 0, at most 1.
  void (*encode)(const float* elements, const float* weights, uint8_t* block);
};

// Null for a type that has none.
const GgufEncoder* FindGgufEncoder(const GgufType& type);

// Puts 32 codes of 4, 5 or 8 bits as blocks of 32 elements have them. The bytes
// must be 0.
void PutGgufCodes(const int* codes, int bits, uint8_t* bytes);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_GGUF_ENCODERS_H_
