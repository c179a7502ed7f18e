#include "client/files/safetensors.h"

#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/files/atomic_file.h"
#include "gtest/gtest.h"
#include "tests/support/paths.h"
#include "tests/support/temporary_directory.h"

namespace quantd::files::safetensors_test {
namespace {

class SafetensorsTest : public ::testing::Test {
 protected:
  const testing::TemporaryDirectory directory_;
};

std::string Length(uint64_t length) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(length >> (8 * i));
  return bytes;
}

std::string File(const std::string& header, size_t data_bytes) {
  return absl::StrCat(Length(header.size()), header,
                      std::string(data_bytes, 'd'));
}

std::vector<uint8_t> Bytes(size_t count) {
  std::vector<uint8_t> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(i * 7);
  return bytes;
}

std::vector<uint8_t> ToVector(absl::Span<const uint8_t> bytes) {
  return std::vector<uint8_t>(bytes.begin(), bytes.end());
}

TEST_F(SafetensorsTest, ReadsBackWhatItWrote) {
  const std::string path = directory_.File("round.safetensors");
  const std::vector<uint8_t> a = Bytes(3);
  const std::vector<uint8_t> b = Bytes(24);
  const std::vector<uint8_t> c = Bytes(8);
  {
    absl::StatusOr<SafetensorsWriter> writer =
        SafetensorsWriter::Create(path, IfExists::kReplace);
    ASSERT_TRUE(writer.ok()) << writer.status();
    EXPECT_TRUE(writer->Add("a", Dtype::kI8, {3}, a).ok());
    EXPECT_TRUE(writer->AddView("b\n\"€", Dtype::kF32, {2, 3}, b).ok());
    EXPECT_TRUE(writer->Add("c", Dtype::kF64, {}, c).ok());
    EXPECT_TRUE(writer->Add("empty", Dtype::kU16, {0, 5}, {}).ok());
    writer->SetMetadata("k", "v");
    const absl::StatusOr<uint64_t> size = writer->Finish();
    ASSERT_TRUE(size.ok()) << size.status();
    EXPECT_EQ(*size, std::filesystem::file_size(path));
  }
  const absl::StatusOr<SafetensorsReader> reader =
      SafetensorsReader::Open(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_EQ(reader->tensors().size(), 4u);
  EXPECT_EQ(reader->metadata().at("k"), "v");
  EXPECT_EQ(ToVector(reader->Find("a")->data), a);
  EXPECT_EQ(ToVector(reader->Find("b\n\"€")->data), b);
  EXPECT_EQ(reader->Find("b\n\"€")->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(reader->Find("b\n\"€")->dtype, Dtype::kF32);
  EXPECT_EQ(ToVector(reader->Find("c")->data), c);
  EXPECT_TRUE(reader->Find("c")->shape.empty());
  EXPECT_EQ(reader->Find("empty")->shape, (std::vector<int64_t>{0, 5}));
  EXPECT_EQ(reader->Find("d"), nullptr);
  for (const FileTensor& tensor : reader->tensors()) {
    if (tensor.data.empty()) continue;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data.data()) %
                  static_cast<uintptr_t>(DtypeSizeBytes(tensor.dtype)),
              0u)
        << tensor.name << " is not aligned to its elements";
  }
}

TEST_F(SafetensorsTest, ReadsFilesThatOthersWrote) {
  const absl::StatusOr<SafetensorsReader> reader = SafetensorsReader::Open(
      absl::StrCat(TestDataFolder(), "/digits-cnn/model.safetensors"));
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_NE(reader->Find("conv1.weight"), nullptr);
  EXPECT_EQ(reader->Find("conv1.weight")->shape,
            (std::vector<int64_t>{32, 1, 3, 3}));
}

TEST_F(SafetensorsTest, LeavesNothingBehindWithoutFinish) {
  const std::string folder = directory_.File("abandoned");
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  const std::string path = folder + "/x.safetensors";
  {
    absl::StatusOr<SafetensorsWriter> writer =
        SafetensorsWriter::Create(path, IfExists::kReplace);
    ASSERT_TRUE(writer.ok());
    EXPECT_TRUE(writer->Add("a", Dtype::kU8, {3}, Bytes(3)).ok());
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

TEST_F(SafetensorsTest, KeepsTheOldFileWhenFinishFails) {
  const std::string path = directory_.File("folder.safetensors");
  absl::StatusOr<SafetensorsWriter> writer =
      SafetensorsWriter::Create(path, IfExists::kReplace);
  ASSERT_TRUE(writer.ok());
  ASSERT_EQ(mkdir(path.c_str(), 0700), 0);
  const absl::Status status = writer->Finish().status();
  EXPECT_TRUE(absl::StrContains(status.message(), "FILE_UNWRITABLE")) << status;
  EXPECT_TRUE(std::filesystem::is_directory(path));
}

TEST_F(SafetensorsTest, WriterRefusesWhatTheFormatForbids) {
  absl::StatusOr<SafetensorsWriter> writer = SafetensorsWriter::Create(
      directory_.File("forbidden.safetensors"), IfExists::kRefuse);
  ASSERT_TRUE(writer.ok());
  EXPECT_TRUE(writer->Add("a", Dtype::kU8, {3}, Bytes(3)).ok());
  EXPECT_FALSE(writer->Add("a", Dtype::kU8, {3}, Bytes(3)).ok());
  EXPECT_FALSE(writer->Add("__metadata__", Dtype::kU8, {3}, Bytes(3)).ok());
  EXPECT_FALSE(writer->Add("b", Dtype::kU8, {4}, Bytes(3)).ok());
  EXPECT_FALSE(writer->Add("c", Dtype::kU8, {-1}, Bytes(3)).ok());
}

TEST_F(SafetensorsTest, SaysWhenThereIsNoFile) {
  EXPECT_TRUE(absl::IsNotFound(
      SafetensorsReader::Open(directory_.File("none")).status()));
  EXPECT_TRUE(absl::IsUnimplemented(
      SafetensorsReader::Open(directory_.File("")).status()));
}

TEST_F(SafetensorsTest, AcceptsWhatTheFormatAllows) {
  const std::string a =
      R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  const struct {
    std::string bytes;
    size_t tensor_count;
  } cases[] = {
      {File("{}", 0), 0},
      {File("{}      ", 0), 0},
      {File("{" + a + "}", 8), 1},
      {File("{\"__metadata__\":{}," + a + "}", 8), 1},
      // The order in the header is not that of the data.
      {File(
           R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[8,9]},)" + a + "}",
           9),
       2},
      // Keys in any order; empty tensors share an offset.
      {File(R"({"e":{"data_offsets":[8,8],"shape":[0],"dtype":"I64"},)" + a +
                R"(,"f":{"dtype":"U8","shape":[3,0],"data_offsets":[0,0]}})",
            8),
       3},
  };
  for (const auto& test : cases) {
    const absl::StatusOr<SafetensorsReader> reader = SafetensorsReader::Open(
        directory_.Write("good.safetensors", test.bytes));
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ(reader->tensors().size(), test.tensor_count);
  }
}

struct Malformed {
  std::string name;
  std::string bytes;
  // Part of the message.
  std::string expected;
};

std::vector<Malformed> MalformedFiles() {
  const auto tensor = [](const std::string& inside, size_t data_bytes) {
    return File("{\"a\":{" + inside + "}}", data_bytes);
  };
  std::string deep = "{\"a\":";
  for (int i = 0; i < 200'000; ++i) deep += "[";
  return {
      {"Empty", "", "at least 8 bytes, got 0"},
      {"SevenBytes", std::string(7, '\1'), "at least 8 bytes, got 7"},
      {"OnlyLength", Length(2), "header of 2 bytes, got 0"},
      {"NoHeader", Length(0), "begins with {"},
      {"HeaderCutOff", Length(100) + "{}", "header of 100 bytes, got 2"},
      {"HeaderOverLimit", Length(100'000'001) + "{}", "at most 100000000"},
      {"HeaderOfAllOnes", std::string(8, '\xFF'), "at most 100000000"},
      {"HeaderIsArray", File("[]", 0), "begins with {"},
      {"HeaderBeginsWithSpace", File(" {}", 0), "begins with {"},
      {"HeaderIsNotJson", File("{a}", 0), "not valid JSON"},
      {"HeaderIsNotClosed", File("{", 0), "not valid JSON"},
      {"HeaderHasMoreBehind", File("{}{}", 0), "not valid JSON"},
      {"HeaderIsPaddedWithZeros", File(std::string("{}\0\0", 4), 0),
       "zero byte at byte 2"},
      {"HeaderIsNotUtf8", File("{\"\xC3\x28\":{}}", 0), "not valid JSON"},
      {"HeaderIsDeep", File(deep, 0), "expected an object"},
      {"TensorIsNumber", File("{\"a\":1}", 0), "an object for \"a\""},
      {"TensorIsString", File("{\"a\":\"b\"}", 0), "an object for \"a\""},
      {"TensorIsNull", File("{\"a\":null}", 0), "got null"},
      {"TensorIsArray", File("{\"a\":[]}", 0), "got an array"},
      {"TensorIsEmpty", tensor("", 0), "expected dtype, shape and"},
      {"NoDtype", tensor(R"("shape":[],"data_offsets":[0,0])", 0),
       "expected dtype, shape and"},
      {"NoShape", tensor(R"("dtype":"U8","data_offsets":[0,0])", 0),
       "expected dtype, shape and"},
      {"NoOffsets", tensor(R"("dtype":"U8","shape":[])", 0),
       "expected dtype, shape and"},
      {"UnknownKey", tensor(R"("dtype":"U8","shapes":[])", 0),
       "got \"shapes\""},
      {"DtypeIsNumber", tensor(R"("dtype":32)", 0), "a string for \"dtype\""},
      {"ShapeIsNumber", tensor(R"("shape":3)", 0), "an array for \"shape\""},
      {"NegativeDimension",
       tensor(R"("dtype":"U8","shape":[-1],"data_offsets":[0,1])", 1),
       "integers of at least 0"},
      {"FractionalDimension",
       tensor(R"("dtype":"U8","shape":[1.0],"data_offsets":[0,1])", 1),
       "integers of at least 0"},
      {"HugeDimension",
       tensor(
           R"("dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1])",
           1),
       "63 bits"},
      {"DimensionBeyond64Bits",
       tensor(
           R"("dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1])",
           1),
       "integers of at least 0"},
      {"ProductOverflows",
       tensor(
           R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0])",
           0),
       "63 bits"},
      {"ProductOverflowsByElementSize",
       tensor(
           R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0])",
           0),
       "63 bits"},
      {"ShapeIsNested", tensor(R"("shape":[[1]])", 0), "got an array"},
      {"ShapeHasString", tensor(R"("shape":["1"])", 0), "got a string"},
      {"OneOffset", tensor(R"("dtype":"U8","shape":[],"data_offsets":[0])", 1),
       "two data_offsets"},
      {"ThreeOffsets",
       tensor(R"("dtype":"U8","shape":[],"data_offsets":[0,1,2])", 1),
       "more than two"},
      {"OffsetsAreReversed",
       tensor(R"("dtype":"U8","shape":[1],"data_offsets":[1,0])", 1),
       "end before they begin"},
      {"OffsetsBehindTheFile",
       tensor(R"("dtype":"U8","shape":[2],"data_offsets":[0,2])", 1),
       "expected 2 bytes of data, got 1"},
      {"OffsetsAreHuge",
       tensor(
           R"("dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615])",
           1),
       "without hole or overlap"},
      {"BytesBehindTheTensors",
       tensor(R"("dtype":"U8","shape":[2],"data_offsets":[0,2])", 3),
       "expected 2 bytes of data, got 3"},
      {"HoleInFront",
       tensor(R"("dtype":"U8","shape":[1],"data_offsets":[1,2])", 2),
       "data at byte 0"},
      {"HoleBetween",
       File(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
            R"("b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
            3),
       "data at byte 1"},
      {"Overlap",
       File(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
            R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
            3),
       "data at byte 2"},
      {"SameData",
       File(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
            R"("b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
            2),
       "data at byte 2"},
      {"SizeDoesNotFitShape",
       tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])", 4),
       "takes 8 bytes, data_offsets have 4"},
      {"ScalarWithoutData",
       tensor(R"("dtype":"F32","shape":[],"data_offsets":[0,0])", 0),
       "takes 4 bytes"},
      {"DuplicateName",
       File(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
            R"("a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
            0),
       "\"a\" occurs twice"},
      {"DuplicateNameByEscape",
       File(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
            R"("\u0061":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
            0),
       "\"a\" occurs twice"},
      {"DuplicateKey", tensor(R"("dtype":"U8","dtype":"U8")", 0),
       "\"dtype\" occurs twice"},
      {"DuplicateMetadata", File(R"({"__metadata__":{"k":"1","k":"2"}})", 0),
       "\"k\" occurs twice"},
      {"TwoMetadata", File(R"({"__metadata__":{},"__metadata__":{}})", 0),
       "occurs twice"},
      {"MetadataIsNumber", File(R"({"__metadata__":{"k":1}})", 0),
       "a string for the metadata key \"k\""},
      {"MetadataIsNested", File(R"({"__metadata__":{"k":{}}})", 0),
       "a string for the metadata key"},
      {"MetadataIsString", File(R"({"__metadata__":"k"})", 0),
       "expected an object"},
  };
}

class MalformedSafetensorsTest
    : public SafetensorsTest,
      public ::testing::WithParamInterface<Malformed> {};

TEST_P(MalformedSafetensorsTest, IsRefusedInWords) {
  const std::string path = directory_.Write(
      absl::StrCat(GetParam().name, ".safetensors"), GetParam().bytes);
  const absl::Status status = SafetensorsReader::Open(path).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_TRUE(absl::StartsWith(status.message(), "FILE_MALFORMED: "));
  EXPECT_TRUE(absl::StrContains(status.message(), GetParam().expected))
      << status << "\nlacks: " << GetParam().expected;
}

INSTANTIATE_TEST_SUITE_P(Table, MalformedSafetensorsTest,
                         ::testing::ValuesIn(MalformedFiles()),
                         [](const ::testing::TestParamInfo<Malformed>& info) {
                           return info.param.name;
                         });

TEST_F(SafetensorsTest, EveryCutAndEveryFlippedByteIsReadOrRefused) {
  const std::string good =
      File(R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2],)"
           R"("data_offsets":[0,8]}})",
           8);
  for (size_t i = 0; i < good.size(); ++i) {
    EXPECT_FALSE(SafetensorsReader::Open(
                     directory_.Write("cut.safetensors", good.substr(0, i)))
                     .ok())
        << "cut at " << i;
    for (const char flip : {'\x01', '\x20', '\x80'}) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ flip);
      const absl::StatusOr<SafetensorsReader> reader =
          SafetensorsReader::Open(directory_.Write("flip.safetensors", bad));
      if (!reader.ok()) continue;
      EXPECT_LE(reader->tensors().size(), 1u);
    }
  }
}

}  // namespace
}  // namespace quantd::files::safetensors_test
