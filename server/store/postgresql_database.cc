#include "server/store/postgresql_database.h"

#include <libpq-fe.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "core/parallel/steady_clock.h"

namespace quantd::server {
namespace {

// While no connection can be opened, this long passes between two attempts.
constexpr absl::Duration kAttemptPause = absl::Milliseconds(250);
// How long a connection that listens may be silent before it is tried: one that
// is dead would tell of nothing.
constexpr absl::Duration kSilence = absl::Milliseconds(500);
// For creating the schema.
constexpr absl::Duration kSchemaTimeout = absl::Minutes(1);
// Parameters of the longest statement.
constexpr int kMaxParameters = 18;
// Lock under which one of several replicas that start at the same time creates
// the schema.
constexpr char kLockSchema[] = "SELECT pg_advisory_xact_lock(8173829047)";

constexpr char kPostgresqlBegin[] = "BEGIN ISOLATION LEVEL READ COMMITTED";
constexpr char kPostgresqlCommit[] = "COMMIT";
constexpr char kPostgresqlRollback[] = "ROLLBACK";
constexpr char kLockName[] = "SELECT pg_advisory_xact_lock($1)";
constexpr char kShareName[] = "SELECT pg_advisory_xact_lock_shared($1)";
// A model and a revision, which their tensors share, and one of those.
constexpr char kLockTensor[] =
    "SELECT pg_advisory_xact_lock_shared($1), "
    "pg_advisory_xact_lock_shared($2), pg_advisory_xact_lock($3)";
constexpr char kPostgresqlNextGeneration[] =
    "SELECT nextval('quantd_generations')";
constexpr char kPostgresqlPing[] = "SELECT 1";
// Size of all tables with what belongs to them.
constexpr char kSize[] =
    "SELECT CAST(COALESCE(SUM(pg_total_relation_size(oid)), 0) AS BIGINT) "
    "FROM pg_class WHERE relkind = 'r' "
    "AND relnamespace = CAST(current_schema() AS regnamespace)";
constexpr char kListen[] = "LISTEN quantd_encodings";
constexpr char kNotify[] = "SELECT pg_notify('quantd_encodings', $1)";
constexpr char kCreateSchemaTable[] =
    "CREATE TABLE IF NOT EXISTS quantd_schema (version BIGINT NOT NULL)";
constexpr char kSchemaVersion[] = "SELECT MAX(version) FROM quantd_schema";

// Bodies are large and do not compress, so that trying to would be wasted.
// `principal` is who wrote the row last, empty for nobody in particular.
// `charged_bytes` are those of names and contents. A count is the sum of its
// slots: writers of one model rarely wait for each other.
constexpr char kSchema[] = R"sql(
  CREATE SEQUENCE quantd_generations;

  -- See row_sets.h.
  CREATE TABLE row_sets (
    model TEXT COLLATE "C" NOT NULL,
    revision TEXT COLLATE "C" NOT NULL,
    kind BIGINT NOT NULL,
    set_id BIGINT NOT NULL UNIQUE,
    generation BIGINT NOT NULL,
    update_time_us BIGINT NOT NULL,
    checksum BIGINT NOT NULL,
    PRIMARY KEY (model, revision, kind)
  );
  CREATE TABLE lost_sets (
    set_id BIGINT NOT NULL PRIMARY KEY
  );

  CREATE TABLE encodings (
    set_id BIGINT NOT NULL,
    tensor TEXT COLLATE "C" NOT NULL,
    generation BIGINT NOT NULL,
    update_time_us BIGINT NOT NULL,
    format BIGINT NOT NULL,
    scale_count BIGINT NOT NULL,
    checksum BIGINT NOT NULL,
    head_checksum BIGINT NOT NULL,
    principal TEXT COLLATE "C" NOT NULL,
    slot BIGINT NOT NULL,
    charged_bytes BIGINT NOT NULL,
    content_id BIGINT NOT NULL,
    content_bytes BIGINT NOT NULL,
    body BYTEA NOT NULL,
    PRIMARY KEY (set_id, tensor)
  );
  ALTER TABLE encodings ALTER COLUMN body SET STORAGE EXTERNAL;
  -- Scales of large ones, under an id of their own. What is not used any more
  -- is noted, and freed later in steps.
  CREATE TABLE encoding_pieces (
    content_id BIGINT NOT NULL,
    piece BIGINT NOT NULL,
    checksum BIGINT NOT NULL,
    bytes BYTEA NOT NULL,
    PRIMARY KEY (content_id, piece)
  );
  ALTER TABLE encoding_pieces ALTER COLUMN bytes SET STORAGE EXTERNAL;
  -- Those that are being written; their pieces count for whoever writes.
  CREATE TABLE staged_contents (
    content_id BIGINT NOT NULL PRIMARY KEY,
    touch_time_us BIGINT NOT NULL,
    model TEXT COLLATE "C" NOT NULL,
    principal TEXT COLLATE "C" NOT NULL,
    slot BIGINT NOT NULL,
    bytes BIGINT NOT NULL
  );
  CREATE TABLE lost_contents (
    content_id BIGINT NOT NULL PRIMARY KEY
  );
  CREATE FUNCTION quantd_lose_content() RETURNS TRIGGER
  LANGUAGE plpgsql AS $$
  BEGIN
    IF TG_OP = 'DELETE' OR OLD.content_id <> NEW.content_id THEN
      INSERT INTO lost_contents VALUES (OLD.content_id) ON CONFLICT DO NOTHING;
    END IF;
    RETURN NULL;
  END $$;
  CREATE TRIGGER encodings_lose_content AFTER UPDATE OF content_id OR DELETE
    ON encodings FOR EACH ROW WHEN (OLD.content_id <> 0)
    EXECUTE FUNCTION quantd_lose_content();

  CREATE TABLE statistics (
    set_id BIGINT NOT NULL,
    tensor TEXT COLLATE "C" NOT NULL,
    source TEXT COLLATE "C" NOT NULL,
    sequence BIGINT NOT NULL,
    update_time_us BIGINT NOT NULL,
    incarnation BIGINT NOT NULL,
    size_bytes BIGINT NOT NULL,
    mantissa_bits BIGINT NOT NULL,
    block_size BYTEA NOT NULL,
    shape BYTEA NOT NULL,
    body_checksum BIGINT NOT NULL,
    checksum BIGINT NOT NULL,
    principal TEXT COLLATE "C" NOT NULL,
    slot BIGINT NOT NULL,
    charged_bytes BIGINT NOT NULL,
    averages BYTEA NOT NULL,
    body BYTEA NOT NULL,
    PRIMARY KEY (set_id, tensor, source)
  );
  ALTER TABLE statistics ALTER COLUMN body SET STORAGE EXTERNAL;
  ALTER TABLE statistics ALTER COLUMN averages SET STORAGE EXTERNAL;
  -- What follows the body, see statistics_pieces.h.
  CREATE TABLE statistics_pieces (
    set_id BIGINT NOT NULL,
    tensor TEXT COLLATE "C" NOT NULL,
    source TEXT COLLATE "C" NOT NULL,
    sequence BIGINT NOT NULL,
    piece BIGINT NOT NULL,
    checksum BIGINT NOT NULL,
    bytes BYTEA NOT NULL,
    PRIMARY KEY (set_id, tensor, source, sequence, piece)
  );
  ALTER TABLE statistics_pieces ALTER COLUMN bytes SET STORAGE EXTERNAL;
  CREATE TABLE lost_statistics (
    set_id BIGINT NOT NULL,
    tensor TEXT COLLATE "C" NOT NULL,
    source TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (set_id, tensor, source)
  );
  CREATE FUNCTION quantd_lose_statistics() RETURNS TRIGGER
  LANGUAGE plpgsql AS $$
  BEGIN
    INSERT INTO lost_statistics VALUES (OLD.set_id, OLD.tensor, OLD.source)
      ON CONFLICT DO NOTHING;
    RETURN NULL;
  END $$;
  CREATE TRIGGER statistics_lose_pieces AFTER DELETE ON statistics
    FOR EACH ROW EXECUTE FUNCTION quantd_lose_statistics();

  CREATE TABLE set_counts (
    set_id BIGINT NOT NULL,
    principal TEXT COLLATE "C" NOT NULL,
    slot BIGINT NOT NULL,
    row_count BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    update_time_us BIGINT NOT NULL,
    PRIMARY KEY (set_id, principal, slot)
  ) WITH (fillfactor = 50);
  -- Of 'models:*' for all, 'models:PREFIX/' and 'principal:NAME'.
  CREATE TABLE usage_counts (
    scope TEXT COLLATE "C" NOT NULL,
    slot BIGINT NOT NULL,
    row_count BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    PRIMARY KEY (scope, slot)
  ) WITH (fillfactor = 50);

  -- Locks the row of 'models:*' before those that others may take in another
  -- order, so that nobody waits in a circle.
  CREATE FUNCTION quantd_count_usage(
    of_model TEXT, of_principal TEXT, of_slot BIGINT, more_rows BIGINT,
    more_bytes BIGINT) RETURNS VOID LANGUAGE plpgsql AS $$
  BEGIN
    INSERT INTO usage_counts AS counted
      VALUES ('models:*', of_slot, more_rows, more_bytes)
      ON CONFLICT (scope, slot) DO UPDATE SET
        row_count = counted.row_count + excluded.row_count,
        bytes = counted.bytes + excluded.bytes;
    INSERT INTO usage_counts AS counted
      SELECT 'models:' || substr(of_model, 1, position), of_slot, more_rows,
        more_bytes
        -- No more prefixes than a quota may have slashes: the access file
        -- refuses longer ones.
        FROM (SELECT position
          FROM generate_series(1, length(of_model)) AS position
          WHERE substr(of_model, position, 1) = '/'
          ORDER BY position LIMIT 8) AS slashes
      UNION ALL
      SELECT 'principal:' || of_principal, of_slot, more_rows, more_bytes
        WHERE of_principal <> ''
      ON CONFLICT (scope, slot) DO UPDATE SET
        row_count = counted.row_count + excluded.row_count,
        bytes = counted.bytes + excluded.bytes;
    IF more_bytes < 0 THEN
      DELETE FROM usage_counts
        WHERE slot = of_slot AND row_count = 0 AND bytes = 0
          AND scope IN (
          SELECT 'principal:' || of_principal UNION ALL
          SELECT 'models:' || substr(of_model, 1, position)
            FROM generate_series(1, length(of_model)) AS position
            WHERE substr(of_model, position, 1) = '/');
    END IF;
  END $$;
  -- What is inserted here is added to the counts of scopes.
  CREATE VIEW usage_changes AS SELECT
    '' AS model, '' AS principal, CAST(0 AS BIGINT) AS slot,
    CAST(0 AS BIGINT) AS row_count, CAST(0 AS BIGINT) AS bytes;
  CREATE FUNCTION quantd_change_usage() RETURNS TRIGGER
  LANGUAGE plpgsql AS $$
  BEGIN
    PERFORM quantd_count_usage(NEW.model, NEW.principal, NEW.slot,
      NEW.row_count, NEW.bytes);
    RETURN NULL;
  END $$;
  CREATE TRIGGER usage_change INSTEAD OF INSERT ON usage_changes
    FOR EACH ROW EXECUTE FUNCTION quantd_change_usage();

  CREATE FUNCTION quantd_count_staged() RETURNS TRIGGER
  LANGUAGE plpgsql AS $$
  BEGIN
    IF TG_OP = 'DELETE' THEN
      PERFORM quantd_count_usage(OLD.model, OLD.principal, OLD.slot, 0,
        -OLD.bytes);
    ELSIF TG_OP = 'UPDATE' THEN
      PERFORM quantd_count_usage(NEW.model, NEW.principal, NEW.slot, 0,
        NEW.bytes - OLD.bytes);
    ELSE
      PERFORM quantd_count_usage(NEW.model, NEW.principal, NEW.slot, 0,
        NEW.bytes);
    END IF;
    RETURN NULL;
  END $$;
  CREATE TRIGGER staged_contents_count AFTER INSERT OR UPDATE OR DELETE
    ON staged_contents FOR EACH ROW EXECUTE FUNCTION quantd_count_staged();

  -- Counts for the scopes and for the set, unless it is lost.
  CREATE FUNCTION quantd_count(
    of_set BIGINT, of_principal TEXT, of_slot BIGINT, more_rows BIGINT,
    more_bytes BIGINT, new_time_us BIGINT) RETURNS VOID
  LANGUAGE plpgsql AS $$
  DECLARE
    of_model TEXT;
  BEGIN
    SELECT model INTO of_model FROM row_sets WHERE set_id = of_set;
    IF NOT FOUND THEN
      RETURN;
    END IF;
    PERFORM quantd_count_usage(of_model, of_principal, of_slot, more_rows,
      more_bytes);
    INSERT INTO set_counts AS counted VALUES (of_set, of_principal, of_slot,
        more_rows, more_bytes, new_time_us)
      ON CONFLICT (set_id, principal, slot) DO UPDATE SET
        row_count = counted.row_count + excluded.row_count,
        bytes = counted.bytes + excluded.bytes,
        update_time_us =
          GREATEST(counted.update_time_us, excluded.update_time_us);
    IF more_rows < 0 THEN
      DELETE FROM set_counts
        WHERE set_id = of_set AND principal = of_principal AND slot = of_slot
          AND row_count = 0;
    END IF;
  END $$;
  -- Rows that move to another set are counted by who moves them, and fire
  -- nothing.
  CREATE FUNCTION quantd_count_row() RETURNS TRIGGER
  LANGUAGE plpgsql AS $$
  BEGIN
    IF TG_OP = 'UPDATE' THEN
      IF OLD.principal = NEW.principal THEN
        PERFORM quantd_count(NEW.set_id, NEW.principal, NEW.slot, 0,
          NEW.charged_bytes - OLD.charged_bytes, NEW.update_time_us);
        RETURN NULL;
      END IF;
    END IF;
    IF TG_OP <> 'DELETE' THEN
      PERFORM quantd_count(NEW.set_id, NEW.principal, NEW.slot, 1,
        NEW.charged_bytes, NEW.update_time_us);
    END IF;
    IF TG_OP <> 'INSERT' THEN
      PERFORM quantd_count(OLD.set_id, OLD.principal, OLD.slot, -1,
        -OLD.charged_bytes, 0);
    END IF;
    RETURN NULL;
  END $$;
  CREATE TRIGGER encodings_count
    AFTER INSERT OR UPDATE OF principal, charged_bytes OR DELETE
    ON encodings FOR EACH ROW EXECUTE FUNCTION quantd_count_row();
  CREATE TRIGGER statistics_count
    AFTER INSERT OR UPDATE OF principal, charged_bytes OR DELETE
    ON statistics FOR EACH ROW EXECUTE FUNCTION quantd_count_row();
)sql";

}  // namespace

// Fields of the classes below.
struct FreePostgresqlResult {
  void operator()(PGresult* result) const { PQclear(result); }
};
using PostgresqlResult = std::unique_ptr<PGresult, FreePostgresqlResult>;

struct FreePostgresqlConnection {
  void operator()(PGconn* connection) const { PQfinish(connection); }
};
using PostgresqlHandle = std::unique_ptr<PGconn, FreePostgresqlConnection>;

namespace {

// Number that a name is locked by.
int64_t NameNumber(absl::string_view name) {
  return static_cast<int64_t>(XXH3_64bits(name.data(), name.size()));
}

// Number of a model, which is no revision's.
int64_t ModelNumber(absl::string_view model) {
  return NameNumber(absl::StrCat(model, "\n"));
}

// Integers travel in network byte order.
std::array<char, 8> ToNetwork(int64_t value) {
  std::array<char, 8> bytes;
  for (int i = 0; i < 8; ++i) {
    bytes[i] = static_cast<char>(static_cast<uint64_t>(value) >> (56 - 8 * i));
  }
  return bytes;
}

int64_t FromNetwork(const char* bytes) {
  uint64_t value = 0;
  for (int i = 0; i < 8; ++i) {
    value = value << 8 | static_cast<uint8_t>(bytes[i]);
  }
  return static_cast<int64_t>(value);
}

// libpq's messages end with a line break, and may have several lines.
std::string OneLine(const char* message) {
  std::string line(message);
  absl::StripAsciiWhitespace(&line);
  std::replace(line.begin(), line.end(), '\n', ' ');
  return line;
}

// `detail` may name hosts, users and SQL.
absl::Status Unavailable(absl::string_view what, absl::string_view detail) {
  return core::StoreUnavailableError(
      absl::StrCat(what, ": the database is away or fails"), detail);
}

struct Host {
  std::string name;
  std::string address;
  std::string port;
};

// Options of a connection that libpq takes, host by host: each gets a time of
// its own.
struct ConnectionPlan {
  // Without the hosts.
  std::vector<std::pair<std::string, std::string>> options;
  std::vector<Host> hosts;
};

// The i-th of a comma-separated list; a list of one is for all.
std::string Item(const std::string& list, size_t i) {
  const std::vector<std::string> items = absl::StrSplit(list, ',');
  return items.size() == 1 ? items[0] : i < items.size() ? items[i] : "";
}

absl::StatusOr<ConnectionPlan> PlanConnection(const std::string& url) {
  char* error = nullptr;
  const std::unique_ptr<PQconninfoOption, void (*)(PQconninfoOption*)> parsed(
      PQconninfoParse(url.c_str(), &error), &PQconninfoFree);
  if (parsed == nullptr) {
    const std::string text = error == nullptr ? "out of memory" : error;
    PQfreemem(error);
    return Unavailable("cannot use the store's URL", OneLine(text.c_str()));
  }
  ConnectionPlan plan;
  std::string names, addresses, ports;
  for (const PQconninfoOption* option = parsed.get();
       option->keyword != nullptr; ++option) {
    if (option->val == nullptr) continue;
    const absl::string_view keyword = option->keyword;
    if (keyword == "host") {
      names = option->val;
    } else if (keyword == "hostaddr") {
      addresses = option->val;
    } else if (keyword == "port") {
      ports = option->val;
    } else {
      plan.options.emplace_back(keyword, option->val);
    }
  }
  plan.options.emplace_back("client_encoding", "UTF8");
  plan.options.emplace_back("fallback_application_name", "quantd");
  const auto count = [](const std::string& list) {
    return 1 + std::count(list.begin(), list.end(), ',');
  };
  const size_t hosts =
      static_cast<size_t>(std::max(count(names), count(addresses)));
  for (size_t i = 0; i < hosts; ++i) {
    plan.hosts.push_back({Item(names, i), Item(addresses, i), Item(ports, i)});
  }
  return plan;
}

// Waits for one of `events` at `socket`; 0 after `timeout`.
int Wait(int socket, short events, absl::Duration timeout) {
  pollfd entry{socket, events, 0};
  const absl::Duration deadline = core::SteadyNow() + timeout;
  while (true) {
    const int64_t left =
        absl::ToInt64Milliseconds(deadline - core::SteadyNow());
    const int ready =
        poll(&entry, 1, static_cast<int>(std::max<int64_t>(left, 0)));
    if (ready > 0) return entry.revents;
    if (ready == 0 || errno != EINTR) return 0;
  }
}

}  // namespace

// One session with its prepared statements, one statement at a time.
class PostgresqlConnection final : public SqlConnection {
 public:
  // `name` is what Announce says.
  // Errors: STORE_UNAVAILABLE; so for every call.
  static absl::StatusOr<std::unique_ptr<PostgresqlConnection>> Open(
      const std::string& url, absl::Duration timeout, const std::string& name);

  std::unique_ptr<SqlStatement> Prepare(const char* sql) override;
  absl::Status LockTensor(const EncodingKey& key) override;
  absl::Status LockRevisions(absl::string_view model,
                             std::vector<std::string> revisions) override;
  absl::Status LockModel(absl::string_view model) override;
  absl::Status LockSource(const EncodingKey& key,
                          absl::string_view source) override;
  absl::Status LockName(absl::string_view name) override;
  absl::StatusOr<int64_t> NextGeneration() override;
  absl::Status Announce() override;

  // Runs statements without parameters, and drops their rows. The command tag
  // of the last one to `tag`.
  absl::Status Run(const char* sql, std::string* tag = nullptr);
  // Commits; an aborted transaction's COMMIT succeeds as a ROLLBACK.
  absl::Status Commit();
  // Creates the schema where there is none yet, in a transaction.
  // Errors: STORE_SCHEMA as well.
  absl::Status CreateSchema();

  // The session is of no use any more.
  bool is_broken() const { return is_broken_; }
  // Nobody has ended the session while it was idle.
  bool IsAlive();
  int socket() const { return PQsocket(handle()); }
  // How many announcements of others have arrived since the last call.
  int TakeForeignAnnouncements();

 private:
  friend class PostgresqlStatement;

  PostgresqlConnection(PostgresqlHandle handle, absl::Duration timeout,
                       std::string name)
      : handle_(std::move(handle)), timeout_(timeout), name_(std::move(name)) {}

  PGconn* handle() const { return handle_.get(); }
  // Until the transaction ends.
  absl::Status LockName(absl::string_view name, absl::string_view what);
  // Sends what libpq holds.
  absl::Status Flush(absl::string_view what);
  // The next result of what was sent; null after the last.
  absl::StatusOr<PostgresqlResult> NextResult(absl::string_view what);
  // Receives and drops what is left.
  void Drain();
  // The session can't be used any more, for that reason.
  absl::Status Break(absl::string_view what, absl::string_view detail);
  // The error of a result that failed.
  absl::Status ErrorOf(const PGresult* result, absl::string_view what);
  // The name under which `sql` is prepared.
  absl::StatusOr<std::string> NameOf(const char* sql, absl::string_view what);

  const PostgresqlHandle handle_;
  absl::Duration timeout_;
  const std::string name_;
  absl::flat_hash_map<const char*, std::string> names_;
  bool is_broken_ = false;
};

class PostgresqlStatement final : public SqlStatement {
 public:
  PostgresqlStatement(PostgresqlConnection* connection, const char* sql)
      : connection_(connection), sql_(sql) {}
  ~PostgresqlStatement() override {
    if (state_ == State::kRunning) connection_->Drain();
  }
  PostgresqlStatement(const PostgresqlStatement&) = delete;
  PostgresqlStatement& operator=(const PostgresqlStatement&) = delete;

  void BindText(int index, absl::string_view text) override {
    BindBytes(index, text);
  }
  void BindBytes(int index, absl::string_view bytes) override {
    count_ = std::max(count_, index);
    // A null pointer would bind NULL.
    values_[index - 1] = bytes.data() == nullptr ? "" : bytes.data();
    sizes_[index - 1] = static_cast<int>(bytes.size());
  }
  void BindInt(int index, int64_t value) override {
    integers_[index - 1] = ToNetwork(value);
    BindBytes(index, {integers_[index - 1].data(), 8});
  }

  absl::StatusOr<bool> Step(absl::string_view what) override {
    if (state_ == State::kNew) {
      if (absl::Status s = Send(what); !s.ok()) return s;
      state_ = State::kRunning;
    }
    if (state_ == State::kDone) return false;
    absl::StatusOr<PostgresqlResult> result = connection_->NextResult(what);
    if (!result.ok()) {
      state_ = State::kDone;
      return result.status();
    }
    row_ = *std::move(result);
    if (PQresultStatus(row_.get()) == PGRES_SINGLE_TUPLE) return true;
    state_ = State::kDone;
    connection_->Drain();
    return false;
  }

  int64_t Int(int column) const override {
    return PQgetlength(row_.get(), 0, column) == 8
               ? FromNetwork(PQgetvalue(row_.get(), 0, column))
               : 0;
  }
  absl::string_view Bytes(int column) const override {
    return {PQgetvalue(row_.get(), 0, column),
            static_cast<size_t>(PQgetlength(row_.get(), 0, column))};
  }

 private:
  enum class State { kNew, kRunning, kDone };

  absl::Status Send(absl::string_view what) {
    absl::StatusOr<std::string> name = connection_->NameOf(sql_, what);
    if (!name.ok()) return name.status();
    // All in binary.
    std::array<int, kMaxParameters> formats;
    formats.fill(1);
    PGconn* const handle = connection_->handle();
    // Row by row, so that many large ones are not in memory at once.
    if (PQsendQueryPrepared(handle, name->c_str(), count_, values_.data(),
                            sizes_.data(), formats.data(), 1) == 0 ||
        PQsetSingleRowMode(handle) == 0) {
      return connection_->Break(what, OneLine(PQerrorMessage(handle)));
    }
    return connection_->Flush(what);
  }

  PostgresqlConnection* const connection_;
  const char* const sql_;
  State state_ = State::kNew;
  int count_ = 0;
  std::array<const char*, kMaxParameters> values_;
  std::array<int, kMaxParameters> sizes_;
  std::array<std::array<char, 8>, kMaxParameters> integers_;
  PostgresqlResult row_;
};

absl::StatusOr<std::unique_ptr<PostgresqlConnection>>
PostgresqlConnection::Open(const std::string& url, absl::Duration timeout,
                           const std::string& name) {
  constexpr absl::string_view kWhat = "cannot connect to the store";
  absl::StatusOr<ConnectionPlan> plan = PlanConnection(url);
  if (!plan.ok()) return plan.status();
  absl::Status error;
  for (const Host& host : plan->hosts) {
    std::vector<const char*> keywords, values;
    const auto add = [&](const char* keyword, const std::string& value) {
      if (value.empty()) return;
      keywords.push_back(keyword);
      values.push_back(value.c_str());
    };
    for (const auto& [keyword, value] : plan->options) {
      add(keyword.c_str(), value);
    }
    add("host", host.name);
    add("hostaddr", host.address);
    add("port", host.port);
    keywords.push_back(nullptr);
    values.push_back(nullptr);
    PostgresqlHandle handle(
        PQconnectStartParams(keywords.data(), values.data(), 0));
    if (handle == nullptr) return Unavailable(kWhat, "out of memory");
    // libpq's rule: before the first poll, wait to write.
    PostgresPollingStatusType wants = PQstatus(handle.get()) == CONNECTION_BAD
                                          ? PGRES_POLLING_FAILED
                                          : PGRES_POLLING_WRITING;
    while (wants == PGRES_POLLING_READING || wants == PGRES_POLLING_WRITING) {
      const short events = wants == PGRES_POLLING_READING ? POLLIN : POLLOUT;
      if (Wait(PQsocket(handle.get()), events, timeout) == 0) break;
      wants = PQconnectPoll(handle.get());
    }
    if (wants != PGRES_POLLING_OK) {
      error =
          Unavailable(kWhat, wants == PGRES_POLLING_FAILED
                                 ? OneLine(PQerrorMessage(handle.get()))
                                 : absl::StrCat("no answer from \"", host.name,
                                                "\" within ",
                                                absl::FormatDuration(timeout)));
      continue;
    }
    const char* encoding = PQparameterStatus(handle.get(), "server_encoding");
    if (encoding == nullptr || absl::string_view(encoding) != "UTF8") {
      return core::StoreUnavailableError(absl::StrCat(
          kWhat, ": the database is in ", encoding == nullptr ? "?" : encoding,
          ", expected UTF8"));
    }
    PQsetnonblocking(handle.get(), 1);
    std::unique_ptr<PostgresqlConnection> connection(
        new PostgresqlConnection(std::move(handle), timeout, name));
    // A commit is on disk when it returns, whatever the server's default; a
    // replica that vanished does not keep its locks.
    const std::string setup = absl::StrCat(
        "SELECT set_config('synchronous_commit', 'on', false) "
        "WHERE current_setting('synchronous_commit') = 'off';"
        "SET idle_in_transaction_session_timeout = 10000;"
        "SET client_min_messages = error;"
        "SET lock_timeout = ",
        std::max<int64_t>(1, absl::ToInt64Milliseconds(timeout)));
    error = connection->Run(setup.c_str());
    if (error.ok()) return connection;
  }
  return error;
}

std::unique_ptr<SqlStatement> PostgresqlConnection::Prepare(const char* sql) {
  return std::make_unique<PostgresqlStatement>(this, sql);
}

absl::Status PostgresqlConnection::LockTensor(const EncodingKey& key) {
  // The parts can't hold the separator. Names that collide wait for each other.
  const std::string revision = absl::StrCat(key.model, "\n", key.revision);
  const std::unique_ptr<SqlStatement> row = Prepare(kLockTensor);
  row->BindInt(1, ModelNumber(key.model));
  row->BindInt(2, NameNumber(revision));
  row->BindInt(3, NameNumber(absl::StrCat(revision, "\n", key.tensor)));
  return row->Step("cannot lock a tensor").status();
}

absl::Status PostgresqlConnection::LockRevisions(
    absl::string_view model, std::vector<std::string> revisions) {
  constexpr absl::string_view kWhat = "cannot lock a revision";
  {
    const std::unique_ptr<SqlStatement> row = Prepare(kShareName);
    row->BindInt(1, ModelNumber(model));
    if (absl::Status s = row->Step(kWhat).status(); !s.ok()) return s;
  }
  for (const std::string& revision : revisions) {
    absl::Status status = LockName(absl::StrCat(model, "\n", revision), kWhat);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status PostgresqlConnection::LockModel(absl::string_view model) {
  const std::unique_ptr<SqlStatement> row = Prepare(kLockName);
  row->BindInt(1, ModelNumber(model));
  return row->Step("cannot lock a model").status();
}

absl::Status PostgresqlConnection::LockSource(const EncodingKey& key,
                                              absl::string_view source) {
  const std::string name = absl::StrCat(key.model, "\n", key.revision, "\n",
                                        key.tensor, "\n", source);
  return LockName(name, "cannot lock a source");
}

absl::Status PostgresqlConnection::LockName(absl::string_view name) {
  return LockName(name, "cannot lock what others write");
}

absl::Status PostgresqlConnection::LockName(absl::string_view name,
                                            absl::string_view what) {
  const std::unique_ptr<SqlStatement> row = Prepare(kLockName);
  row->BindInt(1, NameNumber(name));
  return row->Step(what).status();
}

absl::StatusOr<int64_t> PostgresqlConnection::NextGeneration() {
  const std::unique_ptr<SqlStatement> row = Prepare(kPostgresqlNextGeneration);
  absl::StatusOr<bool> found = row->Step("cannot count a generation");
  if (!found.ok()) return found.status();
  return row->Int(0);
}

absl::Status PostgresqlConnection::Announce() {
  const std::unique_ptr<SqlStatement> row = Prepare(kNotify);
  row->BindText(1, name_);
  return row->Step("cannot announce a change").status();
}

int PostgresqlConnection::TakeForeignAnnouncements() {
  int count = 0;
  while (PGnotify* const notification = PQnotifies(handle())) {
    count += name_ != notification->extra;
    PQfreemem(notification);
  }
  return count;
}

absl::Status PostgresqlConnection::Run(const char* sql, std::string* tag) {
  constexpr absl::string_view kWhat = "cannot use the store";
  if (PQsendQuery(handle(), sql) == 0) {
    return Break(kWhat, OneLine(PQerrorMessage(handle())));
  }
  if (absl::Status s = Flush(kWhat); !s.ok()) return s;
  while (true) {
    absl::StatusOr<PostgresqlResult> result = NextResult(kWhat);
    if (!result.ok()) return result.status();
    if (*result == nullptr) return absl::OkStatus();
    if (tag != nullptr) *tag = PQcmdStatus(result->get());
  }
}

absl::Status PostgresqlConnection::Commit() {
  std::string tag;
  if (absl::Status s = Run(kPostgresqlCommit, &tag); !s.ok()) return s;
  if (tag != kPostgresqlCommit) {
    return Unavailable("cannot commit", "the transaction was rolled back");
  }
  return absl::OkStatus();
}

absl::Status PostgresqlConnection::CreateSchema() {
  if (absl::Status s = Run(kLockSchema); !s.ok()) return s;
  if (absl::Status s = Run(kCreateSchemaTable); !s.ok()) return s;
  int64_t version;
  {
    const std::unique_ptr<SqlStatement> row = Prepare(kSchemaVersion);
    absl::StatusOr<bool> found = row->Step("cannot read the schema's version");
    if (!found.ok()) return found.status();
    // NULL, which a new table has, reads as 0.
    version = row->Int(0);
  }
  if (version == kPostgresqlSchemaVersion) return absl::OkStatus();
  if (version != 0) {
    return core::StoreSchemaError(version, kPostgresqlSchemaVersion);
  }
  const absl::Duration usual_timeout =
      std::exchange(timeout_, std::max(timeout_, kSchemaTimeout));
  absl::Status status = Run(kSchema);
  timeout_ = usual_timeout;
  if (!status.ok()) return status;
  return Run(absl::StrCat("INSERT INTO quantd_schema (version) VALUES (",
                          kPostgresqlSchemaVersion, ")")
                 .c_str());
}

bool PostgresqlConnection::IsAlive() {
  // A change of settings may come unasked, or the end of the session: first its
  // reason, then nothing more.
  for (int i = 0; i < 8; ++i) {
    if (Wait(PQsocket(handle()), POLLIN, absl::ZeroDuration()) == 0) {
      return PQstatus(handle()) == CONNECTION_OK;
    }
    if (PQconsumeInput(handle()) == 0) return false;
  }
  return false;
}

absl::Status PostgresqlConnection::Flush(absl::string_view what) {
  while (true) {
    const int left = PQflush(handle());
    if (left == 0) return absl::OkStatus();
    if (left < 0) return Break(what, OneLine(PQerrorMessage(handle())));
    const int ready = Wait(PQsocket(handle()), POLLIN | POLLOUT, timeout_);
    if (ready == 0) return Break(what, "the database takes nothing");
    // The server may wait for us to read before it reads on.
    if ((ready & POLLIN) != 0 && PQconsumeInput(handle()) == 0) {
      return Break(what, OneLine(PQerrorMessage(handle())));
    }
  }
}

absl::StatusOr<PostgresqlResult> PostgresqlConnection::NextResult(
    absl::string_view what) {
  while (PQisBusy(handle()) == 1) {
    if (Wait(PQsocket(handle()), POLLIN, timeout_) == 0) {
      return Break(what, absl::StrCat("no answer from the database within ",
                                      absl::FormatDuration(timeout_)));
    }
    if (PQconsumeInput(handle()) == 0) {
      return Break(what, OneLine(PQerrorMessage(handle())));
    }
  }
  PostgresqlResult result(PQgetResult(handle()));
  if (result == nullptr) return result;
  switch (PQresultStatus(result.get())) {
    case PGRES_COMMAND_OK:
    case PGRES_TUPLES_OK:
    case PGRES_SINGLE_TUPLE:
    case PGRES_EMPTY_QUERY:
      return result;
    default:
      break;
  }
  absl::Status error = ErrorOf(result.get(), what);
  Drain();
  return error;
}

void PostgresqlConnection::Drain() {
  while (!is_broken_) {
    absl::StatusOr<PostgresqlResult> result =
        NextResult("cannot use the store");
    if (!result.ok() || *result == nullptr) return;
  }
}

absl::Status PostgresqlConnection::Break(absl::string_view what,
                                         absl::string_view detail) {
  is_broken_ = true;
  return Unavailable(what, detail);
}

absl::Status PostgresqlConnection::ErrorOf(const PGresult* result,
                                           absl::string_view what) {
  const char* field = PQresultErrorField(result, PG_DIAG_SQLSTATE);
  const absl::string_view state = field == nullptr ? "" : field;
  const std::string message =
      absl::StrCat(OneLine(PQresultErrorMessage(result)), " (SQLSTATE ",
                   state.empty() ? "unknown" : state, ")");
  // Damaged data or a damaged index.
  if (state == "XX001" || state == "XX002") {
    return core::StoreCorruptError(
        absl::StrCat(what, ": the database found damaged data"), message);
  }
  // Text that is not in UTF-8. Only the page of a list starts after anything
  // that is no name.
  if (state == "22021") {
    return core::PageInvalidError("the page does not start after a name");
  }
  // A server that only reads was another one's standby, or became it: the next
  // connection looks for the one that writes.
  if (PQstatus(handle()) != CONNECTION_OK || state == "25006" ||
      absl::StartsWith(state, "57P")) {
    return Break(what, message);
  }
  return Unavailable(what, message);
}

absl::StatusOr<std::string> PostgresqlConnection::NameOf(
    const char* sql, absl::string_view what) {
  const auto known = names_.find(sql);
  if (known != names_.end()) return known->second;
  std::string name = absl::StrCat("quantd_", names_.size());
  if (PQsendPrepare(handle(), name.c_str(), sql, 0, nullptr) == 0) {
    return Break(what, OneLine(PQerrorMessage(handle())));
  }
  if (absl::Status s = Flush(what); !s.ok()) return s;
  absl::StatusOr<PostgresqlResult> result = NextResult(what);
  if (!result.ok()) return result.status();
  Drain();
  names_.emplace(sql, name);
  return name;
}

// Counts what others announce, on a thread of its own. Thread-safe.
class PostgresqlListener {
 public:
  PostgresqlListener(const PostgresqlDatabase::Options& options,
                     const std::string& name)
      : options_(options),
        name_(name),
        wakeup_(eventfd(0, EFD_CLOEXEC)),
        thread_([this] { Work(); }) {}
  ~PostgresqlListener() {
    const uint64_t one = 1;
    // A counter that is far from full takes it.
    (void)!write(wakeup_, &one, sizeof(one));
    thread_.join();
    close(wakeup_);
  }
  PostgresqlListener(const PostgresqlListener&) = delete;
  PostgresqlListener& operator=(const PostgresqlListener&) = delete;

  absl::optional<int64_t> version() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (!is_listening_) return absl::nullopt;
    return version_;
  }

 private:
  void Work() {
    do {
      absl::StatusOr<std::unique_ptr<PostgresqlConnection>> connection =
          PostgresqlConnection::Open(options_.url, options_.timeout, name_);
      if (connection.ok() && (*connection)->Run(kListen).ok()) {
        // Announcements from before were not heard.
        Count(1, true);
        Listen(**connection);
        Count(0, false);
      }
    } while (!WaitToStop(-1, kAttemptPause));
  }

  // Returns when the connection is dead, or it is time to stop.
  void Listen(PostgresqlConnection& connection) {
    while (!WaitToStop(connection.socket(), kSilence)) {
      if (!connection.IsAlive() || !connection.Run(kPostgresqlPing).ok())
        return;
      Count(connection.TakeForeignAnnouncements(), true);
    }
  }

  // True when it is time to stop; false when `socket`, unless -1, has something
  // to read, or after `timeout`.
  bool WaitToStop(int socket, absl::Duration timeout) const {
    pollfd entries[] = {{wakeup_, POLLIN, 0}, {socket, POLLIN, 0}};
    poll(entries, 2, static_cast<int>(absl::ToInt64Milliseconds(timeout)));
    return entries[0].revents != 0;
  }

  void Count(int announcements, bool is_listening) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    version_ += announcements;
    is_listening_ = is_listening;
  }

  const PostgresqlDatabase::Options options_;
  const std::string name_;
  const int wakeup_;
  mutable absl::Mutex mutex_;
  int64_t version_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_listening_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

absl::StatusOr<std::shared_ptr<PostgresqlDatabase>> PostgresqlDatabase::Open(
    Options options) {
  std::shared_ptr<PostgresqlDatabase> database(
      new PostgresqlDatabase(std::move(options)));
  const auto create = [](SqlConnection& connection) {
    return static_cast<PostgresqlConnection&>(connection).CreateSchema();
  };
  if (absl::Status s = database->Write(create); !s.ok()) return s;
  database->listener_ =
      std::make_unique<PostgresqlListener>(database->options_, database->name_);
  return database;
}

PostgresqlDatabase::PostgresqlDatabase(Options options)
    : options_(std::move(options)),
      name_(absl::StrCat(getpid(), "-", absl::ToUnixNanos(absl::Now()))) {}

PostgresqlDatabase::~PostgresqlDatabase() = default;

absl::Status PostgresqlDatabase::Read(
    absl::FunctionRef<absl::Status(SqlConnection&)> body) {
  absl::StatusOr<std::unique_ptr<PostgresqlConnection>> connection = Take();
  if (!connection.ok()) return connection.status();
  const absl::Cleanup give_back = [&] { GiveBack(*std::move(connection)); };
  return body(**connection);
}

absl::Status PostgresqlDatabase::Write(
    absl::FunctionRef<absl::Status(SqlConnection&)> body) {
  absl::StatusOr<std::unique_ptr<PostgresqlConnection>> taken = Take();
  if (!taken.ok()) return taken.status();
  PostgresqlConnection& connection = **taken;
  const absl::Cleanup give_back = [&] { GiveBack(*std::move(taken)); };
  absl::Status status = connection.Run(kPostgresqlBegin);
  if (!status.ok()) return status;
  absl::Cleanup roll_back = [&connection] {
    if (connection.is_broken()) return;
    connection.Run(kPostgresqlRollback).IgnoreError();
  };
  status = body(connection);
  if (status.ok()) status = connection.Commit();
  if (status.ok()) std::move(roll_back).Cancel();
  return status;
}

absl::optional<int64_t> PostgresqlDatabase::ForeignVersion() {
  return listener_->version();
}

absl::StatusOr<DatabaseSize> PostgresqlDatabase::Size() {
  DatabaseSize size;
  const auto read = [&](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kSize);
    absl::StatusOr<bool> found = row->Step("cannot read the store's size");
    if (found.ok() && *found) size.size_bytes = row->Int(0);
    return found.status();
  };
  if (absl::Status s = Read(read); !s.ok()) return s;
  return size;
}

absl::Status PostgresqlDatabase::Ping() {
  return Read([](SqlConnection& connection) {
    return connection.Prepare(kPostgresqlPing)
        ->Step("cannot read the store")
        .status();
  });
}

absl::StatusOr<std::unique_ptr<PostgresqlConnection>>
PostgresqlDatabase::Take() {
  {
    absl::MutexLock lock(&mutex_);
    const auto has_room = [this] {
      mutex_.AssertHeld();
      return !idle_.empty() || open_count_ < options_.connections;
    };
    if (!mutex_.AwaitWithTimeout(absl::Condition(&has_room),
                                 options_.timeout)) {
      return core::StoreUnavailableError(
          "cannot use the store: all connections to the database are in use");
    }
    while (!idle_.empty()) {
      std::unique_ptr<PostgresqlConnection> connection =
          std::move(idle_.back());
      idle_.pop_back();
      if (connection->IsAlive()) return connection;
      --open_count_;
    }
    if (core::SteadyNow() < next_attempt_) return connect_error_;
    ++open_count_;
  }
  absl::StatusOr<std::unique_ptr<PostgresqlConnection>> connection =
      PostgresqlConnection::Open(options_.url, options_.timeout, name_);
  if (!connection.ok()) {
    absl::MutexLock lock(&mutex_);
    --open_count_;
    connect_error_ = connection.status();
    next_attempt_ = core::SteadyNow() + kAttemptPause;
  }
  return connection;
}

void PostgresqlDatabase::GiveBack(
    std::unique_ptr<PostgresqlConnection> connection) {
  absl::MutexLock lock(&mutex_);
  if (connection->is_broken()) {
    --open_count_;
  } else {
    idle_.push_back(std::move(connection));
  }
}

}  // namespace quantd::server
