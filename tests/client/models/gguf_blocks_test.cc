#include "client/models/gguf_blocks.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "client/files/dtype.h"
#include "client/files/gguf_encoders.h"
#include "client/files/gguf_types.h"
#include "client/files/safetensors.h"
#include "client/models/spec_syntax.h"
#include "gtest/gtest.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd {
namespace {

constexpr int64_t kRows = 100;
constexpr int64_t kColumns = 512;
constexpr size_t kCount = kRows * kColumns;

// Numbers that bfloat16 and float16 hold.
template <typename T>
std::vector<T> Numbers() {
  std::vector<T> numbers(kCount);
  uint64_t state = 1;
  for (T& number : numbers) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    number = (static_cast<T>(state >> 57) - 64) / 32;
  }
  return numbers;
}

// `numbers` must stay.
template <typename T>
files::FileTensor TensorOf(files::Dtype dtype, const std::vector<T>& numbers) {
  files::FileTensor tensor = {"w", dtype, {kRows, kColumns}, {}};
  tensor.data = {reinterpret_cast<const uint8_t*>(numbers.data()),
                 numbers.size() * sizeof(T)};
  return tensor;
}

std::vector<uint8_t> Blocks(const files::FileTensor& tensor,
                            v1::ErrorMetrics* metrics) {
  const absl::StatusOr<std::vector<uint8_t>> blocks =
      MakeGgufBlocks(tensor, *files::FindGgufType("q4_K"), metrics);
  EXPECT_TRUE(blocks.ok()) << blocks.status();
  return blocks.ok() ? *blocks : std::vector<uint8_t>();
}

TEST(GgufBlocksTest, AreThoseOfTheEncoderOneByOne) {
  const std::vector<float> numbers = Numbers<float>();
  v1::ErrorMetrics metrics;
  const std::vector<uint8_t> blocks =
      Blocks(TensorOf(files::Dtype::kF32, numbers), &metrics);
  const files::GgufType& type = *files::FindGgufType("q4_K");
  const auto block_bytes = static_cast<size_t>(type.block_bytes);
  ASSERT_EQ(blocks.size(), kCount / 256 * block_bytes);
  double signal = 0;
  double noise = 0;
  double largest = 0;
  for (size_t b = 0; b < kCount / 256; ++b) {
    std::vector<uint8_t> block(block_bytes);
    const std::vector<float> weights(256, 1);
    files::FindGgufEncoder(type)->encode(&numbers[b * 256], weights.data(),
                                         block.data());
    ASSERT_EQ(std::memcmp(&blocks[b * block_bytes], block.data(), block_bytes),
              0)
        << b;
    float decoded[256];
    type.decode(block.data(), decoded);
    for (size_t i = 0; i < 256; ++i) {
      const double error = double{decoded[i]} - double{numbers[b * 256 + i]};
      signal += double{numbers[b * 256 + i]} * double{numbers[b * 256 + i]};
      noise += error * error;
      largest = std::max(largest, std::fabs(error));
    }
  }
  EXPECT_EQ(metrics.count(), kCount);
  EXPECT_NEAR(metrics.sqnr_db(), 10 * std::log10(signal / noise), 1e-9);
  EXPECT_NEAR(metrics.mean_squared_error(), noise / kCount, 1e-12);
  EXPECT_EQ(metrics.max_absolute_error(), largest);
}

// By the columns of their elements, and by nothing but ratios.
TEST(GgufBlocksTest, AreWeighedByColumns) {
  const std::vector<float> numbers = Numbers<float>();
  std::vector<double> importance;
  for (int64_t i = 0; i < kColumns; ++i) {
    importance.push_back(i % 3 == 0 ? 0 : std::exp2(i % 11));
  }
  const files::GgufType& type = *files::FindGgufType("q4_K");
  v1::ErrorMetrics metrics;
  const auto make = [&](const std::vector<double>& weights) {
    return *MakeGgufBlocks(TensorOf(files::Dtype::kF32, numbers), type,
                           &metrics, weights);
  };
  const std::vector<uint8_t> blocks = make(importance);
  EXPECT_NE(blocks, make({}));
  const auto block_bytes = static_cast<size_t>(type.block_bytes);
  for (size_t b = 0; b < kCount / 256; ++b) {
    std::vector<float> weights;
    const size_t column = b * 256 % kColumns;
    const double largest = *std::max_element(importance.begin() + column,
                                             importance.begin() + column + 256);
    for (size_t i = column; i < column + 256; ++i) {
      weights.push_back(
          static_cast<float>(std::max(importance[i] / largest, 1e-6)));
    }
    std::vector<uint8_t> block(block_bytes);
    files::FindGgufEncoder(type)->encode(&numbers[b * 256], weights.data(),
                                         block.data());
    ASSERT_EQ(std::memcmp(&blocks[b * block_bytes], block.data(), block_bytes),
              0)
        << b;
  }
  for (double& one : importance) one *= 0x1p300;
  EXPECT_EQ(make(importance), blocks);
  EXPECT_EQ(make(std::vector<double>(kColumns, 0)), make({}));
}

TEST(GgufBlocksTest, AreForRowsOfWholeBlocks) {
  const absl::StatusOr<SpecTemplate> spec = ParseSpecOrGgufType("q6_K");
  ASSERT_TRUE(spec.ok()) << spec.status();
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{3, 512}, {256}, {2, 0}}) {
    EXPECT_EQ(BlockTypeFor(*spec, shape), files::FindGgufType("q6_K"));
  }
  EXPECT_EQ(BlockTypeFor(*spec, {256, 96}), files::FindGgufType("q8_0"));
  EXPECT_EQ(BlockTypeFor(*ParseSpecOrGgufType("q4_K"), {32}),
            files::FindGgufType("q5_0"));
  EXPECT_EQ(BlockTypeFor(*ParseSpecOrGgufType("q5_K"), {2, 32}),
            files::FindGgufType("q5_1"));
  EXPECT_EQ(BlockTypeFor(*ParseSpecOrGgufType("q4_0"), {2, 96}),
            files::FindGgufType("q4_0"));
  EXPECT_EQ(BlockTypeFor(*ParseSpecOrGgufType("q4_0"), {96, 40}), nullptr);
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{256, 40}, {100}, {}}) {
    EXPECT_EQ(BlockTypeFor(*spec, shape), nullptr);
  }
  EXPECT_EQ(BlockTypeFor(*ParseSpecOrGgufType("int8"), {3, 512}), nullptr);
}

TEST(GgufBlocksTest, AreTheSameFromAllTypesOfElements) {
  const std::vector<float> numbers = Numbers<float>();
  const std::vector<double> doubles = Numbers<double>();
  std::vector<uint16_t> halves;
  std::vector<uint16_t> brains;
  for (const float number : numbers) {
    halves.push_back(files::NearestHalf(number));
    uint32_t bits = 0;
    std::memcpy(&bits, &number, sizeof(bits));
    brains.push_back(static_cast<uint16_t>(bits >> 16));
  }
  v1::ErrorMetrics metrics;
  const std::vector<uint8_t> expected =
      Blocks(TensorOf(files::Dtype::kF32, numbers), &metrics);
  EXPECT_EQ(Blocks(TensorOf(files::Dtype::kF64, doubles), &metrics), expected);
  EXPECT_EQ(Blocks(TensorOf(files::Dtype::kF16, halves), &metrics), expected);
  EXPECT_EQ(Blocks(TensorOf(files::Dtype::kBF16, brains), &metrics), expected);
}

TEST(GgufBlocksTest, HaveNoPlaceForWhatIsNotFinite) {
  v1::ErrorMetrics metrics;
  for (const float wrong : {std::numeric_limits<float>::quiet_NaN(),
                            -std::numeric_limits<float>::infinity(), 3e6F}) {
    std::vector<float> numbers = Numbers<float>();
    // The first one is told, whichever thread finds one first.
    numbers[40000] = wrong;
    numbers[50000] = wrong;
    const absl::Status status =
        MakeGgufBlocks(TensorOf(files::Dtype::kF32, numbers),
                       *files::FindGgufType("q4_K"), &metrics)
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(status.message(), "element 40000 is"))
        << status;
  }
  // A minimum in float16 has no more.
  std::vector<float> numbers = Numbers<float>();
  numbers[7] = 65505;
  const files::FileTensor tensor = TensorOf(files::Dtype::kF32, numbers);
  EXPECT_TRUE(absl::StrContains(
      MakeGgufBlocks(tensor, *files::FindGgufType("q5_1"), &metrics)
          .status()
          .message(),
      "q5_1 have finite ones of at most 65504"));
  EXPECT_TRUE(
      MakeGgufBlocks(tensor, *files::FindGgufType("q5_0"), &metrics).ok());
  std::vector<double> doubles = Numbers<double>();
  doubles[3] = 1e300;
  EXPECT_FALSE(MakeGgufBlocks(TensorOf(files::Dtype::kF64, doubles),
                              *files::FindGgufType("q6_K"), &metrics)
                   .ok());
}

}  // namespace
}  // namespace quantd
