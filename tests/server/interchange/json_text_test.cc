#include "server/interchange/json_text.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quantd::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// `text` in pieces of `step` bytes, with empty ones between.
std::vector<absl::string_view> Pieces(absl::string_view text, size_t step) {
  std::vector<absl::string_view> pieces;
  for (size_t at = 0; at < text.size(); at += step) {
    pieces.push_back(text.substr(at, step));
    pieces.emplace_back();
  }
  return pieces;
}

absl::Status Charge(absl::string_view text, int64_t* most) {
  *most = 0;
  return ChargeJsonMemory(Pieces(text, 3), [most](int64_t bytes) {
    EXPECT_GE(bytes, *most);
    *most = bytes;
    return absl::OkStatus();
  });
}

TEST(ChargeJsonMemoryTest, CountsEveryValue) {
  int64_t empty = 0;
  int64_t few = 0;
  int64_t many = 0;
  ASSERT_TRUE(Charge(R"({"a": []})", &empty).ok());
  ASSERT_TRUE(Charge(R"({"a": [1, 2, 3]})", &few).ok());
  std::string list = R"({"a": [0)";
  for (int i = 0; i < 10000; ++i) absl::StrAppend(&list, ",", i);
  ASSERT_TRUE(Charge(list + "]}", &many).ok());
  EXPECT_GT(few, empty);
  EXPECT_GT(many, 10000 * static_cast<int64_t>(sizeof(Json)));
  int64_t text = 0;
  ASSERT_TRUE(
      Charge(R"({"a": [")" + std::string(100000, 'x') + R"("]})", &text).ok());
  EXPECT_GT(text, 100000);
}

TEST(ChargeJsonMemoryTest, RefusesWhatIsNoJson) {
  int64_t most = 0;
  for (const char* text :
       {"", "{", "{]", "{\"a\":1,}", "[1] 2", "{\"a\":\"\xff\"}", "nan"}) {
    EXPECT_EQ(core::ErrorReason(Charge(text, &most)), "INTERCHANGE_INVALID")
        << text;
  }
  EXPECT_THAT(std::string(Charge(R"({"k": 1, "k": 2})", &most).message()),
              HasSubstr("\"k\""));
  const auto nested = [](int depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_TRUE(Charge(nested(kMaxJsonDepth), &most).ok());
  EXPECT_FALSE(Charge(nested(kMaxJsonDepth + 1), &most).ok());
}

TEST(ChargeJsonMemoryTest, StopsWhereThereIsNoRoom) {
  std::string list = "[0";
  for (int i = 0; i < 100000; ++i) absl::StrAppend(&list, ",", i);
  int calls = 0;
  const absl::Status status =
      ChargeJsonMemory(Pieces(list + "]", 4096), [&calls](int64_t) {
        ++calls;
        return absl::ResourceExhaustedError("full");
      });
  EXPECT_EQ(status, absl::ResourceExhaustedError("full"));
  EXPECT_EQ(calls, 1);
}

TEST(ReadJsonEntriesTest, GivesEachEntryOfOneMember) {
  const std::string text =
      R"({"x": {"no": 1}, "v": {"a": {"b": [1, 2]}, "c": 3}, "l": [4, [5]]})";
  std::vector<std::string> seen;
  const auto take = [&seen](const std::string& name, const Json& entry) {
    seen.push_back(absl::StrCat(name, "=", entry.dump()));
    return absl::OkStatus();
  };
  ASSERT_TRUE(ReadJsonEntries(Pieces(text, 5), "v", take).ok());
  EXPECT_THAT(seen, ElementsAre(R"(a={"b":[1,2]})", "c=3"));
  seen.clear();
  ASSERT_TRUE(ReadJsonEntries(Pieces(text, 1), "l", take).ok());
  EXPECT_THAT(seen, ElementsAre("=4", "=[5]"));
  seen.clear();
  ASSERT_TRUE(ReadJsonEntries(Pieces(text, 5), "none", take).ok());
  EXPECT_THAT(seen, IsEmpty());
  const absl::Status status = ReadJsonEntries(
      Pieces(text, 5), "v",
      [](const auto&, const Json&) { return absl::InternalError("stop"); });
  EXPECT_EQ(status, absl::InternalError("stop"));
}

TEST(ReadJsonHeadTest, LeavesOutWhatMembersHold) {
  const Json head = ReadJsonHead(
      Pieces(R"({"version": "1", "full": {"a": 1}, "none": [], "n": 2})", 2));
  EXPECT_EQ(head, Json::parse(R"({"version": "1", "full": {"": null},
                                  "none": [], "n": 2})"))
      << head.dump();
}

TEST(AppendJsonTest, IsTheTextOfTheWhole) {
  Json json = {{"b", Json::array()}, {"e", Json::object()}, {"n", -1.5}};
  for (int i = 0; i < 5000; ++i) {
    json["b"].push_back({{"i", i}, {"v", {i, i + 0.25, "x"}}});
  }
  std::string text = "head ";
  ASSERT_TRUE(AppendJson(json, core::StopToken(), &text).ok());
  EXPECT_EQ(text, "head " + json.dump());
}

TEST(DumpJsonTest, ReplacesWhatIsNotUtf8) {
  EXPECT_EQ(DumpJson(Json("a\xff")), "\"a\xEF\xBF\xBD\"");
}

TEST(QuotedTextTest, IsShortAndPrintable) {
  EXPECT_EQ(QuotedText("a\nb\""), R"("a\nb\"")");
  EXPECT_EQ(QuotedText("caf\xc3\xa9"), "\"caf\xc3\xa9\"");
  EXPECT_EQ(QuotedText(std::string(200, 'x')),
            "\"" + std::string(200, 'x') + "\"");
  EXPECT_EQ(QuotedText(std::string(201, 'x')),
            "\"" + std::string(200, 'x') + "...\"");
}

TEST(QuotedTextTest, CutsNoCharacter) {
  // The cut would fall within the last one.
  for (const std::string character :
       {"\xc3\xa9", "\xe6\xbc\xa2", "\xf0\x9f\x98\x80"}) {
    const std::string text = std::string(199, 'x') + character + "more";
    EXPECT_EQ(QuotedText(text), "\"" + std::string(199, 'x') + "...\"");
  }
}

class ObjectReaderTest : public ::testing::Test {
 protected:
  // What the first wrong member is said to be.
  template <typename Read>
  static std::string Error(const char* json, const Read& read) {
    const Json object = Json::parse(json);
    ObjectReader reader(object, "file");
    read(reader);
    EXPECT_EQ(core::ErrorReason(reader.status()), "INTERCHANGE_INVALID");
    return std::string(core::ErrorText(reader.status()));
  }
};

TEST_F(ObjectReaderTest, ReadsMembers) {
  const Json object = Json::parse(
      R"({"s": "t", "yes": true, "no": "FALSE", "i": 7.0, "n": [1, 2.5],
          "one": 3, "none": null, "deep": [[1, 2, 3], [4, 5, 6]]})");
  ObjectReader reader(object, "file");
  int64_t rounded = 0;
  std::vector<int64_t> shape;
  EXPECT_EQ(reader.String("s"), "t");
  EXPECT_TRUE(reader.Boolean("yes"));
  EXPECT_FALSE(reader.Boolean("no"));
  EXPECT_EQ(reader.Integer("i", 0, 7), 7);
  EXPECT_THAT(reader.Numbers("n"), ElementsAre(1, 2.5));
  EXPECT_THAT(reader.Numbers("one"), ElementsAre(3));
  EXPECT_THAT(reader.Floats("n", &rounded), ElementsAre(1, 2.5f));
  EXPECT_EQ(rounded, 0);
  EXPECT_FALSE(reader.Has("none"));
  EXPECT_THAT(reader.Nested("deep", &shape), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(shape, ElementsAre(2, 3));
  EXPECT_THAT(reader.Nested("one", &shape), ElementsAre(3));
  EXPECT_THAT(shape, IsEmpty());
  EXPECT_TRUE(reader.status().ok()) << reader.status();
}

TEST_F(ObjectReaderTest, SaysWhereTheFirstErrorIs) {
  EXPECT_EQ(Error("{}", [](auto& r) { r.String("a"), r.String("b"); }),
            "file.a: is missing, expected a string");
  EXPECT_THAT(Error("[]", [](auto& r) { r.String("a"); }),
              HasSubstr("file: expected an object"));
  EXPECT_THAT(Error(R"({"a": [1, "x"]})", [](auto& r) { r.Numbers("a"); }),
              HasSubstr("file.a[1]: expected a number"));
  EXPECT_THAT(Error(R"({"a": "yes"})", [](auto& r) { r.Boolean("a"); }),
              HasSubstr("file.a: expected true or false"));
  std::vector<int64_t> shape;
  EXPECT_THAT(
      Error(R"({"a": [[1, 2], [3]]})", [&](auto& r) { r.Nested("a", &shape); }),
      HasSubstr("file.a[1]: expected a list of 2"));
}

TEST_F(ObjectReaderTest, IntegersStayWithinTheirBounds) {
  for (const char* json :
       {R"({"a": 8})", R"({"a": -1})", R"({"a": 1.5})", R"({"a": 1e300})",
        R"({"a": 18446744073709551615})"}) {
    EXPECT_THAT(
        Error(json, [](auto& r) { EXPECT_EQ(r.Integer("a", 0, 7), 0); }),
        HasSubstr("expected an integer of 0 to 7"))
        << json;
  }
}

TEST(ToFloatTest, CountsWhatItRounds) {
  int64_t rounded = 0;
  EXPECT_EQ(ToFloat(0.5, &rounded), 0.5f);
  EXPECT_EQ(rounded, 0);
  EXPECT_EQ(ToFloat(0.1, &rounded), 0.1f);
  EXPECT_EQ(rounded, 1);
  EXPECT_EQ(ToFloat(-1e39, &rounded), -std::numeric_limits<float>::infinity());
}

}  // namespace
}  // namespace quantd::server
