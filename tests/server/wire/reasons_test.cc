// The reasons that proto/ lists beside those of the table of errors.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "tests/support/paths.h"

namespace quantd::server::reasons_test {
namespace {

using ::testing::IsEmpty;

std::string Read(const std::string& path) {
  std::ifstream file(absl::StrCat(TestDataFolder(), "/../../", path));
  EXPECT_TRUE(file) << path;
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::set<std::string> Matches(const std::string& text, const char* pattern) {
  std::set<std::string> matches;
  const std::regex regex(pattern);
  for (std::sregex_iterator i(text.begin(), text.end(), regex), end; i != end;
       ++i) {
    matches.insert((*i)[1]);
  }
  return matches;
}

std::set<std::string> Without(std::set<std::string> from,
                              const std::set<std::string>& others) {
  for (const std::string& other : others) from.erase(other);
  return from;
}

// What callers can be answered.
std::set<std::string> AnsweredReasons() {
  std::set<std::string> reasons;
  for (const core::ErrorInfo& row : core::kErrors) {
    if (row.kind != core::ErrorKind::kStartup) {
      reasons.insert(std::string(row.reason));
    }
  }
  return Without(std::move(reasons),
                 // The connection is closed without an answer.
                 {"CONNECTION_LIMIT", "ADDRESS_LIMIT"});
}

std::set<std::string> Words(const std::string& text) {
  return Matches(text, "\\b([A-Z][A-Z_]+[A-Z])\\b");
}

TEST(ReasonsTest, EveryReasonOfTheTableIsInProto) {
  std::string text;
  for (const char* file :
       {"encoding", "encoding_service", "quantization_service", "shared_memory",
        "statistics", "tensor"}) {
    text += Read(absl::StrCat("proto/quantd/v1/", file, ".proto"));
  }
  EXPECT_THAT(Without(AnsweredReasons(), Words(text)), IsEmpty());
}

// Those that both services can answer, wherever they come from.
TEST(ReasonsTest, BothServicesListWhatBothCanAnswer) {
  const std::set<std::string> common = {
      "INTERNAL",         "MEMORY_BUDGET",        "SCALE_OVERFLOW",
      "STORE_CORRUPT",    "STORE_UNAVAILABLE",    "STATISTICS_NOT_FOUND",
      "DRAINING",         "GRANULARITY_TOO_FINE", "SCALE_COUNT_LIMIT",
      "TOKEN_MISSING",    "TOKEN_INVALID",        "SCOPE_MISSING",
      "SYMMETRY_INVALID", "METHOD_INVALID",       "STREAM_IDLE",
      "STREAM_AGE",       "MODEL_DENIED",         "MESSAGE_MALFORMED",
      "CALL_LIMIT"};
  for (const char* service : {"encoding", "quantization"}) {
    const std::string text =
        Read(absl::StrCat("proto/quantd/v1/", service, "_service.proto"));
    EXPECT_THAT(Without(common, Words(text)), IsEmpty()) << service;
  }
}

}  // namespace
}  // namespace quantd::server::reasons_test
