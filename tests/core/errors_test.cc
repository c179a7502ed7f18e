#include "core/errors.h"

#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace quantd::core {
namespace {

TEST(ErrorsTest, OpenWithAStableReason) {
  const absl::Status status = ChunkOffsetError(2048, 4096);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "CHUNK_OFFSET: chunk starts at byte 4096, expected 2048");
  EXPECT_EQ(ErrorReason(status), "CHUNK_OFFSET");
  EXPECT_EQ(ErrorText(status), "chunk starts at byte 4096, expected 2048");
}

TEST(ErrorsTest, OtherStatusesHaveNoReason) {
  for (const char* message : {"", "plain", "Mixed: case", ": none", "A"}) {
    const absl::Status status = absl::InternalError(message);
    EXPECT_EQ(ErrorReason(status), "") << message;
    EXPECT_EQ(ErrorText(status), message);
  }
  EXPECT_EQ(ErrorReason(absl::OkStatus()), "");
}

TEST(ErrorsTest, FieldsNestFromTheInside) {
  absl::Status status = WithField(ScaleInvalidError(3, -1), "scale");
  EXPECT_EQ(ErrorField(status), "scale");
  status = WithField(status, "encoding");
  EXPECT_EQ(ErrorField(status), "encoding.scale");
  EXPECT_EQ(ErrorReason(status), "SCALE_INVALID");
  EXPECT_TRUE(WithField(absl::OkStatus(), "scale").ok());
  EXPECT_EQ(ErrorField(DrainingError()), "");
}

TEST(ErrorsTest, TellHowLongToWaitWhereARetryHelps) {
  EXPECT_EQ(ErrorRetryAfter(MemoryBudgetError(1, "wait", absl::Seconds(2))),
            absl::Seconds(2));
  EXPECT_EQ(ErrorRetryAfter(ScaleInvalidError(0, 0)), absl::ZeroDuration());
}

TEST(ErrorTableTest, HasARowPerReason) {
  std::set<std::string> reasons;
  for (const ErrorInfo& row : kErrors) {
    EXPECT_TRUE(reasons.insert(std::string(row.reason)).second) << row.reason;
    EXPECT_EQ(FindError(row.reason), &row);
  }
  EXPECT_EQ(FindError("NO_SUCH_REASON"), nullptr);
  EXPECT_EQ(FindError(""), nullptr);
}

TEST(ErrorTableTest, SaysWhatTheFunctionsMake) {
  for (const absl::Status& status :
       {ChunkTooLargeError(1, 2), StoreCorruptError("x"), StreamAgeError({}),
        ModelDeniedError("m"), ListenError("a", "b"), UnexpectedError("id")}) {
    const ErrorInfo* row = FindError(ErrorReason(status));
    ASSERT_NE(row, nullptr) << status;
    EXPECT_EQ(status.code(), row->code) << status;
  }
}

// Clients try again by the code alone.
TEST(ErrorTableTest, ARetryHelpsWhereTheCodeSaysSo) {
  for (const ErrorInfo& row : kErrors) {
    if (row.code == ErrorCode::kUnavailable &&
        row.kind != ErrorKind::kStartup) {
      EXPECT_TRUE(row.retry_helps) << row.reason;
    }
    if (row.code == ErrorCode::kInvalidArgument) {
      EXPECT_FALSE(row.retry_helps) << row.reason;
    }
  }
}

}  // namespace
}  // namespace quantd::core
