// How much the squared error of each element counts in a search.

#ifndef QUANTD_CORE_CALIBRATE_IMPORTANCE_H_
#define QUANTD_CORE_CALIBRATE_IMPORTANCE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/calibrate/encoding_spec.h"
#include "core/types/block_layout.h"

namespace quantd::core {

// A weight for each index of one axis of a tensor: of a matrix that is
// multiplied with inputs, for each column the mean square of its input. Or a
// weight for each element of a row, which is all axes but the first: of a
// convolution, whose inputs are unfolded. Only the ratios of weights within a
// block count. Immutable, thread-safe.
class Importance {
 public:
  // `axis`     negative counts from the end.
  // `weights`  [shape[axis]], or of the last axis [RowSize(shape)]; of at least
  //            0, finite.
  // Errors: METHOD_INVALID.
  static absl::StatusOr<Importance> Create(absl::Span<const int64_t> shape,
                                           int64_t axis,
                                           absl::Span<const double> weights);
  static absl::StatusOr<Importance> Create(absl::Span<const int64_t> shape,
                                           int64_t axis,
                                           absl::Span<const float> weights);

  // Elements of a row: of all axes but the first.
  static int64_t RowSize(absl::Span<const int64_t> shape);

  // The weights of elements [first, first + count) of the tensor, in order.
  void Copy(int64_t first, int64_t count, double* out) const;
  // Copies the weights of one scale index.
  // `layout`  of the tensor.
  // `out`     has room for layout.largest_block().
  void CopyBlock(const BlockLayout& layout, int64_t scale_index,
                 double* out) const;

 private:
  Importance(int64_t stride, std::vector<double> weights)
      : stride_(stride), weights_(std::move(weights)) {}

  // Elements from one weight to the next.
  int64_t stride_;
  std::vector<double> weights_;
};

// Errors: METHOD_INVALID unless the method is mse, sqnr or best-of, and no
// block has more than kMaxDirectElements elements. Histograms do not tell which
// element comes from where, so larger blocks cannot be weighed.
// `spec`  resolved for the layout's shape.
absl::Status CheckTakesImportance(const EncodingSpec& spec,
                                  const BlockLayout& layout);

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_IMPORTANCE_H_
