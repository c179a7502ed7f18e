// Codes to reals.

#ifndef QUANTD_CORE_DEQUANTIZE_DEQUANTIZE_H_
#define QUANTD_CORE_DEQUANTIZE_DEQUANTIZE_H_

#include <cstdint>

#include "core/parallel/thread_pool.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"

namespace quantd::core {

// out[i] = value(in[i]) * scale in float64 for float64 outputs, in float32 for
// the others, then rounded to nearest even to float16 or bfloat16.
//
//   integers   value(q) = q - zero_point, also of codes outside [qmin, qmax].
//              For int32, and for a real zero point, the difference is rounded
//              to float32 first
//   floats     value(q) by codec.h; bits past those of a code are ignored
//   codebooks  value(q) = codebook[q], NaN past the last entry
//
// A scale of NaN makes every element of its block NaN.
//
// `first`  index of the first element in the tensor; for packed formats a
//          multiple of the format's codes_per_byte.
// `count`  elements; for packed formats a multiple of codes_per_byte or up to
//          the end of the tensor.
// `in`     [FormatInfo::SizeBytes(count)] codes, any alignment.
// `out`    [count] elements of `type`, any alignment; must not overlap `in`.
// `pool`   spreads a large range over its threads; may be null.
// Requires: a valid encoding that fits `layout`.
// Another process may change both meanwhile, as in quantize.h.
// Thread-safe; the same bytes on every SIMD target.
void Dequantize(const Encoding& encoding, const BlockLayout& layout,
                ElementType type, int64_t first, int64_t count,
                const uint8_t* in, uint8_t* out, ThreadPool* pool);

}  // namespace quantd::core

#endif  // QUANTD_CORE_DEQUANTIZE_DEQUANTIZE_H_
