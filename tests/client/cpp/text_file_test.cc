#include "client/cpp/text_file.h"

#include <sys/stat.h>

#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/errors.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"

namespace quantd::internal {
namespace {

TEST(TextFileTest, ReadsUpToItsLimit) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.path() + "/text";
  std::ofstream(path) << "12345";
  EXPECT_EQ(ReadTextFile(path, 5).value_or(""), "12345");
  EXPECT_EQ(ReadTextFile(path).value_or(""), "12345");
  const absl::Status status = ReadTextFile(path, 4).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(status.message(), "FILE_UNSUPPORTED: " + path +
                                  ": expected at most 4 bytes, got more");
}

// A pipe without a writer would be waited for, and a device has no end.
TEST(TextFileTest, RefusesWhatIsNoRegularFile) {
  const testing::TemporaryDirectory directory;
  const std::string fifo = directory.path() + "/fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string& path :
       {std::string("/dev/zero"), fifo, directory.path()}) {
    EXPECT_EQ(ReadTextFile(path).status().message(),
              "FILE_UNSUPPORTED: " + path +
                  ": expected a regular file, got a folder, a pipe or a "
                  "device");
  }
}

TEST(TextFileTest, SaysWhatIsNotThere) {
  const absl::Status status = ReadTextFile("/nowhere/text").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ErrorReason(status), "FILE_UNREADABLE");
}

}  // namespace
}  // namespace quantd::internal
