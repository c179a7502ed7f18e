#include "core/calibrate/importance.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/calibrate/block_search.h"
#include "core/calibrate/encoding_spec.h"
#include "core/errors.h"
#include "core/types/block_layout.h"

namespace quantd::core {

absl::StatusOr<Importance> Importance::Create(
    absl::Span<const int64_t> shape, int64_t axis,
    absl::Span<const double> weights) {
  const auto rank = static_cast<int64_t>(shape.size());
  if (axis < -rank || axis >= rank) {
    return MethodInvalidError(absl::StrCat("the axis of the importance is ",
                                           axis, ", expected one of a tensor ",
                                           "of rank ", rank));
  }
  const auto at = static_cast<size_t>(axis < 0 ? axis + rank : axis);
  const auto count = static_cast<int64_t>(weights.size());
  // The row of a matrix is its last axis, and a vector has none.
  const bool takes_row = rank > 2 && at + 1 == shape.size();
  if (count != shape[at] && !(takes_row && count == RowSize(shape))) {
    return MethodInvalidError(
        absl::StrCat(count, " weights of importance, expected ", shape[at],
                     ", one for each index of axis ", at,
                     takes_row ? absl::StrCat(", or ", RowSize(shape),
                                              ", one for each element of a row")
                               : ""));
  }
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(weights[i]) || weights[i] < 0) {
      return MethodInvalidError(
          absl::StrCat("weight ", i, " of the importance is ", weights[i],
                       ", expected a finite number of at least 0"));
    }
  }
  int64_t stride = 1;
  for (size_t i = at + 1; i < shape.size(); ++i) stride *= shape[i];
  return Importance(stride,
                    std::vector<double>(weights.begin(), weights.end()));
}

absl::StatusOr<Importance> Importance::Create(absl::Span<const int64_t> shape,
                                              int64_t axis,
                                              absl::Span<const float> weights) {
  return Create(shape, axis,
                std::vector<double>(weights.begin(), weights.end()));
}

int64_t Importance::RowSize(absl::Span<const int64_t> shape) {
  int64_t size = 1;
  for (size_t i = 1; i < shape.size(); ++i) size *= shape[i];
  return size;
}

void Importance::Copy(int64_t first, int64_t count, double* out) const {
  const auto size = static_cast<int64_t>(weights_.size());
  int64_t index = first / stride_ % size;
  int64_t left = stride_ - first % stride_;
  double* const end = out + count;
  while (out < end) {
    if (stride_ == 1) {
      const int64_t run = std::min<int64_t>(size - index, end - out);
      out = std::copy_n(weights_.data() + index, run, out);
      index = 0;
      continue;
    }
    const int64_t run = std::min<int64_t>(left, end - out);
    out = std::fill_n(out, run, weights_[static_cast<size_t>(index)]);
    left = stride_;
    if (++index == size) index = 0;
  }
}

void Importance::CopyBlock(const BlockLayout& layout, int64_t scale_index,
                           double* out) const {
  if (layout.element_count() == 0) return;
  BlockLayout::BlockCursor cursor(layout, scale_index);
  int64_t begin = 0, size = 0;
  while (cursor.Next(&begin, &size)) {
    Copy(begin, size, out);
    out += size;
  }
}

absl::Status CheckTakesImportance(const EncodingSpec& spec,
                                  const BlockLayout& layout) {
  if (spec.method != CalibrationMethod::kMse &&
      spec.method != CalibrationMethod::kSqnr &&
      spec.method != CalibrationMethod::kBestOf) {
    return MethodInvalidError(
        "importance needs a method that compares errors: mse, sqnr or best-of");
  }
  if (layout.largest_block() > kMaxDirectElements) {
    return MethodInvalidError(absl::StrCat(
        "the largest block has ", layout.largest_block(),
        " elements, expected at most ", kMaxDirectElements,
        " with importance; take a scale per channel or for each group"));
  }
  return absl::OkStatus();
}

}  // namespace quantd::core
