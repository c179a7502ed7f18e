#include "server/rpc/mixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/calibrate/precision_option.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "quantd/v1/encoding_service.pb.h"

namespace quantd::server {
namespace {

v1::MixtureTarget AtLeast(double sqnr_db) {
  v1::MixtureTarget target;
  target.set_min_sqnr_db(sqnr_db);
  return target;
}

v1::MixtureTarget AtMost(uint64_t bytes) {
  v1::MixtureTarget target;
  target.set_max_size_bytes(bytes);
  return target;
}

TEST(CheckTargetTest, NamesTheFieldThatIsWrong) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
  for (const v1::MixtureTarget& target :
       {AtLeast(-3), AtLeast(0), AtLeast(18.5), AtMost(1), AtMost(kMost)}) {
    EXPECT_EQ(CheckTarget(target), absl::OkStatus()) << target.DebugString();
  }
  const struct {
    v1::MixtureTarget target;
    std::string field;
  } cases[] = {
      {AtLeast(kInfinity), "min_sqnr_db"},
      {AtLeast(-kInfinity), "min_sqnr_db"},
      {AtLeast(std::numeric_limits<double>::quiet_NaN()), "min_sqnr_db"},
      {AtMost(0), "max_size_bytes"},
      {AtMost(kMost + 1), "max_size_bytes"},
      {v1::MixtureTarget(), ""},
  };
  for (const auto& c : cases) {
    const absl::Status status = CheckTarget(c.target);
    EXPECT_EQ(core::ErrorReason(status), "TARGET_INVALID");
    EXPECT_EQ(core::ErrorField(status), c.field) << status;
  }
}

// Two tensors under specs 3 (small) and 5 (precise).
class MakeMixtureTest : public ::testing::Test {
 protected:
  v1::SweepMixture Make(const v1::MixtureTarget& target) const {
    v1::SweepMixture mixture;
    EXPECT_EQ(Make(target, core::StopToken(), &mixture), absl::OkStatus());
    return mixture;
  }
  absl::Status Make(const v1::MixtureTarget& target, core::StopToken stop,
                    v1::SweepMixture* mixture) const {
    return MakeMixture(
        tensors_, target,
        [this](size_t tensor) -> const std::string& { return names_[tensor]; },
        [this](size_t tensor, int option) {
          return sqnr_db_[tensor][static_cast<size_t>(option)];
        },
        stop, mixture);
  }

  const std::vector<std::string> names_ = {"a", "b"};
  const std::vector<core::TensorOptions> tensors_ = {
      {{3, 100, 0.01}, {5, 200, 0.0001}}, {{3, 10, 0.1}, {5, 20, 0.001}}};
  const std::vector<std::vector<double>> sqnr_db_ = {{20, 40}, {10, 30}};
};

TEST_F(MakeMixtureTest, SaysWhatItsChoicesMakeTogether) {
  const v1::SweepMixture mixture = Make(AtMost(120));
  EXPECT_TRUE(mixture.target_met());
  ASSERT_EQ(mixture.choices_size(), 2);
  EXPECT_EQ(mixture.choices(0).tensor(), "a");
  EXPECT_EQ(mixture.choices(0).spec_index(), 3u);
  EXPECT_EQ(mixture.choices(1).tensor(), "b");
  EXPECT_EQ(mixture.choices(1).spec_index(), 5u);
  EXPECT_EQ(mixture.size_bytes(), 120u);
  EXPECT_DOUBLE_EQ(mixture.noise_to_signal_sum(), 0.011);
  // Of the worst tensor, which is not the last.
  EXPECT_EQ(mixture.min_sqnr_db(), 20);
}

TEST_F(MakeMixtureTest, TakesTheSmallestThatReachesAnSqnr) {
  EXPECT_EQ(Make(AtLeast(9)).size_bytes(), 110u);
  EXPECT_EQ(Make(AtLeast(19)).size_bytes(), 120u);
  EXPECT_EQ(Make(AtLeast(29)).size_bytes(), 220u);
}

TEST_F(MakeMixtureTest, SaysWhenATargetIsNotMet) {
  v1::SweepMixture mixture = Make(AtLeast(35));
  EXPECT_FALSE(mixture.target_met());
  EXPECT_EQ(mixture.size_bytes(), 220u);
  mixture = Make(AtMost(109));
  EXPECT_FALSE(mixture.target_met());
  EXPECT_EQ(mixture.size_bytes(), 110u);
}

TEST_F(MakeMixtureTest, EndsWhenItIsStopped) {
  const std::atomic<bool> stopped{true};
  for (const v1::MixtureTarget& target : {AtLeast(10), AtMost(120)}) {
    v1::SweepMixture mixture;
    EXPECT_TRUE(
        absl::IsCancelled(Make(target, core::StopToken(&stopped), &mixture)));
    EXPECT_EQ(mixture.choices_size(), 0);
  }
}

}  // namespace
}  // namespace quantd::server
