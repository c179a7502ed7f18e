#include "server/wire/error_metrics_proto.h"

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"

namespace quantd::server {

static_assert(v1::ErrorMetric_MAX < 32, "MetricSet has a bit for each");

absl::StatusOr<MetricSet> MetricSet::Of(const v1::EvaluateHeader& header) {
  MetricSet set;
  for (int i = 0; i < header.metrics_size(); ++i) {
    const v1::ErrorMetric metric = header.metrics(i);
    if (!v1::ErrorMetric_IsValid(metric) ||
        metric == v1::ERROR_METRIC_UNSPECIFIED) {
      return core::WithField(core::EnumUnknownError("ErrorMetric", metric),
                             absl::StrCat("metrics[", i, "]"));
    }
    set.bits_ |= Bit(metric);
  }
  return set;
}

core::ErrorSumSet MetricSet::sums() const {
  // Metrics that come from count, squared_error, signal and max_absolute_error.
  const uint32_t noise = Bit(v1::ERROR_METRIC_SUM_SQUARED_ERROR) |
                         Bit(v1::ERROR_METRIC_MEAN_SQUARED_ERROR) |
                         Bit(v1::ERROR_METRIC_MAX_ABSOLUTE_ERROR) |
                         Bit(v1::ERROR_METRIC_SQNR_DB);
  return bits_ != 0 && (bits_ & ~noise) == 0 ? core::ErrorSumSet::kNoise
                                             : core::ErrorSumSet::kAll;
}

void MetricSet::ListIn(v1::EvaluateSummary* summary) const {
  if (bits_ == 0) return;
  for (int metric = 1; metric <= v1::ErrorMetric_MAX; ++metric) {
    if ((bits_ & Bit(metric)) != 0) {
      summary->add_metrics(static_cast<v1::ErrorMetric>(metric));
    }
  }
}

void MetricsToProto(const core::ErrorSums& sums, const MetricSet& metrics,
                    v1::ErrorMetrics* proto) {
  proto->set_count(sums.count);
  proto->set_non_finite_count(sums.non_finite);
  proto->set_clipped_low_count(sums.clipped_low);
  proto->set_clipped_high_count(sums.clipped_high);
  if (metrics.Has(v1::ERROR_METRIC_ZERO_FLUSHED_COUNT)) {
    proto->set_zero_flushed_count(sums.zero_flushed);
  }
  if (metrics.Has(v1::ERROR_METRIC_SUM_SQUARED_ERROR)) {
    proto->set_sum_squared_error(sums.squared_error);
  }
  if (metrics.Has(v1::ERROR_METRIC_MEAN_SQUARED_ERROR)) {
    proto->set_mean_squared_error(sums.MeanSquaredError());
  }
  if (metrics.Has(v1::ERROR_METRIC_MEAN_ABSOLUTE_ERROR)) {
    proto->set_mean_absolute_error(sums.MeanAbsoluteError());
  }
  if (metrics.Has(v1::ERROR_METRIC_MAX_ABSOLUTE_ERROR)) {
    proto->set_max_absolute_error(sums.max_absolute_error);
  }
  if (metrics.Has(v1::ERROR_METRIC_MEAN_RELATIVE_ERROR)) {
    proto->set_mean_relative_error(sums.MeanRelativeError());
  }
  if (metrics.Has(v1::ERROR_METRIC_MAX_RELATIVE_ERROR)) {
    proto->set_max_relative_error(sums.max_relative_error);
  }
  if (metrics.Has(v1::ERROR_METRIC_SQNR_DB)) {
    proto->set_sqnr_db(sums.SqnrDb());
  }
  if (metrics.Has(v1::ERROR_METRIC_COSINE_SIMILARITY)) {
    proto->set_cosine_similarity(sums.CosineSimilarity());
  }
}

void DistributionToProto(const core::ErrorDistribution& distribution,
                         v1::ErrorMetrics* proto) {
  proto->set_kl_divergence(distribution.kl_divergence);
  v1::ErrorHistogram* const histogram = proto->mutable_error_histogram();
  histogram->set_zero_count(distribution.zero);
  histogram->mutable_count()->Assign(distribution.count.begin(),
                                     distribution.count.end());
  histogram->set_first_exponent(distribution.first_exponent);
}

}  // namespace quantd::server
