#include "client/cpp/element_pairs.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "client/cpp/element_bytes.h"
#include "client/cpp/tensor.h"
#include "client/cpp/tensor_stream.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quantd::internal {
namespace {

using ::testing::ElementsAre;

TEST(PairTypeTest, HoldsBoth) {
  using Type = ElementType;
  EXPECT_EQ(PairType(Type::kFloat16, Type::kFloat16), Type::kFloat16);
  EXPECT_EQ(PairType(Type::kFloat16, Type::kBfloat16), Type::kFloat32);
  EXPECT_EQ(PairType(Type::kFloat32, Type::kBfloat16), Type::kFloat32);
  EXPECT_EQ(PairType(Type::kBfloat16, Type::kFloat64), Type::kFloat64);
}

TEST(WritePairsTest, TakesElementsByTurns) {
  const std::vector<uint8_t> a = {0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 9, 9};
  const std::vector<uint8_t> b = {0, 0, 0, 0, 0, 0, 0, 0, 5, 6, 7, 8, 9, 9};
  std::vector<uint8_t> pairs(8);
  WritePairs({ElementType::kFloat16, a}, {ElementType::kFloat16, b},
             /*first=*/4, /*count=*/2, absl::MakeSpan(pairs));
  EXPECT_THAT(pairs, ElementsAre(1, 2, 5, 6, 3, 4, 7, 8));
  WritePairs({ElementType::kFloat32, a}, {ElementType::kFloat32, b},
             /*first=*/2, /*count=*/1, absl::MakeSpan(pairs));
  EXPECT_THAT(pairs, ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
}

TEST(WritePairsTest, ConvertsEveryHalfExactly) {
  constexpr uint32_t kCount = 1 << 16;
  std::vector<uint16_t> halves(kCount);
  for (uint32_t i = 0; i < kCount; ++i) halves[i] = static_cast<uint16_t>(i);
  const Reference of_halves = {ElementType::kFloat16, BytesOf(halves)};
  const Reference of_brains = {ElementType::kBfloat16, BytesOf(halves)};
  std::vector<uint8_t> bytes(2 * kCount * sizeof(float));
  WritePairs(of_halves, of_brains, 0, kCount, absl::MakeSpan(bytes));
  const std::vector<float> pairs = CopyElements<float>(bytes);
  for (uint32_t i = 0; i < kCount; ++i) {
    const uint32_t exponent = i >> 10 & 31;
    const uint32_t mantissa = i & 1023;
    const float half = pairs[2 * i];
    EXPECT_EQ(std::signbit(half), (i & 0x8000) != 0) << i;
    if (exponent == 31) {
      EXPECT_EQ(std::isinf(half), mantissa == 0) << i;
      EXPECT_EQ(std::isnan(half), mantissa != 0) << i;
    } else {
      const float magnitude =
          exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                        : std::ldexp(static_cast<float>(mantissa + 1024),
                                     static_cast<int>(exponent) - 25);
      EXPECT_EQ(std::fabs(half), magnitude) << i;
    }
    const uint32_t brain = i << 16;
    EXPECT_EQ(std::memcmp(&pairs[2 * i + 1], &brain, sizeof(brain)), 0) << i;
  }
}

TEST(WritePairsTest, WidensToDoubles) {
  const std::vector<double> a = {1.0 / 3, std::numeric_limits<double>::max()};
  const std::vector<float> b = {0.1f, -std::numeric_limits<float>::infinity()};
  std::vector<uint8_t> bytes(32);
  WritePairs({ElementType::kFloat64, BytesOf(a)},
             {ElementType::kFloat32, BytesOf(b)}, 0, 2, absl::MakeSpan(bytes));
  EXPECT_THAT(CopyElements<double>(bytes), ElementsAre(a[0], b[0], a[1], b[1]));
}

}  // namespace
}  // namespace quantd::internal
