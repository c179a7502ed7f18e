// How the space of what was deleted comes back.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/parallel/steady_clock.h"
#include "core/statistics/gram_state.h"
#include "core/statistics/statistics_state.h"
#include "core/types/encoding.h"
#include "server/store/encoding_store.h"
#include "server/store/gram_pieces.h"
#include "server/store/row_sets.h"
#include "server/store/sql_database.h"
#include "server/store/sql_encoding_store.h"
#include "server/store/sql_statistics_store.h"
#include "server/store/statistics_pieces.h"
#include "server/store/store_check.h"
#include "server/store/store_keeper.h"
#include "tests/server/store/large_state.h"
#include "tests/server/store/test_database.h"
#include "tests/support/count.h"

namespace quantd::server {
namespace {

using testing::Backend;
using testing::BackendName;
using testing::Backends;

constexpr absl::Duration kAge = absl::Hours(1);
constexpr absl::Duration kPause = absl::Milliseconds(5);

// Of more scales than a piece has.
std::shared_ptr<const core::Encoding> MakeLarge(float value) {
  core::Encoding encoding;
  encoding.format = core::FindFormatByName("int8")->format;
  encoding.block_size = {1};
  encoding.scale.assign(700'000, value);
  encoding.qmin = -128;
  encoding.qmax = 127;
  return std::make_shared<const core::Encoding>(std::move(encoding));
}

std::shared_ptr<const core::Encoding> MakeSmall(float value = 1) {
  core::Encoding encoding;
  encoding.format = core::FindFormatByName("int8")->format;
  encoding.block_size = {1};
  encoding.scale.assign(16, value);
  encoding.qmin = -128;
  encoding.qmax = 127;
  return std::make_shared<const core::Encoding>(std::move(encoding));
}

class StoreSpaceTest : public ::testing::TestWithParam<Backend> {
 protected:
  StoreSpaceTest()
      : sql_(database_.Open()),
        encodings_(sql_),
        statistics_(sql_, 64 << 20),
        keeper_(sql_) {}

  int64_t CountOf(const char* sql) {
    int64_t count = -1;
    const absl::Status status =
        sql_->Read([&](SqlConnection& connection) -> absl::Status {
          const std::unique_ptr<SqlStatement> row = connection.Prepare(sql);
          absl::StatusOr<bool> found = row->Step("cannot count");
          if (found.ok() && *found) count = row->Int(0);
          return found.status();
        });
    EXPECT_TRUE(status.ok()) << status;
    return count;
  }
  int64_t Pieces() { return CountOf("SELECT COUNT(*) FROM encoding_pieces"); }

  int64_t StatisticsPieces() {
    return CountOf("SELECT COUNT(*) FROM statistics_pieces");
  }
  // Of the Gram matrix of states that have one row each, all the same.
  int64_t GramRows(const EncodingKey& key) {
    const auto gram = statistics_.ReadGram(
        key, [](int64_t /*memory*/) { return absl::OkStatus(); });
    EXPECT_TRUE(gram.ok()) << gram.status();
    if (!gram.ok() || !gram->has_value()) return 0;
    const core::GramState::Parts parts = (*gram)->ToParts();
    const int64_t sum = parts.code_sums.front();
    EXPECT_EQ(parts.code_sums,
              std::vector<int64_t>(parts.code_sums.size(), sum));
    EXPECT_GT(sum, 0);
    return parts.rows;
  }

  // Answers how many steps it took.
  int FreeAll(absl::Duration staged_age,
              absl::Duration pause = absl::ZeroDuration()) {
    for (int steps = 1;; ++steps) {
      const absl::StatusOr<bool> is_more = keeper_.FreeStep(staged_age);
      // As the housekeeper does, so that others have a turn.
      absl::SleepFor(pause);
      EXPECT_TRUE(is_more.ok()) << is_more.status();
      if (!is_more.value_or(false)) return steps;
    }
  }

  void ExpectSound() {
    const absl::StatusOr<StoreCheck> check =
        CheckStore(sql_, [](absl::string_view line) { ADD_FAILURE() << line; });
    ASSERT_TRUE(check.ok()) << check.status();
  }

  const testing::TestDatabase database_{GetParam()};
  const std::shared_ptr<SqlDatabase> sql_;
  SqlEncodingStore encodings_;
  SqlStatisticsStore statistics_;
  StoreKeeper keeper_;
};

TEST_P(StoreSpaceTest, DeletedSpaceComesBackInSteps) {
  ASSERT_TRUE(encodings_.Put({"m", "kept", "a"}, MakeLarge(1), {}).ok());
  const core::StatisticsState state = testing::MakeLargeState(1);
  ASSERT_TRUE(
      statistics_.Contribute({{"m", "kept", "a"}, "s", 1}, state, 1).ok());
  const int64_t kept = Pieces();
  const int64_t kept_statistics =
      CountOf("SELECT COUNT(*) FROM statistics_pieces");
  ASSERT_GT(kept, 1);
  ASSERT_GT(kept_statistics, 1);
  const absl::StatusOr<DatabaseSize> before = keeper_.ReadSize();
  ASSERT_TRUE(before.ok()) << before.status();
  for (const char* tensor : {"a", "b", "c", "d", "e", "f"}) {
    ASSERT_TRUE(encodings_.Put({"m", "gone", tensor}, MakeLarge(2), {}).ok());
  }
  // Replaced, too.
  ASSERT_TRUE(encodings_.Put({"m", "kept", "a"}, MakeLarge(3), {}).ok());
  ASSERT_TRUE(
      statistics_.Contribute({{"m", "gone", "a"}, "s", 1}, state, 1).ok());
  EXPECT_GT(keeper_.ReadSize()->size_bytes, 2 * before->size_bytes);

  const absl::StatusOr<DeletedRows> deleted =
      encodings_.DeleteRevision("m", "gone");
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(deleted->encoding_count, 6);
  EXPECT_EQ(deleted->statistics_count, 1);
  // What is to be freed is no damage.
  ExpectSound();
  EXPECT_GT(Pieces(), kept);
  EXPECT_GT(FreeAll(kAge), 2);
  EXPECT_EQ(Pieces(), kept);
  EXPECT_EQ(CountOf("SELECT COUNT(*) FROM statistics_pieces"), kept_statistics);
  EXPECT_EQ(CountOf("SELECT COUNT(*) FROM lost_contents"), 0);
  EXPECT_EQ(CountOf("SELECT COUNT(*) FROM lost_statistics"), 0);
  ExpectSound();
  EXPECT_EQ(encodings_.Get({"m", "kept", "a"})->encoding->scale[0], 3);
  EXPECT_TRUE(statistics_.GetStatistics({"m", "kept", "a"}).ok());

  if (GetParam() == Backend::kSqlite) {
    int steps = 0;
    while (keeper_.Shrink().value_or(false)) ++steps;
    EXPECT_GT(steps, 2);
    EXPECT_LE(keeper_.ReadSize()->size_bytes, before->size_bytes * 11 / 10);
    EXPECT_EQ(keeper_.ReadSize()->free_bytes, 0);
    ExpectSound();
  }
}

// A contribution of the same source and sequence comes before they are freed.
TEST_P(StoreSpaceTest, StatisticsThatCameBackStay) {
  const core::StatisticsState state = testing::MakeLargeState(1);
  const EncodingKey key{"m", "main", "a"};
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE(statistics_.Contribute({key, "s", 1}, state, 1).ok());
    if (round == 0) {
      ASSERT_TRUE(statistics_.DeleteStatistics(key, "").ok());
    }
  }
  FreeAll(kAge);
  EXPECT_TRUE(statistics_.GetStatistics(key).ok());
  ExpectSound();
}

TEST_P(StoreSpaceTest, AWriterThatIsGoneLeavesNothing) {
  const auto large = MakeLarge(1);
  const EncodingKey key{"m", "main", "a"};
  ASSERT_TRUE(encodings_.Put(key, large, {}).ok());
  const int64_t kept = Pieces();
  const auto write_all = [&]() -> std::unique_ptr<EncodingWriter> {
    auto reader = encodings_.OpenReader(key);
    EXPECT_TRUE(reader.ok()) << reader.status();
    auto writer =
        encodings_.OpenWriter({"m", "main", "b"}, (*reader)->stored().encoding,
                              false, Precondition{});
    EXPECT_TRUE(writer.ok()) << writer.status();
    while (true) {
      auto piece = (*reader)->Next();
      EXPECT_TRUE(piece.ok()) << piece.status();
      if (!piece.ok() || !piece->has_value()) break;
      EXPECT_TRUE((*writer)->Add(**piece).ok());
    }
    return *std::move(writer);
  };
  // One that is told.
  write_all().reset();
  EXPECT_GT(Pieces(), kept);
  FreeAll(kAge);
  EXPECT_EQ(Pieces(), kept);

  // One that is not heard of.
  const std::unique_ptr<EncodingWriter> silent = write_all();
  FreeAll(kAge);
  EXPECT_GT(Pieces(), kept);
  ExpectSound();
  FreeAll(-kAge);
  EXPECT_EQ(Pieces(), kept);
  // It can't go on.
  EXPECT_EQ(core::ErrorReason(silent->Finish().status()), "STORE_UNAVAILABLE");
  EXPECT_FALSE(encodings_.Get({"m", "main", "b"}).ok());
  ExpectSound();

  const std::unique_ptr<EncodingWriter> sound = write_all();
  FreeAll(kAge);
  ASSERT_TRUE(sound->Finish().ok());
  FreeAll(-kAge);
  const absl::StatusOr<StoredEncoding> got = encodings_.Get({"m", "main", "b"});
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_TRUE(*got->encoding == *large);
}

TEST_P(StoreSpaceTest, WhatIsBeingWrittenKeepsToTheQuota) {
  const WriteAccount account{"w", {{"principal:w", 8 << 20}}};
  const auto used = [&] { return keeper_.ReadUsage("principal:w"); };
  const EncodingKey key{"m", "main", "a"};
  ASSERT_TRUE(encodings_.Put(key, MakeLarge(1), {}).ok());
  {
    std::vector<std::unique_ptr<EncodingWriter>> writers;
    int refused_count = 0;
    for (int i = 0; i < 10; ++i) {
      auto reader = encodings_.OpenReader(key);
      ASSERT_TRUE(reader.ok()) << reader.status();
      auto writer = encodings_.OpenWriter(
          {"m", "main", absl::StrCat("unfinished.", i)},
          (*reader)->stored().encoding, false, {"", account});
      ASSERT_TRUE(writer.ok()) << writer.status();
      while (true) {
        auto piece = (*reader)->Next();
        ASSERT_TRUE(piece.ok()) << piece.status();
        if (!piece->has_value()) break;
        const absl::Status status = (*writer)->Add(**piece);
        if (status.ok()) continue;
        EXPECT_EQ(core::ErrorReason(status), "QUOTA_EXCEEDED") << status;
        ++refused_count;
        break;
      }
      writers.push_back(*std::move(writer));
    }
    EXPECT_GT(refused_count, 3);
    EXPECT_LE(used()->bytes, 8 << 20);
    EXPECT_GT(used()->bytes, 4 << 20);
    EXPECT_EQ(used()->rows, 0);
  }
  // Those that were told, and those that are found.
  FreeAll(-kAge);
  EXPECT_EQ(used()->bytes, 0);
  EXPECT_EQ(CountOf("SELECT COUNT(*) FROM usage_counts "
                    "WHERE scope = 'principal:w'"),
            0);
  EXPECT_TRUE(
      encodings_.Put({"m", "main", "b"}, MakeLarge(1), {"", account}).ok());
  EXPECT_EQ(used()->rows, 1);
  EXPECT_EQ(used()->bytes, CountOf("SELECT charged_bytes FROM encodings "
                                   "WHERE tensor = 'b'"));
  ExpectSound();
}

TEST_P(StoreSpaceTest, AGramMatrixThatIsBeingWrittenKeepsToTheQuota) {
  const core::StatisticsState state = testing::MakeStateWithGram(1500);
  const EncodingKey key{"m", "main", "a"};
  const auto used = [&] { return keeper_.ReadUsage("principal:w"); };
  int64_t most = 0;
  const auto contribute = [&](uint64_t sequence, int64_t quota) {
    const WriteAccount account{"w", {{"principal:w", quota}}};
    return statistics_
        .Merge({key, "s", sequence, account}, state, 1,
               [&](int64_t /*memory*/) {
                 most = std::max(most, used()->bytes);
                 return absl::OkStatus();
               })
        .status();
  };
  const absl::Status refused = contribute(1, 6 << 20);
  EXPECT_EQ(core::ErrorReason(refused), "QUOTA_EXCEEDED") << refused;
  // Told while it was written.
  EXPECT_EQ(most, kPiecesPerTransaction * int64_t{1} << 20);
  EXPECT_EQ(used()->bytes, 0);
  EXPECT_EQ(StatisticsPieces(), 0);
  ASSERT_TRUE(contribute(1, 16 << 20).ok());
  const int64_t one = used()->bytes;
  EXPECT_EQ(one, CountOf("SELECT charged_bytes FROM statistics"));
  // What takes the place of as much is let through, with a few bytes more of
  // counts.
  most = 0;
  const absl::Status merged = contribute(2, one + 100);
  EXPECT_TRUE(merged.ok()) << merged;
  EXPECT_EQ(most, one);
  ASSERT_TRUE(statistics_.DeleteStatistics(key, "").ok());
  FreeAll(kAge);
  EXPECT_EQ(CountOf("SELECT COUNT(*) FROM staged_contents"), 0);
  EXPECT_EQ(CountOf("SELECT COUNT(*) FROM usage_counts "
                    "WHERE scope = 'principal:w'"),
            0);
  ExpectSound();
}

// Puts of somebody else, one after the other, until it is destroyed.
class OtherCaller {
 public:
  OtherCaller(std::shared_ptr<SqlDatabase> database, const char* during,
              std::string model = "other", std::string principal = "")
      : store_(std::move(database)),
        during_(during),
        model_(std::move(model)),
        precondition_({"", {std::move(principal), {}}}),
        thread_([this] { Work(); }) {}
  ~OtherCaller() {
    stopping_ = true;
    thread_.join();
    std::sort(took_.begin(), took_.end());
    EXPECT_FALSE(took_.empty());
    EXPECT_EQ(failures_, 0);
    if (took_.empty()) return;
    std::printf("%zu puts of somebody else during %s: p99 %s, longest %s\n",
                took_.size(), during_,
                absl::FormatDuration(took_[took_.size() * 99 / 100]).c_str(),
                absl::FormatDuration(took_.back()).c_str());
  }

 private:
  // At least one.
  void Work() {
    int i = 0;
    do {
      const absl::Duration begin = core::SteadyNow();
      failures_ += !store_
                        .Put({model_, "main", absl::StrCat(i++ % 100)},
                             MakeSmall(), precondition_)
                        .ok();
      took_.push_back(core::SteadyNow() - begin);
    } while (!stopping_);
  }

  SqlEncodingStore store_;
  const char* const during_;
  const std::string model_;
  const Precondition precondition_;
  std::atomic<bool> stopping_ = false;
  int failures_ = 0;
  std::vector<absl::Duration> took_;
  std::thread thread_;
};

TEST_P(StoreSpaceTest, LargeRevisionsGoAtOnceAndAreFreedInSteps) {
  const int64_t count = testing::Count("QUANTD_STORE_ROWS", 600);
  const auto fill = [&](const std::string& revision, int64_t first,
                        int64_t end) {
    std::atomic<int64_t> next = first;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int64_t k = next++; k < end; k = next++) {
          EXPECT_TRUE(encodings_
                          .Put({"a/m", revision, absl::StrCat(k)}, MakeSmall(),
                               {"", {"caller", {}}})
                          .ok());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  };
  const auto rows = [&] {
    return CountOf("SELECT COUNT(*) FROM encodings WHERE principal = 'caller'");
  };
  const auto used = [&] { return keeper_.ReadUsage("models:a/")->rows; };
  fill("main", 0, count);
  fill("draft", 0, count);
  {
    const OtherCaller other(sql_, "publishing");
    // Rows that stay where they are, and are not counted any more.
    const auto published =
        encodings_.PublishRevision("a/m", "draft", "main", false);
    ASSERT_TRUE(published.ok()) << published.status();
    EXPECT_EQ(published->encoding_count, count);
    EXPECT_EQ(published->replaced_count, count);
    EXPECT_EQ(rows(), 2 * count);
    ASSERT_TRUE(keeper_.FreeStep(kAge).ok());
    EXPECT_EQ(rows(), 2 * count - 500);
    EXPECT_EQ(used(), count);
    EXPECT_EQ(keeper_.ReadUsage("principal:caller")->rows, count);
  }
  {
    const OtherCaller other(sql_, "freeing");
    // Of two replicas none takes for freed what the other one is freeing.
    std::thread replica([&] {
      if (GetParam() == Backend::kSqlite) return;
      StoreKeeper keeper(database_.Open());
      while (keeper.FreeStep(kAge).value_or(true)) absl::SleepFor(kPause);
    });
    FreeAll(kAge, kPause);
    replica.join();
    EXPECT_EQ(rows(), count);
  }
  ExpectSound();

  // The fewer ones move, whichever those are.
  int64_t before = count;
  for (const int64_t first : {count / 10, count / 2, count - count / 10}) {
    fill("draft", first, count + count / 20);
    {
      const OtherCaller other(sql_, "merging");
      // Into the revision.
      const OtherCaller neighbour(sql_, "merging what it writes", "a/m",
                                  "caller");
      const auto merged =
          encodings_.PublishRevision("a/m", "draft", "main", true);
      ASSERT_TRUE(merged.ok()) << merged.status();
      EXPECT_EQ(merged->encoding_count, count + count / 20);
      EXPECT_EQ(merged->replaced_count, before - first);
      EXPECT_EQ(used(), count + count / 20);
    }
    before = count + count / 20;
    FreeAll(kAge);
    EXPECT_EQ(rows(), count + count / 20);
    ExpectSound();
  }

  {
    const OtherCaller other(sql_, "deleting");
    const auto deleted = encodings_.DeleteRevision("a/m", "main");
    ASSERT_TRUE(deleted.ok()) << deleted.status();
    EXPECT_EQ(deleted->encoding_count, count + count / 20);
    EXPECT_GT(rows(), 0);
    EXPECT_EQ(used(), 0);
    FreeAll(kAge, kPause);
  }
  EXPECT_EQ(rows(), 0);
  for (const char* sql :
       {"SELECT COUNT(*) FROM usage_counts WHERE "
        "scope IN ('models:a/', 'principal:caller')",
        "SELECT COUNT(*) FROM lost_sets",
        "SELECT COUNT(*) FROM row_sets WHERE model = 'a/m'"}) {
    EXPECT_EQ(CountOf(sql), 0) << sql;
  }
  ExpectSound();
}

// Tells before each write how many were before it; one that is refused fails.
class WatchedDatabase : public SqlDatabase {
 public:
  WatchedDatabase(std::shared_ptr<SqlDatabase> inner,
                  std::function<absl::Status(int)> tell)
      : inner_(std::move(inner)), tell_(std::move(tell)) {}

  absl::Status Read(
      absl::FunctionRef<absl::Status(SqlConnection&)> body) override {
    return inner_->Read(body);
  }
  absl::Status Write(
      absl::FunctionRef<absl::Status(SqlConnection&)> body) override {
    absl::Status status = tell_(write_count_++);
    return status.ok() ? inner_->Write(body) : status;
  }
  absl::optional<int64_t> ForeignVersion() override {
    return inner_->ForeignVersion();
  }
  absl::StatusOr<DatabaseSize> Size() override { return inner_->Size(); }
  absl::Status Ping() override { return inner_->Ping(); }

 private:
  const std::shared_ptr<SqlDatabase> inner_;
  const std::function<absl::Status(int)> tell_;
  int write_count_ = 0;
};

TEST_P(StoreSpaceTest, ARevisionIsPublishedOverInStepsThatNobodySees) {
  constexpr int64_t kCount = 400;
  const auto put = [&](const std::string& revision, const std::string& tensor,
                       std::shared_ptr<const core::Encoding> encoding) {
    EXPECT_TRUE(
        encodings_.Put({"m", revision, tensor}, std::move(encoding), {}).ok());
  };
  std::atomic<int64_t> next = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int64_t k = next++; k < kCount; k = next++) {
        put("first", absl::StrCat(k), MakeSmall(1));
        if (k < kCount / 2) put("draft", absl::StrCat(k), MakeSmall(2));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Of one that is replaced and one that stays.
  put("first", "0", MakeLarge(1));
  put("first", "399", MakeLarge(1));
  ASSERT_TRUE(encodings_.PublishRevision("m", "first", "main", false).ok());
  const int64_t pieces = Pieces();
  // Etag and generation by tensor.
  using Listed = std::map<std::string, std::pair<std::string, int64_t>>;
  const auto list = [&](const std::string& revision) {
    Listed listed;
    std::string after;
    while (true) {
      const auto page = encodings_.ListEncodings("m", revision, after, 130);
      EXPECT_TRUE(page.ok()) << page.status();
      if (!page.ok() || page->empty()) return listed;
      for (const EncodingListEntry& entry : *page) {
        EXPECT_TRUE(entry.error.ok()) << entry.error;
        EXPECT_GT(entry.tensor, after);
        after = entry.tensor;
        listed[after] = {entry.stored.etag, entry.stored.generation};
      }
    }
  };
  const auto value = [&](const std::string& revision,
                         const std::string& tensor) {
    const auto got = encodings_.Get({"m", revision, tensor});
    EXPECT_TRUE(got.ok()) << tensor << ": " << got.status();
    return got.ok() ? got->encoding->scale[0] : 0;
  };
  const auto remove = [&](const std::string& revision,
                          const std::string& tensor) {
    const absl::Status status = encodings_.Delete({"m", revision, tensor}, {});
    EXPECT_TRUE(status.ok()) << status;
  };
  const auto sets = [&] { return CountOf("SELECT COUNT(*) FROM row_sets"); };

  Listed before = list("main");
  ASSERT_EQ(before.size(), kCount);
  const auto write = [&](int write_count) {
    if (write_count != 1) return absl::OkStatus();
    // As it was, in two sets.
    EXPECT_EQ(sets(), 3);
    EXPECT_EQ(list("main"), before);
    EXPECT_EQ(encodings_.ListRevisions("m", "", 10)->at(1).encoding_count,
              kCount);
    EXPECT_EQ(keeper_.ReadUsage("models:*")->rows, kCount + kCount / 2);
    ExpectSound();
    // Of one that is replaced, one that stays and one that is new; of one that
    // stays then, and of one that is replaced then.
    put("main", "1", MakeSmall(3));
    put("main", "300", MakeSmall(3));
    put("main", "new", MakeSmall(3));
    remove("main", "3");
    remove("main", "350");
    remove("draft", "2");
    put("draft", "250", MakeSmall(2));
    before = list("main");
    EXPECT_EQ(before.size(), kCount - 1);
    return absl::OkStatus();
  };
  SqlEncodingStore watched(std::make_shared<WatchedDatabase>(sql_, write));
  const auto published = watched.PublishRevision("m", "draft", "main", true);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->encoding_count, kCount);
  EXPECT_EQ(published->replaced_count, kCount / 2 - 1);
  const Listed after = list("main");
  EXPECT_EQ(after.size(), kCount);
  for (int64_t k = 0; k < kCount; ++k) {
    const std::string tensor = absl::StrCat(k);
    if (k == 350) {
      EXPECT_EQ(after.count(tensor), 0u);
      continue;
    }
    const bool is_kept = k == 2 || (k >= kCount / 2 && k != 250);
    EXPECT_EQ(value("main", tensor), is_kept ? (k == 300 ? 3 : 1) : 2) << k;
    ASSERT_EQ(after.count(tensor), 1u) << k;
    if (is_kept) {
      EXPECT_EQ(after.at(tensor).first, before.at(tensor).first);
      EXPECT_GT(after.at(tensor).second, before.at(tensor).second);
    }
  }
  EXPECT_EQ(value("main", "new"), 3);
  EXPECT_EQ(keeper_.ReadUsage("models:*")->rows, kCount);
  FreeAll(kAge);
  EXPECT_EQ(Pieces(), pieces / 2);
  EXPECT_EQ(CountOf("SELECT COUNT(*) FROM encodings"), kCount);
  ExpectSound();

  // Its two sets become one where it is published itself; one that fails in
  // between has done nothing.
  put("next", "0", MakeSmall(4));
  put("next", "only", MakeSmall(4));
  for (const bool fails : {true, false}) {
    SqlEncodingStore failing(std::make_shared<WatchedDatabase>(
        sql_, [&](int write_count) -> absl::Status {
          if (write_count != 1 || !fails) return absl::OkStatus();
          return core::StoreUnavailableError("the database is away");
        }));
    const auto again = failing.PublishRevision("m", "main", "next", true);
    EXPECT_EQ(again.ok(), !fails) << again.status();
    EXPECT_EQ(list(fails ? "main" : "next").size(), kCount + !fails);
    EXPECT_EQ(list(fails ? "next" : "main").size(), fails ? 2u : 0u);
    EXPECT_EQ(value("next", "only"), 4);
    EXPECT_EQ(value("next", "0"), fails ? 4 : 2);
    ExpectSound();
  }
  // With both of its sets.
  put("last", "0", MakeSmall(5));
  EXPECT_EQ(sets(), 3);
  ASSERT_TRUE(encodings_.PublishRevision("m", "next", "last", false).ok());
  EXPECT_EQ(list("last").size(), kCount + 1);
  remove("last", "only");
  remove("last", "0");
  put("last", "only", MakeSmall(6));
  EXPECT_EQ(value("last", "only"), 6);
  const auto deleted = encodings_.DeleteRevision("m", "last");
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(deleted->encoding_count, kCount);
  EXPECT_EQ(sets(), 0);
  EXPECT_EQ(keeper_.ReadUsage("models:*")->rows, 0);
  FreeAll(kAge);
  EXPECT_EQ(Pieces(), 0);
  ExpectSound();
}

TEST_P(StoreSpaceTest, BothSetsOfAnEmptyRevisionGo) {
  for (const char* tensor : {"a", "b"}) {
    ASSERT_TRUE(encodings_.Put({"m", "main", tensor}, MakeSmall(), {}).ok());
  }
  ASSERT_TRUE(encodings_.Put({"m", "draft", "a"}, MakeSmall(), {}).ok());
  ASSERT_TRUE(encodings_.PublishRevision("m", "draft", "main", true).ok());
  EXPECT_EQ(CountOf("SELECT COUNT(*) FROM row_sets"), 2);
  for (const char* tensor : {"a", "b"}) {
    ASSERT_TRUE(encodings_.Delete({"m", "main", tensor}, {}).ok());
    EXPECT_EQ(CountOf("SELECT COUNT(*) FROM row_sets"), *tensor == 'a' ? 2 : 0);
  }
  EXPECT_TRUE(encodings_.ListModels({}, 10)->empty());
}

TEST_P(StoreSpaceTest, AGramMatrixIsWrittenInStepsWhileOthersWrite) {
  const core::StatisticsState state =
      testing::MakeStateWithGram(testing::Count("QUANTD_STORE_FEATURES", 1500));
  const EncodingKey key{"m", "main", "a"};
  int64_t one = 0;
  {
    const OtherCaller other(sql_, "contributions");
    const OtherCaller neighbour(database_.Open(), "contributions elsewhere");
    for (uint64_t sequence = 1; sequence <= 3; ++sequence) {
      const absl::StatusOr<ContributionOutcome> outcome =
          statistics_.Contribute({key, "s", sequence}, state, 1);
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      EXPECT_FALSE(outcome->duplicate);
      // What it replaced is gone with it.
      if (sequence == 1) one = StatisticsPieces();
      EXPECT_EQ(StatisticsPieces(), one);
    }
  }
  EXPECT_EQ(GramRows(key), 3);
  ExpectSound();
}

TEST_P(StoreSpaceTest, AContributionThatIsGoneLeavesNothing) {
  const core::StatisticsState state = testing::MakeStateWithGram(1500);
  const core::GramState::Parts gram = state.gram->ToParts();
  const EncodingKey key{"m", "main", "a"};
  ASSERT_TRUE(statistics_.Contribute({key, "s", 1}, state, 1).ok());
  const int64_t one = StatisticsPieces();
  const SourceVersion before{key, "s", 1,
                             CountOf("SELECT set_id FROM statistics")};
  const SourceVersion now{key, "s", 2, before.set_id};
  // As one does that ends in between.
  const auto step = [&](GramWriter* writer,
                        const core::GramState::Parts& part) {
    const auto write = [&](SqlConnection& connection) {
      absl::Status status = writer->Begin(&connection, before, now);
      EXPECT_TRUE(writer->has_steps());
      return status.ok() ? writer->Step(&connection) : status;
    };
    const absl::Status status = sql_->Write(write);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(StatisticsPieces(), one + kPiecesPerTransaction + 1);
  };
  for (const bool comes_again : {false, true}) {
    GramWriter writer(&gram);
    step(&writer, gram);
    ExpectSound();
    EXPECT_EQ(GramRows(key), 1);
    // It may go on.
    FreeAll(kAge);
    EXPECT_EQ(StatisticsPieces(), one + kPiecesPerTransaction + 1);
    if (comes_again) {
      ASSERT_TRUE(statistics_.Contribute({key, "s", 2}, state, 1).ok());
      EXPECT_EQ(GramRows(key), 2);
    } else {
      FreeAll(-kAge);
    }
    EXPECT_EQ(StatisticsPieces(), one);
    FreeAll(kAge);
    EXPECT_EQ(CountOf("SELECT COUNT(*) FROM lost_statistics"), 0);
    ExpectSound();
  }
}

TEST_P(StoreSpaceTest, ContributionsOfOneSequenceDoNotMix) {
  const core::StatisticsState state = testing::MakeStateWithGram(1500);
  const core::GramState::Parts gram = state.gram->ToParts();
  core::GramState::Parts other = gram;
  other.code_sums[0] += 1;
  const EncodingKey key{"m", "main", "a"};
  ASSERT_TRUE(statistics_.Contribute({key, "s", 1}, state, 1).ok());
  const SourceVersion before{key, "s", 1,
                             CountOf("SELECT set_id FROM statistics")};
  GramWriter first(&gram), second(&other);
  const auto write = [&](SqlConnection& connection) {
    absl::Status status;
    for (GramWriter* writer : {&first, &second}) {
      status = writer->Begin(&connection, before, {key, "s", 2, before.set_id});
      if (status.ok()) status = writer->Step(&connection);
      if (!status.ok()) return status;
    }
    EXPECT_EQ(core::ErrorReason(first.Finish(&connection).status()),
              "STORE_UNAVAILABLE");
    return second.Finish(&connection).status();
  };
  const absl::Status status = sql_->Write(write);
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(StoreSpaceTest, ARefusedContributionLeavesNothing) {
  const core::StatisticsState state = testing::MakeStateWithGram(1500);
  const EncodingKey key{"m", "main", "a"};
  for (const uint64_t sequence : {1, 2}) {
    const int64_t pieces = StatisticsPieces();
    int asked = 0;
    const auto proceed = [&](int64_t /*memory*/) {
      return ++asked < 4 ? absl::OkStatus() : core::DrainingError();
    };
    EXPECT_EQ(core::ErrorReason(
                  statistics_.Merge({key, "s", sequence}, state, 1, proceed)
                      .status()),
              "DRAINING");
    // To see whether it fits, for the state in memory, and at each transaction.
    EXPECT_EQ(asked, 4);
    EXPECT_EQ(StatisticsPieces(), pieces);
    ASSERT_TRUE(statistics_.Contribute({key, "s", sequence}, state, 1).ok());
    EXPECT_EQ(GramRows(key), sequence);
    ExpectSound();
  }
}

TEST_P(StoreSpaceTest, ARefusedContributionLeavesWhatAnotherWrites) {
  const core::StatisticsState state = testing::MakeStateWithGram(1500);
  const core::GramState::Parts gram = state.gram->ToParts();
  // The first step of the first source of the revision.
  GramWriter writer(&gram);
  int64_t set_id = 0;
  const auto step = [&](SqlConnection& connection) -> absl::Status {
    const absl::StatusOr<RowSet> set =
        FindOrAddRowSet(connection, "m", "main", RowKind::kStatistics);
    if (!set.ok()) return set.status();
    set_id = set->id;
    absl::Status status =
        writer.Begin(&connection, absl::nullopt,
                     {EncodingKey{"m", "main", "a"}, "s", 1, set_id});
    EXPECT_TRUE(writer.has_steps());
    return status.ok() ? writer.Step(&connection) : status;
  };
  absl::Status status = sql_->Write(step);
  ASSERT_TRUE(status.ok()) << status;
  const auto refuse = [](int64_t /*memory*/) { return core::DrainingError(); };
  EXPECT_EQ(
      core::ErrorReason(
          statistics_.Merge({{"m", "main", "b"}, "s", 1}, state, 1, refuse)
              .status()),
      "DRAINING");
  EXPECT_EQ(CountOf("SELECT set_id FROM row_sets"), set_id);
  EXPECT_EQ(StatisticsPieces(), kPiecesPerTransaction + 1);
}

TEST_P(StoreSpaceTest, AGramMatrixIsWrittenWhileItsSourceIsDeleted) {
  const core::StatisticsState state = testing::MakeStateWithGram(1500);
  const EncodingKey key{"m", "main", "a"};
  std::atomic<bool> is_done = false;
  std::thread deleting([&] {
    SqlStatisticsStore other(database_.Open(), 64 << 20);
    StoreKeeper keeper(database_.Open());
    while (!is_done) {
      const absl::Status status = other.DeleteStatistics(key, "");
      EXPECT_TRUE(status.ok() || absl::IsNotFound(status)) << status;
      EXPECT_TRUE(keeper.FreeStep(kAge).ok());
      absl::SleepFor(10 * kPause);
    }
  });
  for (uint64_t sequence = 1; sequence <= 10; ++sequence) {
    const absl::StatusOr<ContributionOutcome> outcome =
        statistics_.Contribute({key, "s", sequence}, state, 1);
    EXPECT_TRUE(outcome.ok()) << outcome.status();
  }
  is_done = true;
  deleting.join();
  const int64_t rows = CountOf("SELECT COUNT(*) FROM statistics");
  if (rows > 0) {
    EXPECT_GE(GramRows(key), 1);
    EXPECT_TRUE(statistics_.DeleteStatistics(key, "").ok());
  }
  FreeAll(kAge);
  EXPECT_EQ(StatisticsPieces(), 0);
  ExpectSound();
}

TEST_P(StoreSpaceTest, WhatIsBeingDeletedIsNotForgotten) {
  // Nobody else writes into SQLite's file meanwhile.
  if (GetParam() == Backend::kSqlite) GTEST_SKIP();
  const EncodingKey key{"m", "main", "a"};
  ASSERT_TRUE(
      statistics_.Contribute({key, "s", 1}, testing::MakeStateWithGram(1500), 1)
          .ok());
  const int64_t set_id = CountOf("SELECT set_id FROM row_sets");
  // That pieces are to be freed is noted since the first step.
  EXPECT_EQ(CountOf("SELECT COUNT(*) FROM lost_statistics"), 1);
  const std::shared_ptr<SqlDatabase> other = database_.Open();
  const auto remove = [&](SqlConnection& connection) -> absl::Status {
    const absl::Status status =
        connection.Prepare("DELETE FROM statistics")->Step("").status();
    if (!status.ok()) return status;
    // As a contribution does after its last step.
    return other->Write([&](SqlConnection& freeing) {
      const absl::StatusOr<int> count = FreeStatisticsPieces(
          &freeing, set_id, "a", "s", absl::InfinitePast());
      EXPECT_EQ(count.value_or(-1), 0);
      return count.status();
    });
  };
  const absl::Status status = sql_->Write(remove);
  ASSERT_TRUE(status.ok()) << status;
  FreeAll(kAge);
  EXPECT_EQ(StatisticsPieces(), 0);
  ExpectSound();
}

// PostgreSQL can't lock each of them.
TEST_P(StoreSpaceTest, AModelOfManyRevisionsIsDeleted) {
  ASSERT_TRUE(encodings_.Put({"m", "main", "a"}, MakeSmall(), {}).ok());
  constexpr char kAddRevisions[] =
      "WITH RECURSIVE numbers (number) AS ("
      "SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < 8000) "
      "INSERT INTO row_sets (model, revision, kind, set_id, generation, "
      "update_time_us, checksum) SELECT 'm', 'r' || number, 0, "
      "1000000 + number, 0, 0, 0 FROM numbers";
  const absl::Status added = sql_->Write([&](SqlConnection& connection) {
    return connection.Prepare(kAddRevisions)->Step("cannot add").status();
  });
  ASSERT_TRUE(added.ok()) << added;
  const absl::StatusOr<DeletedRows> deleted = encodings_.DeleteModel("m");
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(deleted->encoding_count, 1);
  EXPECT_EQ(CountOf("SELECT COUNT(*) FROM row_sets"), 0);
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreSpaceTest,
                         ::testing::ValuesIn(Backends()), BackendName);

}  // namespace
}  // namespace quantd::server
