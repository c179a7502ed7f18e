#include "server/store/sql_encoding_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "server/store/file_system.h"
#include "tests/server/store/sqlite_fixture.h"

namespace quantd::server::sqlite_encoding_store_test {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<const core::Encoding> MakeEncoding(float scale) {
  core::Encoding encoding;
  encoding.format = static_cast<core::NumberFormat>(8);
  encoding.scale = {scale};
  encoding.qmin = -128;
  encoding.qmax = 127;
  return std::make_shared<const core::Encoding>(std::move(encoding));
}

class SqliteEncodingStoreTest : public SqliteFixture {
 protected:
  std::unique_ptr<SqlEncodingStore> MustOpen() const {
    std::shared_ptr<SqliteDatabase> database = OpenDatabase();
    if (database == nullptr) return nullptr;
    return std::make_unique<SqlEncodingStore>(std::move(database));
  }
};

TEST_F(SqliteEncodingStoreTest, CreatesTheFileAndItsLastDirectory) {
  path_ = directory_.File("state/encodings.db");
  std::unique_ptr<SqlEncodingStore> store = MustOpen();
  ASSERT_NE(store, nullptr);
  EXPECT_TRUE(std::filesystem::exists(path_));
  const absl::Status status =
      SqliteDatabase::Open(directory_.File("a/b/encodings.db")).status();
  EXPECT_EQ(core::ErrorReason(status), "STORE_UNAVAILABLE") << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("/a/b"));
}

TEST_F(SqliteEncodingStoreTest, ForeignVersionChangesWhenOthersWriteOnly) {
  std::unique_ptr<SqlEncodingStore> ours = MustOpen();
  std::unique_ptr<SqlEncodingStore> others = MustOpen();
  ASSERT_NE(ours, nullptr);
  ASSERT_NE(others, nullptr);
  const EncodingKey key{"m", "r", "t"};
  const absl::optional<int64_t> before = ours->ForeignVersion();
  ASSERT_TRUE(before.has_value());
  ASSERT_TRUE(ours->Put(key, MakeEncoding(1), {}).ok());
  ASSERT_TRUE(ours->Get(key).ok());
  EXPECT_EQ(ours->ForeignVersion(), before);
  ASSERT_TRUE(others->Put(key, MakeEncoding(2), {}).ok());
  const absl::optional<int64_t> after_put = ours->ForeignVersion();
  EXPECT_NE(after_put, before);
  ASSERT_TRUE(others->Delete(key, {}).ok());
  EXPECT_NE(ours->ForeignVersion(), after_put);
}

TEST_F(SqliteEncodingStoreTest, ReportsEveryColumnThatChangedInARow) {
  std::unique_ptr<SqlEncodingStore> store = MustOpen();
  ASSERT_NE(store, nullptr);
  for (const char* change : {
           "body = zeroblob(length(body))",
           "body = substr(body, 1, length(body) - 1)",
           "body = x''",
           "generation = generation + 1",
           "update_time_us = update_time_us + 1",
           "format = 4",
           "scale_count = 2",
           "checksum = checksum + 1",
           "head_checksum = head_checksum + 1",
           "charged_bytes = charged_bytes + 1",
       }) {
    ASSERT_TRUE(store->Put(key_, MakeEncoding(0.5f), {}).ok());
    ASSERT_TRUE(store->Get(key_).ok());
    Execute(absl::StrCat("UPDATE encodings SET ", change));
    const absl::Status status = store->Get(key_).status();
    EXPECT_EQ(core::ErrorReason(status), "STORE_CORRUPT") << change;
    EXPECT_THAT(std::string(status.message()), HasSubstr("\"tensor\""));
    EXPECT_TRUE(store->ListEncodings("model", "revision", "", 10).ok());
  }
}

TEST_F(SqliteEncodingStoreTest, ReportsAPieceThatChanged) {
  std::unique_ptr<SqlEncodingStore> store = MustOpen();
  ASSERT_NE(store, nullptr);
  core::Encoding encoding = *MakeEncoding(0.5f);
  encoding.block_size = {1};
  encoding.scale.assign(700'000, 0.5f);
  const auto large = std::make_shared<const core::Encoding>(encoding);
  for (const char* change :
       {"bytes = zeroblob(length(bytes)) WHERE piece = 1",
        "bytes = substr(bytes, 1, length(bytes) - 4) WHERE piece = 1",
        "checksum = checksum + 1 WHERE piece = 0"}) {
    ASSERT_TRUE(store->Put(key_, large, {}).ok());
    ASSERT_TRUE(store->Get(key_).ok());
    Execute(absl::StrCat("UPDATE encoding_pieces SET ", change));
    const absl::Status status = store->Get(key_).status();
    EXPECT_EQ(core::ErrorReason(status), "STORE_CORRUPT") << change;
  }
}

TEST_F(SqliteEncodingStoreTest, ReportsARowMovedToAnotherKey) {
  std::unique_ptr<SqlEncodingStore> store = MustOpen();
  ASSERT_NE(store, nullptr);
  ASSERT_TRUE(store->Put(key_, MakeEncoding(0.5f), {}).ok());
  const EncodingKey other{"model", "other", "sensor"};
  ASSERT_TRUE(store->Put(other, MakeEncoding(0.25f), {}).ok());
  Execute(
      "UPDATE encodings SET set_id = (SELECT set_id FROM row_sets "
      "WHERE revision = 'other') WHERE tensor = 'tensor'");
  EXPECT_EQ(
      core::ErrorReason(store->Get({"model", "other", "tensor"}).status()),
      "STORE_CORRUPT");
  Execute(
      "UPDATE row_sets SET model = 'modelr', revision = 'evision' "
      "WHERE revision = 'other'");
  EXPECT_EQ(
      core::ErrorReason(store->Get({"modelr", "evision", "sensor"}).status()),
      "STORE_CORRUPT");
  // Which a delete takes away.
  EXPECT_TRUE(store->DeleteRevision("modelr", "evision").ok());
  EXPECT_TRUE(
      store->Put({"modelr", "evision", "sensor"}, MakeEncoding(1), {}).ok());
}

TEST_F(SqliteEncodingStoreTest, DeletesOneOnlyWhereItIsKnownWhichRowsThereAre) {
  std::unique_ptr<SqlEncodingStore> store = MustOpen();
  ASSERT_NE(store, nullptr);
  const EncodingKey other{"model", "revision", "other"};
  ASSERT_TRUE(store->Put(key_, MakeEncoding(0.5f), {}).ok());
  ASSERT_TRUE(store->Put(other, MakeEncoding(0.5f), {}).ok());
  Execute("UPDATE row_sets SET generation = 1");
  EXPECT_EQ(core::ErrorReason(store->Delete(key_, {})), "STORE_CORRUPT");
  EXPECT_EQ(core::ErrorReason(
                store->ListEncodings("model", "revision", "z", 9).status()),
            "STORE_CORRUPT");
  Execute("UPDATE row_sets SET generation = 0");
  // Counts are no reason to take the others for gone.
  Execute("DELETE FROM set_counts");
  ASSERT_TRUE(store->Delete(key_, {}).ok());
  EXPECT_TRUE(store->Get(other).ok());
  EXPECT_TRUE(store->PublishRevision("model", "revision", "to", false).ok());
  EXPECT_TRUE(store->DeleteRevision("model", "to").ok());
}

TEST_F(SqliteEncodingStoreTest, PuttingOrDeletingRepairsACorruptRow) {
  std::unique_ptr<SqlEncodingStore> store = MustOpen();
  ASSERT_NE(store, nullptr);
  ASSERT_TRUE(store->Put(key_, MakeEncoding(0.5f), {}).ok());
  Execute("UPDATE encodings SET body = x'00'");
  ASSERT_FALSE(store->Get(key_).ok());
  ASSERT_TRUE(store->Put(key_, MakeEncoding(0.25f), {}).ok());
  EXPECT_TRUE(store->Get(key_).ok());
  Execute("UPDATE encodings SET body = x'00'");
  ASSERT_FALSE(store->Get(key_).ok());
  EXPECT_TRUE(store->Delete(key_, {}).ok());
}

TEST_F(SqliteEncodingStoreTest, ReportsAFileThatIsNoDatabase) {
  std::ofstream(path_) << std::string(8192, 'x');
  const absl::Status status = SqliteDatabase::Open(path_).status();
  EXPECT_EQ(core::ErrorReason(status), "STORE_CORRUPT") << status;
}

TEST_F(SqliteEncodingStoreTest, RefusesAnotherProgramsDatabase) {
  Execute("CREATE TABLE theirs (x)");
  const absl::Status status = SqliteDatabase::Open(path_).status();
  EXPECT_EQ(core::ErrorReason(status), "STORE_UNAVAILABLE") << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("another program"));
}

TEST_F(SqliteEncodingStoreTest, RefusesAnotherSchema) {
  ASSERT_NE(MustOpen(), nullptr);
  Execute(absl::StrCat("PRAGMA user_version = ", kSqliteSchemaVersion + 1));
  const absl::Status status = SqliteDatabase::Open(path_).status();
  EXPECT_EQ(core::ErrorReason(status), "STORE_SCHEMA") << status;
}

TEST_F(SqliteEncodingStoreTest, ReportsADirectoryInPlaceOfTheFile) {
  std::filesystem::create_directory(path_);
  const absl::Status status = SqliteDatabase::Open(path_).status();
  EXPECT_EQ(core::ErrorReason(status), "STORE_UNAVAILABLE") << status;
}

TEST_F(SqliteEncodingStoreTest, TwoHandlesOfOneFileSeeEachOther) {
  std::unique_ptr<SqlEncodingStore> one = MustOpen();
  std::unique_ptr<SqlEncodingStore> two = MustOpen();
  ASSERT_NE(one, nullptr);
  ASSERT_NE(two, nullptr);
  absl::StatusOr<StoredEncoding> first = one->Put(key_, MakeEncoding(1), {});
  ASSERT_TRUE(first.ok()) << first.status();
  absl::StatusOr<StoredEncoding> second =
      two->Put(key_, MakeEncoding(2), {first->etag});
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_GT(second->generation, first->generation);
  absl::StatusOr<StoredEncoding> got = one->Get(key_);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->etag, second->etag);
}

// As two processes would: no lock in memory is shared.
TEST_F(SqliteEncodingStoreTest, TwoHandlesLoseNoCompareAndSet) {
  constexpr int kHandles = 2;
  constexpr int kIncrements = 300;
  std::vector<std::unique_ptr<SqlEncodingStore>> stores;
  for (int i = 0; i < kHandles; ++i) stores.push_back(MustOpen());
  ASSERT_TRUE(stores[0]->Put(key_, MakeEncoding(1), {}).ok());
  std::vector<std::thread> threads;
  for (const std::unique_ptr<SqlEncodingStore>& store : stores) {
    threads.emplace_back([this, &store] {
      int done = 0;
      while (done < kIncrements) {
        absl::StatusOr<StoredEncoding> got = store->Get(key_);
        ASSERT_TRUE(got.ok()) << got.status();
        const absl::Status put =
            store
                ->Put(key_, MakeEncoding(got->encoding->scale[0] + 1),
                      {got->etag})
                .status();
        if (put.ok()) {
          ++done;
        } else if (core::ErrorReason(put) != "STORE_UNAVAILABLE") {
          // The other may have kept it waiting for too long. That is no loss.
          ASSERT_EQ(core::ErrorReason(put), "ETAG_MISMATCH") << put;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  absl::StatusOr<StoredEncoding> got = stores[0]->Get(key_);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->encoding->scale[0], 1 + kHandles * kIncrements);
}

// The child's acknowledgements reach the parent through a pipe; then it is
// killed in the middle of its work.
TEST_F(SqliteEncodingStoreTest, AcknowledgedPutsSurviveKill) {
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    close(pipe_fds[0]);
    absl::StatusOr<std::shared_ptr<SqliteDatabase>> database =
        SqliteDatabase::Open(path_);
    if (!database.ok()) _exit(2);
    SqlEncodingStore store(*std::move(database));
    for (int32_t i = 0;; ++i) {
      const EncodingKey key{"model", "revision", absl::StrCat(i)};
      if (!store.Put(key, MakeEncoding(1), {}).ok()) break;
      if (write(pipe_fds[1], &i, sizeof(i)) != sizeof(i)) break;
    }
    _exit(1);
  }
  close(pipe_fds[1]);
  int32_t acknowledged = -1;
  while (acknowledged < 200) {
    ASSERT_EQ(read(pipe_fds[0], &acknowledged, sizeof(acknowledged)),
              static_cast<ssize_t>(sizeof(acknowledged)));
  }
  kill(child, SIGKILL);
  int32_t more;
  while (read(pipe_fds[0], &more, sizeof(more)) > 0) acknowledged = more;
  close(pipe_fds[0]);
  waitpid(child, nullptr, 0);

  std::unique_ptr<SqlEncodingStore> store = MustOpen();
  ASSERT_NE(store, nullptr);
  for (int32_t i = 0; i <= acknowledged; ++i) {
    const absl::Status status =
        store->Get({"model", "revision", absl::StrCat(i)}).status();
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(FileSystemTest, KnowsNetworkFileSystems) {
  EXPECT_EQ(NetworkFileSystemName(0x6969), "NFS");
  EXPECT_EQ(NetworkFileSystemName(0x517b), "SMB");
  // statfs gives the larger ones sign-extended on some machines.
  EXPECT_EQ(NetworkFileSystemName(static_cast<int32_t>(0xfe534d42)), "SMB");
  EXPECT_EQ(NetworkFileSystemName(0xff534d42), "CIFS");
  EXPECT_EQ(NetworkFileSystemName(0xef53), "");      // ext4
  EXPECT_EQ(NetworkFileSystemName(0x01021997), "");  // 9p
  EXPECT_EQ(NetworkFileSystemName(0x65735546), "");  // FUSE
}

}  // namespace
}  // namespace quantd::server::sqlite_encoding_store_test
