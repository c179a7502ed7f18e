#include "server/store/caching_encoding_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "prometheus/metric_family.h"
#include "server/metrics/metrics.h"

namespace quantd::server::caching_encoding_store_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::shared_ptr<const core::Encoding> MakeEncoding(float scale,
                                                   int scale_count = 1) {
  core::Encoding encoding;
  encoding.scale.assign(scale_count, scale);
  return std::make_shared<const core::Encoding>(std::move(encoding));
}

// What a read of any encoding takes.
constexpr int64_t kFakeMemoryBytes = 1234;

// A store in memory whose calls stop where a test wants them to.
class FakeStore : public EncodingStore {
 public:
  struct Gate {
    absl::Notification reached;
    absl::Notification go;

    void Pass() {
      reached.Notify();
      go.WaitForNotification();
    }
  };

  absl::StatusOr<StoredEncoding> Read(
      const EncodingKey& key,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override {
    ++gets;
    if (unavailable) return core::StoreUnavailableError("away");
    absl::StatusOr<StoredEncoding> result = Find(key);
    if (result.ok()) {
      const absl::Status status = proceed(kFakeMemoryBytes);
      if (!status.ok()) return status;
    }
    // The row was read; the answer is on its way.
    if (Gate* gate = get_gate.exchange(nullptr)) gate->Pass();
    return result;
  }

  absl::StatusOr<StoredEncoding> Put(
      const EncodingKey& key, std::shared_ptr<const core::Encoding> encoding,
      const Precondition& precondition) override {
    if (Gate* gate = before_put_gate.exchange(nullptr)) gate->Pass();
    if (unavailable) return core::StoreUnavailableError("away");
    if (!precondition.if_match.empty()) {
      return core::EtagMismatchError(precondition.if_match, "another");
    }
    StoredEncoding stored;
    {
      absl::MutexLock lock(&mutex_);
      stored.encoding = std::move(encoding);
      stored.generation = ++generation_;
      stored.etag = absl::StrCat(stored.generation);
      rows_[key.tensor] = stored;
    }
    if (Gate* gate = after_put_gate.exchange(nullptr)) gate->Pass();
    return stored;
  }

  absl::Status Delete(const EncodingKey& key,
                      const Precondition& precondition) override {
    if (unavailable) return core::StoreUnavailableError("away");
    {
      absl::MutexLock lock(&mutex_);
      if (rows_.erase(key.tensor) == 0) return NotFound(key);
    }
    if (Gate* gate = after_delete_gate.exchange(nullptr)) gate->Pass();
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<EncodingReader>> OpenReader(
      const EncodingKey& key) override {
    return NotFound(key);
  }
  absl::StatusOr<std::unique_ptr<EncodingWriter>> OpenWriter(
      const EncodingKey& key, std::shared_ptr<const core::Encoding>, bool,
      const Precondition&) override {
    return NotFound(key);
  }
  absl::StatusOr<PublishedRevision> PublishRevision(absl::string_view,
                                                    absl::string_view,
                                                    absl::string_view,
                                                    bool) override {
    absl::Status status = ReplaceAll();
    if (!status.ok()) return status;
    return PublishedRevision{1, 1};
  }
  absl::StatusOr<DeletedRows> DeleteRevision(absl::string_view,
                                             absl::string_view) override {
    absl::Status status = ReplaceAll();
    if (!status.ok()) return status;
    return DeletedRows{1, 0};
  }
  absl::StatusOr<DeletedRows> DeleteModel(absl::string_view) override {
    absl::Status status = ReplaceAll();
    if (!status.ok()) return status;
    return DeletedRows{1, 0};
  }

  absl::StatusOr<std::vector<EncodingListEntry>> ListEncodings(
      absl::string_view, absl::string_view, absl::string_view, int) override {
    return std::vector<EncodingListEntry>();
  }
  absl::StatusOr<std::vector<ModelListEntry>> ListModels(const NameRange&,
                                                         int) override {
    return std::vector<ModelListEntry>();
  }
  absl::StatusOr<std::vector<RevisionListEntry>> ListRevisions(
      absl::string_view, absl::string_view, int) override {
    return std::vector<RevisionListEntry>();
  }
  absl::optional<int64_t> ForeignVersion() override {
    ++version_checks;
    const int64_t number = version;
    if (number < 0) return absl::nullopt;
    return number;
  }
  absl::Status Ping() override { return absl::OkStatus(); }

  std::atomic<int> gets{0};
  std::atomic<int> version_checks{0};
  // Negative: it cannot be told.
  std::atomic<int64_t> version{-1};
  std::atomic<bool> unavailable{false};
  std::atomic<Gate*> get_gate{nullptr};
  std::atomic<Gate*> before_put_gate{nullptr};
  std::atomic<Gate*> after_put_gate{nullptr};
  std::atomic<Gate*> after_delete_gate{nullptr};

 private:
  static absl::Status NotFound(const EncodingKey& key) {
    return core::EncodingNotFoundError(key.model, key.revision, key.tensor);
  }
  // What publishing and deleting revisions leaves here: nothing.
  absl::Status ReplaceAll() {
    if (unavailable) return core::StoreUnavailableError("away");
    {
      absl::MutexLock lock(&mutex_);
      rows_.clear();
    }
    if (Gate* gate = after_delete_gate.exchange(nullptr)) gate->Pass();
    return absl::OkStatus();
  }
  absl::StatusOr<StoredEncoding> Find(const EncodingKey& key) {
    absl::MutexLock lock(&mutex_);
    const auto it = rows_.find(key.tensor);
    if (it == rows_.end()) return NotFound(key);
    return it->second;
  }

  absl::Mutex mutex_;
  std::map<std::string, StoredEncoding> rows_ ABSL_GUARDED_BY(mutex_);
  int64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
};

class CachingEncodingStoreTest : public ::testing::Test {
 protected:
  CachingEncodingStoreTest() { MakeCache(int64_t{1} << 20); }

  void MakeCache(int64_t cap_bytes) {
    auto inner = std::make_unique<FakeStore>();
    inner_ = inner.get();
    CachingEncodingStore::Options options;
    options.cap_bytes = cap_bytes;
    options.max_age = absl::Seconds(1);
    options.max_stale = absl::Minutes(10);
    options.clock = [this] { return absl::Milliseconds(now_ms_.load()); };
    cache_ = std::make_unique<CachingEncodingStore>(std::move(inner), options,
                                                    &metrics_);
  }

  float ScaleOf(const EncodingKey& key) {
    absl::StatusOr<StoredEncoding> got = cache_->Get(key);
    return got.ok() ? got->encoding->scale[0] : -1;
  }

  double MetricValue(const std::string& name) {
    for (const prometheus::MetricFamily& family : metrics_.Collect()) {
      if (family.name != name) continue;
      return family.metric[0].counter.value + family.metric[0].gauge.value;
    }
    return -1;
  }

  Metrics metrics_;
  std::atomic<int64_t> now_ms_{0};
  FakeStore* inner_;
  std::unique_ptr<CachingEncodingStore> cache_;
  const EncodingKey key_{"m", "r", "t"};
};

TEST_F(CachingEncodingStoreTest, CachedAnswersOnlyWhatIsFresh) {
  const EncodingKey key{"m", "r", "t"};
  EXPECT_FALSE(cache_->Cached(key).has_value());
  EXPECT_EQ(inner_->gets, 0);
  const absl::StatusOr<StoredEncoding> put =
      cache_->Put(key, MakeEncoding(2), {});
  ASSERT_TRUE(put.ok()) << put.status();
  const absl::optional<StoredEncoding> cached = cache_->Cached(key);
  ASSERT_TRUE(cached.has_value());
  EXPECT_EQ(cached->etag, put->etag);
  EXPECT_EQ(cached->encoding->scale[0], 2);
  now_ms_ = 1001;
  EXPECT_FALSE(cache_->Cached(key).has_value());
  EXPECT_EQ(inner_->gets, 0);
}

TEST_F(CachingEncodingStoreTest, KeepsALargeEncodingButNotInThePlaceOfAll) {
  MakeCache(int64_t{64} << 20);
  // A sixteenth of the cache is for a key and those beside it.
  const EncodingKey huge = {"model", "main", "huge"};
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(1, 400'000), {}).ok());
  ASSERT_TRUE(cache_->Put(huge, MakeEncoding(1, 1'000'000), {}).ok());
  inner_->unavailable = true;
  EXPECT_TRUE(cache_->Get(key_).ok());
  EXPECT_FALSE(cache_->Get(huge).ok());
}

TEST_F(CachingEncodingStoreTest, AsksToProceedOnlyForWhatIsNotCached) {
  std::vector<int64_t> asked;
  const auto ask = [&](int64_t bytes) {
    asked.push_back(bytes);
    return absl::OkStatus();
  };
  EXPECT_FALSE(cache_->Read(key_, ask).ok());
  EXPECT_THAT(asked, IsEmpty());
  ASSERT_TRUE(inner_->Put(key_, MakeEncoding(1), {}).ok());
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(cache_->Read(key_, ask).ok());
  EXPECT_THAT(asked, ElementsAre(kFakeMemoryBytes));
  now_ms_ = 1001;
  EXPECT_TRUE(cache_->Read(key_, ask).ok());
  EXPECT_THAT(asked, ElementsAre(kFakeMemoryBytes, kFakeMemoryBytes));
  // One that is older, while the inner store is away.
  now_ms_ = 2002;
  inner_->unavailable = true;
  EXPECT_TRUE(cache_->Read(key_, ask).ok());
  EXPECT_EQ(asked.size(), 2u);
}

TEST_F(CachingEncodingStoreTest, KeepsWhatItHasWhenAReadMayNotProceed) {
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok());
  now_ms_ = 1001;
  const absl::Status refused =
      cache_
          ->Read(key_,
                 [](int64_t) {
                   return core::MemoryBudgetError(1, "", absl::ZeroDuration());
                 })
          .status();
  EXPECT_EQ(core::ErrorReason(refused), "MEMORY_BUDGET") << refused;
  inner_->unavailable = true;
  EXPECT_EQ(ScaleOf(key_), 1);
  // Nor does it leave a read behind that writes would wait for.
  inner_->unavailable = false;
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(2), {}).ok());
  EXPECT_EQ(ScaleOf(key_), 2);
  EXPECT_EQ(inner_->gets, 2);
}

TEST_F(CachingEncodingStoreTest, AsksTheInnerStoreOnce) {
  ASSERT_TRUE(inner_->Put(key_, MakeEncoding(1), {}).ok());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ScaleOf(key_), 1);
  EXPECT_EQ(inner_->gets, 1);
  EXPECT_EQ(MetricValue("quantd_cache_hits_total"), 2);
  EXPECT_EQ(MetricValue("quantd_cache_misses_total"), 1);
  EXPECT_EQ(MetricValue("quantd_cache_entries"), 1);
  EXPECT_EQ(MetricValue("quantd_cache_resident_bytes"),
            static_cast<double>(cache_->resident_bytes()));
}

TEST_F(CachingEncodingStoreTest, KeepsWhatWasPutAndForgetsWhatWasDeleted) {
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok());
  EXPECT_EQ(ScaleOf(key_), 1);
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(2), {}).ok());
  EXPECT_EQ(ScaleOf(key_), 2);
  EXPECT_EQ(inner_->gets, 0);
  ASSERT_TRUE(cache_->Delete(key_, {}).ok());
  EXPECT_EQ(ScaleOf(key_), -1);
  EXPECT_EQ(cache_->resident_bytes(), 0);
  EXPECT_EQ(cache_->resident_entries(), 0);
}

TEST_F(CachingEncodingStoreTest, ReadThatAPutOvertakesIsNotCached) {
  ASSERT_TRUE(inner_->Put(key_, MakeEncoding(1), {}).ok());
  FakeStore::Gate gate;
  inner_->get_gate = &gate;
  std::thread reader([&] { EXPECT_EQ(ScaleOf(key_), 1); });
  gate.reached.WaitForNotification();
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(2), {}).ok());
  gate.go.Notify();
  reader.join();
  EXPECT_EQ(ScaleOf(key_), 2);
}

TEST_F(CachingEncodingStoreTest, ReadThatADeleteOvertakesIsNotCached) {
  ASSERT_TRUE(inner_->Put(key_, MakeEncoding(1), {}).ok());
  FakeStore::Gate gate;
  inner_->get_gate = &gate;
  std::thread reader([&] { EXPECT_EQ(ScaleOf(key_), 1); });
  gate.reached.WaitForNotification();
  ASSERT_TRUE(cache_->Delete(key_, {}).ok());
  gate.go.Notify();
  reader.join();
  EXPECT_EQ(ScaleOf(key_), -1);
  EXPECT_EQ(cache_->resident_entries(), 0);
}

// The read begins and ends while the put is at the inner store.
TEST_F(CachingEncodingStoreTest, ReadInsideAPutIsNotCached) {
  ASSERT_TRUE(inner_->Put(key_, MakeEncoding(1), {}).ok());
  FakeStore::Gate gate;
  inner_->before_put_gate = &gate;
  std::thread writer(
      [&] { EXPECT_TRUE(cache_->Put(key_, MakeEncoding(2), {}).ok()); });
  gate.reached.WaitForNotification();
  EXPECT_EQ(ScaleOf(key_), 1);
  EXPECT_EQ(cache_->resident_entries(), 0);
  gate.go.Notify();
  writer.join();
  EXPECT_EQ(ScaleOf(key_), 2);
}

// Once a read has answered the new encoding, none answers the old one, though
// the put has not returned.
TEST_F(CachingEncodingStoreTest, PutInFlightHidesTheCachedEncoding) {
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok());
  FakeStore::Gate gate;
  inner_->after_put_gate = &gate;
  std::thread writer(
      [&] { EXPECT_TRUE(cache_->Put(key_, MakeEncoding(2), {}).ok()); });
  gate.reached.WaitForNotification();
  EXPECT_EQ(ScaleOf(key_), 2);
  gate.go.Notify();
  writer.join();
}

// The first put's answer arrives after the second's.
TEST_F(CachingEncodingStoreTest, PutsOutOfOrderLeaveTheNewest) {
  FakeStore::Gate gate;
  inner_->after_put_gate = &gate;
  std::thread first(
      [&] { EXPECT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok()); });
  gate.reached.WaitForNotification();
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(2), {}).ok());
  gate.go.Notify();
  first.join();
  EXPECT_EQ(ScaleOf(key_), 2);
}

TEST_F(CachingEncodingStoreTest, PutOvertakenByADeleteLeavesNothing) {
  FakeStore::Gate gate;
  inner_->after_put_gate = &gate;
  std::thread writer(
      [&] { EXPECT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok()); });
  gate.reached.WaitForNotification();
  ASSERT_TRUE(cache_->Delete(key_, {}).ok());
  gate.go.Notify();
  writer.join();
  EXPECT_EQ(ScaleOf(key_), -1);
}

// Another process puts between two reads whose answers cross.
TEST_F(CachingEncodingStoreTest, ReadsOutOfOrderLeaveTheNewest) {
  ASSERT_TRUE(inner_->Put(key_, MakeEncoding(1), {}).ok());
  FakeStore::Gate gate;
  inner_->get_gate = &gate;
  std::thread reader([&] { EXPECT_EQ(ScaleOf(key_), 1); });
  gate.reached.WaitForNotification();
  ASSERT_TRUE(inner_->Put(key_, MakeEncoding(2), {}).ok());
  EXPECT_EQ(ScaleOf(key_), 2);
  gate.go.Notify();
  reader.join();
  EXPECT_EQ(ScaleOf(key_), 2);
}

TEST_F(CachingEncodingStoreTest, AFailedPutLeavesWhatServesMeanwhile) {
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok());
  inner_->unavailable = true;
  EXPECT_FALSE(cache_->Put(key_, MakeEncoding(2), {}).ok());
  EXPECT_FALSE(cache_->Delete(key_, {}).ok());
  EXPECT_EQ(ScaleOf(key_), 1);
  // The inner store knows what came of it.
  EXPECT_EQ(cache_->Cached(key_), absl::nullopt);
  inner_->unavailable = false;
  const int gets = inner_->gets;
  EXPECT_EQ(ScaleOf(key_), 1);
  EXPECT_EQ(inner_->gets, gets + 1);
  EXPECT_NE(cache_->Cached(key_), absl::nullopt);
}

TEST_F(CachingEncodingStoreTest, WhatWasReadDuringAPutOutlivesTheInnerStore) {
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok());
  ASSERT_TRUE(inner_->Put(key_, MakeEncoding(2), {}).ok());
  FakeStore::Gate gate;
  inner_->before_put_gate = &gate;
  std::thread put([&] {
    EXPECT_TRUE(
        absl::IsUnavailable(cache_->Put(key_, MakeEncoding(3), {}).status()));
  });
  gate.reached.WaitForNotification();
  EXPECT_EQ(cache_->Get(key_)->generation, 2);
  inner_->unavailable = true;
  gate.go.Notify();
  put.join();
  EXPECT_EQ(cache_->Get(key_)->generation, 2);
  inner_->unavailable = false;
  const int gets = inner_->gets;
  EXPECT_EQ(cache_->Get(key_)->generation, 2);
  EXPECT_EQ(inner_->gets, gets + 1);
}

TEST_F(CachingEncodingStoreTest, APutThatAnotherProcessOvertookIsNotCached) {
  FakeStore::Gate gate;
  inner_->after_put_gate = &gate;
  std::thread put(
      [&] { EXPECT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok()); });
  gate.reached.WaitForNotification();
  ASSERT_TRUE(inner_->Put(key_, MakeEncoding(2), {}).ok());
  EXPECT_EQ(cache_->Get(key_)->generation, 2);
  gate.go.Notify();
  put.join();
  EXPECT_EQ(cache_->Get(key_)->generation, 2);
}

TEST_F(CachingEncodingStoreTest, APutThatWasRefusedAsksAgain) {
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok());
  EXPECT_FALSE(cache_->Put(key_, MakeEncoding(2), {"other"}).ok());
  const int gets = inner_->gets;
  EXPECT_EQ(ScaleOf(key_), 1);
  EXPECT_EQ(inner_->gets, gets + 1);
}

TEST_F(CachingEncodingStoreTest, SeesAnotherProcessAfterTheMaximalAge) {
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok());
  ASSERT_TRUE(inner_->Put(key_, MakeEncoding(2), {}).ok());
  now_ms_ = 1000;
  EXPECT_EQ(ScaleOf(key_), 1);
  now_ms_ = 1001;
  EXPECT_EQ(ScaleOf(key_), 2);
  ASSERT_TRUE(inner_->Delete(key_, {}).ok());
  now_ms_ = 3000;
  EXPECT_EQ(ScaleOf(key_), -1);
  EXPECT_EQ(cache_->resident_entries(), 0);
}

TEST_F(CachingEncodingStoreTest, ReadsNothingAgainWhileNobodyElseWrites) {
  inner_->version = 5;
  ASSERT_TRUE(inner_->Put(key_, MakeEncoding(1), {}).ok());
  const EncodingKey other{"m", "r", "other"};
  ASSERT_TRUE(cache_->Put(other, MakeEncoding(2), {}).ok());
  for (int second = 0; second < 100; ++second) {
    now_ms_ = second * 1001;
    for (int i = 0; i < 10; ++i) {
      EXPECT_EQ(ScaleOf(key_), 1);
      EXPECT_EQ(ScaleOf(other), 2);
      EXPECT_TRUE(cache_->Cached(key_).has_value());
    }
  }
  EXPECT_EQ(inner_->gets, 1);
  EXPECT_EQ(inner_->version_checks, 100);
}

TEST_F(CachingEncodingStoreTest, ReadsAgainOnceSomebodyElseHasWritten) {
  inner_->version = 5;
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok());
  now_ms_ = 1001;
  EXPECT_EQ(ScaleOf(key_), 1);
  ASSERT_TRUE(inner_->Put(key_, MakeEncoding(2), {}).ok());
  inner_->version = 6;
  now_ms_ = 2003;
  EXPECT_FALSE(cache_->Cached(key_).has_value());
  EXPECT_EQ(ScaleOf(key_), 2);
  EXPECT_EQ(inner_->gets, 1);
  now_ms_ = 3005;
  EXPECT_EQ(ScaleOf(key_), 2);
  EXPECT_EQ(inner_->gets, 1);
}

// A read tells nothing of what came after the version that it began with.
TEST_F(CachingEncodingStoreTest, AWriteBetweenCheckAndReadIsNotMissed) {
  inner_->version = 5;
  ASSERT_TRUE(inner_->Put(key_, MakeEncoding(1), {}).ok());
  FakeStore::Gate gate;
  inner_->get_gate = &gate;
  std::thread reader([&] { EXPECT_EQ(ScaleOf(key_), 1); });
  gate.reached.WaitForNotification();
  ASSERT_TRUE(inner_->Put(key_, MakeEncoding(2), {}).ok());
  inner_->version = 6;
  now_ms_ = 1001;
  EXPECT_EQ(ScaleOf({"m", "r", "another"}), -1);
  gate.go.Notify();
  reader.join();
  now_ms_ = 2003;
  EXPECT_EQ(ScaleOf(key_), 2);
}

TEST_F(CachingEncodingStoreTest, ReadsAgainWhileTheVersionCannotBeTold) {
  inner_->version = 5;
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok());
  inner_->version = -1;
  ASSERT_TRUE(inner_->Put(key_, MakeEncoding(2), {}).ok());
  now_ms_ = 1001;
  EXPECT_EQ(ScaleOf(key_), 2);
}

TEST_F(CachingEncodingStoreTest, ServesWhileTheInnerStoreIsAway) {
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok());
  inner_->unavailable = true;
  now_ms_ = 600'000;
  EXPECT_EQ(ScaleOf(key_), 1);
  now_ms_ = 600'001;
  EXPECT_EQ(core::ErrorReason(cache_->Get(key_).status()), "STORE_UNAVAILABLE");
}

TEST_F(CachingEncodingStoreTest, NeverExceedsItsCap) {
  constexpr int64_t kCapBytes = 64 << 10;
  MakeCache(kCapBytes);
  for (int i = 0; i < 500; ++i) {
    const EncodingKey key{"m", "r", absl::StrCat("tensor", i)};
    ASSERT_TRUE(cache_->Put(key, MakeEncoding(1, 1 + i % 300), {}).ok());
    ASSERT_LE(cache_->resident_bytes(), kCapBytes);
  }
  EXPECT_GT(cache_->resident_bytes(), kCapBytes / 4);
  EXPECT_EQ(MetricValue("quantd_cache_evictions_total"),
            static_cast<double>(500 - cache_->resident_entries()));
}

TEST_F(CachingEncodingStoreTest, LeavesOutWhatIsLargerThanAShard) {
  constexpr int64_t kCapBytes = 64 << 10;
  MakeCache(kCapBytes);
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok());
  EXPECT_EQ(cache_->resident_entries(), 1);
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(2, 4096), {}).ok());
  EXPECT_EQ(cache_->resident_entries(), 0);
  EXPECT_EQ(ScaleOf(key_), 2);
}

TEST_F(CachingEncodingStoreTest, CachesNothingWithoutACap) {
  MakeCache(0);
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok());
  EXPECT_EQ(ScaleOf(key_), 1);
  EXPECT_EQ(cache_->resident_entries(), 0);
}

TEST_F(CachingEncodingStoreTest, KeepsWhatWasUsedLast) {
  // One shard holds a few of these.
  constexpr int64_t kCapBytes = 16 * 4096;
  MakeCache(kCapBytes);
  ASSERT_TRUE(cache_->Put(key_, MakeEncoding(1), {}).ok());
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE(
        cache_->Put({"m", "r", absl::StrCat(i)}, MakeEncoding(2), {}).ok());
    EXPECT_EQ(ScaleOf(key_), 1);
  }
  EXPECT_EQ(inner_->gets, 0);
}

TEST_F(CachingEncodingStoreTest, AnswersNothingOlderThanAFinishedPut) {
  // Small enough that entries come and go.
  MakeCache(16 * 1500);
  constexpr int kKeys = 8;
  std::atomic<int> finished[kKeys] = {};
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < kKeys; ++i) {
    ASSERT_TRUE(
        cache_->Put({"m", "r", absl::StrCat(i)}, MakeEncoding(0), {}).ok());
  }
  for (int r = 0; r < 2; ++r) {
    readers.emplace_back([&] {
      for (int i = 0; !stop; i = (i + 1) % kKeys) {
        const int at_least = finished[i];
        EXPECT_GE(ScaleOf({"m", "r", absl::StrCat(i)}), at_least);
      }
    });
  }
  for (int round = 1; round <= 2000; ++round) {
    for (int i = 0; i < kKeys; ++i) {
      ASSERT_TRUE(cache_
                      ->Put({"m", "r", absl::StrCat(i)},
                            MakeEncoding(static_cast<float>(round)), {})
                      .ok());
      finished[i] = round;
    }
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
}

}  // namespace
}  // namespace quantd::server::caching_encoding_store_test
