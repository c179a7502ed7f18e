#include "server/store/caching_statistics_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "core/statistics/statistics_state.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "quantd/v1/statistics.pb.h"
#include "server/metrics/metrics.h"
#include "server/store/metering_statistics_store.h"
#include "server/store/sql_statistics_store.h"
#include "server/wire/statistics_proto.h"
#include "tests/server/store/large_state.h"
#include "tests/server/store/sqlite_fixture.h"
#include "tests/support/metric_value.h"

namespace quantd::server::caching_statistics_store_test {
namespace {

constexpr int64_t kLimitBytes = 16 << 20;
constexpr int64_t kCapBytes = 64 << 20;

// Counts what reads all sources.
class CountingStore final : public MeteringStatisticsStore {
 public:
  using MeteringStatisticsStore::MeteringStatisticsStore;

  absl::StatusOr<StoredStatistics> ReadStatistics(
      const EncodingKey& key, bool with_moments,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override {
    ++reads;
    return MeteringStatisticsStore::ReadStatistics(key, with_moments, proceed);
  }
  absl::StatusOr<StoredMoments> ReadMoments(
      const EncodingKey& key,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override {
    ++reads;
    return MeteringStatisticsStore::ReadMoments(key, proceed);
  }

  int reads = 0;
};

// A row of two features with their moments.
core::StatisticsState MakeState(float first, float second) {
  const std::vector<float> row = {first, second};
  const auto* const bytes = reinterpret_cast<const uint8_t*>(row.data());
  const auto layout = core::BlockLayout::Create({1, 2}, {});
  core::StatisticsState state;
  state.shape = {1, 2};
  state.statistics = core::TensorStatistics(1, 7);
  state.statistics.Update(*layout, core::ElementType::kFloat32, 0, 2, bytes,
                          nullptr);
  state.moments = core::AxisMoments{1, core::FeatureMoments(2)};
  state.moments->moments.Update({2, 1}, core::ElementType::kFloat32, 0, 2,
                                bytes, nullptr);
  return state;
}

// Equal statistics have equal bytes.
std::string Bytes(const StoredStatistics& stored) {
  v1::StatisticsState message;
  StateToProto(stored.state, &message);
  return message.SerializeAsString();
}

class CachingStatisticsStoreTest : public SqliteFixture {
 protected:
  CachingStatisticsStoreTest() { MakeCache(kCapBytes); }

  void MakeCache(int64_t cap_bytes) {
    auto inner = std::make_unique<CountingStore>(
        std::make_unique<SqlStatisticsStore>(database_, kLimitBytes),
        &metrics_);
    inner_ = inner.get();
    cache_ = std::make_unique<CachingStatisticsStore>(std::move(inner),
                                                      cap_bytes, &metrics_);
  }

  void Contribute(StatisticsStore* store, const std::string& source,
                  uint64_t sequence, const core::StatisticsState& part) {
    const absl::StatusOr<ContributionOutcome> outcome =
        store->Contribute({key_, source, sequence}, part, 0.01);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_FALSE(outcome->duplicate);
  }

  int64_t CountNow() {
    const absl::StatusOr<StoredStatistics> got = cache_->GetStatistics(key_);
    EXPECT_TRUE(got.ok()) << got.status();
    return got.ok() ? got->state.statistics.counts().total : -1;
  }

  absl::StatusOr<StoredMoments> GetMoments() {
    return cache_->ReadMoments(
        key_, [](int64_t /*memory*/) { return absl::OkStatus(); });
  }

  void ExpectResident(int entries) {
    EXPECT_EQ(testing::MetricValue(metrics_, "quantd_cache_entries"), entries);
    EXPECT_EQ(testing::MetricValue(metrics_, "quantd_cache_resident_bytes"),
              static_cast<double>(cache_->resident_bytes()));
    EXPECT_EQ(cache_->resident_bytes() > 0, entries > 0);
  }

  const std::shared_ptr<SqliteDatabase> database_ = OpenDatabase();
  Metrics metrics_;
  CountingStore* inner_ = nullptr;
  std::unique_ptr<CachingStatisticsStore> cache_;
};

TEST_F(CachingStatisticsStoreTest, MergesOnceWhatDoesNotChange) {
  for (const char* source : {"a", "b", "c"}) {
    Contribute(cache_.get(), source, 1, testing::MakeLargeState(1));
  }
  const absl::StatusOr<StoredStatistics> first = cache_->GetStatistics(key_);
  ASSERT_TRUE(first.ok()) << first.status();
  for (int i = 0; i < 3; ++i) {
    const absl::StatusOr<StoredStatistics> again = cache_->GetStatistics(key_);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(Bytes(*again), Bytes(*first));
    EXPECT_EQ(again->sources.size(), 3u);
  }
  EXPECT_EQ(inner_->reads, 1);
  ExpectResident(1);
}

TEST_F(CachingStatisticsStoreTest, KeepsMomentsBesideStatistics) {
  Contribute(cache_.get(), "a", 1, MakeState(1, 2));
  Contribute(cache_.get(), "b", 1, MakeState(3, 4));
  for (int i = 0; i < 2; ++i) {
    const absl::StatusOr<StoredMoments> moments = GetMoments();
    ASSERT_TRUE(moments.ok() && moments->moments.has_value());
    EXPECT_EQ(moments->moments->moments.sum(0), 4);
  }
  EXPECT_EQ(inner_->reads, 1);
  // They are not statistics.
  for (int i = 0; i < 2; ++i) EXPECT_EQ(CountNow(), 4);
  EXPECT_EQ(inner_->reads, 2);
  for (int i = 0; i < 2; ++i) {
    const auto both = cache_->GetStatistics(key_, /*with_moments=*/true);
    ASSERT_TRUE(both.ok() && both->moments.has_value());
    EXPECT_EQ(both->moments->moments.sum(1), 6);
    EXPECT_EQ(both->state.statistics.counts().total, 4);
  }
  EXPECT_EQ(inner_->reads, 2);
  // Nobody who did not ask for them is answered any.
  EXPECT_FALSE(cache_->GetStatistics(key_)->moments.has_value());
  ExpectResident(1);
  Contribute(cache_.get(), "b", 2, MakeState(5, 6));
  const auto both = cache_->GetStatistics(key_, /*with_moments=*/true);
  ASSERT_TRUE(both.ok() && both->moments.has_value());
  EXPECT_EQ(both->moments->moments.sum(1), 12);
  EXPECT_EQ(GetMoments()->moments->moments.sum(0), 9);
  EXPECT_EQ(CountNow(), 6);
  EXPECT_EQ(inner_->reads, 3);
  ExpectResident(1);
}

TEST_F(CachingStatisticsStoreTest, ReadsAgainWhatChanged) {
  Contribute(cache_.get(), "a", 1, MakeState(1, 2));
  EXPECT_EQ(CountNow(), 2);
  Contribute(cache_.get(), "a", 2, MakeState(1, 2));
  EXPECT_EQ(CountNow(), 4);
  Contribute(cache_.get(), "b", 1, MakeState(1, 2));
  EXPECT_EQ(CountNow(), 6);
  // Another process.
  SqlStatisticsStore other(OpenDatabase(), kLimitBytes);
  Contribute(&other, "b", 2, MakeState(1, 2));
  EXPECT_EQ(CountNow(), 8);
  EXPECT_TRUE(other.DeleteStatistics(key_, "b").ok());
  EXPECT_EQ(CountNow(), 4);
  EXPECT_TRUE(other.DeleteStatistics(key_, "").ok());
  EXPECT_EQ(core::ErrorReason(cache_->GetStatistics(key_).status()),
            "STATISTICS_NOT_FOUND");
  ExpectResident(0);
}

TEST_F(CachingStatisticsStoreTest, AReadThatIsOvertakenIsNotAnsweredAgain) {
  Contribute(cache_.get(), "a", 1, MakeState(1, 2));
  SqlStatisticsStore other(OpenDatabase(), kLimitBytes);
  const auto overtake = [&](int64_t /*memory*/) {
    Contribute(&other, "a", 2, MakeState(1, 2));
    return absl::OkStatus();
  };
  const auto got =
      cache_->ReadStatistics(key_, /*with_moments=*/false, overtake);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->state.statistics.counts().total, 2);
  EXPECT_EQ(CountNow(), 4);
}

TEST_F(CachingStatisticsStoreTest, AsksForTheMemoryOfACopy) {
  Contribute(cache_.get(), "a", 1, testing::MakeLargeState(1));
  int64_t asked = 0;
  for (int i = 0; i < 2; ++i) {
    const auto got = cache_->ReadStatistics(key_, /*with_moments=*/false,
                                            [&](int64_t memory_bytes) {
                                              asked = memory_bytes;
                                              return absl::OkStatus();
                                            });
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_GE(asked, got->state.statistics.memory_bytes());
  }
  EXPECT_LE(asked, cache_->resident_bytes());
  const auto refused = cache_->ReadStatistics(
      key_, /*with_moments=*/false,
      [](int64_t /*memory*/) { return core::DrainingError(); });
  EXPECT_EQ(core::ErrorReason(refused.status()), "DRAINING");
  EXPECT_TRUE(cache_->GetStatistics(key_).ok());
  EXPECT_EQ(inner_->reads, 1);
}

TEST_F(CachingStatisticsStoreTest, KeepsWithinItsCap) {
  const core::StatisticsState large = testing::MakeLargeState(1);
  const auto read_all = [&] {
    for (int i = 0; i < 8; ++i) {
      const EncodingKey key{"m", "r", absl::StrCat("t", i)};
      EXPECT_TRUE(cache_->GetStatistics(key).ok());
    }
  };
  for (int i = 0; i < 8; ++i) {
    ASSERT_TRUE(
        cache_->Contribute({{"m", "r", absl::StrCat("t", i)}, "a", 1}, large, 1)
            .ok());
  }
  read_all();
  const int64_t all_bytes = cache_->resident_bytes();
  ExpectResident(8);
  MakeCache(all_bytes / 2);
  read_all();
  EXPECT_LE(cache_->resident_bytes(), all_bytes / 2);
  ExpectResident(4);
  // The least recently used one went first.
  inner_->reads = 0;
  EXPECT_TRUE(cache_->GetStatistics({"m", "r", "t7"}).ok());
  EXPECT_EQ(inner_->reads, 0);
  EXPECT_TRUE(cache_->GetStatistics({"m", "r", "t0"}).ok());
  EXPECT_EQ(inner_->reads, 1);
  // Less than one takes, and a cache of nothing.
  for (const int64_t cap_bytes : {all_bytes / 8 - 1, int64_t{0}}) {
    MakeCache(cap_bytes);
    read_all();
    ExpectResident(0);
  }
}

TEST_F(CachingStatisticsStoreTest, KeepsTheLastPartWhereThereIsNoRoomForBoth) {
  Contribute(cache_.get(), "a", 1, MakeState(1, 2));
  EXPECT_EQ(CountNow(), 2);
  const int64_t statistics_bytes = cache_->resident_bytes();
  MakeCache(kCapBytes);
  EXPECT_TRUE(GetMoments().ok());
  const int64_t moments_bytes = cache_->resident_bytes();
  MakeCache(std::max(statistics_bytes, moments_bytes));
  EXPECT_TRUE(GetMoments().ok());
  EXPECT_EQ(cache_->resident_bytes(), moments_bytes);
  EXPECT_EQ(CountNow(), 2);
  EXPECT_EQ(cache_->resident_bytes(), statistics_bytes);
  EXPECT_EQ(inner_->reads, 2);
  EXPECT_TRUE(GetMoments().ok());
  EXPECT_EQ(cache_->resident_bytes(), moments_bytes);
  EXPECT_EQ(inner_->reads, 3);
  ExpectResident(1);
}

TEST_F(CachingStatisticsStoreTest, WhatIsDeletedTakesNoMemory) {
  for (const bool up_to_a_time : {false, true}) {
    Contribute(cache_.get(), "a", 1, MakeState(1, 2));
    EXPECT_EQ(CountNow(), 2);
    ExpectResident(1);
    EXPECT_TRUE((up_to_a_time ? cache_->DeleteStatisticsUpTo(
                                    key_, absl::InfiniteFuture())
                              : cache_->DeleteStatistics(key_, ""))
                    .ok());
    ExpectResident(0);
  }
}

}  // namespace
}  // namespace quantd::server::caching_statistics_store_test
