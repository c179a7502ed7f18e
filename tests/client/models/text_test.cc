#include "client/models/text.h"

#include <cstddef>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace quantd {
namespace {

TEST(TextTest, NamesSortAsPeopleCount) {
  const std::vector<std::string> kSorted = {
      "",          "a",        "a.2",        "a.02",        "a.10",
      "a.10.w",    "a.b",      "layers.2.w", "layers.10.b", "layers.10.w",
      "layers.9x", "layers.x", "z",          "\xff"};
  for (size_t i = 0; i < kSorted.size(); ++i) {
    for (size_t j = 0; j < kSorted.size(); ++j) {
      // Both of these are before or behind the other in a way that holds.
      if (NaturalLess(kSorted[i], kSorted[j])) {
        EXPECT_FALSE(NaturalLess(kSorted[j], kSorted[i]));
      } else if (i != j) {
        EXPECT_TRUE(NaturalLess(kSorted[j], kSorted[i]));
      }
    }
  }
  EXPECT_TRUE(NaturalLess("layers.2", "layers.10"));
  EXPECT_TRUE(NaturalLess("layers.2.weight", "layers.10.bias"));
  EXPECT_TRUE(NaturalLess("layers.99999999999999999999999998",
                          "layers.99999999999999999999999999"));
  EXPECT_TRUE(NaturalLess("a", "a1"));
  EXPECT_FALSE(NaturalLess("x", "x"));
}

TEST(TextTest, ThousandsAreApart) {
  EXPECT_EQ(CountText(0), "0");
  EXPECT_EQ(CountText(999), "999");
  EXPECT_EQ(CountText(1234567), "1,234,567");
}

}  // namespace
}  // namespace quantd
