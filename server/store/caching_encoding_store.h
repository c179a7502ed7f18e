// Encodings kept in memory in front of another store.

#ifndef QUANTD_SERVER_STORE_CACHING_ENCODING_STORE_H_
#define QUANTD_SERVER_STORE_CACHING_ENCODING_STORE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
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
#include "core/parallel/steady_clock.h"
#include "server/metrics/metrics.h"
#include "server/store/encoding_store.h"

namespace quantd::server {

// Answers Get from memory: least recently used encodings go first when the cap
// is reached. Everything else goes to the inner store.
//
// Within this process, a Get never answers what a finished Put or Delete
// replaced. What another process put into the same store is seen within
// `max_age`. For that the inner store is asked whether there was such a put
// (ForeignVersion), once for all encodings. If it cannot tell, it is asked for
// each encoding. While the inner store is unavailable, cached encodings are
// answered for up to `max_stale`.
//
// Thread-safe; no lock is held while the inner store works.
class CachingEncodingStore : public EncodingStore {
 public:
  struct Options {
    // Cap on the bytes of everything cached, keys and overhead included. An
    // encoding is not cached if it is larger than a sixteenth of the cap, or
    // larger than both a thirty-second of the cap and a quarter of a MiB; 0
    // caches nothing.
    int64_t cap_bytes = int64_t{256} << 20;
    // After this the inner store is asked again.
    absl::Duration max_age = absl::Seconds(1);
    absl::Duration max_stale = absl::Minutes(10);
    // Monotonic, from any start.
    std::function<absl::Duration()> clock = &core::SteadyNow;
  };

  // `metrics` must outlive this.
  CachingEncodingStore(std::unique_ptr<EncodingStore> inner, Options options,
                       Metrics* metrics);
  ~CachingEncodingStore() override;

  absl::StatusOr<StoredEncoding> Read(
      const EncodingKey& key,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override;
  absl::optional<StoredEncoding> Cached(const EncodingKey& key) override;
  absl::StatusOr<StoredEncoding> Put(
      const EncodingKey& key, std::shared_ptr<const core::Encoding> encoding,
      const Precondition& precondition) override;
  absl::Status Delete(const EncodingKey& key,
                      const Precondition& precondition) override;
  absl::StatusOr<std::unique_ptr<EncodingReader>> OpenReader(
      const EncodingKey& key) override;
  absl::StatusOr<std::unique_ptr<EncodingWriter>> OpenWriter(
      const EncodingKey& key, std::shared_ptr<const core::Encoding> outline,
      bool has_zero_points, const Precondition& precondition) override;
  absl::StatusOr<PublishedRevision> PublishRevision(absl::string_view model,
                                                    absl::string_view source,
                                                    absl::string_view target,
                                                    bool keep_others) override;
  absl::StatusOr<DeletedRows> DeleteRevision(
      absl::string_view model, absl::string_view revision) override;
  absl::StatusOr<DeletedRows> DeleteModel(absl::string_view model) override;
  absl::StatusOr<std::vector<EncodingListEntry>> ListEncodings(
      absl::string_view model, absl::string_view revision,
      absl::string_view after, int limit) override;
  absl::StatusOr<std::vector<ModelListEntry>> ListModels(const NameRange& range,
                                                         int limit) override;
  absl::StatusOr<std::vector<RevisionListEntry>> ListRevisions(
      absl::string_view model, absl::string_view after, int limit) override;
  absl::Status Ping() override;

  // Bytes and entries cached now.
  int64_t resident_bytes() const ABSL_LOCKS_EXCLUDED(totals_mutex_);
  int64_t resident_entries() const ABSL_LOCKS_EXCLUDED(totals_mutex_);

 private:
  class Writer;

  static constexpr int kShardCount = 16;

  struct Entry {
    EncodingKey key;
    StoredEncoding stored;
    // When the inner store was asked, or was last known to hold just this.
    absl::Duration read_time;
    // ForeignVersion of some time before the inner store was asked.
    absl::optional<int64_t> version;
    int64_t cost_bytes;
    // A write of this process may have replaced it, or may have been under way
    // when it was read: good only while the inner store is unavailable.
    bool is_in_doubt;
  };

  // ForeignVersion, and when it was asked.
  struct Version {
    absl::optional<int64_t> number;
    absl::Duration time = -absl::InfiniteDuration();
  };

  // Reads and writes of one key that are at the inner store now. What a read
  // brings is cached only if no write overlapped it; what a write leaves only
  // if no other write did.
  struct InFlight {
    int reads = 0;
    int writes = 0;
    // Counts the begins and ends of writes.
    int64_t write_events = 0;
    // The newest that was read meanwhile.
    int64_t answered_generation = 0;
  };

  struct Shard {
    absl::Mutex mutex;
    // Most recently used first.
    std::list<Entry> entries ABSL_GUARDED_BY(mutex);
    absl::flat_hash_map<EncodingKey, std::list<Entry>::iterator> index
        ABSL_GUARDED_BY(mutex);
    int64_t bytes ABSL_GUARDED_BY(mutex) = 0;
    absl::flat_hash_map<EncodingKey, InFlight> in_flight ABSL_GUARDED_BY(mutex);
    // Writes of whole revisions and models that are at the inner store now.
    int wide_writes ABSL_GUARDED_BY(mutex) = 0;
  };

  // Writes by which many keys may change: of a model, and unless that is null
  // only of some of its revisions.
  struct WideWrite {
    absl::string_view model;
    const std::vector<absl::string_view>* revisions;

    bool Holds(const EncodingKey& key) const;
  };

  Shard& ShardOf(const EncodingKey& key);
  // The entry of the key, which becomes the most recently used; null if there
  // is none.
  Entry* Touch(Shard& shard, const EncodingKey& key)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(shard.mutex);
  // True if the entry may be answered without asking.
  bool IsFresh(Entry& entry, absl::Duration now)
      ABSL_LOCKS_EXCLUDED(version_mutex_);
  // The inner store's version, not older than max_age.
  absl::optional<int64_t> CheckVersion(absl::Duration now)
      ABSL_LOCKS_EXCLUDED(version_mutex_);
  int64_t BeginWrite(Shard& shard, const EncodingKey& key)
      ABSL_LOCKS_EXCLUDED(shard.mutex);
  void BeginWideWrite(const WideWrite& write);
  void EndWideWrite(const WideWrite& write, const absl::Status& status);
  // `stored` is what the write left, null if that is nothing or it failed.
  void EndWrite(Shard& shard, const EncodingKey& key, int64_t begin_event,
                const absl::Status& status, const StoredEncoding* stored,
                absl::Duration begin_time, absl::optional<int64_t> version)
      ABSL_LOCKS_EXCLUDED(shard.mutex);
  void Insert(Shard& shard, const EncodingKey& key,
              const StoredEncoding& stored, absl::Duration read_time,
              absl::optional<int64_t> version, bool is_in_doubt)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(shard.mutex);
  void Erase(Shard& shard, const EncodingKey& key)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(shard.mutex);
  void AddResident(int64_t bytes, int64_t entries)
      ABSL_LOCKS_EXCLUDED(totals_mutex_);

  const std::unique_ptr<EncodingStore> inner_;
  const Options options_;
  const int64_t shard_cap_bytes_;
  Metrics* const metrics_;
  std::array<Shard, kShardCount> shards_;

  absl::Mutex version_mutex_;
  Version version_ ABSL_GUARDED_BY(version_mutex_);

  mutable absl::Mutex totals_mutex_;
  int64_t resident_bytes_ ABSL_GUARDED_BY(totals_mutex_) = 0;
  int64_t resident_entries_ ABSL_GUARDED_BY(totals_mutex_) = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_CACHING_ENCODING_STORE_H_
