// Error-compensated rounding on one thread: the contract between
// compensated_rounding.cc, compensation_factor.cc and their kernels, and the
// scalar definitions.

#ifndef QUANTD_CORE_QUANTIZE_COMPENSATED_ROUNDING_KERNEL_H_
#define QUANTD_CORE_QUANTIZE_COMPENSATED_ROUNDING_KERNEL_H_

#include <cstdint>

#include "core/parallel/stop_token.h"
#include "core/quantize/compensation_factor.h"
#include "core/quantize/quantize.h"
#include "core/quantize/quantize_kernel.h"

namespace quantd::core {

// Columns of U, or rows of Cholesky's factor, that are computed together.
constexpr int64_t kPanelRows = 8;
// Lanes that they are computed for together: three vectors of the widest
// target.
template <typename T>
constexpr int64_t kPanelWidth = 192 / static_cast<int64_t>(sizeof(T));

// Floats before a panel of a block; panel p has rows [0, (p + 1) * kPanelRows)
// of U.
constexpr int64_t PanelOffset(int64_t panel) {
  return kPanelRows * kPanelRows * panel * (panel + 1) / 2;
}
constexpr int64_t PanelCount(int64_t columns) {
  return (columns + kPanelRows - 1) / kPanelRows;
}

// A symmetric matrix, of which only elements [j][i] with j <= i are looked at.
// What is below may be overwritten.
struct UpperTriangle {
  double* row(int64_t j) const { return data + j * stride; }

  double* data;
  int64_t size;
  int64_t stride;
};

// Replaces A by R with R^T R = A, in place:
//
//   R_ji = (A_ji - sum over k < j of R_kj R_ki) / R_jj
//
// and R_jj is the root of what is in the brackets. Sums are chains of fused
// multiply-adds in the order of k. Returns the first j whose bracket is not
// above least_pivot[j], or A's size. Ends early when stopped.
int64_t CholeskyScalar(const UpperTriangle& a, const double* least_pivot,
                       StopToken stop);

// The arguments of QuantizeCompensated, less the threads.
struct CompensatedRange {
  int64_t rows() const { return range.count / factor.columns(); }

  const CompensationFactor& factor;
  // Range of whole rows.
  const QuantizeRange& range;
  // [columns] scale index of a column above that of the first in its row.
  const int64_t* column_scale;
  // [rows] 0 at first.
  double* output_errors;
  StopToken stop;
};

// The code of one element, and the number that it stands for.
template <typename T>
struct RoundedElement {
  int32_t code;
  T value;
};

// Rounds the element `index` of the tensor, and counts it. T is that in which
// the range computes.
template <typename T>
RoundedElement<T> RoundElement(const QuantizeRange& range, int64_t index, T x,
                               QuantizeCounts* counts);

// The truth: one row and one column after the other, as compensated_rounding.h
// says it. Ends early when stopped.
void QuantizeCompensatedScalar(const CompensatedRange& rows,
                               QuantizeCounts* counts);

}  // namespace quantd::core

#endif  // QUANTD_CORE_QUANTIZE_COMPENSATED_ROUNDING_KERNEL_H_
