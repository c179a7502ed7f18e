#include "server/guard/size_text.h"

#include <cstdint>
#include <limits>

#include "gtest/gtest.h"

namespace quantd::server {
namespace {

TEST(FormatSizeTest, TakesTheLargestUnitThatFits) {
  EXPECT_EQ(FormatSize(0), "0");
  EXPECT_EQ(FormatSize(1023), "1023");
  EXPECT_EQ(FormatSize(1024), "1KiB");
  EXPECT_EQ(FormatSize(1536), "1536");
  EXPECT_EQ(FormatSize(1536 << 10), "1536KiB");
  EXPECT_EQ(FormatSize(int64_t{3} << 40), "3TiB");
  EXPECT_EQ(FormatSize(int64_t{1} << 50), "1024TiB");
}

TEST(ParseSizeTest, ReadsWhatFormatSizeWrites) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  for (const int64_t bytes :
       {int64_t{0}, int64_t{1}, int64_t{4096}, int64_t{5} << 20,
        (int64_t{1} << 40) + 1, int64_t{7} << 41, kMax}) {
    int64_t parsed = -1;
    EXPECT_TRUE(ParseSize(FormatSize(bytes), &parsed)) << bytes;
    EXPECT_EQ(parsed, bytes);
  }
  int64_t parsed = 0;
  EXPECT_TRUE(ParseSize("10 GiB", &parsed));
  EXPECT_EQ(parsed, int64_t{10} << 30);
}

TEST(ParseSizeTest, RefusesWhatIsNoSizeOrTooLarge) {
  int64_t parsed = 7;
  for (const char* text :
       {"", " ", "KiB", "x", "-1", "1.5GiB", "1MB", "1kib", "1 K", "0x10",
        "9223372036854775808", "8388608TiB", "9007199254740992KiB"}) {
    EXPECT_FALSE(ParseSize(text, &parsed)) << text;
  }
  EXPECT_EQ(parsed, 7);
  EXPECT_TRUE(ParseSize("8388607TiB", &parsed));
  EXPECT_TRUE(ParseSize("9007199254740991KiB", &parsed));
}

}  // namespace
}  // namespace quantd::server
