#include "client/cpp/errors.h"

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace quantd {
namespace {

TEST(ErrorReasonTest, IsTheWordBeforeTheColon) {
  const absl::Status status = absl::NotFoundError("CHUNK_OFFSET: at 4: 5");
  EXPECT_EQ(ErrorReason(status), "CHUNK_OFFSET");
  EXPECT_EQ(ErrorText(status), "at 4: 5");
  for (const char* message : {"", "no colon", "Two words: x", "chunk: x"}) {
    EXPECT_EQ(ErrorReason(absl::NotFoundError(message)), "") << message;
    EXPECT_EQ(ErrorText(absl::NotFoundError(message)), message);
  }
}

TEST(FromTensorErrorTest, IsAlwaysAnError) {
  v1::TensorError error;
  EXPECT_EQ(FromTensorError(error).code(), absl::StatusCode::kUnknown);
  error.set_code(17);
  EXPECT_EQ(FromTensorError(error).code(), absl::StatusCode::kUnknown);
  error.set_code(3);
  error.set_reason("SHAPE_INVALID");
  error.set_message("no");
  error.set_field("header.tensor.shape");
  error.set_retry_after_ms(1500);
  const absl::Status status = FromTensorError(error);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "SHAPE_INVALID: no (header.tensor.shape)");
  EXPECT_EQ(RetryAfter(status), absl::Milliseconds(1500));
}

TEST(WithAttemptsTest, KeepsWhatIsKnownOfTheError) {
  const absl::Status status = WithRetryAfter(
      ServerUnreachableError("h", "x", UnreachableCause::kSilent),
      absl::Seconds(3));
  EXPECT_EQ(WithAttempts(status, 1), status);
  EXPECT_TRUE(WithAttempts(absl::OkStatus(), 5).ok());
  const absl::Status after = WithAttempts(status, 3);
  EXPECT_EQ(after.message(),
            "SERVER_UNREACHABLE: h takes connections and says nothing (after 3 "
            "attempts)");
  EXPECT_EQ(UnreachableCauseOf(after), UnreachableCause::kSilent);
  EXPECT_EQ(RetryAfter(after), absl::Seconds(3));
}

}  // namespace
}  // namespace quantd
