// What stores promise to several processes, and to those that are killed.
//
// QUANTD_STORE_MERGES and QUANTD_STORE_KILLS set how many of each; the whole
// count of the promise is 10000 and 200.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/statistics/statistics_state.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"
#include "server/store/encoding_store.h"
#include "server/store/sql_database.h"
#include "server/store/sql_encoding_store.h"
#include "server/store/sql_statistics_store.h"
#include "server/store/statistics_store.h"
#include "tests/server/store/large_state.h"
#include "tests/server/store/test_database.h"
#include "tests/support/count.h"

namespace quantd::server::store_processes_test {
namespace {

using testing::Backend;
using testing::BackendName;
using testing::Backends;

constexpr int kProcesses = 4;

// Of many scales, so that a row takes several pages and can be torn.
std::shared_ptr<const core::Encoding> MakeEncoding(float value) {
  core::Encoding encoding;
  encoding.format = static_cast<core::NumberFormat>(8);
  encoding.block_size = {1};
  encoding.scale.assign(5000, value);
  encoding.qmin = -128;
  encoding.qmax = 127;
  return std::make_shared<const core::Encoding>(std::move(encoding));
}

class StoreProcessesTest : public ::testing::TestWithParam<Backend> {
 protected:
  std::unique_ptr<SqlEncodingStore> Open() const {
    std::shared_ptr<SqlDatabase> database = database_.Open();
    if (database == nullptr) return nullptr;
    return std::make_unique<SqlEncodingStore>(std::move(database));
  }

  std::unique_ptr<SqlStatisticsStore> OpenStatistics() const {
    std::shared_ptr<SqlDatabase> database = database_.Open();
    if (database == nullptr) return nullptr;
    return std::make_unique<SqlStatisticsStore>(std::move(database), 64 << 20);
  }

  // Runs `work` in another process, which ends with what it answers. No store
  // of this process may be open: a fork copies no thread of it.
  template <typename Work>
  static pid_t Fork(Work work) {
    const pid_t child = fork();
    if (child == 0) _exit(work());
    return child;
  }

  // Runs `work` in another process until it is killed, at a random moment up to
  // `most_us` after it acknowledged a first number. Sets `last` to the last
  // one.
  template <typename Work>
  void KillDuring(Work work, int most_us, int64_t* last) {
    int fds[2];
    ASSERT_EQ(pipe(fds), 0);
    const pid_t child = Fork([&] {
      close(fds[0]);
      return work([&](int64_t number) {
        return write(fds[1], &number, sizeof(number)) == sizeof(number);
      });
    });
    close(fds[1]);
    int64_t number = 0;
    ASSERT_EQ(read(fds[0], &number, sizeof(number)),
              static_cast<ssize_t>(sizeof(number)));
    absl::SleepFor(absl::Microseconds(random_() % most_us));
    kill(child, SIGKILL);
    *last = number;
    while (read(fds[0], &number, sizeof(number)) > 0) *last = number;
    close(fds[0]);
    waitpid(child, nullptr, 0);
  }

  const testing::TestDatabase database_{GetParam()};
  const EncodingKey key_{"model", "revision", "tensor"};

 private:
  std::mt19937 random_{7};
};

TEST_P(StoreProcessesTest, NoCompareAndSetIsLost) {
  const int64_t merges = testing::Count("QUANTD_STORE_MERGES", 150);
  {
    const std::unique_ptr<SqlEncodingStore> store = Open();
    ASSERT_NE(store, nullptr);
    ASSERT_TRUE(store->Put(key_, MakeEncoding(1), {}).ok());
  }
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i) {
    children.push_back(Fork([&] {
      const std::unique_ptr<SqlEncodingStore> own = Open();
      if (own == nullptr) return 2;
      for (int64_t done = 0; done < merges;) {
        const absl::StatusOr<StoredEncoding> got = own->Get(key_);
        if (!got.ok()) return 3;
        const absl::Status put =
            own->Put(key_, MakeEncoding(got->encoding->scale[0] + 1),
                     {got->etag})
                .status();
        if (put.ok()) {
          ++done;
        } else if (core::ErrorReason(put) != "ETAG_MISMATCH" &&
                   // The others may have kept it waiting for too long.
                   core::ErrorReason(put) != "STORE_UNAVAILABLE") {
          return 4;
        }
      }
      return 0;
    }));
  }
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  const std::unique_ptr<SqlEncodingStore> store = Open();
  ASSERT_NE(store, nullptr);
  const absl::StatusOr<StoredEncoding> got = store->Get(key_);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->encoding->scale[0],
            static_cast<float>(1 + kProcesses * merges));
}

// Round after round over the same keys.
TEST_P(StoreProcessesTest, KillingLosesAndTearsNothing) {
  constexpr int kKeys = 8;
  const int64_t kills = testing::Count("QUANTD_STORE_KILLS", 10);
  const auto key = [](int64_t i) {
    return EncodingKey{"model", "revision", absl::StrCat(i % kKeys)};
  };
  // The value of the last acknowledged put; they count up from 1.
  int64_t acknowledged = 0;
  for (int64_t round = 0; round < kills; ++round) {
    KillDuring(
        [&](auto acknowledge) {
          const std::unique_ptr<SqlEncodingStore> own = Open();
          if (own == nullptr) return 2;
          for (int64_t i = acknowledged + 1;; ++i) {
            const auto encoding = MakeEncoding(static_cast<float>(i));
            if (!own->Put(key(i), encoding, {}).ok()) return 3;
            if (!acknowledge(i)) return 4;
          }
        },
        20'000, &acknowledged);
    if (HasFatalFailure()) return;

    const std::unique_ptr<SqlEncodingStore> store = Open();
    ASSERT_NE(store, nullptr);
    for (int64_t i = std::max<int64_t>(1, acknowledged - kKeys + 1);
         i <= acknowledged; ++i) {
      const absl::StatusOr<StoredEncoding> got = store->Get(key(i));
      ASSERT_TRUE(got.ok()) << got.status();
      const float value = got->encoding->scale[0];
      // The one that was under way when the child died may be there or not.
      const bool was_under_way = i == acknowledged - kKeys + 1;
      EXPECT_TRUE(value == static_cast<float>(i) ||
                  (was_under_way && value == static_cast<float>(i + kKeys)))
          << value << " for put " << i;
      EXPECT_EQ(got->encoding->scale, std::vector<float>(5000, value));
    }
  }
}

// Contributions that take several rows each, or several transactions, over one
// source.
TEST_P(StoreProcessesTest, KillingCountsEachContributionOnce) {
  const int64_t kills = testing::Count("QUANTD_STORE_KILLS", 10);
  const core::StatisticsState parts[] = {testing::MakeLargeState(1),
                                         testing::MakeStateWithGram(1200)};
  uint64_t sequences[2] = {};
  for (int64_t round = 0; round < kills; ++round) {
    const core::StatisticsState& part = parts[round % 2];
    uint64_t& sequence = sequences[round % 2];
    const EncodingKey key{"model", "revision", absl::StrCat(round % 2)};
    int64_t acknowledged = 0;
    KillDuring(
        [&](auto acknowledge) {
          const std::unique_ptr<SqlStatisticsStore> own = OpenStatistics();
          if (own == nullptr) return 2;
          for (uint64_t i = sequence + 1;; ++i) {
            if (!own->Contribute({key, "source", i}, part, 1).ok()) return 3;
            if (!acknowledge(static_cast<int64_t>(i))) return 4;
          }
        },
        60'000, &acknowledged);
    if (HasFatalFailure()) return;

    const std::unique_ptr<SqlStatisticsStore> store = OpenStatistics();
    ASSERT_NE(store, nullptr);
    const absl::StatusOr<StoredStatistics> got = store->GetStatistics(key);
    ASSERT_TRUE(got.ok()) << got.status();
    // The one that was under way when the child died may be there or not.
    sequence = got->sources[0].sequence;
    const auto last = static_cast<uint64_t>(acknowledged);
    EXPECT_TRUE(sequence == last || sequence == last + 1)
        << sequence << " after " << acknowledged;
    EXPECT_EQ(got->state.statistics.counts().total,
              static_cast<int64_t>(sequence) * part.statistics.counts().total);
    EXPECT_EQ(got->state.statistics.histograms().back().count(),
              sequence * part.statistics.histograms().back().count());
    if (!part.gram.has_value()) continue;
    const auto gram = store->ReadGram(
        key, [](int64_t /*memory*/) { return absl::OkStatus(); });
    ASSERT_TRUE(gram.ok() && gram->has_value()) << gram.status();
    EXPECT_EQ((*gram)->ToParts().rows, sequence);
    EXPECT_EQ((*gram)->ToParts().code_sums.front(),
              sequence * part.gram->ToParts().code_sums.front());
  }
}

// Readers see the whole old or the whole new revision.
TEST_P(StoreProcessesTest, KillingLeavesAWholeRevision) {
  constexpr int kTensors = 20;
  const int64_t kills = testing::Count("QUANTD_STORE_KILLS", 10);
  const auto key = [](absl::string_view revision, int tensor) {
    return EncodingKey{"model", std::string(revision), absl::StrCat(tensor)};
  };
  const auto put_all = [&](SqlEncodingStore& store, absl::string_view revision,
                           int64_t value) {
    for (int i = 0; i < kTensors; ++i) {
      const auto encoding = MakeEncoding(static_cast<float>(value));
      if (!store.Put(key(revision, i), encoding, {}).ok()) return false;
    }
    return true;
  };
  {
    const std::unique_ptr<SqlEncodingStore> store = Open();
    ASSERT_NE(store, nullptr);
    ASSERT_TRUE(put_all(*store, "main", 1));
  }
  int64_t published = 1;
  for (int64_t round = 0; round < kills; ++round) {
    int64_t acknowledged = 0;
    KillDuring(
        [&](auto acknowledge) {
          const std::unique_ptr<SqlEncodingStore> own = Open();
          if (own == nullptr) return 2;
          for (int64_t i = published + 1;; ++i) {
            if (!put_all(*own, "draft", i)) return 3;
            // Told before: the kill comes while it is published.
            if (!acknowledge(i - 1)) return 4;
            if (!own->PublishRevision("model", "draft", "main", false).ok())
              return 5;
          }
        },
        20'000, &acknowledged);
    if (HasFatalFailure()) return;

    const std::unique_ptr<SqlEncodingStore> store = Open();
    ASSERT_NE(store, nullptr);
    const absl::StatusOr<std::vector<EncodingListEntry>> list =
        store->ListEncodings("model", "main", "", 1000);
    ASSERT_TRUE(list.ok()) << list.status();
    ASSERT_EQ(list->size(), kTensors);
    float value = 0;
    for (int i = 0; i < kTensors; ++i) {
      const absl::StatusOr<StoredEncoding> got = store->Get(key("main", i));
      ASSERT_TRUE(got.ok()) << got.status();
      if (i == 0) value = got->encoding->scale[0];
      EXPECT_EQ(got->encoding->scale, std::vector<float>(5000, value));
    }
    // What was acknowledged is there, or what was published after it.
    EXPECT_TRUE(value == static_cast<float>(acknowledged) ||
                value == static_cast<float>(acknowledged + 1))
        << value << " after " << acknowledged;
    published = static_cast<int64_t>(value);
    ASSERT_TRUE(
        store
            ->Check([](const absl::Status& status) { ADD_FAILURE() << status; })
            .ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreProcessesTest,
                         ::testing::ValuesIn(Backends()), BackendName);

}  // namespace
}  // namespace quantd::server::store_processes_test
