// Tampering with a SQLite file.

#ifndef QUANTD_TESTS_SUPPORT_SQLITE_FILE_H_
#define QUANTD_TESTS_SUPPORT_SQLITE_FILE_H_

#include <string>

#include "gtest/gtest.h"
#include "sqlite3.h"

namespace quantd::testing {

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
