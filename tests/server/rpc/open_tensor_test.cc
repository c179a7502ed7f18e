#include "server/rpc/open_tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "server/rpc/caller.h"
#include "server/rpc/steps.h"
#include "server/rpc/stream_account.h"
#include "server/wire/chunk_writer.h"
#include "server/wire/envelope.h"
#include "server/wire/rpcs.h"
#include "tests/support/fake_tensor_rpc.h"

namespace quantd::server {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kSmallBytes = 100;
constexpr int64_t kLargeBytes = kLightMessageBytes + 1;
constexpr absl::Duration kHour = absl::Hours(1);

class OpenTensorTest : public ::testing::Test {
 protected:
  OpenTensorTest() { Open(); }

  void Open() {
    tensor_.reset();
    tensor_.emplace(fake_.env, &rpc_, &account_, &stopped_);
  }

  // A message with the next bytes; it stays until the next.
  const RequestEnvelope& Message(uint64_t offset_bytes, size_t bytes) {
    bytes_.assign(bytes, 7);
    envelope_ = RequestEnvelope();
    envelope_.offset_bytes = offset_bytes;
    envelope_.data.assign(1, absl::MakeConstSpan(bytes_));
    envelope_.data_bytes = static_cast<int64_t>(bytes);
    return envelope_;
  }
  absl::Status CheckHeader() { return tensor_->Check("header", Caller(), 0); }
  // With the first `bytes` beside its header.
  void AdmitCheckAndResolve(size_t bytes) {
    ASSERT_TRUE(tensor_->Admit(0, kSmallBytes).ok());
    ASSERT_TRUE(CheckHeader().ok());
    ASSERT_TRUE(tensor_->Resolve(Message(0, bytes), &out_).ok());
  }
  absl::Status Feed(bool over_share = false) {
    return tensor_->Feed(nullptr, over_share, &out_);
  }
  // So much that nothing else is admitted.
  void Overload() {
    busy_ = std::make_unique<Admission::Load>(&fake_.share->admission);
    other_ = std::make_unique<Admission::Load>(&fake_.share->admission);
    busy_->Set(kHour);
    other_->Set(kHour);
    for (int i = 0; i < 10; ++i) {
      others_.push_back(
          std::make_unique<Admission::Load>(&fake_.share->admission));
      others_.back()->Set(kHour);
    }
  }

  testing::FakeEnvironment fake_;
  testing::FakeTensorRpc rpc_;
  std::vector<std::unique_ptr<Admission::Load>> others_;
  std::unique_ptr<Admission::Load> busy_;
  std::unique_ptr<Admission::Load> other_;
  StreamAccount account_{fake_.env, Rpc::kQuantize, fake_.share};
  std::atomic<bool> stopped_{false};
  ChunkWriter out_;
  std::vector<uint8_t> bytes_;
  RequestEnvelope envelope_;
  absl::optional<OpenTensor> tensor_;
};

TEST_F(OpenTensorTest, LeadsATensorThroughItsLife) {
  rpc_.tensor.frame.end_bytes = 12;
  AdmitCheckAndResolve(8);
  EXPECT_THAT(rpc_.headers, ElementsAre("header"));
  EXPECT_TRUE(Feed().ok());
  EXPECT_FALSE(tensor_->finishing());
  EXPECT_EQ(core::ErrorReason(tensor_->CheckComplete()), "TENSOR_INCOMPLETE");
  tensor_->Retain();
  EXPECT_TRUE(tensor_->Push(Message(8, 4)).ok());
  EXPECT_TRUE(Feed().ok());
  EXPECT_TRUE(tensor_->finishing());
  EXPECT_TRUE(tensor_->CheckComplete().ok());
  const absl::StatusOr<bool> done = tensor_->Finish(false, &out_);
  ASSERT_TRUE(done.ok());
  EXPECT_TRUE(*done);
  tensor_->Close(/*ok=*/true);
  EXPECT_THAT(rpc_.calls,
              ElementsAre("resolve", "quantum 0+8", "quantum 8+4", "finish"));
}

TEST_F(OpenTensorTest, FeedsAQuantumAtATime) {
  rpc_.tensor.frame.end_bytes = 20;
  AdmitCheckAndResolve(20);
  EXPECT_EQ(tensor_->ready_bytes(), 20);
  EXPECT_TRUE(Feed().ok());
  EXPECT_EQ(tensor_->ready_bytes(), 12);
  EXPECT_TRUE(Feed().ok());
  EXPECT_TRUE(Feed().ok());
  EXPECT_TRUE(tensor_->finishing());
  EXPECT_THAT(rpc_.calls, ElementsAre("resolve", "quantum 0+8", "quantum 8+8",
                                      "quantum 16+4"));
}

TEST_F(OpenTensorTest, JoinsAQuantumWhereThatPays) {
  rpc_.tensor.frame.end_bytes = 20;
  std::vector<uint8_t> bytes(20);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i);
  for (const bool joins : {false, true}) {
    rpc_.tensor.frame.joins_quantum = joins;
    rpc_.fed.clear();
    Open();
    ASSERT_TRUE(tensor_->Admit(0, kSmallBytes).ok());
    ASSERT_TRUE(CheckHeader().ok());
    envelope_ = RequestEnvelope();
    const auto all = absl::MakeConstSpan(bytes);
    envelope_.data = {all.subspan(0, 4), all.subspan(4, 8), all.subspan(12)};
    envelope_.data_bytes = 20;
    ASSERT_TRUE(tensor_->Resolve(envelope_, &out_).ok());
    for (const int64_t end : {8, 16, 20}) {
      ASSERT_TRUE(Feed().ok());
      const absl::Span<const uint8_t> made = rpc_.made;
      EXPECT_EQ(made, all.subspan(end == 20 ? 16 : end - 8, made.size()));
    }
    if (joins) {
      EXPECT_THAT(rpc_.fed, ElementsAre(8, 8, 4));
    } else {
      EXPECT_THAT(rpc_.fed, ElementsAre(4, 4, 4, 4, 4));
    }
    tensor_->Close(/*ok=*/true);
  }
}

TEST_F(OpenTensorTest, WhatIsLightIsServedThoughThereIsNoTime) {
  Overload();
  // A large message is not looked into.
  EXPECT_EQ(core::ErrorReason(tensor_->Admit(kLargeBytes, kLargeBytes)),
            "OVERLOADED");
  tensor_->Close(false);
  for (const bool light : {false, true}) {
    Open();
    rpc_.tensor.light = light;
    EXPECT_TRUE(tensor_->Admit(kSmallBytes, kSmallBytes).ok());
    EXPECT_EQ(core::ErrorReason(CheckHeader()), light ? "" : "OVERLOADED");
    tensor_->Close(false);
  }
  // Unless more of it will come.
  rpc_.tensor.frame.end_bytes = 2 * kLargeBytes;
  Open();
  EXPECT_TRUE(tensor_->Admit(kSmallBytes, kSmallBytes).ok());
  EXPECT_TRUE(CheckHeader().ok());
  EXPECT_EQ(core::ErrorReason(tensor_->Resolve(Message(0, 8), &out_)),
            "OVERLOADED");
}

TEST_F(OpenTensorTest, ALongSearchIsAdmittedByItsOwnTime) {
  busy_ = std::make_unique<Admission::Load>(&fake_.share->admission);
  busy_->Set(kHour, kHour);
  rpc_.tensor.search_time = 10 * kHour;
  EXPECT_TRUE(tensor_->Admit(0, kSmallBytes).ok());
  EXPECT_TRUE(CheckHeader().ok());
  // Its like is under way now.
  StreamAccount account(fake_.env, Rpc::kQuantize, fake_.share);
  OpenTensor other(fake_.env, &rpc_, &account, &stopped_);
  EXPECT_TRUE(other.Admit(0, kSmallBytes).ok());
  EXPECT_EQ(core::ErrorReason(other.Check("header", Caller(), 0)),
            "OVERLOADED");
  other.Close(false);
}

TEST_F(OpenTensorTest, WhatASearchTookCorrectsTheNextEstimate) {
  for (const bool ok : {false, true}) {
    Open();
    rpc_.tensor.search_time = kHour;
    AdmitCheckAndResolve(8);
    EXPECT_EQ(tensor_->PendingWork(0), kHour);
    ASSERT_TRUE(Feed().ok());
    ASSERT_TRUE(tensor_->Finish(false, &out_).ok());
    tensor_->Close(ok);
  }
  Open();
  AdmitCheckAndResolve(8);
  EXPECT_LT(tensor_->PendingWork(0), kHour / 10);
}

TEST_F(OpenTensorTest, WhatResolvingFindsCorrectsTheEstimate) {
  rpc_.tensor.frame.end_bytes = 32;
  rpc_.tensor.feed_search_time = 4 * kHour;
  rpc_.tensor.resolved_feed_search_time = kHour;
  AdmitCheckAndResolve(8);
  EXPECT_EQ(tensor_->PendingWork(0), kHour / 4);
}

TEST_F(OpenTensorTest, ASearchWhileBytesComeIsAdmittedByThoseThatCame) {
  rpc_.tensor.frame.end_bytes = 4096;
  rpc_.tensor.frame.quantum_bytes = 1024;
  rpc_.tensor.feed_search_time = 4 * kHour;
  // A quarter of the work has come with each header: the worker has enough of
  // it, and shorter tensors pass.
  std::vector<std::unique_ptr<StreamAccount>> accounts;
  std::vector<std::unique_ptr<OpenTensor>> tensors;
  std::string refused;
  while (refused.empty() && tensors.size() < 10) {
    accounts.push_back(std::make_unique<StreamAccount>(
        fake_.env, Rpc::kQuantize, fake_.share));
    tensors.push_back(std::make_unique<OpenTensor>(
        fake_.env, &rpc_, accounts.back().get(), &stopped_));
    ASSERT_TRUE(tensors.back()->Admit(1024, kSmallBytes).ok());
    refused = std::string(
        core::ErrorReason(tensors.back()->Check("header", Caller(), 1024)));
    if (!refused.empty()) break;
    ASSERT_TRUE(tensors.back()->Resolve(Message(0, 1024), &out_).ok());
    EXPECT_EQ(tensors.back()->PendingWork(0), kHour);
    accounts.back()->WorkLeft(tensors.back()->PendingWork(0),
                              absl::ZeroDuration());
    accounts.back()->Hold(0, /*rests=*/false);
  }
  EXPECT_EQ(refused, "OVERLOADED");
  // As many as take the worker's time for one.
  EXPECT_EQ(tensors.size(), 2u);
  rpc_.tensor.feed_search_time = absl::ZeroDuration();
  EXPECT_TRUE(fake_.share->admission.Admit(false, absl::Milliseconds(1)).ok());
  for (const std::unique_ptr<OpenTensor>& tensor : tensors) {
    tensor->Close(false);
  }
}

TEST_F(OpenTensorTest, WhatASearchTookWhileBytesCameIsNoRateOfOthers) {
  rpc_.tensor.frame = {0, 1 << 20, 4, 4, 1 << 20};
  rpc_.tensor.feed_search_time = kHour;
  for (int i = 0; i < 2; ++i) {
    Open();
    AdmitCheckAndResolve(1 << 19);
    // As it was estimated, then as it was learned.
    EXPECT_EQ(tensor_->PendingWork(0) > kHour / 4, i == 0);
    ASSERT_TRUE(Feed().ok());
    EXPECT_EQ(tensor_->PendingWork(0), absl::ZeroDuration());
    tensor_->Retain();
    ASSERT_TRUE(tensor_->Push(Message(1 << 19, 1 << 19)).ok());
    ASSERT_TRUE(Feed().ok());
    tensor_->Close(/*ok=*/true);
    EXPECT_EQ(account_.FeedTime(1 << 20), absl::ZeroDuration());
  }
}

TEST_F(OpenTensorTest, WhatIsMoreThanASearchCorrectsNoEstimate) {
  rpc_.tensor.frame = {0, 1 << 20, 4, 4, 1 << 20};
  rpc_.tensor.feed_search_time = kHour;
  for (const bool only_searches : {false, true}) {
    rpc_.tensor.feed_only_searches = only_searches;
    Open();
    AdmitCheckAndResolve(1 << 20);
    EXPECT_GT(tensor_->PendingWork(0), kHour / 4);
    ASSERT_TRUE(Feed().ok());
    tensor_->Close(/*ok=*/true);
  }
  Open();
  AdmitCheckAndResolve(1 << 20);
  EXPECT_LT(tensor_->PendingWork(0), kHour / 10);
}

TEST_F(OpenTensorTest, SaysWhatItsNextStepIsLike) {
  rpc_.tensor.resolve_use = StoreUse::kRead;
  rpc_.tensor.finish_use = {StoreUse::kNone, StoreUse::kWrite};
  ASSERT_TRUE(tensor_->Admit(0, kSmallBytes).ok());
  ASSERT_TRUE(CheckHeader().ok());
  EXPECT_EQ(tensor_->next_step(), StepKind::kStore);
  EXPECT_EQ(tensor_->PendingWork(8), absl::ZeroDuration());
  rpc_.tensor.resolve_use = StoreUse::kReadStatistics;
  EXPECT_EQ(tensor_->next_step(), StepKind::kStatistics);
  rpc_.tensor.resolve_use = StoreUse::kWrite;
  EXPECT_EQ(tensor_->next_step(), StepKind::kWrite);
  ASSERT_TRUE(tensor_->Resolve(Message(0, 8), &out_).ok());
  EXPECT_EQ(tensor_->next_step(), StepKind::kQuantum);
  rpc_.tensor.light = true;
  EXPECT_EQ(tensor_->next_step(), StepKind::kLight);
  ASSERT_TRUE(Feed().ok());
  rpc_.tensor.finish_is_long = true;
  EXPECT_EQ(tensor_->next_step(), StepKind::kLong);
  ASSERT_FALSE(*tensor_->Finish(false, &out_));
  EXPECT_EQ(tensor_->next_step(), StepKind::kWrite);
}

TEST_F(OpenTensorTest, WaitsForMemoryForAWhile) {
  fake_.env.limits.memory_wait = absl::InfiniteDuration();
  AdmitCheckAndResolve(8);
  rpc_.tensor.reserve = fake_.budget.TransitError();
  EXPECT_TRUE(Feed().ok());
  EXPECT_TRUE(tensor_->waits_for_memory());
  EXPECT_EQ(tensor_->ready_bytes(), 8);
  // Another gave some back.
  rpc_.tensor.reserve = absl::OkStatus();
  EXPECT_TRUE(Feed().ok());
  EXPECT_FALSE(tensor_->waits_for_memory());
  EXPECT_EQ(tensor_->ready_bytes(), 0);
}

TEST_F(OpenTensorTest, FailsWhenTheWaitForMemoryIsOver) {
  fake_.env.limits.memory_wait = absl::ZeroDuration();
  AdmitCheckAndResolve(8);
  EXPECT_EQ(core::ErrorReason(Feed(/*over_share=*/true)), "MEMORY_BUDGET");
  EXPECT_TRUE(tensor_->cut_off());
  EXPECT_FALSE(tensor_->waits_for_memory());
}

TEST_F(OpenTensorTest, ScalesWaitForMemoryBeforeTheirData) {
  fake_.env.limits.memory_wait = absl::InfiniteDuration();
  // Of a tensor without data, too.
  for (const uint64_t bytes : {8, 0}) {
    rpc_.tensor.frame.end_bytes = static_cast<int64_t>(bytes);
    rpc_.tensor.push_scales = fake_.budget.TransitError();
    Open();
    rpc_.calls.clear();
    ASSERT_TRUE(tensor_->Admit(0, kSmallBytes).ok());
    ASSERT_TRUE(CheckHeader().ok());
    Message(0, bytes);
    envelope_.scales = {"one", "two"};
    ASSERT_TRUE(tensor_->Resolve(envelope_, &out_).ok());
    EXPECT_TRUE(tensor_->waits_for_memory());
    EXPECT_TRUE(Feed().ok());
    EXPECT_TRUE(tensor_->waits_for_memory());
    EXPECT_FALSE(tensor_->needs_message());
    EXPECT_FALSE(tensor_->finishing());
    rpc_.tensor.push_scales = absl::OkStatus();
    EXPECT_TRUE(Feed().ok());
    EXPECT_FALSE(tensor_->waits_for_memory());
    EXPECT_TRUE(tensor_->needs_message());
    EXPECT_TRUE(tensor_->finishing());
    std::vector<std::string> calls = {"resolve", "scales 2", "scales 2",
                                      "scales 2"};
    if (bytes > 0) calls.push_back("quantum 0+8");
    EXPECT_EQ(rpc_.calls, calls);
    tensor_->Close(false);
  }
}

TEST_F(OpenTensorTest, ScalesWaitForMemoryOnlyForAWhile) {
  fake_.env.limits.memory_wait = absl::ZeroDuration();
  rpc_.tensor.push_scales = fake_.budget.TransitError();
  ASSERT_TRUE(tensor_->Admit(0, kSmallBytes).ok());
  ASSERT_TRUE(CheckHeader().ok());
  Message(0, 8);
  envelope_.scales = {"one"};
  const absl::Status status = tensor_->Resolve(envelope_, &out_);
  EXPECT_EQ(core::ErrorReason(status), "MEMORY_BUDGET");
  EXPECT_EQ(core::ErrorField(status), "scales");
  EXPECT_FALSE(tensor_->waits_for_memory());
  EXPECT_FALSE(tensor_->cut_off());
}

TEST_F(OpenTensorTest, ScalesThatWaitTooLongAreLostForTheirStreamsMemory) {
  for (const bool over_share : {false, true}) {
    fake_.env.limits.memory_wait = absl::InfiniteDuration();
    rpc_.tensor.push_scales = fake_.budget.TransitError();
    Open();
    ASSERT_TRUE(tensor_->Admit(0, kSmallBytes).ok());
    ASSERT_TRUE(CheckHeader().ok());
    Message(0, 8);
    envelope_.scales = {"one"};
    ASSERT_TRUE(tensor_->Resolve(envelope_, &out_).ok());
    fake_.env.limits.memory_wait = absl::ZeroDuration();
    EXPECT_EQ(core::ErrorReason(Feed(over_share)), "MEMORY_BUDGET");
    EXPECT_EQ(tensor_->cut_off(), over_share);
    tensor_->Close(false);
  }
  // Scales that are wrong are not.
  Open();
  fake_.env.limits.memory_wait = absl::InfiniteDuration();
  ASSERT_TRUE(CheckHeader().ok());
  ASSERT_TRUE(tensor_->Resolve(envelope_, &out_).ok());
  rpc_.tensor.push_scales = absl::InvalidArgumentError("SCALE_COUNT: wrong");
  EXPECT_FALSE(Feed(/*over_share=*/true).ok());
  EXPECT_FALSE(tensor_->cut_off());
}

TEST_F(OpenTensorTest, ScalesCountWhileTheyWait) {
  fake_.env.limits.memory_wait = absl::InfiniteDuration();
  rpc_.tensor.push_scales = fake_.budget.TransitError();
  ASSERT_TRUE(CheckHeader().ok());
  Message(0, 8);
  envelope_.scales = {std::string(1000, 'a'), std::string(500, 'b')};
  ASSERT_TRUE(tensor_->Resolve(envelope_, &out_).ok());
  EXPECT_EQ(fake_.budget.leased_bytes(), 1500);
  EXPECT_TRUE(Feed().ok());
  EXPECT_EQ(fake_.budget.leased_bytes(), 1500);
  // They do not keep themselves out.
  rpc_.tensor.on_push_scales = [this] {
    EXPECT_EQ(fake_.budget.leased_bytes(), 0);
  };
  rpc_.tensor.push_scales = absl::OkStatus();
  EXPECT_TRUE(Feed().ok());
  EXPECT_EQ(fake_.budget.leased_bytes(), 0);
}

TEST_F(OpenTensorTest, DoesNotWaitForMemoryThatThereWillNeverBe) {
  fake_.env.limits.memory_wait = absl::InfiniteDuration();
  AdmitCheckAndResolve(8);
  rpc_.tensor.reserve = absl::ResourceExhaustedError("MEMORY_BUDGET: never");
  EXPECT_FALSE(Feed().ok());
  EXPECT_FALSE(tensor_->cut_off());
}

TEST_F(OpenTensorTest, ErrorsOfTheJobAreTheTensors) {
  rpc_.tensor.check = absl::InvalidArgumentError("check");
  ASSERT_TRUE(tensor_->Admit(0, kSmallBytes).ok());
  EXPECT_EQ(CheckHeader().message(), "check");
  EXPECT_FALSE(tensor_->checked());
  tensor_->Close(false);
  rpc_.tensor = testing::FakeTensor();
  rpc_.tensor.resolve = absl::NotFoundError("resolve");
  Open();
  ASSERT_TRUE(CheckHeader().ok());
  EXPECT_EQ(tensor_->Resolve(Message(0, 8), &out_).message(), "resolve");
  EXPECT_FALSE(tensor_->resolved());
  rpc_.tensor.resolve = absl::OkStatus();
  Open();
  AdmitCheckAndResolve(8);
  rpc_.tensor.feed = absl::InternalError("feed");
  EXPECT_EQ(Feed().message(), "feed");
}

TEST_F(OpenTensorTest, NobodyIsToldOfAnErrorOnceItIsStopped) {
  AdmitCheckAndResolve(8);
  ASSERT_TRUE(Feed().ok());
  rpc_.tensor.finish = absl::CancelledError("stopped");
  EXPECT_FALSE(tensor_->Finish(false, &out_).ok());
  stopped_ = true;
  const absl::StatusOr<bool> done = tensor_->Finish(false, &out_);
  ASSERT_TRUE(done.ok());
  EXPECT_FALSE(*done);
}

TEST_F(OpenTensorTest, CountsAsOpenFromItsAdmissionToItsEnd) {
  EXPECT_EQ(fake_.open_tensors.count, 0);
  ASSERT_TRUE(tensor_->Admit(0, kSmallBytes).ok());
  EXPECT_EQ(fake_.open_tensors.count, 1);
  tensor_->Close(false);
  EXPECT_EQ(fake_.open_tensors.count, 0);
}

}  // namespace
}  // namespace quantd::server
