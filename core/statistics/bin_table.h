// A table that adds up many elements of one histogram before they go into it.

#ifndef QUANTD_CORE_STATISTICS_BIN_TABLE_H_
#define QUANTD_CORE_STATISTICS_BIN_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "core/types/element_type.h"

namespace quantd::core {

// A bin of few enough elements. See HistogramBin.
struct PackedBin {
  uint32_t key;
  uint32_t count;
  uint64_t low_sum;
  uint64_t low_square_sum;
};

// Count and moments of one value of the top 9 + m bits, side by side so that
// one addition of two lanes takes in an element.
struct alignas(16) BinCell {
  static constexpr int kCountShift = 44;

  // The count above kCountShift, below it the sum of the low bits.
  uint64_t count_and_low_sum;
  uint64_t low_square_sum;
};

// A cell for every value of the top 9 + m bits, 2^(13 + m) bytes. Not
// thread-safe.
class BinTable {
 public:
  // Elements that fit until Drain: the moments of so many cannot overflow.
  static constexpr int64_t kCapacity = (int64_t{1} << 20) - 1;

  explicit BinTable(int mantissa_bits);

  int mantissa_bits() const { return mantissa_bits_; }
  bool empty() const { return room_ == kCapacity; }
  // Elements that still fit, and that were added.
  int64_t room() const { return room_; }
  int64_t count() const { return kCapacity - room_; }

  // `in`  [count] float32, any alignment; NaN and infinities are left out by
  //       Drain; -0 counts as +0.
  // Requires: count <= room().
  void Add(const uint8_t* in, int64_t count);

  // The bin of a key, emptied; its count is 0 where it has no elements.
  // Requires: key < 2^(9 + m), of finite elements.
  PackedBin Take(uint32_t key) {
    const uint32_t half = static_cast<uint32_t>(cell_count_ / 2);
    BinCell& cell = cells_[key < half ? 2 * half - 1 - key : key - half];
    const PackedBin bin = {
        key,
        static_cast<uint32_t>(cell.count_and_low_sum >> BinCell::kCountShift),
        cell.count_and_low_sum & ((uint64_t{1} << BinCell::kCountShift) - 1),
        cell.low_square_sum};
    cell = {0, 0};
    return bin;
  }

  // The bins that have elements, in ascending order of key, good until the next
  // call; empties the table. Takes time for the bins and their neighbours only.
  absl::Span<const PackedBin> Drain();

 private:
  // Appends the bins of a group of cells, of one sign, and empties it.
  void DrainGroup(uint32_t group, bool is_negative);

  int mantissa_bits_;
  int64_t room_ = kCapacity;
  // By the pattern's top bits, and some more that are empty between calls.
  size_t cell_count_;
  std::vector<BinCell> cells_;
  // Not 0 where a group of neighbouring cells has elements, or may have.
  std::vector<uint8_t> is_touched_;
  // The first drained_count_ are what Drain returned.
  std::vector<PackedBin> drained_;
  size_t drained_count_ = 0;
};

// An empty table out of a stock that the process keeps, and back. Must be
// drained at the end. Thread-safe to make and to end.
class BinTableLease {
 public:
  explicit BinTableLease(int mantissa_bits);
  ~BinTableLease();

  BinTableLease(const BinTableLease&) = delete;
  BinTableLease& operator=(const BinTableLease&) = delete;

  BinTable* get() const { return table_.get(); }

 private:
  std::unique_ptr<BinTable> table_;
};

// Converts elements to what a histogram keeps of them: float64 rounded to
// float32, to nearest even, finite ones beyond it as its largest; the others
// exactly.
// `in`   [count] elements of `type`, any alignment.
// `out`  [count].
void ToHistogramFloats(ElementType type, const uint8_t* in, int64_t count,
                       float* out);

}  // namespace quantd::core

#endif  // QUANTD_CORE_STATISTICS_BIN_TABLE_H_
