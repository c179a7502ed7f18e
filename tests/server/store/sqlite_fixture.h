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

// Takes from a store what its fifth version has added.
inline constexpr char kDropHeadChecksums[] = R"sql(
  ALTER TABLE encodings DROP COLUMN head_checksum;
  PRAGMA user_version = 4;
)sql";

// Takes from a store what its fourth version has added: pieces of statistics,
// which are kept elsewhere.
inline constexpr char kTakePieces[] = R"sql(
  DROP TRIGGER statistics_delete_pieces;
  CREATE TABLE kept_pieces AS SELECT * FROM statistics_pieces;
  DROP TABLE statistics_pieces;
  PRAGMA user_version = 3;
)sql";

// Takes from a store what its third version has added: counts by triggers.
inline constexpr char kDropCounts[] = R"sql(
  DROP TRIGGER encodings_insert; DROP TRIGGER encodings_update;
  DROP TRIGGER encodings_hand_over; DROP TRIGGER encodings_delete;
  DROP TRIGGER statistics_insert; DROP TRIGGER statistics_update;
  DROP TRIGGER statistics_hand_over; DROP TRIGGER statistics_delete;
  DROP VIEW count_changes; DROP TABLE path_positions;
  DROP TABLE usage_counts; DROP TABLE revision_counts;
  ALTER TABLE encodings DROP COLUMN principal;
  ALTER TABLE statistics DROP COLUMN principal;
  PRAGMA user_version = 2;
)sql";

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
