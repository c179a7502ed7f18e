#include "server/store/sqlite_encoding_store.h"

#include <sqlite3.h>
#include <xxhash.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "quantd/v1/encoding.pb.h"
#include "server/store/file_system.h"
#include "server/wire/encoding_proto.h"

namespace quantd::server {
namespace {

constexpr int kReaderCount = 4;
constexpr int kBusyTimeoutMs = 5000;
constexpr int kApplicationId = 0x716e7464;  // "qntd"

constexpr absl::string_view kAbsent = "absent";

// Migration i brings a store from version i to i + 1.
constexpr std::array<const char*, kSqliteSchemaVersion> kMigrations = {
    // The columns that lists read stand before `body`, so that a list never
    // walks the overflow pages of a large one.
    R"sql(
      CREATE TABLE generations (
        id INTEGER PRIMARY KEY CHECK (id = 0),
        last INTEGER NOT NULL
      ) STRICT;
      INSERT INTO generations (id, last) VALUES (0, 0);
      CREATE TABLE encodings (
        model TEXT NOT NULL,
        revision TEXT NOT NULL,
        tensor TEXT NOT NULL,
        generation INTEGER NOT NULL,
        update_time_us INTEGER NOT NULL,
        format INTEGER NOT NULL,
        scale_count INTEGER NOT NULL,
        checksum INTEGER NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (model, revision, tensor)
      ) STRICT;
    )sql"};

// The statements that a connection keeps prepared.
enum Sql {
  kBegin,
  kCommit,
  kRollback,
  kSelect,
  kSelectEtag,
  kNextGeneration,
  kUpsert,
  kDelete,
  kListEncodings,
  kListModels,
  kListRevisions,
  kPing,
  kSqlCount,
};

constexpr std::array<const char*, kSqlCount> kSqlTexts = {
    "BEGIN IMMEDIATE",
    "COMMIT",
    "ROLLBACK",
    "SELECT generation, update_time_us, format, scale_count, checksum, body "
    "FROM encodings WHERE model = ?1 AND revision = ?2 AND tensor = ?3",
    "SELECT generation, checksum FROM encodings "
    "WHERE model = ?1 AND revision = ?2 AND tensor = ?3",
    "UPDATE generations SET last = last + 1 WHERE id = 0 RETURNING last",
    "INSERT OR REPLACE INTO encodings (model, revision, tensor, generation, "
    "update_time_us, format, scale_count, checksum, body) "
    "VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
    "DELETE FROM encodings WHERE model = ?1 AND revision = ?2 AND tensor = ?3",
    "SELECT tensor, generation, update_time_us, format, scale_count, checksum "
    "FROM encodings WHERE model = ?1 AND revision = ?2 AND tensor > ?3 "
    "ORDER BY tensor LIMIT ?4",
    "SELECT model, COUNT(DISTINCT revision), COUNT(*) FROM encodings "
    "WHERE model > ?1 GROUP BY model ORDER BY model LIMIT ?2",
    "SELECT revision, COUNT(*) FROM encodings "
    "WHERE model = ?1 AND revision > ?2 "
    "GROUP BY revision ORDER BY revision LIMIT ?3",
    "SELECT last FROM generations WHERE id = 0",
};

absl::Status SqliteError(absl::string_view what, int code,
                         absl::string_view message) {
  const std::string text =
      absl::StrCat(what, ": ", message, " (SQLite ", code, ")");
  switch (code & 0xff) {
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return core::StoreCorruptError(text);
    default:
      return core::StoreUnavailableError(text);
  }
}

// What of a row the checksum covers, beside its key.
struct RowHead {
  int64_t generation = 0;
  int64_t update_time_us = 0;
  int64_t format = 0;
  int64_t scale_count = 0;
};

// XXH3-64 over the key, the head and the body; lengths are hashed with the
// strings, so that no two keys run together.
uint64_t Checksum(const EncodingKey& key, const RowHead& head,
                  absl::string_view body) {
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(
      XXH3_createState(), &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  const int64_t numbers[] = {static_cast<int64_t>(key.model.size()),
                             static_cast<int64_t>(key.revision.size()),
                             static_cast<int64_t>(key.tensor.size()),
                             head.generation,
                             head.update_time_us,
                             head.format,
                             head.scale_count};
  XXH3_64bits_update(state.get(), numbers, sizeof(numbers));
  XXH3_64bits_update(state.get(), key.model.data(), key.model.size());
  XXH3_64bits_update(state.get(), key.revision.data(), key.revision.size());
  XXH3_64bits_update(state.get(), key.tensor.data(), key.tensor.size());
  XXH3_64bits_update(state.get(), body.data(), body.size());
  return XXH3_64bits_digest(state.get());
}

std::string MakeEtag(int64_t generation, uint64_t checksum) {
  return absl::StrCat(absl::Hex(generation), "-",
                      absl::Hex(checksum, absl::kZeroPad16));
}

absl::Status NotFound(const EncodingKey& key) {
  return core::EncodingNotFoundError(key.model, key.revision, key.tensor);
}

absl::Status Corrupt(const EncodingKey& key, absl::string_view what) {
  return core::StoreCorruptError(
      absl::StrCat("the encoding for tensor \"", key.tensor, "\" of model \"",
                   key.model, "\", revision \"", key.revision, "\" ", what,
                   "; put it again or delete it"));
}

}  // namespace

// One SQLite handle with its prepared statements. Not thread-safe.
class SqliteEncodingStore::Connection {
 public:
  // A prepared statement in use; reset when destroyed. Parameters count from
  // 1, columns from 0. Bound text and blobs must outlive it.
  class Statement {
   public:
    explicit Statement(sqlite3_stmt* statement) : statement_(statement) {}
    Statement(const Statement&) = delete;
    Statement& operator=(const Statement&) = delete;
    ~Statement() {
      sqlite3_reset(statement_);
      sqlite3_clear_bindings(statement_);
    }

    void BindText(int index, absl::string_view text) {
      // A null pointer would bind NULL.
      sqlite3_bind_text64(statement_, index,
                          text.data() == nullptr ? "" : text.data(),
                          text.size(), SQLITE_STATIC, SQLITE_UTF8);
    }
    void BindBlob(int index, absl::string_view blob) {
      sqlite3_bind_blob64(statement_, index, blob.data(), blob.size(),
                          SQLITE_STATIC);
    }
    void BindInt(int index, int64_t value) {
      sqlite3_bind_int64(statement_, index, value);
    }
    void BindKey(const EncodingKey& key) {
      BindText(1, key.model);
      BindText(2, key.revision);
      BindText(3, key.tensor);
    }

    // True when there is a row, false at the end.
    absl::StatusOr<bool> Step(absl::string_view what) {
      const int code = sqlite3_step(statement_);
      if (code == SQLITE_ROW) return true;
      if (code == SQLITE_DONE) return false;
      sqlite3* db = sqlite3_db_handle(statement_);
      return SqliteError(what, sqlite3_extended_errcode(db),
                         sqlite3_errmsg(db));
    }

    int64_t Int(int column) const {
      return sqlite3_column_int64(statement_, column);
    }
    // Valid until the next Step.
    absl::string_view Bytes(int column) const {
      const void* data = sqlite3_column_blob(statement_, column);
      const int size = sqlite3_column_bytes(statement_, column);
      return absl::string_view(static_cast<const char*>(data),
                               data == nullptr ? 0 : size);
    }

   private:
    sqlite3_stmt* const statement_;
  };

  static absl::StatusOr<std::unique_ptr<Connection>> Open(
      const std::string& path) {
    sqlite3* db = nullptr;
    const int code =
        sqlite3_open_v2(path.c_str(), &db,
                        SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE |
                            SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE,
                        nullptr);
    // Even a failed open gives a handle to close.
    std::unique_ptr<Connection> connection(new Connection(db));
    if (code != SQLITE_OK) {
      return SqliteError(absl::StrCat("cannot open \"", path, "\""), code,
                         db == nullptr ? "out of memory" : sqlite3_errmsg(db));
    }
    sqlite3_busy_timeout(db, kBusyTimeoutMs);
    return connection;
  }

  ~Connection() {
    for (sqlite3_stmt* statement : statements_) sqlite3_finalize(statement);
    sqlite3_close(db_);
  }

  absl::Status Execute(const std::string& sql, absl::string_view what) {
    const int code = sqlite3_exec(db_, sql.c_str(), nullptr, nullptr, nullptr);
    if (code != SQLITE_OK) return SqliteError(what, code, sqlite3_errmsg(db_));
    return absl::OkStatus();
  }

  // The first column of the first row of `sql`; 0 when there is none.
  absl::StatusOr<int64_t> QueryInt(const std::string& sql,
                                   absl::string_view what) {
    sqlite3_stmt* raw = nullptr;
    const int code = sqlite3_prepare_v2(db_, sql.c_str(), -1, &raw, nullptr);
    if (code != SQLITE_OK) return SqliteError(what, code, sqlite3_errmsg(db_));
    const std::unique_ptr<sqlite3_stmt, int (*)(sqlite3_stmt*)> owner(
        raw, &sqlite3_finalize);
    Statement statement(raw);
    absl::StatusOr<bool> row = statement.Step(what);
    if (!row.ok()) return row.status();
    return *row ? statement.Int(0) : 0;
  }

  // Switching to WAL takes an exclusive lock for which SQLite does not call
  // the busy handler, and another process may be opening the same new file.
  absl::Status UseWal() {
    const absl::Time deadline =
        absl::Now() + absl::Milliseconds(kBusyTimeoutMs);
    while (true) {
      const int code = sqlite3_exec(db_, "PRAGMA journal_mode = WAL", nullptr,
                                    nullptr, nullptr);
      if (code == SQLITE_OK) break;
      if ((code & 0xff) != SQLITE_BUSY || absl::Now() > deadline) {
        return SqliteError("cannot open the store", code, sqlite3_errmsg(db_));
      }
      absl::SleepFor(absl::Milliseconds(5));
    }
    return Execute(
        "PRAGMA synchronous = FULL; PRAGMA cell_size_check = ON;"
        "PRAGMA trusted_schema = OFF",
        "cannot set the store up");
  }

  absl::Status Migrate() {
    constexpr absl::string_view kWhat = "cannot prepare the store";
    absl::StatusOr<int64_t> version = QueryInt("PRAGMA user_version", kWhat);
    if (!version.ok()) return version.status();
    if (*version == kSqliteSchemaVersion) return CheckApplication();
    if (absl::Status status = Run(kBegin); !status.ok()) return status;
    absl::Status status = MigrateInTransaction();
    if (status.ok()) status = Run(kCommit);
    if (!status.ok()) Run(kRollback).IgnoreError();
    return status;
  }

  // Prepared once per connection.
  absl::StatusOr<sqlite3_stmt*> Prepare(Sql sql) {
    sqlite3_stmt*& statement = statements_[sql];
    if (statement == nullptr) {
      const int code =
          sqlite3_prepare_v3(db_, kSqlTexts[sql], -1, SQLITE_PREPARE_PERSISTENT,
                             &statement, nullptr);
      if (code != SQLITE_OK) {
        return SqliteError("cannot use the store", code, sqlite3_errmsg(db_));
      }
    }
    return statement;
  }

  // Runs a statement that has no parameters and no rows.
  absl::Status Run(Sql sql) {
    absl::StatusOr<sqlite3_stmt*> raw = Prepare(sql);
    if (!raw.ok()) return raw.status();
    Statement statement(*raw);
    return statement.Step(absl::StrCat("cannot ", kSqlTexts[sql])).status();
  }

 private:
  explicit Connection(sqlite3* db) : db_(db) {}

  absl::Status CheckApplication() {
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

  absl::Status MigrateInTransaction() {
    constexpr absl::string_view kWhat = "cannot prepare the store";
    // Asked again: another process may have migrated meanwhile.
    absl::StatusOr<int64_t> version = QueryInt("PRAGMA user_version", kWhat);
    if (!version.ok()) return version.status();
    absl::StatusOr<int64_t> tables =
        QueryInt("SELECT COUNT(*) FROM sqlite_schema", kWhat);
    if (!tables.ok()) return tables.status();
    if (*tables > 0) {
      if (absl::Status s = CheckApplication(); !s.ok()) return s;
    }
    if (*version > kSqliteSchemaVersion || *version < 0) {
      return core::StoreSchemaError(static_cast<int>(*version),
                                    kSqliteSchemaVersion);
    }
    for (int i = static_cast<int>(*version); i < kSqliteSchemaVersion; ++i) {
      if (absl::Status s = Execute(kMigrations[i], kWhat); !s.ok()) return s;
    }
    return Execute(
        absl::StrCat("PRAGMA application_id = ", kApplicationId,
                     "; PRAGMA user_version = ", kSqliteSchemaVersion),
        kWhat);
  }

  sqlite3* const db_;
  std::array<sqlite3_stmt*, kSqlCount> statements_{};
};

// A read connection out of the pool; waits for one.
class SqliteEncodingStore::ReadLease {
 public:
  explicit ReadLease(SqliteEncodingStore* store) : store_(store) {
    absl::MutexLock lock(&store_->read_mutex_);
    const auto idle = [this] {
      store_->read_mutex_.AssertHeld();
      return !store_->idle_readers_.empty();
    };
    store_->read_mutex_.Await(absl::Condition(&idle));
    connection_ = store_->idle_readers_.back();
    store_->idle_readers_.pop_back();
  }
  ReadLease(const ReadLease&) = delete;
  ReadLease& operator=(const ReadLease&) = delete;
  ~ReadLease() {
    absl::MutexLock lock(&store_->read_mutex_);
    store_->idle_readers_.push_back(connection_);
  }

  Connection* operator->() const { return connection_; }

 private:
  SqliteEncodingStore* const store_;
  Connection* connection_;
};

namespace {

// The etag in a row of kSelectEtag.
template <typename Statement>
std::string EtagOf(const Statement& statement) {
  return MakeEtag(statement.Int(0), static_cast<uint64_t>(statement.Int(1)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SqliteEncodingStore>> SqliteEncodingStore::Open(
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
  absl::StatusOr<std::unique_ptr<Connection>> writer =
      Connection::Open(absolute);
  if (!writer.ok()) return writer.status();
  if (absl::Status status = (*writer)->UseWal(); !status.ok()) return status;
  if (absl::Status status = (*writer)->Migrate(); !status.ok()) return status;
  std::vector<std::unique_ptr<Connection>> readers;
  for (int i = 0; i < kReaderCount; ++i) {
    absl::StatusOr<std::unique_ptr<Connection>> reader =
        Connection::Open(absolute);
    if (!reader.ok()) return reader.status();
    if (absl::Status status = (*reader)->Execute(
            "PRAGMA query_only = ON; PRAGMA cell_size_check = ON",
            "cannot set the store up");
        !status.ok()) {
      return status;
    }
    readers.push_back(*std::move(reader));
  }
  return std::unique_ptr<SqliteEncodingStore>(
      new SqliteEncodingStore(*std::move(writer), std::move(readers)));
}

SqliteEncodingStore::SqliteEncodingStore(
    std::unique_ptr<Connection> writer,
    std::vector<std::unique_ptr<Connection>> readers)
    : writer_(std::move(writer)), readers_(std::move(readers)) {
  absl::MutexLock lock(&read_mutex_);
  for (const std::unique_ptr<Connection>& reader : readers_) {
    idle_readers_.push_back(reader.get());
  }
}

SqliteEncodingStore::~SqliteEncodingStore() = default;

absl::StatusOr<StoredEncoding> SqliteEncodingStore::Get(
    const EncodingKey& key) {
  StoredEncoding stored;
  v1::Encoding message;
  {
    ReadLease connection(this);
    absl::StatusOr<sqlite3_stmt*> raw = connection->Prepare(kSelect);
    if (!raw.ok()) return raw.status();
    Connection::Statement row(*raw);
    row.BindKey(key);
    absl::StatusOr<bool> found = row.Step("cannot read an encoding");
    if (!found.ok()) return found.status();
    if (!*found) return NotFound(key);
    RowHead head;
    head.generation = row.Int(0);
    head.update_time_us = row.Int(1);
    head.format = row.Int(2);
    head.scale_count = row.Int(3);
    const uint64_t checksum = static_cast<uint64_t>(row.Int(4));
    const absl::string_view body = row.Bytes(5);
    if (checksum != Checksum(key, head, body)) {
      return Corrupt(key, "fails its checksum");
    }
    if (!message.ParseFromArray(body.data(), static_cast<int>(body.size()))) {
      return Corrupt(key, "does not decode");
    }
    stored.generation = head.generation;
    stored.update_time = absl::FromUnixMicros(head.update_time_us);
    stored.etag = MakeEtag(head.generation, checksum);
  }
  absl::StatusOr<core::Encoding> encoding = EncodingFromProto(message);
  if (!encoding.ok()) {
    return Corrupt(key,
                   absl::StrCat("is invalid: ", encoding.status().message()));
  }
  stored.encoding =
      std::make_shared<const core::Encoding>(*std::move(encoding));
  return stored;
}

absl::StatusOr<StoredEncoding> SqliteEncodingStore::Put(
    const EncodingKey& key, std::shared_ptr<const core::Encoding> encoding,
    const Precondition& precondition) {
  constexpr absl::string_view kWhat = "cannot put an encoding";
  v1::Encoding message;
  EncodingToProto(*encoding, &message);
  const std::string body = message.SerializeAsString();
  RowHead head;
  head.format = static_cast<int64_t>(encoding->format);
  head.scale_count = static_cast<int64_t>(encoding->scale.size());
  uint64_t checksum = 0;

  absl::MutexLock lock(&write_mutex_);
  const auto put = [&]() -> absl::Status {
    write_mutex_.AssertHeld();
    if (!precondition.if_match.empty()) {
      absl::StatusOr<sqlite3_stmt*> raw = writer_->Prepare(kSelectEtag);
      if (!raw.ok()) return raw.status();
      Connection::Statement row(*raw);
      row.BindKey(key);
      absl::StatusOr<bool> found = row.Step(kWhat);
      if (!found.ok()) return found.status();
      const std::string etag = *found ? EtagOf(row) : std::string(kAbsent);
      if (etag != precondition.if_match) {
        return core::EtagMismatchError(precondition.if_match, etag);
      }
    }
    {
      absl::StatusOr<sqlite3_stmt*> raw = writer_->Prepare(kNextGeneration);
      if (!raw.ok()) return raw.status();
      Connection::Statement row(*raw);
      absl::StatusOr<bool> found = row.Step(kWhat);
      if (!found.ok()) return found.status();
      if (!*found) {
        return core::StoreCorruptError("the generation counter is missing");
      }
      head.generation = row.Int(0);
    }
    head.update_time_us = absl::ToUnixMicros(absl::Now());
    checksum = Checksum(key, head, body);
    absl::StatusOr<sqlite3_stmt*> raw = writer_->Prepare(kUpsert);
    if (!raw.ok()) return raw.status();
    Connection::Statement row(*raw);
    row.BindKey(key);
    row.BindInt(4, head.generation);
    row.BindInt(5, head.update_time_us);
    row.BindInt(6, head.format);
    row.BindInt(7, head.scale_count);
    row.BindInt(8, static_cast<int64_t>(checksum));
    row.BindBlob(9, body);
    return row.Step(kWhat).status();
  };
  if (absl::Status status = writer_->Run(kBegin); !status.ok()) return status;
  absl::Status status = put();
  if (status.ok()) status = writer_->Run(kCommit);
  if (!status.ok()) {
    // Some errors have rolled back by themselves; then this one fails.
    writer_->Run(kRollback).IgnoreError();
    return status;
  }
  StoredEncoding stored;
  stored.encoding = std::move(encoding);
  stored.etag = MakeEtag(head.generation, checksum);
  stored.generation = head.generation;
  stored.update_time = absl::FromUnixMicros(head.update_time_us);
  return stored;
}

absl::Status SqliteEncodingStore::Delete(const EncodingKey& key,
                                         const Precondition& precondition) {
  constexpr absl::string_view kWhat = "cannot delete an encoding";
  absl::MutexLock lock(&write_mutex_);
  const auto remove = [&]() -> absl::Status {
    write_mutex_.AssertHeld();
    {
      absl::StatusOr<sqlite3_stmt*> raw = writer_->Prepare(kSelectEtag);
      if (!raw.ok()) return raw.status();
      Connection::Statement row(*raw);
      row.BindKey(key);
      absl::StatusOr<bool> found = row.Step(kWhat);
      if (!found.ok()) return found.status();
      if (!*found) return NotFound(key);
      const std::string etag = EtagOf(row);
      if (!precondition.if_match.empty() && etag != precondition.if_match) {
        return core::EtagMismatchError(precondition.if_match, etag);
      }
    }
    absl::StatusOr<sqlite3_stmt*> raw = writer_->Prepare(kDelete);
    if (!raw.ok()) return raw.status();
    Connection::Statement row(*raw);
    row.BindKey(key);
    return row.Step(kWhat).status();
  };
  if (absl::Status status = writer_->Run(kBegin); !status.ok()) return status;
  absl::Status status = remove();
  if (status.ok()) status = writer_->Run(kCommit);
  if (!status.ok()) writer_->Run(kRollback).IgnoreError();
  return status;
}

absl::StatusOr<std::vector<EncodingListEntry>>
SqliteEncodingStore::ListEncodings(absl::string_view model,
                                   absl::string_view revision,
                                   absl::string_view after, int limit) {
  std::vector<EncodingListEntry> entries;
  if (limit <= 0) return entries;
  ReadLease connection(this);
  absl::StatusOr<sqlite3_stmt*> raw = connection->Prepare(kListEncodings);
  if (!raw.ok()) return raw.status();
  Connection::Statement row(*raw);
  row.BindText(1, model);
  row.BindText(2, revision);
  row.BindText(3, after);
  row.BindInt(4, limit);
  while (true) {
    absl::StatusOr<bool> found = row.Step("cannot list encodings");
    if (!found.ok()) return found.status();
    if (!*found) return entries;
    EncodingListEntry& entry = entries.emplace_back();
    entry.tensor = std::string(row.Bytes(0));
    entry.stored.generation = row.Int(1);
    entry.stored.update_time = absl::FromUnixMicros(row.Int(2));
    entry.format = static_cast<core::NumberFormat>(row.Int(3));
    entry.scale_count = row.Int(4);
    entry.stored.etag =
        MakeEtag(entry.stored.generation, static_cast<uint64_t>(row.Int(5)));
  }
}

absl::StatusOr<std::vector<ModelListEntry>> SqliteEncodingStore::ListModels(
    absl::string_view after, int limit) {
  std::vector<ModelListEntry> entries;
  if (limit <= 0) return entries;
  ReadLease connection(this);
  absl::StatusOr<sqlite3_stmt*> raw = connection->Prepare(kListModels);
  if (!raw.ok()) return raw.status();
  Connection::Statement row(*raw);
  row.BindText(1, after);
  row.BindInt(2, limit);
  while (true) {
    absl::StatusOr<bool> found = row.Step("cannot list models");
    if (!found.ok()) return found.status();
    if (!*found) return entries;
    entries.push_back({std::string(row.Bytes(0)), row.Int(1), row.Int(2)});
  }
}

absl::StatusOr<std::vector<RevisionListEntry>>
SqliteEncodingStore::ListRevisions(absl::string_view model,
                                   absl::string_view after, int limit) {
  std::vector<RevisionListEntry> entries;
  if (limit <= 0) return entries;
  ReadLease connection(this);
  absl::StatusOr<sqlite3_stmt*> raw = connection->Prepare(kListRevisions);
  if (!raw.ok()) return raw.status();
  Connection::Statement row(*raw);
  row.BindText(1, model);
  row.BindText(2, after);
  row.BindInt(3, limit);
  while (true) {
    absl::StatusOr<bool> found = row.Step("cannot list revisions");
    if (!found.ok()) return found.status();
    if (!*found) return entries;
    entries.push_back({std::string(row.Bytes(0)), row.Int(1)});
  }
}

absl::Status SqliteEncodingStore::Ping() {
  ReadLease connection(this);
  absl::StatusOr<sqlite3_stmt*> raw = connection->Prepare(kPing);
  if (!raw.ok()) return raw.status();
  Connection::Statement row(*raw);
  absl::StatusOr<bool> found = row.Step("cannot read the store");
  if (!found.ok()) return found.status();
  if (!*found) {
    return core::StoreCorruptError("the generation counter is missing");
  }
  return absl::OkStatus();
}

}  // namespace quantd::server
