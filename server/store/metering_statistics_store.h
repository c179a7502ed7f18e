// Measures another store of statistics.

#ifndef QUANTD_SERVER_STORE_METERING_STATISTICS_STORE_H_
#define QUANTD_SERVER_STORE_METERING_STATISTICS_STORE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/statistics/gram_state.h"
#include "server/metrics/metrics.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// Passes every call on, its latency and outcome to Metrics, and counts the
// contributions. Statistics that are not there, do not go together or are too
// large are answers, not errors. Thread-safe.
class MeteringStatisticsStore : public StatisticsStore {
 public:
  // `metrics` must outlive this.
  MeteringStatisticsStore(std::unique_ptr<StatisticsStore> inner,
                          Metrics* metrics);
  ~MeteringStatisticsStore() override;

  absl::StatusOr<ContributionOutcome> Merge(
      const ContributionKey& key, const core::StatisticsState& part,
      double averaging_constant,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override;
  absl::StatusOr<StoredStatistics> ReadStatistics(
      const EncodingKey& key, bool with_moments,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override;
  absl::StatusOr<uint64_t> Fingerprint(const EncodingKey& key) override;
  absl::StatusOr<absl::optional<core::GramState>> ReadGram(
      const EncodingKey& key,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override;
  absl::StatusOr<absl::optional<core::GramState::Parts>> FindGram(
      const EncodingKey& key) override;
  absl::StatusOr<StoredMoments> ReadMoments(
      const EncodingKey& key,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override;
  absl::StatusOr<std::vector<StatisticsListEntry>> ListStatistics(
      absl::string_view model, absl::string_view revision,
      absl::string_view after, int limit) override;
  absl::Status DeleteStatistics(const EncodingKey& key,
                                absl::string_view source) override;
  absl::Status DeleteStatisticsUpTo(const EncodingKey& key,
                                    absl::Time update_time) override;

 private:
  const std::unique_ptr<StatisticsStore> inner_;
  Metrics* const metrics_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_METERING_STATISTICS_STORE_H_
