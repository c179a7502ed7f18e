#include "server/guard/caller_share.h"

#include <memory>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace quantd::server {
namespace {

TEST(CallerSharesTest, OneCallerHasOneShare) {
  CallerShares shares(2, absl::Seconds(1), 100);
  const std::shared_ptr<CallerShare> a = shares.Find("a");
  const std::shared_ptr<CallerShare> b = shares.Find("b");
  EXPECT_EQ(shares.Find("a"), a);
  EXPECT_NE(a, b);
  EXPECT_NE(a->group, b->group);
}

TEST(CallerSharesTest, ForgetsIdleCallersWhenThereAreMany) {
  CallerShares shares(2, absl::Seconds(1), 100);
  const std::shared_ptr<CallerShare> busy = shares.Find("busy");
  const std::weak_ptr<CallerShare> idle = shares.Find("idle");
  for (int i = 0; i < 1022; ++i) shares.Find(absl::StrCat(i));
  EXPECT_FALSE(idle.expired());
  shares.Find("one more");
  EXPECT_TRUE(idle.expired());
  EXPECT_EQ(shares.Find("busy"), busy);
}

TEST(CallerSharesTest, NoGroupIsGivenTwice) {
  CallerShares shares(2, absl::Seconds(1), 100);
  std::set<core::ThreadPool::Group> groups;
  for (int i = 0; i < 3000; ++i) {
    EXPECT_TRUE(groups.insert(shares.Find(absl::StrCat(i))->group).second);
  }
}

TEST(CallerSharesTest, TellsTheLongestDelay) {
  CallerShares shares(2, absl::Seconds(1), 100);
  EXPECT_EQ(shares.Delay(absl::Seconds(1)), absl::ZeroDuration());
  const std::shared_ptr<CallerShare> busy = shares.Find("busy");
  Admission::Load load(&busy->admission);
  load.Set(absl::Seconds(10));
  shares.Find("quiet");
  const absl::Duration delay = busy->admission.Delay(absl::Seconds(1));
  EXPECT_GT(delay, absl::ZeroDuration());
  EXPECT_EQ(shares.Delay(absl::Seconds(1)), delay);
}

}  // namespace
}  // namespace quantd::server
