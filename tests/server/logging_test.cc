#include "server/logging.h"

#include <grpc/support/log.h>
#include <gtest/gtest.h>

#include <algorithm>
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

TEST(LineLimiterTest, LetsSoManyOfAKindThroughAndCountsTheOthers) {
  LineLimiter limiter(2, absl::Minutes(1));
  const absl::Duration start = absl::Hours(5);
  int admitted = 0;
  for (int i = 0; i < 7; ++i) admitted += limiter.Admit("a", start) ? 1 : 0;
  EXPECT_EQ(admitted, 2);
  EXPECT_TRUE(limiter.Admit("b", start + absl::Seconds(1)));
  EXPECT_TRUE(limiter.TakeLeftOut(start + absl::Seconds(59)).empty());
  // Also before anybody has asked.
  EXPECT_FALSE(limiter.Admit("a", start + absl::Seconds(61)));
  const auto left_out = limiter.TakeLeftOut(start + absl::Seconds(61));
  ASSERT_EQ(left_out.size(), 1u);
  EXPECT_EQ(left_out[0].kind, "a");
  EXPECT_EQ(left_out[0].lines, 6);
  EXPECT_TRUE(limiter.TakeLeftOut(start + absl::Seconds(62)).empty());
  EXPECT_TRUE(limiter.Admit("a", start + absl::Seconds(63)));
  EXPECT_TRUE(limiter.Admit("b", start + absl::Seconds(130)));
  EXPECT_TRUE(limiter.TakeLeftOut(start + absl::Hours(1)).empty());
}

TEST(LineLimiterTest, KindsAreBounded) {
  LineLimiter limiter(1, absl::Minutes(1));
  int admitted = 0;
  for (int i = 0; i < 5000; ++i) {
    admitted += limiter.Admit(std::to_string(i), absl::ZeroDuration()) ? 1 : 0;
  }
  EXPECT_EQ(admitted, 1001);
  EXPECT_EQ(limiter.TakeLeftOut(absl::Minutes(1)).size(), 1u);
}

TEST(LoggingTest, AFloodOfErrorsIsTenLines) {
  StartLogging(LogLevel::kInfo, LogFormat::kText);
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 100; ++i) Log(LogLevel::kError, "flood", {{"i", i}});
  for (int i = 0; i < 100; ++i) Log(LogLevel::kInfo, "asked for");
  for (int i = 0; i < 100; ++i) {
    gpr_log("a/b/file.cc", 7, GPR_LOG_SEVERITY_ERROR, "stranger %d", i);
  }
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 10 + 100 + 10);
  EXPECT_NE(text.find("stranger 9 source=grpc/file.cc:7"), std::string::npos)
      << text;
}

TEST(LoggingTest, WritesLinesOfTheLevelAndAbove) {
  StartLogging(LogLevel::kWarning, LogFormat::kJson);
  ::testing::internal::CaptureStderr();
  Log(LogLevel::kInfo, "quiet");
  Log(LogLevel::kError, "loud", {{"n", 1}});
  const std::string written = ::testing::internal::GetCapturedStderr();
  StartLogging(LogLevel::kInfo, LogFormat::kText);
  EXPECT_EQ(written.find("quiet"), std::string::npos);
  EXPECT_NE(written.find("\"message\":\"loud\",\"n\":1}\n"), std::string::npos)
      << written;
}

}  // namespace
}  // namespace quantd::server
