// kill -9 at any moment: what was acknowledged is there.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "tests/support/metric_value.h"
#include "tests/support/paths.h"
#include "tests/support/sanitizers.h"
#include "tests/support/server_process.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"

namespace quantd::testing::crash_test {
namespace {

constexpr int kRounds = kSanitized ? 10 : 50;
constexpr int kThreads = 4;
// Written again and again, so that most writes replace something.
constexpr int kTensorsPerThread = 6;
// Rows of several pages: a torn one would show.
constexpr int64_t kScales = 3000;
constexpr char kModel[] = "crash/net";

v1::TensorName NameOf(int thread, int tensor) {
  v1::TensorName name;
  name.set_model(kModel);
  name.set_revision("main");
  name.set_tensor(absl::StrCat("thread", thread, ".tensor", tensor));
  return name;
}

// Every pair of neighbouring scales tells the counter, in whole numbers of 16
// bits, so that 127 times a scale is exact.
float ScaleOf(int64_t counter, int64_t index) {
  const int64_t part = index % 2 == 0 ? counter % 65536 : counter / 65536;
  return static_cast<float>(part + 1);
}

// Zero points of what was put; never 0, which is what calibrating gives.
int32_t ZeroPointOf(int64_t counter, int64_t index) {
  return static_cast<int32_t>((counter + index) % 100 + 1);
}

v1::Encoding EncodingOf(int64_t counter) {
  v1::Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_block_size(1);
  for (int64_t i = 0; i < kScales; ++i) {
    encoding.add_scale(ScaleOf(counter, i));
    encoding.add_zero_point(ZeroPointOf(counter, i));
  }
  return encoding;
}

// Data for which min-max calibration, strict symmetric int8 per element, gives
// the same scales.
std::string DataOf(int64_t counter) {
  std::vector<float> values;
  for (int64_t i = 0; i < kScales; ++i) {
    values.push_back(127 * ScaleOf(counter, i));
  }
  return ToBytes(values);
}

// The counter that all of an encoding tells, or -1.
int64_t CounterOf(const v1::Encoding& encoding) {
  if (encoding.scale_size() != kScales) return -1;
  const auto counter = static_cast<int64_t>(encoding.scale(0) - 1 +
                                            65536 * (encoding.scale(1) - 1));
  const bool was_put =
      encoding.zero_point_size() == kScales && encoding.zero_point(0) != 0;
  for (int64_t i = 0; i < kScales; ++i) {
    if (encoding.scale(i) != ScaleOf(counter, i)) return -1;
    const int32_t zero_point =
        i < encoding.zero_point_size() ? encoding.zero_point(i) : 0;
    if (zero_point != (was_put ? ZeroPointOf(counter, i) : 0)) return -1;
  }
  return counter;
}

// What is known of one tensor; only its thread writes it.
struct Written {
  int64_t acknowledged = -1;
  uint64_t acknowledged_generation = 0;
  int64_t sent = -1;
};

using Ledger = std::map<std::string, Written>;

void SetDeadline(grpc::ClientContext* context) {
  context->set_deadline(std::chrono::system_clock::now() +
                        std::chrono::seconds(120));
}

absl::StatusOr<v1::StoredEncoding> Put(v1::EncodingService::Stub& stub,
                                       const v1::TensorName& name,
                                       int64_t counter) {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::PutEncodingRequest request;
  *request.mutable_name() = name;
  *request.mutable_encoding() = EncodingOf(counter);
  v1::PutEncodingResponse response;
  const grpc::Status status = stub.PutEncoding(&context, request, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response.stored_encoding();
}

absl::StatusOr<v1::StoredEncoding> CalibrateAndStore(
    v1::QuantizationService::Stub& stub, const v1::TensorName& name,
    int64_t counter) {
  v1::CalibrateHeader header;
  *header.mutable_tensor()->mutable_name() = name;
  header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  header.mutable_tensor()->add_shape(kScales);
  header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  header.mutable_spec()->add_block_size(1);
  absl::StatusOr<v1::CalibrateSummary> summary =
      Calibrate(stub, header, DataOf(counter), 4096);
  if (!summary.ok()) return summary.status();
  return summary->stored_encoding();
}

absl::StatusOr<v1::StoredEncoding> Get(v1::EncodingService::Stub& stub,
                                       const v1::TensorName& name) {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::GetEncodingRequest request;
  *request.mutable_name() = name;
  v1::GetEncodingResponse response;
  const grpc::Status status = stub.GetEncoding(&context, request, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response.stored_encoding();
}

class CrashTest : public ::testing::Test {
 protected:
  std::unique_ptr<ServerProcess> StartServer() {
    return std::make_unique<ServerProcess>(
        QuantdBinary(), directory_.path() + "/encodings.db",
        std::vector<std::string>{"--drain-delay", "0s", "--threads", "2",
                                 // Nothing is turned away or ended, however
                                 // busy the machine is.
                                 "--queue-delay", "1h", "--idle-timeout", "1h",
                                 "--drain-grace", "1h"});
  }

  // Puts and calibrates, in turn, until the server is gone.
  void WriteUntilKilled(const ServerProcess& server, int thread,
                        Ledger* ledger) {
    const std::shared_ptr<grpc::Channel> channel = server.NewChannel();
    const auto encodings = v1::EncodingService::NewStub(channel);
    const auto quantization = v1::QuantizationService::NewStub(channel);
    for (int i = 0;; ++i) {
      const v1::TensorName name = NameOf(thread, i % kTensorsPerThread);
      Written& written = (*ledger)[name.tensor()];
      const int64_t counter = next_counter_.fetch_add(1);
      written.sent = counter;
      const absl::StatusOr<v1::StoredEncoding> stored =
          i % 3 == 2 ? CalibrateAndStore(*quantization, name, counter)
                     : Put(*encodings, name, counter);
      if (!stored.ok()) {
        EXPECT_EQ(stored.status().code(), absl::StatusCode::kUnavailable)
            << stored.status();
        return;
      }
      EXPECT_GT(stored->generation(), written.acknowledged_generation);
      written.acknowledged = counter;
      written.acknowledged_generation = stored->generation();
      acknowledged_count_.fetch_add(1);
      absl::MutexLock lock(&mutex_);
      any_acknowledged_ = true;
    }
  }

  // Checks every tensor that was ever sent. What the server has becomes what
  // is known of it: a write that was not acknowledged may have arrived.
  void CheckAll(const ServerProcess& server, std::vector<Ledger>* ledgers) {
    const auto stub = v1::EncodingService::NewStub(server.NewChannel());
    for (int thread = 0; thread < kThreads; ++thread) {
      for (int i = 0; i < kTensorsPerThread; ++i) {
        const v1::TensorName name = NameOf(thread, i);
        const auto it = (*ledgers)[thread].find(name.tensor());
        if (it == (*ledgers)[thread].end()) continue;
        Written& written = it->second;
        const absl::StatusOr<v1::StoredEncoding> stored = Get(*stub, name);
        if (written.acknowledged < 0 && absl::IsNotFound(stored.status())) {
          continue;
        }
        ASSERT_TRUE(stored.ok()) << name.tensor() << ": " << stored.status();
        const int64_t counter = CounterOf(stored->encoding());
        EXPECT_GE(counter, 0) << name.tensor() << " is torn";
        EXPECT_TRUE(counter == written.acknowledged || counter == written.sent)
            << name.tensor() << " has " << counter << ", acknowledged was "
            << written.acknowledged << ", sent " << written.sent;
        if (counter == written.acknowledged) {
          EXPECT_EQ(stored->generation(), written.acknowledged_generation);
        } else {
          EXPECT_GT(stored->generation(), written.acknowledged_generation);
        }
        written.acknowledged = counter;
        written.acknowledged_generation = stored->generation();
        largest_generation_ =
            std::max(largest_generation_, stored->generation());
      }
    }
    // What comes next stands above all that was ever seen.
    v1::TensorName probe;
    probe.set_model(kModel);
    probe.set_tensor("probe");
    const absl::StatusOr<v1::StoredEncoding> next = Put(*stub, probe, 0);
    ASSERT_TRUE(next.ok()) << next.status();
    EXPECT_GT(next->generation(), largest_generation_);
    largest_generation_ = next->generation();
  }

  // Every tensor of the ledgers is listed once, in order, with its generation.
  void CheckList(const ServerProcess& server,
                 const std::vector<Ledger>& ledgers) {
    const auto stub = v1::EncodingService::NewStub(server.NewChannel());
    std::map<std::string, uint64_t> listed;
    v1::ListEncodingsRequest request;
    request.set_model(kModel);
    request.set_page_size(7);
    do {
      grpc::ClientContext context;
      SetDeadline(&context);
      v1::ListEncodingsResponse response;
      const grpc::Status status =
          stub->ListEncodings(&context, request, &response);
      ASSERT_TRUE(status.ok()) << status.error_message();
      for (const v1::StoredEncoding& entry : response.encodings()) {
        EXPECT_TRUE(
            listed.emplace(entry.name().tensor(), entry.generation()).second);
      }
      request.set_page_token(response.next_page_token());
    } while (!request.page_token().empty());
    EXPECT_EQ(listed.erase("probe"), 1u);
    std::map<std::string, uint64_t> expected;
    for (const Ledger& ledger : ledgers) {
      for (const auto& [tensor, written] : ledger) {
        if (written.acknowledged < 0) continue;
        expected[tensor] = written.acknowledged_generation;
      }
    }
    EXPECT_EQ(listed, expected);
  }

  bool AwaitAcknowledgement() {
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&any_acknowledged_),
                                   absl::Minutes(2));
  }

  TemporaryDirectory directory_;
  std::atomic<int64_t> next_counter_{0};
  std::atomic<int64_t> acknowledged_count_{0};
  uint64_t largest_generation_ = 0;

  absl::Mutex mutex_;
  bool any_acknowledged_ ABSL_GUARDED_BY(mutex_) = false;
};

TEST_F(CrashTest, AcknowledgedEncodingsSurviveKillNine) {
  std::mt19937 random(20240607);
  std::uniform_int_distribution<int> delay_ms(5, 150);
  std::vector<Ledger> ledgers(kThreads);
  for (int round = 0; round < kRounds; ++round) {
    SCOPED_TRACE(absl::StrCat("round ", round));
    const std::unique_ptr<ServerProcess> server = StartServer();
    CheckAll(*server, &ledgers);
    if (HasFailure()) return;
    {
      absl::MutexLock lock(&mutex_);
      any_acknowledged_ = false;
    }
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back(
          [&, thread] { WriteUntilKilled(*server, thread, &ledgers[thread]); });
    }
    EXPECT_TRUE(AwaitAcknowledgement());
    absl::SleepFor(absl::Milliseconds(delay_ms(random)));
    server->Kill();
    for (std::thread& thread : threads) thread.join();
    if (HasFailure()) return;
  }
  const std::unique_ptr<ServerProcess> server = StartServer();
  CheckAll(*server, &ledgers);
  CheckList(*server, ledgers);
  EXPECT_EQ(server->Terminate(), 0);
  // Every round acknowledged something, most of them a lot.
  EXPECT_GE(acknowledged_count_.load(), kRounds);
  std::printf("%d rounds, %ld writes acknowledged\n", kRounds,
              static_cast<long>(acknowledged_count_.load()));
}

TEST_F(CrashTest, TerminatingDrainsAndTheNextStartServesTheSame) {
  uint64_t generation = 0;
  {
    const std::unique_ptr<ServerProcess> server = StartServer();
    const auto stub = v1::EncodingService::NewStub(server->NewChannel());
    const auto stored = Put(*stub, NameOf(0, 0), 5);
    ASSERT_TRUE(stored.ok()) << stored.status();
    generation = stored->generation();
    EXPECT_EQ(server->Terminate(), 0);
  }
  const std::unique_ptr<ServerProcess> server = StartServer();
  const auto stub = v1::EncodingService::NewStub(server->NewChannel());
  const auto stored = Get(*stub, NameOf(0, 0));
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(CounterOf(stored->encoding()), 5);
  EXPECT_EQ(stored->generation(), generation);
  EXPECT_EQ(server->Terminate(), 0);
}

// A tensor that is on its way when the signal comes is finished and answered.
TEST_F(CrashTest, TerminatingFinishesTheOpenTensor) {
  const std::unique_ptr<ServerProcess> server = StartServer();
  const auto stub = v1::QuantizationService::NewStub(server->NewChannel());
  grpc::ClientContext context;
  SetDeadline(&context);
  const auto stream = stub->Quantize(&context);
  v1::QuantizeRequest request;
  v1::QuantizeHeader& header = *request.mutable_header();
  header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  header.mutable_tensor()->add_shape(4);
  header.mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT8);
  header.mutable_encoding()->add_scale(1);
  request.set_data(ToBytes<float>({1, 2}));
  ASSERT_TRUE(stream->Write(request));
  v1::QuantizeResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.data(), (std::string{1, 2}));

  std::thread terminate([&] { EXPECT_EQ(server->Terminate(), 0); });
  // Draining has begun when new calls are turned away.
  const auto encodings = v1::EncodingService::NewStub(server->NewChannel());
  EXPECT_TRUE(PollUntil(absl::Minutes(2), [&] {
    return absl::IsUnavailable(Get(*encodings, NameOf(0, 0)).status());
  }));
  request.Clear();
  request.set_offset(8);
  request.set_data(ToBytes<float>({3, 4}));
  EXPECT_TRUE(stream->Write(request));
  std::string rest;
  bool complete = false;
  while (stream->Read(&response)) {
    EXPECT_FALSE(response.has_error()) << response.error().message();
    rest += response.data();
    complete = complete || response.has_summary();
  }
  EXPECT_EQ(rest, (std::string{3, 4}));
  EXPECT_TRUE(complete);
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  terminate.join();
}

}  // namespace
}  // namespace quantd::testing::crash_test
