#include "client/files/gguf_builder.h"

#include <cstdint>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/files/atomic_file.h"
#include "client/files/gguf.h"
#include "client/files/gguf_types.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/gguf_bytes.h"
#include "tests/support/temporary_directory.h"

namespace quantd::files {
namespace {

using quantd::testing::GgufText;
using quantd::testing::LittleEndian;

using ::testing::ElementsAreArray;

GgufEntry Entry(const std::string& name, absl::string_view type,
                const std::vector<int64_t>& shape) {
  return {name, FindGgufType(type), shape};
}

class GgufBuilderTest : public ::testing::Test {
 protected:
  std::string Path() const { return directory_.path() + "/a.gguf"; }

  const testing::TemporaryDirectory directory_;
};

TEST_F(GgufBuilderTest, WhatIsWrittenIsReadBack) {
  const std::string text = absl::StrCat(
      GgufText("general.name"), LittleEndian(uint32_t{8}), GgufText("x"));
  const std::string alignment = GgufUint32Pair("general.alignment", 64);
  const std::vector<GgufEntry> entries = {Entry("a", "q4_0", {2, 64}),
                                          Entry("b", "f16", {3}),
                                          Entry("c", "q8_0", {32})};
  const absl::StatusOr<std::unique_ptr<GgufBuilder>> builder =
      GgufBuilder::Create(Path(), IfExists::kRefuse, {text, alignment}, 64,
                          entries);
  ASSERT_TRUE(builder.ok()) << builder.status();
  const std::vector<std::vector<uint8_t>> data = {std::vector<uint8_t>(72, 1),
                                                  std::vector<uint8_t>(6, 2),
                                                  std::vector<uint8_t>(34, 3)};
  // In any order.
  for (const size_t i : {2U, 0U, 1U}) {
    ASSERT_TRUE((*builder)->Write(i, data[i]).ok());
  }
  const absl::StatusOr<uint64_t> size = (*builder)->Finish();
  ASSERT_TRUE(size.ok()) << size.status();

  const absl::StatusOr<GgufReader> reader = GgufReader::Open(Path());
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->alignment(), 64U);
  ASSERT_EQ(reader->pairs().size(), 2U);
  EXPECT_EQ(reader->pairs()[0].key, "general.name");
  EXPECT_THAT(reader->pairs()[0].bytes,
              ElementsAreArray(text.begin(), text.end()));
  ASSERT_EQ(reader->tensors().size(), 3U);
  for (size_t i = 0; i < 3; ++i) {
    const GgufTensor& tensor = reader->tensors()[i];
    EXPECT_EQ(tensor.name, entries[i].name);
    EXPECT_EQ(tensor.type, entries[i].type);
    EXPECT_THAT(tensor.shape, ElementsAreArray(entries[i].shape));
    EXPECT_THAT(tensor.data, ElementsAreArray(data[i]));
  }
  // ggml also reads what the last tensor is filled up with.
  std::ifstream file(Path(), std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)),
                          std::istreambuf_iterator<char>());
  EXPECT_EQ(bytes.size(), *size);
  EXPECT_EQ(bytes.size() % 64, 0U);
}

TEST_F(GgufBuilderTest, WithoutFinishThereIsNoFile) {
  {
    const auto builder =
        GgufBuilder::Create(Path(), IfExists::kRefuse, {}, kGgufAlignment,
                            {Entry("a", "f32", {1})});
    ASSERT_TRUE(builder.ok()) << builder.status();
    const absl::Status status =
        (*builder)->Write(0, std::vector<uint8_t>{1, 2, 3});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(status.message(), "4 bytes, got 3"));
  }
  EXPECT_FALSE(std::ifstream(Path()).good());
  EXPECT_EQ(
      GgufBuilder::Create(Path(), IfExists::kRefuse, {}, kGgufAlignment,
                          {Entry("a", "f32", {1}), Entry("a", "f32", {1})})
          .status()
          .code(),
      absl::StatusCode::kInvalidArgument);
}

TEST_F(GgufBuilderTest, WhatGgmlCannotReadIsRefused) {
  const auto error = [](const GgufEntry& entry) {
    const absl::Status status = CheckGgufEntry("x.gguf", entry);
    EXPECT_EQ(status.ok() || absl::IsUnimplemented(status), true) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(error(Entry(std::string(63, 'n'), "q4_0", {1, 2, 3, 32})), "");
  EXPECT_EQ(error(Entry("n", "f32", {})), "");
  EXPECT_TRUE(absl::StrContains(error(Entry(std::string(64, 'n'), "f32", {1})),
                                "at most 63 bytes"));
  EXPECT_TRUE(absl::StrContains(error(Entry("n", "f32", {1, 1, 1, 1, 1})),
                                "at most 4 dimensions"));
  EXPECT_TRUE(
      absl::StrContains(error(Entry("n", "f32", {2, 0})), "without elements"));
  EXPECT_TRUE(
      absl::StrContains(error(Entry("n", "q4_0", {32, 33})), "blocks of 32"));
  EXPECT_TRUE(absl::StrContains(error(Entry("n", "q4_0", {})), "blocks of 32"));
}

}  // namespace
}  // namespace quantd::files
