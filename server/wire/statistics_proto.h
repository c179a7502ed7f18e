// Statistics from and to their messages.

#ifndef QUANTD_SERVER_WIRE_STATISTICS_PROTO_H_
#define QUANTD_SERVER_WIRE_STATISTICS_PROTO_H_

#include "absl/status/statusor.h"
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

// Takes any message: everything that a state holds to is checked, bins against
// counts and moments against their bins.
// Errors: STATISTICS_INVALID.
absl::StatusOr<core::StatisticsState> StateFromProto(
    const v1::StatisticsState& proto);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_WIRE_STATISTICS_PROTO_H_
