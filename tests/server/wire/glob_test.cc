#include "server/wire/glob.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"

namespace quantd::server::glob_test {
namespace {

bool Matches(const std::string& pattern, const std::string& name) {
  const absl::StatusOr<Glob> glob = Glob::Create(pattern);
  EXPECT_TRUE(glob.ok()) << glob.status();
  return glob.ok() && glob->Matches(name);
}

TEST(GlobTest, MatchesTheWholeName) {
  EXPECT_TRUE(Matches("conv1.weight", "conv1.weight"));
  EXPECT_FALSE(Matches("conv1.weight", "conv1.weights"));
  EXPECT_FALSE(Matches("conv1.weight", "xconv1.weight"));
  EXPECT_FALSE(Matches("conv1.weight", "conv1_weight"));
  EXPECT_TRUE(Matches("conv?.weight", "conv1.weight"));
  EXPECT_FALSE(Matches("conv?.weight", "conv.weight"));
  EXPECT_FALSE(Matches("conv?.weight", "conv12.weight"));
  EXPECT_TRUE(Matches("conv*.weight", "conv.weight"));
  EXPECT_TRUE(Matches("conv*.weight", "conv12.weight.weight"));
  EXPECT_FALSE(Matches("conv*.weight", "conv12.weight.bias"));
  EXPECT_TRUE(Matches("*", ""));
  EXPECT_TRUE(Matches("*", "anything"));
  EXPECT_TRUE(Matches("**?**", "x"));
  EXPECT_FALSE(Matches("**?**", ""));
  // "?" is one byte.
  EXPECT_TRUE(Matches("caf??", "caf\xc3\xa9"));
  EXPECT_FALSE(Matches("caf?", "caf\xc3\xa9"));
}

TEST(GlobTest, RefusesPatternsThatAreEmptyOrTooLong) {
  for (const std::string& pattern :
       {std::string(), std::string(Glob::kMaxBytes + 1, '*')}) {
    EXPECT_EQ(core::ErrorReason(Glob::Create(pattern).status()),
              "PATTERN_INVALID");
  }
  EXPECT_TRUE(Matches(std::string(Glob::kMaxBytes, 'x'),
                      std::string(Glob::kMaxBytes, 'x')));
}

TEST(GlobTest, TakesEveryByteAtOnce) {
  std::string pattern = "?";
  for (int byte = 0; byte < 256; ++byte) {
    if (byte != '*' && byte != '?') pattern += static_cast<char>(byte);
  }
  EXPECT_TRUE(Matches(pattern, pattern));
  EXPECT_FALSE(Matches(pattern, pattern + "a"));
}

// One byte of the pattern at a time, with every way that a star can go.
bool Reference(absl::string_view pattern, absl::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] == '*') {
    return Reference(pattern.substr(1), name) ||
           (!name.empty() && Reference(pattern, name.substr(1)));
  }
  return !name.empty() && (pattern[0] == '?' || pattern[0] == name[0]) &&
         Reference(pattern.substr(1), name.substr(1));
}

TEST(GlobTest, AgreesWithTheDefinition) {
  std::mt19937 random(7);
  int matched = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string pattern(1 + random() % 6, ' ');
    for (char& c : pattern) c = "ab*?"[random() % 4];
    std::string name(random() % 8, ' ');
    for (char& c : name) c = "ab"[random() % 2];
    ASSERT_EQ(Matches(pattern, name), Reference(pattern, name))
        << pattern << " " << name;
    matched += Matches(pattern, name);
  }
  EXPECT_GT(matched, 1000);
}

// Backtracking would never end.
TEST(GlobTest, ComesToAnEndWithHostilePatterns) {
  std::string pattern;
  while (pattern.size() + 2 < Glob::kMaxBytes) pattern += "a*";
  pattern += "b";
  const absl::StatusOr<Glob> glob = Glob::Create(pattern);
  ASSERT_TRUE(glob.ok());
  for (int i = 0; i < 100; ++i) {
    EXPECT_FALSE(glob->Matches(std::string(1024, 'a')));
  }
}

}  // namespace
}  // namespace quantd::server::glob_test
