// Statistics with what they are about, as they are stored: calibrate once,
// encode many.

#ifndef QUANTD_CORE_STATISTICS_STATISTICS_STATE_H_
#define QUANTD_CORE_STATISTICS_STATISTICS_STATE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/parallel/time_slice.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"

namespace quantd::core {

// Plain value.
struct StatisticsState {
  // In elements; 0 for the whole dimension; empty for per tensor.
  std::vector<int64_t> block_size;
  // The largest extent seen of each dimension.
  std::vector<int64_t> shape;
  TensorStatistics statistics{1};
};

// Elements that a state may be of, at most: so many that no sum of a histogram
// overflows.
int64_t MaxElementCount(int mantissa_bits);

// The same granularity in its one form: empty when every entry is 0.
std::vector<int64_t> CanonicalBlockSize(absl::Span<const int64_t> block_size);

// Checks that `part` may be merged into `whole`: the same block size, rank,
// mantissa bits, and extent of every dimension that the block size divides, and
// together not above MaxElementCount. An empty block size and one of zeros are
// the same.
// Errors: STATISTICS_MISMATCH.
absl::Status CheckMergeable(const StatisticsState& whole,
                            const StatisticsState& part);

// Adds `part` to `whole`; the shape becomes the larger extent of each.
// Errors: STATISTICS_MISMATCH; `whole` is then as it was.
absl::Status MergeState(const StatisticsState& part, StatisticsState* whole);

// The statistics at the granularity of a block size: the same or one whose
// every entry is 0 (or beyond the dimension) or a multiple of the state's. Not
// thread-safe.
class StatisticsCoarsener {
 public:
  // `state` outlives this.
  // Errors: BLOCK_SIZE_INVALID of BlockLayout::Create; GRANULARITY_TOO_FINE.
  static absl::StatusOr<StatisticsCoarsener> Create(
      const StatisticsState& state, absl::Span<const int64_t> block_size);

  // Goes on until the end, or until the slice is over; with some of it in any
  // case. Answers whether it got to the end.
  bool Run(const TimeSlice& slice);

  // Moves the result out. Requires: Run got to the end.
  TensorStatistics Take() { return std::move(coarse_); }

 private:
  StatisticsCoarsener(const TensorStatistics& fine, TensorStatistics coarse)
      : fine_(&fine), coarse_(std::move(coarse)) {}

  const TensorStatistics* fine_;
  TensorStatistics coarse_;
  // [rank] of both granularities: extents of a block and of the scales.
  std::vector<int64_t> fine_block_;
  std::vector<int64_t> coarse_block_;
  std::vector<int64_t> fine_shape_;
  std::vector<int64_t> coarse_shape_;
  // The scale index that comes next, also by dimension.
  int64_t next_ = 0;
  std::vector<int64_t> index_;
};

// All of it at once.
// Errors: those of StatisticsCoarsener.
absl::StatusOr<TensorStatistics> StatisticsAt(
    const StatisticsState& state, absl::Span<const int64_t> block_size);

}  // namespace quantd::core

#endif  // QUANTD_CORE_STATISTICS_STATISTICS_STATE_H_
