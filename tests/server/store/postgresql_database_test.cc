#include "server/store/postgresql_database.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <libpq-fe.h>
#include <signal.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "core/types/encoding.h"
#include "server/store/sql_encoding_store.h"
#include "tests/server/store/test_database.h"
#include "tests/support/metric_value.h"
#include "tests/support/postgresql_cluster.h"

namespace quantd::server::postgresql_database_test {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<const core::Encoding> MakeEncoding() {
  core::Encoding encoding;
  encoding.format = static_cast<core::NumberFormat>(8);
  encoding.scale = {0.5f};
  encoding.qmin = -128;
  encoding.qmax = 127;
  return std::make_shared<const core::Encoding>(std::move(encoding));
}

class PostgresqlDatabaseTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!testing::PostgresqlCluster::IsInstalled()) {
      GTEST_SKIP() << "PostgreSQL is not installed";
    }
    database_.emplace(testing::Backend::kPostgresql);
    store_ = std::make_unique<SqlEncodingStore>(
        database_->Open(testing::kLongEnough));
  }

  static testing::PostgresqlCluster& cluster() {
    return testing::TestDatabase::cluster();
  }

  // Runs SQL behind the store's back, and answers the first column of the
  // first row.
  std::string Execute(const std::string& sql) const {
    const std::unique_ptr<PGconn, void (*)(PGconn*)> connection(
        PQconnectdb(database_->url().c_str()), &PQfinish);
    const std::unique_ptr<PGresult, void (*)(PGresult*)> result(
        PQexec(connection.get(), sql.c_str()), &PQclear);
    EXPECT_STREQ(PQresultErrorMessage(result.get()), "");
    return PQntuples(result.get()) > 0 ? PQgetvalue(result.get(), 0, 0) : "";
  }

  // A handle that runs into its time-out soon. A busy machine may need more
  // than one attempt to open it.
  std::shared_ptr<PostgresqlDatabase> OpenHasty() const {
    PostgresqlDatabase::Options options;
    options.url = database_->url();
    options.connections = 1;
    absl::StatusOr<std::shared_ptr<PostgresqlDatabase>> database;
    EXPECT_TRUE(testing::PollUntil(testing::kLongEnough, [&] {
      database = PostgresqlDatabase::Open(options);
      return database.ok();
    })) << database.status();
    return database.ok() ? *std::move(database) : nullptr;
  }

  static void ExpectUnavailable(const absl::Status& status) {
    EXPECT_EQ(core::ErrorReason(status), "STORE_UNAVAILABLE") << status;
  }

  absl::Status Put() {
    return store_->Put(key_, MakeEncoding(), Precondition()).status();
  }

  std::optional<testing::TestDatabase> database_;
  std::unique_ptr<SqlEncodingStore> store_;
  const EncodingKey key_{"model", "revision", "tensor"};
};

// Without waiting for the time-out, which is far away: three of them are more
// than a test may take.
TEST_F(PostgresqlDatabaseTest, FailsWhileTheServerIsAwayAndThenGoesOn) {
  ASSERT_TRUE(Put().ok());
  const int64_t before = store_->Get(key_)->generation;
  cluster().Stop();
  ExpectUnavailable(Put());
  ExpectUnavailable(store_->Get(key_).status());
  ExpectUnavailable(store_->Ping());
  cluster().Start();
  // There is a pause between two attempts to connect.
  absl::Status status;
  EXPECT_TRUE(testing::PollUntil(testing::kLongEnough, [&] {
    status = Put();
    return status.ok();
  })) << status;
  const absl::StatusOr<StoredEncoding> got = store_->Get(key_);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->generation, before + 1);
}

TEST_F(PostgresqlDatabaseTest, FindsOutBeforeUseThatTheServerWasStartedAgain) {
  ASSERT_TRUE(Put().ok());
  cluster().Stop();
  cluster().Start();
  const absl::Status status = Put();
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(PostgresqlDatabaseTest, DoesNotWaitForAServerThatHangs) {
  const auto database = OpenHasty();
  ASSERT_NE(database, nullptr);
  int64_t pid = 0;
  absl::Status status;
  ASSERT_TRUE(testing::PollUntil(testing::kLongEnough, [&] {
    status = database->Read([&](SqlConnection& connection) {
      const std::unique_ptr<SqlStatement> row =
          connection.Prepare("SELECT CAST(pg_backend_pid() AS BIGINT)");
      const absl::Status asked = row->Step("cannot ask").status();
      if (asked.ok()) pid = row->Int(0);
      return asked;
    });
    return status.ok();
  })) << status;
  ASSERT_EQ(kill(static_cast<pid_t>(pid), SIGSTOP), 0);
  ExpectUnavailable(database->Ping());
  // Through a session of its own.
  EXPECT_TRUE(testing::PollUntil(testing::kLongEnough, [&] {
    status = database->Ping();
    return status.ok();
  })) << status;
  kill(static_cast<pid_t>(pid), SIGCONT);
}

TEST_F(PostgresqlDatabaseTest, WaitsForALockNoLongerThanForTheServer) {
  ASSERT_TRUE(Put().ok());
  const auto hasty = OpenHasty();
  ASSERT_NE(hasty, nullptr);
  SqlEncodingStore hasty_store(hasty);
  const auto other = database_->Open();
  const absl::Status status = other->Write([&](SqlConnection& connection) {
    EXPECT_TRUE(connection.LockTensor(key_).ok());
    ExpectUnavailable(
        hasty_store.Put(key_, MakeEncoding(), Precondition()).status());
    // Another tensor's lock is free.
    const EncodingKey free{"model", "revision", "other"};
    EXPECT_TRUE(store_->Put(free, MakeEncoding(), Precondition()).ok());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Put().ok());
}

// The version of a handle, once it listens.
int64_t VersionOf(SqlDatabase& database) {
  absl::optional<int64_t> version;
  EXPECT_TRUE(testing::PollUntil(testing::kLongEnough, [&] {
    version = database.ForeignVersion();
    return version.has_value();
  })) << "it does not listen";
  return version.value_or(-1);
}

// Whether the version becomes another one.
bool Changes(SqlDatabase& database, int64_t version) {
  return testing::PollUntil(testing::kLongEnough,
                            [&] { return VersionOf(database) != version; });
}

TEST_F(PostgresqlDatabaseTest, KeepsToItsNumberOfConnections) {
  PostgresqlDatabase::Options options;
  options.url = database_->url() + " application_name=counted";
  options.connections = 2;
  options.timeout = testing::kLongEnough;
  const auto database = PostgresqlDatabase::Open(options);
  ASSERT_TRUE(database.ok()) << database.status();
  SqlEncodingStore store(*database);
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      for (int k = 0; k < 20; ++k) {
        const EncodingKey key{"model", "revision", absl::StrCat(i)};
        failures += !store.Put(key, MakeEncoding(), Precondition()).ok();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  // And the one that listens, once it does.
  VersionOf(**database);
  EXPECT_EQ(Execute("SELECT COUNT(*) FROM pg_stat_activity WHERE "
                    "application_name = 'counted'"),
            "3");
}

TEST_F(PostgresqlDatabaseTest, ReportsARowThatChanged) {
  ASSERT_TRUE(Put().ok());
  Execute("UPDATE encodings SET scale_count = 2");
  EXPECT_EQ(core::ErrorReason(store_->Get(key_).status()), "STORE_CORRUPT");
  EXPECT_TRUE(Put().ok());
  EXPECT_TRUE(store_->Get(key_).ok());
}

TEST_F(PostgresqlDatabaseTest, AFailedWriteLeavesNothing) {
  const auto database = database_->Open();
  const std::string version = Execute("SELECT MAX(version) FROM quantd_schema");
  const absl::Status status = database->Write([](SqlConnection& connection) {
    EXPECT_TRUE(connection.NextGeneration().ok());
    return connection.Prepare("INSERT INTO quantd_schema VALUES (17)")
                   ->Step("cannot insert")
                   .ok()
               ? absl::CancelledError()
               : absl::InternalError("");
  });
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_EQ(Execute("SELECT MAX(version) FROM quantd_schema"), version);
}

TEST_F(PostgresqlDatabaseTest, ATransactionThatFailedInsideDoesNotCommit) {
  const auto database = database_->Open();
  const std::string version = Execute("SELECT MAX(version) FROM quantd_schema");
  const absl::Status status = database->Write([](SqlConnection& connection) {
    EXPECT_TRUE(connection.Prepare("INSERT INTO quantd_schema VALUES (18)")
                    ->Step("cannot insert")
                    .ok());
    EXPECT_FALSE(connection.Prepare("SELECT 1 / 0")->Step("cannot").ok());
    return absl::OkStatus();
  });
  EXPECT_EQ(core::ErrorReason(status), "STORE_UNAVAILABLE") << status;
  EXPECT_EQ(Execute("SELECT MAX(version) FROM quantd_schema"), version);
}

TEST_F(PostgresqlDatabaseTest, HearsOfWhatOthersChangeAndNotOfItsOwn) {
  const auto mine = database_->Open();
  const auto other = database_->Open();
  SqlEncodingStore my_store(mine);
  SqlEncodingStore other_store(other);
  const int64_t before = VersionOf(*mine);
  const int64_t others_before = VersionOf(*other);
  ASSERT_TRUE(my_store.Put(key_, MakeEncoding(), {}).ok());
  // What the other one heard, this one has heard too.
  ASSERT_TRUE(Changes(*other, others_before));
  EXPECT_EQ(mine->ForeignVersion(), before);
  ASSERT_TRUE(other_store.Delete(key_, {}).ok());
  EXPECT_TRUE(Changes(*mine, before));
}

TEST_F(PostgresqlDatabaseTest, TakesNothingForCertainThatItCouldNotHear) {
  const auto database = database_->Open();
  const int64_t before = VersionOf(*database);
  cluster().Stop();
  EXPECT_TRUE(testing::PollUntil(testing::kLongEnough, [&] {
    return !database->ForeignVersion().has_value();
  }));
  cluster().Start();
  EXPECT_NE(VersionOf(*database), before);
}

TEST_F(PostgresqlDatabaseTest, RefusesANewerSchemaInWords) {
  Execute("INSERT INTO quantd_schema VALUES (99)");
  PostgresqlDatabase::Options options;
  options.url = database_->url();
  options.timeout = testing::kLongEnough;
  const absl::Status status = PostgresqlDatabase::Open(options).status();
  EXPECT_EQ(core::ErrorReason(status), "STORE_SCHEMA") << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("99"));
}

TEST_F(PostgresqlDatabaseTest, PreparesAnEmptyDatabaseOnceForManyReplicas) {
  const testing::TestDatabase empty(testing::Backend::kPostgresql);
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&] { EXPECT_NE(empty.Open(), nullptr); });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(PostgresqlDatabaseTest, TriesOneHostAfterTheOther) {
  PostgresqlDatabase::Options options;
  options.url = database_->url();
  options.timeout = testing::kLongEnough;
  const size_t host = options.url.find("host=") + 5;
  // Nobody listens in the first directory.
  options.url.insert(host, "/nowhere,");
  const auto database = PostgresqlDatabase::Open(options);
  EXPECT_TRUE(database.ok()) << database.status();
}

TEST_F(PostgresqlDatabaseTest, SaysWhatIsWrongWithAUrl) {
  for (const char* url : {"postgresql://[", "host=/nowhere", "nonsense=1",
                          "postgresql://127.0.0.1:1/quantd"}) {
    PostgresqlDatabase::Options options;
    options.url = url;
    const absl::Status status = PostgresqlDatabase::Open(options).status();
    EXPECT_EQ(core::ErrorReason(status), "STORE_UNAVAILABLE") << url;
    EXPECT_EQ(status.message().find('\n'), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace quantd::server::postgresql_database_test
