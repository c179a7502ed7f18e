#include "core/types/float_convert.h"

#include <cmath>
#include <cstdint>

#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core {
namespace {

TEST(FloatConvertTest, WidensEveryHalfByItsDefinitionAndBack) {
  for (uint32_t i = 0; i < 65536; ++i) {
    const uint16_t half = static_cast<uint16_t>(i);
    const float wide = HalfToFloat(half);
    const double want = NaiveHalf(half);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(wide)) << i;
      // Quiet, with its sign and payload.
      ASSERT_EQ(FloatToHalf(wide), half | 0x0200) << i;
    } else {
      ASSERT_EQ(double{wide}, want) << i;
      ASSERT_EQ(FloatToHalf(wide), half) << i;
    }
  }
}

TEST(FloatConvertTest, WidensEveryBfloatAndBack) {
  for (uint32_t i = 0; i < 65536; ++i) {
    const uint16_t bfloat = static_cast<uint16_t>(i);
    const float wide = BfloatToFloat(bfloat);
    if (std::isnan(wide)) {
      ASSERT_EQ(FloatToBfloat(wide), bfloat | 0x0040) << i;
    } else {
      ASSERT_EQ(FloatToBfloat(wide), bfloat) << i;
    }
  }
}

TEST(FloatConvertTest, RoundsHalvesToEvenBetweenAllNeighbours) {
  for (uint16_t half = 0; half < 0x7BFF; ++half) {
    const float low = HalfToFloat(half);
    const float high = HalfToFloat(half + 1);
    const float middle = (low + high) / 2;
    const uint16_t even = half % 2 == 0 ? half : half + 1;
    ASSERT_EQ(FloatToHalf(middle), even) << half;
    ASSERT_EQ(FloatToHalf(-middle), even | 0x8000) << half;
    ASSERT_EQ(FloatToHalf(std::nextafter(middle, 0.0f)), half) << half;
    ASSERT_EQ(FloatToHalf(std::nextafter(middle, INFINITY)), half + 1) << half;
  }
  EXPECT_EQ(FloatToHalf(65504), 0x7BFF);
  EXPECT_EQ(FloatToHalf(std::nextafter(65520.0f, 0.0f)), 0x7BFF);
  EXPECT_EQ(FloatToHalf(65520), 0x7C00);
  EXPECT_EQ(FloatToHalf(3e38f), 0x7C00);
  EXPECT_EQ(FloatToHalf(-INFINITY), 0xFC00);
}

TEST(FloatConvertTest, RoundsBfloatsToEvenBetweenAllNeighbours) {
  for (uint16_t bfloat = 0; bfloat < 0x7F7F; ++bfloat) {
    const float middle =
        BitsAs<float>((static_cast<uint32_t>(bfloat) << 16) | 0x8000);
    const uint16_t even = bfloat % 2 == 0 ? bfloat : bfloat + 1;
    ASSERT_EQ(FloatToBfloat(middle), even) << bfloat;
    ASSERT_EQ(FloatToBfloat(std::nextafter(middle, 0.0f)), bfloat) << bfloat;
    ASSERT_EQ(FloatToBfloat(std::nextafter(middle, INFINITY)), bfloat + 1);
  }
  EXPECT_EQ(FloatToBfloat(3.4028234e38f), 0x7F80);
}

}  // namespace
}  // namespace quantd::core
