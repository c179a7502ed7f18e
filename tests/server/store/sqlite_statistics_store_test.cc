#include "server/store/sql_statistics_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/statistics/feature_moments.h"
#include "core/statistics/gram_state.h"
#include "core/statistics/statistics_state.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"
#include "quantd/v1/statistics.pb.h"
#include "server/store/gram_pieces.h"
#include "server/store/moments_pieces.h"
#include "server/store/row_checksum.h"
#include "server/store/sql_encoding_store.h"
#include "server/store/sqlite_database.h"
#include "server/wire/statistics_proto.h"
#include "tests/server/store/large_state.h"
#include "tests/server/store/sqlite_fixture.h"

namespace quantd::server::sqlite_statistics_store_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kLimitBytes = 16 << 20;

core::StatisticsState MakeState(float element) {
  const auto layout = core::BlockLayout::Create({1}, {});
  core::StatisticsState state;
  state.shape = {1};
  state.statistics = core::TensorStatistics(1, 7);
  state.statistics.Update(*layout, core::ElementType::kFloat32, 0, 1,
                          reinterpret_cast<const uint8_t*>(&element), nullptr);
  return state;
}

// Equal states have equal bytes.
std::string Bytes(const core::StatisticsState& state) {
  v1::StatisticsState message;
  StateToProto(state, &message);
  return message.SerializeAsString();
}

using SqliteStatisticsStoreTest = SqliteFixture;

TEST_F(SqliteStatisticsStoreTest, ReportsEveryColumnThatChangedInARow) {
  SqlStatisticsStore store(OpenDatabase(), kLimitBytes);
  for (const char* change : {
           "body = zeroblob(length(body))",
           "body = substr(body, 1, length(body) - 1)",
           "body = x''",
           "averages = zeroblob(length(averages))",
           "averages = x''",
           "sequence = sequence - 1",
           "update_time_us = update_time_us + 1",
           "size_bytes = 1",
           "mantissa_bits = 6",
           "block_size = zeroblob(8)",
           "shape = zeroblob(8)",
           "source = 'other'",
           "tensor = 'other'",
           "body_checksum = body_checksum + 1",
           "checksum = checksum + 1",
       }) {
    ASSERT_TRUE(store.Contribute({key_, "source", 7}, MakeState(1), 1).ok());
    ASSERT_TRUE(store.GetStatistics(key_).ok());
    Execute(absl::StrCat("UPDATE statistics SET ", change));
    const bool moved = absl::string_view(change) == "tensor = 'other'";
    EncodingKey key = key_;
    if (moved) key.tensor = "other";
    const absl::Status status = store.GetStatistics(key).status();
    EXPECT_EQ(core::ErrorReason(status), "STORE_CORRUPT") << change;
    EXPECT_THAT(std::string(status.message()), HasSubstr("delete them"));
    EXPECT_TRUE(store.ListStatistics("model", "revision", "", 10).ok());
    // Deleting repairs.
    EXPECT_TRUE(store.DeleteStatistics(key, "").ok()) << change;
  }
}

TEST_F(SqliteStatisticsStoreTest, ACorruptRowTakesNoContributionUntilDeleted) {
  SqlStatisticsStore store(OpenDatabase(), kLimitBytes);
  ASSERT_TRUE(store.Contribute({key_, "a", 1}, MakeState(1), 1).ok());
  Execute("UPDATE statistics SET mantissa_bits = 6");
  for (const char* source : {"a", "b"}) {
    const absl::Status status =
        store.Contribute({key_, source, 2}, MakeState(2), 1).status();
    EXPECT_EQ(core::ErrorReason(status), "STORE_CORRUPT") << source;
  }
  EXPECT_TRUE(store.DeleteStatistics(key_, "a").ok());
  EXPECT_TRUE(store.Contribute({key_, "b", 2}, MakeState(2), 1).ok());
}

TEST_F(SqliteStatisticsStoreTest, ReportsEveryPieceThatChanged) {
  SqlStatisticsStore store(OpenDatabase(), kLimitBytes);
  const core::StatisticsState state = testing::MakeLargeState(1);
  for (const char* change : {
           "UPDATE statistics_pieces SET bytes = zeroblob(length(bytes)) "
           "WHERE piece = 1",
           "UPDATE statistics_pieces SET checksum = checksum + 1 "
           "WHERE piece = 1",
           "DELETE FROM statistics_pieces WHERE piece = 0",
           "DELETE FROM statistics_pieces WHERE piece = 1",
           "DELETE FROM statistics_pieces "
           "WHERE piece = (SELECT MAX(piece) FROM statistics_pieces)",
           "DELETE FROM statistics_pieces",
           "UPDATE statistics_pieces SET piece = -piece",
           "UPDATE statistics_pieces SET sequence = 8",
           "UPDATE statistics_pieces SET source = 'other' WHERE piece = 1",
       }) {
    ASSERT_TRUE(store.Contribute({key_, "source", 7}, state, 1).ok());
    ASSERT_TRUE(store.GetStatistics(key_).ok());
    Execute(change);
    EXPECT_EQ(core::ErrorReason(store.GetStatistics(key_).status()),
              "STORE_CORRUPT")
        << change;
    EXPECT_EQ(core::ErrorReason(
                  store.Contribute({key_, "source", 9}, state, 1).status()),
              "STORE_CORRUPT")
        << change;
    EXPECT_TRUE(store.DeleteStatistics(key_, "").ok()) << change;
  }
  // What was not of any row when that was deleted does no harm.
  ASSERT_TRUE(store.Contribute({key_, "other", 7}, state, 1).ok());
  ASSERT_TRUE(store.Contribute({key_, "other", 8}, state, 1).ok());
  core::StatisticsState twice = testing::MakeLargeState(1);
  ASSERT_TRUE(core::MergeState(state, &twice).ok());
  EXPECT_EQ(Bytes(store.GetStatistics(key_)->state), Bytes(twice));
}

TEST_F(SqliteStatisticsStoreTest, ReportsEveryPieceOfAGramMatrixThatChanged) {
  // More sums than a piece has.
  constexpr int64_t kFeatures = 600;
  const std::vector<float> row(kFeatures, 1);
  SqlStatisticsStore store(OpenDatabase(), kLimitBytes);
  core::StatisticsState state = MakeState(1);
  absl::StatusOr<core::GramState> gram = core::GramState::Create(
      std::vector<int>(kFeatures, -10), core::GramState::PartSize(kFeatures));
  ASSERT_TRUE(gram.ok()) << gram.status();
  gram->Update(core::ElementType::kFloat32, 1,
               reinterpret_cast<const uint8_t*>(row.data()), nullptr);
  gram->Finish(nullptr);
  state.gram = *std::move(gram);
  const auto proceed = [](int64_t /*memory*/) { return absl::OkStatus(); };
  const std::string head = absl::StrCat("piece = ", kFirstGramPiece);
  const std::string last = absl::StrCat("piece = ", kFirstGramPiece + 2);
  for (const std::string& change :
       {"UPDATE statistics_pieces SET bytes = zeroblob(length(bytes)) WHERE " +
            last,
        "UPDATE statistics_pieces SET checksum = checksum + 1 WHERE " + head,
        "DELETE FROM statistics_pieces WHERE " + head,
        "DELETE FROM statistics_pieces WHERE " + last,
        absl::StrCat("DELETE FROM statistics_pieces WHERE piece >= ",
                     kFirstGramPiece),
        "UPDATE statistics_pieces SET sequence = 8 WHERE " + last,
        "UPDATE statistics_pieces SET source = 'other' WHERE " + head}) {
    ASSERT_TRUE(store.Contribute({key_, "source", 7}, state, 1).ok());
    ASSERT_TRUE(store.ReadGram(key_, proceed).ok());
    ASSERT_TRUE(store.GetStatistics(key_).ok());
    Execute(change);
    EXPECT_TRUE(absl::IsDataLoss(store.ReadGram(key_, proceed).status()))
        << change;
    EXPECT_EQ(core::ErrorReason(
                  store.Contribute({key_, "source", 9}, state, 1).status()),
              "STORE_CORRUPT")
        << change;
    int damaged = 0;
    EXPECT_TRUE(
        store.Check([&](const absl::Status& /*status*/) { ++damaged; }).ok());
    EXPECT_GT(damaged, 0) << change;
    EXPECT_TRUE(store.DeleteStatistics(key_, "").ok()) << change;
  }
  // What was not of any row when that was deleted does no harm.
  ASSERT_TRUE(store.Contribute({key_, "other", 7}, state, 1).ok());
  ASSERT_TRUE(store.Contribute({key_, "other", 8}, state, 1).ok());
  const auto got = store.ReadGram(key_, proceed);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ((*got)->rows(), 2);
}

TEST_F(SqliteStatisticsStoreTest, ReportsMomentsThatChanged) {
  constexpr int64_t kFeatures = 6;
  const std::vector<float> row(kFeatures, 1);
  SqlStatisticsStore store(OpenDatabase(), kLimitBytes);
  core::StatisticsState state = MakeState(1);
  state.moments = core::AxisMoments{0, core::FeatureMoments(kFeatures)};
  state.moments->moments.Update(
      {kFeatures, 1}, core::ElementType::kFloat32, 0, kFeatures,
      reinterpret_cast<const uint8_t*>(row.data()), nullptr);
  const auto proceed = [](int64_t /*memory*/) { return absl::OkStatus(); };
  const std::string piece = absl::StrCat("piece = ", kMomentsPiece);
  for (const std::string& change :
       {"UPDATE statistics_pieces SET bytes = zeroblob(length(bytes)) WHERE " +
            piece,
        "UPDATE statistics_pieces SET checksum = checksum + 1 WHERE " + piece,
        "DELETE FROM statistics_pieces WHERE " + piece,
        "UPDATE statistics_pieces SET sequence = 8 WHERE " + piece,
        "UPDATE statistics_pieces SET source = 'other' WHERE " + piece}) {
    ASSERT_TRUE(store.Contribute({key_, "source", 7}, state, 1).ok());
    ASSERT_TRUE(store.ReadMoments(key_, proceed).ok());
    ASSERT_TRUE(store.GetStatistics(key_).ok());
    Execute(change);
    EXPECT_TRUE(absl::IsDataLoss(store.ReadMoments(key_, proceed).status()) ||
                absl::IsDataLoss(store.GetStatistics(key_).status()))
        << change;
    EXPECT_EQ(core::ErrorReason(
                  store.Contribute({key_, "source", 9}, state, 1).status()),
              "STORE_CORRUPT")
        << change;
    int damaged = 0;
    EXPECT_TRUE(
        store.Check([&](const absl::Status& /*status*/) { ++damaged; }).ok());
    EXPECT_GT(damaged, 0) << change;
    EXPECT_TRUE(store.DeleteStatistics(key_, "").ok()) << change;
  }
  // What was not of any row when that was deleted does no harm.
  ASSERT_TRUE(store.Contribute({key_, "other", 7}, state, 1).ok());
  ASSERT_TRUE(store.Contribute({key_, "other", 8}, state, 1).ok());
  const auto got = store.ReadMoments(key_, proceed);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->moments->moments.count(0), 2);
}

// Children contribute to sources of their own and to one that they share, and
// die without a word when they are done.
TEST_F(SqliteStatisticsStoreTest, TwoProcessesLoseNoContribution) {
  constexpr int kProcesses = 2;
  constexpr int kSequences = 100;
  std::vector<pid_t> children;
  for (int process = 0; process < kProcesses; ++process) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      absl::StatusOr<std::shared_ptr<SqliteDatabase>> database =
          SqliteDatabase::Open(path_);
      if (!database.ok()) _exit(2);
      SqlStatisticsStore store(*std::move(database), kLimitBytes);
      for (uint64_t i = 1; i <= kSequences; ++i) {
        for (const std::string& source :
             {absl::StrCat("rank-", process), std::string("shared")}) {
          const auto outcome =
              store.Contribute({key_, source, i}, MakeState(i), 0.01);
          if (!outcome.ok() || outcome->sequence < i) _exit(3);
        }
      }
      _exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int state = 0;
    ASSERT_EQ(waitpid(child, &state, 0), child);
    EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << state;
  }
  SqlStatisticsStore store(OpenDatabase(), kLimitBytes);
  const absl::StatusOr<StoredStatistics> stored = store.GetStatistics(key_);
  ASSERT_TRUE(stored.ok()) << stored.status();
  ASSERT_EQ(stored->sources.size(), 3u);
  for (const SourceListEntry& source : stored->sources) {
    EXPECT_EQ(source.sequence, uint64_t{kSequences}) << source.source;
  }
  // In the shared source one process may run ahead of the other: what comes
  // late is older than what is there. The others have everything.
  ASSERT_TRUE(store.DeleteStatistics(key_, "shared").ok());
  EXPECT_EQ(store.GetStatistics(key_)->state.statistics.counts().total,
            kProcesses * kSequences);
}

}  // namespace
}  // namespace quantd::server::sqlite_statistics_store_test
