#include "server/store/metering.h"

#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "server/metrics/metrics.h"
#include "tests/support/metric_value.h"

namespace quantd::server {
namespace {

class MeteringTest : public ::testing::Test {
 protected:
  void Do(StoreOperation operation, const absl::Status& outcome) {
    Measure(&metrics_, operation, [&] { return outcome; }).IgnoreError();
  }
  bool WriteFailed() const {
    const bool failed = metrics_.failed_write().has_value();
    EXPECT_EQ(testing::MetricValue(metrics_, "quantd_store_write_failed"),
              failed ? 1 : 0);
    return failed;
  }

  const absl::Status unavailable_ = core::StoreUnavailableError("disk is full");
  Metrics metrics_;
};

TEST_F(MeteringTest, RemembersThatTheLatestWriteFailed) {
  EXPECT_FALSE(WriteFailed());
  for (const StoreOperation write :
       {StoreOperation::kPut, StoreOperation::kDelete,
        StoreOperation::kContribute, StoreOperation::kDeleteStatistics}) {
    Do(write, unavailable_);
    EXPECT_TRUE(WriteFailed());
    EXPECT_EQ(metrics_.failed_write()->status, unavailable_);
    Do(StoreOperation::kPut, absl::OkStatus());
    EXPECT_FALSE(WriteFailed());
  }
}

TEST_F(MeteringTest, ReadsTellNothingOfWrites) {
  Do(StoreOperation::kGet, unavailable_);
  Do(StoreOperation::kPing, unavailable_);
  EXPECT_FALSE(WriteFailed());
  Do(StoreOperation::kPut, unavailable_);
  Do(StoreOperation::kGet, absl::OkStatus());
  EXPECT_TRUE(WriteFailed());
}

// The store answered, and wrote nothing.
TEST_F(MeteringTest, AWriteThatIsRefusedTellsNothing) {
  const absl::Status refused = absl::FailedPreconditionError("ETAG_MISMATCH");
  Do(StoreOperation::kPut, refused);
  EXPECT_FALSE(WriteFailed());
  Do(StoreOperation::kPut, unavailable_);
  Do(StoreOperation::kPut, refused);
  Do(StoreOperation::kDelete, absl::NotFoundError("ENCODING_NOT_FOUND"));
  EXPECT_TRUE(WriteFailed());
}

TEST_F(MeteringTest, ACallThatNobodyWaitsForIsNoFailureOfTheStore) {
  const auto failures = [this] {
    return testing::MetricValue(metrics_, "quantd_store_errors_total");
  };
  Do(StoreOperation::kGetStatistics, core::StoppedError());
  EXPECT_EQ(failures(), 0);
  Do(StoreOperation::kGetStatistics, unavailable_);
  EXPECT_EQ(failures(), 1);
}

TEST_F(MeteringTest, AnswersWhatTheCallAnswers) {
  const absl::StatusOr<int> answer = Measure(
      &metrics_, StoreOperation::kPut, [] { return absl::StatusOr<int>(7); });
  EXPECT_EQ(answer.value(), 7);
}

}  // namespace
}  // namespace quantd::server
