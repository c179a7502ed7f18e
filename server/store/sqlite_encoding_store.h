// Encodings in one SQLite file: the embedded default.

#ifndef QUANTD_SERVER_STORE_SQLITE_ENCODING_STORE_H_
#define QUANTD_SERVER_STORE_SQLITE_ENCODING_STORE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/store/encoding_store.h"

namespace quantd::server {

// The version that this program writes into PRAGMA user_version. Migrations
// only go forward.
constexpr int kSqliteSchemaVersion = 1;

// WAL and synchronous=FULL: a commit is on disk when it returns. Several
// processes may open one file. A row carries a checksum over all of it; one
// that fails is STORE_CORRUPT, and putting or deleting it repairs the store.
// Thread-safe: reads run side by side, writes one after another.
class SqliteEncodingStore : public EncodingStore {
 public:
  // Creates the file, and its directory when only the last component is
  // missing. `path` is a plain path, not a URI and not ":memory:".
  // Errors: STORE_UNAVAILABLE (a network file system among them),
  // STORE_CORRUPT, STORE_SCHEMA.
  static absl::StatusOr<std::unique_ptr<SqliteEncodingStore>> Open(
      const std::string& path);

  ~SqliteEncodingStore() override;

  absl::StatusOr<StoredEncoding> Get(const EncodingKey& key) override;
  absl::StatusOr<StoredEncoding> Put(
      const EncodingKey& key, std::shared_ptr<const core::Encoding> encoding,
      const Precondition& precondition) override;
  absl::Status Delete(const EncodingKey& key,
                      const Precondition& precondition) override;
  absl::StatusOr<std::vector<EncodingListEntry>> ListEncodings(
      absl::string_view model, absl::string_view revision,
      absl::string_view after, int limit) override;
  absl::StatusOr<std::vector<ModelListEntry>> ListModels(
      absl::string_view after, int limit) override;
  absl::StatusOr<std::vector<RevisionListEntry>> ListRevisions(
      absl::string_view model, absl::string_view after, int limit) override;
  absl::Status Ping() override;

 private:
  class Connection;
  class ReadLease;

  SqliteEncodingStore(std::unique_ptr<Connection> writer,
                      std::vector<std::unique_ptr<Connection>> readers);

  absl::Mutex write_mutex_;
  const std::unique_ptr<Connection> writer_ ABSL_PT_GUARDED_BY(write_mutex_);

  const std::vector<std::unique_ptr<Connection>> readers_;
  absl::Mutex read_mutex_;
  std::vector<Connection*> idle_readers_ ABSL_GUARDED_BY(read_mutex_);
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_SQLITE_ENCODING_STORE_H_
