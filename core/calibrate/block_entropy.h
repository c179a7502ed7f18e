// Losses of many ranges of a block at a time, by entropy.h: the contract of the
// kernels in block_entropy.cc. LinearBins in entropy.cc is their scalar
// definition.

#ifndef QUANTD_CORE_CALIBRATE_BLOCK_ENTROPY_H_
#define QUANTD_CORE_CALIBRATE_BLOCK_ENTROPY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quantd::core {

// The bins of a block: bin t holds elements from low + t * width / bins on. The
// outermost bins also hold the elements beyond them.
struct BinGrid {
  bool of_magnitudes;
  double low;
  double width;
  int64_t bins;

  // The bin that x lies in, or the one nearest to it. NaN, which an infinite
  // width gives, is in the first.
  int64_t BinOf(double x) const {
    const double position = Position(x);
    if (!(position > 0)) return 0;
    return position < static_cast<double>(bins - 1)
               ? static_cast<int64_t>(position)
               : bins - 1;
  }
  // How many bins lie before x, the one it is in among them.
  int64_t BinsUpTo(double x) const {
    const double position = Position(x);
    if (!(position > 1)) return 1;
    if (!(position < static_cast<double>(bins))) return bins;
    const auto before = static_cast<int64_t>(position);
    return before + (static_cast<double>(before) < position ? 1 : 0);
  }

 private:
  double Position(double x) const {
    return (x - low) * static_cast<double>(bins) / width;
  }
};

// Finds the bins of elements; zeros get the bin `bins`.
// `x`    [count] finite. T is float or double.
// `bin`  [count].
template <typename T>
void FindBins(const BinGrid& grid, const T* x, int64_t count, int32_t* bin);

// Cuts of a range into levels: all levels but the last end before the bin of
// index
//
//   ceil(end * size / divisor - offset)
//
// of a range of `size` bins, or at the end of the range where that lies outside
// it. The last level ends with the range.
struct LevelCuts {
  std::vector<double> end;
  double divisor;
  double offset;
};

// Ranges come in multiples of this: the lanes of any vector.
constexpr int64_t kRangeLanes = 8;

struct BlockRanges {
  // [bins + 1] totals of the bins before: the count of elements and, from bit
  // 16 on, the number of bins with elements.
  const uint32_t* before;
  int64_t bins;
  // [bins with elements + 1] sums of n log n over those before, n elements in
  // each.
  const double* x_log_x;
  // [2 * elements + levels + 1] log(n / 2), and 0 for n = 0.
  const double* half_log;
  // A multiple of kRangeLanes.
  int64_t count;
  // [count] first <= t < last are the bins of a range; not empty.
  const int32_t* first;
  const int32_t* last;
  // Out: [count].
  double* divergence;
};

// Resizes `room`; its contents are lost. It never holds more than the largest
// size needs.
template <typename T>
void MakeRoom(size_t size, std::vector<T>* room) {
  if (room->capacity() < size) {
    *room = std::vector<T>();
    room->reserve(size);
  }
  room->resize(size);
}

// Arrays of the search of a block, used again from block to block.
struct EntropyRoom {
  std::vector<int32_t> bin;
  std::vector<uint16_t> in_bin;
  std::vector<uint64_t> filled;
  std::vector<uint32_t> before;
  std::vector<double> x_log_x;
  std::vector<int32_t> first;
  std::vector<int32_t> last;
  std::vector<double> divergence;
};

// Most bytes that a search holds per element: in EntropyRoom its bin and a sum;
// where kernels do not take a block, 16 bytes in LinearBins.
constexpr int64_t kEntropyElementBytes = sizeof(int32_t) + sizeof(double) + 16;

// Most elements of a block that FindDivergences takes.
constexpr int64_t kMostDivergenceElements = 65535;

// Requires: 1 to kMostDivergenceElements elements; no more than 32,767 bins
// with elements; AreDivergencesVectorized(). Gives the same bits on every
// machine.
void FindDivergences(const LevelCuts& cuts, const BlockRanges& ranges);
// True if this machine has kernels, and they are to be used.
bool AreDivergencesVectorized();

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_BLOCK_ENTROPY_H_
