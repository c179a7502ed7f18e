#include "client/files/errors.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace quantd::files {
namespace {

TEST(QuotedNameTest, QuotesAndEscapes) {
  EXPECT_EQ(QuotedName("fc1.weight"), "\"fc1.weight\"");
  EXPECT_EQ(QuotedName(""), "\"\"");
  EXPECT_EQ(QuotedName("\x1B[2J\"\n"), "\"\\x1b[2J\\\"\\n\"");
  EXPECT_EQ(QuotedName("gr\u00F6\u00DFe"), "\"gr\u00F6\u00DFe\"");
}

TEST(QuotedNameTest, CutsLongNames) {
  EXPECT_EQ(QuotedName(std::string(200, 'x')),
            "\"" + std::string(200, 'x') + "\"");
  EXPECT_EQ(QuotedName(std::string(201, 'x')),
            "\"" + std::string(200, 'x') + "...\"");
}

// Of two to four bytes, wherever the cut falls.
TEST(QuotedNameTest, CutsBetweenCharacters) {
  for (const std::string character : {"\u00E4", "\u20AC", "\U0001F600"}) {
    for (size_t before = 195; before < 200; ++before) {
      std::string name(before, 'x');
      std::string expected = name;
      for (int i = 0; i < 10; ++i) {
        name += character;
        if (name.size() <= 200) expected = name;
      }
      EXPECT_EQ(QuotedName(name), "\"" + expected + "...\"") << before;
    }
  }
}

// What is no UTF-8 at all ends nevertheless.
TEST(QuotedNameTest, CutsBytesThatNoCharacterBeginsWith) {
  EXPECT_EQ(QuotedName(std::string(300, '\x80')), "\"...\"");
}

TEST(GotInsteadTest, TellsWhatItKnows) {
  const auto got = [](const std::string& text) {
    return GotInstead(
        {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  };
  EXPECT_EQ(got("version https://git-lfs.github.com/spec/v1\noid"),
            ", got a pointer of git-lfs; `git lfs pull` gets the file");
  EXPECT_EQ(got("404"), ", got text that begins with \"404\"");
  EXPECT_EQ(got(std::string(40, 'a') + '\0'),
            ", got text that begins with \"" + std::string(40, 'a') + "\"");
  EXPECT_EQ(got(""), "");
  EXPECT_EQ(got(std::string("GGUF\0", 5)), "");
  EXPECT_EQ(got("caf\xc3\xa9"), "");
}

}  // namespace
}  // namespace quantd::files
