#include "core/types/block_layout.h"

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/errors.h"

namespace quantd::core {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 56;

int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0); }

}  // namespace

absl::StatusOr<int64_t> ElementCount(absl::Span<const int64_t> shape) {
  if (shape.size() > kMaxRank) {
    return ShapeInvalidError(absl::StrCat("shape has ", shape.size(),
                                          " dimensions, expected at most ",
                                          kMaxRank));
  }
  bool is_empty = false;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] < 0) {
      return ShapeInvalidError(absl::StrCat("dimension ", d, " is ", shape[d],
                                            ", expected at least 0"));
    }
    is_empty |= shape[d] == 0;
  }
  int64_t count = 1;
  for (const int64_t size : shape) {
    // The other dimensions of an empty tensor are bounded too: their products
    // are strides and scale counts.
    const int64_t factor = std::max<int64_t>(size, 1);
    if (factor > kMaxElements / count) {
      return ShapeInvalidError(
          "the product of the dimensions is above 2^56 elements");
    }
    count *= factor;
  }
  return is_empty ? 0 : count;
}

absl::StatusOr<BlockLayout> BlockLayout::Create(
    absl::Span<const int64_t> shape, absl::Span<const int64_t> block_size) {
  const absl::StatusOr<int64_t> element_count = ElementCount(shape);
  if (!element_count.ok()) return element_count.status();
  if (!block_size.empty() && block_size.size() != shape.size()) {
    return BlockSizeInvalidError(absl::StrCat(
        "block size has ", block_size.size(), " entries, expected none or ",
        shape.size(), ", one per dimension"));
  }
  for (size_t d = 0; d < block_size.size(); ++d) {
    if (block_size[d] < 0) {
      return BlockSizeInvalidError(absl::StrCat(
          "entry ", d, " is ", block_size[d], ", expected at least 0"));
    }
  }

  BlockLayout layout;
  layout.element_count_ = *element_count;
  layout.scale_shape_.resize(shape.size(), 1);
  layout.scale_count_ = 1;
  for (size_t d = 0; d < block_size.size(); ++d) {
    if (block_size[d] > 0) {
      layout.scale_shape_[d] = CeilDivide(shape[d], block_size[d]);
    }
    layout.scale_count_ *= layout.scale_shape_[d];
  }

  layout.dimensions_.push_back({1, 1, 0});
  if (layout.element_count_ == 0) return layout;
  int64_t scale_stride = layout.scale_count_;
  for (size_t d = 0; d < shape.size(); ++d) {
    const int64_t size = shape[d];
    scale_stride /= layout.scale_shape_[d];
    const bool is_whole = layout.scale_shape_[d] == 1;
    const int64_t block = is_whole ? size : block_size[d];
    if (size == 1) continue;
    Dimension& outer = layout.dimensions_.back();
    if (outer.size == 1) {
      outer = {size, block, scale_stride};
    } else if (is_whole) {
      outer.size *= size;
      outer.block *= size;
    } else if (outer.block == 1 && size % block == 0) {
      outer = {outer.size * size, block, scale_stride};
    } else {
      layout.dimensions_.push_back({size, block, scale_stride});
    }
  }
  return layout;
}

BlockLayout::RowCursor::RowCursor(const BlockLayout& layout, int64_t first,
                                  int64_t count)
    : layout_(layout),
      position_(first),
      end_(first + count),
      scale_index_(-layout.first_scale_) {
  const auto& dimensions = layout.dimensions_;
  const size_t innermost = dimensions.size() - 1;
  coordinates_.resize(innermost);
  column_ = first % dimensions[innermost].size;
  int64_t rest = first / dimensions[innermost].size;
  for (size_t d = innermost; d-- > 0;) {
    const Dimension& dimension = dimensions[d];
    const int64_t index = rest % dimension.size;
    rest /= dimension.size;
    const int64_t block_index = index / dimension.block;
    coordinates_[d] = {index, index - block_index * dimension.block};
    scale_index_ += block_index * dimension.scale_stride;
  }
}

bool BlockLayout::RowCursor::Next(Row* row) {
  if (position_ >= end_) return false;
  const auto& dimensions = layout_.dimensions_;
  const Dimension& innermost = dimensions.back();
  const int64_t block_index = column_ / innermost.block;
  row->begin = position_;
  row->count = std::min(innermost.size - column_, end_ - position_);
  row->scale_index = scale_index_ + block_index * innermost.scale_stride;
  row->block = innermost.block;
  row->offset = column_ - block_index * innermost.block;
  position_ += row->count;
  column_ = 0;

  // Steps the outer coordinates as they carry.
  for (size_t d = coordinates_.size(); d-- > 0;) {
    const Dimension& dimension = dimensions[d];
    Coordinate& coordinate = coordinates_[d];
    ++coordinate.index;
    ++coordinate.offset;
    if (coordinate.index < dimension.size) {
      if (coordinate.offset == dimension.block) {
        coordinate.offset = 0;
        scale_index_ += dimension.scale_stride;
      }
      return true;
    }
    scale_index_ -=
        (dimension.size - 1) / dimension.block * dimension.scale_stride;
    coordinate = {0, 0};
  }
  return true;
}

BlockLayout::ScaleRange BlockLayout::ScaleBounds(int64_t first,
                                                 int64_t count) const {
  const size_t rank = dimensions_.size();
  absl::InlinedVector<int64_t, 4> low(rank), high(rank);
  int64_t rest_low = first, rest_high = first + count - 1;
  for (size_t d = rank; d-- > 0;) {
    low[d] = rest_low % dimensions_[d].size;
    high[d] = rest_high % dimensions_[d].size;
    rest_low /= dimensions_[d].size;
    rest_high /= dimensions_[d].size;
  }
  // Outermost dimension in which the first and the last element part. In it,
  // the elements between them have all indices between theirs.
  size_t parting = 0;
  while (parting + 1 < rank && low[parting] == high[parting]) ++parting;
  ScaleRange bounds = {0, 1};
  const auto stride_at = [&](size_t d, int64_t index) {
    return index / dimensions_[d].block * dimensions_[d].scale_stride;
  };
  for (size_t d = 0; d < rank; ++d) {
    bounds.first += stride_at(d, low[d]);
    const int64_t next = low[d] + 1;
    const int64_t last = d == parting ? high[d] : dimensions_[d].size - 1;
    // The next index has the same scales from their beginning.
    if (d >= parting && next <= last &&
        next / dimensions_[d].block == low[d] / dimensions_[d].block) {
      break;
    }
  }
  bool is_full = false;
  for (size_t d = 0; d < rank; ++d) {
    bounds.end += stride_at(d, is_full ? dimensions_[d].size - 1 : high[d]);
    const int64_t previous = high[d] - 1;
    const int64_t least = d == parting ? low[d] : 0;
    is_full |=
        d >= parting && previous >= least &&
        previous / dimensions_[d].block == high[d] / dimensions_[d].block;
  }
  return bounds;
}

int64_t BlockLayout::band_size() const {
  const Dimension& outermost = dimensions_.front();
  return std::max<int64_t>(1, element_count_ /
                                  std::max<int64_t>(1, outermost.size) *
                                  std::min(outermost.block, outermost.size));
}

BlockLayout BlockLayout::Window(int64_t first_scale) const {
  BlockLayout window = *this;
  window.first_scale_ = first_scale;
  return window;
}

int64_t BlockLayout::largest_block() const {
  int64_t elements = element_count_ == 0 ? 0 : 1;
  for (const Dimension& dimension : dimensions_) {
    elements *= std::min(dimension.size, dimension.block);
  }
  return elements;
}

BlockLayout::BlockCursor::BlockCursor(const BlockLayout& layout,
                                      int64_t scale_index) {
  const auto& dimensions = layout.dimensions_;
  const size_t innermost = dimensions.size() - 1;
  extents_.resize(innermost);
  int64_t stride = 1;
  for (size_t d = dimensions.size(); d-- > 0;) {
    const Dimension& dimension = dimensions[d];
    const int64_t blocks = CeilDivide(dimension.size, dimension.block);
    const int64_t first = blocks == 1 ? 0
                                      : scale_index / dimension.scale_stride %
                                            blocks * dimension.block;
    const int64_t size = std::min(dimension.block, dimension.size - first);
    position_ += first * stride;
    count_ *= size;
    if (d == innermost) {
      row_count_ = size;
    } else {
      extents_[d] = {size, stride, 0};
    }
    stride *= dimension.size;
  }
}

bool BlockLayout::BlockCursor::Next(int64_t* begin, int64_t* count) {
  if (done_) return false;
  *begin = position_;
  *count = row_count_;
  for (size_t d = extents_.size(); d-- > 0;) {
    Extent& extent = extents_[d];
    position_ += extent.stride;
    if (++extent.index < extent.size) return true;
    position_ -= extent.size * extent.stride;
    extent.index = 0;
  }
  done_ = true;
  return true;
}

}  // namespace quantd::core
