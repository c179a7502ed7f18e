// A PostgreSQL database that the replicas of a fleet share.

#ifndef QUANTD_SERVER_STORE_POSTGRESQL_DATABASE_H_
#define QUANTD_SERVER_STORE_POSTGRESQL_DATABASE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "server/store/sql_database.h"

namespace quantd::server {

// Version of the tables, in quantd_schema.
constexpr int kPostgresqlSchemaVersion = 8;

class PostgresqlConnection;
class PostgresqlListener;

// Connections are opened when they are needed, at most `connections` at once,
// and kept. A connection that failed is dropped. No call waits for longer than
// `timeout` for a database that does not answer. While no connection can be
// opened, not every call tries again: the others fail at once. Thread-safe.
class PostgresqlDatabase : public SqlDatabase {
 public:
  struct Options {
    // As libpq takes it: "postgresql://user@host1,host2/name?sslmode=...", or
    // "host=/run/postgresql dbname=quantd".
    std::string url;
    int connections = 12;
    // Between two signs of life of the database, and for a lock.
    absl::Duration timeout = absl::Milliseconds(800);
  };

  // Creates the schema where there is none.
  // Errors: STORE_UNAVAILABLE (also a database that is not in UTF-8),
  // STORE_SCHEMA.
  static absl::StatusOr<std::shared_ptr<PostgresqlDatabase>> Open(
      Options options);
  ~PostgresqlDatabase() override;

  absl::Status Read(absl::FunctionRef<absl::Status(SqlConnection&)> body)
      override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Write(absl::FunctionRef<absl::Status(SqlConnection&)> body)
      override ABSL_LOCKS_EXCLUDED(mutex_);
  // Hears of what others announce on a connection of its own; none while that
  // is down.
  absl::optional<int64_t> ForeignVersion() override;
  // Free space is not known: the database takes it for what is written next.
  absl::StatusOr<DatabaseSize> Size() override;
  absl::Status Ping() override;

 private:
  explicit PostgresqlDatabase(Options options);

  // A connection for the caller alone, to be given back.
  // Errors: STORE_UNAVAILABLE.
  absl::StatusOr<std::unique_ptr<PostgresqlConnection>> Take()
      ABSL_LOCKS_EXCLUDED(mutex_);
  void GiveBack(std::unique_ptr<PostgresqlConnection> connection)
      ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;
  // Tells this handle's announcements from those of others.
  const std::string name_;
  absl::Mutex mutex_;
  std::vector<std::unique_ptr<PostgresqlConnection>> idle_
      ABSL_GUARDED_BY(mutex_);
  // Connections that are open or being opened.
  int open_count_ ABSL_GUARDED_BY(mutex_) = 0;
  // The last attempt to connect failed so, and when to try again.
  absl::Status connect_error_ ABSL_GUARDED_BY(mutex_);
  absl::Duration next_attempt_ ABSL_GUARDED_BY(mutex_) =
      -absl::InfiniteDuration();
  // From the end of Open on.
  std::unique_ptr<PostgresqlListener> listener_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_POSTGRESQL_DATABASE_H_
