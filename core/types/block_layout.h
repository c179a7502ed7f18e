// Index arithmetic of N-D blocks: which element uses which scale.

#ifndef QUANTD_CORE_TYPES_BLOCK_LAYOUT_H_
#define QUANTD_CORE_TYPES_BLOCK_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace quantd::core {

constexpr int kMaxRank = 16;

// Number of elements of `shape`: the product of its dimensions, 1 for rank 0.
// Errors: SHAPE_INVALID for a negative dimension, a rank above kMaxRank, or a
// product above 2^56 (so that sizes in bytes never overflow int64).
absl::StatusOr<int64_t> ElementCount(absl::Span<const int64_t> shape);

// Element j uses scale index i[d] = floor(j[d] / block[d]), with block[d] = 0
// meaning the whole dimension; scale_shape[d] = ceil(shape[d] / block[d]). Both
// elements and scales are in row-major order. Immutable, thread-safe.
class BlockLayout {
 public:
  // Elements [begin, begin + count) in row-major order; element begin + k uses
  // scale scale_index + k * scale_step. scale_step is 0 or 1.
  struct Run {
    int64_t begin;
    int64_t count;
    int64_t scale_index;
    int64_t scale_step;
  };

  // `block_size` has an entry per dimension, or none for per tensor.
  // Errors: SHAPE_INVALID, BLOCK_SIZE_INVALID (rank, negative entry).
  static absl::StatusOr<BlockLayout> Create(
      absl::Span<const int64_t> shape, absl::Span<const int64_t> block_size);

  int64_t element_count() const { return element_count_; }
  // Product of scale_shape. 0 if the tensor has a dimension 0 that is split
  // into blocks; per tensor it is always 1.
  int64_t scale_count() const { return scale_count_; }
  absl::Span<const int64_t> scale_shape() const { return scale_shape_; }

  // Scale indices [first, end).
  struct ScaleRange {
    int64_t first;
    int64_t end;
  };
  // The smallest range that has the scale of every element of [first, first +
  // count), counted from the tensor's first scale in windows too.
  // Requires: count > 0, within the tensor.
  ScaleRange ScaleBounds(int64_t first, int64_t count) const;

  // Elements that have their scales for themselves: those of each index of the
  // outermost dimension's blocks. Ranges that begin and end at multiples of it,
  // or at the tensor's end, have no scale in common. At least 1.
  int64_t band_size() const;

  // Returns the layout of the same tensor for an encoding that has only the
  // scales from `first_scale` on: runs and rows count scale indices from there.
  BlockLayout Window(int64_t first_scale) const;
  // 0 unless this is a window.
  int64_t first_scale() const { return first_scale_; }

  // Calls `visit(const Run&)` for maximal runs that cover [first, first +
  // count) in order. Costs one division per collapsed dimension to start and
  // O(1) per run.
  // Requires: 0 <= first, first + count <= element_count().
  template <typename Visitor>
  void ForEachRun(int64_t first, int64_t count, Visitor&& visit) const {
    RunCursor cursor(*this, first, count);
    Run run;
    while (cursor.Next(&run)) visit(run);
  }

  // Elements [begin, begin + count) of one row. A row is along the innermost
  // dimension, after neighbouring dimensions that behave alike are merged.
  // Element begin + k uses scale scale_index + floor((offset + k) / block).
  struct Row {
    int64_t begin;
    int64_t count;
    int64_t scale_index;
    int64_t block;   // >= 1
    int64_t offset;  // < block
  };

  // Elements of a row.
  int64_t row_size() const { return dimensions_.back().size; }
  // Elements of the largest block, which is what uses one scale.
  int64_t largest_block() const;
  // Elements that follow each other and use the same scale, within a row.
  int64_t row_block() const { return dimensions_.back().block; }
  // True if all rows use the same scales.
  bool rows_share_scales() const {
    const Dimension& row = dimensions_.back();
    return scale_count_ == (row.size + row.block - 1) / row.block;
  }

  // The rows of a range, cut off where it begins and ends.
  class RowCursor {
   public:
    RowCursor(const BlockLayout& layout, int64_t first, int64_t count);
    // False when the range is used up.
    bool Next(Row* row);

   private:
    // Place of position_ in a collapsed dimension, and in a block of that.
    struct Coordinate {
      int64_t index;
      int64_t offset;
    };

    const BlockLayout& layout_;
    int64_t position_;
    int64_t end_;
    // Scale index of the row's first element.
    int64_t scale_index_;
    // Place in each dimension but the innermost, whose index is column_.
    absl::InlinedVector<Coordinate, 4> coordinates_;
    int64_t column_ = 0;
  };

  // The elements of one scale index.
  class BlockCursor {
   public:
    // Requires: 0 <= scale_index < scale_count(); element_count() > 0.
    BlockCursor(const BlockLayout& layout, int64_t scale_index);
    // Number of elements in all rows.
    int64_t count() const { return count_; }
    // Elements [*begin, *begin + *count) of a row, in order; false when there
    // are no more.
    bool Next(int64_t* begin, int64_t* count);

   private:
    // Extent of the block in a collapsed dimension other than the innermost.
    struct Extent {
      int64_t size;
      int64_t stride;  // elements from one index to the next
      int64_t index;
    };

    // Outermost first.
    absl::InlinedVector<Extent, 4> extents_;
    int64_t position_ = 0;
    int64_t row_count_ = 0;
    int64_t count_ = 1;
    bool done_ = false;
  };

  // Pull form of ForEachRun.
  class RunCursor {
   public:
    RunCursor(const BlockLayout& layout, int64_t first, int64_t count)
        : rows_(layout, first, count) {}
    // False when the range is used up.
    bool Next(Run* run) {
      if (row_.count == 0 && !rows_.Next(&row_)) return false;
      const bool steps = row_.block == 1;
      run->begin = row_.begin;
      run->scale_index = row_.scale_index;
      run->scale_step = steps && row_.count > 1 ? 1 : 0;
      run->count =
          steps ? row_.count : std::min(row_.count, row_.block - row_.offset);
      row_.begin += run->count;
      row_.count -= run->count;
      row_.scale_index += 1;
      row_.offset = 0;
      return true;
    }

   private:
    RowCursor rows_;
    Row row_{};
  };

 private:
  // A dimension after neighbours that behave alike were merged.
  struct Dimension {
    int64_t size;
    int64_t block;         // in elements of this dimension, >= 1
    int64_t scale_stride;  // scales from one block to the next
  };

  int64_t element_count_ = 0;
  int64_t scale_count_ = 0;
  int64_t first_scale_ = 0;
  std::vector<int64_t> scale_shape_;
  absl::InlinedVector<Dimension, 4>
      dimensions_;  // outermost first, never empty
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_TYPES_BLOCK_LAYOUT_H_
