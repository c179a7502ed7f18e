#include "server/store/caching_statistics_store.h"

#include <cstdint>
#include <iterator>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"

namespace quantd::server {
namespace {

int64_t StatisticsBytes(const StoredStatistics& stored) {
  int64_t bytes = static_cast<int64_t>(sizeof(stored)) +
                  stored.state.statistics.memory_bytes() +
                  static_cast<int64_t>(stored.moving_average.size() *
                                       sizeof(core::Extremes));
  for (const SourceListEntry& source : stored.sources) {
    bytes += static_cast<int64_t>(sizeof(source) + source.source.size());
  }
  if (stored.gram.has_value()) {
    bytes += static_cast<int64_t>(stored.gram->exponents.size() * sizeof(int));
  }
  return bytes;
}

int64_t MomentsBytes(const absl::optional<core::AxisMoments>& moments) {
  return moments.has_value() ? moments->moments.memory_bytes() : 0;
}

// The key twice (list and index), and what the allocator and the containers
// add, rounded up.
int64_t OverheadBytes(const EncodingKey& key) {
  constexpr int64_t kOverheadBytes = 512;
  return kOverheadBytes +
         2 * static_cast<int64_t>(key.model.size() + key.revision.size() +
                                  key.tensor.size());
}

}  // namespace

CachingStatisticsStore::CachingStatisticsStore(
    std::unique_ptr<StatisticsStore> inner, int64_t cap_bytes, Metrics* metrics)
    : inner_(std::move(inner)), cap_bytes_(cap_bytes), metrics_(metrics) {}

CachingStatisticsStore::~CachingStatisticsStore() {
  absl::MutexLock lock(&mutex_);
  while (!entries_.empty()) Erase(entries_.begin());
}

absl::StatusOr<ContributionOutcome> CachingStatisticsStore::Merge(
    const ContributionKey& key, const core::StatisticsState& part,
    double averaging_constant,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  return inner_->Merge(key, part, averaging_constant, proceed);
}

absl::StatusOr<StoredStatistics> CachingStatisticsStore::ReadStatistics(
    const EncodingKey& key, bool with_moments,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  absl::StatusOr<Merged> merged =
      Find(key, /*with_statistics=*/true, with_moments);
  if (!merged.ok()) return merged.status();
  if (merged->statistics != nullptr) {
    absl::Status status =
        proceed(StatisticsBytes(*merged->statistics) +
                (with_moments ? MomentsBytes(merged->moments->moments) : 0));
    if (!status.ok()) return status;
  } else {
    absl::StatusOr<StoredStatistics> read =
        inner_->ReadStatistics(key, with_moments, proceed);
    if (!read.ok() || OverheadBytes(key) + StatisticsBytes(*read) +
                              MomentsBytes(read->moments) >
                          cap_bytes_) {
      return read;
    }
    merged->fingerprint = read->fingerprint;
    if (with_moments) {
      merged->moments = std::make_shared<const StoredMoments>(
          StoredMoments{std::exchange(read->moments, {}), read->fingerprint});
    }
    merged->statistics =
        std::make_shared<const StoredStatistics>(*std::move(read));
    Keep(key, *merged);
  }
  StoredStatistics stored = *merged->statistics;
  if (with_moments) stored.moments = merged->moments->moments;
  return stored;
}

absl::StatusOr<uint64_t> CachingStatisticsStore::Fingerprint(
    const EncodingKey& key) {
  return inner_->Fingerprint(key);
}

absl::StatusOr<StoredMoments> CachingStatisticsStore::ReadMoments(
    const EncodingKey& key,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  absl::StatusOr<Merged> merged =
      Find(key, /*with_statistics=*/false, /*with_moments=*/true);
  if (!merged.ok()) return merged.status();
  if (merged->moments != nullptr) {
    absl::Status status = proceed(MomentsBytes(merged->moments->moments));
    if (!status.ok()) return status;
  } else {
    absl::StatusOr<StoredMoments> read = inner_->ReadMoments(key, proceed);
    if (!read.ok() ||
        OverheadBytes(key) + MomentsBytes(read->moments) > cap_bytes_) {
      return read;
    }
    merged->fingerprint = read->fingerprint;
    merged->moments = std::make_shared<const StoredMoments>(*std::move(read));
    Keep(key, *merged);
  }
  return *merged->moments;
}

absl::StatusOr<absl::optional<core::GramState>>
CachingStatisticsStore::ReadGram(
    const EncodingKey& key,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  return inner_->ReadGram(key, proceed);
}

absl::StatusOr<absl::optional<core::GramState::Parts>>
CachingStatisticsStore::FindGram(const EncodingKey& key) {
  return inner_->FindGram(key);
}

absl::StatusOr<std::vector<StatisticsListEntry>>
CachingStatisticsStore::ListStatistics(absl::string_view model,
                                       absl::string_view revision,
                                       absl::string_view after, int limit) {
  return inner_->ListStatistics(model, revision, after, limit);
}

absl::Status CachingStatisticsStore::DeleteStatistics(
    const EncodingKey& key, absl::string_view source) {
  absl::Status status = inner_->DeleteStatistics(key, source);
  if (status.ok()) Forget(key);
  return status;
}

absl::Status CachingStatisticsStore::DeleteStatisticsUpTo(
    const EncodingKey& key, absl::Time update_time) {
  absl::Status status = inner_->DeleteStatisticsUpTo(key, update_time);
  if (status.ok()) Forget(key);
  return status;
}

int64_t CachingStatisticsStore::resident_bytes() const {
  absl::MutexLock lock(&mutex_);
  return bytes_;
}

absl::StatusOr<CachingStatisticsStore::Merged> CachingStatisticsStore::Find(
    const EncodingKey& key, bool with_statistics, bool with_moments) {
  Merged merged;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = index_.find(key);
    if (found == index_.end()) return Merged();
    entries_.splice(entries_.begin(), entries_, found->second);
    merged = found->second->merged;
  }
  if ((with_statistics && merged.statistics == nullptr) ||
      (with_moments && merged.moments == nullptr)) {
    return Merged();
  }
  const absl::StatusOr<uint64_t> fingerprint = inner_->Fingerprint(key);
  if (fingerprint.ok() && *fingerprint == merged.fingerprint) return merged;
  if (fingerprint.ok() || absl::IsNotFound(fingerprint.status())) Forget(key);
  if (!fingerprint.ok()) return fingerprint.status();
  return Merged();
}

int64_t CachingStatisticsStore::CostBytes(const EncodingKey& key,
                                          const Merged& merged) {
  int64_t bytes = OverheadBytes(key);
  if (merged.statistics != nullptr) {
    bytes += StatisticsBytes(*merged.statistics);
  }
  if (merged.moments != nullptr) {
    bytes += MomentsBytes(merged.moments->moments);
  }
  return bytes;
}

void CachingStatisticsStore::Keep(const EncodingKey& key, Merged merged) {
  absl::MutexLock lock(&mutex_);
  const auto found = index_.find(key);
  if (found != index_.end()) {
    Merged both = found->second->merged;
    if (both.fingerprint == merged.fingerprint) {
      if (merged.statistics != nullptr) both.statistics = merged.statistics;
      if (merged.moments != nullptr) both.moments = merged.moments;
      if (CostBytes(key, both) <= cap_bytes_) merged = std::move(both);
    }
    Erase(found->second);
  }
  const int64_t cost_bytes = CostBytes(key, merged);
  while (bytes_ + cost_bytes > cap_bytes_) Erase(std::prev(entries_.end()));
  entries_.push_front({key, std::move(merged), cost_bytes});
  index_.emplace(key, entries_.begin());
  bytes_ += cost_bytes;
  metrics_->CacheResident(cost_bytes, 1);
}

void CachingStatisticsStore::Forget(const EncodingKey& key) {
  absl::MutexLock lock(&mutex_);
  const auto found = index_.find(key);
  if (found != index_.end()) Erase(found->second);
}

void CachingStatisticsStore::Erase(std::list<Entry>::iterator entry) {
  bytes_ -= entry->cost_bytes;
  metrics_->CacheResident(-entry->cost_bytes, -1);
  index_.erase(entry->key);
  entries_.erase(entry);
}

}  // namespace quantd::server
