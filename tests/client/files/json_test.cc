#include "client/files/json.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace quantd::files {
namespace {

TEST(PythonJsonTest, NumbersThatJsonHasNotStay) {
  const nlohmann::ordered_json value = ParsePythonJson(
      "\xef\xbb\xbf{\"a\":[NaN,Infinity, -Infinity,-1.5],\"NaN\":\"Infinity\","
      "\"b\":\"\\\"NaN\\\\\",\"c\":Infinity}");
  ASSERT_TRUE(value.is_object());
  EXPECT_FALSE(value["a"][0].is_number());
  EXPECT_EQ(value["a"][3], -1.5);
  EXPECT_EQ(value["NaN"], "Infinity");
  EXPECT_EQ(PythonJsonText(value), R"({
  "a": [
    NaN,
    Infinity,
    -Infinity,
    -1.5
  ],
  "NaN": "Infinity",
  "b": "\"NaN\\",
  "c": Infinity
})");
}

TEST(PythonJsonTest, NumbersThatAValueDoesNotHoldStay) {
  for (const char* number :
       {"1000000000000000019884624838656", "18446744073709551616",
        "-9223372036854775809", "1E400", "-1e+400", "1.5e400"}) {
    const nlohmann::ordered_json value =
        ParsePythonJson(absl::StrCat("[", number, "]"));
    ASSERT_TRUE(value.is_array()) << number;
    EXPECT_EQ(PythonJsonText(value), absl::StrCat("[\n  ", number, "\n]"));
  }
  for (const char* number :
       {"18446744073709551615", "-9223372036854775808", "0", "-1", "1.5", "0.1",
        "1e+300", "\"1E400\"", "\"\\u0000x\"", "\"\\u00001\"",
        "\"\\\"\\u0000\""}) {
    EXPECT_EQ(PythonJsonText(ParsePythonJson(absl::StrCat("[", number, "]"))),
              absl::StrCat("[\n  ", number, "\n]"));
  }
}

TEST(PythonJsonTest, SaysWhatIsWrong) {
  for (const char* text : {"\"\\ud800\"", "\"\\ud800\\ud83d\\ude00\"",
                           "\"\\ud83d\\ude00\\ud800x\""}) {
    EXPECT_EQ(ExpectedObjectText(text),
              "expected a JSON object in UTF-8, got \\ud800, half of a "
              "surrogate pair, which UTF-8 does not have");
  }
  EXPECT_NE(ExpectedObjectText("\"\\\\\\udc00").find("\\udc00"),
            std::string::npos);
  for (const char* text :
       {"", "[", "\\", "\\u", "\"\\ud83d\\ude00\"", "\"\\\\ud800\""}) {
    EXPECT_EQ(ExpectedObjectText(text), "expected a JSON object in UTF-8");
  }
}

TEST(PythonJsonTest, IsAsStrictAsPython) {
  for (const char* text : {"01e400",
                           "012345678901234567890123",
                           "1.e400",
                           "+1e400",
                           "1e400x",
                           "--1e400",
                           "12345678901234567890123NaN",
                           ".1e400",
                           "1e400 1",
                           "-NaN",
                           "NaNNaN",
                           "1Infinity",
                           "nan",
                           "inf",
                           "+Infinity",
                           "[NaN,]",
                           "\"NaN",
                           "\"\\",
                           "{\"a\":Infinity",
                           ""}) {
    EXPECT_TRUE(ParsePythonJson(text).is_discarded()) << text;
  }
}

TEST(PythonJsonTest, OtherJsonHasNoSuchNumbers) {
  EXPECT_TRUE(ParseJson("[NaN]").is_discarded());
}

}  // namespace
}  // namespace quantd::files
