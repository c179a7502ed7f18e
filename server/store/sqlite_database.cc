#include "server/store/sqlite_database.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "core/parallel/steady_clock.h"
#include "server/store/file_system.h"

namespace quantd::server {
namespace {

// Connections that read: as many as threads read; see quantd_server.cc.
constexpr int kReaderCount = 8;
constexpr int kBusyTimeoutMs = 5000;
constexpr int kApplicationId = 0x716e7464;  // "qntd"

constexpr char kSqliteBegin[] = "BEGIN IMMEDIATE";
constexpr char kSqliteCommit[] = "COMMIT";
constexpr char kSqliteRollback[] = "ROLLBACK";
constexpr char kDataVersion[] = "PRAGMA data_version";
constexpr char kCheck[] = "PRAGMA integrity_check";
constexpr char kSqliteNextGeneration[] =
    "UPDATE generations SET last = last + 1 WHERE id = 0 RETURNING last";
// Setting for a file that has no tables yet.
constexpr char kAutoVacuum[] = "PRAGMA auto_vacuum = INCREMENTAL";
constexpr char kCheckpoint[] = "PRAGMA wal_checkpoint(TRUNCATE)";
constexpr char kPageCount[] = "PRAGMA page_count";
constexpr char kPageSize[] = "PRAGMA page_size";
constexpr char kFreePages[] = "PRAGMA freelist_count";
// Pages that a step of Shrink gives back.
constexpr char kVacuum[] = "PRAGMA incremental_vacuum(1024)";
// Answer of PRAGMA auto_vacuum for INCREMENTAL.
constexpr int64_t kIncremental = 2;
// Not before more pages than that, or than this part of all, are free; then
// until none is.
constexpr int64_t kKeptFreePages = 256;
constexpr int64_t kKeptFreePart = 32;
// Bytes of the disk that deleting and a step of Shrink take, with what the log
// holds before that.
constexpr int64_t kReservedBytes = int64_t{32} << 20;
// In the status of what failed because the disk is full.
constexpr char kDiskFull[] = "quantd/disk_full";
constexpr char kSqlitePing[] = "SELECT last FROM generations WHERE id = 0";

// They count what is in a table of rows, in the transaction of the change. Rows
// that move to another set are counted by who moves them, and fire nothing:
// that halves the time for which others wait.
std::string CountTriggers(absl::string_view table) {
  return absl::StrReplaceAll(
      R"sql(
      CREATE TRIGGER $TABLE_insert AFTER INSERT ON $TABLE BEGIN
        INSERT INTO count_changes VALUES (NEW.set_id, NEW.principal, NEW.slot,
          1, NEW.charged_bytes, NEW.update_time_us);
      END;
      CREATE TRIGGER $TABLE_update
      AFTER UPDATE OF principal, charged_bytes ON $TABLE
      WHEN OLD.principal = NEW.principal BEGIN
        INSERT INTO count_changes VALUES (NEW.set_id, NEW.principal, NEW.slot,
          0, NEW.charged_bytes - OLD.charged_bytes, NEW.update_time_us);
      END;
      CREATE TRIGGER $TABLE_hand_over
      AFTER UPDATE OF principal, charged_bytes ON $TABLE
      WHEN OLD.principal <> NEW.principal BEGIN
        INSERT INTO count_changes VALUES (NEW.set_id, NEW.principal, NEW.slot,
          1, NEW.charged_bytes, NEW.update_time_us);
        INSERT INTO count_changes VALUES (OLD.set_id, OLD.principal, OLD.slot,
          -1, -OLD.charged_bytes, 0);
      END;
      CREATE TRIGGER $TABLE_delete AFTER DELETE ON $TABLE BEGIN
        INSERT INTO count_changes VALUES (OLD.set_id, OLD.principal, OLD.slot,
          -1, -OLD.charged_bytes, 0);
      END;
    )sql",
      {{"$TABLE", table}});
}

// `principal` is who wrote the row last, empty for nobody in particular.
// `charged_bytes` are those of names and contents. The columns that lists read
// stand before `body`, so that a list never walks the overflow pages of a large
// one.
std::string Schema() {
  return absl::StrCat(
      R"sql(
      CREATE TABLE generations (
        id INTEGER PRIMARY KEY CHECK (id = 0),
        last INTEGER NOT NULL
      ) STRICT;
      INSERT INTO generations (id, last) VALUES (0, 0);

      -- See row_sets.h.
      CREATE TABLE row_sets (
        model TEXT NOT NULL,
        revision TEXT NOT NULL,
        kind INTEGER NOT NULL,
        set_id INTEGER NOT NULL UNIQUE,
        generation INTEGER NOT NULL,
        update_time_us INTEGER NOT NULL,
        checksum INTEGER NOT NULL,
        PRIMARY KEY (model, revision, kind)
      ) STRICT;
      CREATE TABLE lost_sets (
        set_id INTEGER NOT NULL PRIMARY KEY
      ) STRICT;

      CREATE TABLE encodings (
        set_id INTEGER NOT NULL,
        tensor TEXT NOT NULL,
        generation INTEGER NOT NULL,
        update_time_us INTEGER NOT NULL,
        format INTEGER NOT NULL,
        scale_count INTEGER NOT NULL,
        checksum INTEGER NOT NULL,
        head_checksum INTEGER NOT NULL,
        principal TEXT NOT NULL,
        slot INTEGER NOT NULL,
        charged_bytes INTEGER NOT NULL,
        content_id INTEGER NOT NULL,
        content_bytes INTEGER NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (set_id, tensor)
      ) STRICT;
      -- Scales of large ones, under an id of their own. What is not used any
      -- more is noted, and freed later in steps.
      CREATE TABLE encoding_pieces (
        content_id INTEGER NOT NULL,
        piece INTEGER NOT NULL,
        checksum INTEGER NOT NULL,
        bytes BLOB NOT NULL,
        PRIMARY KEY (content_id, piece)
      ) STRICT;
      -- Those that are being written; their pieces count for whoever writes.
      CREATE TABLE staged_contents (
        content_id INTEGER NOT NULL PRIMARY KEY,
        touch_time_us INTEGER NOT NULL,
        model TEXT NOT NULL,
        principal TEXT NOT NULL,
        slot INTEGER NOT NULL,
        bytes INTEGER NOT NULL
      ) STRICT;
      CREATE TABLE lost_contents (
        content_id INTEGER NOT NULL PRIMARY KEY
      ) STRICT;
      CREATE TRIGGER encodings_lose_deleted AFTER DELETE ON encodings
      WHEN OLD.content_id <> 0 BEGIN
        INSERT OR IGNORE INTO lost_contents VALUES (OLD.content_id);
      END;
      CREATE TRIGGER encodings_lose_replaced
      AFTER UPDATE OF content_id ON encodings
      WHEN OLD.content_id <> 0 AND OLD.content_id <> NEW.content_id BEGIN
        INSERT OR IGNORE INTO lost_contents VALUES (OLD.content_id);
      END;

      CREATE TABLE statistics (
        set_id INTEGER NOT NULL,
        tensor TEXT NOT NULL,
        source TEXT NOT NULL,
        sequence INTEGER NOT NULL,
        update_time_us INTEGER NOT NULL,
        incarnation INTEGER NOT NULL,
        size_bytes INTEGER NOT NULL,
        mantissa_bits INTEGER NOT NULL,
        block_size BLOB NOT NULL,
        shape BLOB NOT NULL,
        body_checksum INTEGER NOT NULL,
        checksum INTEGER NOT NULL,
        principal TEXT NOT NULL,
        slot INTEGER NOT NULL,
        charged_bytes INTEGER NOT NULL,
        averages BLOB NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (set_id, tensor, source)
      ) STRICT;
      -- What follows the body, see statistics_pieces.h.
      CREATE TABLE statistics_pieces (
        set_id INTEGER NOT NULL,
        tensor TEXT NOT NULL,
        source TEXT NOT NULL,
        sequence INTEGER NOT NULL,
        piece INTEGER NOT NULL,
        checksum INTEGER NOT NULL,
        bytes BLOB NOT NULL,
        PRIMARY KEY (set_id, tensor, source, sequence, piece)
      ) STRICT;
      CREATE TABLE lost_statistics (
        set_id INTEGER NOT NULL,
        tensor TEXT NOT NULL,
        source TEXT NOT NULL,
        PRIMARY KEY (set_id, tensor, source)
      ) STRICT, WITHOUT ROWID;
      CREATE TRIGGER statistics_lose_pieces AFTER DELETE ON statistics BEGIN
        INSERT OR IGNORE INTO lost_statistics VALUES (
          OLD.set_id, OLD.tensor, OLD.source);
      END;

      CREATE TABLE set_counts (
        set_id INTEGER NOT NULL,
        principal TEXT NOT NULL,
        slot INTEGER NOT NULL,
        row_count INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        update_time_us INTEGER NOT NULL,
        PRIMARY KEY (set_id, principal, slot)
      ) STRICT, WITHOUT ROWID;
      -- Of 'models:*' for all, 'models:PREFIX/' and 'principal:NAME'.
      CREATE TABLE usage_counts (
        scope TEXT NOT NULL,
        slot INTEGER NOT NULL,
        row_count INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        PRIMARY KEY (scope, slot)
      ) STRICT, WITHOUT ROWID;
      -- Where the slashes of a model's name may stand.
      CREATE TABLE path_positions (position INTEGER PRIMARY KEY) STRICT;
      WITH RECURSIVE positions (position) AS (
        SELECT 1 UNION ALL
        SELECT position + 1 FROM positions WHERE position < 256
      ) INSERT INTO path_positions SELECT position FROM positions;

      -- What is inserted here is added to the counts of scopes.
      CREATE VIEW usage_changes AS SELECT
        '' AS model, '' AS principal, 0 AS slot, 0 AS row_count, 0 AS bytes;
      CREATE TRIGGER usage_change INSTEAD OF INSERT ON usage_changes BEGIN
        -- Of no more prefixes than a quota may have slashes: the access file
        -- refuses longer ones.
        INSERT INTO usage_counts
          SELECT 'models:*', NEW.slot, NEW.row_count, NEW.bytes
          UNION ALL
          SELECT 'models:' || substr(NEW.model, 1, position), NEW.slot,
            NEW.row_count, NEW.bytes
            FROM (SELECT position FROM path_positions
              WHERE position <= length(NEW.model)
                AND substr(NEW.model, position, 1) = '/'
              ORDER BY position LIMIT 8)
          UNION ALL
          SELECT 'principal:' || NEW.principal, NEW.slot, NEW.row_count,
            NEW.bytes WHERE NEW.principal <> ''
          ON CONFLICT (scope, slot) DO UPDATE SET
            row_count = row_count + excluded.row_count,
            bytes = bytes + excluded.bytes;
        DELETE FROM usage_counts
          WHERE NEW.bytes < 0 AND slot = NEW.slot AND row_count = 0
            AND bytes = 0 AND scope IN (
              SELECT 'principal:' || NEW.principal UNION ALL
              SELECT 'models:' || substr(NEW.model, 1, position)
                FROM path_positions WHERE position <= length(NEW.model)
                  AND substr(NEW.model, position, 1) = '/');
      END;
      CREATE TRIGGER staged_contents_insert AFTER INSERT ON staged_contents
      BEGIN
        INSERT INTO usage_changes VALUES (NEW.model, NEW.principal, NEW.slot, 0,
          NEW.bytes);
      END;
      CREATE TRIGGER staged_contents_update AFTER UPDATE ON staged_contents
      BEGIN
        INSERT INTO usage_changes VALUES (NEW.model, NEW.principal, NEW.slot, 0,
          NEW.bytes - OLD.bytes);
      END;
      CREATE TRIGGER staged_contents_delete AFTER DELETE ON staged_contents
      BEGIN
        INSERT INTO usage_changes VALUES (OLD.model, OLD.principal, OLD.slot, 0,
          -OLD.bytes);
      END;
      -- What is inserted here is added to those of the set as well, unless it
      -- is lost.
      CREATE VIEW count_changes AS SELECT
        0 AS set_id, '' AS principal, 0 AS slot, 0 AS row_count, 0 AS bytes,
        0 AS update_time_us;
      CREATE TRIGGER count_change INSTEAD OF INSERT ON count_changes
      WHEN EXISTS (SELECT 1 FROM row_sets WHERE set_id = NEW.set_id) BEGIN
        INSERT INTO usage_changes
          SELECT model, NEW.principal, NEW.slot, NEW.row_count, NEW.bytes
          FROM row_sets WHERE set_id = NEW.set_id;
        INSERT INTO set_counts VALUES (NEW.set_id, NEW.principal, NEW.slot,
            NEW.row_count, NEW.bytes, NEW.update_time_us)
          ON CONFLICT (set_id, principal, slot) DO UPDATE SET
            row_count = row_count + excluded.row_count,
            bytes = bytes + excluded.bytes,
            update_time_us = MAX(update_time_us, excluded.update_time_us);
        DELETE FROM set_counts
          WHERE NEW.row_count < 0 AND set_id = NEW.set_id
            AND principal = NEW.principal AND slot = NEW.slot
            AND row_count = 0;
      END;
    )sql",
      CountTriggers("encodings"), CountTriggers("statistics"));
}

// Unlocks a mutex that TryLock has locked.
class ABSL_SCOPED_LOCKABLE AdoptedLock {
 public:
  explicit AdoptedLock(absl::Mutex* mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex)
      : mutex_(*mutex) {}
  ~AdoptedLock() ABSL_UNLOCK_FUNCTION() { mutex_.Unlock(); }
  AdoptedLock(const AdoptedLock&) = delete;
  AdoptedLock& operator=(const AdoptedLock&) = delete;

 private:
  absl::Mutex& mutex_;
};

absl::Status DiskFullError(absl::string_view what, absl::string_view detail) {
  absl::Status status = core::StoreUnavailableError(
      absl::StrCat(what,
                   ": the disk of the store is full; free space on it, or "
                   "delete from the store"),
      detail);
  status.SetPayload(kDiskFull, absl::Cord());
  return status;
}

absl::Status SqliteError(absl::string_view what, int code,
                         absl::string_view message) {
  const std::string detail = absl::StrCat(message, " (SQLite ", code, ")");
  switch (code & 0xff) {
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return core::StoreCorruptError(
          absl::StrCat(what, ": the database file is damaged"), detail);
    case SQLITE_FULL:
      return DiskFullError(what, detail);
    default:
      return core::StoreUnavailableError(
          absl::StrCat(what, ": the database fails"), detail);
  }
}

// Resets the statement when destroyed.
class SqliteStatement final : public SqlStatement {
 public:
  // `error`: why there is none.
  SqliteStatement(sqlite3_stmt* statement, absl::Status error)
      : statement_(statement), error_(std::move(error)) {}
  ~SqliteStatement() override {
    if (statement_ == nullptr) return;
    sqlite3_reset(statement_);
    sqlite3_clear_bindings(statement_);
  }
  SqliteStatement(const SqliteStatement&) = delete;
  SqliteStatement& operator=(const SqliteStatement&) = delete;

  void BindText(int index, absl::string_view text) override {
    // A null pointer would bind NULL.
    sqlite3_bind_text64(statement_, index,
                        text.data() == nullptr ? "" : text.data(), text.size(),
                        SQLITE_STATIC, SQLITE_UTF8);
  }
  void BindBytes(int index, absl::string_view bytes) override {
    sqlite3_bind_blob64(statement_, index,
                        bytes.data() == nullptr ? "" : bytes.data(),
                        bytes.size(), SQLITE_STATIC);
  }
  void BindInt(int index, int64_t value) override {
    sqlite3_bind_int64(statement_, index, value);
  }

  absl::StatusOr<bool> Step(absl::string_view what) override {
    if (!error_.ok()) return error_;
    const int code = sqlite3_step(statement_);
    if (code == SQLITE_ROW) return true;
    if (code == SQLITE_DONE) return false;
    sqlite3* db = sqlite3_db_handle(statement_);
    return SqliteError(what, sqlite3_extended_errcode(db), sqlite3_errmsg(db));
  }

  int64_t Int(int column) const override {
    return sqlite3_column_int64(statement_, column);
  }
  absl::string_view Bytes(int column) const override {
    const void* data = sqlite3_column_blob(statement_, column);
    const int size = sqlite3_column_bytes(statement_, column);
    return absl::string_view(static_cast<const char*>(data),
                             data == nullptr ? 0 : size);
  }

 private:
  sqlite3_stmt* const statement_;
  const absl::Status error_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SqliteConnection>> SqliteConnection::Open(
    const std::string& path) {
  sqlite3* db = nullptr;
  const int code =
      sqlite3_open_v2(path.c_str(), &db,
                      SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE |
                          SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE,
                      nullptr);
  // Even a failed open gives a handle to close.
  std::unique_ptr<SqliteConnection> connection(new SqliteConnection(db));
  if (code != SQLITE_OK) {
    return SqliteError(absl::StrCat("cannot open \"", path, "\""), code,
                       db == nullptr ? "out of memory" : sqlite3_errmsg(db));
  }
  connection->SetBusyTimeout(kBusyTimeoutMs);
  return connection;
}

SqliteConnection::~SqliteConnection() {
  for (const auto& [sql, statement] : statements_) sqlite3_finalize(statement);
  sqlite3_close(db_);
}

// SQLite's own handler sleeps for up to 100 ms, and meets the end of another
// process's transaction rarely where that begins one after the other.
void SqliteConnection::SetBusyTimeout(int milliseconds) {
  constexpr int kPollMs = 2;
  busy_polls_ = milliseconds / kPollMs;
  sqlite3_busy_handler(
      db_,
      [](void* polls, int count) {
        if (count >= *static_cast<const int*>(polls)) return 0;
        absl::SleepFor(absl::Milliseconds(kPollMs));
        return 1;
      },
      &busy_polls_);
}

std::unique_ptr<SqlStatement> SqliteConnection::Prepare(const char* sql) {
  sqlite3_stmt*& statement = statements_[sql];
  absl::Status error;
  if (statement == nullptr) {
    const int code = sqlite3_prepare_v3(db_, sql, -1, SQLITE_PREPARE_PERSISTENT,
                                        &statement, nullptr);
    if (code != SQLITE_OK) {
      error = SqliteError("cannot use the store", code, sqlite3_errmsg(db_));
    }
  }
  return std::make_unique<SqliteStatement>(statement, std::move(error));
}

absl::StatusOr<int64_t> SqliteConnection::NextGeneration() {
  const std::unique_ptr<SqlStatement> row = Prepare(kSqliteNextGeneration);
  absl::StatusOr<bool> found = row->Step("cannot count a generation");
  if (!found.ok()) return found.status();
  if (!*found) {
    return core::StoreCorruptError("the generation counter is missing");
  }
  return row->Int(0);
}

absl::Status SqliteConnection::Run(const char* sql) {
  return Prepare(sql)->Step("cannot use the store").status();
}

absl::Status SqliteConnection::Execute(const std::string& sql,
                                       absl::string_view what) {
  const int code = sqlite3_exec(db_, sql.c_str(), nullptr, nullptr, nullptr);
  if (code != SQLITE_OK) return SqliteError(what, code, sqlite3_errmsg(db_));
  return absl::OkStatus();
}

absl::StatusOr<int64_t> SqliteConnection::QueryInt(const std::string& sql,
                                                   absl::string_view what) {
  sqlite3_stmt* raw = nullptr;
  const int code = sqlite3_prepare_v2(db_, sql.c_str(), -1, &raw, nullptr);
  if (code != SQLITE_OK) return SqliteError(what, code, sqlite3_errmsg(db_));
  const std::unique_ptr<sqlite3_stmt, int (*)(sqlite3_stmt*)> owner(
      raw, &sqlite3_finalize);
  SqliteStatement statement(raw, absl::OkStatus());
  absl::StatusOr<bool> row = statement.Step(what);
  if (!row.ok()) return row.status();
  return *row ? statement.Int(0) : 0;
}

// Setting what is set already would wait for others who write.
absl::Status SqliteConnection::UseAutoVacuum() {
  constexpr absl::string_view kWhat = "cannot set the store up";
  const absl::StatusOr<int64_t> mode = QueryInt("PRAGMA auto_vacuum", kWhat);
  if (!mode.ok()) return mode.status();
  return *mode == kIncremental ? absl::OkStatus() : Execute(kAutoVacuum, kWhat);
}

// Switching to WAL takes an exclusive lock for which SQLite does not call the
// busy handler, and another process may be opening the same new file.
absl::Status SqliteConnection::UseWal() {
  const absl::Duration deadline =
      core::SteadyNow() + absl::Milliseconds(kBusyTimeoutMs);
  while (true) {
    const int code = sqlite3_exec(db_, "PRAGMA journal_mode = WAL", nullptr,
                                  nullptr, nullptr);
    if (code == SQLITE_OK) break;
    if ((code & 0xff) != SQLITE_BUSY || core::SteadyNow() > deadline) {
      return SqliteError("cannot open the store", code, sqlite3_errmsg(db_));
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
  return Execute(
      "PRAGMA synchronous = FULL; PRAGMA cell_size_check = ON;"
      "PRAGMA trusted_schema = OFF",
      "cannot set the store up");
}

absl::Status SqliteConnection::CreateSchema() {
  constexpr absl::string_view kWhat = "cannot prepare the store";
  absl::StatusOr<int64_t> version = QueryInt("PRAGMA user_version", kWhat);
  if (!version.ok()) return version.status();
  if (*version == kSqliteSchemaVersion) return CheckApplication();
  if (absl::Status s = Run(kSqliteBegin); !s.ok()) return s;
  const auto create = [&]() -> absl::Status {
    // Asked again: another process may have created it meanwhile.
    version = QueryInt("PRAGMA user_version", kWhat);
    if (!version.ok()) return version.status();
    absl::StatusOr<int64_t> tables =
        QueryInt("SELECT COUNT(*) FROM sqlite_schema", kWhat);
    if (!tables.ok()) return tables.status();
    if (*tables > 0) {
      if (absl::Status s = CheckApplication(); !s.ok()) return s;
      return *version == kSqliteSchemaVersion
                 ? absl::OkStatus()
                 : core::StoreSchemaError(*version, kSqliteSchemaVersion);
    }
    return Execute(
        absl::StrCat(Schema(), "PRAGMA application_id = ", kApplicationId,
                     "; PRAGMA user_version = ", kSqliteSchemaVersion),
        kWhat);
  };
  absl::Status status = create();
  if (status.ok()) status = Run(kSqliteCommit);
  if (!status.ok()) Run(kSqliteRollback).IgnoreError();
  return status;
}

absl::Status SqliteConnection::CheckApplication() {
  absl::StatusOr<int64_t> id =
      QueryInt("PRAGMA application_id", "cannot prepare the store");
  if (!id.ok()) return id.status();
  if (*id != kApplicationId) {
    return core::StoreUnavailableError(
        "the file is another program's database; expected a new file or one "
        "of quantd");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<SqliteDatabase>> SqliteDatabase::Open(
    const std::string& path) {
  if (path.empty()) {
    return core::StoreUnavailableError("the store's path is empty");
  }
  // An absolute path keeps its meaning when the working directory changes,
  // and has no name that SQLite treats specially.
  std::error_code error;
  const std::string absolute = std::filesystem::absolute(path, error).string();
  if (error) {
    return core::StoreUnavailableError(
        absl::StrCat("cannot resolve \"", path, "\": ", error.message()));
  }
  if (absl::Status status = PrepareStoreDirectory(absolute); !status.ok()) {
    return status;
  }
  if (absl::Status status = CreateStoreFile(absolute); !status.ok()) {
    return status;
  }
  absl::StatusOr<std::unique_ptr<SqliteConnection>> writer =
      SqliteConnection::Open(absolute);
  if (!writer.ok()) return writer.status();
  if (absl::Status s = (*writer)->UseAutoVacuum(); !s.ok()) return s;
  if (absl::Status status = (*writer)->UseWal(); !status.ok()) return status;
  if (absl::Status status = (*writer)->CreateSchema(); !status.ok()) {
    return status;
  }
  std::vector<std::unique_ptr<SqliteConnection>> readers;
  for (int i = 0; i < kReaderCount; ++i) {
    absl::StatusOr<std::unique_ptr<SqliteConnection>> reader =
        SqliteConnection::Open(absolute);
    if (!reader.ok()) return reader.status();
    if (absl::Status status = (*reader)->Execute(
            "PRAGMA query_only = ON; PRAGMA cell_size_check = ON",
            "cannot set the store up");
        !status.ok()) {
      return status;
    }
    readers.push_back(*std::move(reader));
  }
  return std::shared_ptr<SqliteDatabase>(
      new SqliteDatabase(absolute, *std::move(writer), std::move(readers)));
}

SqliteDatabase::SqliteDatabase(
    const std::string& path, std::unique_ptr<SqliteConnection> writer,
    std::vector<std::unique_ptr<SqliteConnection>> readers)
    : writer_(std::move(writer)),
      reserve_path_(absl::StrCat(path, "-reserve")),
      has_reserve_(ReserveSpace(reserve_path_, kReservedBytes)),
      readers_(std::move(readers)) {
  absl::MutexLock lock(&read_mutex_);
  for (const std::unique_ptr<SqliteConnection>& reader : readers_) {
    idle_readers_.push_back(reader.get());
  }
}

absl::Status SqliteDatabase::Read(
    absl::FunctionRef<absl::Status(SqlConnection&)> body) {
  SqliteConnection* connection;
  {
    absl::MutexLock lock(&read_mutex_);
    const auto idle = [this] {
      read_mutex_.AssertHeld();
      return !idle_readers_.empty();
    };
    read_mutex_.Await(absl::Condition(&idle));
    connection = idle_readers_.back();
    idle_readers_.pop_back();
  }
  const absl::Cleanup give_back = [this, connection] {
    absl::MutexLock lock(&read_mutex_);
    idle_readers_.push_back(connection);
  };
  return body(*connection);
}

absl::Status SqliteDatabase::InTurn(absl::FunctionRef<absl::Status()> write) {
  const int64_t turn = next_turn_++;
  const auto is_our_turn = [this, turn] {
    write_mutex_.AssertHeld();
    return turn == turn_;
  };
  absl::MutexLock lock(&write_mutex_, absl::Condition(&is_our_turn));
  const absl::Cleanup next = [this] {
    write_mutex_.AssertHeld();
    ++turn_;
  };
  return write();
}

absl::Status SqliteDatabase::Write(
    absl::FunctionRef<absl::Status(SqlConnection&)> body) {
  return InTurn([&] {
    write_mutex_.AssertHeld();
    return WriteLocked(body);
  });
}

absl::Status SqliteDatabase::WriteToFree(
    absl::FunctionRef<absl::Status(SqlConnection&)> body) {
  return InTurn([&] {
    write_mutex_.AssertHeld();
    absl::Status status = Transact(body);
    return UseReserve(status) ? Transact(body) : status;
  });
}

absl::Status SqliteDatabase::Transact(
    absl::FunctionRef<absl::Status(SqlConnection&)> body) {
  if (absl::Status status = writer_->Run(kSqliteBegin); !status.ok())
    return status;
  absl::Cleanup roll_back = [this] {
    write_mutex_.AssertHeld();
    // Some errors have rolled back by themselves; then this fails.
    writer_->Run(kSqliteRollback).IgnoreError();
  };
  absl::Status status = body(*writer_);
  if (status.ok()) status = writer_->Run(kSqliteCommit);
  if (status.ok()) std::move(roll_back).Cancel();
  return status;
}

absl::Status SqliteDatabase::WriteLocked(
    absl::FunctionRef<absl::Status(SqlConnection&)> body) {
  // Space that is left is for deleting.
  if (!RestoreReserve()) return DiskFullError("cannot use the store", "");
  return Transact(body);
}

bool SqliteDatabase::UseReserve(const absl::Status& status) {
  if (!has_reserve_ || !status.GetPayload(kDiskFull).has_value()) return false;
  unlink(reserve_path_.c_str());
  has_reserve_ = false;
  reserve_is_used_ = true;
  return true;
}

bool SqliteDatabase::RestoreReserve() {
  if (!reserve_is_used_) return true;
  has_reserve_ = ReserveSpace(reserve_path_, kReservedBytes);
  reserve_is_used_ = !has_reserve_;
  return has_reserve_;
}

absl::Status SqliteDatabase::WriteNow(
    absl::FunctionRef<absl::Status(SqlConnection&)> body) {
  return AtOnce([&] {
    write_mutex_.AssertHeld();
    return WriteLocked(body);
  });
}

absl::Status SqliteDatabase::AtOnce(absl::FunctionRef<absl::Status()> write) {
  if (!write_mutex_.TryLock()) {
    return core::StoreUnavailableError("another write is under way");
  }
  const AdoptedLock lock(&write_mutex_);
  writer_->SetBusyTimeout(0);
  const absl::Cleanup wait_again = [this] {
    write_mutex_.AssertHeld();
    writer_->SetBusyTimeout(kBusyTimeoutMs);
  };
  return write();
}

absl::optional<int64_t> SqliteDatabase::ForeignVersion() {
  // For the connection that writes, SQLite does not count its own commits. A
  // writer may hold it for as long as another process writes.
  if (!write_mutex_.TryLock()) return absl::nullopt;
  const AdoptedLock lock(&write_mutex_);
  const std::unique_ptr<SqlStatement> row = writer_->Prepare(kDataVersion);
  if (!row->Step("cannot read the store").value_or(false)) return absl::nullopt;
  return row->Int(0);
}

absl::Status SqliteDatabase::CheckFile(
    absl::FunctionRef<void(absl::string_view line)> tell) {
  return Read([&](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kCheck);
    while (true) {
      absl::StatusOr<bool> found = row->Step("cannot check the file");
      if (!found.ok()) return found.status();
      if (!*found) return absl::OkStatus();
      if (row->Bytes(0) != "ok") {
        tell(absl::StrCat("the database file: ", row->Bytes(0)));
      }
    }
  });
}

absl::StatusOr<DatabaseSize> SqliteDatabase::Size() {
  DatabaseSize size;
  const auto read = [&](SqlConnection& connection) -> absl::Status {
    int64_t numbers[3] = {};
    const char* const pragmas[3] = {kPageSize, kPageCount, kFreePages};
    for (int i = 0; i < 3; ++i) {
      const std::unique_ptr<SqlStatement> row = connection.Prepare(pragmas[i]);
      absl::StatusOr<bool> found = row->Step("cannot read the store's size");
      if (!found.ok()) return found.status();
      numbers[i] = row->Int(0);
    }
    size = {numbers[0] * numbers[1], numbers[0] * numbers[2]};
    return absl::OkStatus();
  };
  if (absl::Status s = Read(read); !s.ok()) return s;
  return size;
}

absl::StatusOr<bool> SqliteDatabase::Shrink() {
  absl::StatusOr<bool> is_more = false;
  absl::Status status = AtOnce([&] {
    write_mutex_.AssertHeld();
    is_more = ShrinkLocked();
    if (UseReserve(is_more.status())) is_more = ShrinkLocked();
    // The reserve comes back where there is nothing more to free.
    if (is_more.ok() && !*is_more) RestoreReserve();
    return is_more.status();
  });
  if (!status.ok()) return status;
  return is_more;
}

absl::StatusOr<bool> SqliteDatabase::ShrinkLocked() {
  constexpr absl::string_view kWhat = "cannot shrink the store";
  absl::StatusOr<int64_t> mode = writer_->QueryInt("PRAGMA auto_vacuum", kWhat);
  if (!mode.ok()) return mode.status();
  absl::StatusOr<int64_t> pages = writer_->QueryInt(kPageCount, kWhat);
  if (!pages.ok()) return pages.status();
  absl::StatusOr<int64_t> free_pages = writer_->QueryInt(kFreePages, kWhat);
  if (!free_pages.ok()) return free_pages.status();
  const int64_t kept = std::max(kKeptFreePages, *pages / kKeptFreePart);
  is_shrinking_ = *mode == kIncremental && *free_pages > 0 &&
                  (is_shrinking_ || *free_pages > kept);
  if (!is_shrinking_) return false;
  absl::Status status = writer_->Execute(kVacuum, kWhat);
  // The log goes into the file, which ends earlier then. Readers of the moment
  // may keep that from happening; the next time is as good.
  if (status.ok()) status = writer_->Execute(kCheckpoint, kWhat);
  if (!status.ok()) return status;
  return true;
}

absl::Status SqliteDatabase::Ping() {
  return Read([](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kSqlitePing);
    absl::StatusOr<bool> found = row->Step("cannot read the store");
    if (!found.ok()) return found.status();
    if (!*found) {
      return core::StoreCorruptError("the generation counter is missing");
    }
    return absl::OkStatus();
  });
}

}  // namespace quantd::server
