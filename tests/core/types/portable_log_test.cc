#include "core/types/portable_log.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "gtest/gtest.h"

namespace quantd::core {
namespace {

TEST(PortableLogTest, IsAsGoodAsTheLibrarys) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 100000; ++i) {
    const double x = std::ldexp(1.0 + (random() >> 12) * 0x1p-52,
                                static_cast<int>(random() % 200) - 100);
    ASSERT_NEAR(PortableLog(x), std::log(x),
                0x1p-51 * std::max(1.0, std::fabs(std::log(x))));
  }
  for (const double near :
       {1 - 0x1p-53, 1.0, 1 + 0x1p-52, 1 + 0x1p-30,
        std::numeric_limits<double>::max(), 0x1p-1022, 0x1p-1060, 0x1p-1074}) {
    EXPECT_NEAR(PortableLog(near), std::log(near),
                0x1p-51 * std::fabs(std::log(near)));
  }
}

TEST(PortableLogTest, GivesDecibelsOfAnyRatio) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(Decibels(1, 1), 0);
  EXPECT_DOUBLE_EQ(Decibels(1, 10), -10);
  EXPECT_DOUBLE_EQ(Decibels(100, 1), 20);
  EXPECT_DOUBLE_EQ(Decibels(5e-324, 1), 10 * std::log10(5e-324));
  EXPECT_DOUBLE_EQ(Decibels(1e308, 1), 3080);
  EXPECT_EQ(Decibels(1, 0), kInfinity);
  EXPECT_EQ(Decibels(0, 0), kInfinity);
  EXPECT_EQ(Decibels(0, 1), -kInfinity);
  EXPECT_EQ(Decibels(5e-324, 1e300), -kInfinity);
  EXPECT_EQ(Decibels(1e300, 1e-300), kInfinity);
  EXPECT_EQ(Decibels(1, kInfinity), -kInfinity);
  EXPECT_TRUE(std::isnan(Decibels(kInfinity, kInfinity)));
  EXPECT_TRUE(
      std::isnan(Decibels(std::numeric_limits<double>::quiet_NaN(), 1)));
}

}  // namespace
}  // namespace quantd::core
