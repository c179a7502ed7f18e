// Error metrics to their messages: those that were asked for.

#ifndef QUANTD_SERVER_WIRE_ERROR_METRICS_PROTO_H_
#define QUANTD_SERVER_WIRE_ERROR_METRICS_PROTO_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "core/evaluate/distribution.h"
#include "core/evaluate/evaluate.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::server {

// The fields of ErrorMetrics that a header asks for. Plain value.
class MetricSet {
 public:
  // All.
  MetricSet() = default;
  // Errors: ENUM_UNKNOWN, at "metrics".
  static absl::StatusOr<MetricSet> Of(const v1::EvaluateHeader& header);

  bool Has(v1::ErrorMetric metric) const {
    return bits_ == 0 || (bits_ & Bit(metric)) != 0;
  }
  // Sums to add up for the metrics.
  core::ErrorSumSet sums() const;

  // Lists the metrics for the answer.
  void ListIn(v1::EvaluateSummary* summary) const;

 private:
  static uint32_t Bit(int metric) { return uint32_t{1} << metric; }

  // Bit k is the metric k; 0 for all.
  uint32_t bits_ = 0;
};

// Sets the fields of the set. `sums` have at least metrics.sums().
void MetricsToProto(const core::ErrorSums& sums, const MetricSet& metrics,
                    v1::ErrorMetrics* proto);

void DistributionToProto(const core::ErrorDistribution& distribution,
                         v1::ErrorMetrics* proto);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_WIRE_ERROR_METRICS_PROTO_H_
