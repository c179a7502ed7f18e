// Statistics with what they are about, as they are stored: calibrate once,
// encode many.

#ifndef QUANTD_CORE_STATISTICS_STATISTICS_STATE_H_
#define QUANTD_CORE_STATISTICS_STATISTICS_STATE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/feature_moments.h"
#include "core/statistics/gram_state.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/tensor_slice.h"

namespace quantd::core {

// Moments of the features along one dimension. Plain value.
struct AxisMoments {
  // From 0 on.
  int64_t axis = 0;
  FeatureMoments moments{0};
};

// Plain value.
struct StatisticsState {
  // In elements; 0 for the whole dimension; empty for per tensor.
  std::vector<int64_t> block_size;
  // The largest extent seen of each dimension.
  std::vector<int64_t> shape;
  TensorStatistics statistics{1};
  // Gram matrix of the rows along the last dimension. Only in what is
  // contributed; merging states leaves it alone.
  absl::optional<GramState> gram = absl::nullopt;
  // Moments of features. Only in what is contributed; merging states leaves
  // them alone.
  absl::optional<AxisMoments> moments = absl::nullopt;
};

// Elements that a state may be of, at most: so many that no sum of a histogram
// overflows.
int64_t MaxElementCount(int mantissa_bits);

// Returns the granularity in its one form: empty when every entry is 0.
std::vector<int64_t> CanonicalBlockSize(absl::Span<const int64_t> block_size);

// Checks that the elements are those of whole tensors, or of slices: as many
// for each scale index as its blocks have there, all of them finite unless it
// has others. The extents of dimensions that are not split are free, because
// tensors may differ in them.
// `slice`  null for whole tensors; of state.shape, and valid.
// Requires: histograms; the block size is valid for the shape.
// Errors: STATISTICS_INVALID.
absl::Status CheckElementCounts(const StatisticsState& state,
                                const TensorSlice* slice = nullptr);

// Checks that the moments can be those of the elements: as many of each feature
// of the slice, and of no other, and together with the same sums.
// Requires: moments; CheckElementCounts.
// Errors: STATISTICS_INVALID.
absl::Status CheckMoments(const StatisticsState& state,
                          const TensorSlice* slice = nullptr);

// Checks that an encoding can be computed: there is a finite element, and no
// slice of the tensor is missing, so that each scale index has an element.
// Errors: STATISTICS_INCOMPLETE.
absl::Status CheckComplete(const StatisticsState& state);

// Checks that `part` may be merged into `whole`: the same block size, rank,
// mantissa bits, and extent of every dimension that the block size divides, and
// together not above MaxElementCount. An empty block size and one of zeros are
// the same.
// Errors: STATISTICS_MISMATCH.
absl::Status CheckMergeable(const StatisticsState& whole,
                            const StatisticsState& part);

// Errors: STATISTICS_MISMATCH unless `part` is of that axis and number of
// features.
absl::Status CheckMomentsMergeable(int64_t axis, int64_t feature_count,
                                   const AxisMoments& part);

// Adds `part` to `whole`.
// Errors: STATISTICS_MISMATCH of CheckMomentsMergeable, or for more elements
// than moments may have; `whole` is then as it was.
absl::Status MergeMoments(const AxisMoments& part, AxisMoments* whole);

// Adds `part` to `whole`; the shape becomes the larger extent of each.
// Errors: STATISTICS_MISMATCH; `whole` is then as it was.
absl::Status MergeState(const StatisticsState& part, StatisticsState* whole);

// The statistics at the granularity of a block size: the same or one whose
// every entry is 0 (or beyond the dimension) or a multiple of the state's.
// Errors: BLOCK_SIZE_INVALID of BlockLayout::Create; GRANULARITY_TOO_FINE;
// CANCELLED.
absl::StatusOr<TensorStatistics> StatisticsAt(
    const StatisticsState& state, absl::Span<const int64_t> block_size,
    StopToken stop = StopToken());

}  // namespace quantd::core

#endif  // QUANTD_CORE_STATISTICS_STATISTICS_STATE_H_
