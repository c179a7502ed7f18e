#include "client/cli/printable.h"

#include <string>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

TEST(PrintableTest, NothingFromAFileReachesTheTerminalUnescaped) {
  EXPECT_EQ(Printable("a\x1b[2Jb\n"), "a\\x1b[2Jb\\x0a");
  EXPECT_EQ(Printable("größe"), "größe");
  EXPECT_EQ(Printable("\xC2\x9B"), "\\xc2\\x9b");
  EXPECT_EQ(Printable("\xC2\xA0"), "\xC2\xA0");
  EXPECT_EQ(Printable("a\xFF"), "a\\xff");
  // U+202E and U+2066 turn the direction of writing, U+2028 does not.
  EXPECT_EQ(Printable("\xE2\x80\xAE"), "\\xe2\\x80\\xae");
  EXPECT_EQ(Printable("\xE2\x81\xA6"), "\\xe2\\x81\\xa6");
  EXPECT_EQ(Printable("\xE2\x80\xA8"), "\xE2\x80\xA8");
}

TEST(PrintableTest, LeavesWhatItMade) {
  const std::string once = Printable("a\x1b\xFF\xC2\x9B");
  EXPECT_EQ(Printable(once), once);
}

TEST(PrintableTest, JsonStaysTheSameDocument) {
  const std::string text = "{\n\"\xC2\x9B\xE2\x80\xAE\x7F\xC3\xB6\": 1}";
  const std::string printable = PrintableJson(text);
  EXPECT_EQ(printable, "{\n\"\\u009b\\u202e\\u007f\xC3\xB6\": 1}");
  EXPECT_EQ(nlohmann::json::parse(printable), nlohmann::json::parse(text));
}

}  // namespace
}  // namespace quantd::cli
