#include "server/rpc/tensor_stream.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "server/metrics/metrics.h"
#include "server/quantd_server.h"
#include "server/store/encoding_store.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"

namespace quantd::server {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// A Quantize stream with one tensor of `size_bytes` that is calibrated on
// itself, so that the server holds it.
class HeldTensor {
 public:
  HeldTensor(testing::TestServer& server, int64_t size_bytes)
      : stub_(v1::QuantizationService::NewStub(server.NewChannel())),
        stream_(stub_->Quantize(&context_)) {
    v1::TensorDescription* tensor = message_.mutable_header()->mutable_tensor();
    tensor->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
    tensor->add_shape(size_bytes / 4);
    message_.mutable_header()->mutable_spec()->set_format(
        v1::NUMBER_FORMAT_INT8);
  }
  ~HeldTensor() {
    context_.TryCancel();
    stream_->Finish();
  }

  void Send(int64_t bytes) {
    message_.set_data(std::string(bytes, '\0'));
    ASSERT_TRUE(stream_->Write(message_));
    message_.clear_header();
    message_.set_offset(message_.offset() + bytes);
  }

  // "" when the tensor was served, otherwise the reason of its error.
  std::string Outcome() {
    v1::QuantizeResponse response;
    while (stream_->Read(&response)) {
      if (response.has_summary()) return "";
      if (response.has_error()) return response.error().reason();
    }
    return "end of stream";
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<v1::QuantizationService::Stub> stub_;
  std::unique_ptr<
      grpc::ClientReaderWriter<v1::QuantizeRequest, v1::QuantizeResponse>>
      stream_;
  v1::QuantizeRequest message_;
};

void WaitForBudget(testing::TestServer& server, int64_t used_bytes) {
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (server.server().memory_used_bytes() != used_bytes) {
    ASSERT_LT(absl::Now(), deadline) << server.server().memory_used_bytes();
    absl::SleepFor(absl::Milliseconds(1));
  }
}

ServerOptions SmallBudget(absl::Duration memory_wait) {
  ServerOptions options;
  options.threads = 1;
  options.limits.memory_budget_bytes = 3 * kMiB;
  options.limits.memory_wait = memory_wait;
  return options;
}

TEST(TensorStreamTest, ServesOthersWhileATensorWaitsForMemory) {
  testing::TestServer server(SmallBudget(absl::InfiniteDuration()));
  auto holder = std::make_unique<HeldTensor>(server, 3 * kMiB);
  holder->Send(2 * kMiB);
  HeldTensor waiting(server, 2 * kMiB);
  // What its one scale takes is charged with the header; the rest must wait.
  WaitForBudget(server, 2 * kMiB + 24);
  waiting.Send(2 * kMiB);
  HeldTensor small(server, 16);
  small.Send(16);
  EXPECT_EQ(small.Outcome(), "");
  holder.reset();
  EXPECT_EQ(waiting.Outcome(), "");
}

// Every call waits until it is let go.
class StuckStore : public EncodingStore {
 public:
  absl::StatusOr<StoredEncoding> Get(const EncodingKey& key) override {
    return Wait();
  }
  absl::StatusOr<StoredEncoding> Put(
      const EncodingKey& key, std::shared_ptr<const core::Encoding> encoding,
      const Precondition& precondition) override {
    return Wait();
  }
  absl::Status Delete(const EncodingKey& key,
                      const Precondition& precondition) override {
    return Wait();
  }
  absl::StatusOr<std::vector<EncodingListEntry>> ListEncodings(
      absl::string_view model, absl::string_view revision,
      absl::string_view after, int limit) override {
    return Wait();
  }
  absl::StatusOr<std::vector<ModelListEntry>> ListModels(
      absl::string_view after, int limit) override {
    return Wait();
  }
  absl::StatusOr<std::vector<RevisionListEntry>> ListRevisions(
      absl::string_view model, absl::string_view after, int limit) override {
    return Wait();
  }
  absl::Status Ping() override { return absl::OkStatus(); }

  void LetGo() { let_go_.Notify(); }
  // Waits until a call is stuck.
  void AwaitCall() { called_.WaitForNotification(); }

 private:
  absl::Status Wait() {
    if (!was_called_.exchange(true)) called_.Notify();
    let_go_.WaitForNotification();
    return core::StoreUnavailableError("stuck");
  }

  std::atomic<bool> was_called_{false};
  absl::Notification called_;
  absl::Notification let_go_;
};

// One worker, and a tensor that waits for the store.
void ExpectServingBeside(const v1::QuantizeHeader& stuck_header) {
  StuckStore store;
  Metrics metrics;
  ServerOptions options;
  options.listen = {"127.0.0.1:0"};
  options.threads = 1;
  options.drain_delay = absl::ZeroDuration();
  absl::StatusOr<std::unique_ptr<QuantdServer>> server =
      QuantdServer::Start(options, &store, /*statistics=*/nullptr, &metrics);
  ASSERT_TRUE(server.ok()) << server.status();
  const auto stub = v1::QuantizationService::NewStub(grpc::CreateChannel(
      (*server)->addresses()[0], grpc::InsecureChannelCredentials()));
  std::thread stuck([&] {
    const absl::Status status =
        testing::Quantize(*stub, stuck_header, std::string(16, '\0')).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  });
  store.AwaitCall();
  v1::QuantizeHeader header;
  header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  header.mutable_tensor()->add_shape(4);
  header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  const absl::Status status =
      testing::Quantize(*stub, header, std::string(16, '\0')).status();
  EXPECT_TRUE(status.ok()) << status;
  store.LetGo();
  stuck.join();
}

v1::QuantizeHeader NamedHeader() {
  v1::QuantizeHeader header;
  header.mutable_tensor()->mutable_name()->set_model("m");
  header.mutable_tensor()->mutable_name()->set_tensor("t");
  header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  header.mutable_tensor()->add_shape(4);
  return header;
}

TEST(TensorStreamTest, ServesOthersWhileATensorReadsFromTheStore) {
  v1::QuantizeHeader header = NamedHeader();
  header.mutable_reference();
  ExpectServingBeside(header);
}

TEST(TensorStreamTest, ServesOthersWhileATensorWritesToTheStore) {
  v1::QuantizeHeader header = NamedHeader();
  header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  header.set_store(true);
  ExpectServingBeside(header);
  header.mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT8);
  header.mutable_encoding()->add_scale(1);
  ExpectServingBeside(header);
}

TEST(TensorStreamTest, FailsATensorThatWaitedTooLongForMemory) {
  testing::TestServer server(SmallBudget(absl::Milliseconds(50)));
  HeldTensor holder(server, 3 * kMiB);
  holder.Send(2 * kMiB);
  WaitForBudget(server, 2 * kMiB + 24);
  HeldTensor waiting(server, 2 * kMiB);
  waiting.Send(2 * kMiB);
  EXPECT_EQ(waiting.Outcome(), "MEMORY_BUDGET");
}

// What a stream is asked in turn: some of it is done where it arrives, some on
// the workers, some fails.
struct SmallTensor {
  std::vector<v1::QuantizeRequest> messages;
  // "" for one that is served.
  std::string reason;
};

SmallTensor MakeSmallTensor(int64_t index) {
  const int64_t bytes = 4 * (2 + index % 100);
  v1::QuantizeRequest message;
  v1::TensorDescription* tensor = message.mutable_header()->mutable_tensor();
  tensor->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  tensor->add_shape(bytes / 4);
  if (index % 4 == 1) {
    message.mutable_header()->mutable_spec()->set_format(
        v1::NUMBER_FORMAT_INT8);
  } else {
    v1::Encoding* encoding = message.mutable_header()->mutable_encoding();
    encoding->set_format(v1::NUMBER_FORMAT_INT8);
    encoding->add_scale(0.5f);
  }
  if (index % 4 == 2) {
    message.set_data(std::string(bytes - 1, '\0'));
    return {{message}, "CHUNK_ALIGNMENT"};
  }
  if (index % 4 == 3) {
    message.set_data(std::string(4, '\0'));
    v1::QuantizeRequest rest;
    rest.set_offset(4);
    rest.set_data(std::string(bytes - 4, '\0'));
    return {{message, rest}, ""};
  }
  message.set_data(std::string(bytes, '\0'));
  return {{message}, ""};
}

TEST(TensorStreamTest, AnswersManySmallTensorsOfAllKindsInOrder) {
  constexpr int64_t kCount = 2000;
  testing::TestServer server;
  const auto stub = v1::QuantizationService::NewStub(server.NewChannel());
  grpc::ClientContext context;
  const auto stream = stub->Quantize(&context);
  std::thread writer([&stream] {
    for (int64_t i = 0; i < kCount; ++i) {
      for (const v1::QuantizeRequest& message : MakeSmallTensor(i).messages) {
        if (!stream->Write(message)) return;
      }
    }
    stream->WritesDone();
  });
  const auto read_all = [&stream] {
    v1::QuantizeResponse response;
    for (int64_t i = 0; i < kCount; ++i) {
      uint64_t bytes = 0;
      do {
        ASSERT_TRUE(stream->Read(&response)) << i;
        bytes += response.data().size();
      } while (!response.has_summary() && !response.has_error());
      ASSERT_EQ(response.error().reason(), MakeSmallTensor(i).reason) << i;
      if (response.has_error()) continue;
      ASSERT_EQ(response.summary().count(), 2 + i % 100) << i;
      ASSERT_EQ(bytes, response.summary().count()) << i;
    }
    EXPECT_FALSE(stream->Read(&response));
  };
  read_all();
  if (HasFailure()) context.TryCancel();
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
}

// Both answers are ready before anything was written: the first must not wait
// for the transport's next occasion to send.
TEST(TensorStreamTest, SendsTheFirstAnswersThatAreReadyTogether) {
  testing::TestServer server;
  const auto stub = v1::QuantizationService::NewStub(server.NewChannel());
  v1::QuantizeRequest incomplete;
  v1::TensorDescription* tensor = incomplete.mutable_header()->mutable_tensor();
  tensor->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  tensor->add_shape(256);
  incomplete.mutable_header()->mutable_spec()->set_format(
      v1::NUMBER_FORMAT_INT4);
  v1::QuantizeRequest whole = incomplete;
  whole.set_data(std::string(1024, '\0'));
  for (int i = 0; i < 100; ++i) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::seconds(10));
    const auto stream = stub->Quantize(&context);
    stream->Write(incomplete);
    stream->Write(whole);
    stream->WritesDone();
    v1::QuantizeResponse response;
    ASSERT_TRUE(stream->Read(&response)) << i;
    EXPECT_EQ(response.error().reason(), "TENSOR_INCOMPLETE");
    ASSERT_TRUE(stream->Read(&response)) << i;
    EXPECT_TRUE(response.has_summary());
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_TRUE(stream->Finish().ok());
  }
}

}  // namespace
}  // namespace quantd::server
