// What every StatisticsStore promises, on each implementation.

#include "server/store/statistics_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "core/statistics/feature_moments.h"
#include "core/statistics/gram_state.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "quantd/v1/statistics.pb.h"
#include "server/metrics/metrics.h"
#include "server/store/caching_statistics_store.h"
#include "server/store/metering_statistics_store.h"
#include "server/store/sql_database.h"
#include "server/store/sql_statistics_store.h"
#include "server/store/statistics_pieces.h"
#include "server/wire/statistics_proto.h"
#include "tests/server/store/large_state.h"
#include "tests/server/store/test_database.h"
#include "tests/support/metric_value.h"
#include "tests/support/postgresql_cluster.h"
#include "tests/support/sanitizers.h"

namespace quantd::server::statistics_store_test {
namespace {

using ::testing::IsEmpty;

constexpr int64_t kLimitBytes = 512 << 10;

using testing::Backend;

// A store as the server has it, or without what is in front of it.
struct Kind {
  std::string name;
  Backend backend;
  bool is_cached;
};

std::vector<Kind> Kinds() {
  std::vector<Kind> kinds = {{"Sqlite", Backend::kSqlite, false},
                             {"CachedSqlite", Backend::kSqlite, true}};
  if (testing::PostgresqlCluster::IsInstalled()) {
    kinds.push_back({"Postgresql", Backend::kPostgresql, false});
  }
  return kinds;
}

std::string KindName(const ::testing::TestParamInfo<Kind>& info) {
  return info.param.name;
}

// The statistics of a tensor of `shape` with these elements.
core::StatisticsState MakeState(const std::vector<float>& elements,
                                std::vector<int64_t> shape,
                                std::vector<int64_t> block_size = {},
                                int mantissa_bits = 7) {
  const auto layout = core::BlockLayout::Create(shape, block_size);
  EXPECT_TRUE(layout.ok()) << layout.status();
  core::StatisticsState state;
  state.block_size = std::move(block_size);
  state.shape = std::move(shape);
  state.statistics =
      core::TensorStatistics(layout->scale_count(), mantissa_bits);
  state.statistics.Update(*layout, core::ElementType::kFloat32, 0,
                          static_cast<int64_t>(elements.size()),
                          reinterpret_cast<const uint8_t*>(elements.data()),
                          nullptr);
  return state;
}

core::StatisticsState MakeState(const std::vector<float>& elements) {
  return MakeState(elements, {static_cast<int64_t>(elements.size())});
}

// Equal states have equal bytes.
std::string Bytes(const core::StatisticsState& state) {
  v1::StatisticsState message;
  StateToProto(state, &message);
  return message.SerializeAsString();
}

// The Gram matrix of `rows` of as many features as there are exponents.
core::GramState MakeGram(const std::vector<float>& rows,
                         std::vector<int> exponents) {
  const auto features = static_cast<int64_t>(exponents.size());
  absl::StatusOr<core::GramState> gram = core::GramState::Create(
      std::move(exponents), core::GramState::PartSize(features));
  EXPECT_TRUE(gram.ok()) << gram.status();
  gram->Update(core::ElementType::kFloat32,
               static_cast<int64_t>(rows.size()) / features,
               reinterpret_cast<const uint8_t*>(rows.data()), nullptr);
  gram->Finish(nullptr);
  return *std::move(gram);
}

// Normal rows of 600 features: more sums than a piece has.
constexpr int64_t kFeatures = 600;
core::StatisticsState StateWithGram(int seed) {
  constexpr int64_t kRows = 8;
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::normal_distribution<float> normal;
  std::vector<float> rows(kRows * kFeatures);
  for (float& x : rows) x = normal(random);
  core::StatisticsState state = MakeState(rows, {kRows, kFeatures});
  state.gram = MakeGram(rows, std::vector<int>(kFeatures, -10));
  return state;
}

// The same rows with the moments of their features.
core::StatisticsState StateWithMoments(int seed, int64_t features = kFeatures) {
  constexpr int64_t kRows = 8;
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::normal_distribution<float> normal;
  std::vector<float> rows(kRows * features);
  for (float& x : rows) x = normal(random);
  core::StatisticsState state = MakeState(rows, {kRows, features});
  state.moments = core::AxisMoments{1, core::FeatureMoments(features)};
  state.moments->moments.Update(
      {features, 1}, core::ElementType::kFloat32, 0, kRows * features,
      reinterpret_cast<const uint8_t*>(rows.data()), nullptr);
  return state;
}

std::string Bytes(const core::AxisMoments& moments) {
  v1::FeatureMoments message;
  MomentsToProto(moments, &message);
  return message.SerializeAsString();
}

class StatisticsStoreTest : public ::testing::TestWithParam<Kind> {
 protected:
  StatisticsStoreTest() { Reopen(); }
  ~StatisticsStoreTest() override { store_.reset(); }

  void Reopen() {
    store_.reset();
    store_ = Open();
  }

  // A handle of its own, as another process has it.
  std::unique_ptr<StatisticsStore> Open() {
    std::shared_ptr<SqlDatabase> database = database_.Open();
    if (database == nullptr) return nullptr;
    auto store =
        std::make_unique<SqlStatisticsStore>(std::move(database), limit_bytes_);
    if (!GetParam().is_cached) return store;
    return std::make_unique<CachingStatisticsStore>(
        std::make_unique<MeteringStatisticsStore>(std::move(store), &metrics_),
        /*cap_bytes=*/64 << 20, &metrics_);
  }

  absl::StatusOr<ContributionOutcome> Contribute(
      const std::string& source, uint64_t sequence,
      const core::StatisticsState& part, double averaging_constant = 0.01) {
    return store_->Contribute({key_, source, sequence}, part,
                              averaging_constant);
  }

  // Expects the contribution to be counted.
  void MustContribute(const std::string& source, uint64_t sequence,
                      const core::StatisticsState& part,
                      double averaging_constant = 0.01) {
    const absl::StatusOr<ContributionOutcome> outcome =
        Contribute(source, sequence, part, averaging_constant);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->sequence, sequence);
    EXPECT_FALSE(outcome->duplicate);
  }

  StoredStatistics MustGet() {
    absl::StatusOr<StoredStatistics> got = store_->GetStatistics(key_);
    EXPECT_TRUE(got.ok()) << got.status();
    return got.ok() ? *std::move(got) : StoredStatistics();
  }

  core::GramState::Parts MustGetGram() {
    absl::StatusOr<absl::optional<core::GramState>> got = store_->ReadGram(
        key_, [](int64_t /*memory*/) { return absl::OkStatus(); });
    EXPECT_TRUE(got.ok()) << got.status();
    EXPECT_TRUE(got.ok() && got->has_value());
    return got.ok() && got->has_value() ? (*got)->ToParts()
                                        : core::GramState::Parts();
  }

  // Empty where there are none.
  std::string MustGetMoments() {
    const absl::StatusOr<StoredMoments> got = store_->ReadMoments(
        key_, [](int64_t /*memory*/) { return absl::OkStatus(); });
    EXPECT_TRUE(got.ok()) << got.status();
    return got.ok() && got->moments.has_value() ? Bytes(*got->moments) : "";
  }

  static std::string Reason(const absl::Status& status) {
    return std::string(core::ErrorReason(status));
  }

  const testing::TestDatabase database_{GetParam().backend};
  Metrics metrics_;
  int64_t limit_bytes_ = kLimitBytes;
  std::unique_ptr<StatisticsStore> store_;
  const EncodingKey key_{"resnet/50", "main", "conv1.output"};
};

TEST_P(StatisticsStoreTest, GivesBackWhatWasContributed) {
  const core::StatisticsState part =
      MakeState({-1.5f, 0, 3, 1e-20f, 3.4e38f, -0.0f}, {2, 3}, {0, 1}, 5);
  const absl::Time before = absl::Now() - absl::Milliseconds(1);
  MustContribute("rank-0", 7, part);
  for (const bool reopened : {false, true}) {
    if (reopened) Reopen();
    const StoredStatistics got = MustGet();
    EXPECT_EQ(Bytes(got.state), Bytes(part));
    ASSERT_EQ(got.sources.size(), 1u);
    EXPECT_EQ(got.sources[0].source, "rank-0");
    EXPECT_EQ(got.sources[0].sequence, 7u);
    EXPECT_GE(got.sources[0].update_time, before);
    EXPECT_LE(got.sources[0].update_time, absl::Now());
    ASSERT_EQ(got.moving_average.size(), 3u);
    EXPECT_EQ(got.moving_average[0].min, -1.5);
    EXPECT_EQ(got.moving_average[2].max, 3);
  }
}

TEST_P(StatisticsStoreTest, ReadingAsksBeforeEachSource) {
  std::vector<float> elements(2000);
  for (int source = 0; source < 3; ++source) {
    for (size_t i = 0; i < elements.size(); ++i) {
      elements[i] = static_cast<float>(i + 5000 * source);
    }
    MustContribute(absl::StrCat("rank-", source), 1, MakeState(elements));
  }
  int calls = 0;
  const absl::Status refusal = absl::CancelledError("enough");
  EXPECT_EQ(store_
                ->ReadStatistics(key_, /*with_moments=*/false,
                                 [&](int64_t memory_bytes) {
                                   return ++calls == 2 ? refusal
                                                       : absl::OkStatus();
                                 })
                .status(),
            refusal);
  EXPECT_EQ(calls, 2);
  std::vector<int64_t> asked;
  const absl::StatusOr<StoredStatistics> got = store_->ReadStatistics(
      key_, /*with_moments=*/false, [&](int64_t memory_bytes) {
        asked.push_back(memory_bytes);
        return absl::OkStatus();
      });
  ASSERT_TRUE(got.ok()) << got.status();
  ASSERT_EQ(asked.size(), 3u);
  EXPECT_GE(asked[2], got->state.statistics.memory_bytes());
}

// What merging asks for grows with a piece, and not with the statistics.
TEST_P(StatisticsStoreTest, MergesLargeStatisticsInLittleMemory) {
  constexpr int kChannels = 96;
  constexpr int kElements = 2000;
  limit_bytes_ = 16 << 20;
  Reopen();
  std::mt19937 random(1);
  std::lognormal_distribution<float> distribution(0, 2);
  absl::optional<core::StatisticsState> whole;
  int64_t largest_memory_bytes = 0;
  for (uint64_t sequence = 1; sequence <= 3; ++sequence) {
    std::vector<float> elements(kChannels * kElements);
    for (float& element : elements) element = distribution(random);
    const core::StatisticsState part =
        MakeState(elements, {kChannels, kElements}, {1, 0}, 7);
    const absl::Status refusal = absl::ResourceExhaustedError("full");
    EXPECT_EQ(store_
                  ->Merge({key_, "a", sequence}, part, 0.01,
                          [&](int64_t memory_bytes) { return refusal; })
                  .status(),
              refusal);
    const absl::StatusOr<ContributionOutcome> outcome = store_->Merge(
        {key_, "a", sequence}, part, 0.01, [&](int64_t memory_bytes) {
          largest_memory_bytes = std::max(largest_memory_bytes, memory_bytes);
          return absl::OkStatus();
        });
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_FALSE(outcome->duplicate);
    if (whole.has_value()) {
      ASSERT_TRUE(core::MergeState(part, &*whole).ok());
    } else {
      whole = part;
    }
    EXPECT_EQ(Bytes(MustGet().state), Bytes(*whole));
  }
  const auto entries = store_->ListStatistics(key_.model, key_.revision, "", 9);
  ASSERT_TRUE(entries.ok()) << entries.status();
  ASSERT_EQ(entries->size(), 1u);
  constexpr int64_t kAveragesBytes = kChannels * sizeof(core::Extremes);
  EXPECT_EQ((*entries)[0].size_bytes,
            static_cast<int64_t>(Bytes(*whole).size()) + kAveragesBytes);
  // Of more than one piece.
  EXPECT_GT((*entries)[0].size_bytes, 2 * kStatisticsPieceBytes);
  EXPECT_LT(largest_memory_bytes, 48 * kStatisticsPieceBytes);
}

TEST_P(StatisticsStoreTest, SaysWhatIsNotThere) {
  EXPECT_EQ(Reason(store_->GetStatistics(key_).status()),
            "STATISTICS_NOT_FOUND");
  EXPECT_EQ(Reason(store_->DeleteStatistics(key_, "")), "STATISTICS_NOT_FOUND");
  MustContribute("rank-0", 1, MakeState({1}));
  EXPECT_EQ(Reason(store_->DeleteStatistics(key_, "rank-1")),
            "STATISTICS_NOT_FOUND");
  for (const EncodingKey& other :
       {EncodingKey{"resnet/5", "0main", "conv1.output"},
        EncodingKey{"resnet/50", "main", "conv1.outpu"}}) {
    EXPECT_EQ(Reason(store_->GetStatistics(other).status()),
              "STATISTICS_NOT_FOUND");
  }
}

TEST_P(StatisticsStoreTest, AddsContributionsOfASourceAndOfSeveral) {
  MustContribute("b", 1, MakeState({1, 2, 3}));
  MustContribute("a", 5, MakeState({-4, 5}));
  MustContribute("b", 2, MakeState({6, 7, 8, 9}));
  const StoredStatistics got = MustGet();
  EXPECT_EQ(
      Bytes(got.state), Bytes([] {
        // The largest extent of a dimension that is not divided counts.
        core::StatisticsState whole = MakeState({1, 2, 3, -4, 5, 6, 7, 8, 9});
        whole.shape = {4};
        return whole;
      }()));
  ASSERT_EQ(got.sources.size(), 2u);
  EXPECT_EQ(got.sources[0].source, "a");
  EXPECT_EQ(got.sources[0].sequence, 5u);
  EXPECT_EQ(got.sources[1].source, "b");
  EXPECT_EQ(got.sources[1].sequence, 2u);
}

TEST_P(StatisticsStoreTest, CountsARepeatedOrOlderContributionOnce) {
  MustContribute("a", 3, MakeState({1, 2}));
  const std::string once = Bytes(MustGet().state);
  for (const uint64_t sequence : {3, 2, 1}) {
    // What it carries does not matter any more.
    for (const core::StatisticsState& part :
         {MakeState({1, 2}), MakeState({9}, {1}, {}, 3)}) {
      const absl::StatusOr<ContributionOutcome> outcome =
          Contribute("a", sequence, part);
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      EXPECT_TRUE(outcome->duplicate);
      EXPECT_EQ(outcome->sequence, 3u);
    }
  }
  EXPECT_EQ(Bytes(MustGet().state), once);
  MustContribute("a", 4, MakeState({1, 2}));
  EXPECT_EQ(MustGet().state.statistics.counts().total, 4);
}

TEST_P(StatisticsStoreTest, SequencesOfSourcesAreApart) {
  MustContribute("a", 100, MakeState({1}));
  MustContribute("b", 1, MakeState({2}));
  EXPECT_EQ(MustGet().state.statistics.counts().total, 2);
}

TEST_P(StatisticsStoreTest, RefusesWhatDoesNotGoTogether) {
  const std::vector<float> elements = {1, 2, 3, 4, 5, 6};
  MustContribute("a", 1, MakeState(elements, {2, 3}, {1, 0}, 5));
  const std::string before = Bytes(MustGet().state);
  for (const core::StatisticsState& part : {
           MakeState(elements, {2, 3}, {0, 1}, 5),
           MakeState(elements, {2, 3}, {1, 0}, 6),
           MakeState(elements, {2, 3, 1}, {1, 0, 0}, 5),
           MakeState(elements, {3, 2}, {1, 0}, 5),
       }) {
    // The same source, and one that has nothing yet.
    for (const char* source : {"a", "b"}) {
      EXPECT_EQ(Reason(Contribute(source, 2, part).status()),
                "STATISTICS_MISMATCH");
    }
  }
  EXPECT_EQ(Bytes(MustGet().state), before);
  MustContribute("b", 2, MakeState({1, 2}, {2, 1}, {1, 0}, 5));
}

TEST_P(StatisticsStoreTest, RefusesASourceThatGetsTooLarge) {
  std::vector<float> elements;
  uint32_t bits = 1;
  // A bin for each of them.
  while (bits < 0x7f000000) {
    elements.push_back(
        core::HistogramBinEdges((bits | 0x80000000) >> 13, 10).low);
    bits += 1 << 13;
  }
  const int64_t count = static_cast<int64_t>(elements.size()) / 8;
  // Parts that fit by themselves, for scale indices of their own.
  constexpr int64_t kParts = 8;
  absl::Status status;
  uint64_t sequence = 0;
  while (status.ok() && sequence < kParts) {
    ++sequence;
    std::vector<float> part(kParts * count, 0);
    std::copy(elements.begin(), elements.begin() + count,
              part.begin() + static_cast<int64_t>(sequence - 1) * count);
    status =
        Contribute("a", sequence, MakeState(part, {kParts, count}, {1, 0}, 10))
            .status();
  }
  EXPECT_EQ(Reason(status), "STATISTICS_TOO_LARGE") << status;
  EXPECT_GT(sequence, 2u);
  // What was there is still there.
  EXPECT_EQ(MustGet().sources[0].sequence, sequence - 1);
  // The limit is one of each source.
  EXPECT_TRUE(Contribute("b", 1,
                         MakeState(std::vector<float>(kParts, 1), {kParts, 1},
                                   {1, 0}, 10))
                  .ok());
}

// What the last of the transactions of a Gram matrix would refuse.
TEST_P(StatisticsStoreTest, RefusesBeforeItWritesAGramMatrix) {
  constexpr int64_t kManyFeatures = 1500;
  const core::StatisticsState small = testing::MakeStateWithGram(kManyFeatures);
  core::StatisticsState large = small;
  std::vector<float> row(kManyFeatures);
  for (size_t i = 0; i < row.size(); ++i) row[i] = static_cast<float>(i * i);
  large.statistics = MakeState(row, {1, kManyFeatures}).statistics;
  core::StatisticsState other = small;
  other.statistics = MakeState(row, {1, kManyFeatures}, {}, 5).statistics;
  const auto size_bytes = [](const core::StatisticsState& state) {
    core::StatisticsState histograms = state;
    histograms.gram.reset();
    return static_cast<int64_t>(Bytes(histograms).size() +
                                sizeof(core::Extremes));
  };
  // Expects that nothing is asked for but what it takes to see that.
  const auto expect_refusal = [&](const core::StatisticsState& part,
                                  const std::string& reason) {
    int asked = 0;
    const auto proceed = [&](int64_t /*memory*/) {
      ++asked;
      return absl::OkStatus();
    };
    EXPECT_EQ(
        Reason(store_->Merge({key_, "a", 2}, part, 0.01, proceed).status()),
        reason);
    EXPECT_EQ(asked, 1);
  };
  limit_bytes_ = size_bytes(large) - 1;
  Reopen();
  expect_refusal(large, "STATISTICS_TOO_LARGE");
  // With one byte more it fits by itself, and not beside what is there.
  ++limit_bytes_;
  Reopen();
  MustContribute("a", 1, small);
  expect_refusal(large, "STATISTICS_TOO_LARGE");
  expect_refusal(other, "STATISTICS_MISMATCH");
  MustContribute("b", 1, large);
  EXPECT_EQ(MustGetGram().rows, 2);
}

TEST_P(StatisticsStoreTest, AveragesTheExtremesOfASingleSource) {
  MustContribute("a", 1, MakeState({-1, 1, 0, 10}, {2, 2}, {1, 0}));
  MustContribute("a", 2, MakeState({-3, 5, 2, 20}, {2, 2}, {1, 0}), 0.25);
  std::vector<core::Extremes> average = MustGet().moving_average;
  ASSERT_EQ(average.size(), 2u);
  EXPECT_EQ(average[0].min, -1.5);
  EXPECT_EQ(average[0].max, 2);
  EXPECT_EQ(average[1].min, 0.5);
  EXPECT_EQ(average[1].max, 12.5);
  // No finite element leaves an average as it is.
  const float nan = std::nanf("");
  MustContribute("a", 3, MakeState({nan, nan, 0.5f, 16.5f}, {2, 2}, {1, 0}),
                 0.5);
  average = MustGet().moving_average;
  EXPECT_EQ(average[0].max, 2);
  EXPECT_EQ(average[1].max, 14.5);
  MustContribute("b", 1, MakeState({1, 1, 1, 1}, {2, 2}, {1, 0}));
  EXPECT_THAT(MustGet().moving_average, IsEmpty());
}

TEST_P(StatisticsStoreTest, DeletesASourceOrAll) {
  for (const char* source : {"a", "b", "c"}) {
    MustContribute(source, 9, MakeState({1}));
  }
  EXPECT_TRUE(store_->DeleteStatistics(key_, "b").ok());
  const StoredStatistics rest = MustGet();
  ASSERT_EQ(rest.sources.size(), 2u);
  EXPECT_EQ(rest.sources[0].source, "a");
  EXPECT_EQ(rest.sources[1].source, "c");
  EXPECT_EQ(rest.state.statistics.counts().total, 2);
  // It starts over.
  MustContribute("b", 1, MakeState({1}));
  EXPECT_TRUE(store_->DeleteStatistics(key_, "").ok());
  EXPECT_TRUE(absl::IsNotFound(store_->GetStatistics(key_).status()));
  // With nothing there, another layout may come.
  MustContribute("a", 1, MakeState({1, 2}, {2}, {1}, 3));
}

TEST_P(StatisticsStoreTest, ListsPagesInOrderOfBytes) {
  const std::vector<std::string> names = {"A", "Z", "a", "a.b", "a/b", "é"};
  for (auto name = names.rbegin(); name != names.rend(); ++name) {
    for (const char* source : {"x", "y"}) {
      ASSERT_TRUE(
          store_
              ->Contribute({{"m", "r", *name}, source, 1}, MakeState({1}), 0.01)
              .ok());
    }
  }
  ASSERT_TRUE(
      store_->Contribute({{"m", "r2", "t"}, "x", 1}, MakeState({1}), 0.01)
          .ok());
  std::vector<std::string> seen;
  std::string after;
  while (true) {
    absl::StatusOr<std::vector<StatisticsListEntry>> page =
        store_->ListStatistics("m", "r", after, 4);
    ASSERT_TRUE(page.ok()) << page.status();
    if (page->empty()) break;
    EXPECT_LE(page->size(), 4u);
    for (const StatisticsListEntry& entry : *page) {
      seen.push_back(entry.tensor);
      EXPECT_EQ(entry.source_count, 2);
      EXPECT_GT(entry.size_bytes, 0);
      EXPECT_GT(entry.update_time, absl::Now() - absl::Hours(1));
      EXPECT_LE(entry.update_time, absl::Now());
    }
    after = seen.back();
  }
  EXPECT_EQ(seen, names);
  EXPECT_THAT(*store_->ListStatistics("m", "r", "", 0), IsEmpty());
  EXPECT_THAT(*store_->ListStatistics("m", "r", "", -1), IsEmpty());
  EXPECT_THAT(*store_->ListStatistics("m", "none", "", 4), IsEmpty());
}

// Each source has several writers, as when a rank's retry overtakes it, on two
// handles of the file, as two processes have them.
TEST_P(StatisticsStoreTest, ConcurrentContributionsLoseAndRepeatNothing) {
  constexpr int kSources = 3;
  constexpr int kSequences = testing::kSanitized ? 15 : 40;
  constexpr int kWriters = 2;
  std::vector<std::unique_ptr<StatisticsStore>> handles;
  for (int i = 0; i < kWriters; ++i) handles.push_back(Open());
  std::vector<std::thread> threads;
  for (int source = 0; source < kSources; ++source) {
    for (const std::unique_ptr<StatisticsStore>& store : handles) {
      threads.emplace_back([this, source, &store] {
        // The writers of a source send the same contributions: an odd one
        // skips ahead where the other has gone on.
        uint64_t sequence = 1;
        while (sequence <= kSequences) {
          const absl::StatusOr<ContributionOutcome> outcome = store->Contribute(
              {key_, absl::StrCat("rank-", source), sequence},
              MakeState({static_cast<float>(sequence)}), 0.01);
          // The others may have kept it waiting for too long.
          if (core::ErrorReason(outcome.status()) == "STORE_UNAVAILABLE") {
            continue;
          }
          ASSERT_TRUE(outcome.ok()) << outcome.status();
          ASSERT_GE(outcome->sequence, sequence);
          sequence = outcome->sequence + 1;
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<float> all;
  for (int i = 1; i <= kSequences; ++i) all.push_back(static_cast<float>(i));
  core::StatisticsState expected = MakeState(all);
  expected.shape = {1};
  for (int i = 1; i < kSources; ++i) {
    core::StatisticsState again = MakeState(all);
    again.shape = {1};
    ASSERT_TRUE(core::MergeState(again, &expected).ok());
  }
  for (const bool reopened : {false, true}) {
    if (reopened) Reopen();
    EXPECT_EQ(Bytes(MustGet().state), Bytes(expected));
  }
}

TEST_P(StatisticsStoreTest, DoesNotReadAPartOfWhatIsDeletedMeanwhile) {
  const std::unique_ptr<StatisticsStore> other = Open();
  std::string source;
  const auto proceed = [&](int64_t /*memory*/) {
    return other->DeleteStatistics(key_, source);
  };
  const auto contribute = [&] {
    MustContribute("a", 1, StateWithGram(1));
    MustContribute("b", 1, StateWithGram(2));
  };
  contribute();
  EXPECT_EQ(Reason(store_->ReadStatistics(key_, false, proceed).status()),
            "STATISTICS_NOT_FOUND");
  contribute();
  EXPECT_EQ(Reason(store_->ReadGram(key_, proceed).status()),
            "STATISTICS_NOT_FOUND");
  // Those of a source alone leave the others.
  contribute();
  source = "b";
  const absl::StatusOr<StoredStatistics> rest =
      store_->ReadStatistics(key_, /*with_moments=*/false, proceed);
  ASSERT_TRUE(rest.ok()) << rest.status();
  ASSERT_EQ(rest->sources.size(), 1u);
  EXPECT_EQ(rest->sources[0].source, "a");
}

// Nor parts of two that had the same names.
TEST_P(StatisticsStoreTest, ReadsAgainWhatCameBackMeanwhile) {
  const std::unique_ptr<StatisticsStore> other = Open();
  int seed = 0;
  const auto contribute = [&] {
    ++seed;
    for (const char* source : {"a", "b"}) {
      core::StatisticsState part = StateWithMoments(seed);
      part.gram = StateWithGram(seed).gram;
      const auto outcome = other->Contribute({key_, source, 1}, part, 0.01);
      EXPECT_TRUE(outcome.ok()) << outcome.status();
    }
  };
  // With the first source that is read, and once.
  bool comes_back = true;
  const auto proceed = [&](int64_t /*memory*/) {
    if (!std::exchange(comes_back, false)) return absl::OkStatus();
    absl::Status status = other->DeleteStatistics(key_, "");
    contribute();
    return status;
  };
  contribute();
  const absl::StatusOr<StoredStatistics> got =
      store_->ReadStatistics(key_, /*with_moments=*/true, proceed);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->sources.size(), 2u);
  EXPECT_EQ(Bytes(got->state), Bytes(MustGet().state));
  EXPECT_EQ(got->gram_size_bytes, MustGet().gram_size_bytes);
  EXPECT_EQ(got->gram->rows, MustGetGram().rows);
  EXPECT_EQ(Bytes(*got->moments), MustGetMoments());
  comes_back = true;
  const absl::StatusOr<absl::optional<core::GramState>> gram =
      store_->ReadGram(key_, proceed);
  ASSERT_TRUE(gram.ok() && gram->has_value()) << gram.status();
  EXPECT_EQ((*gram)->ToParts().code_sums, MustGetGram().code_sums);
  comes_back = true;
  const absl::StatusOr<StoredMoments> moments =
      store_->ReadMoments(key_, proceed);
  ASSERT_TRUE(moments.ok() && moments->moments.has_value());
  EXPECT_EQ(Bytes(*moments->moments), MustGetMoments());
  // A contribution is no reason to read all again.
  int reads = 0;
  const absl::StatusOr<StoredStatistics> once = store_->ReadStatistics(
      key_, /*with_moments=*/false, [&](int64_t /*memory*/) {
        ++reads;
        return other->Contribute({key_, "b", 2}, StateWithMoments(1), 0.01)
            .status();
      });
  ASSERT_TRUE(once.ok()) << once.status();
  EXPECT_EQ(reads, 2);
}

// The histograms, the Gram matrix and the moments of each source.
TEST_P(StatisticsStoreTest, AnswersEverythingOfTheSameContributions) {
  const std::unique_ptr<StatisticsStore> other = Open();
  core::StatisticsState part = StateWithMoments(1);
  part.gram = StateWithGram(1).gram;
  uint64_t sequence = 0;
  const auto contribute = [&](int64_t /*memory*/) {
    ++sequence;
    for (const char* source : {"a", "b"}) {
      absl::Status status =
          other->Contribute({key_, source, sequence}, part, 0.01).status();
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  };
  ASSERT_TRUE(contribute(0).ok());
  const absl::StatusOr<StoredStatistics> got =
      store_->ReadStatistics(key_, /*with_moments=*/true, contribute);
  ASSERT_TRUE(got.ok()) << got.status();
  ASSERT_TRUE(got->gram.has_value() && got->moments.has_value());
  EXPECT_GT(sequence, 2u);
  const int64_t rows =
      got->state.statistics.counts().total / int64_t{kFeatures};
  EXPECT_EQ(got->gram->rows, rows);
  EXPECT_EQ(got->moments->moments.count(0), rows);
  // Moments come to those who ask for them.
  EXPECT_FALSE(MustGet().moments.has_value());
  EXPECT_TRUE(MustGet().gram.has_value());
}

TEST_P(StatisticsStoreTest, AFingerprintTellsContributionsApart) {
  std::vector<uint64_t> seen;
  // Expects one that was not there before, which all reads answer.
  const auto expect_new = [&] {
    const absl::StatusOr<uint64_t> fingerprint = store_->Fingerprint(key_);
    ASSERT_TRUE(fingerprint.ok()) << fingerprint.status();
    EXPECT_EQ(std::count(seen.begin(), seen.end(), *fingerprint), 0);
    seen.push_back(*fingerprint);
    EXPECT_EQ(MustGet().fingerprint, *fingerprint);
    const absl::StatusOr<StoredMoments> moments = store_->ReadMoments(
        key_, [](int64_t /*memory*/) { return absl::OkStatus(); });
    ASSERT_TRUE(moments.ok()) << moments.status();
    EXPECT_EQ(moments->fingerprint, *fingerprint);
    EXPECT_EQ(store_->Fingerprint(key_).value_or(0), *fingerprint);
  };
  EXPECT_EQ(Reason(store_->Fingerprint(key_).status()), "STATISTICS_NOT_FOUND");
  MustContribute("a", 1, MakeState({1}));
  expect_new();
  MustContribute("a", 2, MakeState({1}));
  expect_new();
  MustContribute("b", 2, MakeState({1}));
  expect_new();
  // One that is not counted changes nothing.
  ASSERT_TRUE(Contribute("b", 2, MakeState({1})).ok());
  EXPECT_EQ(store_->Fingerprint(key_).value_or(0), seen.back());
  ASSERT_TRUE(store_->DeleteStatistics(key_, "b").ok());
  EXPECT_EQ(store_->Fingerprint(key_).value_or(0), seen[1]);
  ASSERT_TRUE(store_->DeleteStatistics(key_, "a").ok());
  EXPECT_EQ(Reason(store_->Fingerprint(key_).status()), "STATISTICS_NOT_FOUND");
  // The same once more is another one.
  MustContribute("a", 1, MakeState({1}));
  expect_new();
}

// A source that is deleted while it contributes starts over, and nothing of
// before comes back.
TEST_P(StatisticsStoreTest, ContributesWhileOthersDelete) {
  constexpr uint64_t kSequences = testing::kSanitized ? 20 : 60;
  const std::unique_ptr<StatisticsStore> other = Open();
  std::atomic<bool> is_done{false};
  // Counted up by who contributes, before and after each contribution.
  std::atomic<uint64_t> begun{0}, ended{0};
  std::thread deleting([&] {
    while (!is_done) {
      const uint64_t before = ended;
      const absl::Status status = other->DeleteStatistics(key_, "");
      ASSERT_TRUE(status.ok() || absl::IsNotFound(status)) << status;
      const absl::StatusOr<StoredStatistics> got = other->GetStatistics(key_);
      const uint64_t after = begun;
      if (absl::IsNotFound(got.status())) continue;
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_LE(got->state.statistics.counts().total,
                static_cast<int64_t>(after - before));
    }
  });
  for (uint64_t i = 1; i <= kSequences; ++i) {
    ++begun;
    MustContribute("a", i, MakeState({1}));
    ++ended;
  }
  is_done = true;
  deleting.join();
}

TEST_P(StatisticsStoreTest, MeteringCountsContributionsAndNoAnswerAsError) {
  if (!GetParam().is_cached) GTEST_SKIP();
  MustContribute("a", 1, MakeState({1}));
  ASSERT_TRUE(Contribute("a", 1, MakeState({1})).ok());
  EXPECT_FALSE(Contribute("a", 2, MakeState({1}, {1}, {}, 4)).ok());
  EXPECT_FALSE(store_->GetStatistics({"m", "r", "t"}).ok());
  EXPECT_EQ(testing::MetricValue(metrics_, "quantd_calibration_merges_total"),
            2);
  EXPECT_EQ(testing::MetricValue(metrics_, "quantd_store_errors_total"), 0);
}

TEST_P(StatisticsStoreTest, AddsGramMatricesOfContributionsAndSources) {
  core::GramState expected = *StateWithGram(1).gram;
  for (int seed = 2; seed <= 4; ++seed) {
    expected.Merge(*StateWithGram(seed).gram);
  }
  MustContribute("a", 1, StateWithGram(3));
  // One without stays out of the matrix, and leaves it there.
  MustContribute("a", 2, MakeState({1, 2}, {1, 2}));
  MustContribute("b", 1, MakeState({1, 2}, {1, 2}));
  MustContribute("b", 5, StateWithGram(1));
  MustContribute("c", 1, StateWithGram(4));
  MustContribute("a", 3, StateWithGram(2));
  const absl::StatusOr<ContributionOutcome> again =
      Contribute("a", 3, StateWithGram(2));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->duplicate);
  for (const bool reopened : {false, true}) {
    if (reopened) Reopen();
    const core::GramState::Parts got = MustGetGram();
    EXPECT_EQ(got.rows, 32);
    EXPECT_EQ(got.clipped, expected.clipped());
    EXPECT_EQ(got.code_sums, expected.ToParts().code_sums);
    EXPECT_EQ(MustGet().state.statistics.counts().total, 32 * kFeatures + 4);
  }
  const absl::StatusOr<absl::optional<core::GramState::Parts>> found =
      store_->FindGram(key_);
  ASSERT_TRUE(found.ok() && found->has_value()) << found.status();
  EXPECT_EQ((*found)->exponents, std::vector<int>(kFeatures, -10));
}

TEST_P(StatisticsStoreTest, SaysWhereThereIsNoGramMatrix) {
  const auto proceed = [](int64_t /*memory*/) { return absl::OkStatus(); };
  EXPECT_EQ(Reason(store_->ReadGram(key_, proceed).status()),
            "STATISTICS_NOT_FOUND");
  EXPECT_FALSE(store_->FindGram(key_)->has_value());
  MustContribute("a", 1, MakeState({1}));
  const absl::StatusOr<absl::optional<core::GramState>> got =
      store_->ReadGram(key_, proceed);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_FALSE(got->has_value());
}

TEST_P(StatisticsStoreTest, RefusesGramMatricesThatDoNotGoTogether) {
  const std::vector<float> row = {1, 2};
  core::StatisticsState state = MakeState(row, {1, 2});
  state.gram = MakeGram(row, {-10, -10});
  MustContribute("a", 1, state);
  state.gram = MakeGram(row, {-10, -9});
  EXPECT_EQ(Reason(Contribute("a", 2, state).status()), "STATISTICS_MISMATCH");
  EXPECT_EQ(Reason(Contribute("b", 1, state).status()), "STATISTICS_MISMATCH");
  state.gram = MakeGram({1, 2, 3}, {-10, -10, -10});
  EXPECT_EQ(Reason(Contribute("b", 1, state).status()), "STATISTICS_MISMATCH");
  EXPECT_EQ(MustGetGram().rows, 1);
  EXPECT_EQ(MustGet().sources.size(), 1);
}

TEST_P(StatisticsStoreTest, BoundsTheRowsOfAllSourcesTogether) {
  core::StatisticsState state = MakeState({1, 2}, {1, 2});
  core::GramState::Parts parts = MakeGram({1, 2}, {-10, -10}).ToParts();
  parts.rows = core::GramState::kMaxRows / 4;
  state.gram = *core::GramState::FromParts(parts);
  for (const char* source : {"a", "b", "c"}) MustContribute(source, 1, state);
  MustContribute("c", 2, state);
  EXPECT_EQ(Reason(Contribute("d", 1, state).status()), "STATISTICS_MISMATCH");
  EXPECT_EQ(Reason(Contribute("c", 3, state).status()), "STATISTICS_MISMATCH");
  EXPECT_EQ(MustGetGram().rows, 4 * parts.rows);
}

TEST_P(StatisticsStoreTest, RefusesGramMatricesThatOverflow) {
  core::StatisticsState state = MakeState({1, 2}, {1, 2});
  core::GramState::Parts parts = MakeGram({1, 2}, {-10, -10}).ToParts();
  parts.rows = int64_t{1} << 23;
  parts.code_sums = {0, 0, int64_t{1} << 62};
  state.gram = *core::GramState::FromParts(parts);
  MustContribute("a", 1, state);
  EXPECT_EQ(Reason(Contribute("a", 2, state).status()), "STATISTICS_MISMATCH");
  EXPECT_EQ(MustGetGram().code_sums, parts.code_sums);
  // Nobody adds those of other sources before they are read.
  MustContribute("b", 1, state);
  const auto proceed = [](int64_t /*memory*/) { return absl::OkStatus(); };
  EXPECT_EQ(Reason(store_->ReadGram(key_, proceed).status()), "GRAM_INVALID");
}

TEST_P(StatisticsStoreTest, AsksBeforeItReadsAGramMatrix) {
  MustContribute("a", 1, StateWithGram(1));
  int64_t asked = 0;
  const absl::StatusOr<absl::optional<core::GramState>> got =
      store_->ReadGram(key_, [&](int64_t memory) {
        asked = memory;
        return core::DrainingError();
      });
  EXPECT_EQ(Reason(got.status()), "DRAINING");
  EXPECT_GT(asked, 2 * kFeatures * kFeatures / 2 * 8);
  // Before each source, so that reading thousands of them can be stopped.
  MustContribute("b", 1, StateWithGram(2));
  int times = 0;
  const absl::Status status =
      store_
          ->ReadGram(key_,
                     [&](int64_t /*memory*/) {
                       return ++times < 2 ? absl::OkStatus()
                                          : core::DrainingError();
                     })
          .status();
  EXPECT_EQ(Reason(status), "DRAINING");
}

TEST_P(StatisticsStoreTest, ReadingHistogramsHoldsNoGramMatrix) {
  MustContribute("a", 1, StateWithGram(1));
  int64_t asked = 0;
  const absl::StatusOr<StoredStatistics> got =
      store_->ReadStatistics(key_, /*with_moments=*/false, [&](int64_t memory) {
        asked = memory;
        return absl::OkStatus();
      });
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_GT(asked, 0);
  EXPECT_LT(asked, kFeatures * kFeatures / 2 * 8);
}

TEST_P(StatisticsStoreTest, AddsMomentsOfContributionsAndSources) {
  core::AxisMoments expected = *StateWithMoments(1).moments;
  for (int seed = 2; seed <= 4; ++seed) {
    ASSERT_TRUE(
        core::MergeMoments(*StateWithMoments(seed).moments, &expected).ok());
  }
  MustContribute("a", 1, StateWithMoments(3));
  // One without stays out of them, and leaves them there.
  MustContribute("a", 2, MakeState({1, 2}, {1, 2}));
  MustContribute("b", 1, MakeState({1, 2}, {1, 2}));
  MustContribute("b", 5, StateWithMoments(1));
  // Beside a Gram matrix.
  core::StatisticsState both = StateWithMoments(4);
  both.gram = StateWithGram(4).gram;
  MustContribute("c", 1, both);
  MustContribute("a", 3, StateWithMoments(2));
  const absl::StatusOr<ContributionOutcome> again =
      Contribute("a", 3, StateWithMoments(2));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->duplicate);
  for (const bool reopened : {false, true}) {
    if (reopened) Reopen();
    EXPECT_EQ(MustGetMoments(), Bytes(expected));
    EXPECT_EQ(MustGetGram().rows, 8);
    EXPECT_EQ(MustGet().state.statistics.counts().total, 32 * kFeatures + 4);
  }
}

TEST_P(StatisticsStoreTest, SaysWhereThereAreNoMoments) {
  const auto proceed = [](int64_t /*memory*/) { return absl::OkStatus(); };
  EXPECT_EQ(Reason(store_->ReadMoments(key_, proceed).status()),
            "STATISTICS_NOT_FOUND");
  MustContribute("a", 1, MakeState({1}));
  EXPECT_EQ(MustGetMoments(), "");
}

TEST_P(StatisticsStoreTest, RefusesMomentsThatDoNotGoTogether) {
  MustContribute("a", 1, StateWithMoments(1));
  const std::string before = MustGetMoments();
  core::StatisticsState other = StateWithMoments(2);
  other.moments->axis = 0;
  EXPECT_EQ(Reason(Contribute("a", 2, other).status()), "STATISTICS_MISMATCH");
  EXPECT_EQ(Reason(Contribute("b", 1, other).status()), "STATISTICS_MISMATCH");
  other = StateWithMoments(2, kFeatures - 1);
  EXPECT_EQ(Reason(Contribute("a", 2, other).status()), "STATISTICS_MISMATCH");
  EXPECT_EQ(Reason(Contribute("b", 1, other).status()), "STATISTICS_MISMATCH");
  EXPECT_EQ(MustGetMoments(), before);
  EXPECT_EQ(MustGet().sources.size(), 1);
}

TEST_P(StatisticsStoreTest, AsksBeforeItReadsAndMergesMoments) {
  MustContribute("a", 1, StateWithMoments(1));
  int64_t asked = 0;
  const auto refuse = [&](int64_t memory) {
    asked = memory;
    return core::DrainingError();
  };
  EXPECT_EQ(Reason(store_->ReadMoments(key_, refuse).status()), "DRAINING");
  EXPECT_GT(asked, core::FeatureMoments::MemoryBytes(kFeatures));
  asked = 0;
  const absl::StatusOr<ContributionOutcome> merged =
      store_->Merge({key_, "a", 2}, StateWithMoments(2), 0.01, refuse);
  EXPECT_EQ(Reason(merged.status()), "DRAINING");
  EXPECT_GT(asked, core::FeatureMoments::MemoryBytes(kFeatures));
}

INSTANTIATE_TEST_SUITE_P(Stores, StatisticsStoreTest,
                         ::testing::ValuesIn(Kinds()), KindName);

}  // namespace
}  // namespace quantd::server::statistics_store_test
