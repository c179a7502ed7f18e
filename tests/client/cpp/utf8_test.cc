#include "client/cpp/utf8.h"

#include <cstdint>
#include <string>

#include "gtest/gtest.h"

namespace quantd::internal {
namespace {

// As UTF-8 would have it, whatever `code` is.
std::string Encoded(uint32_t code) {
  const auto tail = [code](int shift) {
    return static_cast<char>(0x80 | (code >> shift & 0x3F));
  };
  if (code < 0x80) return {static_cast<char>(code)};
  if (code < 0x800) return {static_cast<char>(0xC0 | code >> 6), tail(0)};
  if (code < 0x10000) {
    return {static_cast<char>(0xE0 | code >> 12), tail(6), tail(0)};
  }
  return {static_cast<char>(0xF0 | code >> 18), tail(12), tail(6), tail(0)};
}

TEST(IsValidUtf8Test, TakesEveryCodePointButSurrogates) {
  for (uint32_t code = 0; code < 0x120000; ++code) {
    const bool valid = code <= 0x10FFFF && (code < 0xD800 || code > 0xDFFF);
    ASSERT_EQ(IsValidUtf8(Encoded(code)), valid) << std::hex << code;
  }
}

TEST(IsValidUtf8Test, RefusesOverlongForms) {
  EXPECT_FALSE(IsValidUtf8("\xC0\x80"));
  EXPECT_FALSE(IsValidUtf8("\xC1\xBF"));
  EXPECT_FALSE(IsValidUtf8("\xE0\x9F\xBF"));
  EXPECT_FALSE(IsValidUtf8("\xF0\x8F\xBF\xBF"));
}

TEST(IsValidUtf8Test, RefusesWhatIsCutOrStandsAlone) {
  for (const uint32_t code : {0xE9u, 0x6F22u, 0x1F600u}) {
    const std::string text = Encoded(code);
    for (size_t size = 1; size < text.size(); ++size) {
      EXPECT_FALSE(IsValidUtf8(text.substr(0, size)));
      EXPECT_FALSE(IsValidUtf8(text.substr(0, size) + "a"));
      EXPECT_FALSE(IsValidUtf8(text.substr(size)));
    }
    EXPECT_TRUE(IsValidUtf8("a" + text + "b" + text));
  }
  EXPECT_FALSE(IsValidUtf8("\xFF"));
  EXPECT_TRUE(IsValidUtf8(""));
  EXPECT_TRUE(IsValidUtf8(std::string("a\0b", 3)));
}

}  // namespace
}  // namespace quantd::internal
