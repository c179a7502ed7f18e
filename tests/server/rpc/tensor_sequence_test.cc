#include "server/rpc/tensor_sequence.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "grpcpp/grpcpp.h"
#include "prometheus/client_metric.h"
#include "prometheus/metric_family.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/net/file_descriptor.h"
#include "server/rpc/call_registry.h"
#include "server/rpc/open_tensor.h"
#include "server/rpc/steps.h"
#include "server/rpc/stream_account.h"
#include "server/rpc/stream_watchdog.h"
#include "server/shared_memory/peer_process.h"
#include "server/shared_memory/region.h"
#include "server/shared_memory/region_registry.h"
#include "server/wire/rpcs.h"
#include "tests/support/fake_tensor_rpc.h"

namespace quantd::server::tensor_sequence_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

grpc::ByteBuffer Serialized(const v1::QuantizeRequest& request) {
  const grpc::Slice slice(request.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

v1::QuantizeRequest Header(absl::string_view data = "") {
  v1::QuantizeRequest request;
  request.mutable_header()->mutable_tensor()->add_shape(2);
  request.set_data(std::string(data));
  return request;
}

v1::QuantizeRequest Chunk(uint64_t offset, absl::string_view data) {
  v1::QuantizeRequest request;
  request.set_offset(offset);
  request.set_data(std::string(data));
  return request;
}

class TensorSequenceTest : public ::testing::Test {
 protected:
  void Take(const v1::QuantizeRequest& request) {
    ASSERT_TRUE(sequence_.needs_message());
    sequence_.Take(Serialized(request));
  }
  absl::Status Step(StepKind kind = StepKind::kQuantum) {
    return sequence_.Step(kind, over_share_);
  }
  // Takes a message, and does what a worker does with it.
  absl::Status Send(const v1::QuantizeRequest& request) {
    Take(request);
    while (sequence_.outlook().has_more) {
      if (absl::Status s = Step(); !s.ok()) return s;
    }
    return absl::OkStatus();
  }
  // The parts of the answers since the last call, in words.
  std::vector<std::string> Answers() {
    std::vector<std::string> words;
    for (grpc::ByteBuffer& buffer : sequence_.TakeAnswers()) {
      grpc::Slice slice;
      v1::QuantizeResponse response;
      if (!buffer.DumpToSingleSlice(&slice).ok() ||
          !response.ParseFromArray(slice.begin(),
                                   static_cast<int>(slice.size()))) {
        words.push_back("malformed");
        continue;
      }
      if (response.has_header()) words.push_back("header");
      if (!response.data().empty()) {
        words.push_back(absl::StrCat(response.offset(), ": ", response.data()));
      }
      if (response.has_summary()) words.push_back("summary");
      if (response.has_error()) words.push_back(response.error().reason());
    }
    return words;
  }

  // Tensors that were answered with an error.
  double ErrorCount() const {
    double count = 0;
    for (const prometheus::MetricFamily& family : fake_.metrics.Collect()) {
      if (family.name != "quantd_tensor_errors_total") continue;
      for (const prometheus::ClientMetric& metric : family.metric) {
        count += metric.counter.value;
      }
    }
    return count;
  }

  testing::FakeEnvironment fake_;
  testing::FakeTensorRpc rpc_;
  CallRegistry registry_{/*limit=*/16};
  StreamWatchdog watchdog_{&registry_, absl::InfiniteDuration()};
  StreamAccount account_{fake_.env, Rpc::kQuantize, fake_.share};
  std::atomic<bool> stopped_{false};
  bool over_share_ = false;
  TensorSequence sequence_{
      fake_.env, &rpc_, Credential("", {}), {&account_, &watchdog_, &stopped_}};
};

TEST_F(TensorSequenceTest, ServesOneTensorAfterTheOther) {
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(Send(Header("abcd")).ok());
    EXPECT_TRUE(sequence_.outlook().has_tensor);
    EXPECT_TRUE(sequence_.needs_message());
    EXPECT_TRUE(Send(Chunk(4, "efgh")).ok());
    EXPECT_FALSE(sequence_.outlook().has_tensor);
    EXPECT_THAT(Answers(),
                ElementsAre("header", "0: abcd", "4: efgh", "summary"));
  }
  sequence_.End();
  EXPECT_THAT(Answers(), IsEmpty());
}

TEST_F(TensorSequenceTest, DropsTheRestOfATensorThatFailed) {
  rpc_.tensor.check = core::HeaderMissingError();
  EXPECT_TRUE(Send(Header("abcd")).ok());
  EXPECT_THAT(Answers(), ElementsAre("HEADER_MISSING"));
  EXPECT_TRUE(sequence_.outlook().skips);
  EXPECT_TRUE(Send(Chunk(4, "efgh")).ok());
  EXPECT_TRUE(Send(Chunk(99, "any")).ok());
  EXPECT_THAT(Answers(), IsEmpty());
  // The next header begins anew.
  rpc_.tensor.check = absl::OkStatus();
  EXPECT_TRUE(Send(Header("abcdefgh")).ok());
  EXPECT_FALSE(sequence_.outlook().skips);
  EXPECT_THAT(Answers(), ElementsAre("header", "0: abcdefgh", "summary"));
}

TEST_F(TensorSequenceTest, AChunkWithoutATensorEndsTheStream) {
  EXPECT_EQ(core::ErrorReason(Send(Chunk(0, "abcd"))), "HEADER_MISSING");
}

TEST_F(TensorSequenceTest, AMessageThatIsNoneEndsTheStream) {
  const grpc::Slice slice(std::string("\xff\xff\xff"));
  sequence_.Take(grpc::ByteBuffer(&slice, 1));
  EXPECT_EQ(core::ErrorReason(Step()), "MESSAGE_MALFORMED");
}

TEST_F(TensorSequenceTest, AHeaderBeforeTheLastByteFailsTheTensorBeforeIt) {
  EXPECT_TRUE(Send(Header("abcd")).ok());
  EXPECT_TRUE(Send(Header("abcdefgh")).ok());
  EXPECT_THAT(Answers(), ElementsAre("TENSOR_INCOMPLETE", "header",
                                     "0: abcdefgh", "summary"));
}

TEST_F(TensorSequenceTest, TheEndOfTheStreamFailsATensorThatIsIncomplete) {
  EXPECT_TRUE(Send(Header("abcd")).ok());
  sequence_.End();
  EXPECT_THAT(Answers(), ElementsAre("TENSOR_INCOMPLETE"));
}

TEST_F(TensorSequenceTest, ATensorThatIsAbandonedHasNoAnswer) {
  EXPECT_TRUE(Send(Header()).ok());
  sequence_.TakeAnswers();
  sequence_.Abandon();
  EXPECT_FALSE(sequence_.outlook().has_tensor);
  EXPECT_THAT(Answers(), IsEmpty());
  EXPECT_THAT(rpc_.calls, ElementsAre("resolve", "gone"));
}

TEST_F(TensorSequenceTest, WorkThatWasStoppedIsNobodysError) {
  rpc_.tensor.feed = core::StoppedError();
  stopped_ = true;
  EXPECT_TRUE(Send(Header("abcdefgh")).ok());
  EXPECT_FALSE(sequence_.outlook().has_tensor);
  EXPECT_EQ(ErrorCount(), 0);
  EXPECT_THAT(rpc_.calls, ElementsAre("resolve", "quantum 0+8", "gone"));
  rpc_.tensor.feed = core::HeaderMissingError();
  EXPECT_TRUE(Send(Header("abcdefgh")).ok());
  EXPECT_EQ(ErrorCount(), 1);
}

TEST_F(TensorSequenceTest, AChunkInTheWrongPlaceFailsItsTensor) {
  EXPECT_TRUE(Send(Header("abcd")).ok());
  EXPECT_TRUE(Send(Chunk(0, "abcd")).ok());
  EXPECT_THAT(Answers(), ElementsAre("CHUNK_OFFSET"));
  EXPECT_TRUE(sequence_.outlook().skips);
}

TEST_F(TensorSequenceTest, SharedDataOfNobodyFailTheTensor) {
  v1::QuantizeRequest request = Header();
  request.mutable_shared()->set_size_bytes(8);
  EXPECT_TRUE(Send(request).ok());
  EXPECT_THAT(Answers(), ElementsAre("REGION_NOT_FOUND"));
  request.set_data("abcdefgh");
  EXPECT_TRUE(Send(request).ok());
  EXPECT_THAT(Answers(), ElementsAre("REGION_INVALID"));
}

TEST_F(TensorSequenceTest, SharedDataOfATensorThatIsSearchedCount) {
  int ends[2] = {-1, -1};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const FileDescriptor here(ends[0]);
  const FileDescriptor there(ends[1]);
  RegionRegistry registry;
  const std::string peer = absl::StrCat("fd:", here.get());
  const std::shared_ptr<const Region> region =
      Region::Create(4096, &fake_.budget, &fake_.metrics)->region;
  registry.Add(region, *PeerOfCall(peer));
  rpc_.tensor.frame = {0, 4096, 4, 4, 1024};
  rpc_.tensor.feed_search_time = absl::Minutes(4);
  v1::QuantizeRequest request = Header();
  request.mutable_shared()->set_region_id(region->id());
  request.mutable_shared()->set_size_bytes(4096);
  const auto open = [&](StreamAccount* account) {
    auto sequence = std::make_unique<TensorSequence>(
        fake_.env, &rpc_, Credential("", {}),
        TensorSequence::Stream{account, &watchdog_, &stopped_});
    Caller caller;
    caller.shared_memory = SharedMemoryAccess(&registry, peer);
    sequence->SetCaller(std::move(caller));
    sequence->Take(Serialized(request));
    EXPECT_TRUE(sequence->Step(StepKind::kQuantum, false).ok());
    return sequence;
  };
  const auto first = open(&account_);
  EXPECT_TRUE(first->outlook().has_tensor);
  account_.WorkLeft(first->PendingWork(), absl::ZeroDuration());
  account_.Hold(0, /*rests=*/false);
  StreamAccount other(fake_.env, Rpc::kQuantize, fake_.share);
  const auto second = open(&other);
  EXPECT_FALSE(second->outlook().has_tensor);
  first->Abandon();
}

TEST_F(TensorSequenceTest, NoTensorBeginsWhileTheServerDrains) {
  EXPECT_TRUE(Send(Header("abcd")).ok());
  registry_.Drain();
  // The open one goes on.
  EXPECT_TRUE(Send(Chunk(4, "efgh")).ok());
  EXPECT_THAT(Answers(),
              ElementsAre("header", "0: abcd", "4: efgh", "summary"));
  EXPECT_EQ(core::ErrorReason(Send(Header("abcd"))), "DRAINING");
}

TEST_F(TensorSequenceTest, StepsThatWaitAreLeftToThreadsThatMay) {
  rpc_.tensor.resolve_use = StoreUse::kRead;
  rpc_.tensor.finish_use = {StoreUse::kNone, StoreUse::kWrite};
  Take(Header("abcdefgh"));
  EXPECT_TRUE(Step().ok());
  EXPECT_THAT(rpc_.calls, IsEmpty());
  EXPECT_TRUE(sequence_.outlook().has_more);
  EXPECT_EQ(sequence_.outlook().next_step, StepKind::kStore);
  EXPECT_TRUE(Step(StepKind::kStore).ok());
  EXPECT_THAT(rpc_.calls, ElementsAre("resolve")) << "no kernel beside a store";
  EXPECT_EQ(sequence_.outlook().next_step, StepKind::kQuantum);
  EXPECT_TRUE(Step().ok());
  EXPECT_THAT(rpc_.calls, ElementsAre("resolve", "quantum 0+8", "finish"));
  EXPECT_EQ(sequence_.outlook().next_step, StepKind::kWrite);
  EXPECT_TRUE(Step(StepKind::kWrite).ok());
  EXPECT_FALSE(sequence_.outlook().has_more);
  EXPECT_THAT(Answers(), ElementsAre("header", "0: abcdefgh", "summary"));
}

TEST_F(TensorSequenceTest, ALongEndIsLeftToAThreadForThat) {
  rpc_.tensor.finish_is_long = true;
  Take(Header("abcdefgh"));
  EXPECT_TRUE(Step().ok());
  EXPECT_THAT(rpc_.calls, ElementsAre("resolve", "quantum 0+8"));
  EXPECT_EQ(sequence_.outlook().next_step, StepKind::kLong);
  // The message may go, its tensor is not done with.
  EXPECT_FALSE(sequence_.has_message());
  EXPECT_FALSE(sequence_.needs_message());
  EXPECT_TRUE(Step(StepKind::kLong).ok());
  EXPECT_TRUE(sequence_.needs_message());
}

TEST_F(TensorSequenceTest, ALightStepOpensNoLargeMessage) {
  rpc_.tensor.light = true;
  rpc_.tensor.frame.end_bytes = 2 * kLightMessageBytes;
  rpc_.tensor.frame.quantum_bytes = rpc_.tensor.frame.end_bytes;
  Take(Header(std::string(2 * kLightMessageBytes, 'a')));
  EXPECT_TRUE(Step(StepKind::kLight).ok());
  EXPECT_THAT(rpc_.headers, IsEmpty());
  EXPECT_TRUE(sequence_.outlook().has_more);
  EXPECT_TRUE(Step().ok());
  EXPECT_THAT(
      rpc_.calls,
      ElementsAre("resolve", absl::StrCat("quantum 0+", 2 * kLightMessageBytes),
                  "finish", "gone"));
}

TEST_F(TensorSequenceTest, ALightTensorIsServedInALightStep) {
  rpc_.tensor.light = true;
  Take(Header("abcdefgh"));
  EXPECT_TRUE(Step(StepKind::kLight).ok());
  EXPECT_FALSE(sequence_.outlook().has_more);
  EXPECT_THAT(Answers(), ElementsAre("header", "0: abcdefgh", "summary"));
}

TEST_F(TensorSequenceTest, TellsThatATensorWasLostForItsStreamsMemory) {
  fake_.env.limits.memory_wait = absl::ZeroDuration();
  over_share_ = true;
  EXPECT_TRUE(Send(Header("abcd")).ok());
  EXPECT_THAT(Answers(), ElementsAre("MEMORY_BUDGET"));
  EXPECT_TRUE(sequence_.cut_off());
  over_share_ = false;
  EXPECT_TRUE(Send(Header("abcd")).ok());
  EXPECT_FALSE(sequence_.cut_off());
}

TEST_F(TensorSequenceTest, WaitsForMemoryWithItsMessage) {
  fake_.env.limits.memory_wait = absl::InfiniteDuration();
  over_share_ = true;
  Take(Header("abcdefgh"));
  EXPECT_TRUE(Step().ok());
  EXPECT_TRUE(sequence_.outlook().waits_for_memory);
  EXPECT_TRUE(sequence_.has_message());
  over_share_ = false;
  EXPECT_TRUE(Step().ok());
  EXPECT_FALSE(sequence_.outlook().waits_for_memory);
  EXPECT_THAT(Answers(), ElementsAre("header", "0: abcdefgh", "summary"));
}

}  // namespace
}  // namespace quantd::server::tensor_sequence_test
