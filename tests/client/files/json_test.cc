#include "client/files/json.h"

#include <string>

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

TEST(PythonJsonTest, IsAsStrictAsPython) {
  for (const char* text :
       {"-NaN", "NaNNaN", "1Infinity", "nan", "inf", "+Infinity", "[NaN,]",
        "\"NaN", "\"\\", "{\"a\":Infinity", ""}) {
    EXPECT_TRUE(ParsePythonJson(text).is_discarded()) << text;
  }
}

TEST(PythonJsonTest, OtherJsonHasNoSuchNumbers) {
  EXPECT_TRUE(ParseJson("[NaN]").is_discarded());
}

}  // namespace
}  // namespace quantd::files
