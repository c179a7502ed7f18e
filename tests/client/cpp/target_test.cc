#include "client/cpp/target.h"

#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/paths.h"

namespace quantd {
namespace {

TEST(TargetTest, IsWhatGrpcTakesOrAnErrorThatSaysWhatToWrite) {
  std::ifstream file(TestDataFolder() + "/targets.txt");
  std::string line;
  int count = 0;
  while (std::getline(file, line)) {
    if (line[0] == '#') continue;
    SCOPED_TRACE(line);
    const size_t space = line.find(' ');
    const std::string text = line.substr(0, space);
    absl::string_view expected = line;
    expected.remove_prefix(line.find_first_not_of(' ', space));
    const absl::StatusOr<std::string> target = ParseTarget(text);
    ++count;
    if (absl::ConsumePrefix(&expected, "! ")) {
      ASSERT_FALSE(target.ok()) << *target;
      EXPECT_EQ(ErrorReason(target.status()), "ARGUMENT_INVALID");
      EXPECT_THAT(std::string(target.status().message()),
                  ::testing::HasSubstr(std::string(expected)));
    } else {
      ASSERT_TRUE(target.ok()) << target.status();
      EXPECT_EQ(*target, expected);
      EXPECT_EQ(*ParseTarget(*target), expected);
    }
  }
  EXPECT_GT(count, 30);
  for (const char* const text : {"", " ", "localhost ", "local\nhost"}) {
    EXPECT_FALSE(ParseTarget(text).ok()) << text;
  }
}

TEST(TargetTest, IsThatOfAClient) {
  ClientOptions options;
  options.target = "localhost";
  EXPECT_EQ((*Client::Connect(options))->options().target, "localhost:8430");
  options.target = "https://localhost";
  EXPECT_EQ(ErrorReason(Client::Connect(options).status()), "ARGUMENT_INVALID");
}

}  // namespace
}  // namespace quantd
