#include "server/housekeeper.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/types/encoding.h"
#include "server/guard/access_list.h"
#include "server/logging.h"
#include "server/metrics/metrics.h"
#include "server/store/caching_encoding_store.h"
#include "server/store/sql_database.h"
#include "server/store/sql_encoding_store.h"
#include "server/store/sql_statistics_store.h"
#include "server/store/sqlite_database.h"
#include "server/store/store_keeper.h"
#include "tests/support/metric_value.h"
#include "tests/support/sqlite_file.h"
#include "tests/support/temporary_directory.h"

namespace quantd::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const absl::Time kNow = absl::FromUnixSeconds(1'800'000'000);

RevisionUsage Revision(const std::string& name, int days_old) {
  return {"m", name, kNow - absl::Hours(24 * days_old), {}};
}

std::vector<std::string> Names(const std::vector<RevisionUsage>& revisions) {
  std::vector<std::string> names;
  for (const RevisionUsage& revision : revisions) {
    names.push_back(revision.revision);
  }
  return names;
}

TEST(RetentionRuleTest, ARevisionGoesThatIsBeyondAllThatIsSaid) {
  const std::vector<RevisionUsage> all = {
      Revision("new", 0), Revision("old", 40), Revision("oldest", 90),
      Revision("young", 3)};
  EXPECT_THAT(Names(BeyondRule({"models:*", 2, {}}, all, kNow)),
              ElementsAre("oldest", "old"));
  EXPECT_THAT(
      Names(BeyondRule({"models:*", {}, absl::Hours(24 * 60)}, all, kNow)),
      ElementsAre("oldest"));
  EXPECT_THAT(
      Names(BeyondRule({"models:*", 1, absl::Hours(24 * 30)}, all, kNow)),
      ElementsAre("oldest", "old"));
  EXPECT_THAT(
      Names(BeyondRule({"models:*", 4, absl::Hours(24 * 30)}, all, kNow)),
      IsEmpty());
  EXPECT_THAT(
      Names(BeyondRule({"models:*", 1, absl::InfiniteDuration()}, all, kNow)),
      IsEmpty());
  // A clock that is behind makes nothing old.
  EXPECT_THAT(Names(BeyondRule({"models:*", {}, absl::Hours(24)}, all,
                               kNow - absl::Hours(24 * 1000))),
              IsEmpty());
}

TEST(RetentionRuleTest, TheLongestScopeDecides) {
  const std::vector<RetentionRule> rules = {
      {"models:acme/", 2, {}},
      {"models:*", 3, {}},
      {"models:acme/prod/", {}, absl::InfiniteDuration()}};
  EXPECT_EQ(RuleOf("acme/net", rules)->scope, "models:acme/");
  EXPECT_EQ(RuleOf("acme/prod/net", rules)->scope, "models:acme/prod/");
  EXPECT_EQ(RuleOf("other", rules)->scope, "models:*");
  EXPECT_EQ(RuleOf("other", {rules[0]}), nullptr);
}

class HousekeeperTest : public ::testing::Test {
 protected:
  HousekeeperTest() {
    auto database = SqliteDatabase::Open(directory_.File("store.db"));
    EXPECT_TRUE(database.ok()) << database.status();
    CachingEncodingStore::Options options;
    options.max_age = absl::Hours(1);
    encodings_ = std::make_unique<CachingEncodingStore>(
        std::make_unique<SqlEncodingStore>(*database), options, &metrics_);
    statistics_ = std::make_unique<SqlStatisticsStore>(*database, 1 << 20);
    store_keeper_ = std::make_unique<StoreKeeper>(*database);
    Housekeeper::Options own;
    own.clock = [this] { return absl::Now() + ahead_ + jump_; };
    own.steady_clock = [this] { return absl::Hours(1) + ahead_; };
    keeper_ = std::make_unique<Housekeeper>(
        store_keeper_.get(), encodings_.get(), statistics_.get(),
        [this] { return access_; }, std::move(own), &metrics_);
  }

  void SetAccess(const std::string& text) {
    auto list = AccessList::Parse("x certificate:x calibrate *\n" + text);
    ASSERT_TRUE(list.ok()) << list.status();
    access_ = *std::move(list);
  }

  void Put(const std::string& model, const std::string& revision) {
    core::Encoding encoding;
    encoding.format = static_cast<core::NumberFormat>(8);
    encoding.scale = {0.5f};
    encoding.qmin = -128;
    encoding.qmax = 127;
    EXPECT_TRUE(encodings_
                    ->Put({model, revision, "t"},
                          std::make_shared<const core::Encoding>(encoding), {})
                    .ok());
    core::StatisticsState part;
    part.shape = {1};
    part.statistics = core::TensorStatistics(1, 7);
    EXPECT_TRUE(
        statistics_
            ->Contribute({{model, revision, "t"}, "s", ++sequence_}, part, 0.1)
            .ok());
  }

  bool IsThere(const std::string& model, const std::string& revision) {
    const EncodingKey key{model, revision, "t"};
    const bool has_encoding = encodings_->Get(key).ok();
    EXPECT_EQ(statistics_->GetStatistics(key).ok(), has_encoding);
    return has_encoding;
  }

  std::string LogOf(void (Housekeeper::*look)()) {
    ::testing::internal::CaptureStderr();
    (keeper_.get()->*look)();
    return ::testing::internal::GetCapturedStderr();
  }
  std::string LookAtRevisions() { return LogOf(&Housekeeper::LookAtRevisions); }

  const testing::TemporaryDirectory directory_;
  Metrics metrics_;
  // How far both clocks are ahead, and the one of the day beside that.
  absl::Duration ahead_;
  absl::Duration jump_;
  uint64_t sequence_ = 0;
  std::shared_ptr<const AccessList> access_;
  std::unique_ptr<CachingEncodingStore> encodings_;
  std::unique_ptr<SqlStatisticsStore> statistics_;
  std::unique_ptr<StoreKeeper> store_keeper_;
  std::unique_ptr<Housekeeper> keeper_;
};

TEST_F(HousekeeperTest, DeletesWhatItHasToldBeforeAndNothingElse) {
  for (const char* revision : {"1", "2", "3"}) {
    Put("acme/net", revision);
    Put("other", revision);
  }
  EXPECT_THAT(LookAtRevisions(), IsEmpty());
  SetAccess("retain models:acme/ revisions=1\n");
  for (const char* revision : {"1", "2"}) {
    EXPECT_TRUE(IsThere("acme/net", revision));
  }
  const std::string told = LookAtRevisions();
  EXPECT_THAT(told, HasSubstr("the next look will delete a revision "
                              "model=acme/net revision=1 rule=models:acme/"));
  EXPECT_THAT(told, Not(HasSubstr("revision=3")));
  EXPECT_TRUE(IsThere("acme/net", "1"));
  // Written meanwhile: now it is not among the oldest any more.
  Put("acme/net", "1");
  const std::string deleted = LookAtRevisions();
  EXPECT_THAT(deleted, HasSubstr("deleted a revision model=acme/net "
                                 "revision=2 rule=models:acme/"));
  EXPECT_THAT(deleted, HasSubstr("rows=2"));
  EXPECT_TRUE(IsThere("acme/net", "1"));
  EXPECT_FALSE(IsThere("acme/net", "2"));
  EXPECT_FALSE(IsThere("acme/net", "3"));
  for (const char* revision : {"1", "2", "3"}) {
    EXPECT_TRUE(IsThere("other", revision));
  }
  EXPECT_EQ(testing::MetricValue(metrics_,
                                 "quantd_retention_deleted_revisions_total"),
            2);
  EXPECT_THAT(LookAtRevisions(), IsEmpty());
}

TEST_F(HousekeeperTest, ADamagedRevisionIsKeptAndTheOthersAreLookedAfter) {
  for (const char* revision : {"1", "2", "3"}) Put("acme/net", revision);
  SetAccess("retain models:acme/ revisions=1\n");
  LookAtRevisions();
  testing::ExecuteSql(directory_.File("store.db"),
                      "UPDATE row_sets SET generation = 7 "
                      "WHERE revision = '1'");
  const std::string told = LookAtRevisions();
  EXPECT_THAT(told, HasSubstr("a damaged revision is kept, whatever its age "
                              "model=acme/net revision=1"));
  EXPECT_THAT(told, HasSubstr("deleted a revision model=acme/net revision=2"));
  EXPECT_THAT(told, Not(HasSubstr("deleted a revision model=acme/net "
                                  "revision=1")));
  EXPECT_TRUE(IsThere("acme/net", "3"));
}

TEST_F(HousekeeperTest, ANewRuleDeletesNothingBeforeTheNextLook) {
  Put("a", "1");
  Put("a", "2");
  SetAccess("retain models:* revisions=2\n");
  LookAtRevisions();
  SetAccess("retain models:* revisions=1\n");
  LookAtRevisions();
  EXPECT_TRUE(IsThere("a", "1"));
  SetAccess("");
  LookAtRevisions();
  SetAccess("retain models:* revisions=1\n");
  LookAtRevisions();
  EXPECT_TRUE(IsThere("a", "1"));
  LookAtRevisions();
  EXPECT_FALSE(IsThere("a", "1"));
}

TEST_F(HousekeeperTest, AClockThatWasSetForwardDeletesNothing) {
  Put("a", "1");
  SetAccess("retain models:* age=24h\n");
  LookAtRevisions();
  jump_ = absl::Hours(24 * 365);
  EXPECT_THAT(LookAtRevisions(), HasSubstr("the clock was set forward"));
  EXPECT_TRUE(IsThere("a", "1"));
  jump_ = absl::ZeroDuration();
  LookAtRevisions();
  EXPECT_TRUE(IsThere("a", "1"));
  ahead_ = absl::Hours(25);
  LookAtRevisions();
  EXPECT_FALSE(IsThere("a", "1"));
}

TEST_F(HousekeeperTest, TellsWhatIsUsedAndWhoIsNearlyFull) {
  Put("acme/net", "1");
  EXPECT_THAT(LogOf(&Housekeeper::LookAtUsage), IsEmpty());
  EXPECT_EQ(testing::MetricValue(metrics_, "quantd_store_rows"), 2);
  EXPECT_GT(testing::MetricValue(metrics_, "quantd_store_bytes"), 30);
  EXPECT_EQ(testing::MetricValue(metrics_, "quantd_quota_used_ratio"), 0);
  SetAccess(
      "quota models:acme/ rows=2\nquota models:* rows=4\n"
      "quota models:unused/ rows=1\n");
  const std::string told = LogOf(&Housekeeper::LookAtUsage);
  EXPECT_THAT(told, HasSubstr("a quota is nearly used up quota=models:acme/"));
  EXPECT_THAT(told, Not(HasSubstr("models:*")));
  EXPECT_EQ(testing::MetricValue(metrics_, "quantd_quota_used_ratio"), 1);
  // Said once.
  EXPECT_THAT(LogOf(&Housekeeper::LookAtUsage), IsEmpty());
}

}  // namespace
}  // namespace quantd::server
