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

// Treatment of NaN. The values are those of quantd.v1.NanPolicy.
enum class NanPolicy : int {
  // Integers: clamp(zero_point). Floats: NaN where the format has one, or else
  // +0. Codebooks: the entry nearest to 0.
  kDefault = 0,
  // Like the default, but +0 for all floats.
  kZeroPoint = 1,
  // The tensor fails, also for infinities.
  kReject = 2,
  // The lowest number: qmin, the negative of the largest float, entry 0.
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

// Integer formats:
//
//   out[i] = clamp(rint(in[i] / scale) + zero_point, qmin, qmax)
//
// IEEE division, ties to even, clamped before the cast to integer. +Inf gives
// qmax, -Inf qmin. An element is clipped when rint(in[i] / scale) + zero_point
// lies outside [qmin, qmax]. In float32 the ends of int32 are rounded before
// the quotient is compared with them; the code stays within the exact ones.
//
// With real zero points the sum is rounded instead of the quotient, and decides
// whether the element is clipped:
//
//   out[i] = clamp(rint(in[i] / scale + zero_point), qmin, qmax)
//
// Float formats and codebooks: out[i] is the code of in[i] / scale + 0 by
// codec.h; the sum, ONNX's zero point, makes +0 of -0.
// An element is clipped when the quotient rounds beyond the largest number of a
// float format, or lies outside of the codebook's first and last entry.
//
// float64 elements are divided in float64, the others in float32. NaN gives the
// code of the policy. Under a scale of NaN, no element is clipped, and all give
// the code of NaN. If the format has none, they give the code of 0.
//
// `first`  index of the first element in the tensor; for packed formats a
//          multiple of the format's codes_per_byte.
// `count`  elements; for packed formats a multiple of codes_per_byte or up to
//          the end of the tensor, where the last byte is zero-padded.
// `in`     [count] elements of `type`, any alignment.
// `out`    [FormatInfo::SizeBytes(count)], must not overlap `in`.
// `pool`   spreads a large range over its threads; may be null.
// Requires: a valid encoding that fits `layout`.
// Another process may change both meanwhile: `out`, the counts and the error
// are then undefined, and nothing else is. So no index may depend on a check of
// a value that is read again: it is masked or clamped where it is computed.
// Errors: NON_FINITE_REJECTED, naming the smallest index of a NaN or infinity
// in the range, only with NanPolicy::kReject; `out` is then unspecified.
// Thread-safe; the same bytes on every SIMD target.
absl::Status Quantize(const Encoding& encoding, const BlockLayout& layout,
                      ElementType type, NanPolicy nan_policy, int64_t first,
                      int64_t count, const uint8_t* in, uint8_t* out,
                      QuantizeCounts* counts, ThreadPool* pool);

}  // namespace quantd::core

#endif  // QUANTD_CORE_QUANTIZE_QUANTIZE_H_
