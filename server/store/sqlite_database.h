// One SQLite file that several stores share: connections, prepared statements,
// transactions and the schema.

#ifndef QUANTD_SERVER_STORE_SQLITE_DATABASE_H_
#define QUANTD_SERVER_STORE_SQLITE_DATABASE_H_

#include <sqlite3.h>

#include <atomic>
#include <cstdint>
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
#include "absl/types/optional.h"
#include "server/store/encoding_store.h"
#include "server/store/sql_database.h"

namespace quantd::server {

// Version of the tables, in PRAGMA user_version.
constexpr int kSqliteSchemaVersion = 9;

// One SQLite handle with its prepared statements. Not thread-safe.
class SqliteConnection : public SqlConnection {
 public:
  // Errors: STORE_UNAVAILABLE, STORE_CORRUPT; so for every call.
  static absl::StatusOr<std::unique_ptr<SqliteConnection>> Open(
      const std::string& path);
  ~SqliteConnection() override;

  SqliteConnection(const SqliteConnection&) = delete;
  SqliteConnection& operator=(const SqliteConnection&) = delete;

  std::unique_ptr<SqlStatement> Prepare(const char* sql) override;
  // Every transaction that writes holds the lock of the whole file.
  absl::Status LockTensor(const EncodingKey& key) override {
    return absl::OkStatus();
  }
  absl::Status LockRevisions(absl::string_view model,
                             std::vector<std::string> revisions) override {
    return absl::OkStatus();
  }
  absl::Status LockModel(absl::string_view model) override {
    return absl::OkStatus();
  }
  absl::Status LockSource(const EncodingKey& key,
                          absl::string_view source) override {
    return absl::OkStatus();
  }
  absl::Status LockName(absl::string_view name) override {
    return absl::OkStatus();
  }
  absl::StatusOr<int64_t> NextGeneration() override;
  // SQLite tells of every commit to the file.
  absl::Status Announce() override { return absl::OkStatus(); }
  // How long a statement waits for another connection's lock.
  void SetBusyTimeout(int milliseconds);
  // Prepares and runs a statement without parameters and rows.
  absl::Status Run(const char* sql);

  // Runs any number of statements; `what` opens an error's text.
  absl::Status Execute(const std::string& sql, absl::string_view what);
  // The first column of the first row of `sql`; 0 when there is none.
  absl::StatusOr<int64_t> QueryInt(const std::string& sql,
                                   absl::string_view what);

  // Set a connection that writes up.
  absl::Status UseAutoVacuum();
  absl::Status UseWal();
  // Creates the tables where there are none yet.
  // Errors: STORE_SCHEMA as well.
  absl::Status CreateSchema();

 private:
  explicit SqliteConnection(sqlite3* db) : db_(db) {}
  absl::Status CheckApplication();

  sqlite3* const db_;
  int busy_polls_ = 0;
  absl::flat_hash_map<const char*, sqlite3_stmt*> statements_;
};

// WAL and synchronous=FULL: a commit is on disk when it returns. Several
// processes may open one file. A delete needs space on the disk before it frees
// any. A file beside the store reserves that space: on a full disk the delete
// removes the file, and nothing else is written until the file is back.
// Thread-safe: reads run side by side, writes one after another.
class SqliteDatabase : public SqlDatabase {
 public:
  // Creates the file, for its owner alone, and its directory when only the last
  // component is missing. `path` is a plain path, not a URI and not ":memory:".
  // Errors: STORE_UNAVAILABLE (a network file system among them),
  // STORE_CORRUPT, STORE_SCHEMA.
  static absl::StatusOr<std::shared_ptr<SqliteDatabase>> Open(
      const std::string& path);

  absl::Status Read(absl::FunctionRef<absl::Status(SqlConnection&)> body)
      override ABSL_LOCKS_EXCLUDED(read_mutex_);
  absl::Status Write(absl::FunctionRef<absl::Status(SqlConnection&)> body)
      override ABSL_LOCKS_EXCLUDED(write_mutex_);
  absl::Status WriteNow(absl::FunctionRef<absl::Status(SqlConnection&)> body)
      override ABSL_LOCKS_EXCLUDED(write_mutex_);
  absl::Status WriteToFree(absl::FunctionRef<absl::Status(SqlConnection&)> body)
      override ABSL_LOCKS_EXCLUDED(write_mutex_);
  absl::Status CheckFile(
      absl::FunctionRef<void(absl::string_view line)> tell) override;
  absl::StatusOr<DatabaseSize> Size() override;
  absl::StatusOr<bool> Shrink() override ABSL_LOCKS_EXCLUDED(write_mutex_);
  absl::Status Ping() override;

  // None also while a write of this object is under way.
  absl::optional<int64_t> ForeignVersion() override
      ABSL_LOCKS_EXCLUDED(write_mutex_);

 private:
  // `path`  of the file.
  SqliteDatabase(const std::string& path,
                 std::unique_ptr<SqliteConnection> writer,
                 std::vector<std::unique_ptr<SqliteConnection>> readers);

  // Calls `write` with the mutex, when those before have had their turn.
  absl::Status InTurn(absl::FunctionRef<absl::Status()> write)
      ABSL_LOCKS_EXCLUDED(write_mutex_);
  // Calls `write` with the mutex, and has it wait for no other process; fails
  // where another thread has the mutex.
  absl::Status AtOnce(absl::FunctionRef<absl::Status()> write)
      ABSL_LOCKS_EXCLUDED(write_mutex_);
  absl::StatusOr<bool> ShrinkLocked()
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mutex_);
  absl::Status Transact(absl::FunctionRef<absl::Status(SqlConnection&)> body)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mutex_);
  absl::Status WriteLocked(absl::FunctionRef<absl::Status(SqlConnection&)> body)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mutex_);
  // Takes the reserved file away if there is no other room for what failed
  // with `status`; then it may be tried again.
  bool UseReserve(const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mutex_);
  // Makes it again if it was taken away; false if there is no room for it.
  bool RestoreReserve() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mutex_);

  // Who writes in many transactions one after another keeps nobody waiting:
  // each comes after those that asked before it.
  std::atomic<int64_t> next_turn_ = 0;
  absl::Mutex write_mutex_;
  int64_t turn_ ABSL_GUARDED_BY(write_mutex_) = 0;
  const std::unique_ptr<SqliteConnection> writer_
      ABSL_PT_GUARDED_BY(write_mutex_);
  bool is_shrinking_ ABSL_GUARDED_BY(write_mutex_) = false;
  const std::string reserve_path_;
  // Two states of the reserved file: it is there, and it was taken away.
  bool has_reserve_ ABSL_GUARDED_BY(write_mutex_) = false;
  bool reserve_is_used_ ABSL_GUARDED_BY(write_mutex_) = false;

  const std::vector<std::unique_ptr<SqliteConnection>> readers_;
  absl::Mutex read_mutex_;
  std::vector<SqliteConnection*> idle_readers_ ABSL_GUARDED_BY(read_mutex_);
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_SQLITE_DATABASE_H_
