#include "client/jobs/output.h"

#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"

namespace quantd::jobs {
namespace {

using ::testing::HasSubstr;

class OutputTest : public ::testing::Test {
 protected:
  OutputTest() {
    input_ = directory_.Write("in.safetensors", "x");
    folder_ = directory_.File("folder");
    EXPECT_EQ(mkdir(folder_.c_str(), 0700), 0);
  }

  std::string File(const std::string& path, bool force = false) {
    const OutputOptions output{path, force};
    return output.CheckFile({input_}, ".safetensors").ToString();
  }
  std::string Folder(const std::string& path) {
    const OutputOptions output{path, false};
    return output.CheckFolder({input_}).ToString();
  }

  const testing::TemporaryDirectory directory_;
  std::string input_;
  std::string folder_;
};

TEST_F(OutputTest, AFileIsNeverTheInput) {
  EXPECT_THAT(File(input_, true), HasSubstr("other than the input"));
  const std::string link = directory_.File("link.safetensors");
  ASSERT_EQ(symlink(input_.c_str(), link.c_str()), 0);
  EXPECT_THAT(File(link, true), HasSubstr("other than the input"));
  const std::string hard = directory_.File("hard.safetensors");
  ASSERT_EQ(::link(input_.c_str(), hard.c_str()), 0);
  EXPECT_THAT(File(hard, true), HasSubstr("other than the input"));
  EXPECT_TRUE(IsSameFile(input_, link));
  EXPECT_FALSE(IsSameFile(input_, folder_));
  EXPECT_FALSE(IsSameFile(input_, directory_.File("none")));
}

TEST_F(OutputTest, AFileThatIsThereIsReplacedOnlyWhenForced) {
  const std::string there = directory_.Write("out.safetensors", "y");
  EXPECT_THAT(File(there), HasSubstr("FILE_EXISTS"));
  EXPECT_EQ(File(there, true), "OK");
  EXPECT_EQ(File(directory_.File("new.safetensors")), "OK");
}

TEST_F(OutputTest, AFileIsNoFolderAndOfNoOtherFormat) {
  EXPECT_THAT(File(folder_), HasSubstr("folder/FILE.safetensors"));
  EXPECT_THAT(File(directory_.File("x/")), HasSubstr("got a folder"));
  EXPECT_THAT(File(directory_.File("x.ONNX")),
              HasSubstr("ends with .safetensors"));
  EXPECT_EQ(File(directory_.File("x.int8")), "OK");
}

TEST_F(OutputTest, AFolderIsNotThatOfTheInput) {
  EXPECT_THAT(Folder(directory_.path()),
              HasSubstr("other than that of the input"));
  EXPECT_EQ(Folder(folder_), "OK");
  EXPECT_EQ(Folder(directory_.File("new")), "OK");
  EXPECT_THAT(Folder(directory_.File("new.safetensors")),
              HasSubstr("that of a file"));
  EXPECT_THAT(Folder(directory_.Write("file", "")),
              HasSubstr("FILE_UNWRITABLE"));
  EXPECT_THAT(Folder("-"), HasSubstr("name of a folder"));
}

}  // namespace
}  // namespace quantd::jobs
