// Quantizing one range on one thread: the contract between quantize.cc and its
// kernels, and their scalar definition.

#ifndef QUANTD_CORE_QUANTIZE_QUANTIZE_KERNEL_H_
#define QUANTD_CORE_QUANTIZE_QUANTIZE_KERNEL_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/formats/number_format.h"
#include "core/quantize/quantize.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"

namespace quantd::core {

// The arguments of Quantize, less the threads.
struct QuantizeRange {
  const Encoding& encoding;
  const FormatInfo& format;
  const BlockLayout& layout;
  ElementType type;
  NanPolicy nan_policy;
  int64_t first;
  int64_t count;
  const uint8_t* in;
  uint8_t* out;
  // Part of so much that caches do not hold it.
  bool is_large = false;

  int32_t zero_point(int64_t scale_index) const {
    return encoding.zero_point.empty() ? 0 : encoding.zero_point[scale_index];
  }
  // The code of a NaN under a scale that is a number, as the policy says.
  int32_t NanCode(int32_t zero_point) const;
};

// A part of a range, and where its codes go.
struct RangePart {
  // Index of the first element in the range, not in the tensor.
  int64_t begin;
  int64_t count;
  uint8_t* out;
  // Bits that a code takes at `out`: those of the format, or 8 where the caller
  // packs them.
  int bits;

  // [offset, offset + n) of it; `offset` begins a byte.
  RangePart Sub(int64_t offset, int64_t n) const {
    return {begin + offset, n, out + offset * bits / 8, bits};
  }
};

// The codes and counts of a part, by dividing by its scales. Of any type, scale
// and layout, and slower than by reciprocals.
void QuantizeByDivision(const QuantizeRange& range, const RangePart& part,
                        QuantizeCounts* counts);

// The truth: one element after the other, as quantize.h says it. The policy
// kReject is left to the caller, who sees the counts.
void QuantizeScalar(const QuantizeRange& range, QuantizeCounts* counts);

// Adds what tasks counted, in their order.
// `range_of(task)`  what the task quantized.
// Errors: NON_FINITE_REJECTED with kReject, naming the first element that is
// NaN or infinite.
absl::Status AddTaskCounts(absl::Span<const QuantizeCounts> tasks,
                           absl::FunctionRef<QuantizeRange(int64_t)> range_of,
                           NanPolicy nan_policy, QuantizeCounts* counts);

}  // namespace quantd::core

#endif  // QUANTD_CORE_QUANTIZE_QUANTIZE_KERNEL_H_
