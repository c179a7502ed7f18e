// A file that is damaged.

#include "server/store/sqlite_database.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "core/types/encoding.h"
#include "server/store/encoding_store.h"
#include "server/store/sql_encoding_store.h"
#include "server/store/store_check.h"
#include "server/store/store_keeper.h"
#include "tests/server/store/sqlite_fixture.h"

namespace quantd::server::sqlite_database_test {
namespace {

constexpr int kRows = 40;
constexpr int kPageBytes = 4096;

std::shared_ptr<const core::Encoding> MakeEncoding(int scale_count) {
  core::Encoding encoding;
  encoding.format = static_cast<core::NumberFormat>(8);
  encoding.block_size = {1};
  for (int i = 0; i < scale_count; ++i) {
    encoding.scale.push_back(0.25f + static_cast<float>(i));
  }
  encoding.qmin = -128;
  encoding.qmax = 127;
  return std::make_shared<const core::Encoding>(std::move(encoding));
}

EncodingKey KeyOf(int i) {
  return {"net", "main", absl::StrCat("layers.", 100 + i)};
}

class SqliteDatabaseTest : public SqliteFixture {
 protected:
  // Leaves a file with rows on pages with others, and rows of many pages.
  std::string MakeFile() {
    {
      SqlEncodingStore store(OpenDatabase());
      for (int i = 0; i < kRows; ++i) {
        EXPECT_TRUE(
            store.Put(KeyOf(i), MakeEncoding(i % 8 == 7 ? 4000 : 50), {}).ok());
      }
    }
    Execute("PRAGMA auto_vacuum = NONE; VACUUM; PRAGMA journal_mode = DELETE");
    std::ifstream file(path_, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

  void WriteFile(const std::string& bytes) const {
    for (const char* suffix : {"-wal", "-shm"}) {
      std::filesystem::remove(path_ + suffix);
    }
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  }
};

TEST_F(SqliteDatabaseTest, ListsReadNoBodies) {
  MakeFile();
  SqlEncodingStore store(OpenDatabase());
  const auto damaged_count = [&] {
    const auto list = store.ListEncodings("net", "main", "", 1000);
    EXPECT_TRUE(list.ok()) << list.status();
    EXPECT_EQ(list->size(), static_cast<size_t>(kRows));
    return std::count_if(list->begin(), list->end(),
                         [](const auto& entry) { return !entry.error.ok(); });
  };
  EXPECT_EQ(damaged_count(), 0);
  Execute("UPDATE encodings SET body = zeroblob(length(body))");
  EXPECT_EQ(damaged_count(), 0);
  Execute("UPDATE encodings SET generation = generation + 1");
  EXPECT_EQ(damaged_count(), kRows);
}

// Each page in turn, but the first with the schema, is lost or overwritten.
TEST_F(SqliteDatabaseTest, ADamagedPageCostsOnlyItsRows) {
  const std::string whole = MakeFile();
  const int page_count = static_cast<int>(whole.size() / kPageBytes);
  ASSERT_GT(page_count, 20);
  std::mt19937 random(1);
  int damaged_count = 0;
  // Of pages with keys, without which their rows are not found, and of pages
  // with the schema.
  int lost_key_count = 0;
  int lost_schema_count = 0;
  int told_revision_count = 0;
  for (int page = 1; page < page_count; ++page) {
    for (const bool is_lost : {true, false}) {
      const std::string what =
          absl::StrCat("page ", page + 1, is_lost ? " lost" : " overwritten");
      std::string bytes = whole;
      for (int i = 0; i < kPageBytes; ++i) {
        bytes[page * kPageBytes + i] =
            is_lost ? '\0' : static_cast<char>(random());
      }
      WriteFile(bytes);
      absl::StatusOr<std::shared_ptr<SqliteDatabase>> database =
          SqliteDatabase::Open(path_);
      if (!database.ok()) {
        EXPECT_EQ(core::ErrorReason(database.status()), "STORE_CORRUPT")
            << what;
        ++lost_schema_count;
        continue;
      }
      SqlEncodingStore store(*database);
      // Told in its place, or not where its name is.
      const auto models = store.ListModels({}, 10);
      const auto revisions = store.ListRevisions("net", "", 10);
      EXPECT_EQ(models.ok(), revisions.ok()) << what;
      if (models.ok() && revisions.ok()) {
        ASSERT_EQ(models->size(), 1u) << what;
        ASSERT_EQ(revisions->size(), 1u) << what;
        EXPECT_EQ((*models)[0].model, "net") << what;
        EXPECT_EQ((*models)[0].error.ok(),
                  (*models)[0].encoding_count == kRows);
        EXPECT_EQ((*revisions)[0].error, (*models)[0].error) << what;
        told_revision_count += !(*models)[0].error.ok();
      } else {
        EXPECT_EQ(core::ErrorReason(models.status()), "STORE_CORRUPT") << what;
      }
      const auto list = store.ListEncodings("net", "main", "", 1000);
      if (!list.ok()) {
        EXPECT_EQ(core::ErrorReason(list.status()), "STORE_CORRUPT") << what;
        ++lost_key_count;
        continue;
      }
      ASSERT_EQ(list->size(), static_cast<size_t>(kRows)) << what;
      bool is_damaged = false;
      for (int i = 0; i < kRows; ++i) {
        const EncodingListEntry& entry = (*list)[i];
        EXPECT_EQ(entry.tensor, KeyOf(i).tensor);
        const absl::Status got = store.Get(KeyOf(i)).status();
        is_damaged = is_damaged || !got.ok();
        // Lists read no bodies.
        if (entry.error.ok()) continue;
        EXPECT_FALSE(got.ok()) << what;
        EXPECT_EQ(core::ErrorReason(entry.error), "STORE_CORRUPT") << what;
        EXPECT_THAT(std::string(entry.error.message()),
                    ::testing::HasSubstr(entry.tensor));
      }
      if (!is_damaged) continue;
      ++damaged_count;
      std::vector<std::string> lines;
      const absl::StatusOr<StoreCheck> check = CheckStore(
          *database, [&](absl::string_view line) { lines.emplace_back(line); });
      ASSERT_TRUE(check.ok()) << what << ": " << check.status();
      EXPECT_EQ(check->encodings, kRows) << what;
      EXPECT_GT(check->damaged, 0) << what;
    }
  }
  EXPECT_GT(damaged_count, 20);
  EXPECT_GT(told_revision_count, 0);
  EXPECT_LE(lost_key_count, 6);
  EXPECT_LE(lost_schema_count, 12);
}

}  // namespace
}  // namespace quantd::server::sqlite_database_test
