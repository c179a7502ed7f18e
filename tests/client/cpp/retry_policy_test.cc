#include "client/cpp/retry_policy.h"

#include <vector>

#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client_options.h"
#include "client/cpp/errors.h"
#include "gtest/gtest.h"

namespace quantd::internal {
namespace {

class RetryPolicyTest : public ::testing::Test {
 protected:
  RetryPolicyTest() {
    options_.initial_backoff = absl::Microseconds(100);
    options_.max_backoff = absl::Microseconds(400);
    options_.on_retry = [this](const Retry& retry) { told_.push_back(retry); };
  }

  bool Wants(const absl::Status& status) {
    return RetryPolicy(options_, &random_).Wants(status, retries_);
  }

  absl::BitGen random_;
  ClientOptions options_;
  Retries retries_;
  std::vector<Retry> told_;
};

const absl::Status kAway = ServerUnreachableError("host", "Socket closed");

TEST_F(RetryPolicyTest, TriesAgainWhatMayPass) {
  EXPECT_TRUE(Wants(kAway));
  EXPECT_TRUE(Wants(absl::AbortedError("x")));
  EXPECT_TRUE(Wants(WithRetryAfter(absl::ResourceExhaustedError("x"),
                                   absl::Milliseconds(1))));
  EXPECT_FALSE(Wants(absl::ResourceExhaustedError("x")));
  EXPECT_FALSE(Wants(absl::InvalidArgumentError("x")));
  EXPECT_FALSE(Wants(absl::DeadlineExceededError("x")));
}

TEST_F(RetryPolicyTest, LeavesToPeopleWhatOnlyTheyMend) {
  for (const UnreachableCause cause :
       {UnreachableCause::kNotQuantd, UnreachableCause::kWantsTls,
        UnreachableCause::kNoTls, UnreachableCause::kUntrusted,
        UnreachableCause::kTlsFilesUnusable}) {
    EXPECT_FALSE(Wants(ServerUnreachableError("host", "", cause)));
  }
  EXPECT_TRUE(Wants(
      ServerUnreachableError("host", "", UnreachableCause::kNothingListens)));
}

TEST_F(RetryPolicyTest, EndsWithItsLimits) {
  retries_.count = 3;
  retries_.since = absl::Now();
  options_.max_retries = 3;
  EXPECT_FALSE(Wants(kAway));
  options_.max_retries = 4;
  EXPECT_TRUE(Wants(kAway));
  retries_.since = absl::Now() - options_.retry_for - absl::Seconds(1);
  EXPECT_FALSE(Wants(kAway));
}

TEST_F(RetryPolicyTest, WaitsForNoServerThatAsksForTooMuch) {
  options_.timeout = absl::Seconds(1);
  EXPECT_TRUE(Wants(WithRetryAfter(kAway, absl::Seconds(1))));
  EXPECT_FALSE(Wants(WithRetryAfter(kAway, absl::Seconds(2))));
  options_.timeout = options_.retry_for * 4;
  EXPECT_FALSE(Wants(WithRetryAfter(kAway, options_.retry_for * 2)));
}

TEST_F(RetryPolicyTest, ACertificateIsWaitedForLessLong) {
  retries_.count = 1;
  retries_.since = absl::Now() - absl::Seconds(10);
  EXPECT_TRUE(Wants(kAway));
  const absl::Status certificate =
      ServerUnreachableError("host", "", UnreachableCause::kWantsCertificate);
  EXPECT_FALSE(Wants(certificate));
  // Once seen, it is the explanation of what comes after it.
  retries_.certificate_error = certificate;
  EXPECT_FALSE(Wants(kAway));
  EXPECT_EQ(retries_.Explained(kAway), certificate);
  EXPECT_EQ(retries_.Explained(absl::AbortedError("x")),
            absl::AbortedError("x"));
}

TEST_F(RetryPolicyTest, PausesDoubleUpToTheLongest) {
  RetryPolicy policy(options_, &random_);
  const absl::Duration bounds[] = {
      absl::Microseconds(100), absl::Microseconds(200), absl::Microseconds(400),
      absl::Microseconds(400)};
  for (const absl::Duration bound : bounds) {
    ASSERT_TRUE(policy.Pause(kAway, &retries_, absl::InfiniteFuture()));
    EXPECT_GE(told_.back().pause, bound / 2);
    EXPECT_LE(told_.back().pause, bound * 3 / 2);
    EXPECT_EQ(told_.back().number, retries_.count + 1);
    retries_.Add();
  }
}

TEST_F(RetryPolicyTest, NoPausePassesTheDeadlineOrComesTooEarly) {
  RetryPolicy policy(options_, &random_);
  const absl::Status asks = WithRetryAfter(kAway, absl::Milliseconds(3));
  EXPECT_FALSE(
      policy.Pause(asks, &retries_, absl::Now() + absl::Milliseconds(1)));
  EXPECT_TRUE(told_.empty());
  const absl::Time before = absl::Now();
  EXPECT_TRUE(policy.Pause(asks, &retries_, absl::InfiniteFuture()));
  EXPECT_GE(absl::Now() - before, absl::Milliseconds(3));
  EXPECT_EQ(told_.at(0).pause, absl::Milliseconds(3));
}

}  // namespace
}  // namespace quantd::internal
