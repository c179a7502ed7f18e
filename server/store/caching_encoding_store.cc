#include "server/store/caching_encoding_store.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/hash/hash.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/types/encoding_memory.h"

namespace quantd::server {
namespace {

// The encoding, the key twice (list and index), the etag, and what the
// allocator and the containers add, rounded up.
int64_t CostBytes(const EncodingKey& key, const StoredEncoding& stored) {
  constexpr int64_t kOverheadBytes = 512;
  const size_t key_bytes =
      key.model.size() + key.revision.size() + key.tensor.size();
  return kOverheadBytes + 2 * static_cast<int64_t>(key_bytes) +
         static_cast<int64_t>(stored.etag.size() + stored.provenance.size()) +
         core::MemoryBytes(*stored.encoding);
}

}  // namespace

// Reads of the key go to the inner store while it is finished.
class CachingEncodingStore::Writer final : public EncodingWriter {
 public:
  Writer(CachingEncodingStore* store, EncodingKey key,
         std::unique_ptr<EncodingWriter> inner)
      : store_(*store), key_(std::move(key)), inner_(std::move(inner)) {}

  absl::Status Add(const ScalePiece& piece) override {
    return inner_->Add(piece);
  }
  absl::StatusOr<StoredEncoding> Finish() override {
    Shard& shard = store_.ShardOf(key_);
    const absl::Duration now = store_.options_.clock();
    const int64_t begin_event = store_.BeginWrite(shard, key_);
    absl::StatusOr<StoredEncoding> result = inner_->Finish();
    store_.EndWrite(shard, key_, begin_event, result.status(), nullptr, now,
                    absl::nullopt);
    return result;
  }

 private:
  CachingEncodingStore& store_;
  const EncodingKey key_;
  const std::unique_ptr<EncodingWriter> inner_;
};

CachingEncodingStore::CachingEncodingStore(std::unique_ptr<EncodingStore> inner,
                                           Options options, Metrics* metrics)
    : inner_(std::move(inner)),
      options_(std::move(options)),
      shard_cap_bytes_(options_.cap_bytes / kShardCount),
      metrics_(metrics) {}

CachingEncodingStore::~CachingEncodingStore() {
  AddResident(-resident_bytes_, -resident_entries_);
}

absl::StatusOr<StoredEncoding> CachingEncodingStore::Read(
    const EncodingKey& key,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  Shard& shard = ShardOf(key);
  const absl::Duration now = options_.clock();
  // Too old to answer without asking, but better than no answer.
  std::optional<StoredEncoding> stale;
  int64_t write_events;
  {
    absl::MutexLock lock(&shard.mutex);
    Entry* const entry = Touch(shard, key);
    if (entry != nullptr && IsFresh(*entry, now)) {
      metrics_->CacheHit();
      return entry->stored;
    }
  }
  const absl::optional<int64_t> version = CheckVersion(now);
  {
    absl::MutexLock lock(&shard.mutex);
    if (Entry* const entry = Touch(shard, key); entry != nullptr) {
      if (IsFresh(*entry, now)) {
        metrics_->CacheHit();
        return entry->stored;
      }
      if (now - entry->read_time <= options_.max_stale) stale = entry->stored;
    }
    InFlight& in_flight = shard.in_flight[key];
    ++in_flight.reads;
    write_events = in_flight.write_events;
  }
  metrics_->CacheMiss();
  bool is_refused = false;
  absl::StatusOr<StoredEncoding> result =
      inner_->Read(key, [&](int64_t memory_bytes) {
        absl::Status status = proceed(memory_bytes);
        is_refused = !status.ok();
        return status;
      });

  absl::MutexLock lock(&shard.mutex);
  const auto it = shard.in_flight.find(key);
  InFlight& in_flight = it->second;
  const bool undisturbed = in_flight.writes == 0 &&
                           in_flight.write_events == write_events &&
                           shard.wide_writes == 0;
  if (result.ok()) {
    in_flight.answered_generation =
        std::max(in_flight.answered_generation, result->generation);
  }
  if (--in_flight.reads == 0 && in_flight.writes == 0) {
    shard.in_flight.erase(it);
  }
  // A refusal says nothing about the encoding.
  if (is_refused) return result;
  const auto cached = shard.index.find(key);
  if (!undisturbed) {
    // It may be outdated by now, but who was answered this must not be answered
    // an older one when the inner store goes away.
    if (cached == shard.index.end() || absl::IsUnavailable(result.status())) {
      return result;
    }
    if (!result.ok()) {
      Erase(shard, key);
    } else if (cached->second->stored.generation < result->generation) {
      Insert(shard, key, *result, now, version, /*is_in_doubt=*/true);
    }
    return result;
  }
  if (result.ok()) {
    // Reads that overlap may end out of order.
    if (cached == shard.index.end() ||
        cached->second->stored.generation <= result->generation) {
      Insert(shard, key, *result, now, version, /*is_in_doubt=*/false);
    }
  } else if (absl::IsUnavailable(result.status())) {
    if (stale.has_value()) return *std::move(stale);
  } else {
    Erase(shard, key);
  }
  return result;
}

absl::optional<StoredEncoding> CachingEncodingStore::Cached(
    const EncodingKey& key) {
  Shard& shard = ShardOf(key);
  const absl::Duration now = options_.clock();
  absl::MutexLock lock(&shard.mutex);
  Entry* const entry = Touch(shard, key);
  if (entry == nullptr || !IsFresh(*entry, now)) return absl::nullopt;
  metrics_->CacheHit();
  return entry->stored;
}

CachingEncodingStore::Entry* CachingEncodingStore::Touch(
    Shard& shard, const EncodingKey& key) {
  const auto it = shard.index.find(key);
  if (it == shard.index.end()) return nullptr;
  shard.entries.splice(shard.entries.begin(), shard.entries, it->second);
  return &*it->second;
}

bool CachingEncodingStore::IsFresh(Entry& entry, absl::Duration now) {
  if (entry.is_in_doubt) return false;
  if (now - entry.read_time <= options_.max_age) return true;
  if (!entry.version.has_value()) return false;
  absl::MutexLock lock(&version_mutex_);
  // Nobody else wrote from before the entry was read until then.
  if (entry.version == version_.number) {
    entry.read_time = std::max(entry.read_time, version_.time);
  }
  return now - entry.read_time <= options_.max_age;
}

absl::optional<int64_t> CachingEncodingStore::CheckVersion(absl::Duration now) {
  {
    absl::MutexLock lock(&version_mutex_);
    if (now - version_.time <= options_.max_age) return version_.number;
  }
  const absl::optional<int64_t> number = inner_->ForeignVersion();
  // Unknown for now: what is known stays good for what it is known of.
  if (!number.has_value()) return absl::nullopt;
  absl::MutexLock lock(&version_mutex_);
  // Checks that overlap may end out of order.
  if (version_.time <= now) version_ = {number, now};
  return number;
}

absl::StatusOr<StoredEncoding> CachingEncodingStore::Put(
    const EncodingKey& key, std::shared_ptr<const core::Encoding> encoding,
    const Precondition& precondition) {
  Shard& shard = ShardOf(key);
  const absl::Duration now = options_.clock();
  const absl::optional<int64_t> version = CheckVersion(now);
  const int64_t begin_event = BeginWrite(shard, key);
  absl::StatusOr<StoredEncoding> result =
      inner_->Put(key, std::move(encoding), precondition);
  EndWrite(shard, key, begin_event, result.status(),
           result.ok() ? &*result : nullptr, now, version);
  return result;
}

absl::Status CachingEncodingStore::Delete(const EncodingKey& key,
                                          const Precondition& precondition) {
  Shard& shard = ShardOf(key);
  const absl::Duration now = options_.clock();
  const int64_t begin_event = BeginWrite(shard, key);
  const absl::Status status = inner_->Delete(key, precondition);
  EndWrite(shard, key, begin_event, status, nullptr, now, absl::nullopt);
  return status;
}

absl::StatusOr<std::unique_ptr<EncodingReader>>
CachingEncodingStore::OpenReader(const EncodingKey& key) {
  return inner_->OpenReader(key);
}

absl::StatusOr<std::unique_ptr<EncodingWriter>>
CachingEncodingStore::OpenWriter(const EncodingKey& key,
                                 std::shared_ptr<const core::Encoding> outline,
                                 bool has_zero_points,
                                 const Precondition& precondition) {
  absl::StatusOr<std::unique_ptr<EncodingWriter>> writer = inner_->OpenWriter(
      key, std::move(outline), has_zero_points, precondition);
  if (!writer.ok()) return writer;
  return std::make_unique<Writer>(this, key, *std::move(writer));
}

absl::StatusOr<PublishedRevision> CachingEncodingStore::PublishRevision(
    absl::string_view model, absl::string_view source, absl::string_view target,
    bool keep_others) {
  const std::vector<absl::string_view> revisions = {source, target};
  const WideWrite write{model, &revisions};
  BeginWideWrite(write);
  absl::StatusOr<PublishedRevision> result =
      inner_->PublishRevision(model, source, target, keep_others);
  EndWideWrite(write, result.status());
  return result;
}

absl::StatusOr<DeletedRows> CachingEncodingStore::DeleteRevision(
    absl::string_view model, absl::string_view revision) {
  const std::vector<absl::string_view> revisions = {revision};
  const WideWrite write{model, &revisions};
  BeginWideWrite(write);
  absl::StatusOr<DeletedRows> result = inner_->DeleteRevision(model, revision);
  EndWideWrite(write, result.status());
  return result;
}

absl::StatusOr<DeletedRows> CachingEncodingStore::DeleteModel(
    absl::string_view model) {
  const WideWrite write{model, nullptr};
  BeginWideWrite(write);
  absl::StatusOr<DeletedRows> result = inner_->DeleteModel(model);
  EndWideWrite(write, result.status());
  return result;
}

bool CachingEncodingStore::WideWrite::Holds(const EncodingKey& key) const {
  return key.model == model && (revisions == nullptr ||
                                std::find(revisions->begin(), revisions->end(),
                                          key.revision) != revisions->end());
}

void CachingEncodingStore::BeginWideWrite(const WideWrite& write) {
  for (Shard& shard : shards_) {
    absl::MutexLock lock(&shard.mutex);
    ++shard.wide_writes;
    for (auto& [key, in_flight] : shard.in_flight) ++in_flight.write_events;
    for (Entry& entry : shard.entries) {
      if (write.Holds(entry.key)) entry.is_in_doubt = true;
    }
  }
}

void CachingEncodingStore::EndWideWrite(const WideWrite& write,
                                        const absl::Status& status) {
  for (Shard& shard : shards_) {
    absl::MutexLock lock(&shard.mutex);
    --shard.wide_writes;
    for (auto& [key, in_flight] : shard.in_flight) ++in_flight.write_events;
    if (!status.ok()) continue;
    std::vector<EncodingKey> gone;
    for (const Entry& entry : shard.entries) {
      if (write.Holds(entry.key)) gone.push_back(entry.key);
    }
    for (const EncodingKey& key : gone) Erase(shard, key);
  }
}

absl::StatusOr<std::vector<EncodingListEntry>>
CachingEncodingStore::ListEncodings(absl::string_view model,
                                    absl::string_view revision,
                                    absl::string_view after, int limit) {
  return inner_->ListEncodings(model, revision, after, limit);
}

absl::StatusOr<std::vector<ModelListEntry>> CachingEncodingStore::ListModels(
    const NameRange& range, int limit) {
  return inner_->ListModels(range, limit);
}

absl::StatusOr<std::vector<RevisionListEntry>>
CachingEncodingStore::ListRevisions(absl::string_view model,
                                    absl::string_view after, int limit) {
  return inner_->ListRevisions(model, after, limit);
}

absl::Status CachingEncodingStore::Ping() { return inner_->Ping(); }

int64_t CachingEncodingStore::resident_bytes() const {
  absl::MutexLock lock(&totals_mutex_);
  return resident_bytes_;
}

int64_t CachingEncodingStore::resident_entries() const {
  absl::MutexLock lock(&totals_mutex_);
  return resident_entries_;
}

CachingEncodingStore::Shard& CachingEncodingStore::ShardOf(
    const EncodingKey& key) {
  return shards_[absl::HashOf(key) % kShardCount];
}

int64_t CachingEncodingStore::BeginWrite(Shard& shard, const EncodingKey& key) {
  absl::MutexLock lock(&shard.mutex);
  // From here on reads go to the inner store, so that none answers the old
  // encoding after another has answered the new one.
  const auto cached = shard.index.find(key);
  if (cached != shard.index.end()) cached->second->is_in_doubt = true;
  InFlight& in_flight = shard.in_flight[key];
  ++in_flight.writes;
  return ++in_flight.write_events;
}

void CachingEncodingStore::EndWrite(Shard& shard, const EncodingKey& key,
                                    int64_t begin_event,
                                    const absl::Status& status,
                                    const StoredEncoding* stored,
                                    absl::Duration begin_time,
                                    absl::optional<int64_t> version) {
  absl::MutexLock lock(&shard.mutex);
  const auto it = shard.in_flight.find(key);
  InFlight& in_flight = it->second;
  const bool alone = in_flight.writes == 1 &&
                     in_flight.write_events == begin_event &&
                     shard.wide_writes == 0;
  // Another process may have replaced it, and a read answered that.
  const bool is_newest =
      stored != nullptr && stored->generation >= in_flight.answered_generation;
  ++in_flight.write_events;
  if (--in_flight.writes == 0 && in_flight.reads == 0) {
    shard.in_flight.erase(it);
  }
  // The next read finds out what a write that failed has left. While the inner
  // store is away, what was there before is better than nothing.
  if (!status.ok()) return;
  Erase(shard, key);
  if (alone && is_newest) {
    Insert(shard, key, *stored, begin_time, version, /*is_in_doubt=*/false);
  }
}

void CachingEncodingStore::Insert(Shard& shard, const EncodingKey& key,
                                  const StoredEncoding& stored,
                                  absl::Duration read_time,
                                  absl::optional<int64_t> version,
                                  bool is_in_doubt) {
  Erase(shard, key);
  const int64_t cost_bytes = CostBytes(key, stored);
  // One that is large is kept as well, for when the inner store is away, but
  // not in the place of all others.
  constexpr int64_t kSmallBytes = int64_t{256} << 10;
  const int64_t most_bytes = std::max(shard_cap_bytes_ / 2, kSmallBytes);
  if (cost_bytes > std::min(shard_cap_bytes_, most_bytes)) return;
  int64_t evicted = 0;
  while (shard.bytes + cost_bytes > shard_cap_bytes_) {
    // A copy, because erasing destroys the key in the entry.
    const EncodingKey oldest = shard.entries.back().key;
    Erase(shard, oldest);
    ++evicted;
  }
  if (evicted > 0) metrics_->CacheEvicted(evicted);
  shard.entries.push_front(
      {key, stored, read_time, version, cost_bytes, is_in_doubt});
  shard.index.emplace(key, shard.entries.begin());
  shard.bytes += cost_bytes;
  AddResident(cost_bytes, 1);
}

void CachingEncodingStore::Erase(Shard& shard, const EncodingKey& key) {
  const auto it = shard.index.find(key);
  if (it == shard.index.end()) return;
  const int64_t cost_bytes = it->second->cost_bytes;
  shard.bytes -= cost_bytes;
  shard.entries.erase(it->second);
  shard.index.erase(it);
  AddResident(-cost_bytes, -1);
}

void CachingEncodingStore::AddResident(int64_t bytes, int64_t entries) {
  absl::MutexLock lock(&totals_mutex_);
  resident_bytes_ += bytes;
  resident_entries_ += entries;
  metrics_->CacheResident(bytes, entries);
}

}  // namespace quantd::server
