// A SQLite file to open as a store, and to tamper with.

#ifndef QUANTD_TESTS_SERVER_STORE_SQLITE_FIXTURE_H_
#define QUANTD_TESTS_SERVER_STORE_SQLITE_FIXTURE_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "server/store/encoding_store.h"
#include "server/store/sqlite_database.h"
#include "tests/support/sqlite_file.h"
#include "tests/support/temporary_directory.h"

namespace quantd::server {

class SqliteFixture : public ::testing::Test {
 protected:
  // Null, and a failure of the test, if it can't be opened.
  std::shared_ptr<SqliteDatabase> OpenDatabase() const {
    absl::StatusOr<std::shared_ptr<SqliteDatabase>> database =
        SqliteDatabase::Open(path_);
    EXPECT_TRUE(database.ok()) << database.status();
    return database.ok() ? *std::move(database) : nullptr;
  }

  // Runs SQL behind the store's back.
  void Execute(const std::string& sql) const {
    testing::ExecuteSql(path_, sql);
  }

  const testing::TemporaryDirectory directory_;
  std::string path_ = directory_.File("encodings.db");
  const EncodingKey key_{"model", "revision", "tensor"};
};

}  // namespace quantd::server

#endif  // QUANTD_TESTS_SERVER_STORE_SQLITE_FIXTURE_H_
