#include "server/logging.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/time/time.h"

namespace quantd::server {
namespace {

const absl::Time kTime = absl::FromUnixMillis(1769860800123);

TEST(LoggingTest, TextIsOneReadableLine) {
  EXPECT_EQ(FormatLogLine(LogFormat::kText, kTime, LogLevel::kInfo, "serving",
                          {{"threads", 2},
                           {"ok", true},
                           {"ratio", 0.5},
                           {"address", "127.0.0.1:1"},
                           {"store", "a b"},
                           {"empty", ""},
                           {"sly", "x\nfake=1"}}),
            "2026-01-31T12:00:00.123Z info serving threads=2 ok=true ratio=0.5 "
            "address=127.0.0.1:1 store=\"a b\" empty=\"\" "
            "sly=\"x\\nfake=1\"");
  EXPECT_EQ(FormatLogLine(LogFormat::kText, kTime, LogLevel::kError,
                          "two\nlines", {}),
            "2026-01-31T12:00:00.123Z error two\\nlines");
}

TEST(LoggingTest, JsonIsOneObject) {
  const std::string line = FormatLogLine(
      LogFormat::kJson, kTime, LogLevel::kWarning, "odd \"things\"\n",
      {{"count", 7},
       {"flag", false},
       {"ratio", 0.25},
       {"nan", std::numeric_limits<double>::quiet_NaN()},
       {"bytes", "\xff\xfe"},
       {"text", "plain"}});
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const nlohmann::json parsed =
      nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  ASSERT_FALSE(parsed.is_discarded()) << line;
  EXPECT_EQ(parsed["time"], "2026-01-31T12:00:00.123Z");
  EXPECT_EQ(parsed["level"], "warning");
  EXPECT_EQ(parsed["message"], "odd \"things\"\n");
  EXPECT_EQ(parsed["count"], 7);
  EXPECT_EQ(parsed["flag"], false);
  EXPECT_EQ(parsed["ratio"], 0.25);
  EXPECT_TRUE(parsed["nan"].is_null());
  EXPECT_EQ(parsed["text"], "plain");
  EXPECT_TRUE(parsed["bytes"].is_string());
}

TEST(LoggingTest, WritesLinesOfTheLevelAndAbove) {
  StartLogging(LogLevel::kWarning, LogFormat::kJson);
  testing::internal::CaptureStderr();
  Log(LogLevel::kInfo, "quiet");
  Log(LogLevel::kError, "loud", {{"n", 1}});
  const std::string written = testing::internal::GetCapturedStderr();
  StartLogging(LogLevel::kInfo, LogFormat::kText);
  EXPECT_EQ(written.find("quiet"), std::string::npos);
  EXPECT_NE(written.find("\"message\":\"loud\",\"n\":1}\n"), std::string::npos)
      << written;
}

}  // namespace
}  // namespace quantd::server
