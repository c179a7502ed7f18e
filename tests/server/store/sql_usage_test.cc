// That the counts are those of the rows, and that quotas hold, on each
// database.

#include "server/store/sql_usage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/errors.h"
#include "core/types/encoding.h"
#include "server/store/encoding_store.h"
#include "server/store/sql_database.h"
#include "server/store/sql_encoding_store.h"
#include "server/store/sql_statistics_store.h"
#include "server/store/statistics_store.h"
#include "tests/server/store/sqlite_fixture.h"
#include "tests/server/store/test_database.h"

namespace quantd::server::sql_usage_test {
namespace {

using testing::Backend;
using testing::BackendName;
using testing::Backends;

std::shared_ptr<const core::Encoding> MakeEncoding(int scale_count) {
  core::Encoding encoding;
  encoding.format = static_cast<core::NumberFormat>(8);
  if (scale_count > 1) encoding.block_size = {1};
  encoding.scale.assign(scale_count, 0.5f);
  encoding.qmin = -128;
  encoding.qmax = 127;
  return std::make_shared<const core::Encoding>(std::move(encoding));
}

// Bytes and rows by scope; encodings, statistics and bytes by revision.
struct Counts {
  std::map<std::string, std::pair<int64_t, int64_t>> usage;
  std::map<std::pair<std::string, std::string>,
           std::tuple<int64_t, int64_t, int64_t>>
      revisions;
};

class SqlUsageTest : public ::testing::TestWithParam<Backend> {
 protected:
  SqlUsageTest() { Reopen(); }

  void Reopen() {
    handle_.reset();
    encodings_.reset();
    statistics_.reset();
    handle_ = database_.Open();
    encodings_ = std::make_unique<SqlEncodingStore>(handle_);
    statistics_ = std::make_unique<SqlStatisticsStore>(handle_, 1 << 20);
  }

  absl::Status Put(const EncodingKey& key, int scale_count,
                   const WriteAccount& account = {}) {
    return encodings_->Put(key, MakeEncoding(scale_count), {"", account})
        .status();
  }

  absl::Status Contribute(const EncodingKey& key, const std::string& source,
                          uint64_t sequence, int elements,
                          const WriteAccount& account = {}) {
    core::StatisticsState part;
    part.shape = {elements};
    part.block_size = {1};
    part.statistics = core::TensorStatistics(elements, 7);
    return statistics_->Contribute({key, source, sequence, account}, part, 0.1)
        .status();
  }

  Usage UsageOf(const std::string& scope) {
    Usage usage;
    const absl::Status status =
        handle_->Read([&](SqlConnection& connection) -> absl::Status {
          absl::StatusOr<Usage> read = ReadUsage(connection, scope);
          if (read.ok()) usage = *read;
          return read.status();
        });
    EXPECT_TRUE(status.ok()) << status;
    return usage;
  }

  // Runs a statement for each of its rows.
  template <typename Row>
  void Query(const char* sql, Row take) {
    const absl::Status status =
        handle_->Read([&](SqlConnection& connection) -> absl::Status {
          const std::unique_ptr<SqlStatement> row = connection.Prepare(sql);
          while (true) {
            absl::StatusOr<bool> found = row->Step("cannot query");
            if (!found.ok()) return found.status();
            if (!*found) return absl::OkStatus();
            take(*row);
          }
        });
    EXPECT_TRUE(status.ok()) << status;
  }

  void Execute(const char* sql) {
    const absl::Status status = handle_->Write([&](SqlConnection& connection) {
      return connection.Prepare(sql)->Step("cannot execute").status();
    });
    EXPECT_TRUE(status.ok()) << sql << ": " << status;
  }

  // By looking at every row.
  Counts Recount() {
    Counts counts;
    const auto add = [&counts](const SqlStatement& row, bool is_encoding) {
      const std::string model(row.Bytes(0));
      const std::string revision(row.Bytes(1));
      const std::string principal(row.Bytes(4));
      const int64_t bytes =
          static_cast<int64_t>(model.size() + row.Bytes(2).size() +
                               row.Bytes(3).size()) +
          row.Int(5);
      std::vector<std::string> scopes = {"models:*"};
      for (size_t i = 0; i < model.size(); ++i) {
        if (model[i] != '/') continue;
        scopes.push_back(absl::StrCat("models:", model.substr(0, i + 1)));
      }
      if (!principal.empty()) {
        scopes.push_back(absl::StrCat("principal:", principal));
      }
      for (const std::string& scope : scopes) {
        counts.usage[scope].first += bytes;
        counts.usage[scope].second += 1;
      }
      auto& [encodings, statistics, revision_bytes] =
          counts.revisions[{model, revision}];
      (is_encoding ? encodings : statistics) += 1;
      revision_bytes += bytes;
    };
    Query(
        "SELECT model, revision, tensor, '', principal, "
        "CAST(length(body) AS BIGINT) + content_bytes FROM encodings "
        "JOIN row_sets ON row_sets.set_id = encodings.set_id",
        [&](const SqlStatement& row) { add(row, true); });
    Query(
        "SELECT model, revision, tensor, source, principal, size_bytes "
        "FROM statistics JOIN row_sets ON row_sets.set_id = statistics.set_id",
        [&](const SqlStatement& row) { add(row, false); });
    return counts;
  }

  // As the triggers have them.
  Counts Counted() {
    Counts counts;
    Query(
        "SELECT scope, CAST(SUM(bytes) AS BIGINT), "
        "CAST(SUM(row_count) AS BIGINT) FROM usage_counts GROUP BY scope",
        [&](const SqlStatement& row) {
          if (row.Int(1) == 0 && row.Int(2) == 0) return;
          counts.usage[std::string(row.Bytes(0))] = {row.Int(1), row.Int(2)};
        });
    Query(
        "SELECT model, revision, "
        "CAST(SUM(CASE kind WHEN 1 THEN 0 ELSE row_count END) AS BIGINT), "
        "CAST(SUM(CASE kind WHEN 1 THEN row_count ELSE 0 END) AS BIGINT), "
        "CAST(SUM(bytes) AS BIGINT) FROM row_sets "
        "JOIN set_counts ON set_counts.set_id = row_sets.set_id "
        "GROUP BY model, revision",
        [&](const SqlStatement& row) {
          counts.revisions[{std::string(row.Bytes(0)),
                            std::string(row.Bytes(1))}] = {
              row.Int(2), row.Int(3), row.Int(4)};
        });
    return counts;
  }

  void ExpectExact() {
    const Counts expected = Recount();
    const Counts got = Counted();
    EXPECT_EQ(got.usage, expected.usage);
    EXPECT_EQ(got.revisions, expected.revisions);
  }

  // Writes and deletes at random.
  void Churn(int steps) {
    std::mt19937 random(7);
    const auto pick = [&random](int count) {
      return static_cast<int>(random() % count);
    };
    const char* const models[] = {"a", "acme/b", "acme/team/c"};
    const char* const principals[] = {"", "x", "y"};
    const char* const tensors[] = {"t", "ü", "conv1.weight"};
    for (int i = 0; i < steps; ++i) {
      const EncodingKey key{models[pick(3)], pick(2) == 0 ? "1" : "two",
                            tensors[pick(3)]};
      const WriteAccount account{principals[pick(3)], {}};
      switch (pick(8)) {
        case 0:
        case 1:
          EXPECT_TRUE(Put(key, 1 + pick(300), account).ok());
          break;
        case 2:
          encodings_->Delete(key, {}).IgnoreError();
          break;
        case 3:
        case 4:
          EXPECT_TRUE(
              Contribute(key, pick(2) == 0 ? "A" : "é", i + 1, 4, account)
                  .ok());
          break;
        case 5:
          statistics_->DeleteStatistics(key, pick(2) == 0 ? "" : "A")
              .IgnoreError();
          break;
        case 6:
          encodings_->DeleteRevision(key.model, key.revision).IgnoreError();
          break;
        default:
          encodings_->PublishRevision(key.model, "1", "two", pick(2) == 0)
              .IgnoreError();
      }
    }
  }

  const testing::TestDatabase database_{GetParam()};
  std::shared_ptr<SqlDatabase> handle_;
  std::unique_ptr<SqlEncodingStore> encodings_;
  std::unique_ptr<SqlStatisticsStore> statistics_;
  const EncodingKey key_{"acme/net", "main", "conv1.weight"};
};

TEST_P(SqlUsageTest, CountsAreThoseOfTheRowsWhateverIsWrittenAndDeleted) {
  ExpectExact();
  for (int round = 0; round < 4; ++round) {
    Churn(60);
    ExpectExact();
  }
  // A transaction that fails leaves them as they were.
  const absl::Status failed = handle_->Write([&](SqlConnection& connection) {
    EXPECT_TRUE(connection.Prepare("DELETE FROM encodings")
                    ->Step("cannot delete")
                    .ok());
    return absl::CancelledError();
  });
  EXPECT_TRUE(absl::IsCancelled(failed));
  ExpectExact();
}

TEST_P(SqlUsageTest, WhatIsDeletedLeavesNoRevision) {
  ASSERT_TRUE(Put(key_, 3, {"x", {}}).ok());
  ASSERT_TRUE(Contribute(key_, "A", 1, 4).ok());
  ASSERT_TRUE(encodings_->Delete(key_, {}).ok());
  // Its statistics are left.
  EXPECT_EQ(encodings_->ListModels({}, 10)->size(), 1u);
  ASSERT_TRUE(statistics_->DeleteStatistics(key_, "").ok());
  EXPECT_TRUE(encodings_->ListModels({}, 10)->empty());
  int rows = 0;
  for (const char* sql :
       {"SELECT model FROM row_sets", "SELECT set_id FROM set_counts"}) {
    Query(sql, [&rows](const SqlStatement& row) { ++rows; });
  }
  EXPECT_EQ(rows, 0);
  EXPECT_EQ(UsageOf("models:acme/").bytes, 0);
  EXPECT_EQ(UsageOf("principal:x").rows, 0);
}

TEST_P(SqlUsageTest, NamesOfManySlashesLeaveFewCountsAndThenNone) {
  const EncodingKey deep{"1/2/3/4/5/6/7/8/9/10", "main", "t"};
  const auto scopes = [this] {
    std::set<std::string> scopes;
    Query("SELECT scope FROM usage_counts", [&](const SqlStatement& row) {
      scopes.insert(std::string(row.Bytes(0)));
    });
    return scopes;
  };
  ASSERT_TRUE(Put(deep, 1, {"x", {}}).ok());
  // All models, the principal, and the prefixes that a quota may name.
  EXPECT_EQ(scopes().size(), 2u + 8u);
  EXPECT_EQ(UsageOf("models:1/2/3/4/5/6/7/8/").rows, 1);
  ASSERT_TRUE(encodings_->Delete(deep, {}).ok());
  std::set<std::string> left = scopes();
  left.erase("models:*");
  EXPECT_TRUE(left.empty()) << *left.begin();
}

TEST_P(SqlUsageTest, WhatIsRefusedLeavesNoRevision) {
  const WriteAccount nothing{"x", {{"principal:x", 1 << 20, 0}}};
  EXPECT_FALSE(Put({"acme/net", "main", "a"}, 1, nothing).ok());
  EXPECT_FALSE(Contribute({"b", "main", "b"}, "A", 1, 4, nothing).ok());
  int rows = 0;
  Query("SELECT model FROM row_sets",
        [&rows](const SqlStatement& row) { ++rows; });
  EXPECT_EQ(rows, 0);
}

TEST_P(SqlUsageTest, NothingIsWrittenBeyondAQuota) {
  const WriteAccount two_rows{"x", {{"principal:x", 1 << 20, 2}}};
  EXPECT_TRUE(Put({"acme/net", "main", "a"}, 1, two_rows).ok());
  EXPECT_TRUE(Contribute({"b", "main", "b"}, "A", 1, 4, two_rows).ok());
  for (const absl::Status& status :
       {Put({"acme/net", "main", "c"}, 1, two_rows),
        Contribute({"b", "main", "b"}, "B", 1, 4, two_rows)}) {
    EXPECT_EQ(core::ErrorReason(status), "QUOTA_EXCEEDED") << status;
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_NE(status.message().find("2 rows of the quota of principal:x"),
              absl::string_view::npos)
        << status;
  }
  EXPECT_EQ(UsageOf("principal:x").rows, 2);
  ExpectExact();
  // What is there may be written again, and of what is gone another made.
  EXPECT_TRUE(Put({"acme/net", "main", "a"}, 200, two_rows).ok());
  EXPECT_TRUE(Contribute({"b", "main", "b"}, "A", 2, 4, two_rows).ok());
  EXPECT_TRUE(encodings_->Delete({"acme/net", "main", "a"}, {}).ok());
  EXPECT_TRUE(Put({"acme/net", "main", "c"}, 1, two_rows).ok());
  ExpectExact();

  const int64_t used = UsageOf("models:acme/").bytes;
  const WriteAccount as_much{"x", {{"models:acme/", used, 1000}}};
  const EncodingKey mine{"acme/net", "main", "c"};
  const EncodingKey other{"acme/net", "main", "d"};
  EXPECT_TRUE(Put(mine, 1, as_much).ok());
  EXPECT_EQ(core::ErrorReason(Put(mine, 200, as_much)), "QUOTA_EXCEEDED");
  EXPECT_EQ(core::ErrorReason(Put(other, 1, as_much)), "QUOTA_EXCEEDED");
  // It has nothing to do with that quota.
  EXPECT_TRUE(Put({"other", "main", "d"}, 200, {"x", {}}).ok());
  EXPECT_EQ(UsageOf("models:acme/").bytes, used);
  EXPECT_EQ(encodings_->Get(mine)->encoding->scale.size(), 1u);
  ExpectExact();
}

TEST_P(SqlUsageTest, WhatDoesNotGrowIsWrittenEvenWhereTheQuotaIsUsedUp) {
  ASSERT_TRUE(Put(key_, 100, {"x", {}}).ok());
  const WriteAccount nothing{"x",
                             {{"models:acme/", 0, 0}, {"principal:x", 0, 0}}};
  EXPECT_TRUE(Put(key_, 100, nothing).ok());
  EXPECT_TRUE(Put(key_, 50, nothing).ok());
  EXPECT_EQ(core::ErrorReason(Put(key_, 51, nothing)), "QUOTA_EXCEEDED");
  // What becomes another's is new to the other.
  const WriteAccount others{"y", {{"principal:y", 1 << 20, 0}}};
  EXPECT_EQ(core::ErrorReason(Put(key_, 50, others)), "QUOTA_EXCEEDED");
  EXPECT_EQ(UsageOf("principal:x").rows, 1);
  ExpectExact();
}

// Replicas of their own, all at the same quota.
TEST_P(SqlUsageTest, AQuotaHoldsForManyWritersTogether) {
  constexpr int kWriters = 6;
  constexpr int kPuts = 20;
  constexpr int64_t kRows = 50;
  const WriteAccount account{"x", {{"models:acme/", 1 << 30, kRows}}};
  std::vector<int> accepted(kWriters);
  std::vector<std::thread> writers;
  for (int i = 0; i < kWriters; ++i) {
    writers.emplace_back([&, i] {
      SqlEncodingStore store(database_.Open());
      for (int put = 0; put < kPuts;) {
        const absl::Status status =
            store
                .Put({"acme/net", "main", absl::StrCat(i, ".", put)},
                     MakeEncoding(1), {"", account})
                .status();
        // The others may have kept it waiting for too long.
        if (core::ErrorReason(status) == "STORE_UNAVAILABLE") continue;
        if (!status.ok()) {
          EXPECT_EQ(core::ErrorReason(status), "QUOTA_EXCEEDED") << status;
        }
        accepted[i] += status.ok() ? 1 : 0;
        ++put;
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  int64_t sum = 0;
  for (const int count : accepted) sum += count;
  EXPECT_EQ(sum, kRows);
  EXPECT_EQ(UsageOf("models:acme/").rows, kRows);
  ExpectExact();
}

INSTANTIATE_TEST_SUITE_P(Databases, SqlUsageTest,
                         ::testing::ValuesIn(Backends()), BackendName);

}  // namespace
}  // namespace quantd::server::sql_usage_test
