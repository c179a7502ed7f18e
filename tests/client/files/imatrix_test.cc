#include "client/files/imatrix.h"

#include <cstdint>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/files/atomic_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/gguf_bytes.h"
#include "tests/support/temporary_directory.h"

namespace quantd::files {
namespace {

using quantd::testing::LittleEndian;

using ::testing::ElementsAre;

class ImatrixTest : public ::testing::Test {
 protected:
  std::string Path() const { return directory_.path() + "/imatrix"; }

  absl::StatusOr<Imatrix> Read(absl::string_view bytes) const {
    std::ofstream(Path(), std::ios::binary) << bytes;
    return ReadImatrix(Path());
  }

  const testing::TemporaryDirectory directory_;
};

// One weight of the older format.
std::string Weight(const std::string& name, int32_t calls,
                   const std::vector<float>& values) {
  std::string bytes =
      absl::StrCat(LittleEndian(static_cast<uint32_t>(name.size())), name,
                   LittleEndian(static_cast<uint32_t>(calls)),
                   LittleEndian(static_cast<uint32_t>(values.size())));
  bytes.append(reinterpret_cast<const char*>(values.data()),
               values.size() * sizeof(float));
  return bytes;
}

TEST_F(ImatrixTest, WhatIsWrittenIsReadBack) {
  Imatrix imatrix;
  imatrix["blk.0.attn_q.weight"] = {3, {1, 2, 9}, {2}};
  imatrix["blk.0.ffn_up_exps.weight"] = {2, {1, 2, 3, 10}, {1, 3}};
  const absl::StatusOr<uint64_t> size =
      WriteImatrix(Path(), IfExists::kRefuse, imatrix);
  ASSERT_TRUE(size.ok()) << size.status();
  const absl::StatusOr<Imatrix> read = ReadImatrix(Path());
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->size(), 2);
  const InputSquares& one = read->at("blk.0.attn_q.weight");
  EXPECT_EQ(one.columns, 3);
  EXPECT_THAT(one.sums, ElementsAre(1, 2, 9));
  EXPECT_THAT(one.counts, ElementsAre(2));
  EXPECT_THAT(one.MeanSquares(), ElementsAre(0.5, 1, 4.5));
  // Over the inputs of both experts.
  EXPECT_THAT(read->at("blk.0.ffn_up_exps.weight").MeanSquares(),
              ElementsAre(1, 3));
  EXPECT_TRUE(absl::IsAlreadyExists(
      WriteImatrix(Path(), IfExists::kRefuse, imatrix).status()));
}

TEST_F(ImatrixTest, WithoutInputsAllColumnsCountTheSame) {
  EXPECT_THAT((InputSquares{2, {0, 0}, {0}}).MeanSquares(), ElementsAre(1, 1));
}

TEST_F(ImatrixTest, ReadsTheOlderFormat) {
  const std::string rest = "what llama.cpp puts behind it";
  const absl::StatusOr<Imatrix> read =
      Read(absl::StrCat(LittleEndian(uint32_t{2}), Weight("a", 4, {8, 2}),
                        Weight("b", 0, {5}), rest));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_THAT(read->at("a").MeanSquares(), ElementsAre(2, 0.5));
  EXPECT_THAT(read->at("b").MeanSquares(), ElementsAre(1));
}

TEST_F(ImatrixTest, RefusesWhatIsNoImportanceMatrix) {
  const std::string two = LittleEndian(uint32_t{2});
  const std::string whole = Weight("a", 4, {8, 2});
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::string& bytes :
       {std::string(), std::string("\1\0"), LittleEndian(uint32_t{0}),
        // Beyond the end, wherever it is cut.
        absl::StrCat(two, whole), absl::StrCat(two, whole.substr(0, 7)),
        absl::StrCat(two, whole.substr(0, whole.size() - 1)),
        // Sizes that no file has.
        absl::StrCat(two, LittleEndian(uint32_t{5000}), std::string(9000, 'a')),
        absl::StrCat(two, LittleEndian(~uint32_t{0}), whole),
        absl::StrCat(LittleEndian(uint32_t{1}), Weight("a", 4, {})),
        // No squares, or no number of calls.
        absl::StrCat(LittleEndian(uint32_t{1}), Weight("a", 4, {-1})),
        absl::StrCat(LittleEndian(uint32_t{1}), Weight("a", 4, {nan})),
        absl::StrCat(LittleEndian(uint32_t{1}), Weight("a", -4, {1})),
        // The same weight twice.
        absl::StrCat(two, whole, whole)}) {
    const absl::Status status = Read(bytes).status();
    EXPECT_TRUE(absl::StartsWith(status.message(), "FILE_MALFORMED")) << status;
  }
}

TEST_F(ImatrixTest, RefusesOtherGgufFiles) {
  Imatrix imatrix;
  imatrix["a"] = {3, {1, 2, 9}, {2}};
  ASSERT_TRUE(WriteImatrix(Path(), IfExists::kRefuse, imatrix).ok());
  std::string bytes;
  {
    std::ifstream file(Path(), std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(file), {});
  }
  for (const char* name : {"a.in_sum2", "a.counts"}) {
    std::string renamed = bytes;
    const size_t at = renamed.find(name);
    ASSERT_NE(at, std::string::npos);
    renamed[at + 2] = 'x';
    const absl::Status status = Read(renamed).status();
    EXPECT_TRUE(absl::StartsWith(status.message(), "FILE_UNSUPPORTED"))
        << status;
  }
  // A sum that is not finite, in the place of 9.
  std::string broken = bytes;
  const size_t nine = broken.find(std::string("\0\0\x10\x41", 4));
  ASSERT_NE(nine, std::string::npos);
  broken.replace(nine, 4, std::string("\0\0\xc0\x7f", 4));
  EXPECT_TRUE(
      absl::StartsWith(Read(broken).status().message(), "FILE_MALFORMED"));
}

}  // namespace
}  // namespace quantd::files
