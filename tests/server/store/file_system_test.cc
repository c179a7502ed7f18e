#include "server/store/file_system.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/store/sqlite_database.h"
#include "tests/support/temporary_directory.h"

namespace quantd::server {
namespace {

// -1 for what is not there.
int Mode(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 ? static_cast<int>(info.st_mode & 0777)
                                        : -1;
}

// Sets the mask for as long as it lives.
class Umask {
 public:
  explicit Umask(mode_t mask) : before_(umask(mask)) {}
  ~Umask() { umask(before_); }

 private:
  const mode_t before_;
};

TEST(FileSystemTest, TheDefaultStoreIsItsOwnersAlone) {
  const testing::TemporaryDirectory directory;
  const Umask umask(0);
  const std::string path =
      directory.File("home/.local/state/quantd/encodings.db");
  const absl::Status made = MakeDefaultDirectory(path);
  ASSERT_TRUE(made.ok()) << made;
  for (const char* part : {"home", "home/.local", "home/.local/state",
                           "home/.local/state/quantd"}) {
    EXPECT_EQ(Mode(directory.File(part)), 0700) << part;
  }
  // What is there, and was open to all, is taken back; what is above is not
  // quantd's.
  ASSERT_EQ(chmod(directory.File("home").c_str(), 0755), 0);
  ASSERT_EQ(chmod(directory.File("home/.local/state/quantd").c_str(), 0755), 0);
  ASSERT_TRUE(MakeDefaultDirectory(path).ok());
  EXPECT_EQ(Mode(directory.File("home/.local/state/quantd")), 0700);
  EXPECT_EQ(Mode(directory.File("home")), 0755);

  const auto database = SqliteDatabase::Open(path);
  ASSERT_TRUE(database.ok()) << database.status();
  for (const char* end : {"", "-wal", "-shm"}) {
    EXPECT_EQ(Mode(path + end), 0600) << end;
  }
}

TEST(FileSystemTest, AStoreKeepsTheModeThatItHas) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.File("a.db");
  ASSERT_TRUE(CreateStoreFile(path).ok());
  ASSERT_EQ(chmod(path.c_str(), 0640), 0);
  ASSERT_TRUE(SqliteDatabase::Open(path).ok());
  EXPECT_EQ(Mode(path), 0640);
  EXPECT_FALSE(CreateStoreFile(directory.File("none/a.db")).ok());
}

}  // namespace
}  // namespace quantd::server
