// A tensor that is held in memory, looked at by one scale index at a time.

#ifndef QUANTD_CORE_STATISTICS_HELD_TENSOR_H_
#define QUANTD_CORE_STATISTICS_HELD_TENSOR_H_

#include <cstdint>
#include <vector>

#include "core/statistics/histogram.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"

namespace quantd::core {

// Immutable, thread-safe.
class HeldTensor {
 public:
  // `pieces`  the elements in order, `piece_elements` in each but the last,
  //           which may have fewer; any alignment.
  // `layout` and what `pieces` point at outlive this.
  HeldTensor(const BlockLayout& layout, ElementType type,
             int64_t piece_elements, std::vector<const uint8_t*> pieces);

  // The histogram of the elements of one scale index: the same that
  // TensorStatistics makes of them.
  Histogram HistogramOf(int64_t scale_index, int mantissa_bits) const;
  // Bytes of memory that HistogramOf takes for its table.
  static int64_t TableBytes(const BlockLayout& layout, int mantissa_bits);

  // The type of the elements, and those of one scale index, in order: copies
  // them and says how many.
  // `out`  has room for LargestBlockBytes().
  ElementType type() const { return type_; }
  int64_t LargestBlockBytes() const {
    return layout_.largest_block() * ElementSizeBytes(type_);
  }
  int64_t CopyBlock(int64_t scale_index, uint8_t* out) const;

 private:
  // Calls `visit(bytes, count)` for elements of the block that follow each
  // other in memory, in order.
  template <typename Visitor>
  void ForEachStretch(BlockLayout::BlockCursor* cursor, Visitor&& visit) const;

  const BlockLayout& layout_;
  const ElementType type_;
  const int64_t piece_elements_;
  const std::vector<const uint8_t*> pieces_;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_STATISTICS_HELD_TENSOR_H_
