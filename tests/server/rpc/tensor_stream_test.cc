#include "server/rpc/tensor_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/statistics/statistics_state.h"
#include "core/types/encoding.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "server/quantd_server.h"
#include "server/store/encoding_store.h"
#include "server/store/gram_pieces.h"
#include "server/store/statistics_store.h"
#include "tests/support/metric_value.h"
#include "tests/support/raw_stream.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"

namespace quantd::server::tensor_stream_test {
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
  ASSERT_TRUE(testing::PollUntil(testing::kLongEnough, [&] {
    return server.server().memory_used_bytes() == used_bytes;
  })) << server.server().memory_used_bytes();
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
  auto holder = std::make_unique<HeldTensor>(server, 3 * kMiB - 64);
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
  absl::StatusOr<StoredEncoding> Read(
      const EncodingKey& key,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override {
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
  absl::StatusOr<std::unique_ptr<EncodingReader>> OpenReader(
      const EncodingKey& key) override {
    return Wait();
  }
  absl::StatusOr<std::unique_ptr<EncodingWriter>> OpenWriter(
      const EncodingKey& key, std::shared_ptr<const core::Encoding> outline,
      bool has_zero_points, const Precondition& precondition) override {
    return Wait();
  }
  absl::StatusOr<PublishedRevision> PublishRevision(absl::string_view model,
                                                    absl::string_view source,
                                                    absl::string_view target,
                                                    bool keep_others) override {
    return Wait();
  }
  absl::StatusOr<DeletedRows> DeleteRevision(
      absl::string_view model, absl::string_view revision) override {
    return Wait();
  }
  absl::StatusOr<DeletedRows> DeleteModel(absl::string_view model) override {
    return Wait();
  }
  absl::StatusOr<std::vector<EncodingListEntry>> ListEncodings(
      absl::string_view model, absl::string_view revision,
      absl::string_view after, int limit) override {
    return Wait();
  }
  absl::StatusOr<std::vector<ModelListEntry>> ListModels(const NameRange& range,
                                                         int limit) override {
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
  ServerOptions options;
  options.threads = 1;
  testing::TestServer server(options, &store, /*statistics=*/nullptr);
  std::thread stuck([&] {
    const absl::Status status =
        testing::Quantize(server.quantization(), stuck_header,
                          std::string(16, '\0'))
            .status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  });
  store.AwaitCall();
  v1::QuantizeHeader header;
  header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  header.mutable_tensor()->add_shape(4);
  header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  const absl::Status status =
      testing::Quantize(server.quantization(), header, std::string(16, '\0'))
          .status();
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

TEST(TensorStreamTest, TellsWhoAsksThatItsTensorIsWorkedOn) {
  StuckStore store;
  ServerOptions options;
  options.limits.progress_interval = absl::Milliseconds(1);
  testing::TestServer server(options, &store, /*statistics=*/nullptr);
  v1::QuantizeRequest request;
  *request.mutable_header() = NamedHeader();
  request.mutable_header()->mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  request.mutable_header()->set_store(true);
  request.set_data(std::string(16, '\0'));
  grpc::ClientContext contexts[2];
  contexts[0].AddMetadata("quantd-progress", "1");
  const auto asking = server.quantization().Quantize(&contexts[0]);
  const auto other = server.quantization().Quantize(&contexts[1]);
  for (auto* const stream : {other.get(), asking.get()}) {
    ASSERT_TRUE(stream->Write(request));
  }
  v1::QuantizeResponse response;
  int told_count = 0;
  while (told_count < 5 && asking->Read(&response)) {
    told_count += response.ByteSizeLong() == 0 ? 1 : 0;
  }
  EXPECT_EQ(told_count, 5);
  store.LetGo();
  for (auto* const stream : {other.get(), asking.get()}) {
    stream->WritesDone();
    bool has_error = false;
    while (stream->Read(&response)) {
      has_error |= response.has_error();
      EXPECT_TRUE(stream == asking.get() || response.ByteSizeLong() > 0);
    }
    EXPECT_TRUE(has_error);
    EXPECT_TRUE(stream->Finish().ok());
  }
}

TEST(TensorStreamTest, FailsATensorThatWaitedTooLongForMemory) {
  testing::TestServer server(SmallBudget(absl::Milliseconds(50)));
  HeldTensor holder(server, 3 * kMiB - 64);
  holder.Send(2 * kMiB);
  WaitForBudget(server, 2 * kMiB + 24);
  HeldTensor waiting(server, 2 * kMiB);
  waiting.Send(2 * kMiB);
  EXPECT_EQ(waiting.Outcome(), "MEMORY_BUDGET");
}

// Sends chunks and reads the first answer alone.
class DeafTensor {
 public:
  explicit DeafTensor(testing::TestServer& server)
      : stub_(v1::QuantizationService::NewStub(server.NewChannel())),
        stream_(stub_->Dequantize(&context_)),
        writer_([this] {
          v1::DequantizeRequest message;
          v1::DequantizeHeader& header = *message.mutable_header();
          header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
          header.mutable_tensor()->add_shape(int64_t{1} << 36);
          header.mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT8);
          header.mutable_encoding()->add_scale(1);
          message.set_data(std::string(kMiB, '\1'));
          while (stream_->Write(message)) {
            message.clear_header();
            message.set_offset(message.offset() + kMiB);
          }
        }) {}
  ~DeafTensor() {
    context_.TryCancel();
    writer_.join();
    stream_->Finish();
  }

  // Waits for the first answer. False if the tensor was turned away.
  bool IsServed() {
    v1::DequantizeResponse response;
    return stream_->Read(&response) && !response.has_error();
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<v1::QuantizationService::Stub> stub_;
  std::unique_ptr<
      grpc::ClientReaderWriter<v1::DequantizeRequest, v1::DequantizeResponse>>
      stream_;
  std::thread writer_;
};

// Work that has to wait for a client is nothing that others wait for.
TEST(TensorStreamTest, AClientThatDoesNotReadTurnsNobodyAway) {
  constexpr int kDeaf = 3;
  ServerOptions options;
  options.threads = 1;
  options.limits.queue_delay = absl::Microseconds(1);
  // They are not ended for that, however long the test takes.
  options.limits.idle_timeout = absl::Hours(1);
  testing::TestServer server(options);
  std::vector<std::unique_ptr<DeafTensor>> deaf;
  for (int i = 0; i < kDeaf; ++i) {
    // As long as the one before still has work, there is none for another.
    deaf.emplace_back();
    ASSERT_TRUE(testing::PollUntil(testing::kLongEnough, [&] {
      deaf.back() = std::make_unique<DeafTensor>(server);
      return deaf.back()->IsServed();
    }));
  }
  v1::QuantizeHeader header;
  header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  header.mutable_tensor()->add_shape(16 << 10);
  header.mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT8);
  header.mutable_encoding()->add_scale(1);
  // Once all that may be queued is.
  int served_in_a_row = 0;
  EXPECT_TRUE(testing::PollUntil(testing::kLongEnough, [&] {
    const absl::Status status = testing::Quantize(server.quantization(), header,
                                                  std::string(64 << 10, '\0'))
                                    .status();
    served_in_a_row = status.ok() ? served_in_a_row + 1 : 0;
    return served_in_a_row >= 50 &&
           testing::MetricValue(server.metrics(),
                                "quantd_queue_delay_seconds") == 0;
  }));
}

constexpr int64_t kManyScales = 64 << 10;

// A scale for each element.
v1::Encoding LargeEncoding() {
  v1::Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_block_size(1);
  encoding.mutable_scale()->Resize(kManyScales, 0.5f);
  return encoding;
}

// Opens a tensor with that header, and waits until it holds that much; it keeps
// that while it is open.
template <typename Header, typename Stream>
void ExpectHeld(testing::TestServer& server, Header header, Stream stream,
                grpc::ClientContext* context, int64_t bytes) {
  WaitForBudget(server, 0);
  header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  header.mutable_tensor()->add_shape(kManyScales);
  typename std::conditional_t<
      std::is_same_v<Header, v1::EvaluateHeader>, v1::EvaluateRequest,
      std::conditional_t<std::is_same_v<Header, v1::CalibrateHeader>,
                         v1::CalibrateRequest, v1::QuantizeRequest>>
      request;
  *request.mutable_header() = header;
  ASSERT_TRUE(stream->Write(request));
  EXPECT_TRUE(testing::PollUntil(testing::kLongEnough, [&] {
    return server.server().memory_used_bytes() >= bytes;
  })) << server.server().memory_used_bytes();
  // Not only while the header passes through.
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_GE(server.server().memory_used_bytes(), bytes);
  context->TryCancel();
  stream->Finish();
  WaitForBudget(server, 0);
}

TEST(TensorStreamTest, AnEncodingIsChargedWhileItsTensorIsOpen) {
  constexpr int64_t kBytes = kManyScales * sizeof(float);
  testing::TestServer server;
  EncodingKey key{"m", "main", "t"};
  auto stored = std::make_shared<core::Encoding>();
  stored->format = static_cast<core::NumberFormat>(v1::NUMBER_FORMAT_INT8);
  stored->block_size = {1};
  stored->scale.assign(kManyScales, 0.5f);
  stored->qmin = -128;
  stored->qmax = 127;
  stored->scale_type = core::ScaleType::kFloat32;
  ASSERT_TRUE(server.store().Put(key, stored, Precondition()).ok());
  {
    grpc::ClientContext context;
    v1::QuantizeHeader header;
    *header.mutable_encoding() = LargeEncoding();
    ExpectHeld(server, header, server.quantization().Quantize(&context),
               &context, kBytes);
  }
  {
    grpc::ClientContext context;
    v1::QuantizeHeader header;
    header.mutable_tensor()->mutable_name()->set_model("m");
    header.mutable_tensor()->mutable_name()->set_tensor("t");
    header.mutable_reference()->mutable_name()->set_revision("main");
    ExpectHeld(server, header, server.quantization().Quantize(&context),
               &context, kBytes);
  }
  constexpr int kCandidates = 8;
  for (const bool is_inline : {true, false}) {
    grpc::ClientContext context;
    v1::EvaluateHeader header;
    for (int i = 0; i < kCandidates; ++i) {
      if (is_inline) {
        *header.add_candidates()->mutable_encoding() = LargeEncoding();
      } else {
        v1::EncodingSpec* spec = header.add_candidates()->mutable_spec();
        spec->set_format(v1::NUMBER_FORMAT_INT8);
        spec->add_block_size(1);
      }
    }
    ExpectHeld(server, header, server.quantization().Evaluate(&context),
               &context, kCandidates * kBytes);
  }
}

TEST(TensorStreamTest, LabelsAreChargedWhileTheirTensorIsOpen) {
  constexpr int kCandidates = 64;
  constexpr int64_t kLabelBytes = 1024;
  testing::TestServer server;
  grpc::ClientContext context;
  v1::EvaluateHeader header;
  for (int i = 0; i < kCandidates; ++i) {
    v1::EvaluateCandidate* candidate = header.add_candidates();
    candidate->set_label(std::string(kLabelBytes, 'x'));
    candidate->mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT8);
    candidate->mutable_encoding()->add_scale(1);
  }
  ExpectHeld(server, header, server.quantization().Evaluate(&context), &context,
             kCandidates * kLabelBytes);
}

// A fixed range for each of that many scales.
v1::EncodingSpec SpecWithRanges(int count) {
  v1::EncodingSpec spec;
  spec.set_format(v1::NUMBER_FORMAT_INT8);
  spec.set_method(v1::CALIBRATION_METHOD_FIXED_RANGE);
  spec.add_block_size(1);
  spec.mutable_scale_range_min()->Resize(count, -1);
  spec.mutable_scale_range_max()->Resize(count, 1);
  return spec;
}

v1::CalibrateHeader ContributionWithRanges(int count) {
  v1::CalibrateHeader header;
  header.mutable_tensor()->mutable_name()->set_model("m");
  header.mutable_tensor()->mutable_name()->set_tensor("t");
  header.mutable_contribution()->set_source("s");
  header.mutable_contribution()->set_sequence(1);
  header.mutable_contribution()->add_block_size(1);
  *header.mutable_spec() = SpecWithRanges(count);
  return header;
}

TEST(TensorStreamTest, FixedRangesAreChargedWhileTheirTensorIsOpen) {
  // Both ends of each, as they came and as they are resolved.
  constexpr int64_t kBytes = kManyScales * 2 * 2 * sizeof(double);
  testing::TestServer server;
  {
    grpc::ClientContext context;
    v1::QuantizeHeader header;
    *header.mutable_spec() = SpecWithRanges(kManyScales);
    ExpectHeld(server, header, server.quantization().Quantize(&context),
               &context, kBytes);
  }
  {
    grpc::ClientContext context;
    v1::EvaluateHeader header;
    *header.add_candidates()->mutable_spec() = SpecWithRanges(kManyScales);
    *header.add_candidates()->mutable_spec() = SpecWithRanges(kManyScales);
    ExpectHeld(server, header, server.quantization().Evaluate(&context),
               &context, 2 * kBytes);
  }
  for (const bool contributes : {false, true}) {
    grpc::ClientContext context;
    v1::CalibrateHeader header = ContributionWithRanges(kManyScales);
    if (!contributes) header.clear_contribution();
    ExpectHeld(server, header, server.quantization().Calibrate(&context),
               &context, kBytes);
  }
}

TEST(TensorStreamTest, AContributionRefusesRangesThatFitNoStatistics) {
  testing::TestServer server;
  grpc::ClientContext context;
  const auto stream = server.quantization().Calibrate(&context);
  v1::CalibrateRequest request;
  *request.mutable_header() = ContributionWithRanges(5);
  v1::TensorDescription* tensor = request.mutable_header()->mutable_tensor();
  tensor->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  tensor->add_shape(4);
  ASSERT_TRUE(stream->Write(request));
  v1::CalibrateResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.error().reason(), "METHOD_INVALID");
  EXPECT_EQ(response.error().field(), "header.spec.scale_range_min");
  context.TryCancel();
  stream->Finish();
}

// The specs are held as long as the call. The budget has room for the request,
// as it comes and as it is parsed, but not for the ranges beside it.
TEST(TensorStreamTest, ACallWithMoreRangesThanTheBudgetIsRefused) {
  ServerOptions options;
  options.limits.memory_budget_bytes = 8 * kMiB;
  testing::TestServer server(options);
  const auto expect_refused = [](const grpc::Status& status) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(status.error_message(),
                ::testing::HasSubstr("send fewer ranges of scales at once"));
  };
  grpc::ClientContext sweep_context;
  v1::SweepRequest sweep;
  sweep.set_model("m");
  for (int i = 0; i < 2; ++i) *sweep.add_specs() = SpecWithRanges(kManyScales);
  const auto swept = server.encodings().Sweep(&sweep_context, sweep);
  v1::SweepResponse sweep_response;
  EXPECT_FALSE(swept->Read(&sweep_response));
  expect_refused(swept->Finish());
  WaitForBudget(server, 0);
  grpc::ClientContext compute_context;
  v1::ComputeEncodingsRequest compute;
  compute.set_model("m");
  *compute.mutable_default_spec() = SpecWithRanges(kManyScales);
  compute.add_overrides()->set_pattern("*");
  *compute.mutable_overrides(0)->mutable_spec() = SpecWithRanges(kManyScales);
  const auto computed =
      server.encodings().ComputeEncodings(&compute_context, compute);
  v1::ComputeEncodingsResponse compute_response;
  EXPECT_FALSE(computed->Read(&compute_response));
  expect_refused(computed->Finish());
}

std::string Delimited(int field, const std::string& bytes) {
  std::string text(1, static_cast<char>(field << 3 | 2));
  for (size_t size = bytes.size(); size > 0; size >>= 7) {
    text += static_cast<char>((size & 0x7f) | (size > 0x7f ? 0x80 : 0));
  }
  return text + bytes;
}

// What the process had at most since the last call of ForgetPeak.
int64_t PeakKib() {
  std::ifstream file("/proc/self/status");
  std::string word;
  while (file >> word && word != "VmHWM:") {
  }
  int64_t kib = 0;
  file >> kib;
  return kib;
}

bool ForgetPeak() {
  std::ofstream file("/proc/self/clear_refs");
  file << 5 << std::flush;
  return file.good();
}

// Nor is one made up to the place where it breaks.
TEST(TensorStreamTest, ALargeHeaderThatBreaksIsNotParsed) {
  testing::TestServer server;
  std::string header;
  // Candidates, of which less than the most that a header may grow to.
  for (int i = 0; i < 1 << 19; ++i) header += {'\x12', '\0'};
  header += '\x12';
  testing::RawStream stream(server.NewChannel(),
                            "/quantd.v1.QuantizationService/Evaluate");
  if (!ForgetPeak()) GTEST_SKIP() << "the kernel keeps no peak";
  const int64_t before_kib = PeakKib();
  ASSERT_TRUE(stream.Write(Delimited(1, header)));
  std::string answer;
  ASSERT_TRUE(stream.Read(&answer));
  v1::EvaluateResponse response;
  ASSERT_TRUE(response.ParseFromString(answer));
  EXPECT_EQ(response.error().reason(), "HEADER_INVALID");
  EXPECT_LT(PeakKib() - before_kib, 64 << 10);
}

TEST(TensorStreamTest, RefusesMoreDimensionsThanItTakes) {
  ServerOptions options;
  options.limits.tensor_rank = 2;
  testing::TestServer server(options);
  v1::QuantizeHeader header = NamedHeader();
  header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  header.mutable_tensor()->add_shape(1);
  const std::string data(16, '\0');
  absl::Status status =
      testing::Quantize(server.quantization(), header, data).status();
  EXPECT_TRUE(status.ok()) << status;
  header.mutable_tensor()->add_shape(1);
  status = testing::Quantize(server.quantization(), header, data).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message().substr(0, 10), "RANK_LIMIT") << status;
}

// What a tensor keeps of its header is short.
TEST(TensorStreamTest, AHeaderLeavesNothingBehindThatIsNotCharged) {
  testing::TestServer server;
  v1::EvaluateRequest request;
  v1::EvaluateHeader& header = *request.mutable_header();
  header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  header.mutable_tensor()->add_shape(0);
  // A field that nobody knows.
  header.mutable_tensor()->mutable_name()->ParseFromString(
      Delimited(15, std::string(kMiB, 'x')));
  v1::EvaluateCandidate& candidate = *header.add_candidates();
  candidate.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  for (const int label_bytes : {1024, 1025}) {
    candidate.set_label(std::string(label_bytes, 'x'));
    grpc::ClientContext context;
    const auto stream = server.quantization().Evaluate(&context);
    ASSERT_TRUE(stream->Write(request));
    stream->WritesDone();
    v1::EvaluateResponse response;
    ASSERT_TRUE(stream->Read(&response));
    if (label_bytes == 1024) {
      EXPECT_EQ(response.error().reason(), "");
      EXPECT_EQ(response.summary().candidates(0).label(), candidate.label());
      EXPECT_LT(response.ByteSizeLong(), kMiB);
    } else {
      EXPECT_EQ(response.error().reason(), "CANDIDATES_INVALID");
      EXPECT_EQ(response.error().field(), "header.candidates[0].label");
    }
    stream->Finish();
  }
}

// Two bytes each on the wire, hundreds in memory.
TEST(TensorStreamTest, AHeaderThatWouldTakeTooMuchMemoryIsNotParsed) {
  ServerOptions options;
  options.limits.memory_budget_bytes = 64 * kMiB;
  testing::TestServer server(options);
  std::string header;
  // Candidates, of which less than the most that a header may grow to.
  for (int i = 0; i < 1 << 19; ++i) header += {'\x12', '\0'};
  v1::EvaluateHeader tensor;
  tensor.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  tensor.mutable_tensor()->add_shape(4);
  header += tensor.SerializeAsString();
  std::string message = {'\x0a'};
  for (size_t size = header.size(); size > 0; size >>= 7) {
    message += static_cast<char>((size & 0x7f) | (size > 0x7f ? 0x80 : 0));
  }
  message += header;
  testing::RawStream stream(server.NewChannel(),
                            "/quantd.v1.QuantizationService/Evaluate");
  ASSERT_TRUE(stream.Write(message));
  std::string answer;
  ASSERT_TRUE(stream.Read(&answer));
  v1::EvaluateResponse response;
  ASSERT_TRUE(response.ParseFromString(answer));
  EXPECT_EQ(response.error().reason(), "MEMORY_BUDGET");
  WaitForBudget(server, 0);
}

// Has sources without end.
class EndlessStatistics : public StatisticsStore {
 public:
  absl::StatusOr<ContributionOutcome> Merge(
      const ContributionKey& key, const core::StatisticsState& part,
      double averaging_constant,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override {
    if (writes_without_end) return AskUntilEnded(proceed);
    return ContributionOutcome{key.sequence, false};
  }
  absl::StatusOr<StoredStatistics> ReadStatistics(
      const EncodingKey& key, bool with_moments,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override {
    return AskUntilEnded(proceed);
  }
  absl::StatusOr<absl::optional<core::GramState>> ReadGram(
      const EncodingKey& key,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override {
    return absl::optional<core::GramState>();
  }
  absl::StatusOr<uint64_t> Fingerprint(const EncodingKey& key) override {
    return 0;
  }
  absl::StatusOr<StoredMoments> ReadMoments(
      const EncodingKey& key,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override {
    return StoredMoments();
  }
  absl::StatusOr<absl::optional<core::GramState::Parts>> FindGram(
      const EncodingKey& key) override {
    return absl::optional<core::GramState::Parts>();
  }
  absl::StatusOr<std::vector<StatisticsListEntry>> ListStatistics(
      absl::string_view model, absl::string_view revision,
      absl::string_view after, int limit) override {
    return std::vector<StatisticsListEntry>();
  }
  absl::Status DeleteStatistics(const EncodingKey& key,
                                absl::string_view source) override {
    return absl::OkStatus();
  }
  absl::Status DeleteStatisticsUpTo(const EncodingKey& key,
                                    absl::Time update_time) override {
    return absl::UnimplementedError("");
  }

  // Whether that many calls came to read or write without end.
  bool AwaitBegun(int count) { return Await(begun_, count); }
  // Whether writing a contribution has steps without end, too.
  bool writes_without_end = false;

  // Whether that many were ended.
  bool AwaitEnded(int count) { return Await(ended_, count); }

 private:
  absl::Status AskUntilEnded(
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
    ++begun_;
    const absl::Time end = absl::Now() + testing::kLongEnough;
    absl::Status status;
    while (status.ok() && absl::Now() < end) {
      absl::SleepFor(absl::Milliseconds(1));
      status = proceed(1);
    }
    if (!status.ok()) ++ended_;
    return status.ok() ? core::StoreUnavailableError("nobody ended it")
                       : status;
  }
  static bool Await(const std::atomic<int>& counter, int count) {
    return testing::PollUntil(testing::kLongEnough,
                              [&] { return counter.load() >= count; });
  }

  std::atomic<int> begun_{0};
  std::atomic<int> ended_{0};
};

// Calls that read such statistics, and are cancelled.
class EndlessStatisticsTest : public ::testing::Test {
 protected:
  void ExpectStops(const std::string& method, const std::string& request) {
    testing::RawStream stream(server_.NewChannel(), method);
    ASSERT_TRUE(stream.Write(request));
    ASSERT_TRUE(statistics_.AwaitBegun(1));
    stream.Cancel();
    stream.Finish();
    EXPECT_TRUE(statistics_.AwaitEnded(1));
  }

  // A contribution with a Gram matrix, in one message.
  static std::string GramRequest(int features) {
    v1::CalibrateRequest request;
    v1::CalibrateHeader& header = *request.mutable_header();
    *header.mutable_tensor() = NamedHeader().tensor();
    header.mutable_tensor()->clear_shape();
    header.mutable_tensor()->add_shape(1);
    header.mutable_tensor()->add_shape(features);
    header.mutable_contribution()->set_source("a");
    header.mutable_contribution()->set_sequence(1);
    v1::FeatureStatistics& kept =
        *header.mutable_contribution()->mutable_features();
    kept.set_gram(true);
    for (int i = 0; i < features; ++i) kept.add_step_exponent(-10);
    request.set_data(std::string(4 * static_cast<size_t>(features), '\0'));
    return request.SerializeAsString();
  }

  // Sends so many of them.
  std::vector<std::unique_ptr<testing::RawStream>> Contribute(int count,
                                                              int features) {
    statistics_.writes_without_end = true;
    std::vector<std::unique_ptr<testing::RawStream>> streams;
    for (int i = 0; i < count; ++i) {
      streams.push_back(std::make_unique<testing::RawStream>(
          server_.NewChannel(), kCalibrate));
      EXPECT_TRUE(streams.back()->Write(GramRequest(features)));
    }
    return streams;
  }

  static void EndAll(
      const std::vector<std::unique_ptr<testing::RawStream>>& streams) {
    for (const auto& stream : streams) {
      stream->Cancel();
      stream->Finish();
    }
  }

  static constexpr char kCalibrate[] =
      "/quantd.v1.QuantizationService/Calibrate";
  // Of a matrix that takes several transactions, and of the largest that takes
  // one.
  static constexpr int kManyFeatures = 1100;
  static constexpr int kFewFeatures = 1023;
  static_assert(TakesSteps(kManyFeatures * (kManyFeatures + 1) / 2));
  static_assert(!TakesSteps(kFewFeatures * (kFewFeatures + 1) / 2));

  StuckStore store_;
  EndlessStatistics statistics_;
  testing::TestServer server_{ServerOptions(), &store_, &statistics_};
};

TEST_F(EndlessStatisticsTest, ACalibrationThatHasEndedStopsReadingThem) {
  v1::CalibrateRequest request;
  *request.mutable_header()->mutable_tensor() = NamedHeader().tensor();
  request.mutable_header()->mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  request.mutable_header()->mutable_contribution()->set_source("a");
  request.mutable_header()->mutable_contribution()->set_sequence(1);
  request.set_data(std::string(16, '\0'));
  ExpectStops(kCalibrate, request.SerializeAsString());
}

TEST_F(EndlessStatisticsTest, AContributionThatHasEndedStopsBetweenSteps) {
  statistics_.writes_without_end = true;
  ExpectStops(kCalibrate, GramRequest(kManyFeatures));
}

TEST_F(EndlessStatisticsTest, AGetThatHasEndedStopsReadingThem) {
  v1::GetStatisticsRequest request;
  *request.mutable_name() = NamedHeader().tensor().name();
  ExpectStops("/quantd.v1.EncodingService/GetStatistics",
              request.SerializeAsString());
}

TEST_F(EndlessStatisticsTest, KeepNoOtherReadOfTheCallerWaiting) {
  v1::GetStatisticsRequest request;
  *request.mutable_name() = NamedHeader().tensor().name();
  // More than there are threads for.
  constexpr int kCalls = 8;
  std::vector<std::unique_ptr<testing::RawStream>> streams;
  for (int i = 0; i < kCalls; ++i) {
    streams.push_back(std::make_unique<testing::RawStream>(
        server_.NewChannel(), "/quantd.v1.EncodingService/GetStatistics"));
    ASSERT_TRUE(streams.back()->Write(request.SerializeAsString()));
  }
  ASSERT_TRUE(statistics_.AwaitBegun(1));
  grpc::ClientContext context;
  context.set_deadline(
      absl::ToChronoTime(absl::Now() + testing::kLongEnough / 4));
  v1::GetServerInfoResponse response;
  const grpc::Status status = server_.encodings().GetServerInfo(
      &context, v1::GetServerInfoRequest(), &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EndAll(streams);
}

TEST_F(EndlessStatisticsTest, KeepNoShortWriteOfTheCallerWaiting) {
  // More than there are threads for.
  const auto streams = Contribute(/*count=*/8, kManyFeatures);
  ASSERT_TRUE(statistics_.AwaitBegun(1));
  grpc::ClientContext context;
  context.set_deadline(
      absl::ToChronoTime(absl::Now() + testing::kLongEnough / 4));
  v1::DeleteStatisticsRequest request;
  *request.mutable_name() = NamedHeader().tensor().name();
  v1::DeleteStatisticsResponse response;
  const grpc::Status status =
      server_.encodings().DeleteStatistics(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EndAll(streams);
}

// A caller has two threads for those.
TEST_F(EndlessStatisticsTest, AGramMatrixOfOneTransactionIsAShortWrite) {
  const auto streams = Contribute(/*count=*/2, kFewFeatures);
  EXPECT_TRUE(statistics_.AwaitBegun(2));
  EndAll(streams);
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
    context.set_deadline(
        absl::ToChronoTime(absl::Now() + testing::kLongEnough));
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
}  // namespace quantd::server::tensor_stream_test
