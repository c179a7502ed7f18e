// Statistics kept in memory in front of another store.

#ifndef QUANTD_SERVER_STORE_CACHING_STATISTICS_STORE_H_
#define QUANTD_SERVER_STORE_CACHING_STATISTICS_STORE_H_

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/statistics/gram_state.h"
#include "server/metrics/metrics.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// Answers ReadStatistics and ReadMoments from memory if the inner store still
// has the same contributions, which its Fingerprint tells: what was parsed and
// merged once is only copied. Least recently used tensors go first when the cap
// is reached. Everything else goes to the inner store.
//
// Gram matrices are not kept: one of 8,192 features takes as much as the whole
// cache, and to add them up takes little beside what is then computed.
//
// Thread-safe; no lock is held while the inner store works.
class CachingStatisticsStore : public StatisticsStore {
 public:
  // `cap_bytes`  of everything cached, keys and overhead included.
  // `metrics`    outlives this.
  CachingStatisticsStore(std::unique_ptr<StatisticsStore> inner,
                         int64_t cap_bytes, Metrics* metrics);
  ~CachingStatisticsStore() override;

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

  // Bytes cached now.
  int64_t resident_bytes() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Statistics and moments that were read of a tensor while it had the
  // contributions of the fingerprint.
  struct Merged {
    uint64_t fingerprint = 0;
    // Without moments; null unless they were read.
    std::shared_ptr<const StoredStatistics> statistics;
    // Null unless they were read.
    std::shared_ptr<const StoredMoments> moments;
  };
  struct Entry {
    EncodingKey key;
    Merged merged;
    int64_t cost_bytes;
  };

  static int64_t CostBytes(const EncodingKey& key, const Merged& merged);

  // Returns what is cached of the tensor, if it has both parts that are asked
  // for and the inner store still has the same contributions; otherwise
  // nothing.
  // Errors: those of Fingerprint.
  absl::StatusOr<Merged> Find(const EncodingKey& key, bool with_statistics,
                              bool with_moments) ABSL_LOCKS_EXCLUDED(mutex_);
  // Keeps what was read, and what is there already of the same contributions
  // if there is room for both.
  // Requires: there is room for what was read.
  void Keep(const EncodingKey& key, Merged merged) ABSL_LOCKS_EXCLUDED(mutex_);
  void Forget(const EncodingKey& key) ABSL_LOCKS_EXCLUDED(mutex_);
  void Erase(std::list<Entry>::iterator entry)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<StatisticsStore> inner_;
  const int64_t cap_bytes_;
  Metrics* const metrics_;

  mutable absl::Mutex mutex_;
  // Most recently used first.
  std::list<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<EncodingKey, std::list<Entry>::iterator> index_
      ABSL_GUARDED_BY(mutex_);
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_CACHING_STATISTICS_STORE_H_
