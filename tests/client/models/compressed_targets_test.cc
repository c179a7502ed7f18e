#include "client/models/compressed_targets.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/errors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quantd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

// A configuration of groups with these targets; the bits of each are its place.
files::Json ConfigOf(const std::vector<std::vector<std::string>>& groups) {
  files::Json config;
  for (size_t i = 0; i < groups.size(); ++i) {
    config["config_groups"][absl::StrCat("group_", i)] = {
        {"targets", groups[i]}, {"weights", {{"num_bits", i}}}};
  }
  return config;
}

// The group of each module, or -1.
std::vector<std::pair<std::string, int>> Match(
    const files::Json& config, const std::vector<std::string>& modules) {
  CompressedSchemes schemes;
  for (const std::string& module : modules) schemes[module] = nullptr;
  EXPECT_EQ(MatchTargets(config, "config.json", &schemes), absl::OkStatus());
  std::vector<std::pair<std::string, int>> found;
  for (const auto& [module, scheme] : schemes) {
    found.emplace_back(
        module, scheme == nullptr ? -1 : scheme->at("num_bits").get<int>());
  }
  return found;
}

TEST(MatchTargetsTest, TheFirstGroupThatTargetsAModuleHasIt) {
  EXPECT_THAT(
      Match(ConfigOf({{"a.q"}, {"a.q", "a.k"}, {"Linear"}}),
            {"a.q", "a.k", "b"}),
      UnorderedElementsAre(Pair("a.q", 0), Pair("a.k", 1), Pair("b", 2)));
}

TEST(MatchTargetsTest, NamesComeBeforePatternsAndThoseBeforeClasses) {
  EXPECT_THAT(
      Match(ConfigOf(
                {{"Linear"}, {"re:.*down_proj"}, {"re:.*proj", "a.down_proj"}}),
            {"a.down_proj", "b.down_proj", "b.up_proj", "c"}),
      UnorderedElementsAre(Pair("a.down_proj", 2), Pair("b.down_proj", 1),
                           Pair("b.up_proj", 2), Pair("c", 0)));
}

TEST(MatchTargetsTest, ANameIsTheWholeName) {
  EXPECT_THAT(Match(ConfigOf({{"q", "a.q."}}), {"a.q"}),
              ElementsAre(Pair("a.q", -1)));
}

TEST(MatchTargetsTest, APatternMatchesTheBeginningOfANameAsInPython) {
  EXPECT_THAT(Match(ConfigOf({{"re:a[.]q"}, {"re:.*down"}}),
                    {"a.q_proj", "b.a.q", "axq", "x.down_proj"}),
              UnorderedElementsAre(Pair("a.q_proj", 0), Pair("b.a.q", -1),
                                   Pair("axq", -1), Pair("x.down_proj", 1)));
}

TEST(MatchTargetsTest, ClassesOfModulesStandForAll) {
  for (const char* name : {"Linear", "Conv1d", "Conv2d"}) {
    EXPECT_THAT(Match(ConfigOf({{name}}), {"a"}), ElementsAre(Pair("a", 0)));
  }
  EXPECT_THAT(Match(ConfigOf({{"Embedding"}}), {"a"}),
              ElementsAre(Pair("a", -1)));
}

TEST(MatchTargetsTest, PassesOverWhatIsNoGroup) {
  const files::Json config = files::Json::parse(R"({"config_groups": {
      "group_0": 7,
      "group_1": {"targets": "Linear", "weights": {"num_bits": 8}},
      "group_2": {"targets": ["Linear"], "weights": null},
      "group_3": {"targets": [1, null], "weights": {"num_bits": 8}},
      "group_4": {"targets": ["Linear"], "weights": {"num_bits": 0}}}})");
  EXPECT_THAT(Match(config, {"a"}), ElementsAre(Pair("a", 0)));
  for (const char* text : {"{}", R"({"config_groups": []})"}) {
    EXPECT_THAT(Match(files::Json::parse(text), {"a"}),
                ElementsAre(Pair("a", -1)));
  }
}

TEST(MatchTargetsTest, RefusesPatternsThatCannotBeMatchedInTime) {
  std::vector<std::string> many(257, "re:x");
  for (const auto& [targets, what] :
       std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"re:(?=x)"}, "(?=x)"},
           {{"re:" + std::string(1025, 'x')}, "1025 bytes"},
           {many, "more than 256"},
           {{"re:((x{100}){100}){100}"}, "RE2"}}) {
    CompressedSchemes schemes = {{"a", nullptr}};
    const absl::Status status =
        MatchTargets(ConfigOf({targets}), "config.json", &schemes);
    EXPECT_EQ(ErrorReason(status), "FILE_UNSUPPORTED") << what;
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
    EXPECT_THAT(std::string(status.message()), HasSubstr("config.json"));
  }
  // Those behind the last module are not looked at.
  many.insert(many.begin(), "a");
  EXPECT_THAT(Match(ConfigOf({many}), {"a"}), ElementsAre(Pair("a", 0)));
}

}  // namespace
}  // namespace quantd
