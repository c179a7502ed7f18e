// Tampering with a SQLite file.

#ifndef QUANTD_TESTS_SUPPORT_SQLITE_FILE_H_
#define QUANTD_TESTS_SUPPORT_SQLITE_FILE_H_

#include <string>

#include "gtest/gtest.h"
#include "sqlite3.h"

namespace quantd::testing {

// Takes from a store what its sixth and fifth versions have added; encodings
// whose scales are in pieces lose them.
inline constexpr char kDropHeadChecksums[] = R"sql(
  DROP TRIGGER encodings_insert; DROP TRIGGER encodings_update;
  DROP TRIGGER encodings_hand_over; DROP TRIGGER encodings_delete;
  DROP TRIGGER encodings_lose_deleted; DROP TRIGGER encodings_lose_replaced;
  DROP TRIGGER statistics_lose_pieces;
  DROP TABLE encoding_pieces; DROP TABLE staged_contents;
  DROP TABLE lost_contents; DROP TABLE lost_statistics;
  ALTER TABLE encodings DROP COLUMN content_id;
  ALTER TABLE encodings DROP COLUMN content_bytes;
  DROP TRIGGER encodings_delete_head; DROP TABLE encoding_heads;
  PRAGMA user_version = 4;
)sql";

// Takes from a store what its fourth version has added: pieces of statistics,
// which are kept elsewhere.
inline constexpr char kTakePieces[] = R"sql(
  CREATE TABLE kept_pieces AS SELECT * FROM statistics_pieces;
  DROP TABLE statistics_pieces;
  PRAGMA user_version = 3;
)sql";

// Takes from a store what its third version has added: counts by triggers.
inline constexpr char kDropCounts[] = R"sql(
  DROP TRIGGER statistics_insert; DROP TRIGGER statistics_update;
  DROP TRIGGER statistics_hand_over; DROP TRIGGER statistics_delete;
  DROP VIEW count_changes; DROP TABLE path_positions;
  DROP TABLE usage_counts; DROP TABLE revision_counts;
  ALTER TABLE encodings DROP COLUMN principal;
  ALTER TABLE statistics DROP COLUMN principal;
  PRAGMA user_version = 2;
)sql";

// Runs SQL on the file behind its store's back.
inline void ExecuteSql(const std::string& path, const std::string& sql) {
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(path.c_str(), &db), SQLITE_OK);
  sqlite3_busy_timeout(db, 1000);
  char* message = nullptr;
  EXPECT_EQ(sqlite3_exec(db, sql.c_str(), nullptr, nullptr, &message),
            SQLITE_OK)
      << message;
  sqlite3_free(message);
  sqlite3_close(db);
}

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_SQLITE_FILE_H_
