#include "client/cpp/grpc_status.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/errors.h"
#include "gmock/gmock.h"
#include "google/protobuf/any.pb.h"
#include "google/protobuf/duration.pb.h"
#include "grpcpp/support/status.h"
#include "gtest/gtest.h"

namespace quantd::internal {
namespace {

using ::testing::HasSubstr;

absl::Status From(grpc::StatusCode code, const std::string& message) {
  return FromGrpcStatus(grpc::Status(code, message), "host:1",
                        absl::Seconds(7));
}

TEST(FromGrpcStatusTest, KeepsWhatTheServerSays) {
  EXPECT_TRUE(FromGrpcStatus(grpc::Status::OK, "host", absl::Seconds(1)).ok());
  EXPECT_EQ(From(grpc::StatusCode::UNAVAILABLE, "DRAINING: later"),
            absl::UnavailableError("DRAINING: later"));
  EXPECT_EQ(From(grpc::StatusCode::DEADLINE_EXCEEDED, "STREAM_IDLE: x"),
            absl::DeadlineExceededError("STREAM_IDLE: x"));
  EXPECT_EQ(From(grpc::StatusCode::INTERNAL, "plain"),
            absl::InternalError("plain"));
  const absl::Status missing =
      From(grpc::StatusCode::NOT_FOUND, "ENCODING_NOT_FOUND: x");
  EXPECT_FALSE(IsServerUnreachable(missing));
  EXPECT_EQ(UnreachableCauseOf(missing), UnreachableCause::kOther);
}

TEST(FromGrpcStatusTest, TellsWhyNobodyAnswers) {
  const struct {
    grpc::StatusCode code;
    const char* message;
    UnreachableCause cause;
  } cases[] = {
      {grpc::StatusCode::UNAVAILABLE,
       "failed to connect to all addresses; last error: UNKNOWN: "
       "ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused",
       UnreachableCause::kNothingListens},
      {grpc::StatusCode::UNAVAILABLE, "DNS resolution failed for x",
       UnreachableCause::kNameUnknown},
      {grpc::StatusCode::UNAVAILABLE, "last error: UNAVAILABLE: Socket closed",
       UnreachableCause::kClosed},
      // Closed while it was in use.
      {grpc::StatusCode::UNAVAILABLE, "Socket closed",
       UnreachableCause::kOther},
      {grpc::StatusCode::UNAVAILABLE,
       "error:0A000086:certificate verify failed",
       UnreachableCause::kUntrusted},
      {grpc::StatusCode::UNAVAILABLE, "wrong version number",
       UnreachableCause::kNoTls},
      {grpc::StatusCode::UNKNOWN, "Received http2 header with status: 404",
       UnreachableCause::kNotQuantd},
      {grpc::StatusCode::UNIMPLEMENTED,
       "Received http2 header with status: 404", UnreachableCause::kNotQuantd},
      {grpc::StatusCode::INTERNAL, "Received RST_STREAM with error code 2",
       UnreachableCause::kOther},
      {grpc::StatusCode::CANCELLED, "", UnreachableCause::kOther},
  };
  for (const auto& c : cases) {
    const absl::Status status = From(c.code, c.message);
    EXPECT_TRUE(IsServerUnreachable(status)) << c.message;
    EXPECT_EQ(UnreachableCauseOf(status), c.cause) << c.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr("host:1"));
  }
  const absl::Status late = From(grpc::StatusCode::DEADLINE_EXCEEDED, "late");
  EXPECT_EQ(ErrorReason(late), "TIMEOUT");
  EXPECT_THAT(std::string(late.message()), HasSubstr("7s"));
}

// Of a google.rpc.Status {3: [Any{RetryInfo{1: delay}}]}.
std::string Details(const std::string& type, int64_t seconds, int32_t nanos) {
  google::protobuf::Duration delay;
  delay.set_seconds(seconds);
  delay.set_nanos(nanos);
  const auto field = [](int number, const std::string& bytes) {
    return std::string{static_cast<char>(number << 3 | 2),
                       static_cast<char>(bytes.size())} +
           bytes;
  };
  google::protobuf::Any any;
  any.set_type_url("type.googleapis.com/google.rpc." + type);
  any.set_value(field(1, delay.SerializeAsString()));
  return "\x08\x0e" + field(3, any.SerializeAsString());
}

TEST(FromGrpcStatusTest, HasTheTimeThatTheServerAsksFor) {
  const auto retry_after = [](const std::string& details) {
    return RetryAfter(FromGrpcStatus(
        grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "BUSY: x", details),
        "host", absl::Seconds(1)));
  };
  EXPECT_EQ(retry_after(Details("RetryInfo", 2, 5'000'000)),
            absl::Milliseconds(2005));
  EXPECT_EQ(retry_after(Details("DebugInfo", 2, 0)), absl::ZeroDuration());
  EXPECT_EQ(retry_after(""), absl::ZeroDuration());
  // Cut at every byte it is less or nothing, and nothing breaks.
  const std::string whole = Details("RetryInfo", 2, 5'000'000);
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_LE(retry_after(whole.substr(0, size)), absl::Milliseconds(2005));
  }
}

}  // namespace
}  // namespace quantd::internal
