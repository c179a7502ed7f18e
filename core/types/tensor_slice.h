// A part of a tensor that somebody else has the rest of.

#ifndef QUANTD_CORE_TYPES_TENSOR_SLICE_H_
#define QUANTD_CORE_TYPES_TENSOR_SLICE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"

namespace quantd::core {

// The elements with indices [offset[d], offset[d] + shape[d]) in each dimension
// d of a tensor of `global_shape`, which is the whole. Plain value.
struct TensorSlice {
  std::vector<int64_t> global_shape;
  std::vector<int64_t> offset;
  std::vector<int64_t> shape;

  // True if the slice has all of that dimension.
  bool HasWhole(size_t dimension) const {
    return shape[dimension] == global_shape[dimension];
  }

  // Calls `visit(int64_t global_first, int64_t count)` for the ranges of the
  // whole that elements [first, first + count) of the slice are, in order.
  // Requires: a valid slice; the range lies within it.
  template <typename Visitor>
  void ForEachRange(int64_t first, int64_t count, Visitor&& visit) const;
};

// Errors: SHAPE_INVALID for another rank, or a slice that is not within the
// whole, or what ElementCount refuses.
absl::Status CheckSlice(const TensorSlice& slice);

// Checks that no block of the whole lies in the slice only in part, except
// along dimensions of which every block has all.
// Requires: a valid slice; a block size that is valid for the whole.
// Errors: BLOCK_SIZE_INVALID.
absl::Status CheckCutsNoBlock(const TensorSlice& slice,
                              absl::Span<const int64_t> block_size);

// Like CheckCutsNoBlock, but blocks along those other dimensions have to lie in
// the slice as well.
// Errors: BLOCK_SIZE_INVALID.
absl::Status CheckHasWholeBlocks(const TensorSlice& slice,
                                 absl::Span<const int64_t> block_size);

// Blocks as elements: those of the slice among those of the whole.
// Requires: CheckCutsNoBlock.
TensorSlice BlocksOf(const TensorSlice& slice,
                     absl::Span<const int64_t> block_size);

// Returns the values of the slice's blocks, out of those that the whole has for
// each of its blocks in row-major order; none out of none.
// Requires: CheckCutsNoBlock; as many values as blocks.
template <typename T>
std::vector<T> CutToSlice(const TensorSlice& slice,
                          absl::Span<const int64_t> block_size,
                          absl::Span<const T> values);

// The encoding of a slice: scales, zero points and outer scales are those of
// its elements, so that its codes are those that the whole has there.
// Requires: `encoding` is valid and fits the whole.
// Errors: BLOCK_SIZE_INVALID of CheckCutsNoBlock, of its blocks or its outer
// blocks.
absl::StatusOr<Encoding> CutToSlice(const TensorSlice& slice,
                                    const Encoding& encoding);

template <typename Visitor>
void TensorSlice::ForEachRange(int64_t first, int64_t count,
                               Visitor&& visit) const {
  if (count == 0) return;
  // A row is along the last dimension of which a part is missing: of those
  // behind it all elements follow each other.
  size_t cut = shape.size();
  while (cut > 0 && HasWhole(cut - 1)) --cut;
  int64_t inner = 1;
  for (size_t d = cut; d < shape.size(); ++d) inner *= shape[d];
  if (cut == 0) {
    visit(first, count);
    return;
  }
  const int64_t row_size = shape[cut - 1] * inner;
  const int64_t end = first + count;
  // Position of the row, by dimension.
  absl::InlinedVector<int64_t, 8> at(cut - 1);
  int64_t rest = first / row_size;
  for (size_t d = cut - 1; d-- > 0;) {
    at[d] = rest % shape[d];
    rest /= shape[d];
  }
  for (int64_t begin = first; begin < end;) {
    int64_t row = 0;
    for (size_t d = 0; d + 1 < cut; ++d) {
      row = row * global_shape[d] + offset[d] + at[d];
    }
    const int64_t global_row =
        (row * global_shape[cut - 1] + offset[cut - 1]) * inner;
    const int64_t in_row = begin % row_size;
    const int64_t length = std::min(row_size - in_row, end - begin);
    visit(global_row + in_row, length);
    begin += length;
    for (size_t d = cut - 1; d-- > 0;) {
      if (++at[d] < shape[d]) break;
      at[d] = 0;
    }
  }
}

template <typename T>
std::vector<T> CutToSlice(const TensorSlice& slice,
                          absl::Span<const int64_t> block_size,
                          absl::Span<const T> values) {
  if (values.size() <= 1) return {values.begin(), values.end()};
  const TensorSlice blocks = BlocksOf(slice, block_size);
  int64_t count = 1;
  for (const int64_t extent : blocks.shape) count *= extent;
  std::vector<T> cut;
  cut.reserve(static_cast<size_t>(count));
  blocks.ForEachRange(0, count, [&](int64_t first, int64_t length) {
    cut.insert(cut.end(), values.begin() + first,
               values.begin() + first + length);
  });
  return cut;
}

}  // namespace quantd::core

#endif  // QUANTD_CORE_TYPES_TENSOR_SLICE_H_
