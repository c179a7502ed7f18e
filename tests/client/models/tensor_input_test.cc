#include "client/models/tensor_input.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/tensor.h"
#include "client/files/dtype.h"
#include "client/files/npy.h"
#include "client/files/safetensors.h"
#include "client/files/shard_index.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/onnx_bytes.h"
#include "tests/support/temporary_directory.h"

namespace quantd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(FileStemTest, LeavesOutFoldersAndTheExtension) {
  EXPECT_EQ(FileStem("a/b/model.safetensors"), "model");
  EXPECT_EQ(FileStem("model.v2.npy"), "model.v2");
  EXPECT_EQ(FileStem("models.d/resnet"), "resnet");
  EXPECT_EQ(FileStem("resnet//"), "resnet");
  EXPECT_EQ(FileStem(".hidden"), ".hidden");
  EXPECT_EQ(FileStem(""), "");
}

TEST(PathTest, TheEndOfAPathSaysWhatItIs) {
  EXPECT_TRUE(IsNpyPath("a/X.NPY"));
  EXPECT_FALSE(IsNpyPath("a.npy/x"));
  EXPECT_FALSE(IsNpyPath("npy"));
  EXPECT_TRUE(IsGgufPath("x.GGuf"));
  EXPECT_FALSE(IsGgufPath("x.gguf.part"));
  EXPECT_TRUE(IsOnnxPath("x.ONNX"));
  EXPECT_FALSE(IsOnnxPath("x.onnx.data"));
}

TEST(ElementTypeOfTest, LeadsBackToTheFilesType) {
  for (const ElementType type :
       {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBfloat16,
        ElementType::kFloat64}) {
    EXPECT_EQ(ElementTypeOf(DtypeOf(type)), type);
    EXPECT_EQ(files::DtypeSizeBytes(DtypeOf(type)), ElementSizeBytes(type));
  }
  for (const files::Dtype dtype :
       {files::Dtype::kI8, files::Dtype::kBool, files::Dtype::kF8E4M3}) {
    EXPECT_EQ(ElementTypeOf(dtype), std::nullopt);
  }
}

class TensorInputTest : public ::testing::Test {
 protected:
  std::string Safetensors(const std::string& name,
                          const std::vector<std::string>& tensors) {
    const std::string path = directory_.File(name);
    auto writer =
        files::SafetensorsWriter::Create(path, files::IfExists::kReplace);
    for (const std::string& tensor : tensors) {
      EXPECT_TRUE(
          writer->Add(tensor, files::Dtype::kF32, {1}, {1, 2, 3, 4}).ok());
    }
    writer->SetMetadata("from", name);
    EXPECT_TRUE(writer->Finish().ok());
    return path;
  }

  const testing::TemporaryDirectory directory_;
};

TEST_F(TensorInputTest, ANumpyFileIsOneTensorOfItsName) {
  const std::string path = directory_.File("act.npy");
  ASSERT_TRUE(files::WriteNpy(path, files::IfExists::kRefuse,
                              files::Dtype::kF16, {2}, {1, 2, 3, 4})
                  .ok());
  const auto input = TensorInput::Open(path);
  ASSERT_TRUE(input.ok()) << input.status();
  ASSERT_EQ(input->tensors().size(), 1u);
  EXPECT_EQ(input->tensors()[0].name, "act");
  EXPECT_THAT(input->tensors()[0].data, ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(input->Find("act"), &input->tensors()[0]);
  EXPECT_EQ(input->Find("other"), nullptr);
}

TEST_F(TensorInputTest, AFolderHasTheTensorsOfItsFiles) {
  Safetensors("1.safetensors", {"a", "b"});
  Safetensors("2.safetensors", {"c"});
  ASSERT_TRUE(files::WriteShardIndex(directory_.path(),
                                     files::IfExists::kRefuse,
                                     {{"a", "1.safetensors"},
                                      {"b", "1.safetensors"},
                                      {"c", "2.safetensors"}},
                                     12, std::nullopt)
                  .ok());
  const auto input = TensorInput::Open(directory_.path());
  ASSERT_TRUE(input.ok()) << input.status();
  EXPECT_EQ(input->tensors().size(), 3u);
  EXPECT_NE(input->Find("c"), nullptr);
  // A tensor that two files have would be the one or the other.
  Safetensors("2.safetensors", {"c", "a"});
  EXPECT_FALSE(TensorInput::Open(directory_.path()).ok());
}

TEST_F(TensorInputTest, AnOnnxModelHasItsInitializers) {
  directory_.Write("weights", "abcd");
  const std::string path = directory_.Write(
      "m.onnx",
      testing::OnnxModelOf(absl::StrCat(
          testing::OnnxNode("DequantizeLinear", {"c", "s"}, "y"),
          testing::OnnxInitializer("c", 3, {4}, testing::BytesField(9, "efgh")),
          testing::OnnxInitializer("w", 1, {1},
                                   testing::OnnxExternal("weights", "0", "4")),
          testing::OnnxInitializer("text", 8, {}, ""))));
  const auto input = TensorInput::Open(path);
  ASSERT_TRUE(input.ok()) << input.status();
  ASSERT_EQ(input->tensors().size(), 2u);
  ASSERT_NE(input->Find("w"), nullptr);
  EXPECT_THAT(input->Find("w")->data, ElementsAre('a', 'b', 'c', 'd'));
  EXPECT_EQ(input->onnx_codes(), "c");
  ASSERT_EQ(input->unread().size(), 1U);
  EXPECT_EQ(input->unread()[0].name, "text");
  EXPECT_THAT(input->paths(), ElementsAre(path, directory_.File("weights")));
}

TEST_F(TensorInputTest, SaysWhatCannotBeRead) {
  EXPECT_THAT(TensorInput::Open(directory_.File("none")).status().ToString(),
              HasSubstr("FILE_UNREADABLE"));
  EXPECT_THAT(TensorInput::Open(directory_.Write("x", "no tensors"))
                  .status()
                  .ToString(),
              HasSubstr("FILE_MALFORMED"));
}

}  // namespace
}  // namespace quantd
