// Many sources calibrate together: what comes of it does not depend on how
// they went about it.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/files/safetensors.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "tests/support/paths.h"
#include "tests/support/sanitizers.h"
#include "tests/support/server_process.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"

namespace quantd::testing::contribution_test {
namespace {

constexpr int kSources = 8;
// Batches of each source and tensor; the file has 256 rows.
constexpr int kBatches = kSanitized ? 4 : 8;
constexpr char kModel[] = "digits/cnn";

// A call or a wait that takes longer hangs.
constexpr absl::Duration kLongEnough = absl::Minutes(4);

void SetDeadline(grpc::ClientContext* context) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + kLongEnough));
}

// Specs of several methods, formats and granularities; each can be computed
// from statistics per channel of axis 1.
std::vector<v1::EncodingSpec> Specs() {
  std::vector<v1::EncodingSpec> specs;
  const auto add = [&specs](v1::NumberFormat format,
                            v1::CalibrationMethod method) {
    v1::EncodingSpec& spec = specs.emplace_back();
    spec.set_format(format);
    spec.set_method(method);
    return &spec;
  };
  add(v1::NUMBER_FORMAT_INT8, v1::CALIBRATION_METHOD_MIN_MAX);
  add(v1::NUMBER_FORMAT_UINT8, v1::CALIBRATION_METHOD_PERCENTILE);
  add(v1::NUMBER_FORMAT_UINT4, v1::CALIBRATION_METHOD_MSE);
  add(v1::NUMBER_FORMAT_INT4, v1::CALIBRATION_METHOD_SQNR);
  add(v1::NUMBER_FORMAT_INT8, v1::CALIBRATION_METHOD_ENTROPY);
  add(v1::NUMBER_FORMAT_FLOAT8_E4M3FN, v1::CALIBRATION_METHOD_PERCENTILE);
  add(v1::NUMBER_FORMAT_FLOAT4_E2M1, v1::CALIBRATION_METHOD_MSE)
      ->mutable_granularity()
      ->set_axis(1);
  v1::EncodingSpec* best =
      add(v1::NUMBER_FORMAT_INT4, v1::CALIBRATION_METHOD_BEST_OF);
  best->add_methods(v1::CALIBRATION_METHOD_MIN_MAX);
  best->add_methods(v1::CALIBRATION_METHOD_PERCENTILE);
  best->add_methods(v1::CALIBRATION_METHOD_MSE);
  best->mutable_granularity()->set_axis(1);
  return specs;
}

// One batch of one tensor.
struct Batch {
  v1::TensorDescription tensor;
  absl::string_view data;
};

// The activations of the test network, cut into batches.
class Activations {
 public:
  Activations()
      : file_(files::SafetensorsReader::Open(
            TestDataFolder() + "/digits-cnn/activations.safetensors")) {
    EXPECT_TRUE(file_.ok()) << file_.status();
  }

  size_t tensor_count() const { return file_->tensors().size(); }

  // Batch `index` of all kSources * kBatches.
  Batch Get(size_t tensor, int index) const {
    const files::FileTensor& whole = file_->tensors()[tensor];
    const int64_t rows = whole.shape[0] / (kSources * kBatches);
    const size_t bytes = whole.data.size() / (kSources * kBatches);
    Batch batch;
    v1::TensorName& name = *batch.tensor.mutable_name();
    name.set_model(kModel);
    name.set_tensor(whole.name);
    batch.tensor.set_element_type(v1::ELEMENT_TYPE_FLOAT32);
    batch.tensor.mutable_shape()->Assign(whole.shape.begin(),
                                         whole.shape.end());
    batch.tensor.set_shape(0, rows);
    batch.data = absl::string_view(
        reinterpret_cast<const char*>(whole.data.data()) + index * bytes,
        bytes);
    return batch;
  }

 private:
  const absl::StatusOr<files::SafetensorsReader> file_;
};

v1::CalibrateHeader HeaderOf(const Batch& batch, const std::string& source,
                             uint64_t sequence) {
  v1::CalibrateHeader header;
  *header.mutable_tensor() = batch.tensor;
  v1::Contribution& contribution = *header.mutable_contribution();
  contribution.set_source(source);
  contribution.set_sequence(sequence);
  contribution.mutable_granularity()->set_axis(1);
  contribution.set_mantissa_bits(5);
  return header;
}

// Every encoding of every spec, by tensor, without what a store adds.
std::map<std::string, std::string> Encodings(v1::EncodingService::Stub& stub) {
  std::map<std::string, std::string> encodings;
  for (const v1::EncodingSpec& spec : Specs()) {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::ComputeEncodingsRequest request;
    request.set_model(kModel);
    *request.mutable_default_spec() = spec;
    const auto stream = stub.ComputeEncodings(&context, request);
    v1::ComputeEncodingsResponse response;
    while (stream->Read(&response)) {
      EXPECT_FALSE(response.has_error())
          << response.error().message() << " " << spec.ShortDebugString();
      EXPECT_GT(response.stored_encoding().generation(), 0u);
      encodings[absl::StrCat(response.name().tensor(), " ",
                             spec.ShortDebugString())] =
          response.stored_encoding().encoding().SerializeAsString() +
          response.prediction().SerializeAsString();
    }
    const grpc::Status status = stream->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  return encodings;
}

class ContributionTest : public ::testing::Test {
 protected:
  std::unique_ptr<ServerProcess> StartServer(const std::string& store) {
    return std::make_unique<ServerProcess>(
        QuantdBinary(), absl::StrCat(directory_.path(), "/", store),
        std::vector<std::string>{"--drain-delay", "0s", "--threads", "2",
                                 // None is turned away, however busy the
                                 // machine is.
                                 "--queue-delay", "1h"});
  }

  // What one source contributes, in one go and in order.
  std::map<std::string, std::string> CleanRun() {
    const std::unique_ptr<ServerProcess> server = StartServer("clean.db");
    const auto stub = v1::QuantizationService::NewStub(server->NewChannel());
    for (size_t tensor = 0; tensor < activations_.tensor_count(); ++tensor) {
      for (int i = 0; i < kSources * kBatches; ++i) {
        const Batch batch = activations_.Get(tensor, i);
        const absl::StatusOr<v1::CalibrateSummary> summary =
            Calibrate(*stub, HeaderOf(batch, "only", i + 1), batch.data);
        EXPECT_TRUE(summary.ok()) << summary.status();
      }
    }
    const auto encodings = v1::EncodingService::NewStub(server->NewChannel());
    std::map<std::string, std::string> result = Encodings(*encodings);
    EXPECT_EQ(server->Terminate(), 0);
    return result;
  }

  // A stream of one source, which lasts as long as the server.
  void Send(int source, const ServerProcess& server);
  // Waits until that many contributions are acknowledged.
  bool AwaitAcknowledged(int count) {
    absl::MutexLock lock(&mutex_);
    const auto reached = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return acknowledged_count_ >= count;
    };
    return mutex_.AwaitWithTimeout(absl::Condition(&reached), kLongEnough);
  }

  TemporaryDirectory directory_;
  const Activations activations_;
  // [source][tensor] sequences that were acknowledged; a thread per source.
  std::vector<std::vector<int>> done_{
      kSources, std::vector<int>(activations_.tensor_count(), 0)};
  // Contributions that were sent more than once.
  std::atomic<int> noise_count_{0};
  std::atomic<int> duplicate_count_{0};

  absl::Mutex mutex_;
  int acknowledged_count_ ABSL_GUARDED_BY(mutex_) = 0;
};

void ContributionTest::Send(int source, const ServerProcess& server) {
  std::mt19937 random(source + 1);
  const auto stub = v1::QuantizationService::NewStub(server.NewChannel());
  grpc::ClientContext context;
  SetDeadline(&context);
  const auto stream = stub->Calibrate(&context);
  std::vector<int>& done = done_[source];
  const std::string name = absl::StrCat("rank-", source);
  // False when the stream is gone.
  const auto contribute = [&](size_t tensor, int sequence) {
    const Batch batch =
        activations_.Get(tensor, source * kBatches + sequence - 1);
    v1::CalibrateRequest request;
    *request.mutable_header() = HeaderOf(batch, name, sequence);
    // Cut where it likes.
    const size_t cut = random() % (batch.data.size() / 4) * 4;
    request.set_data(std::string(batch.data.substr(0, cut)));
    v1::CalibrateRequest rest;
    rest.set_offset(cut);
    rest.set_data(std::string(batch.data.substr(cut)));
    v1::CalibrateResponse response;
    if (!stream->Write(request) || !stream->Write(rest) ||
        !stream->Read(&response)) {
      return false;
    }
    EXPECT_FALSE(response.has_error()) << response.error().message();
    const v1::ContributionResult& result = response.summary().contribution();
    EXPECT_GE(result.sequence(), static_cast<uint64_t>(sequence));
    duplicate_count_.fetch_add(result.duplicate() ? 1 : 0);
    return true;
  };
  while (true) {
    // The tensors advance at random.
    std::vector<size_t> open;
    for (size_t t = 0; t < done.size(); ++t) {
      if (done[t] < kBatches) open.push_back(t);
    }
    if (open.empty()) break;
    const size_t tensor = open[random() % open.size()];
    if (!contribute(tensor, done[tensor] + 1)) return;
    ++done[tensor];
    {
      absl::MutexLock lock(&mutex_);
      ++acknowledged_count_;
    }
    // What was counted comes again, the same and older, in any order.
    for (int i = 0; i < static_cast<int>(random() % 3); ++i) {
      const size_t again = random() % done.size();
      if (done[again] == 0) continue;
      noise_count_.fetch_add(1);
      if (!contribute(again, 1 + static_cast<int>(random() % done[again]))) {
        return;
      }
    }
  }
  stream->WritesDone();
  const grpc::Status status = stream->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

// Retries, re-ordering between sources and kill -9 leave no trace.
TEST_F(ContributionTest, EightSourcesThatAreKilledGiveTheBitsOfACleanRun) {
  const std::map<std::string, std::string> expected = CleanRun();
  EXPECT_EQ(expected.size(), Specs().size() * activations_.tensor_count());
  const int total =
      kSources * kBatches * static_cast<int>(activations_.tensor_count());
  // Killed with about a third, and with two thirds of it done.
  std::unique_ptr<ServerProcess> server;
  for (const int until : {total / 3, 2 * total / 3, total}) {
    server = StartServer("shared.db");
    std::vector<std::thread> threads;
    for (int source = 0; source < kSources; ++source) {
      threads.emplace_back([&, source] { Send(source, *server); });
    }
    EXPECT_TRUE(AwaitAcknowledged(until));
    if (until < total) server->Kill();
    for (std::thread& thread : threads) thread.join();
    if (HasFailure()) return;
  }
  for (const std::vector<int>& done : done_) {
    for (const int sequence : done) EXPECT_EQ(sequence, kBatches);
  }
  EXPECT_GT(noise_count_.load(), total / 2);
  // What was counted but not acknowledged before a kill is one as well.
  EXPECT_GT(duplicate_count_.load(), total / 4);
  const auto stub = v1::EncodingService::NewStub(server->NewChannel());
  const std::map<std::string, std::string> encodings = Encodings(*stub);
  EXPECT_EQ(encodings.size(), expected.size());
  for (const auto& [name, bytes] : expected) {
    const auto it = encodings.find(name);
    ASSERT_NE(it, encodings.end()) << name;
    EXPECT_EQ(it->second, bytes) << name;
  }
  EXPECT_EQ(server->Terminate(), 0);
  std::printf("%d contributions, %d sent again, %d duplicates\n", total,
              noise_count_.load(), duplicate_count_.load());
}

// Two servers on one file, every source of which talks to both in turn.
TEST_F(ContributionTest, TwoServersOnOneFileLoseNothing) {
  const std::unique_ptr<ServerProcess> servers[] = {StartServer("two.db"),
                                                    StartServer("two.db")};
  constexpr int kSequences = 40;
  constexpr int kThreads = 4;
  std::vector<std::thread> threads;
  for (int source = 0; source < kThreads; ++source) {
    threads.emplace_back([&, source] {
      const std::unique_ptr<v1::QuantizationService::Stub> stubs[] = {
          v1::QuantizationService::NewStub(servers[0]->NewChannel()),
          v1::QuantizationService::NewStub(servers[1]->NewChannel())};
      for (int sequence = 1; sequence <= kSequences; ++sequence) {
        Batch batch;
        batch.tensor.mutable_name()->set_model(kModel);
        batch.tensor.mutable_name()->set_tensor("shared");
        batch.tensor.set_element_type(v1::ELEMENT_TYPE_FLOAT32);
        batch.tensor.add_shape(1);
        batch.tensor.add_shape(2);
        const std::string data = ToBytes<float>(
            {static_cast<float>(source), static_cast<float>(sequence)});
        batch.data = data;
        absl::StatusOr<v1::CalibrateSummary> summary;
        do {
          summary = Calibrate(
              *stubs[sequence % 2],
              HeaderOf(batch, absl::StrCat("rank-", source), sequence),
              batch.data);
          // The other server may have kept it waiting for too long.
        } while (
            absl::StartsWith(summary.status().message(), "STORE_UNAVAILABLE"));
        ASSERT_TRUE(summary.ok()) << summary.status();
        EXPECT_FALSE(summary->contribution().duplicate());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::unique_ptr<ServerProcess>& server : servers) {
    const auto stub = v1::EncodingService::NewStub(server->NewChannel());
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::GetStatisticsRequest request;
    request.mutable_name()->set_model(kModel);
    request.mutable_name()->set_tensor("shared");
    v1::GetStatisticsResponse response;
    const grpc::Status status =
        stub->GetStatistics(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.statistics().count(), 2u * kThreads * kSequences);
    ASSERT_EQ(response.sources_size(), kThreads);
    for (const v1::StatisticsSource& source : response.sources()) {
      EXPECT_EQ(source.sequence(), uint64_t{kSequences}) << source.source();
    }
  }
  for (const std::unique_ptr<ServerProcess>& server : servers) {
    EXPECT_EQ(server->Terminate(), 0);
  }
}

}  // namespace
}  // namespace quantd::testing::contribution_test
