#include "server/wire/statistics_proto.h"

#include "absl/status/statusor.h"
#include "core/errors.h"

namespace quantd::server {

void StatisticsToProto(const core::TensorStatistics& statistics,
                       v1::TensorStatistics* proto) {
  const core::ElementCounts& counts = statistics.counts();
  proto->set_count(counts.total);
  const core::Extremes extremes = statistics.overall();
  if (!extremes.empty()) {
    proto->set_min(extremes.min);
    proto->set_max(extremes.max);
  }
  proto->set_nan_count(counts.nan);
  proto->set_positive_infinity_count(counts.positive_infinity);
  proto->set_negative_infinity_count(counts.negative_infinity);
  proto->set_zero_count(counts.zero);
}

void StateToProto(const core::StatisticsState& state,
                  v1::StatisticsState* proto) {}

absl::StatusOr<core::StatisticsState> StateFromProto(
    const v1::StatisticsState& proto) {
  return core::StatisticsInvalidError("not yet");
}

}  // namespace quantd::server
