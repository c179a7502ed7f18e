// One SQLite file that several stores share: connections, prepared statements,
// transactions and the schema.

#ifndef QUANTD_SERVER_STORE_SQLITE_DATABASE_H_
#define QUANTD_SERVER_STORE_SQLITE_DATABASE_H_

#include <sqlite3.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "server/store/encoding_store.h"

namespace quantd::server {

// The version that this program writes into PRAGMA user_version. Migrations
// only go forward.
constexpr int kSqliteSchemaVersion = 2;

// A prepared statement in use; reset when destroyed. Parameters count from 1,
// columns from 0. Bound text and blobs must outlive it. Not thread-safe.
class SqliteStatement {
 public:
  explicit SqliteStatement(sqlite3_stmt* statement) : statement_(statement) {}
  SqliteStatement(SqliteStatement&& other) noexcept
      : statement_(std::exchange(other.statement_, nullptr)) {}
  SqliteStatement& operator=(SqliteStatement&&) = delete;
  ~SqliteStatement();

  void BindText(int index, absl::string_view text);
  void BindBlob(int index, absl::string_view blob);
  void BindInt(int index, int64_t value);
  // Parameters 1, 2 and 3.
  void BindKey(const EncodingKey& key);

  // True when there is a row, false at the end. `what` opens an error's text.
  // Errors: STORE_UNAVAILABLE, STORE_CORRUPT.
  absl::StatusOr<bool> Step(absl::string_view what);

  int64_t Int(int column) const;
  // Text or blob; valid until the next Step.
  absl::string_view Bytes(int column) const;

 private:
  sqlite3_stmt* statement_;
};

// One SQLite handle with its prepared statements. Not thread-safe.
class SqliteConnection {
 public:
  // Errors: STORE_UNAVAILABLE, STORE_CORRUPT; so for every call.
  static absl::StatusOr<std::unique_ptr<SqliteConnection>> Open(
      const std::string& path);
  ~SqliteConnection();

  SqliteConnection(const SqliteConnection&) = delete;
  SqliteConnection& operator=(const SqliteConnection&) = delete;

  // `sql` must outlive the connection; it is prepared once per address.
  absl::StatusOr<SqliteStatement> Prepare(const char* sql);
  // Prepares and runs a statement without parameters and rows.
  absl::Status Run(const char* sql);

  // Runs any number of statements; `what` opens an error's text.
  absl::Status Execute(const std::string& sql, absl::string_view what);
  // The first column of the first row of `sql`; 0 when there is none.
  absl::StatusOr<int64_t> QueryInt(const std::string& sql,
                                   absl::string_view what);

  // Sets a connection that writes up.
  absl::Status UseWal();
  // Brings the schema to kSqliteSchemaVersion.
  // Errors: STORE_SCHEMA as well.
  absl::Status Migrate();

 private:
  explicit SqliteConnection(sqlite3* db) : db_(db) {}
  absl::Status CheckApplication();
  absl::Status MigrateInTransaction();

  sqlite3* const db_;
  absl::flat_hash_map<const char*, sqlite3_stmt*> statements_;
};

// WAL and synchronous=FULL: a commit is on disk when it returns. Several
// processes may open one file. Thread-safe: reads run side by side, writes one
// after another.
class SqliteDatabase {
 public:
  // Creates the file, and its directory when only the last component is
  // missing. `path` is a plain path, not a URI and not ":memory:".
  // Errors: STORE_UNAVAILABLE (a network file system among them),
  // STORE_CORRUPT, STORE_SCHEMA.
  static absl::StatusOr<std::shared_ptr<SqliteDatabase>> Open(
      const std::string& path);

  // Runs `body` on a connection that only reads; waits for one.
  absl::Status Read(absl::FunctionRef<absl::Status(SqliteConnection&)> body)
      ABSL_LOCKS_EXCLUDED(read_mutex_);

  // Runs `body` in a transaction; durable when it returns, without effect when
  // it fails.
  absl::Status Write(absl::FunctionRef<absl::Status(SqliteConnection&)> body)
      ABSL_LOCKS_EXCLUDED(write_mutex_);

  // A number that changes when another process, or another SqliteDatabase,
  // commits to the file; none while a write of this one is under way, or when
  // the file cannot be read.
  absl::optional<int64_t> ForeignVersion() ABSL_LOCKS_EXCLUDED(write_mutex_);

 private:
  SqliteDatabase(std::unique_ptr<SqliteConnection> writer,
                 std::vector<std::unique_ptr<SqliteConnection>> readers);

  absl::Mutex write_mutex_;
  const std::unique_ptr<SqliteConnection> writer_
      ABSL_PT_GUARDED_BY(write_mutex_);

  const std::vector<std::unique_ptr<SqliteConnection>> readers_;
  absl::Mutex read_mutex_;
  std::vector<SqliteConnection*> idle_readers_ ABSL_GUARDED_BY(read_mutex_);
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_SQLITE_DATABASE_H_
