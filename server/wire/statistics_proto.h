// Statistics from and to their messages.

#ifndef QUANTD_SERVER_WIRE_STATISTICS_PROTO_H_
#define QUANTD_SERVER_WIRE_STATISTICS_PROTO_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "core/statistics/histogram.h"
#include "core/statistics/statistics_state.h"
#include "core/statistics/tensor_statistics.h"
#include "quantd/v1/statistics.pb.h"
#include "quantd/v1/tensor.pb.h"

namespace quantd::server {

void StatisticsToProto(const core::TensorStatistics& statistics,
                       v1::TensorStatistics* proto);

// Equal states give equal bytes.
void StateToProto(const core::StatisticsState& state,
                  v1::StatisticsState* proto);

// A state's message without its histograms, which are the last of its bytes.
// The state needs none: `mantissa_bits` are theirs.
void OutlineToProto(const core::StatisticsState& state, int mantissa_bits,
                    v1::StatisticsState* proto);
// One of them.
void HistogramToProto(const core::Histogram& histogram, v1::Histogram* proto);

// XXH3 (64 bits, seed 0) of the bytes of StateToProto.
uint64_t StateDigest(const core::StatisticsState& state);

// Takes any message, and leaves histograms out: the state has none. What can
// be checked without them is.
// Errors: STATISTICS_INVALID.
absl::StatusOr<core::StatisticsState> OutlineFromProto(
    const v1::StatisticsState& proto);
// Takes any message.
// `count_limit`  elements that the histogram has at most.
// Errors: STATISTICS_INVALID.
absl::StatusOr<core::Histogram> HistogramFromProto(const v1::Histogram& proto,
                                                   int mantissa_bits,
                                                   uint64_t count_limit);

// Takes any message: everything that a state holds to is checked, bins against
// counts and moments against their bins.
// Errors: STATISTICS_INVALID.
absl::StatusOr<core::StatisticsState> StateFromProto(
    const v1::StatisticsState& proto);

// Equal moments give equal bytes.
void MomentsToProto(const core::AxisMoments& moments,
                    v1::FeatureMoments* proto);
// Takes any message.
// Errors: STATISTICS_INVALID.
absl::StatusOr<core::AxisMoments> MomentsFromProto(
    const v1::FeatureMoments& proto);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_WIRE_STATISTICS_PROTO_H_
