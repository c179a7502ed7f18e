#include "server/guard/text_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"

namespace quantd::server {
namespace {

class TextFileTest : public ::testing::Test {
 protected:
  const testing::TemporaryDirectory folder_;
  const std::string path_ = absl::StrCat(folder_.path(), "/file");
};

TEST_F(TextFileTest, ReadsAFileWhole) {
  const std::string text(10000, 'x');
  std::ofstream(path_) << text;
  EXPECT_EQ(ReadTextFile(path_), text);
}

TEST_F(TextFileTest, ReadsAnEmptyFile) {
  std::ofstream file(path_);
  EXPECT_EQ(ReadTextFile(path_), "");
}

TEST_F(TextFileTest, FollowsALink) {
  std::ofstream(absl::StrCat(path_, ".1")) << "text";
  ASSERT_EQ(symlink("file.1", path_.c_str()), 0);
  EXPECT_EQ(ReadTextFile(path_), "text");
}

TEST_F(TextFileTest, HasNoneOfWhatIsNoFile) {
  EXPECT_EQ(ReadTextFile(path_), absl::nullopt);
  EXPECT_EQ(ReadTextFile(folder_.path()), absl::nullopt);
  EXPECT_EQ(ReadTextFile("/dev/zero"), absl::nullopt);
}

TEST_F(TextFileTest, DoesNotWaitForTheWriterOfAFifo) {
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_EQ(ReadTextFile(path_), absl::nullopt);
}

TEST_F(TextFileTest, HasNoneOfAFileThatIsTooLarge) {
  std::ofstream file(path_);
  file.close();
  ASSERT_EQ(truncate(path_.c_str(), kMaxTextFileBytes), 0);
  EXPECT_TRUE(ReadTextFile(path_).has_value());
  ASSERT_EQ(truncate(path_.c_str(), kMaxTextFileBytes + 1), 0);
  EXPECT_EQ(ReadTextFile(path_), absl::nullopt);
}

}  // namespace
}  // namespace quantd::server
