#include "client/files/mapped_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"

namespace quantd::files {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

std::string Text(const MappedFile& file) {
  return std::string(file.bytes().begin(), file.bytes().end());
}

TEST(MappedFileTest, HasTheBytesOfTheFile) {
  const testing::TemporaryDirectory directory;
  auto file = MappedFile::Open(directory.Write("a", "some bytes"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(Text(*file), "some bytes");
  const auto empty = MappedFile::Open(directory.Write("b", ""));
  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_TRUE(empty->bytes().empty());
}

TEST(MappedFileTest, MovesItsBytes) {
  const testing::TemporaryDirectory directory;
  auto file = MappedFile::Open(directory.Write("a", "first"));
  auto other = MappedFile::Open(directory.Write("b", "second"));
  ASSERT_TRUE(file.ok() && other.ok());
  MappedFile moved = *std::move(file);
  EXPECT_EQ(Text(moved), "first");
  EXPECT_TRUE(file->bytes().empty());
  moved = *std::move(other);
  EXPECT_EQ(Text(moved), "second");
}

TEST(MappedFileTest, RefusesWhatIsNoFile) {
  const testing::TemporaryDirectory directory;
  EXPECT_THAT(MappedFile::Open(directory.File("none")).status().ToString(),
              AllOf(HasSubstr("NOT_FOUND"), HasSubstr("FILE_UNREADABLE: ")));
  EXPECT_THAT(MappedFile::Open(directory.path()).status().ToString(),
              HasSubstr("FILE_UNSUPPORTED"));
  // And waits for no writer.
  const std::string pipe = directory.File("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(MappedFile::Open(pipe).status().ToString(),
              HasSubstr("expected a regular file"));
}

// Half of the threads find the change, the others read behind the end. Does not
// return.
void ReadWhatIsCut(const std::string& path) {
  ExplainCutFiles("test", 7);
  const auto file = MappedFile::Open(path);
  std::filesystem::resize_file(path, 0);
  std::atomic<bool> go = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&file, &go, i] {
      while (!go) std::this_thread::yield();
      if (i % 2 == 0) EndOverChangedFile(CheckMappedFiles());
      volatile uint8_t byte = file->bytes()[0];
      static_cast<void>(byte);
    });
  }
  go = true;
  for (std::thread& thread : threads) thread.join();
}

TEST(MappedFileDeathTest, AChangeEndsTheProcessWithOneLine) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.Write("a", "some bytes");
  EXPECT_EXIT(ReadWhatIsCut(path), ::testing::ExitedWithCode(7),
              MatchesRegex("test: FILE_CHANGED: [^\n]+\n"));
}

// Reads the second tensor of a file without it. Does not return.
void ReadTensorThatIsCut(const std::string& path, bool checks) {
  ExplainCutFiles("test", 7);
  auto file = MappedFile::Open(path);
  const size_t page = static_cast<size_t>(getpagesize());
  file->SetTensors({{"second", file->bytes().subspan(page)},
                    {"first", file->bytes().subspan(0, page)},
                    {"elsewhere", {}}});
  std::filesystem::resize_file(path, page);
  if (checks) EndOverChangedFile(CheckMappedFiles());
  volatile uint8_t byte = file->bytes()[page + 1];
  static_cast<void>(byte);
}

TEST(MappedFileDeathTest, AChangeNamesTheTensorThatIsCut) {
  const testing::TemporaryDirectory directory;
  for (const bool checks : {false, true}) {
    const std::string path = directory.Write(
        "a", std::string(2 * static_cast<size_t>(getpagesize()), 'x'));
    EXPECT_EXIT(ReadTensorThatIsCut(path, checks), ::testing::ExitedWithCode(7),
                MatchesRegex("test: FILE_CHANGED: [^\n]+: tensor \"second\": "
                             "the file was [^\n]+\n"));
  }
}

}  // namespace
}  // namespace quantd::files
