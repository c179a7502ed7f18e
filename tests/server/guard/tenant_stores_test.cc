#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "core/errors.h"
#include "core/types/encoding.h"
#include "server/guard/access_list.h"
#include "server/guard/tenant_encoding_store.h"
#include "server/guard/tenant_statistics_store.h"
#include "server/store/sql_encoding_store.h"
#include "server/store/sql_statistics_store.h"
#include "server/store/sqlite_database.h"
#include "tests/support/temporary_directory.h"

namespace quantd::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::shared_ptr<const Principal> CallerWith(const std::string& scopes,
                                            const std::string& models) {
  absl::StatusOr<std::shared_ptr<const AccessList>> list =
      AccessList::Parse("caller certificate:caller " + scopes + " " + models);
  EXPECT_TRUE(list.ok()) << list.status();
  absl::StatusOr<std::shared_ptr<const Principal>> caller =
      (*list)->Find(Credential("", {"caller"}), absl::Now());
  EXPECT_TRUE(caller.ok()) << caller.status();
  return *std::move(caller);
}

class TenantStoresTest : public ::testing::Test {
 protected:
  TenantStoresTest() {
    absl::StatusOr<std::shared_ptr<SqliteDatabase>> database =
        SqliteDatabase::Open(directory_.File("store.db"));
    EXPECT_TRUE(database.ok()) << database.status();
    encodings_ = std::make_unique<SqlEncodingStore>(*database);
    statistics_ = std::make_unique<SqlStatisticsStore>(*database, 1 << 20);
    for (const char* model : {"aaa", "acme", "acme.old/net", "acme/a", "acme/b",
                              "acme0", "rival/net"}) {
      EXPECT_TRUE(PutInto(encodings_.get(), model).ok());
      EXPECT_TRUE(ContributeTo(statistics_.get(), model).ok());
    }
  }

  static absl::Status PutInto(EncodingStore* store, const std::string& model) {
    auto encoding = std::make_shared<core::Encoding>();
    encoding->format = static_cast<core::NumberFormat>(8);
    encoding->scale = {0.5f};
    encoding->qmin = -127;
    encoding->qmax = 127;
    encoding->scale_type = core::ScaleType::kFloat32;
    return store->Put({model, "default", "t"}, std::move(encoding), {})
        .status();
  }

  static absl::Status ContributeTo(StatisticsStore* store,
                                   const std::string& model) {
    core::StatisticsState part;
    part.shape = {1};
    part.statistics = core::TensorStatistics(1, 7);
    return store->Contribute({{model, "default", "t"}, "source", 1}, part, 0.1)
        .status();
  }

  static std::vector<std::string> Models(EncodingStore* store,
                                         const std::string& after, int limit) {
    std::vector<std::string> names;
    const auto models = store->ListModels({after, ""}, limit);
    EXPECT_TRUE(models.ok()) << models.status();
    for (const ModelListEntry& entry : *models) names.push_back(entry.model);
    return names;
  }

  const testing::TemporaryDirectory directory_;
  std::unique_ptr<EncodingStore> encodings_;
  std::unique_ptr<StatisticsStore> statistics_;
};

TEST_F(TenantStoresTest, ListsAreThoseOfAStoreWithoutTheOthers) {
  TenantEncodingStore below(encodings_.get(), CallerWith("read", "acme/"));
  EXPECT_THAT(Models(&below, "", 10), ElementsAre("acme/a", "acme/b"));
  EXPECT_THAT(Models(&below, "", 1), ElementsAre("acme/a"));
  EXPECT_THAT(Models(&below, "acme/a", 10), ElementsAre("acme/b"));
  EXPECT_THAT(Models(&below, "acme/b", 10), IsEmpty());
  EXPECT_THAT(Models(&below, "zzz", 10), IsEmpty());
  TenantEncodingStore one(encodings_.get(), CallerWith("read", "acme"));
  EXPECT_THAT(Models(&one, "", 10), ElementsAre("acme"));
  TenantEncodingStore all(encodings_.get(), CallerWith("read", "*"));
  EXPECT_EQ(Models(&all, "", 10).size(), 7);
  EXPECT_THAT(*below.ListRevisions("rival/net", "", 10), IsEmpty());
  EXPECT_THAT(*below.ListEncodings("rival/net", "default", "", 10), IsEmpty());
  EXPECT_EQ(below.ListEncodings("acme/a", "default", "", 10)->size(), 1);
}

// Tells which names it was asked for.
class RecordingStore : public SqlEncodingStore {
 public:
  using SqlEncodingStore::SqlEncodingStore;

  absl::StatusOr<std::vector<ModelListEntry>> ListModels(const NameRange& range,
                                                         int limit) override {
    after = std::string(range.after);
    before = std::string(range.before);
    return SqlEncodingStore::ListModels(range, limit);
  }

  std::string after;
  std::string before;
};

TEST_F(TenantStoresTest, ListsReadNoNamesOfOthers) {
  const absl::StatusOr<std::shared_ptr<SqliteDatabase>> database =
      SqliteDatabase::Open(directory_.File("store.db"));
  ASSERT_TRUE(database.ok()) << database.status();
  RecordingStore recorder(*database);
  for (const char* models : {"acme/", "acme", "none/"}) {
    recorder.after = recorder.before = "";
    TenantEncodingStore tenant(&recorder, CallerWith("read", models));
    const size_t seen = Models(&tenant, "", 10).size();
    ASSERT_NE(recorder.before, "") << models;
    EXPECT_EQ(
        encodings_->ListModels({recorder.after, recorder.before}, 10)->size(),
        seen);
  }
}

TEST_F(TenantStoresTest, WhatIsNotTheCallersIsAsIfItWereNotThere) {
  const EncodingKey theirs{"rival/net", "default", "t"};
  TenantEncodingStore encodings(encodings_.get(),
                                CallerWith("read,calibrate,admin", "acme/"));
  TenantStatisticsStore statistics(statistics_.get(),
                                   CallerWith("read,calibrate,admin", "acme/"));
  const absl::Status get = encodings.Get(theirs).status();
  const absl::Status get_statistics = statistics.GetStatistics(theirs).status();
  EXPECT_FALSE(encodings.Cached(theirs).has_value());
  EXPECT_THAT(*statistics.ListStatistics("rival/net", "default", "", 10),
              IsEmpty());
  const absl::Status remove = encodings.Delete(theirs, {});
  const absl::Status remove_statistics =
      statistics.DeleteStatistics(theirs, "");
  // Nothing came of it; now it is really gone.
  ASSERT_TRUE(encodings_->Delete(theirs, {}).ok());
  ASSERT_TRUE(statistics_->DeleteStatistics(theirs, "").ok());
  EXPECT_EQ(get, encodings_->Get(theirs).status());
  EXPECT_EQ(get_statistics, statistics_->GetStatistics(theirs).status());
  EXPECT_EQ(remove, encodings_->Delete(theirs, {}));
  EXPECT_EQ(remove_statistics, statistics_->DeleteStatistics(theirs, ""));
}

TEST_F(TenantStoresTest, WritesAreDeniedWhetherOrNotThereIsSuchAModel) {
  const auto caller = CallerWith("calibrate", "acme/");
  TenantEncodingStore encodings(encodings_.get(), caller);
  TenantStatisticsStore statistics(statistics_.get(), caller);
  for (const char* model : {"rival/net", "rival/none"}) {
    for (const absl::Status& status :
         {PutInto(&encodings, model), ContributeTo(&statistics, model)}) {
      EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
      EXPECT_EQ(core::ErrorReason(status), "MODEL_DENIED");
    }
  }
  EXPECT_TRUE(PutInto(&encodings, "acme/new").ok());
  EXPECT_TRUE(ContributeTo(&statistics, "acme/new").ok());
  TenantEncodingStore reading(encodings_.get(), CallerWith("read", "acme/"));
  EXPECT_EQ(core::ErrorReason(PutInto(&reading, "acme/a")), "SCOPE_MISSING");
}

}  // namespace
}  // namespace quantd::server
