#include "server/guard/tenant_statistics_store.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

absl::Status StatisticsNotFound(const EncodingKey& key) {
  return core::StatisticsNotFoundError(key.model, key.revision, key.tensor);
}

}  // namespace

TenantStatisticsStore::TenantStatisticsStore(
    StatisticsStore* inner, std::shared_ptr<const Principal> principal)
    : inner_(inner), principal_(std::move(principal)) {}

absl::StatusOr<ContributionOutcome> TenantStatisticsStore::Merge(
    const ContributionKey& key, const core::StatisticsState& part,
    double averaging_constant,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  if (absl::Status s = principal_->CheckWrite(key.tensor.model); !s.ok()) {
    return s;
  }
  ContributionKey counted = key;
  counted.account = principal_->AccountFor(key.tensor.model);
  return inner_->Merge(counted, part, averaging_constant, proceed);
}

absl::StatusOr<StoredStatistics> TenantStatisticsStore::ReadStatistics(
    const EncodingKey& key, bool with_moments,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  if (!principal_->MaySee(key.model)) return StatisticsNotFound(key);
  return inner_->ReadStatistics(key, with_moments, proceed);
}

absl::StatusOr<uint64_t> TenantStatisticsStore::Fingerprint(
    const EncodingKey& key) {
  if (!principal_->MaySee(key.model)) return StatisticsNotFound(key);
  return inner_->Fingerprint(key);
}

absl::StatusOr<absl::optional<core::GramState>> TenantStatisticsStore::ReadGram(
    const EncodingKey& key,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  if (!principal_->MaySee(key.model)) return StatisticsNotFound(key);
  return inner_->ReadGram(key, proceed);
}

absl::StatusOr<absl::optional<core::GramState::Parts>>
TenantStatisticsStore::FindGram(const EncodingKey& key) {
  if (!principal_->MaySee(key.model)) {
    return absl::optional<core::GramState::Parts>();
  }
  return inner_->FindGram(key);
}

absl::StatusOr<StoredMoments> TenantStatisticsStore::ReadMoments(
    const EncodingKey& key,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  if (!principal_->MaySee(key.model)) return StatisticsNotFound(key);
  return inner_->ReadMoments(key, proceed);
}

absl::StatusOr<std::vector<StatisticsListEntry>>
TenantStatisticsStore::ListStatistics(absl::string_view model,
                                      absl::string_view revision,
                                      absl::string_view after, int limit) {
  if (!principal_->MaySee(model)) return std::vector<StatisticsListEntry>();
  return inner_->ListStatistics(model, revision, after, limit);
}

absl::Status TenantStatisticsStore::DeleteStatistics(const EncodingKey& key,
                                                     absl::string_view source) {
  return principal_->MaySee(key.model) ? inner_->DeleteStatistics(key, source)
                                       : StatisticsNotFound(key);
}

absl::Status TenantStatisticsStore::DeleteStatisticsUpTo(
    const EncodingKey& key, absl::Time update_time) {
  return principal_->MaySee(key.model)
             ? inner_->DeleteStatisticsUpTo(key, update_time)
             : StatisticsNotFound(key);
}

}  // namespace quantd::server
