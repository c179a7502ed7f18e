#include "client/files/onnx_tensors.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/files/dtype.h"
#include "client/files/mapped_file.h"
#include "client/files/safetensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/onnx_bytes.h"
#include "tests/support/temporary_directory.h"

namespace quantd::files {
namespace {

using quantd::testing::BytesField;
using quantd::testing::NumberField;
using quantd::testing::OnnxExternal;
using quantd::testing::OnnxInitializer;
using quantd::testing::OnnxModelOf;
using quantd::testing::OnnxNode;
using quantd::testing::Varint;

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Fields of a TensorProto.
constexpr uint32_t kFloatData = 4;
constexpr uint32_t kInt32Data = 5;
constexpr uint32_t kInt64Data = 7;
constexpr uint32_t kRawData = 9;
constexpr uint32_t kDoubleData = 10;
constexpr uint32_t kUint64Data = 11;

std::string Raw(const std::string& bytes) {
  return BytesField(kRawData, bytes);
}

template <typename T>
std::vector<T> Values(const FileTensor& tensor) {
  std::vector<T> values(tensor.data.size() / sizeof(T));
  if (!values.empty()) {
    std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
  }
  return values;
}

template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()),
          values.size() * sizeof(T)};
}

// A tensor, as a field of an attribute.
std::string Tensor(const std::string& name, uint64_t data_type,
                   const std::vector<int64_t>& dims, const std::string& data) {
  std::string tensor = NumberField(2, data_type) + data + BytesField(8, name);
  for (const int64_t size : dims) {
    tensor += NumberField(1, static_cast<uint64_t>(size));
  }
  return BytesField(5, tensor);
}

// A node with an attribute of that field, as a field of a graph.
std::string NodeWith(const std::string& op_type, const std::string& name,
                     const std::string& output, const std::string& attribute) {
  return BytesField(
      1, absl::StrCat(BytesField(2, output), BytesField(3, name),
                      BytesField(4, op_type), BytesField(5, attribute)));
}

std::vector<std::string> NamesOf(const std::vector<UnreadTensor>& tensors) {
  std::vector<std::string> names;
  for (const UnreadTensor& tensor : tensors) names.push_back(tensor.name);
  return names;
}

class OnnxTensorsTest : public ::testing::Test {
 protected:
  absl::StatusOr<OnnxTensors> Open(const std::string& graph) {
    return OpenBytes(OnnxModelOf(graph));
  }

  absl::StatusOr<OnnxTensors> OpenBytes(const std::string& bytes) {
    return OnnxTensors::Open(directory_.Write("model.onnx", bytes));
  }

  std::string Error(const std::string& graph) {
    return Open(graph).status().ToString();
  }

  const testing::TemporaryDirectory directory_;
};

TEST_F(OnnxTensorsTest, RawDataAreNotCopied) {
  const auto model = Open(absl::StrCat(
      OnnxInitializer("w", 1, {2, 1}, Raw(BytesOf<float>({1.5F, -2}))),
      OnnxInitializer("h", 10, {2}, Raw("abcd")),
      OnnxInitializer("b", 16, {1}, Raw("xy")),
      OnnxInitializer("scalar", 7, {}, Raw(BytesOf<int64_t>({-3}))),
      OnnxInitializer("empty", 1, {0, 4}, "")));
  ASSERT_TRUE(model.ok()) << model.status();
  ASSERT_EQ(model->tensors().size(), 5U);
  EXPECT_EQ(model->tensors()[0].name, "w");
  EXPECT_EQ(model->tensors()[0].dtype, Dtype::kF32);
  EXPECT_THAT(model->tensors()[0].shape, ElementsAre(2, 1));
  EXPECT_THAT(Values<float>(model->tensors()[0]), ElementsAre(1.5F, -2));
  EXPECT_EQ(model->tensors()[1].dtype, Dtype::kF16);
  // As far from each other as in the file: 4 bytes of data, the name, and the
  // fields of the next one.
  EXPECT_EQ(model->tensors()[2].data.data() - model->tensors()[1].data.data(),
            4 + 3 + 8);
  EXPECT_EQ(model->tensors()[2].dtype, Dtype::kBF16);
  EXPECT_THAT(model->tensors()[3].shape, IsEmpty());
  EXPECT_THAT(Values<int64_t>(model->tensors()[3]), ElementsAre(-3));
  EXPECT_THAT(model->tensors()[4].data, IsEmpty());
}

TEST_F(OnnxTensorsTest, FieldsOfNumbersAreRead) {
  const std::string minus_one = Varint(~uint64_t{0});
  const auto model = Open(absl::StrCat(
      OnnxInitializer("packed", 1, {2},
                      BytesField(kFloatData, BytesOf<float>({1, 2}))),
      // Each by itself, with its tag of a fixed32.
      OnnxInitializer(
          "single", 1, {2},
          absl::StrCat(Varint(kFloatData << 3 | 5), BytesOf<float>({3}),
                       Varint(kFloatData << 3 | 5), BytesOf<float>({4}))),
      OnnxInitializer("half", 10, {2},
                      BytesField(kInt32Data, Varint(0x3c00) + Varint(0xc000))),
      OnnxInitializer("brain", 16, {1}, NumberField(kInt32Data, 0x3f80)),
      OnnxInitializer("int8", 3, {2},
                      BytesField(kInt32Data, minus_one + Varint(7))),
      OnnxInitializer("int64", 7, {2},
                      BytesField(kInt64Data, minus_one + Varint(300))),
      OnnxInitializer("double", 11, {1},
                      BytesField(kDoubleData, BytesOf<double>({0.5}))),
      OnnxInitializer("uint32", 12, {1},
                      NumberField(kUint64Data, 4000000000))));
  ASSERT_TRUE(model.ok()) << model.status();
  ASSERT_EQ(model->tensors().size(), 8U);
  EXPECT_THAT(Values<float>(model->tensors()[0]), ElementsAre(1, 2));
  EXPECT_THAT(Values<float>(model->tensors()[1]), ElementsAre(3, 4));
  EXPECT_THAT(Values<uint16_t>(model->tensors()[2]),
              ElementsAre(0x3c00, 0xc000));
  EXPECT_THAT(Values<uint16_t>(model->tensors()[3]), ElementsAre(0x3f80));
  EXPECT_THAT(Values<int8_t>(model->tensors()[4]), ElementsAre(-1, 7));
  EXPECT_THAT(Values<int64_t>(model->tensors()[5]), ElementsAre(-1, 300));
  EXPECT_THAT(Values<double>(model->tensors()[6]), ElementsAre(0.5));
  EXPECT_THAT(Values<uint32_t>(model->tensors()[7]), ElementsAre(4000000000U));
}

TEST_F(OnnxTensorsTest, OtherTypesAreNamed) {
  const auto model =
      Open(absl::StrCat(OnnxInitializer("text", 8, {1}, BytesField(6, "x")),
                        OnnxInitializer("int4", 22, {2}, Raw("a")),
                        BytesField(15, BytesField(1, BytesField(8, "sparse"))),
                        OnnxInitializer("w", 1, {1}, Raw("abcd"))));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT(NamesOf(model->unread()), ElementsAre("text", "int4", "sparse"));
  EXPECT_THAT(model->unread()[0].why, HasSubstr("type"));
  EXPECT_THAT(model->unread()[2].why, HasSubstr("sparse"));
  EXPECT_EQ(model->tensors().size(), 1U);
}

TEST_F(OnnxTensorsTest, ConstantsAreTensors) {
  directory_.Write("one", BytesOf<float>({7}));
  const auto model = Open(absl::StrCat(
      OnnxInitializer("w", 1, {1}, Raw(BytesOf<float>({1}))),
      // Its own name does not count.
      NodeWith("Constant", "", "c",
               Tensor("other", 1, {2}, Raw(BytesOf<float>({2, 3})))),
      NodeWith("Constant", "", "n",
               Tensor("", 7, {2}, BytesField(kInt64Data, "\4\5"))),
      NodeWith("Constant", "", "e",
               Tensor("", 1, {1}, OnnxExternal("one", "0", "4"))),
      NodeWith("Constant", "", "t", Tensor("", 8, {1}, BytesField(6, "x"))),
      NodeWith("Constant", "", "", Tensor("", 1, {1}, Raw("abcd"))),
      OnnxNode("Constant", {}, "none")));
  ASSERT_TRUE(model.ok()) << model.status();
  ASSERT_EQ(model->tensors().size(), 4U);
  EXPECT_EQ(model->tensors()[1].name, "c");
  EXPECT_THAT(model->tensors()[1].shape, ElementsAre(2));
  EXPECT_THAT(Values<float>(model->tensors()[1]), ElementsAre(2, 3));
  EXPECT_THAT(Values<int64_t>(model->tensors()[2]), ElementsAre(4, 5));
  EXPECT_THAT(Values<float>(model->tensors()[3]), ElementsAre(7));
  EXPECT_THAT(NamesOf(model->unread()), ElementsAre("t"));
  EXPECT_THAT(model->elsewhere(), IsEmpty());
  EXPECT_THAT(
      Error(OnnxInitializer("w", 1, {1}, Raw("abcd")) +
            NodeWith("Constant", "", "w", Tensor("", 1, {1}, Raw("abcd")))),
      HasSubstr("another one has the name"));
  EXPECT_THAT(
      Error(NodeWith("Constant", "", "w\xff", Tensor("", 1, {1}, Raw("abcd")))),
      HasSubstr("expected a name of UTF-8"));
}

// Those with several floats: weights, that is.
TEST_F(OnnxTensorsTest, WeightsOutsideOfTheMainGraphAreNamed) {
  const std::string two = Raw(BytesOf<float>({1, 2}));
  const std::string branch = absl::StrCat(
      OnnxInitializer("a", 1, {2}, two), OnnxInitializer("one", 1, {1}, ""),
      OnnxInitializer("scalar", 1, {}, ""), OnnxInitializer("axes", 7, {2}, ""),
      NodeWith("Constant", "", "b", Tensor("own", 10, {2}, Raw("abcd"))),
      BytesField(15, BytesField(1, BytesField(8, "sparse"))));
  const std::string function = BytesField(
      25, BytesField(1, "F") +
              BytesField(7, BytesField(2, "d") + BytesField(4, "Constant") +
                                BytesField(5, Tensor("", 1, {2}, two))));
  const auto model = OpenBytes(absl::StrCat(
      OnnxModelOf(absl::StrCat(
          NodeWith("If", "choice", "y", BytesField(6, branch)),
          NodeWith(
              "Loop", "", "z",
              BytesField(11, NodeWith("If", "inner", "i",
                                      BytesField(6, OnnxInitializer("c", 1, {2},
                                                                    two))))),
          NodeWith("Trees", "forest", "p", Tensor("leaves", 1, {2}, two)),
          NodeWith("ConstantOfShape", "", "q", Tensor("", 1, {1}, "")),
          OnnxInitializer("w", 1, {1}, Raw("abcd")))),
      function));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->tensors().size(), 1U);
  EXPECT_THAT(model->unread(), IsEmpty());
  EXPECT_THAT(NamesOf(model->elsewhere()),
              ElementsAre("a", "b", "sparse", "c", "p", "d"));
  EXPECT_THAT(model->elsewhere()[0].why,
              HasSubstr("a graph within the If node \"choice\""));
  EXPECT_THAT(model->elsewhere()[3].why,
              HasSubstr("a graph within the If node \"inner\""));
  EXPECT_THAT(model->elsewhere()[4].why,
              HasSubstr("an attribute of the Trees node \"forest\""));
  EXPECT_THAT(model->elsewhere()[5].why, HasSubstr("the function \"F\""));
}

TEST_F(OnnxTensorsTest, GraphsWithinGraphsEnd) {
  std::string graph = OnnxInitializer("a", 1, {2}, Raw("abcdefgh"));
  for (int depth = 0; depth < 100; ++depth) {
    graph = NodeWith("If", "", "y", BytesField(6, graph));
  }
  EXPECT_TRUE(Open(graph).ok());
  EXPECT_THAT(Error(NodeWith("If", "", "y", BytesField(6, graph))),
              HasSubstr("FILE_MALFORMED"));
}

TEST_F(OnnxTensorsTest, DataMayBeInOtherFiles) {
  ASSERT_EQ(mkdir(directory_.File("data").c_str(), 0777), 0);
  directory_.Write("data/one", absl::StrCat("skip", BytesOf<float>({1, 2})));
  directory_.Write("two", BytesOf<float>({3}));
  const auto model = Open(absl::StrCat(
      OnnxInitializer("a", 1, {1}, OnnxExternal("data/one", "4", "4")),
      OnnxInitializer("b", 1, {1}, OnnxExternal("data/one", "8", "")),
      OnnxInitializer("c", 1, {1}, OnnxExternal("two", "", ""))));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT(Values<float>(model->tensors()[0]), ElementsAre(1));
  EXPECT_THAT(Values<float>(model->tensors()[1]), ElementsAre(2));
  EXPECT_THAT(Values<float>(model->tensors()[2]), ElementsAre(3));
  EXPECT_THAT(model->data_paths(),
              ElementsAre(directory_.File("data/one"), directory_.File("two")));
}

TEST_F(OnnxTensorsTest, AFileThatIsCutTellsWhichOfItsTensors) {
  const auto page = static_cast<size_t>(getpagesize());
  const std::string pages(2 * page, 'x');
  for (const auto& [file, tensor] :
       {std::pair("model.onnx", "w"), std::pair("one", "z"),
        std::pair("two", "c")}) {
    directory_.Write("one", pages);
    directory_.Write("two", pages);
    const std::string second = absl::StrCat(page);
    const auto model = Open(absl::StrCat(
        OnnxInitializer("z", 1, {1}, OnnxExternal("one", second, "4")),
        OnnxInitializer("c", 1, {1}, OnnxExternal("two", second, "4")),
        OnnxInitializer("a", 1, {1}, OnnxExternal("one", "0", "4")),
        OnnxInitializer("b", 1, {1}, OnnxExternal("two", "0", "4")),
        OnnxInitializer("w", 1, {static_cast<int64_t>(page / 2)}, Raw(pages))));
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_TRUE(CheckMappedFiles().ok());
    std::filesystem::resize_file(directory_.File(file), page);
    EXPECT_THAT(CheckMappedFiles().ToString(),
                AllOf(HasSubstr("FILE_CHANGED"), HasSubstr(file),
                      HasSubstr(absl::StrCat("tensor \"", tensor, "\""))));
  }
}

TEST_F(OnnxTensorsTest, AModelNamesNoFilesOutsideOfItsFolder) {
  for (const std::string location :
       {"/etc/passwd", "../model.onnx", "a/../../b", ""}) {
    EXPECT_THAT(
        Error(OnnxInitializer("a", 1, {1}, OnnxExternal(location, "0", "4"))),
        HasSubstr("FILE_MALFORMED"))
        << location;
  }
  EXPECT_THAT(
      Error(OnnxInitializer("a", 1, {1}, OnnxExternal("none", "0", "4"))),
      HasSubstr("FILE_UNREADABLE"));
}

TEST_F(OnnxTensorsTest, DataOfAnotherSizeAreRefused) {
  directory_.Write("two", BytesOf<float>({3}));
  for (const std::string& graph :
       {OnnxInitializer("a", 1, {2}, Raw("abcd")),
        OnnxInitializer("a", 1, {1}, ""), OnnxInitializer("a", 1, {-1}, ""),
        OnnxInitializer("a", 1, {1LL << 40, 1LL << 40}, Raw("abcd")),
        OnnxInitializer("a", 10, {1}, BytesField(kInt32Data, "\1\2")),
        OnnxInitializer(
            "a", 1, {1},
            BytesField(kFloatData, "abcd") + BytesField(kFloatData, "abcd")),
        OnnxInitializer("a", 1, {1}, OnnxExternal("two", "1", "4")),
        OnnxInitializer("a", 1, {1}, OnnxExternal("two", "0", "3")),
        OnnxInitializer("a", 1, {1}, OnnxExternal("two", "x", "")),
        OnnxInitializer("a", 1, {1},
                        OnnxExternal("two", "18446744073709551615", "4")),
        OnnxInitializer("", 1, {1}, Raw("abcd")),
        OnnxInitializer("a", 1, {1}, Raw("abcd")) +
            OnnxInitializer("a", 1, {1}, Raw("abcd"))}) {
    EXPECT_THAT(Error(graph), HasSubstr("FILE_MALFORMED"));
  }
}

// Not all of them are read, nor kept.
TEST_F(OnnxTensorsTest, ManyMoreDataThanDimensionsEndTheReading) {
  EXPECT_THAT(
      Error(OnnxInitializer("a", 3, {2}, BytesField(kInt32Data, "\1\2\3\xff"))),
      HasSubstr("initializer \"a\": the data do not fit"));
}

TEST_F(OnnxTensorsTest, ThereAreAtMost16Dimensions) {
  const auto model =
      Open(OnnxInitializer("a", 1, std::vector<int64_t>(16, 1), Raw("abcd")));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->tensors()[0].shape.size(), 16U);
  EXPECT_THAT(
      Error(OnnxInitializer("a", 1, std::vector<int64_t>(17, 1), Raw("abcd"))),
      HasSubstr("initializer \"a\": expected at most 16 dimensions"));
}

TEST_F(OnnxTensorsTest, NamesAreUtf8) {
  for (const std::string name : {"\xc3\xa4/\xf0\x9f\x98\x80", "\"\\\n\x7f"}) {
    const auto model = Open(OnnxInitializer(name, 1, {1}, Raw("abcd")));
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(model->tensors()[0].name, name);
  }
  // No lead byte, one that nothing follows, overlong, and a surrogate.
  for (const std::string name :
       {"a\xff", "a\xc3", "\xc0\x80", "\xed\xa0\x80"}) {
    EXPECT_THAT(Error(OnnxInitializer(name, 1, {1}, Raw("abcd"))),
                HasSubstr("expected a name of UTF-8"));
    EXPECT_THAT(Error(BytesField(15, BytesField(1, BytesField(8, name)))),
                HasSubstr("expected a name of UTF-8"));
  }
}

TEST_F(OnnxTensorsTest, OtherFilesAreRefused) {
  const std::string whole =
      OnnxModelOf(OnnxInitializer("w", 1, {1}, Raw("abcd")));
  ASSERT_TRUE(OpenBytes(whole).ok());
  for (const std::string& bytes :
       {std::string(), NumberField(1, 8), std::string(100, '\0'),
        std::string(100, '\xff'), whole.substr(0, 8), whole + "\x0b"}) {
    EXPECT_THAT(OpenBytes(bytes).status().ToString(),
                HasSubstr("FILE_MALFORMED"));
  }
}

TEST_F(OnnxTensorsTest, IntegersThatBecomeFloatsByCastAndMulAreKnown) {
  const std::string floats = OnnxInitializer("s", 1, {1}, Raw("abcd"));
  const auto found = [&](uint64_t data_type, const std::string& data,
                         const std::string& nodes) {
    const auto model =
        Open(nodes + floats + OnnxInitializer("w", data_type, {1}, Raw(data)));
    EXPECT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(model->codes(), "");
    std::string text;
    for (const OnnxTensors::CastCodes& codes : model->cast_codes()) {
      absl::StrAppend(&text, codes.codes, "*", codes.scales, " ");
    }
    return text;
  };
  const std::string cast = OnnxNode("Cast", {"w"}, "f");
  EXPECT_EQ(found(3, "a", cast + OnnxNode("Mul", {"f", "s"}, "y")), "w*s ");
  EXPECT_EQ(found(2, "a", cast + OnnxNode("Mul", {"s", "f"}, "y")), "w*s ");
  EXPECT_EQ(found(6, "abcd",
                  absl::StrCat(OnnxNode("Transpose", {"w"}, "t"),
                               OnnxNode("Cast", {"t"}, "f"),
                               OnnxNode("Sub", {"f", "z"}, "d"),
                               OnnxNode("Reshape", {"d", "n"}, "r"),
                               OnnxNode("Mul", {"r", "s"}, "y"),
                               OnnxNode("Mul", {"r", "s"}, "y2"))),
            "w*s ");
  // Indices, floats, what is no product of two tensors, and what has no Cast.
  EXPECT_EQ(found(7, "abcdefgh", cast + OnnxNode("Mul", {"f", "s"}, "y")), "");
  EXPECT_EQ(found(10, "ab", cast + OnnxNode("Mul", {"f", "s"}, "y")), "");
  EXPECT_EQ(found(3, "a", cast + OnnxNode("Mul", {"f", "x"}, "y")), "");
  EXPECT_EQ(found(3, "a", cast + OnnxNode("Add", {"f", "s"}, "y")), "");
  EXPECT_EQ(found(3, "a", cast + OnnxNode("Mul", {"w", "s"}, "y")), "");
}

TEST_F(OnnxTensorsTest, WhatNodesTakeAsCodesIsKnown) {
  const std::string weight = OnnxInitializer("w", 3, {2, 2}, Raw("abcd"));
  for (const std::string& node :
       {OnnxNode("DequantizeLinear", {"w", "s"}, "y"),
        OnnxNode("QLinearConv", {"x", "a", "b", "w"}, "y"),
        OnnxNode("MatMulInteger", {"x", "w"}, "y"),
        OnnxNode("DynamicQuantizeLSTM", {"x", "a", "w"}, "y"),
        NodeWith("If", "", "y",
                 BytesField(6, OnnxNode("DequantizeLinear", {"w", "s"}, "y"))),
        OnnxNode("Transpose", {"w"}, "t") +
            OnnxNode("Reshape", {"t", "d"}, "r") +
            OnnxNode("DequantizeLinear", {"r", "s"}, "y")}) {
    const auto model = Open(node + weight);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(model->codes(), "w");
  }
  for (const std::string& node :
       {OnnxNode("MatMul", {"x", "w"}, "y"),
        OnnxNode("DequantizeLinear", {"x", "s", "w"}, "y"),
        OnnxNode("Transpose", {"w"}, "t") + OnnxNode("MatMul", {"x", "t"}, "y"),
        // A circle, and indices.
        OnnxNode("Identity", {"t"}, "t") +
            OnnxNode("DequantizeLinear", {"t", "s"}, "y"),
        OnnxNode("Gather", {"x", "w"}, "g") +
            OnnxNode("DequantizeLinear", {"g", "s"}, "y")}) {
    EXPECT_EQ(Open(node + weight)->codes(), "");
  }
}

}  // namespace
}  // namespace quantd::files
