#include "client/files/safetensors_builder.h"

#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "client/files/safetensors.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"

namespace quantd::files {
namespace {

class SafetensorsBuilderTest : public ::testing::Test {
 protected:
  std::unique_ptr<SafetensorsBuilder> Create() const {
    return SafetensorsBuilder::Create(path_, IfExists::kReplace).value();
  }

  std::string Bytes() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  const testing::TemporaryDirectory directory_;
  const std::string path_ = directory_.File("built.safetensors");
};

const std::vector<uint8_t> kBytes = {1, 2, 3, 4, 5, 6, 7, 8};

TEST_F(SafetensorsBuilderTest, IsTheSameInWhateverOrderTheDataCome) {
  std::string first;
  for (const bool is_backwards : {false, true}) {
    const auto builder = Create();
    const size_t a = builder->Reserve(1, "a", Dtype::kU8, {8}).value();
    const size_t b = builder->Reserve(2, "b", Dtype::kF32, {2}).value();
    ASSERT_TRUE(builder->PlaceAll(4096).ok());
    const absl::Span<const uint8_t> bytes = kBytes;
    if (is_backwards) {
      ASSERT_TRUE(builder->Write(b, 4, bytes.subspan(4)).ok());
      ASSERT_TRUE(builder->Write(b, 0, bytes.subspan(0, 4)).ok());
      ASSERT_TRUE(builder->Write(a, 0, bytes).ok());
    } else {
      ASSERT_TRUE(builder->Write(a, 0, bytes).ok());
      ASSERT_TRUE(builder->Write(b, 0, bytes).ok());
    }
    builder->SetMetadata("key", "value");
    const uint64_t checksum = builder->DataChecksum().value();
    EXPECT_EQ(builder->Finish().value(), 4096u + 16u);
    EXPECT_EQ(SafetensorsReader::Open(path_)->DataChecksum(), checksum);
    if (first.empty()) first = Bytes();
    EXPECT_EQ(Bytes(), first);
  }
  const SafetensorsReader reader = SafetensorsReader::Open(path_).value();
  EXPECT_EQ(reader.metadata().at("key"), "value");
  ASSERT_EQ(reader.tensors().size(), 2u);
  // Wider elements come first.
  EXPECT_EQ(reader.tensors()[0].name, "b");
  for (const FileTensor& tensor : reader.tensors()) {
    EXPECT_EQ(std::vector<uint8_t>(tensor.data.begin(), tensor.data.end()),
              kBytes);
  }
}

TEST_F(SafetensorsBuilderTest, LeavesNoHolesWhereTensorsTurnOutOtherwise) {
  // Whether the header has room must not matter for what is in the file.
  for (const uint64_t room : {0, 8, 4096}) {
    const auto builder = Create();
    const size_t a = builder->Reserve(1, "a", Dtype::kU8, {8}).value();
    const size_t dropped = builder->Reserve(2, "b", Dtype::kF32, {2}).value();
    ASSERT_TRUE(builder->PlaceAll(room).ok());
    ASSERT_TRUE(builder->Write(a, 0, kBytes).ok());
    ASSERT_TRUE(builder->Write(dropped, 0, kBytes).ok());
    builder->Drop(dropped);
    builder->SetDtype(a, Dtype::kI8);
    // The name is free again.
    ASSERT_TRUE(builder->Add(3, "b", Dtype::kBF16, {4}, kBytes).ok());
    ASSERT_TRUE(builder->Finish().ok());
    const SafetensorsReader reader = SafetensorsReader::Open(path_).value();
    ASSERT_EQ(reader.tensors().size(), 2u);
    EXPECT_EQ(reader.Find("a")->dtype, Dtype::kI8);
    EXPECT_EQ(reader.Find("b")->dtype, Dtype::kBF16);
    for (const FileTensor& tensor : reader.tensors()) {
      EXPECT_EQ(std::vector<uint8_t>(tensor.data.begin(), tensor.data.end()),
                kBytes);
    }
  }
}

TEST_F(SafetensorsBuilderTest, KeepsTensorsApart) {
  const auto builder = Create();
  const size_t a = builder->Reserve(1, "a", Dtype::kU8, {7}).value();
  ASSERT_TRUE(builder->Reserve(2, "b", Dtype::kU8, {8}).ok());
  EXPECT_FALSE(builder->Reserve(3, "a", Dtype::kU8, {8}).ok());
  EXPECT_FALSE(builder->Reserve(3, "__metadata__", Dtype::kU8, {8}).ok());
  ASSERT_TRUE(builder->PlaceAll(0).ok());
  EXPECT_FALSE(builder->Write(a, 0, kBytes).ok());
  EXPECT_FALSE(
      builder->Write(a, 7, absl::MakeConstSpan(kBytes).subspan(0, 1)).ok());
  EXPECT_FALSE(builder->Add(4, "c", Dtype::kU8, {7}, kBytes).ok());
}

TEST_F(SafetensorsBuilderTest, LeavesTheOldFileUntilItIsFinished) {
  std::ofstream(path_) << "old";
  {
    const auto builder = Create();
    ASSERT_TRUE(builder->Reserve(1, "a", Dtype::kU8, {8}).ok());
    ASSERT_TRUE(builder->PlaceAll(0).ok());
    ASSERT_TRUE(builder->Write(0, 0, kBytes).ok());
    EXPECT_EQ(Bytes(), "old");
  }
  EXPECT_EQ(Bytes(), "old");
}

}  // namespace
}  // namespace quantd::files
