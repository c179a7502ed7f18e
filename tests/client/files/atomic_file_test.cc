#include "client/files/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"

namespace quantd::files {
namespace {

class AtomicFileTest : public ::testing::Test {
 protected:
  std::string Read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

  const testing::TemporaryDirectory directory_;
  const std::string path_ = directory_.File("file");
};

TEST_F(AtomicFileTest, IsThereWithCommitAndNotBefore) {
  {
    absl::StatusOr<AtomicFile> file =
        AtomicFile::Create(path_, IfExists::kRefuse);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE(file->Append("abc").ok());
    EXPECT_FALSE(std::filesystem::exists(path_));
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
  absl::StatusOr<AtomicFile> file =
      AtomicFile::Create(path_, IfExists::kRefuse);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(file->Append("abc").ok());
  ASSERT_TRUE(file->Commit().ok());
  EXPECT_EQ(Read(path_), "abc");
}

TEST_F(AtomicFileTest, ReplacesWhenAskedAlone) {
  directory_.Write("file", "old");
  const absl::Status refused =
      AtomicFile::Create(path_, IfExists::kRefuse).status();
  EXPECT_TRUE(absl::IsAlreadyExists(refused)) << refused;
  EXPECT_TRUE(absl::StartsWith(refused.message(), "FILE_EXISTS: "));
  absl::StatusOr<AtomicFile> file =
      AtomicFile::Create(path_, IfExists::kReplace);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(file->Append("new").ok());
  EXPECT_EQ(Read(path_), "old");
  ASSERT_TRUE(file->Commit().ok());
  EXPECT_EQ(Read(path_), "new");
  EXPECT_EQ(
      std::distance(std::filesystem::directory_iterator(directory_.path()),
                    std::filesystem::directory_iterator()),
      1);
}

TEST_F(AtomicFileTest, KeepsAFileThatCameMeanwhile) {
  absl::StatusOr<AtomicFile> file =
      AtomicFile::Create(path_, IfExists::kRefuse);
  ASSERT_TRUE(file.ok()) << file.status();
  directory_.Write("file", "theirs");
  ASSERT_TRUE(file->Append("ours").ok());
  EXPECT_TRUE(absl::IsAlreadyExists(file->Commit()));
  EXPECT_EQ(Read(path_), "theirs");
}

TEST_F(AtomicFileTest, RefusesANameThatLeadsNowhere) {
  ASSERT_EQ(symlink("absent", path_.c_str()), 0);
  EXPECT_TRUE(absl::IsAlreadyExists(
      AtomicFile::Create(path_, IfExists::kRefuse).status()));
}

TEST_F(AtomicFileTest, RefusesFolders) {
  for (const IfExists if_exists : {IfExists::kRefuse, IfExists::kReplace}) {
    const absl::Status status =
        AtomicFile::Create(directory_.path(), if_exists).status();
    EXPECT_TRUE(absl::StartsWith(status.message(), "FILE_UNWRITABLE: "))
        << status;
  }
}

TEST_F(AtomicFileTest, RefusesAFolderThatIsNotThere) {
  const absl::Status status =
      CheckWritable(directory_.File("absent/file"), IfExists::kReplace);
  EXPECT_TRUE(absl::StartsWith(status.message(), "FILE_UNWRITABLE: "))
      << status;
}

TEST_F(AtomicFileTest, WritesIntoDevicesAndPipes) {
  // A link, so that no mistake takes the machine's own away.
  const std::string null = directory_.File("null");
  ASSERT_EQ(symlink("/dev/null", null.c_str()), 0);
  for (const IfExists if_exists : {IfExists::kRefuse, IfExists::kReplace}) {
    absl::StatusOr<AtomicFile> file = AtomicFile::Create(null, if_exists);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_TRUE(file->Append("abc").ok());
    EXPECT_TRUE(file->Commit().ok());
    EXPECT_TRUE(std::filesystem::is_symlink(null));
  }
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  const int reader = open(path_.c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  absl::StatusOr<AtomicFile> file =
      AtomicFile::Create(path_, IfExists::kRefuse);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(file->Append("abc").ok());
  char bytes[4] = {};
  EXPECT_EQ(read(reader, bytes, sizeof(bytes)), 3);
  EXPECT_EQ(std::string(bytes), "abc");
  EXPECT_TRUE(file->Commit().ok());
  EXPECT_TRUE(std::filesystem::is_fifo(path_));
  close(reader);
}

}  // namespace
}  // namespace quantd::files
