#include "core/formats/grid.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "core/formats/codec.h"
#include "core/formats/number_format.h"
#include "gtest/gtest.h"

namespace quantd::core::grid_test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The limits are where the definition changes its answer, to the last bit.
template <typename T>
void ExpectLimits(const FloatGrid& grid, const FloatLayout& layout) {
  const FloatGrid::Limits<T>& limits = grid.limits<T>();
  const auto rounds_over = [&layout](T x) {
    const double beyond = DecodeFloat(layout, EncodeFloat(layout, x, false));
    return !(std::fabs(beyond) <= LargestFloat(layout));
  };
  EXPECT_EQ(limits.largest, LargestFloat(layout));
  const T below = std::nextafter(limits.overflow, T{0});
  if (layout.specials != FloatSpecials::kNone) {
    EXPECT_TRUE(rounds_over(limits.overflow));
    EXPECT_FALSE(rounds_over(below));
  }
  EXPECT_GT(limits.overflow, limits.largest);
  EXPECT_EQ(limits.smallest_normal, std::ldexp(T{1}, 1 - layout.bias));
}

TEST(FloatGridTest, LimitsAreThoseOfTheDefinition) {
  for (const FormatInfo& format : AllFormats()) {
    if (format.kind != CodeKind::kFloat) continue;
    SCOPED_TRACE(format.name);
    const FloatLayout& layout = format.float_layout;
    for (const bool no_saturation : {false, true}) {
      if (no_saturation && layout.specials == FloatSpecials::kNone) continue;
      const FloatGrid grid(layout, no_saturation);
      ExpectLimits<float>(grid, layout);
      ExpectLimits<double>(grid, layout);
      const auto overflow =
          static_cast<int32_t>(EncodeFloat(layout, kInfinity, !no_saturation));
      EXPECT_EQ(grid.overflow_code, overflow);
      EXPECT_EQ(std::isnan(grid.overflow_value), !grid.overflow_has_sign);
      if (!no_saturation) {
        EXPECT_EQ(grid.overflow_value, LargestFloat(layout));
      }
    }
  }
}

template <typename T>
int IndexOf(const CodebookGrid& grid, T x) {
  int index = 0;
  while (index < grid.count - 1 && grid.threshold<T>()[index] < x) ++index;
  return index;
}

TEST(CodebookGridTest, ThresholdsDivideAsTheDefinitionDoes) {
  const std::vector<std::vector<float>> codebooks = {
      {0, 1},
      {-1, -0.3f, -0.1f, -1e-4f, 0, 0.25f, 1},
      {1, std::nextafter(1.0f, 2.0f)},
      {-std::numeric_limits<float>::max(), std::numeric_limits<float>::max()}};
  for (const std::vector<float>& codebook : codebooks) {
    const CodebookGrid grid(codebook);
    ASSERT_EQ(grid.count, static_cast<int>(codebook.size()));
    EXPECT_GE(1 << grid.search_steps, grid.count);
    for (int k = 0; k + 1 < grid.count; ++k) {
      const float f = grid.threshold_float[k];
      const double d = grid.threshold_double[k];
      for (const float x :
           {f, std::nextafter(f, kInfinity), std::nextafter(f, -kInfinity)}) {
        EXPECT_EQ(IndexOf<float>(grid, x),
                  static_cast<int>(EncodeCodebook(codebook, x)))
            << k;
      }
      for (const double x : {d, std::nextafter(d, double{kInfinity}),
                             std::nextafter(d, -double{kInfinity})}) {
        EXPECT_EQ(IndexOf<double>(grid, x),
                  static_cast<int>(EncodeCodebook(codebook, x)))
            << k;
      }
    }
    EXPECT_EQ(grid.threshold_float[grid.count - 1], kInfinity);
  }
}

TEST(CodebookGridTest, CoarseThresholdsAreEverySixteenth) {
  std::vector<float> codebook(kMaxLevels);
  for (int k = 0; k < kMaxLevels; ++k) codebook[k] = static_cast<float>(k);
  const CodebookGrid grid(codebook);
  EXPECT_EQ(grid.search_steps, 8);
  for (int k = 0; k < 15; ++k) {
    EXPECT_EQ(grid.coarse_threshold[k], grid.threshold_float[16 * k + 15]);
  }
  EXPECT_EQ(grid.coarse_threshold[16], kInfinity);
}

}  // namespace
}  // namespace quantd::core::grid_test
