#include "server/store/metering_statistics_store.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "server/store/metering.h"

namespace quantd::server {

MeteringStatisticsStore::MeteringStatisticsStore(
    std::unique_ptr<StatisticsStore> inner, Metrics* metrics)
    : inner_(std::move(inner)), metrics_(metrics) {}

MeteringStatisticsStore::~MeteringStatisticsStore() = default;

absl::StatusOr<ContributionOutcome> MeteringStatisticsStore::Merge(
    const ContributionKey& key, const core::StatisticsState& part,
    double averaging_constant,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  absl::StatusOr<ContributionOutcome> outcome = Measure(
      metrics_, StoreOperation::kContribute,
      [&] { return inner_->Merge(key, part, averaging_constant, proceed); });
  if (outcome.ok()) metrics_->Contribution(outcome->duplicate);
  return outcome;
}

absl::StatusOr<StoredStatistics> MeteringStatisticsStore::ReadStatistics(
    const EncodingKey& key, bool with_moments,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  return Measure(metrics_, StoreOperation::kGetStatistics, [&] {
    return inner_->ReadStatistics(key, with_moments, proceed);
  });
}

absl::StatusOr<uint64_t> MeteringStatisticsStore::Fingerprint(
    const EncodingKey& key) {
  return Measure(metrics_, StoreOperation::kGetStatistics,
                 [&] { return inner_->Fingerprint(key); });
}

absl::StatusOr<absl::optional<core::GramState>>
MeteringStatisticsStore::ReadGram(
    const EncodingKey& key,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  return Measure(metrics_, StoreOperation::kGetStatistics,
                 [&] { return inner_->ReadGram(key, proceed); });
}

absl::StatusOr<absl::optional<core::GramState::Parts>>
MeteringStatisticsStore::FindGram(const EncodingKey& key) {
  return Measure(metrics_, StoreOperation::kGetStatistics,
                 [&] { return inner_->FindGram(key); });
}

absl::StatusOr<StoredMoments> MeteringStatisticsStore::ReadMoments(
    const EncodingKey& key,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  return Measure(metrics_, StoreOperation::kGetStatistics,
                 [&] { return inner_->ReadMoments(key, proceed); });
}

absl::StatusOr<std::vector<StatisticsListEntry>>
MeteringStatisticsStore::ListStatistics(absl::string_view model,
                                        absl::string_view revision,
                                        absl::string_view after, int limit) {
  return Measure(metrics_, StoreOperation::kListStatistics, [&] {
    return inner_->ListStatistics(model, revision, after, limit);
  });
}

absl::Status MeteringStatisticsStore::DeleteStatistics(
    const EncodingKey& key, absl::string_view source) {
  return Measure(metrics_, StoreOperation::kDeleteStatistics,
                 [&] { return inner_->DeleteStatistics(key, source); });
}

absl::Status MeteringStatisticsStore::DeleteStatisticsUpTo(
    const EncodingKey& key, absl::Time update_time) {
  return Measure(metrics_, StoreOperation::kDeleteStatistics, [&] {
    return inner_->DeleteStatisticsUpTo(key, update_time);
  });
}

}  // namespace quantd::server
