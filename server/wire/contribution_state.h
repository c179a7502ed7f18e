// Statistics that a client contributes in place of elements.

#ifndef QUANTD_SERVER_WIRE_CONTRIBUTION_STATE_H_
#define QUANTD_SERVER_WIRE_CONTRIBUTION_STATE_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/statistics/gram_state.h"
#include "core/statistics/statistics_state.h"
#include "core/types/tensor_slice.h"

namespace quantd::server {

// A serialized v1.ContributionState, taken apart. Points into it.
struct ContributionStateBytes {
  // A serialized v1.StatisticsState.
  absl::string_view statistics;
  // Without sums.
  absl::optional<core::GramState::Parts> gram;
  // Its sums, one after another, 8 bytes each.
  std::vector<absl::string_view> gram_sums;
  // A serialized v1.FeatureMoments, if there is one.
  absl::optional<absl::string_view> moments;
  // Most memory that reading the statistics takes, and memory of the message of
  // the moments.
  int64_t statistics_memory_bytes = 0;
  int64_t moments_memory_bytes = 0;
};

// Takes any bytes. Holds little: what is large stays where it is.
// Errors: STATISTICS_INVALID, also for a field that is not known: what it says
// would be lost.
absl::StatusOr<ContributionStateBytes> SplitContributionState(
    absl::string_view bytes);

// Reads the statistics. Everything that a state holds to is checked, and that
// its elements are those of whole tensors of its shape, or of slices.
// `shape`  that the state is to have, with `slice` of the whole; `slice` may be
//          null.
// Errors: STATISTICS_INVALID.
absl::StatusOr<core::StatisticsState> ReadContributedStatistics(
    const ContributionStateBytes& bytes, absl::Span<const int64_t> shape,
    const core::TensorSlice* slice);

// Reads the moments.
// `axis`, `feature_count`  that they are to have.
// Requires: bytes.moments has a value.
// Errors: STATISTICS_INVALID.
absl::StatusOr<core::AxisMoments> ReadContributedMoments(
    const ContributionStateBytes& bytes, int64_t axis, int64_t feature_count);

// Parts for GramState::FromParts.
// Requires: bytes.gram has a value.
core::GramState::Parts ReadContributedGram(const ContributionStateBytes& bytes);

// Checks that the rows of a Gram matrix can be those of the elements: as many,
// with the same sum of squares.
// Requires: histograms.
// Errors: STATISTICS_INVALID.
absl::Status CheckGramFits(const core::GramState& gram,
                           const core::TensorStatistics& statistics);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_WIRE_CONTRIBUTION_STATE_H_
