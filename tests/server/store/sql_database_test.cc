// What every SqlDatabase promises, on each implementation.

#include "server/store/sql_database.h"

#include <gtest/gtest.h>

#include <memory>
#include <new>

#include "absl/status/status.h"
#include "tests/server/store/test_database.h"

namespace quantd::server::sql_database_test {
namespace {

using testing::Backend;

class SqlDatabaseTest : public ::testing::TestWithParam<Backend> {
 protected:
  const testing::TestDatabase database_{GetParam()};
  const std::shared_ptr<SqlDatabase> sql_ = database_.Open();
};

TEST_P(SqlDatabaseTest, WhatThrowsLeavesNothingHeld) {
  const auto lose = [](SqlConnection& connection) -> absl::Status {
    return connection.Prepare("INSERT INTO lost_sets (set_id) VALUES (1)")
        ->Step("cannot lose a set")
        .status();
  };
  // As often as there may be connections.
  for (int i = 0; i < 20; ++i) {
    const auto write = [&](SqlConnection& connection) -> absl::Status {
      EXPECT_TRUE(lose(connection).ok());
      throw std::bad_alloc();
    };
    EXPECT_THROW(sql_->Write(write).IgnoreError(), std::bad_alloc);
    const auto read = [](SqlConnection& /*connection*/) -> absl::Status {
      throw std::bad_alloc();
    };
    EXPECT_THROW(sql_->Read(read).IgnoreError(), std::bad_alloc);
  }
  // The row is not there yet, or this would fail.
  absl::Status status = sql_->Write(lose);
  EXPECT_TRUE(status.ok()) << status;
  status = sql_->Read([](SqlConnection& connection) -> absl::Status {
    return connection.Prepare("SELECT set_id FROM lost_sets")
        ->Step("cannot read")
        .status();
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Stores, SqlDatabaseTest,
                         ::testing::ValuesIn(testing::Backends()),
                         testing::BackendName);

}  // namespace
}  // namespace quantd::server::sql_database_test
