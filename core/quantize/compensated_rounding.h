// Reals to codes, where later columns make up for the errors of earlier ones.

#ifndef QUANTD_CORE_QUANTIZE_COMPENSATED_ROUNDING_H_
#define QUANTD_CORE_QUANTIZE_COMPENSATED_ROUNDING_H_

#include <cstdint>

#include "absl/status/status.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/quantize/compensation_factor.h"
#include "core/quantize/quantize.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"

namespace quantd::core {

// Rounds a weight column by column. Before a column is rounded, it is corrected
// for the errors of those before it, so that the outputs of the layer change
// little. For each row by itself, in the order of the factor's columns:
//
//   x_k = w_k + sum over j < k of (w_j - q_j) U_jk
//   q_k = the number that the code of x_k stands for
//
// CompensationFactor says what U is, and where the formulas come from.
//
// x_k is a chain of fused multiply-adds that begins with w_k and takes the
// columns in order. It is float64 for float64 elements, and float32 for the
// others: beside float64 that adds 0.2% to the output error with 16 bits, and
// nothing with 8. Codes, and what is clipped, are those of Quantize for x_k as
// an element of that type. q_k is that of Dequantize to it.
//
// An error w_j - q_j that is not finite counts as 0: a NaN or infinity gets the
// code that Quantize gives it, and changes no other element. Where x_k would
// not be finite it is w_k.
//
// The cost of this at the output comes with it, for H without the damping h:
//
//   e G e^T = sum over k of D_k (x_k - q_k)^2 - h (w_k - q_k)^2
//
// in float64, in the order of the columns; infinite or NaN where squares are
// beyond that.
//
// A tensor of any rank is a matrix: its columns are the elements of all
// dimensions but the first ones. It makes no difference how rows are spread
// over calls.
//
// `factor`  its columns are the product of the last dimensions of the layout's
//           shape.
// `first_row`, `rows`  rows of the tensor. They begin with a whole byte of
//           codes, and end with one or with the tensor. A task takes 24 rows of
//           float64 elements, or 48 of others: those are best in a call for
//           each thread.
// `in`      [rows, columns] elements of `type`, any alignment.
// `out`     [FormatInfo::SizeBytes(rows * columns)], must not overlap `in`.
// `output_errors`  [rows] gets e G e^T for e = w - q of each row.
// `pool`    spreads tasks over its threads; may be null.
// Requires: a valid encoding that fits `layout` and has all scales of the rows.
// Another process may change both meanwhile, as in quantize.h.
// Holds CompensatedTaskBytes for each thread, and 8 bytes a column.
// Errors: NON_FINITE_REJECTED as of Quantize. CANCELLED. `out` and the counts
// are then unspecified.
// Thread-safe; the same bytes on every SIMD target.
absl::Status QuantizeCompensated(const CompensationFactor& factor,
                                 const Encoding& encoding,
                                 const BlockLayout& layout, ElementType type,
                                 NanPolicy nan_policy, int64_t first_row,
                                 int64_t rows, const uint8_t* in, uint8_t* out,
                                 double* output_errors, QuantizeCounts* counts,
                                 ThreadPool* pool,
                                 StopToken stop = StopToken());

// Bytes that a task holds while it runs. `largest_block`  columns of a factor's
// largest block.
int64_t CompensatedTaskBytes(int64_t columns, int64_t largest_block);

}  // namespace quantd::core

#endif  // QUANTD_CORE_QUANTIZE_COMPENSATED_ROUNDING_H_
