#include "client/files/dtype.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "gtest/gtest.h"

namespace quantd::files {
namespace {

TEST(DtypeTest, HasItsOwnNameAndSize) {
  EXPECT_EQ(DtypeName(Dtype::kBF16), "BF16");
  EXPECT_EQ(DtypeSizeBytes(Dtype::kF8E4M3), 1);
  EXPECT_EQ(DtypeSizeBytes(Dtype::kU64), 8);
  for (int value = 0; value <= static_cast<int>(Dtype::kF6E3M2); ++value) {
    const auto dtype = static_cast<Dtype>(value);
    EXPECT_EQ(ParseDtype(DtypeName(dtype)), dtype) << DtypeName(dtype);
  }
  EXPECT_EQ(ParseDtype("bf16"), std::nullopt);
  EXPECT_EQ(ParseDtype(""), std::nullopt);
}

TEST(TensorSizeBytesTest, IsNothingForWhatDoesNotFit) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(TensorSizeBytes(Dtype::kF64, {}), 8);
  EXPECT_EQ(TensorSizeBytes(Dtype::kF16, {3, 5}), 30);
  EXPECT_EQ(TensorSizeBytes(Dtype::kU8, {kMax}), kMax);
  EXPECT_EQ(TensorSizeBytes(Dtype::kI16, {kMax}), std::nullopt);
  EXPECT_EQ(TensorSizeBytes(Dtype::kU8, {int64_t{1} << 32, int64_t{1} << 32}),
            std::nullopt);
  EXPECT_EQ(TensorSizeBytes(Dtype::kU8, {2, -1}), std::nullopt);
  EXPECT_EQ(TensorSizeBytes(Dtype::kF32, {4, 0}), 0);
  EXPECT_EQ(TensorSizeBytes(Dtype::kC64, {4}), 32);
  EXPECT_EQ(TensorSizeBytes(Dtype::kF4, {3, 6}), 9);
  EXPECT_EQ(TensorSizeBytes(Dtype::kF4, {kMax - 1}), kMax / 2);
  EXPECT_EQ(TensorSizeBytes(Dtype::kF6E2M3, {4}), 3);
  // No whole bytes.
  EXPECT_EQ(TensorSizeBytes(Dtype::kF4, {3}), std::nullopt);
  EXPECT_EQ(TensorSizeBytes(Dtype::kF6E3M2, {6}), std::nullopt);
  // No dimension is too large beside a 0, but none is negative.
  EXPECT_EQ(TensorSizeBytes(Dtype::kU8, {0, -1}), std::nullopt);
}

// By the definition of binary16 in IEEE 754.
float HalfByDefinition(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10 & 0x1F);
  const auto mantissa = static_cast<float>(bits & 0x3FF);
  if (exponent == 31) {
    return mantissa == 0 ? INFINITY : std::numeric_limits<float>::quiet_NaN();
  }
  return exponent == 0 ? std::ldexp(mantissa, -24)
                       : std::ldexp(mantissa + 1024, exponent - 25);
}

TEST(ReadHalfTest, ReadsAllPatterns) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint8_t bytes[] = {static_cast<uint8_t>(bits),
                             static_cast<uint8_t>(bits >> 8)};
    const float got = ReadHalf(bytes);
    const float want = HalfByDefinition(bits);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
    } else {
      EXPECT_EQ(std::abs(got), want) << bits;
    }
    EXPECT_EQ(std::signbit(got), (bits & 0x8000) != 0) << bits;
  }
}

TEST(NearestHalfTest, GivesEveryNumberItsOwnBits) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint8_t bytes[] = {static_cast<uint8_t>(bits),
                             static_cast<uint8_t>(bits >> 8)};
    const float value = ReadHalf(bytes);
    // Zero has one sign.
    if (!std::isfinite(value) || bits == 0x8000) continue;
    EXPECT_EQ(NearestHalf(value), bits);
    // A quarter of a step off, and half a step off from an even one.
    if ((bits & 0x7FFF) == 0x7BFF) continue;
    const uint8_t next[] = {static_cast<uint8_t>(bits + 1),
                            static_cast<uint8_t>((bits + 1) >> 8)};
    const float step = ReadHalf(next) - value;
    EXPECT_EQ(NearestHalf(value + step / 4), bits);
    EXPECT_EQ(NearestHalf(value + step / 2), bits + bits % 2);
  }
}

template <typename T>
std::vector<T> As(const std::vector<uint8_t>& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

TEST(WidenTest, KeepsEveryValue) {
  const std::vector<uint8_t> halves = {0x00, 0x3C, 0x01, 0x80};  // 1, -2^-24
  EXPECT_EQ(As<float>(Widen(Dtype::kF16, halves, Dtype::kF32)),
            (std::vector<float>{1, -0x1p-24f}));
  EXPECT_EQ(As<double>(Widen(Dtype::kF16, halves, Dtype::kF64)),
            (std::vector<double>{1, -0x1p-24}));
  const std::vector<uint8_t> brains = {0x80, 0x3F, 0x01, 0x00};  // 1, 2^-133
  EXPECT_EQ(As<float>(Widen(Dtype::kBF16, brains, Dtype::kF32)),
            (std::vector<float>{1, 0x1p-133f}));
  const std::vector<uint8_t> floats = {0xFF, 0xFF, 0x7F, 0x7F};
  EXPECT_EQ(As<double>(Widen(Dtype::kF32, floats, Dtype::kF64)),
            (std::vector<double>{std::numeric_limits<float>::max()}));
  EXPECT_EQ(Widen(Dtype::kF32, floats, Dtype::kF32), floats);
  EXPECT_TRUE(Widen(Dtype::kF16, {}, Dtype::kF32).empty());
}

}  // namespace
}  // namespace quantd::files
