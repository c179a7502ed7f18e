// The store of statistics, as callers see it: one state per tensor and source,
// each contribution counted exactly once.

#ifndef QUANTD_SERVER_STORE_STATISTICS_STORE_H_
#define QUANTD_SERVER_STORE_STATISTICS_STORE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/statistics/gram_state.h"
#include "core/statistics/statistics_state.h"
#include "server/store/encoding_store.h"

namespace quantd::server {

// Who contributes, and which of its contributions it is.
struct ContributionKey {
  EncodingKey tensor;
  std::string source;
  // At least 1.
  uint64_t sequence = 0;
  WriteAccount account{};
};

// Answer to a contribution.
struct ContributionOutcome {
  // The last sequence of the source that is counted.
  uint64_t sequence = 0;
  // It was counted before, or is older, and was not counted now.
  bool duplicate = false;
};

// One source of a tensor's statistics.
struct SourceListEntry {
  std::string source;
  uint64_t sequence = 0;
  absl::Time update_time;
};

// The statistics of a tensor over all of its sources.
struct StoredStatistics {
  core::StatisticsState state;
  // [scale_count] averaged extremes; only when there is a single source.
  std::vector<core::Extremes> moving_average;
  // In order of source, never empty.
  std::vector<SourceListEntry> sources;
  // Bytes that their Gram matrices take in the store.
  int64_t gram_size_bytes = 0;
  // The Gram matrix over all sources that have one, without its sums.
  absl::optional<core::GramState::Parts> gram;
  // The moments of features over all sources that have some; none unless they
  // were asked for.
  absl::optional<core::AxisMoments> moments;
  // StatisticsStore::Fingerprint of the sources.
  uint64_t fingerprint = 0;
};

// The moments of features over all sources of a tensor that have some.
struct StoredMoments {
  absl::optional<core::AxisMoments> moments;
  // StatisticsStore::Fingerprint of all sources.
  uint64_t fingerprint = 0;
};

struct StatisticsListEntry {
  // Any bytes where a row is damaged.
  std::string tensor;
  // STORE_CORRUPT where one is; what else the entry has is of the others.
  absl::Status error;
  int64_t source_count = 0;
  // Bytes of the states as they are stored, and of their Gram matrices alone.
  int64_t size_bytes = 0;
  int64_t gram_size_bytes = 0;
  absl::Time update_time;
};

// Thread-safe. Calls may block on a disk: never call with a lock held.
// Errors of every call: STORE_UNAVAILABLE, STORE_CORRUPT.
class StatisticsStore {
 public:
  virtual ~StatisticsStore() = default;

  // Adds `part` to the state of the source unless its sequence is not larger
  // than the last one. The addition is durable when the call returns, and
  // happens exactly once whatever fails in between. The source's averaged
  // extremes move by `averaging_constant` of the difference to those of `part`.
  // The first contribution sets them, and a scale index without a finite
  // element leaves them as they are. The Gram matrix and the moments of `part`
  // are added to those of the source. Calls `proceed` with the memory that the
  // call will hold beside `part`, which is little. `proceed` must not wait,
  // because others do.
  // Errors: STATISTICS_MISMATCH (with any source of the tensor),
  // STATISTICS_TOO_LARGE (the source's state would exceed the limit of the
  // store), QUOTA_EXCEEDED; that of `proceed`: nothing has changed then.
  virtual absl::StatusOr<ContributionOutcome> Merge(
      const ContributionKey& key, const core::StatisticsState& part,
      double averaging_constant,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) = 0;
  // Merges like Merge, whatever memory it takes.
  absl::StatusOr<ContributionOutcome> Contribute(
      const ContributionKey& key, const core::StatisticsState& part,
      double averaging_constant) {
    return Merge(key, part, averaging_constant,
                 [](int64_t /*memory*/) { return absl::OkStatus(); });
  }

  // Reads the statistics over all sources, of which there may be thousands:
  // calls `proceed` before each with what reading it will hold in memory, those
  // before it included. Where they are deleted and contributed again meanwhile,
  // it reads those that are there then. Everything that it answers is of the
  // same contributions.
  // `with_moments`  whether to read the moments of features as well.
  // Errors: STATISTICS_NOT_FOUND; that of `proceed`, which ends the reading.
  virtual absl::StatusOr<StoredStatistics> ReadStatistics(
      const EncodingKey& key, bool with_moments,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) = 0;
  // Reads like ReadStatistics, to the end, whatever memory it takes.
  absl::StatusOr<StoredStatistics> GetStatistics(const EncodingKey& key,
                                                 bool with_moments = false) {
    return ReadStatistics(key, with_moments,
                          [](int64_t /*memory*/) { return absl::OkStatus(); });
  }

  // A number that tells the contributions of all sources from any others, for
  // much less than it takes to read them.
  // Errors: STATISTICS_NOT_FOUND.
  virtual absl::StatusOr<uint64_t> Fingerprint(const EncodingKey& key) = 0;

  // The Gram matrix over all sources that have one; none where no source has.
  // Calls `proceed` before each with what reading it will hold in memory.
  // Errors: STATISTICS_NOT_FOUND, GRAM_INVALID; that of `proceed`.
  virtual absl::StatusOr<absl::optional<core::GramState>> ReadGram(
      const EncodingKey& key,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) = 0;
  // Reads the Gram matrix over all sources without its sums; none also where
  // there are no statistics.
  virtual absl::StatusOr<absl::optional<core::GramState::Parts>> FindGram(
      const EncodingKey& key) = 0;

  // The moments alone. Calls `proceed` with what reading them will hold in
  // memory.
  // Errors: STATISTICS_NOT_FOUND; that of `proceed`.
  virtual absl::StatusOr<StoredMoments> ReadMoments(
      const EncodingKey& key,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) = 0;

  // At most `limit` entries in order of tensor, bytewise, after `after`. What
  // is read of a row is verified, and one that is damaged told in its place.
  // Errors: PAGE_INVALID where `after` is not what the store takes.
  virtual absl::StatusOr<std::vector<StatisticsListEntry>> ListStatistics(
      absl::string_view model, absl::string_view revision,
      absl::string_view after, int limit) = 0;

  // Deletes the statistics of one source, or with an empty `source` of all;
  // durable when it returns.
  // Errors: STATISTICS_NOT_FOUND.
  virtual absl::Status DeleteStatistics(const EncodingKey& key,
                                        absl::string_view source) = 0;

  // Deletes the statistics of all sources, unless one of them contributed after
  // `update_time`.
  // Errors: STATISTICS_NOT_FOUND, also when it did.
  virtual absl::Status DeleteStatisticsUpTo(const EncodingKey& key,
                                            absl::Time update_time) = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_STATISTICS_STORE_H_
