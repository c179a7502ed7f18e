#include "client/models/outer_maximum.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace quantd {
namespace {

absl::Span<const uint8_t> BytesOf(const std::vector<float>& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()),
          values.size() * sizeof(float)};
}

TEST(OuterMaximumTest, IsTheLargestFiniteMagnitudeOfEachBlock) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {1,  -2, 3,         nan, 0, 0,
                                     -7, 5,  -infinity, 4,   6, nan};
  using Maxima = std::vector<float>;
  const auto maximum = [&](const std::vector<int64_t>& shape,
                           const std::vector<int64_t>& block_size) {
    return OuterMaximum(ElementType::kFloat32, shape, block_size,
                        BytesOf(values));
  };
  EXPECT_EQ(maximum({12}, {}), Maxima({7}));
  EXPECT_EQ(maximum({12}, {5}), Maxima({3, 7, 6}));
  EXPECT_EQ(maximum({3, 4}, {1, 0}), Maxima({3, 7, 6}));
  EXPECT_EQ(maximum({4, 3}, {2, 0}), Maxima({3, 7}));
  EXPECT_EQ(maximum({3, 4}, {0, 3}), Maxima({7, 5}));
  EXPECT_EQ(maximum({3, 2, 2}, {2, 1, 0}), Maxima({2, 7, 4, 6}));
  EXPECT_EQ(maximum({3, 2, 2}, {0, 0, 1}), Maxima({7, 5}));
}

TEST(OuterMaximumTest, IsZeroWhereNothingIsFinite) {
  const std::vector<float> values = {0, -0.0f,
                                     std::numeric_limits<float>::quiet_NaN(),
                                     std::numeric_limits<float>::infinity()};
  EXPECT_EQ(
      OuterMaximum(ElementType::kFloat32, {2, 2}, {1, 0}, BytesOf(values)),
      std::vector<float>({0, 0}));
  EXPECT_EQ(OuterMaximum(ElementType::kFloat32, {0, 2}, {}, {}),
            std::vector<float>({0}));
}

TEST(OuterMaximumTest, TakesNarrowFloatsAtAnyAddress) {
  // Half: -1.5, the largest subnormal, infinity; bfloat16: -1.5, NaN, 2.
  const uint16_t half[] = {0xBE00, 0x03FF, 0x7C00};
  const uint16_t bfloat[] = {0xBFC0, 0x7FC0, 0x4000};
  uint8_t bytes[7];
  std::memcpy(bytes + 1, half, 6);
  EXPECT_EQ(
      OuterMaximum(ElementType::kFloat16, {3}, {}, {bytes + 1, size_t{6}}),
      std::vector<float>({1.5f}));
  EXPECT_EQ(
      OuterMaximum(ElementType::kFloat16, {3}, {1}, {bytes + 1, size_t{6}})[1],
      1023.0f / (1 << 24));
  std::memcpy(bytes + 1, bfloat, 6);
  EXPECT_EQ(
      OuterMaximum(ElementType::kBfloat16, {3}, {}, {bytes + 1, size_t{6}}),
      std::vector<float>({2.0f}));
}

}  // namespace
}  // namespace quantd
