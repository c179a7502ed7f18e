#include "core/types/tensor_slice.h"

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"

namespace quantd::core {

absl::Status CheckSlice(const TensorSlice& slice) {
  const size_t rank = slice.shape.size();
  if (slice.global_shape.size() != rank || slice.offset.size() != rank) {
    return ShapeInvalidError(absl::StrCat(
        "a slice of ", rank, " dimensions has ", slice.global_shape.size(),
        " of the whole and ", slice.offset.size(),
        " offsets, expected as many of each"));
  }
  if (absl::StatusOr<int64_t> count = ElementCount(slice.global_shape);
      !count.ok()) {
    return count.status();
  }
  for (size_t d = 0; d < rank; ++d) {
    if (slice.offset[d] < 0 || slice.shape[d] > slice.global_shape[d] ||
        slice.offset[d] > slice.global_shape[d] - slice.shape[d]) {
      return ShapeInvalidError(absl::StrCat(
          "a slice of [", absl::StrJoin(slice.shape, ","), "] at [",
          absl::StrJoin(slice.offset, ","), "], expected one within [",
          absl::StrJoin(slice.global_shape, ","), "]"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckCutsNoBlock(const TensorSlice& slice,
                              absl::Span<const int64_t> block_size) {
  for (size_t d = 0; d < block_size.size(); ++d) {
    const int64_t size = block_size[d];
    if (size == 0 || size >= slice.global_shape[d]) continue;
    const int64_t end = slice.offset[d] + slice.shape[d];
    if (slice.offset[d] % size != 0 ||
        (end % size != 0 && end != slice.global_shape[d])) {
      return BlockSizeInvalidError(
          absl::StrCat("the slice has [", slice.offset[d], ", ", end,
                       ") of dimension ", d, ", which is in blocks of ", size,
                       ": expected a slice that cuts no block"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckHasWholeBlocks(const TensorSlice& slice,
                                 absl::Span<const int64_t> block_size) {
  for (size_t d = 0; d < slice.shape.size(); ++d) {
    const int64_t size = block_size.empty() ? 0 : block_size[d];
    if ((size == 0 || size >= slice.global_shape[d]) && !slice.HasWhole(d)) {
      return BlockSizeInvalidError(absl::StrCat(
          "scales would depend on elements that the slice does not have: it "
          "has ",
          slice.shape[d], " of ", slice.global_shape[d], " in dimension ", d,
          ", expected whole blocks, an encoding of the whole, or ranges for "
          "its scales"));
    }
  }
  return CheckCutsNoBlock(slice, block_size);
}

TensorSlice BlocksOf(const TensorSlice& slice,
                     absl::Span<const int64_t> block_size) {
  TensorSlice blocks;
  for (size_t d = 0; d < slice.shape.size(); ++d) {
    const int64_t size = block_size.empty() ? 0 : block_size[d];
    const auto count = [&](int64_t elements) {
      return size == 0 ? 1 : (elements + size - 1) / size;
    };
    const int64_t first = size == 0 ? 0 : slice.offset[d] / size;
    blocks.global_shape.push_back(count(slice.global_shape[d]));
    blocks.offset.push_back(first);
    blocks.shape.push_back(count(slice.offset[d] + slice.shape[d]) - first);
  }
  return blocks;
}

absl::StatusOr<Encoding> CutToSlice(const TensorSlice& slice,
                                    const Encoding& encoding) {
  absl::Status status = CheckCutsNoBlock(slice, encoding.block_size);
  if (!status.ok()) return status;
  if (encoding.outer_scale.size() > 1) {
    status = CheckCutsNoBlock(slice, encoding.outer_block_size);
    if (!status.ok()) return status;
  }
  Encoding cut;
  cut.format = encoding.format;
  cut.block_size = encoding.block_size;
  cut.zero_points_are_real = encoding.zero_points_are_real;
  cut.qmin = encoding.qmin;
  cut.qmax = encoding.qmax;
  cut.exclude_zero = encoding.exclude_zero;
  cut.scale_type = encoding.scale_type;
  cut.outer_block_size = encoding.outer_block_size;
  cut.codebook = encoding.codebook;
  cut.no_saturation = encoding.no_saturation;
  const auto cut_blocks = [&](auto values) {
    return CutToSlice(slice, encoding.block_size, values);
  };
  cut.scale = cut_blocks(absl::MakeConstSpan(encoding.scale));
  cut.zero_point = cut_blocks(absl::MakeConstSpan(encoding.zero_point));
  cut.real_zero_point =
      cut_blocks(absl::MakeConstSpan(encoding.real_zero_point));
  cut.scale_code = cut_blocks(absl::MakeConstSpan(encoding.scale_code));
  cut.outer_scale = CutToSlice(slice, encoding.outer_block_size,
                               absl::MakeConstSpan(encoding.outer_scale));
  const absl::StatusOr<BlockLayout> layout =
      BlockLayout::Create(slice.shape, encoding.block_size);
  if (!layout.ok()) return layout.status();
  cut.scale_shape.assign(layout->scale_shape().begin(),
                         layout->scale_shape().end());
  return cut;
}

}  // namespace quantd::core
