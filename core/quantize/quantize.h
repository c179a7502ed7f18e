// Reals to codes.

#ifndef QUANTD_CORE_QUANTIZE_QUANTIZE_H_
#define QUANTD_CORE_QUANTIZE_QUANTIZE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "core/parallel/thread_pool.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"

namespace quantd::core {

// The values are those of quantd.v1.NanPolicy.
enum class NanPolicy : int {
  kDefault = 0,
  kZeroPoint = 1,
  kReject = 2,
  kQmin = 3
};

// Counts over quantized elements.
struct QuantizeCounts {
  int64_t total = 0;
  int64_t clipped_low = 0;   // below the range, -Inf among them
  int64_t clipped_high = 0;  // above the range, +Inf among them
  int64_t nan = 0;
  int64_t positive_infinity = 0;
  int64_t negative_infinity = 0;

  void Merge(const QuantizeCounts& other);
};

// out[i] = clamp(rint(in[i] / scale) + zero_point, qmin, qmax), IEEE division,
// ties to even, clamped before the cast to integer. float64 elements are
// divided in float64, the others in float32. +Inf gives qmax, -Inf qmin, NaN
// clamp(zero_point) or as the policy says. An element is clipped when
// rint(in[i] / scale) + zero_point lies outside [qmin, qmax].
//
// `first`  index of the first element in the tensor; for packed formats a
//          multiple of the format's codes_per_byte.
// `count`  elements; for packed formats a multiple of codes_per_byte or up to
//          the end of the tensor, where the last byte is zero-padded.
// `in`     [count] elements of `type`, any alignment.
// `out`    [FormatInfo::SizeBytes(count)], must not overlap `in`.
// `pool`   spreads a large range over its threads; may be null.
// Requires: a valid encoding that fits `layout`.
// Errors: NON_FINITE_REJECTED, naming the smallest index of a NaN or infinity
// in the range, only with NanPolicy::kReject; `out` is then unspecified.
// Thread-safe; the same bytes on every SIMD target.
absl::Status Quantize(const Encoding& encoding, const BlockLayout& layout,
                      ElementType type, NanPolicy nan_policy, int64_t first,
                      int64_t count, const uint8_t* in, uint8_t* out,
                      QuantizeCounts* counts, ThreadPool* pool);

}  // namespace quantd::core

#endif  // QUANTD_CORE_QUANTIZE_QUANTIZE_H_
