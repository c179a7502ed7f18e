// Statistics in a table of a SQL database.

#ifndef QUANTD_SERVER_STORE_SQL_STATISTICS_STORE_H_
#define QUANTD_SERVER_STORE_SQL_STATISTICS_STORE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/statistics/gram_state.h"
#include "server/store/sql_database.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// A row per tensor and source, and its histograms in rows of their own. A
// contribution is merged histogram by histogram in the transaction that writes
// it: a few of them are in memory at a time. Most of a large Gram matrix is
// written before that, in short transactions. Rows carry checksums over all of
// them; one that fails is STORE_CORRUPT for its tensor, until its source is
// deleted. Thread-safe.
class SqlStatisticsStore : public StatisticsStore {
 public:
  // `limit_bytes`  what a row may take, without what it has of features.
  SqlStatisticsStore(std::shared_ptr<SqlDatabase> database,
                     int64_t limit_bytes);

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

  // Reads every row whole, and tells of those that are damaged, STORE_CORRUPT
  // each. Answers how many rows there are.
  // Errors: STORE_UNAVAILABLE; STORE_CORRUPT where the database can't go on.
  absl::StatusOr<int64_t> Check(
      absl::FunctionRef<void(const absl::Status&)> damaged);

 private:
  // Facts that tell the row of a source that was read from others.
  struct SourceRow {
    int64_t incarnation;
    uint64_t checksum;
  };

  // Has each source of a tensor read, or unless that is empty the only one, in
  // a transaction of its own: nobody waits for all of them. `begin` comes
  // first, and again with all sources where some were deleted and came back
  // meanwhile. `read` answers the row that it read; none if the source is not
  // there. Answers the fingerprint of what was read.
  // Errors: STATISTICS_NOT_FOUND for none; those of `read`, STORE_UNAVAILABLE.
  absl::StatusOr<uint64_t> ForEachSource(
      const EncodingKey& key, absl::string_view only,
      absl::FunctionRef<void()> begin,
      absl::FunctionRef<absl::StatusOr<absl::optional<SourceRow>>(
          SqlConnection&, const std::string& source)>
          read);
  // Reads the statistics of all sources, or of `only` unless that is empty.
  absl::StatusOr<StoredStatistics> ReadSources(
      const EncodingKey& key, absl::string_view only, bool with_moments,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed);
  absl::StatusOr<absl::optional<core::GramState>> ReadGrams(
      const EncodingKey& key, absl::string_view only,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed);
  absl::StatusOr<StoredMoments> ReadMomentsOf(
      const EncodingKey& key, absl::string_view only,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed);

  // In transactions of its own: frees what a contribution that took steps has
  // replaced, or what it wrote in vain.
  void FreeStaged(const ContributionKey& key, int64_t set_id,
                  int64_t staged_id);

  // Deletes the statistics of all sources, or of `source` unless that is empty;
  // `check` may refuse it.
  absl::Status Delete(const EncodingKey& key, absl::string_view source,
                      absl::FunctionRef<absl::Status(SqlConnection&)> check);

  const std::shared_ptr<SqlDatabase> database_;
  const int64_t limit_bytes_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_SQL_STATISTICS_STORE_H_
