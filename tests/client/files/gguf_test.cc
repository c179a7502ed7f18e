#include "client/files/gguf.h"

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/files/dtype.h"
#include "client/files/gguf_types.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/gguf_bytes.h"
#include "tests/support/temporary_directory.h"

namespace quantd::files::gguf_test {
namespace {

using quantd::testing::GgufText;
using quantd::testing::LittleEndian;

using ::testing::ElementsAre;

constexpr uint32_t kQ4_0 = 2;
constexpr uint32_t kQ8_0 = 8;

std::string Header(uint32_t version, uint64_t tensors, uint64_t pairs) {
  return absl::StrCat("GGUF", LittleEndian(version), LittleEndian(tensors),
                      LittleEndian(pairs));
}

// Extents as the file has them: the innermost first.
std::string Info(const std::string& name, const std::vector<uint64_t>& extents,
                 uint32_t type, uint64_t offset) {
  std::string info = absl::StrCat(
      GgufText(name), LittleEndian(static_cast<uint32_t>(extents.size())));
  for (const uint64_t extent : extents) info += LittleEndian(extent);
  return absl::StrCat(info, LittleEndian(type), LittleEndian(offset));
}

std::string Padded(std::string bytes, size_t alignment = 32) {
  bytes.resize((bytes.size() + alignment - 1) / alignment * alignment);
  return bytes;
}

class GgufTest : public ::testing::Test {
 protected:
  absl::StatusOr<GgufReader> Open(const std::string& bytes) {
    const std::string path = directory_.path() + "/a.gguf";
    std::ofstream(path, std::ios::binary) << bytes;
    return GgufReader::Open(path);
  }

  absl::Status Error(const std::string& bytes) { return Open(bytes).status(); }

  const testing::TemporaryDirectory directory_;
};

TEST_F(GgufTest, ReadsPlainTensorsInRowMajorOrder) {
  for (const uint32_t version : {2U, 3U}) {
    const absl::StatusOr<GgufReader> reader =
        Open(Padded(absl::StrCat(
                 Header(version, 2, 3), GgufText("general.name"),
                 LittleEndian(uint32_t{8}), GgufText("x"), GgufText("k"),
                 LittleEndian(uint32_t{9}), LittleEndian(uint32_t{8}),
                 LittleEndian(uint64_t{2}), GgufText(""), GgufText("tok"),
                 GgufText("n"), LittleEndian(uint32_t{12}),
                 LittleEndian(uint64_t{7}), Info("a", {3, 2}, 0, 0),
                 Info("b", {2}, 30, 32))) +
             Padded(std::string(24, '\1')) + std::string(4, '\2'));
    ASSERT_TRUE(reader.ok()) << reader.status();
    ASSERT_EQ(reader->tensors().size(), 2U);
    const GgufTensor& a = reader->tensors()[0];
    EXPECT_EQ(a.name, "a");
    EXPECT_EQ(a.type->dtype, Dtype::kF32);
    EXPECT_THAT(a.shape, ElementsAre(2, 3));
    EXPECT_EQ(a.data.size(), 24U);
    const GgufTensor& b = reader->tensors()[1];
    EXPECT_EQ(b.type->dtype, Dtype::kBF16);
    EXPECT_THAT(b.data, ElementsAre(2, 2, 2, 2));
  }
}

TEST_F(GgufTest, DequantizesBlocksExactly) {
  // d = -0.5 and the smallest of all float16; nibbles and bytes that count up.
  std::string q4 = LittleEndian(uint16_t{0xB800});
  std::string q8 = LittleEndian(uint16_t{0x0001});
  for (int i = 0; i < 16; ++i) q4 += static_cast<char>(i | (15 - i) << 4);
  for (int i = 0; i < 32; ++i) q8 += static_cast<char>(i * 8 - 128);
  const absl::StatusOr<GgufReader> reader = Open(
      Padded(absl::StrCat(Header(3, 2, 1), GgufText("general.alignment"),
                          LittleEndian(uint32_t{4}), LittleEndian(uint32_t{64}),
                          Info("q4", {32, 1}, kQ4_0, 0),
                          Info("q8", {32}, kQ8_0, 64)),
             64) +
      Padded(q4, 64) + q8);
  ASSERT_TRUE(reader.ok()) << reader.status();
  const std::vector<float> elements = DequantizeGguf(reader->tensors()[0]);
  ASSERT_EQ(elements.size(), 32U);
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(elements[static_cast<size_t>(i)],
              -0.5F * static_cast<float>(i - 8));
    EXPECT_EQ(elements[static_cast<size_t>(i) + 16],
              -0.5F * static_cast<float>(7 - i));
  }
  const std::vector<float> small = DequantizeGguf(reader->tensors()[1]);
  ASSERT_EQ(small.size(), 32U);
  for (int i = 0; i < 32; ++i) {
    EXPECT_EQ(small[static_cast<size_t>(i)],
              static_cast<float>(i * 8 - 128) * 0x1p-24F);
  }
}

TEST_F(GgufTest, KeepsTheNamesOfTensorsOfUnknownTypes) {
  const absl::StatusOr<GgufReader> reader =
      Open(Padded(absl::StrCat(Header(3, 1, 0), Info("k", {256}, 31, 0))));
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->tensors()[0].type, nullptr);
  EXPECT_EQ(reader->tensors()[0].type_number, 31U);
  EXPECT_TRUE(reader->tensors()[0].data.empty());
}

TEST_F(GgufTest, RefusesPartsOfBlocksOfEveryType) {
  for (const GgufType& type : GgufTypes()) {
    const auto file = [&](uint64_t inner, int64_t bytes) {
      return Padded(absl::StrCat(Header(3, 1, 0),
                                 Info("a", {inner, 2}, type.number, 0))) +
             std::string(static_cast<size_t>(bytes), 'x');
    };
    const uint64_t elements = static_cast<uint64_t>(type.block_elements);
    EXPECT_TRUE(Open(file(elements, 2 * type.block_bytes)).ok()) << type.name;
    EXPECT_TRUE(absl::StrContains(
        Error(file(elements, 2 * type.block_bytes - 1)).message(),
        "behind the file"))
        << type.name;
    if (type.IsPlain()) continue;
    EXPECT_TRUE(
        absl::StrContains(Error(file(elements / 2, type.block_bytes)).message(),
                          absl::StrCat("blocks of ", elements)))
        << type.name;
  }
}

TEST_F(GgufTest, RefusesWhatIsNoSoundFile) {
  const auto expect = [this](const std::string& bytes, const char* what) {
    const absl::Status status = Error(bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
  };
  expect("", "begins with GGUF");
  expect("GGUX", "begins with GGUF");
  const std::string sound =
      Padded(absl::StrCat(Header(3, 1, 1), GgufText("k"),
                          LittleEndian(uint32_t{4}), LittleEndian(uint32_t{1}),
                          Info("a", {32}, kQ8_0, 0))) +
      std::string(34, 'x');
  ASSERT_TRUE(Open(sound).ok());
  for (size_t size = 4; size < sound.size(); ++size) {
    const absl::Status status = Error(sound.substr(0, size));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << size;
  }
  const auto one = [](const std::string& info) {
    return Padded(absl::StrCat(Header(3, 1, 0), info)) + std::string(64, 'x');
  };
  expect(one(Info("a", {33}, kQ8_0, 0)), "blocks of 32");
  expect(one(Info("a", {}, kQ4_0, 0)), "blocks of 32");
  expect(one(Info("a", {1, 1, 1, 1, 1}, 0, 0)), "at most 4 dimensions");
  expect(one(Info("a", {1}, 0, 4)), "multiple of 32");
  expect(one(Info("a", {17}, 0, 0)), "behind the file");
  expect(one(Info("a", {1}, 0, uint64_t{1} << 63)), "behind the file");
  expect(one(Info("a", {uint64_t{1} << 59}, 28, 0)), "behind the file");
  // Without elements, and yet too large.
  expect(one(Info("a", {uint64_t{1} << 62, 0}, 0, 0)), "63 bits");
  expect(one(Info("a", {uint64_t{1} << 62, 0}, kQ8_0, 0)), "63 bits");
  expect(one(Info("a", {uint64_t{1} << 63}, 0, 0)), "63 bits");
  expect(one(Info("a", {uint64_t{1} << 62, 2}, kQ4_0, 0)), "63 bits");
  expect(one(Info("a", {uint64_t{1} << 60}, kQ8_0, 0)), "behind the file");
  expect(absl::StrCat(Header(3, 2, 0), Info("a", {1}, 0, 0),
                      Info("a", {1}, 0, 32)),
         "occurs twice");
  expect(Header(3, ~uint64_t{0}, 0), "ends within");
  expect(
      absl::StrCat(Header(3, 0, 1), GgufText("k"), LittleEndian(uint32_t{9}),
                   LittleEndian(uint32_t{10}), LittleEndian(uint64_t{1} << 61)),
      "ends within");
  expect(absl::StrCat(Header(3, 0, 1), GgufText("k"), LittleEndian(uint32_t{9}),
                      LittleEndian(uint32_t{9}), LittleEndian(uint64_t{1})),
         "no array of arrays");
}

TEST_F(GgufTest, TakesPowersOfTwoAsAlignment) {
  const auto file = [](const std::vector<uint32_t>& alignments) {
    std::string header = Header(3, 0, alignments.size());
    for (const uint32_t alignment : alignments) {
      absl::StrAppend(&header, GgufText("general.alignment"),
                      LittleEndian(uint32_t{4}), LittleEndian(alignment));
    }
    return header;
  };
  for (const uint32_t alignment : {8U, 64U, 4096U, 1U << 20}) {
    const absl::StatusOr<GgufReader> reader = Open(file({alignment}));
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(reader->alignment(), alignment);
  }
  for (const uint32_t alignment :
       {0U, 1U, 4U, 24U, 48U, 1U << 21, 1U << 31, UINT32_MAX}) {
    const absl::Status status = Error(file({alignment}));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << alignment;
    EXPECT_TRUE(absl::StrContains(status.message(), "from 8 to 1048576"))
        << status;
  }
  const absl::Status twice = Error(file({64, 64}));
  EXPECT_TRUE(absl::StrContains(twice.message(), "occurs twice")) << twice;
}

TEST_F(GgufTest, RefusesTensorsThatOverlap) {
  // "a" has 48 bytes, "b" comes at an offset; in no order.
  const auto file = [](uint64_t offset) {
    return Padded(absl::StrCat(Header(3, 4, 0), Info("b", {4}, 0, offset),
                               Info("empty", {0}, 0, 0), Info("a", {12}, 0, 0),
                               Info("unknown", {9}, 31, 0))) +
           std::string(128, 'x');
  };
  EXPECT_TRUE(Open(file(64)).ok());
  for (const uint64_t offset : {0, 32}) {
    const absl::Status status = Error(file(offset));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << offset;
    EXPECT_TRUE(absl::StrContains(status.message(), "overlap")) << status;
  }
}

TEST_F(GgufTest, RefusesOtherVersionsAndBigEndianFiles) {
  EXPECT_EQ(Error(Header(1, 0, 0)).code(), absl::StatusCode::kUnimplemented);
  const absl::Status status = Error("GGUF" + std::string("\0\0\0\3", 4));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_TRUE(absl::StrContains(status.message(), "big-endian")) << status;
}

}  // namespace
}  // namespace quantd::files::gguf_test
