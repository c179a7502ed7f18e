#include "client/files/npy.h"

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"

namespace quantd::files::npy_test {
namespace {

class NpyTest : public ::testing::Test {
 protected:
  const testing::TemporaryDirectory directory_;
};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::string Npy(int major, const std::string& header, size_t data_bytes) {
  std::string bytes = "\x93NUMPY";
  bytes.push_back(static_cast<char>(major));
  bytes.push_back('\0');
  for (int i = 0; i < (major == 1 ? 2 : 4); ++i) {
    bytes.push_back(static_cast<char>(header.size() >> (8 * i)));
  }
  return absl::StrCat(bytes, header, std::string(data_bytes, 'd'));
}

std::string Header(const std::string& descr, const std::string& order,
                   const std::string& shape) {
  return absl::StrCat("{'descr': '", descr, "', 'fortran_order': ", order,
                      ", 'shape': ", shape, ", }\n");
}

TEST_F(NpyTest, ReadsBackWhatItWrote) {
  const std::vector<std::vector<int64_t>> shapes = {
      {}, {0}, {5}, {2, 3}, {1, 2, 3, 4}};
  for (const Dtype dtype :
       {Dtype::kBool, Dtype::kU8, Dtype::kI8, Dtype::kI16, Dtype::kU16,
        Dtype::kF16, Dtype::kI32, Dtype::kU32, Dtype::kF32, Dtype::kF64,
        Dtype::kI64, Dtype::kU64}) {
    for (const std::vector<int64_t>& shape : shapes) {
      std::vector<uint8_t> data(
          static_cast<size_t>(*TensorSizeBytes(dtype, shape)));
      for (size_t i = 0; i < data.size(); ++i) {
        data[i] = static_cast<uint8_t>(i);
      }
      const std::string path = directory_.File("round.npy");
      const absl::StatusOr<uint64_t> size =
          WriteNpy(path, IfExists::kReplace, dtype, shape, data);
      ASSERT_TRUE(size.ok()) << size.status();
      EXPECT_EQ(*size, ReadFile(path).size());
      const absl::StatusOr<NpyReader> reader = NpyReader::Open(path);
      ASSERT_TRUE(reader.ok()) << reader.status();
      EXPECT_EQ(reader->dtype(), dtype);
      EXPECT_EQ(reader->shape(), shape);
      EXPECT_EQ(
          std::vector<uint8_t>(reader->data().begin(), reader->data().end()),
          data);
      EXPECT_EQ((ReadFile(path).size() - data.size()) % 64, 0u);
    }
  }
}

// What numpy.save writes for numpy.arange(3, dtype='<f4'), byte for byte.
TEST_F(NpyTest, WritesTheBytesThatNumpyWrites) {
  const std::string path = directory_.File("same.npy");
  const std::vector<uint8_t> data(12, 'd');
  ASSERT_TRUE(WriteNpy(path, IfExists::kReplace, Dtype::kF32, {3}, data).ok());
  std::string header =
      "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }";
  header.append(117 - header.size(), ' ');
  EXPECT_EQ(ReadFile(path), Npy(1, header + "\n", 12));
}

TEST_F(NpyTest, HasNoBfloat16) {
  EXPECT_TRUE(absl::IsUnimplemented(WriteNpy(directory_.File("bf16.npy"),
                                             IfExists::kReplace, Dtype::kBF16,
                                             {1}, std::vector<uint8_t>(2))
                                        .status()));
}

TEST_F(NpyTest, AcceptsWhatTheFormatAllows) {
  const std::string cases[] = {
      Npy(1, Header("<f4", "False", "(2,)"), 8),
      Npy(2, Header("<f4", "False", "(2,)"), 8),
      Npy(3, Header("<f4", "False", "(2,)"), 8),
      Npy(1, Header("<f8", "False", "()"), 8),
      Npy(1, Header("<i4", "False", "(1, 2)"), 8),
      Npy(1, Header("<i4", "False", "(1L, 2L)"), 8),
      Npy(1, Header("<u1", "False", "(8,)"), 8),
      Npy(1, "{\"shape\":(8,),\"descr\":\"|i1\",\"fortran_order\":False}", 8),
  };
  for (const std::string& bytes : cases) {
    const absl::StatusOr<NpyReader> reader =
        NpyReader::Open(directory_.Write("good.npy", bytes));
    EXPECT_TRUE(reader.ok()) << reader.status();
  }
}

struct Malformed {
  std::string name;
  std::string bytes;
  // Part of the message.
  std::string expected;
};

std::vector<Malformed> MalformedFiles() {
  return {
      {"Empty", "", "\\x93NUMPY"},
      {"OtherMagic", "\x94NUMPY\x01" + std::string(100, '\0'), "\\x93NUMPY"},
      {"OnlyMagic", "\x93NUMPY", "\\x93NUMPY"},
      {"Version0", Npy(0, Header("<f4", "False", "()"), 4), "got 0.0"},
      {"Version4", Npy(4, Header("<f4", "False", "()"), 4), "got 4.0"},
      {"LengthCutOff", std::string("\x93NUMPY\x02\0\x01\0", 10), "cut off"},
      {"HeaderCutOff", Npy(1, Header("<f4", "False", "()"), 0).substr(0, 30),
       "expected a header of"},
      {"HugeHeader", std::string("\x93NUMPY\x02\0\xFF\xFF\xFF\xFF{", 13),
       "expected a header of 4294967295"},
      {"EmptyHeader", Npy(1, "", 0), "expected {"},
      {"NotADictionary", Npy(1, "[1]", 0), "expected {"},
      {"NotClosed", Npy(1, "{'descr': '<f4'", 0), "expected , or }"},
      {"StringNotClosed", Npy(1, "{'descr': '<f4", 0), "plain type"},
      {"KeyWithoutQuotes", Npy(1, "{descr: '<f4'}", 0), "a key in quotes"},
      {"NoColon", Npy(1, "{'descr' '<f4'}", 0), "expected :"},
      {"NoKeys", Npy(1, "{}", 0), "expected the keys"},
      {"NoShape", Npy(1, "{'descr': '<f4', 'fortran_order': False}", 0),
       "expected the keys"},
      {"UnknownKey", Npy(1, "{'desc': '<f4'}", 0), "unknown key 'desc'"},
      {"DuplicateKey", Npy(1, "{'descr': '<f4', 'descr': '<f4'}", 0),
       "occurs twice"},
      {"MoreBehind", Npy(1, Header("<f4", "False", "()") + "x", 4),
       "nothing more"},
      {"StructuredType",
       Npy(1, "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': ()}",
           4),
       "8 bytes, got fields \"[('a', '<f4')]\""},
      {"ListNotClosed", Npy(1, "{'descr': [('a', '<f4')", 0), "plain type"},
      {"BigEndian", Npy(1, Header(">f4", "False", "()"), 4), "type '>f4'"},
      {"Object", Npy(1, Header("|O", "False", "()"), 4), "type '|O'"},
      {"Complex", Npy(1, Header("<c8", "False", "()"), 8), "type '<c8'"},
      {"LongDouble", Npy(1, Header("<f16", "False", "()"), 16), "'<f16'"},
      {"FortranOrder", Npy(1, Header("<f4", "True", "(2, 2)"), 16),
       "got fortran_order"},
      {"OrderIsNumber", Npy(1, Header("<f4", "0", "()"), 4), "True or False"},
      {"ShapeIsNumber", Npy(1, Header("<f4", "False", "3"), 12), "a tuple"},
      {"ShapeIsNoTuple", Npy(1, Header("<f4", "False", "(3)"), 12), "a tuple"},
      {"ShapeIsNegative", Npy(1, Header("<f4", "False", "(-1,)"), 4),
       "at least 0"},
      {"ShapeIsFractional", Npy(1, Header("<f4", "False", "(1.5,)"), 4),
       ", or ) in 'shape'"},
      {"ShapeIsHuge",
       Npy(1, Header("<f4", "False", "(9223372036854775808,)"), 4), "63 bits"},
      {"ProductOverflows",
       Npy(1, Header("<f4", "False", "(4294967296, 4294967296)"), 4),
       "63 bits"},
      {"ShapeNotClosed",
       Npy(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1,", 4),
       "in 63 bits"},
      {"DataCutOff", Npy(1, Header("<f4", "False", "(2,)"), 7),
       "expected 8 bytes of data, got 7"},
      {"DataTooLong", Npy(1, Header("<f4", "False", "(2,)"), 9),
       "expected 8 bytes of data, got 9"},
  };
}

class MalformedNpyTest : public NpyTest,
                         public ::testing::WithParamInterface<Malformed> {};

TEST_P(MalformedNpyTest, IsRefusedInWords) {
  const absl::Status status =
      NpyReader::Open(directory_.Write(absl::StrCat(GetParam().name, ".npy"),
                                       GetParam().bytes))
          .status();
  EXPECT_FALSE(status.ok());
  EXPECT_TRUE(absl::StrContains(status.message(), GetParam().expected))
      << status << "\nlacks: " << GetParam().expected;
}

INSTANTIATE_TEST_SUITE_P(Table, MalformedNpyTest,
                         ::testing::ValuesIn(MalformedFiles()),
                         [](const ::testing::TestParamInfo<Malformed>& info) {
                           return info.param.name;
                         });

TEST_F(NpyTest, EveryCutAndEveryFlippedByteIsReadOrRefused) {
  const std::string good = Npy(1, Header("<f4", "False", "(2, 3)"), 24);
  for (size_t i = 0; i < good.size(); ++i) {
    EXPECT_FALSE(
        NpyReader::Open(directory_.Write("cut.npy", good.substr(0, i))).ok());
    for (const char flip : {'\x01', '\x20', '\x80'}) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ flip);
      const absl::StatusOr<NpyReader> reader =
          NpyReader::Open(directory_.Write("flip.npy", bad));
      if (!reader.ok()) continue;
      EXPECT_EQ(reader->data().size(), 24u);
    }
  }
}

}  // namespace
}  // namespace quantd::files::npy_test
