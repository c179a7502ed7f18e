// The databases that stores are tested on.

#ifndef QUANTD_TESTS_SERVER_STORE_TEST_DATABASE_H_
#define QUANTD_TESTS_SERVER_STORE_TEST_DATABASE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "server/store/postgresql_database.h"
#include "server/store/sql_database.h"
#include "server/store/sqlite_database.h"
#include "tests/support/postgresql_cluster.h"
#include "tests/support/temporary_directory.h"

namespace quantd::testing {

enum class Backend { kSqlite, kPostgresql };

// Those that are installed here.
inline std::vector<Backend> Backends() {
  std::vector<Backend> backends = {Backend::kSqlite};
  if (PostgresqlCluster::IsInstalled()) {
    backends.push_back(Backend::kPostgresql);
  }
  return backends;
}

inline std::string BackendName(const ::testing::TestParamInfo<Backend>& info) {
  return info.param == Backend::kSqlite ? "Sqlite" : "Postgresql";
}

// A new and empty database.
class TestDatabase {
 public:
  explicit TestDatabase(Backend backend) {
    if (backend == Backend::kPostgresql) {
      static int count = 0;
      url_ = cluster().NewSchema(absl::StrCat("test_", ++count));
    }
  }

  // One for all tests of the program.
  static PostgresqlCluster& cluster() {
    static PostgresqlCluster cluster;
    return cluster;
  }

  // A handle of its own, as another process has it; null, and a failure of the
  // test, if it can't be opened.
  // `timeout` of PostgreSQL; long by default, for a busy disk is no failure.
  std::shared_ptr<server::SqlDatabase> Open(
      absl::Duration timeout = absl::Minutes(2)) const {
    if (url_.empty()) {
      return Check(
          server::SqliteDatabase::Open(directory_.File("encodings.db")));
    }
    server::PostgresqlDatabase::Options options;
    options.url = url_;
    options.timeout = timeout;
    return Check(server::PostgresqlDatabase::Open(std::move(options)));
  }

  // The connection string; empty unless it is PostgreSQL.
  const std::string& url() const { return url_; }

 private:
  template <typename Database>
  static std::shared_ptr<server::SqlDatabase> Check(
      absl::StatusOr<std::shared_ptr<Database>> database) {
    EXPECT_TRUE(database.ok()) << database.status();
    return database.ok() ? *std::move(database) : nullptr;
  }

  const TemporaryDirectory directory_;
  std::string url_;
};

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SERVER_STORE_TEST_DATABASE_H_
