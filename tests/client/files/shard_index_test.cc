#include "client/files/shard_index.h"

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"

namespace quantd::files {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

class ShardIndexTest : public ::testing::Test {
 protected:
  // What a folder with that index has to say.
  absl::StatusOr<ShardIndex> Read(const std::string& json) {
    directory_.Write(kShardIndexName, json);
    return ReadShardIndex(directory_.path());
  }
  std::string Error(const std::string& json) {
    return std::string(Read(json).status().message());
  }

  const testing::TemporaryDirectory directory_;
};

TEST_F(ShardIndexTest, AFolderWithoutOneHasOneFile) {
  directory_.Write(kSingleShardName, "");
  const auto index = ReadShardIndex(directory_.path());
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_THAT(index->shards, ElementsAre(kSingleShardName));
  EXPECT_THAT(index->weight_map, IsEmpty());
}

TEST_F(ShardIndexTest, OfShardsWithoutOneNobodyKnowsWhetherTheyAreAll) {
  directory_.Write("model-00001-of-00002.safetensors", "");
  EXPECT_THAT(std::string(ReadShardIndex(directory_.path()).status().message()),
              HasSubstr("got 1 other files of tensors"));
  directory_.Write(kSingleShardName, "");
  EXPECT_TRUE(ReadShardIndex(directory_.path()).ok());
}

TEST_F(ShardIndexTest, ItsMetadataMayHaveNumbersOfPython) {
  EXPECT_TRUE(Read(R"({"metadata": {"total_size": NaN},
                       "weight_map": {"a": "z.safetensors"}})")
                  .ok());
}

TEST_F(ShardIndexTest, NamesEachFileOnce) {
  const auto index = Read(
      R"({"metadata": {"total_size": 1}, "weight_map": {
          "a": "z.safetensors", "b": "y.safetensors", "c": "z.safetensors"}})");
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_THAT(index->shards, ElementsAre("y.safetensors", "z.safetensors"));
  EXPECT_THAT(index->weight_map, ElementsAre(Pair("a", "z.safetensors"),
                                             Pair("b", "y.safetensors"),
                                             Pair("c", "z.safetensors")));
}

TEST_F(ShardIndexTest, ReadsBackWhatItWrote) {
  const std::map<std::string, std::string> weight_map = {
      {"a", "1.safetensors"}, {"caf\xc3\xa9", "2.safetensors"}};
  ASSERT_TRUE(WriteShardIndex(directory_.path(), IfExists::kRefuse, weight_map,
                              uint64_t{1} << 60, uint64_t{1} << 63)
                  .ok());
  const auto index = ReadShardIndex(directory_.path());
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->weight_map, weight_map);
  EXPECT_EQ(index->total_parameters, uint64_t{1} << 63);
  EXPECT_THAT(index->other_fields, ElementsAre());
  const absl::Status again = WriteShardIndex(
      directory_.path(), IfExists::kRefuse, weight_map, 1, std::nullopt);
  EXPECT_THAT(std::string(again.message()), HasSubstr("FILE_EXISTS"));
}

TEST_F(ShardIndexTest, NamesTheFieldsThatItDoesNotKnow) {
  const auto index = Read(
      R"({"b": {}, "metadata": {"total_size": 1, "total_parameters": 2.5,
          "by": NaN}, "a": 1, "weight_map": {"a": "z.safetensors"}})");
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->total_parameters, std::nullopt);
  EXPECT_THAT(index->other_fields, ElementsAre("a", "b", "metadata.by",
                                               "metadata.total_parameters"));
}

TEST_F(ShardIndexTest, NoNameLeadsOutOfTheFolder) {
  for (const char* name :
       {"../x.safetensors", "/x.safetensors", "a/x.safetensors",
        ".x.safetensors", "x.bin", "", "x.safetensors\\u0000.safetensors"}) {
    EXPECT_THAT(
        Error(std::string(R"({"weight_map": {"a": ")") + name + R"("}})"),
        HasSubstr("weight_map[\"a\"]: expected the name"))
        << name;
  }
  EXPECT_THAT(Error(R"({"weight_map": {"a": 1}})"), HasSubstr("expected"));
}

TEST_F(ShardIndexTest, SaysWhatIsMissing) {
  EXPECT_THAT(Error("[]"), HasSubstr("FILE_MALFORMED"));
  EXPECT_THAT(Error("{"), HasSubstr("a JSON object"));
  EXPECT_THAT(Error("{}"), HasSubstr("a weight_map of tensors"));
  EXPECT_THAT(Error(R"({"weight_map": {}})"), HasSubstr("a weight_map"));
}

TEST(PathInTest, PutsOneSlash) {
  EXPECT_EQ(PathIn("a", "b"), "a/b");
  EXPECT_EQ(PathIn("a/", "b"), "a/b");
  EXPECT_EQ(PathIn("/", "b"), "/b");
}

}  // namespace
}  // namespace quantd::files
