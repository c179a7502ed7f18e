// A store of statistics as one caller sees it.

#ifndef QUANTD_SERVER_GUARD_TENANT_STATISTICS_STORE_H_
#define QUANTD_SERVER_GUARD_TENANT_STATISTICS_STORE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "server/guard/access_list.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// A model that the caller may not see does not exist for it: reading and
// deleting answer as for a name that was never stored, without asking the
// store, and lists are empty. A write of the caller counts for it, and keeps to
// the quotas of the access file. Thread-safe.
class TenantStatisticsStore : public StatisticsStore {
 public:
  // `inner` must outlive this.
  TenantStatisticsStore(StatisticsStore* inner,
                        std::shared_ptr<const Principal> principal);

  // Errors: SCOPE_MISSING without calibrate, MODEL_DENIED whether or not there
  // is anything, as well.
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
  StatisticsStore* const inner_;
  const std::shared_ptr<const Principal> principal_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_TENANT_STATISTICS_STORE_H_
