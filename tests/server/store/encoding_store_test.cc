// What every EncodingStore promises, on each implementation.

#include "server/store/encoding_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
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
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "core/types/encoding.h"
#include "core/types/encoding_memory.h"
#include "server/metrics/metrics.h"
#include "server/store/caching_encoding_store.h"
#include "server/store/metering_encoding_store.h"
#include "server/store/sql_database.h"
#include "server/store/sql_encoding_store.h"
#include "tests/server/store/test_database.h"
#include "tests/support/postgresql_cluster.h"
#include "tests/support/sanitizers.h"

namespace quantd::server::encoding_store_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

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
    kinds.push_back({"CachedPostgresql", Backend::kPostgresql, true});
  }
  return kinds;
}

std::string KindName(const ::testing::TestParamInfo<Kind>& info) {
  return info.param.name;
}

std::shared_ptr<const core::Encoding> MakeEncoding(float scale,
                                                   int32_t zero_point = 3) {
  core::Encoding encoding;
  encoding.format = static_cast<core::NumberFormat>(8);
  encoding.scale = {scale};
  encoding.zero_point = {zero_point};
  encoding.qmin = -128;
  encoding.qmax = 127;
  return std::make_shared<const core::Encoding>(std::move(encoding));
}

class EncodingStoreTest : public ::testing::TestWithParam<Kind> {
 protected:
  EncodingStoreTest() { Reopen(); }
  ~EncodingStoreTest() override { store_.reset(); }

  void Reopen() {
    store_.reset();
    store_ = Open();
  }

  std::unique_ptr<EncodingStore> Open() {
    std::shared_ptr<SqlDatabase> database = database_.Open();
    if (database == nullptr) return nullptr;
    auto store = std::make_unique<SqlEncodingStore>(std::move(database));
    if (!GetParam().is_cached) return store;
    CachingEncodingStore::Options options;
    options.cap_bytes = 1 << 20;
    return std::make_unique<CachingEncodingStore>(
        std::make_unique<MeteringEncodingStore>(std::move(store), &metrics_),
        options, &metrics_);
  }

  StoredEncoding MustPut(const EncodingKey& key, float scale,
                         const std::string& if_match = "") {
    absl::StatusOr<StoredEncoding> stored =
        store_->Put(key, MakeEncoding(scale), {if_match});
    EXPECT_TRUE(stored.ok()) << stored.status();
    return stored.ok() ? *stored : StoredEncoding();
  }

  const testing::TestDatabase database_{GetParam().backend};
  Metrics metrics_;
  std::unique_ptr<EncodingStore> store_;
  const EncodingKey key_{"resnet/50", "main", "conv1.weight"};
};

TEST_P(EncodingStoreTest, GivesBackWhatWasPut) {
  core::Encoding encoding;
  encoding.format = static_cast<core::NumberFormat>(28);
  encoding.block_size = {1, 0};
  encoding.scale = {0.5f, 0.25f, 1.17549435e-38f};
  encoding.zero_point = {0, 255, 17};
  encoding.qmin = 0;
  encoding.qmax = 255;
  encoding.degenerate_count = 1;
  const absl::Time before = absl::Now() - absl::Milliseconds(1);
  absl::StatusOr<StoredEncoding> put =
      store_->Put(key_, std::make_shared<const core::Encoding>(encoding), {});
  ASSERT_TRUE(put.ok()) << put.status();
  EXPECT_TRUE(*put->encoding == encoding);
  EXPECT_GE(put->update_time, before);
  EXPECT_LE(put->update_time, absl::Now());

  for (const bool reopened : {false, true}) {
    if (reopened) Reopen();
    absl::StatusOr<StoredEncoding> got = store_->Get(key_);
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_NE(got->encoding, nullptr);
    EXPECT_TRUE(*got->encoding == encoding);
    EXPECT_EQ(got->etag, put->etag);
    EXPECT_EQ(got->generation, put->generation);
    EXPECT_EQ(got->update_time, put->update_time);
  }
}

TEST_P(EncodingStoreTest, SaysWhatIsNotThere) {
  const absl::Status got = store_->Get(key_).status();
  EXPECT_EQ(core::ErrorReason(got), "ENCODING_NOT_FOUND") << got;
  const absl::Status deleted = store_->Delete(key_, {});
  EXPECT_EQ(core::ErrorReason(deleted), "ENCODING_NOT_FOUND") << deleted;
  MustPut(key_, 1);
  for (const EncodingKey& other :
       {EncodingKey{"resnet/5", "0main", "conv1.weight"},
        EncodingKey{"resnet/50", "main", "conv1.weigh"},
        EncodingKey{"resnet/50", "main", ""}}) {
    EXPECT_TRUE(absl::IsNotFound(store_->Get(other).status()));
  }
}

TEST_P(EncodingStoreTest, ReplacesAndDeletes) {
  MustPut(key_, 1);
  MustPut(key_, 2);
  absl::StatusOr<StoredEncoding> got = store_->Get(key_);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->encoding->scale[0], 2);
  EXPECT_TRUE(store_->Delete(key_, {}).ok());
  EXPECT_TRUE(absl::IsNotFound(store_->Get(key_).status()));
  EXPECT_TRUE(absl::IsNotFound(store_->Delete(key_, {})));
}

TEST_P(EncodingStoreTest, PutHonoursItsPrecondition) {
  const absl::Status needs_etag =
      store_->Put(key_, MakeEncoding(1), {"1-00"}).status();
  EXPECT_EQ(core::ErrorReason(needs_etag), "ETAG_MISMATCH") << needs_etag;
  EXPECT_THAT(std::string(needs_etag.message()),
              ::testing::HasSubstr("absent"));

  const StoredEncoding first = MustPut(key_, 1, "absent");
  const absl::Status needs_absence =
      store_->Put(key_, MakeEncoding(2), {"absent"}).status();
  EXPECT_EQ(core::ErrorReason(needs_absence), "ETAG_MISMATCH");

  const StoredEncoding second = MustPut(key_, 2, first.etag);
  const absl::Status old_etag =
      store_->Put(key_, MakeEncoding(3), {first.etag}).status();
  EXPECT_EQ(core::ErrorReason(old_etag), "ETAG_MISMATCH");

  absl::StatusOr<StoredEncoding> got = store_->Get(key_);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->encoding->scale[0], 2);
  EXPECT_EQ(got->etag, second.etag);
}

TEST_P(EncodingStoreTest, DeleteHonoursItsPrecondition) {
  const StoredEncoding first = MustPut(key_, 1);
  const StoredEncoding second = MustPut(key_, 2);
  for (const std::string& wrong : {first.etag, std::string("absent")}) {
    const absl::Status status = store_->Delete(key_, {wrong});
    EXPECT_EQ(core::ErrorReason(status), "ETAG_MISMATCH") << status;
  }
  EXPECT_TRUE(store_->Get(key_).ok());
  EXPECT_TRUE(store_->Delete(key_, {second.etag}).ok());
  EXPECT_TRUE(absl::IsNotFound(store_->Get(key_).status()));
}

TEST_P(EncodingStoreTest, GivesEveryPutANewEtag) {
  const StoredEncoding first = MustPut(key_, 1);
  const StoredEncoding again = MustPut(key_, 1);
  EXPECT_NE(first.etag, again.etag);
  EXPECT_NE(first.etag, "");
}

TEST_P(EncodingStoreTest, GenerationsGrowAcrossKeysDeletesAndReopening) {
  int64_t last = 0;
  for (int round = 0; round < 3; ++round) {
    for (const char* tensor : {"a", "b"}) {
      const StoredEncoding stored = MustPut({"m", "r", tensor}, 1);
      EXPECT_GT(stored.generation, last);
      last = stored.generation;
    }
    EXPECT_TRUE(store_->Delete({"m", "r", "a"}, {}).ok());
    EXPECT_TRUE(store_->Delete({"m", "r", "b"}, {}).ok());
    Reopen();
  }
}

TEST_P(EncodingStoreTest, ListsPagesInOrderOfBytes) {
  const std::vector<std::string> names = {"A", "Z", "a", "a.b", "a/b", "é"};
  for (auto name = names.rbegin(); name != names.rend(); ++name) {
    MustPut({"m", "r", *name}, 0.5f);
  }
  MustPut({"m", "r2", "other"}, 1);
  MustPut({"m2", "r", "other"}, 1);

  std::vector<std::string> seen;
  std::string after;
  while (true) {
    absl::StatusOr<std::vector<EncodingListEntry>> page =
        store_->ListEncodings("m", "r", after, 4);
    ASSERT_TRUE(page.ok()) << page.status();
    if (page->empty()) break;
    EXPECT_LE(page->size(), 4u);
    for (const EncodingListEntry& entry : *page) {
      seen.push_back(entry.tensor);
      EXPECT_EQ(entry.stored.encoding, nullptr);
      EXPECT_EQ(static_cast<int>(entry.format), 8);
      EXPECT_EQ(entry.scale_count, 1);
      absl::StatusOr<StoredEncoding> got =
          store_->Get({"m", "r", entry.tensor});
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_EQ(got->etag, entry.stored.etag);
      EXPECT_EQ(got->generation, entry.stored.generation);
      EXPECT_EQ(got->update_time, entry.stored.update_time);
    }
    after = seen.back();
  }
  EXPECT_EQ(seen, names);
  for (const int limit : {0, -1}) {
    EXPECT_THAT(*store_->ListEncodings("m", "r", "", limit), IsEmpty());
    EXPECT_THAT(*store_->ListModels({}, limit), IsEmpty());
    EXPECT_THAT(*store_->ListRevisions("m", "", limit), IsEmpty());
  }
  EXPECT_THAT(*store_->ListEncodings("m", "none", "", 4), IsEmpty());
}

TEST_P(EncodingStoreTest, ListsModelsAndRevisionsWithCounts) {
  for (const EncodingKey& key : std::vector<EncodingKey>{{"b", "1", "x"},
                                                         {"b", "1", "y"},
                                                         {"b", "2", "x"},
                                                         {"a", "1", "x"},
                                                         {"c", "9", "x"}}) {
    MustPut(key, 1);
  }
  absl::StatusOr<std::vector<ModelListEntry>> models =
      store_->ListModels({}, 2);
  ASSERT_TRUE(models.ok()) << models.status();
  ASSERT_EQ(models->size(), 2u);
  EXPECT_EQ((*models)[0].model, "a");
  EXPECT_EQ((*models)[1].model, "b");
  EXPECT_EQ((*models)[1].revision_count, 2);
  EXPECT_EQ((*models)[1].encoding_count, 3);
  models = store_->ListModels({"b", ""}, 2);
  ASSERT_TRUE(models.ok()) << models.status();
  ASSERT_EQ(models->size(), 1u);
  EXPECT_EQ((*models)[0].model, "c");
  models = store_->ListModels({"a", "c"}, 2);
  ASSERT_TRUE(models.ok()) << models.status();
  ASSERT_EQ(models->size(), 1u);
  EXPECT_EQ((*models)[0].model, "b");

  absl::StatusOr<std::vector<RevisionListEntry>> revisions =
      store_->ListRevisions("b", "", 10);
  ASSERT_TRUE(revisions.ok()) << revisions.status();
  ASSERT_EQ(revisions->size(), 2u);
  EXPECT_EQ((*revisions)[0].revision, "1");
  EXPECT_EQ((*revisions)[0].encoding_count, 2);
  EXPECT_EQ((*revisions)[1].revision, "2");
  revisions = store_->ListRevisions("b", "1", 10);
  ASSERT_TRUE(revisions.ok()) << revisions.status();
  ASSERT_EQ(revisions->size(), 1u);
  EXPECT_EQ((*revisions)[0].revision, "2");
}

TEST_P(EncodingStoreTest, AnswersPing) {
  const absl::Status status = store_->Ping();
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(EncodingStoreTest, LosesNoIncrementOfConcurrentCompareAndSet) {
  constexpr int kThreads = 4;
  constexpr int kIncrements = testing::kSanitized ? 100 : 250;
  ASSERT_TRUE(store_->Put(key_, MakeEncoding(1, 0), {}).ok());
  // A code range wide enough to count in.
  const auto increment = [](const core::Encoding& from) {
    core::Encoding to = from;
    to.format = static_cast<core::NumberFormat>(16);
    to.qmin = -32768;
    to.qmax = 32767;
    ++to.zero_point[0];
    return std::make_shared<const core::Encoding>(std::move(to));
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      int done = 0;
      while (done < kIncrements) {
        absl::StatusOr<StoredEncoding> got = store_->Get(key_);
        ASSERT_TRUE(got.ok()) << got.status();
        absl::StatusOr<StoredEncoding> put =
            store_->Put(key_, increment(*got->encoding), {got->etag});
        if (put.ok()) {
          ++done;
        } else {
          ASSERT_EQ(core::ErrorReason(put.status()), "ETAG_MISMATCH")
              << put.status();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const bool reopened : {false, true}) {
    if (reopened) Reopen();
    absl::StatusOr<StoredEncoding> got = store_->Get(key_);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(got->encoding->zero_point[0], kThreads * kIncrements);
  }
}

core::NumberFormat Format(absl::string_view name) {
  return core::FindFormatByName(name)->format;
}

// Encodings with scales of each stored type, beyond what a row holds.
std::vector<core::Encoding> LargeEncodings() {
  std::vector<core::Encoding> encodings;
  core::Encoding encoding;
  encoding.format = Format("uint8");
  encoding.block_size = {1, 32};
  encoding.qmax = 255;
  encoding.scale_shape = {600, 500};
  for (int i = 0; i < 300'000; ++i) {
    encoding.scale.push_back(static_cast<float>(1 + i % 1000) / 256);
    encoding.zero_point.push_back(i % 256);
  }
  encodings.push_back(encoding);

  encoding.scale_type = core::ScaleType::kBfloat16;
  for (float& scale : encoding.scale) scale = 0.5f;
  encoding.format = Format("int8");
  encoding.qmin = -128;
  encoding.qmax = 127;
  for (int32_t& zero_point : encoding.zero_point) zero_point -= 128;
  encodings.push_back(encoding);

  encoding.scale_type = core::ScaleType::kFloat16;
  encoding.exclude_zero = true;
  for (int32_t& zero_point : encoding.zero_point) zero_point *= 100;
  encodings.push_back(encoding);

  core::Encoding lpbq;
  lpbq.format = Format("lpbq");
  lpbq.scale_type = core::ScaleType::kInteger;
  lpbq.block_size = {1, 64};
  lpbq.outer_block_size = {1, 0};
  lpbq.scale_shape = {300'000, 2};
  const core::FormatInfo& format = *core::FindFormat(lpbq.format);
  lpbq.qmin = format.qmin;
  lpbq.qmax = format.qmax;
  for (int i = 0; i < 300'000; ++i) {
    lpbq.outer_scale.push_back(static_cast<float>(1 + i % 77));
    lpbq.scale_code.push_back(static_cast<uint8_t>(1 + i % 128));
    lpbq.scale_code.push_back(static_cast<uint8_t>(1 + i % 3));
  }
  EXPECT_TRUE(core::DeriveScales(&lpbq).ok());
  encodings.push_back(lpbq);
  for (const core::Encoding& one : encodings) {
    EXPECT_TRUE(core::ValidateEncoding(one).ok())
        << core::ValidateEncoding(one);
  }
  return encodings;
}

// Copies an encoding from reader to writer.
void CopyPieces(EncodingReader* reader, EncodingWriter* writer) {
  int64_t next = 0;
  while (true) {
    const absl::StatusOr<absl::optional<ScalePiece>> piece = reader->Next();
    ASSERT_TRUE(piece.ok()) << piece.status();
    if (!piece->has_value()) break;
    EXPECT_LE((*piece)->scale.size() + (*piece)->zero_point.size() +
                  (*piece)->outer_scale.size(),
              1 << 20);
    EXPECT_EQ((*piece)->first, next);
    next += static_cast<int64_t>((*piece)->scale.size()) /
            core::ScaleSizeBytes(reader->stored().encoding->scale_type);
    // In other pieces than they are kept in.
    const size_t half = (*piece)->scale.size() / 8 * 4;
    ScalePiece first = **piece;
    ScalePiece second;
    if (first.zero_point.empty()) {
      second.scale = first.scale.substr(half);
      first.scale.resize(half);
    }
    ASSERT_TRUE(writer->Add(first).ok());
    ASSERT_TRUE(writer->Add(second).ok());
  }
  EXPECT_EQ(next, reader->scale_count());
}

TEST_P(EncodingStoreTest, ReadsAndWritesLargeEncodingsInPieces) {
  const EncodingKey copy{"resnet/50", "copy", "conv1.weight"};
  for (const core::Encoding& encoding : LargeEncodings()) {
    absl::StatusOr<StoredEncoding> put =
        store_->Put(key_, std::make_shared<const core::Encoding>(encoding), {});
    ASSERT_TRUE(put.ok()) << put.status();
    absl::StatusOr<StoredEncoding> got = store_->Get(key_);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_TRUE(*got->encoding == encoding);
    EXPECT_EQ(got->etag, put->etag);

    auto reader = store_->OpenReader(key_);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ((*reader)->stored().etag, put->etag);
    auto writer =
        store_->OpenWriter(copy, (*reader)->stored().encoding,
                           (*reader)->has_zero_points(), Precondition{});
    ASSERT_TRUE(writer.ok()) << writer.status();
    CopyPieces(reader->get(), writer->get());
    const absl::StatusOr<StoredEncoding> written = (*writer)->Finish();
    ASSERT_TRUE(written.ok()) << written.status();
    got = store_->Get(copy);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_TRUE(*got->encoding == encoding);
    EXPECT_EQ(got->etag, written->etag);
  }
}

TEST_P(EncodingStoreTest, AsksToProceedBeforeItLoadsScales) {
  std::vector<core::Encoding> encodings = LargeEncodings();
  encodings.push_back(*MakeEncoding(2));
  for (const core::Encoding& encoding : encodings) {
    ASSERT_TRUE(
        store_->Put(key_, std::make_shared<const core::Encoding>(encoding), {})
            .ok());
    // So that nothing is cached.
    Reopen();
    std::vector<int64_t> asked;
    absl::Status answer = core::MemoryBudgetError(1, "", absl::ZeroDuration());
    const auto ask = [&](int64_t bytes) {
      asked.push_back(bytes);
      return answer;
    };
    EXPECT_EQ(store_->Read(key_, ask).status(), answer);
    answer = absl::OkStatus();
    const absl::StatusOr<StoredEncoding> got = store_->Read(key_, ask);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_TRUE(*got->encoding == encoding);
    const int64_t bytes = core::MemoryBytes(encoding);
    EXPECT_THAT(asked, ElementsAre(bytes, bytes));
  }
}

TEST_P(EncodingStoreTest, ShowsNothingOfAnEncodingThatIsNotFinished) {
  const StoredEncoding before = MustPut(key_, 2);
  const core::Encoding encoding = LargeEncodings()[0];
  const EncodingKey other{"resnet/50", "main", "other"};
  ASSERT_TRUE(
      store_->Put(other, std::make_shared<const core::Encoding>(encoding), {})
          .ok());
  auto reader = store_->OpenReader(other);
  ASSERT_TRUE(reader.ok()) << reader.status();
  {
    auto writer =
        store_->OpenWriter(key_, (*reader)->stored().encoding,
                           (*reader)->has_zero_points(), Precondition{});
    ASSERT_TRUE(writer.ok()) << writer.status();
    CopyPieces(reader->get(), writer->get());
    EXPECT_EQ(store_->Get(key_)->etag, before.etag);
  }
  EXPECT_EQ(store_->Get(key_)->etag, before.etag);
  // A precondition holds when it is finished.
  auto writer = store_->OpenWriter(key_, before.encoding, false, {before.etag});
  ASSERT_TRUE(writer.ok()) << writer.status();
  MustPut(key_, 3);
  EXPECT_EQ(core::ErrorReason((*writer)->Finish().status()), "ETAG_MISMATCH");
}

TEST_P(EncodingStoreTest, KeepsWhatMadeAnEncoding) {
  // In the row, and in pieces.
  const std::string made("\x08\x02\0\xff any bytes", 14);
  for (const std::shared_ptr<const core::Encoding>& encoding :
       {MakeEncoding(2),
        std::make_shared<const core::Encoding>(LargeEncodings()[0])}) {
    const EncodingKey draft{"resnet/50", "draft", "conv1.weight"};
    const absl::StatusOr<StoredEncoding> put =
        store_->Put(draft, encoding, {"", {}, made});
    ASSERT_TRUE(put.ok()) << put.status();
    EXPECT_EQ(put->provenance, made);
    ASSERT_TRUE(store_
                    ->PublishRevision("resnet/50", "draft", "main",
                                      /*keep_others=*/false)
                    .ok());
    for (const bool reopened : {false, true}) {
      if (reopened) Reopen();
      const absl::StatusOr<StoredEncoding> got = store_->Get(key_);
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_TRUE(*got->encoding == *encoding);
      EXPECT_EQ(got->provenance, made);
      auto reader = store_->OpenReader(key_);
      ASSERT_TRUE(reader.ok()) << reader.status();
      EXPECT_EQ((*reader)->stored().provenance, made);
    }
    const auto list = store_->ListEncodings("resnet/50", "main", "", 10);
    ASSERT_TRUE(list.ok()) << list.status();
    EXPECT_EQ((*list)[0].stored.provenance, "");

    auto reader = store_->OpenReader(key_);
    ASSERT_TRUE(reader.ok()) << reader.status();
    auto writer =
        store_->OpenWriter(draft, (*reader)->stored().encoding,
                           (*reader)->has_zero_points(), {"", {}, "another"});
    ASSERT_TRUE(writer.ok()) << writer.status();
    CopyPieces(reader->get(), writer->get());
    const absl::StatusOr<StoredEncoding> written = (*writer)->Finish();
    ASSERT_TRUE(written.ok()) << written.status();
    EXPECT_EQ(written->provenance, "another");
    EXPECT_EQ(store_->Get(draft)->provenance, "another");
    // What is put in its place is not made by the same.
    ASSERT_TRUE(store_->Put(key_, encoding, {}).ok());
    EXPECT_EQ(store_->Get(key_)->provenance, "");
  }
}

TEST_P(EncodingStoreTest, PublishesARevisionAtOnce) {
  const auto large =
      std::make_shared<const core::Encoding>(LargeEncodings()[0]);
  const StoredEncoding old = MustPut({"m", "main", "a"}, 1);
  MustPut({"m", "main", "only-old"}, 1);
  const StoredEncoding draft = MustPut({"m", "draft", "a"}, 2);
  ASSERT_TRUE(store_->Put({"m", "draft", "b"}, large, {}).ok());
  MustPut({"m", "other", "a"}, 5);
  // So that they are cached.
  ASSERT_TRUE(store_->Get({"m", "main", "only-old"}).ok());
  ASSERT_TRUE(store_->Get({"m", "draft", "a"}).ok());

  const absl::StatusOr<PublishedRevision> published =
      store_->PublishRevision("m", "draft", "main", /*keep_others=*/false);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->encoding_count, 2);
  EXPECT_EQ(published->replaced_count, 2);
  for (const bool reopened : {false, true}) {
    if (reopened) Reopen();
    const absl::StatusOr<StoredEncoding> a = store_->Get({"m", "main", "a"});
    ASSERT_TRUE(a.ok()) << a.status();
    EXPECT_EQ(a->encoding->scale[0], 2);
    EXPECT_GT(a->generation, draft.generation);
    EXPECT_NE(a->etag, old.etag);
    EXPECT_EQ(a->etag, draft.etag);
    // Who saw it before does not delete it now.
    Precondition old_draft;
    old_draft.if_match = draft.etag;
    old_draft.not_updated_after = draft.update_time;
    EXPECT_EQ(core::ErrorReason(store_->Delete({"m", "main", "a"}, old_draft)),
              "ETAG_MISMATCH");
    EXPECT_GE(a->update_time, draft.update_time);
    const absl::StatusOr<StoredEncoding> b = store_->Get({"m", "main", "b"});
    ASSERT_TRUE(b.ok()) << b.status();
    EXPECT_TRUE(*b->encoding == *large);
    for (const EncodingKey& gone :
         {EncodingKey{"m", "main", "only-old"}, EncodingKey{"m", "draft", "a"},
          EncodingKey{"m", "draft", "b"}}) {
      EXPECT_EQ(core::ErrorReason(store_->Get(gone).status()),
                "ENCODING_NOT_FOUND");
    }
    EXPECT_EQ(store_->Get({"m", "other", "a"})->encoding->scale[0], 5);
    const auto list = store_->ListEncodings("m", "main", "", 10);
    ASSERT_TRUE(list.ok()) << list.status();
    ASSERT_EQ(list->size(), 2);
    EXPECT_EQ((*list)[0].stored.etag, a->etag);
    EXPECT_TRUE((*list)[1].error.ok());
    const auto revisions = store_->ListRevisions("m", "", 10);
    ASSERT_TRUE(revisions.ok()) << revisions.status();
    ASSERT_EQ(revisions->size(), 2);
    EXPECT_EQ((*revisions)[0].revision, "main");
    EXPECT_EQ((*revisions)[0].encoding_count, 2);
  }
  EXPECT_EQ(core::ErrorReason(
                store_->PublishRevision("m", "draft", "main", false).status()),
            "REVISION_NOT_FOUND");
}

TEST_P(EncodingStoreTest, PublishesBesideOthers) {
  const auto large =
      std::make_shared<const core::Encoding>(LargeEncodings()[0]);
  MustPut({"m", "main", "a"}, 1);
  const StoredEncoding kept = MustPut({"m", "main", "kept"}, 1);
  ASSERT_TRUE(store_->Put({"m", "main", "large"}, large, {}).ok());
  ASSERT_TRUE(store_->Put({"m", "main", "kept-large"}, large, {}).ok());
  const StoredEncoding draft = MustPut({"m", "draft", "a"}, 2);
  MustPut({"m", "draft", "large"}, 2);
  MustPut({"m", "draft", "new"}, 2);
  MustPut({"m", "other", "kept"}, 5);
  // So that they are cached.
  for (const char* tensor : {"a", "kept", "large"}) {
    ASSERT_TRUE(store_->Get({"m", "main", tensor}).ok());
  }

  const absl::StatusOr<PublishedRevision> published =
      store_->PublishRevision("m", "draft", "main", /*keep_others=*/true);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->encoding_count, 5);
  EXPECT_EQ(published->replaced_count, 2);
  for (const bool reopened : {false, true}) {
    if (reopened) Reopen();
    for (const char* tensor : {"a", "large", "new"}) {
      const absl::StatusOr<StoredEncoding> got =
          store_->Get({"m", "main", tensor});
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_EQ(got->encoding->scale, std::vector<float>{2}) << tensor;
      EXPECT_GT(got->generation, draft.generation);
    }
    const auto same = store_->Get({"m", "main", "kept"});
    ASSERT_TRUE(same.ok()) << same.status();
    EXPECT_EQ(same->etag, kept.etag);
    EXPECT_EQ(same->encoding->scale[0], 1);
    const auto same_large = store_->Get({"m", "main", "kept-large"});
    ASSERT_TRUE(same_large.ok()) << same_large.status();
    EXPECT_TRUE(*same_large->encoding == *large);
    const auto list = store_->ListEncodings("m", "main", "", 10);
    ASSERT_TRUE(list.ok()) << list.status();
    ASSERT_EQ(list->size(), 5);
    for (const EncodingListEntry& entry : *list) {
      EXPECT_TRUE(entry.error.ok()) << entry.error;
    }
    const auto revisions = store_->ListRevisions("m", "", 10);
    ASSERT_TRUE(revisions.ok()) << revisions.status();
    ASSERT_EQ(revisions->size(), 2);
    EXPECT_EQ((*revisions)[0].revision, "main");
    EXPECT_EQ((*revisions)[0].encoding_count, 5);
  }
  EXPECT_EQ(store_->Get({"m", "other", "kept"})->encoding->scale[0], 5);
  EXPECT_EQ(core::ErrorReason(
                store_->PublishRevision("m", "draft", "main", true).status()),
            "REVISION_NOT_FOUND");
}

// Each keeps what another has published meanwhile.
TEST_P(EncodingStoreTest, PublishesSeveralIntoOneRevision) {
  constexpr int kDrafts = 4;
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::thread> threads;
    for (int i = 0; i < kDrafts; ++i) {
      threads.emplace_back([&, i] {
        const std::string draft = absl::StrCat("draft", i);
        MustPut({"m", draft, absl::StrCat(round, ".", i)}, 1);
        EXPECT_TRUE(store_->PublishRevision("m", draft, "main", true).ok());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  const auto list = store_->ListEncodings("m", "main", "", 1000);
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_EQ(list->size(), kDrafts * kRounds);
}

TEST_P(EncodingStoreTest, DeletesRevisionsAndModels) {
  MustPut({"m", "main", "a"}, 1);
  MustPut({"m", "main", "b"}, 1);
  MustPut({"m", "other", "a"}, 1);
  MustPut({"n", "main", "a"}, 1);
  absl::StatusOr<DeletedRows> deleted = store_->DeleteRevision("m", "main");
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(deleted->encoding_count, 2);
  EXPECT_EQ(deleted->statistics_count, 0);
  EXPECT_FALSE(store_->Get({"m", "main", "a"}).ok());
  EXPECT_TRUE(store_->Get({"m", "other", "a"}).ok());
  EXPECT_EQ(core::ErrorReason(store_->DeleteRevision("m", "main").status()),
            "REVISION_NOT_FOUND");
  MustPut({"m", "main", "a"}, 1);
  deleted = store_->DeleteModel("m");
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(deleted->encoding_count, 2);
  EXPECT_FALSE(store_->Get({"m", "other", "a"}).ok());
  EXPECT_TRUE(store_->Get({"n", "main", "a"}).ok());
  EXPECT_EQ(core::ErrorReason(store_->DeleteModel("m").status()),
            "MODEL_NOT_FOUND");
  const auto models = store_->ListModels({}, 10);
  ASSERT_TRUE(models.ok()) << models.status();
  ASSERT_EQ(models->size(), 1);
}

INSTANTIATE_TEST_SUITE_P(Stores, EncodingStoreTest,
                         ::testing::ValuesIn(Kinds()), KindName);

}  // namespace
}  // namespace quantd::server::encoding_store_test
