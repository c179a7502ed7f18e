// Tensors in shared memory: the same answers as over the stream, and nothing
// that a client does with its memory or with the names of others' harms anyone.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "quantd/v1/shared_memory.pb.h"
#include "server/quantd_server.h"
#include "tests/support/count.h"
#include "tests/support/metric_value.h"
#include "tests/support/paths.h"
#include "tests/support/sanitizers.h"
#include "tests/support/server_process.h"
#include "tests/support/shared_region.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"

namespace quantd::testing::shared_memory_test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
// More than one quantum, and no multiple of a block.
constexpr int64_t kElements = (kSanitized ? 1 : 5) * kMiB + 4099;
constexpr absl::Duration kPatience = absl::Minutes(2);

// What a client process is told, in its environment.
constexpr char kChildAddress[] = "QUANTD_TEST_CHILD_ADDRESS";
constexpr char kChildRegion[] = "QUANTD_TEST_CHILD_REGION";

std::vector<float> Reals(int64_t count) {
  std::mt19937_64 random(count);
  std::normal_distribution<float> normal;
  std::vector<float> reals(count);
  for (float& real : reals) {
    real = normal(random);
    const uint64_t kind = random() % 1024;
    if (kind == 0) real = std::numeric_limits<float>::quiet_NaN();
    if (kind == 1) real = std::numeric_limits<float>::infinity();
    if (kind < 8) real *= 100;
  }
  return reals;
}

v1::TensorDescription Description(int64_t elements) {
  v1::TensorDescription description;
  description.mutable_name()->set_model("shared");
  description.mutable_name()->set_tensor("t");
  description.set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  description.add_shape(elements);
  return description;
}

v1::Encoding Int8() {
  v1::Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.02f);
  encoding.add_zero_point(0);
  return encoding;
}

v1::EncodingSpec Spec(v1::NumberFormat format) {
  v1::EncodingSpec spec;
  spec.set_format(format);
  return spec;
}

v1::QuantizeHeader Int8Header(int64_t elements) {
  v1::QuantizeHeader header;
  *header.mutable_tensor() = Description(elements);
  *header.mutable_encoding() = Int8();
  return header;
}

// Sends the requests on a stream of their own; all that is answered.
template <typename Request, typename Response>
struct Answers {
  std::vector<Response> responses;
  absl::Status status;
};

template <typename Request, typename Response>
Answers<Request, Response> Exchange(
    std::unique_ptr<grpc::ClientReaderWriter<Request, Response>> stream,
    const std::vector<Request>& requests) {
  Answers<Request, Response> answers;
  std::thread writer([&] {
    for (const Request& request : requests) {
      if (!stream->Write(request)) return;
    }
    stream->WritesDone();
  });
  Response response;
  while (stream->Read(&response)) answers.responses.push_back(response);
  writer.join();
  answers.status = FromGrpcStatus(stream->Finish());
  return answers;
}

Answers<v1::QuantizeRequest, v1::QuantizeResponse> ExchangeQuantize(
    v1::QuantizationService::Stub& stub,
    const std::vector<v1::QuantizeRequest>& requests) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::minutes(2));
  return Exchange(stub.Quantize(&context), requests);
}

// How the only tensor of `request` failed: "REASON at field", or "" if it did
// not.
std::string FailureOf(v1::QuantizationService::Stub& stub,
                      const v1::QuantizeRequest& request) {
  const auto answers = ExchangeQuantize(stub, {request});
  if (!answers.status.ok()) return answers.status.ToString();
  if (answers.responses.empty()) return "no answer";
  const v1::QuantizeResponse& last = answers.responses.back();
  if (!last.has_error()) return last.has_summary() ? "" : "no summary";
  return absl::StrCat(last.error().reason(), " at ", last.error().field());
}

class SharedMemoryTest : public ::testing::Test {
 protected:
  SharedMemoryTest() : SharedMemoryTest(server::ServerOptions()) {}
  explicit SharedMemoryTest(server::ServerOptions options)
      : server_(With(std::move(options))) {}

  server::ServerOptions With(server::ServerOptions options) {
    options.listen = {absl::StrCat("unix:", directory_.File("quantd")),
                      "127.0.0.1:0"};
    options.shared_memory = true;
    options.threads = 2;
    return options;
  }

  const std::string& address() const { return server_.address(); }
  v1::QuantizationService::Stub& stub() { return server_.quantization(); }

  std::unique_ptr<Client> NewClient() {
    ClientOptions options;
    options.target = address();
    options.shared_memory = true;
    absl::StatusOr<std::unique_ptr<Client>> client =
        Client::Connect(std::move(options));
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  // A tensor goes through shared memory and comes out right; what it took is
  // given back.
  void ExpectServing() {
    ControlConnection control(address());
    const int64_t count = 1000;
    const std::unique_ptr<SharedRegion> region = control.Allocate(5 * count);
    ASSERT_NE(region, nullptr);
    std::vector<float> reals(count);
    for (int64_t i = 0; i < count; ++i) {
      reals[i] = 0.02f * static_cast<float>(i % 100);
    }
    std::memcpy(region->bytes().data(), reals.data(), 4 * count);
    v1::QuantizeRequest request;
    *request.mutable_header() = Int8Header(count);
    *request.mutable_header()->mutable_output() =
        region->Span(4 * count, count);
    *request.mutable_shared() = region->Span(0, 4 * count);
    EXPECT_EQ(FailureOf(stub(), request), "");
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(region->bytes()[4 * count + i], i % 100) << i;
    }
  }

  // Nothing is left of regions whose connections are closed.
  void ExpectAllGivenBack() {
    EXPECT_TRUE(PollUntil(kPatience, [this] {
      return server_.server().memory_used_bytes() == 0;
    })) << server_.server().memory_used_bytes();
    for (const char* gauge :
         {"quantd_shared_memory_regions", "quantd_shared_memory_bytes"}) {
      EXPECT_TRUE(PollUntil(kPatience, [&] {
        return MetricValue(server_.metrics(), gauge) == 0;
      })) << gauge;
    }
  }

  // This program again, as another process, told by `environment` what to do.
  pid_t StartChild(const std::string& test,
                   const std::vector<std::string>& environment) {
    std::vector<std::string> arguments = {
        "/proc/self/exe", "--gtest_filter=SharedMemoryChild." + test,
        "--gtest_brief=1"};
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    std::vector<std::string> variables = environment;
    for (char** variable = environ; *variable != nullptr; ++variable) {
      variables.emplace_back(*variable);
    }
    std::vector<char*> envp;
    for (std::string& variable : variables) envp.push_back(variable.data());
    envp.push_back(nullptr);
    const pid_t child = vfork();
    if (child == 0) {
      execve(argv[0], argv.data(), envp.data());
      _exit(127);
    }
    EXPECT_GT(child, 0);
    return child;
  }

  TemporaryDirectory directory_;
  TestServer server_;
};

// --- The same answers ------------------------------------------------------

// A tensor's chunks: by turns in shared memory and in messages, or all in one.
template <typename Request, typename Header>
std::vector<Request> Requests(const Header& header, const SharedRegion& region,
                              int64_t size_bytes, int64_t chunk_bytes,
                              int64_t first_offset = 0) {
  std::vector<Request> requests;
  for (int64_t begin = 0; begin < size_bytes; begin += chunk_bytes) {
    const int64_t bytes = std::min(chunk_bytes, size_bytes - begin);
    Request request;
    if (begin == 0) *request.mutable_header() = header;
    request.set_offset(first_offset + begin);
    if (requests.size() % 3 == 2) {
      request.set_data(region.bytes().data() + begin, bytes);
    } else {
      *request.mutable_shared() = region.Span(begin, bytes);
    }
    requests.push_back(std::move(request));
  }
  return requests;
}

// Scales come in the message, whatever carries the elements.
TEST_F(SharedMemoryTest, BadScalesFailTheTensor) {
  constexpr int64_t kCount = 8;
  ControlConnection control(address());
  const auto region = control.Allocate(4 * kCount);
  ASSERT_NE(region, nullptr);
  v1::QuantizeRequest good;
  *good.mutable_header() = Int8Header(kCount);
  v1::Encoding& encoding = *good.mutable_header()->mutable_encoding();
  encoding.clear_scale();
  encoding.clear_zero_point();
  encoding.add_block_size(2);
  encoding.set_scales_in_chunks(true);
  encoding.set_chunks_have_zero_points(true);
  *good.mutable_shared() = region->Span(0, 4 * kCount);
  good.mutable_scales()->set_scale(ToBytes(std::vector<float>(4, 0.5f)));
  good.mutable_scales()->set_zero_point(std::string(4, '\0'));
  EXPECT_EQ(FailureOf(stub(), good), "");

  const struct {
    std::function<void(v1::ScaleChunk& chunk)> change;
    std::string failure;
  } cases[] = {
      {[](auto& chunk) { chunk.set_first(1); }, "SCALE_COUNT at scales.first"},
      {[](auto& chunk) { chunk.mutable_scale()->push_back('x'); },
       "SCALE_COUNT at scales.scale"},
      {[](auto& chunk) {
         chunk.set_scale(ToBytes(std::vector<float>(5, 0.5f)));
         chunk.set_zero_point(std::string(5, '\0'));
       },
       "SCALE_COUNT at scales.scale"},
      {[](auto& chunk) {
         chunk.set_scale(ToBytes(std::vector<float>(3, 0.5f)));
         chunk.set_zero_point(std::string(3, '\0'));
       },
       "SCALE_COUNT at scales.scale"},
      {[](auto& chunk) { chunk.clear_zero_point(); },
       "SCALE_COUNT at scales.zero_point"},
      {[](auto& chunk) { chunk.Clear(); }, "SCALE_COUNT at scales.scale"},
  };
  for (const auto& one : cases) {
    v1::QuantizeRequest request = good;
    one.change(*request.mutable_scales());
    EXPECT_EQ(FailureOf(stub(), request), one.failure);
  }
  ExpectServing();
}

TEST_F(SharedMemoryTest, QuantizesAsOverTheStream) {
  const std::vector<float> reals = Reals(kElements);
  const std::string data = ToBytes(reals);
  const int64_t size = static_cast<int64_t>(data.size());
  ControlConnection control(address());
  const auto in = control.Allocate(size);
  const auto out = control.Allocate(size);
  ASSERT_NE(in, nullptr);
  ASSERT_NE(out, nullptr);
  std::memcpy(in->bytes().data(), data.data(), size);

  std::vector<v1::QuantizeHeader> headers(6, Int8Header(kElements));
  headers[1].mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT4);
  headers[2].mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT12);
  headers[3].mutable_encoding()->Clear();
  *headers[3].mutable_spec() = Spec(v1::NUMBER_FORMAT_FLOAT8_E4M3FN);
  headers[4].mutable_encoding()->set_format(v1::NUMBER_FORMAT_UINT2);
  headers[4].mutable_range()->set_begin_bytes(4096);
  headers[4].mutable_range()->set_end_bytes(size);
  *headers[5].mutable_spec() = Spec(v1::NUMBER_FORMAT_INT4);
  headers[5].mutable_spec()->add_block_size(64);

  for (const v1::QuantizeHeader& header : headers) {
    SCOPED_TRACE(header.ShortDebugString());
    const int64_t first = header.has_range() ? 4096 : 0;
    const absl::StatusOr<QuantizeAnswer> expected =
        Quantize(stub(), header, absl::string_view(data).substr(first), kMiB);
    ASSERT_TRUE(expected.ok()) << expected.status();
    for (const int64_t chunk_bytes : {size, kMiB + 4096}) {
      for (const bool shares_output : {true, false}) {
        v1::QuantizeHeader shared = header;
        std::fill(out->bytes().begin(), out->bytes().end(), 0xA5);
        if (shares_output) {
          *shared.mutable_output() = out->Span(8, size - 8);
        }
        std::vector<v1::QuantizeRequest> requests =
            Requests<v1::QuantizeRequest>(shared, *in, size - first,
                                          chunk_bytes - first, first);
        for (v1::QuantizeRequest& request : requests) {
          if (request.has_shared()) {
            request.mutable_shared()->set_offset_bytes(request.offset());
          } else {
            request.set_data(
                data.substr(request.offset(), request.data().size()));
          }
        }
        const auto answers = ExchangeQuantize(stub(), requests);
        ASSERT_TRUE(answers.status.ok()) << answers.status;
        ASSERT_FALSE(answers.responses.empty());
        std::string codes;
        for (const v1::QuantizeResponse& response : answers.responses) {
          ASSERT_FALSE(response.has_error()) << response.ShortDebugString();
          codes += response.data();
        }
        if (shares_output) {
          EXPECT_EQ(codes, "");
          codes.assign(reinterpret_cast<const char*>(out->bytes().data()) + 8,
                       expected->codes.size());
          // Neither before nor behind it.
          EXPECT_EQ(out->bytes()[7], 0xA5);
          EXPECT_EQ(out->bytes()[8 + codes.size()], 0xA5);
        }
        EXPECT_TRUE(codes == expected->codes);
        EXPECT_EQ(answers.responses.front().header().SerializeAsString(),
                  expected->header.SerializeAsString());
        EXPECT_EQ(answers.responses.back().summary().SerializeAsString(),
                  expected->summary.SerializeAsString());
      }
    }
  }
}

TEST_F(SharedMemoryTest, RejectsTheFirstNonFiniteElementAsOverTheStream) {
  std::vector<float> reals(kElements, 1.0f);
  reals[kElements - 5] = std::numeric_limits<float>::quiet_NaN();
  reals[kElements - 700000] = std::numeric_limits<float>::infinity();
  const std::string data = ToBytes(reals);
  ControlConnection control(address());
  const auto region = control.Allocate(data.size());
  std::memcpy(region->bytes().data(), data.data(), data.size());
  v1::QuantizeHeader header = Int8Header(kElements);
  header.set_nan_policy(v1::NAN_POLICY_REJECT);
  const auto expected = Quantize(stub(), header, data, kMiB);
  v1::QuantizeRequest request;
  *request.mutable_header() = header;
  *request.mutable_shared() = region->Span(0, data.size());
  const auto answers = ExchangeQuantize(stub(), {request});
  ASSERT_FALSE(answers.responses.empty());
  const v1::TensorError& error = answers.responses.back().error();
  EXPECT_EQ(absl::StrCat(error.reason(), ": ", error.message()),
            expected.status().message());
}

TEST_F(SharedMemoryTest, DequantizesAsOverTheStream) {
  std::string codes(kElements, '\0');
  std::mt19937_64 random(1);
  for (char& code : codes) code = static_cast<char>(random());
  ControlConnection control(address());
  const auto in = control.Allocate(codes.size());
  const auto out = control.Allocate(codes.size() * 8);
  std::memcpy(in->bytes().data(), codes.data(), codes.size());
  for (const v1::NumberFormat format :
       {v1::NUMBER_FORMAT_INT8, v1::NUMBER_FORMAT_INT4,
        v1::NUMBER_FORMAT_FLOAT8_E5M2}) {
    for (const v1::ElementType type :
         {v1::ELEMENT_TYPE_FLOAT32, v1::ELEMENT_TYPE_BFLOAT16}) {
      const bool packed = format == v1::NUMBER_FORMAT_INT4;
      v1::DequantizeHeader header;
      *header.mutable_tensor() =
          Description(packed ? 2 * kElements - 1 : kElements);
      header.mutable_tensor()->set_element_type(type);
      *header.mutable_encoding() = Int8();
      header.mutable_encoding()->set_format(format);
      header.mutable_encoding()->clear_zero_point();
      SCOPED_TRACE(header.ShortDebugString());
      const auto expected = Dequantize(stub(), header, codes, kMiB);
      ASSERT_TRUE(expected.ok()) << expected.status();
      for (const int64_t chunk_bytes : {kElements, kMiB + 1024}) {
        std::fill(out->bytes().begin(), out->bytes().end(), 0xA5);
        v1::DequantizeHeader shared = header;
        *shared.mutable_output() = out->Span(0, out->bytes().size());
        grpc::ClientContext context;
        const auto answers = Exchange(stub().Dequantize(&context),
                                      Requests<v1::DequantizeRequest>(
                                          shared, *in, kElements, chunk_bytes));
        ASSERT_FALSE(answers.responses.empty());
        EXPECT_EQ(std::memcmp(out->bytes().data(), expected->reals.data(),
                              expected->reals.size()),
                  0);
        EXPECT_EQ(out->bytes()[expected->reals.size()], 0xA5);
        EXPECT_EQ(answers.responses.back().summary().SerializeAsString(),
                  expected->summary.SerializeAsString());
      }
    }
  }
}

TEST_F(SharedMemoryTest, CalibratesAndEvaluatesAsOverTheStream) {
  const std::string data = ToBytes(Reals(kElements));
  ControlConnection control(address());
  const auto region = control.Allocate(data.size());
  std::memcpy(region->bytes().data(), data.data(), data.size());
  v1::CalibrateHeader calibrate;
  *calibrate.mutable_tensor() = Description(kElements);
  *calibrate.mutable_spec() = Spec(v1::NUMBER_FORMAT_INT8);
  calibrate.mutable_spec()->set_method(v1::CALIBRATION_METHOD_MSE);
  v1::EvaluateHeader evaluate;
  *evaluate.mutable_tensor() = Description(kElements);
  *evaluate.add_candidates()->mutable_encoding() = Int8();
  *evaluate.add_candidates()->mutable_spec() = Spec(v1::NUMBER_FORMAT_INT4);
  evaluate.set_with_distribution(true);
  auto expected_calibration = Calibrate(stub(), calibrate, data, kMiB);
  const auto expected_evaluation = Evaluate(stub(), evaluate, data, kMiB);
  ASSERT_TRUE(expected_calibration.ok()) << expected_calibration.status();
  ASSERT_TRUE(expected_evaluation.ok()) << expected_evaluation.status();
  const auto without_store = [](v1::CalibrateSummary summary) {
    summary.mutable_stored_encoding()->clear_etag();
    summary.mutable_stored_encoding()->clear_generation();
    summary.mutable_stored_encoding()->clear_update_time();
    return summary.SerializeAsString();
  };
  const int64_t size = static_cast<int64_t>(data.size());
  for (const int64_t chunk_bytes : {size, kMiB + 4096}) {
    grpc::ClientContext calibrate_context;
    const auto calibrated = Exchange(
        stub().Calibrate(&calibrate_context),
        Requests<v1::CalibrateRequest>(calibrate, *region, size, chunk_bytes));
    ASSERT_EQ(calibrated.responses.size(), 1u);
    EXPECT_EQ(without_store(calibrated.responses[0].summary()),
              without_store(*expected_calibration));
    grpc::ClientContext evaluate_context;
    const auto evaluated = Exchange(
        stub().Evaluate(&evaluate_context),
        Requests<v1::EvaluateRequest>(evaluate, *region, size, chunk_bytes));
    ASSERT_EQ(evaluated.responses.size(), 1u);
    EXPECT_EQ(evaluated.responses[0].summary().SerializeAsString(),
              expected_evaluation->SerializeAsString());
  }
}

// Of this process, where the server is.
int64_t ResidentBytes() {
  int64_t pages = 0;
  int64_t resident_pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident_pages;
  return resident_pages * sysconf(_SC_PAGESIZE);
}

TEST_F(SharedMemoryTest, StreamsKeepNoCopyOfWhatWasShared) {
  if (kSanitized) GTEST_SKIP() << "sanitizers keep what was freed";
  constexpr int64_t kCount = kMiB;
  constexpr int kStreams = 64;
  ControlConnection control(address());
  const auto region = control.Allocate(4 * kCount);
  v1::EvaluateRequest request;
  *request.mutable_header()->mutable_tensor() = Description(kCount);
  *request.mutable_header()->add_candidates()->mutable_encoding() = Int8();
  *request.mutable_shared() = region->Span(0, 4 * kCount);
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<
      grpc::ClientReaderWriter<v1::EvaluateRequest, v1::EvaluateResponse>>>
      streams;
  int64_t resident_bytes = 0;
  for (int i = 0; i < kStreams; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    streams.push_back(stub().Evaluate(contexts.back().get()));
    ASSERT_TRUE(streams.back()->Write(request));
    v1::EvaluateResponse response;
    ASSERT_TRUE(streams.back()->Read(&response));
    EXPECT_TRUE(response.has_summary()) << response.ShortDebugString();
    if (i == 0) resident_bytes = ResidentBytes();
  }
  // With a copy of 4 MiB each it would be 252 MiB.
  EXPECT_LT(ResidentBytes() - resident_bytes, 64 * kMiB);
  for (const auto& stream : streams) {
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }
}

// --- The C++ client --------------------------------------------------------

TEST_F(SharedMemoryTest, ClientsGoByNameWhereTheirDataAreShared) {
  const std::unique_ptr<Client> client = NewClient();
  const std::string data = ToBytes(Reals(kElements));
  auto in = client->AllocateShared(data.size());
  auto out = client->AllocateShared(kElements);
  ASSERT_TRUE(in.ok()) << in.status();
  ASSERT_TRUE(out.ok()) << out.status();
  std::memcpy((*in)->bytes().data(), data.data(), data.size());
  QuantizeJob job;
  job.tensor.shape = {kElements};
  job.source = Int8();
  const absl::Span<const uint8_t> elsewhere(
      reinterpret_cast<const uint8_t*>(data.data()), data.size());
  job.tensor.data = elsewhere;
  const auto expected = client->Quantize(job);
  ASSERT_TRUE(expected.ok()) << expected.status();
  // All four ways: data and output, shared or not.
  for (const bool shares_data : {false, true}) {
    for (const bool shares_output : {false, true}) {
      std::fill((*out)->bytes().begin(), (*out)->bytes().end(), 0xA5);
      job.tensor.data =
          shares_data ? (*in)->bytes().subspan(0, data.size()) : elsewhere;
      job.output = shares_output ? (*out)->bytes() : absl::Span<uint8_t>();
      const auto result = client->Quantize(job);
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_TRUE(result->codes == expected->codes);
      EXPECT_EQ(result->summary.checksum_xxh3(),
                expected->summary.checksum_xxh3());
      if (shares_output) {
        EXPECT_EQ(result->codes.data(), (*out)->bytes().data());
      }
    }
  }
  DequantizeJob back;
  back.tensor.shape = {kElements};
  back.tensor.data = (*out)->bytes().subspan(0, kElements);
  back.source = Int8();
  back.output = (*in)->bytes();
  const auto reals = client->Dequantize(back);
  ASSERT_TRUE(reals.ok()) << reals.status();
  EXPECT_EQ(reals->elements.data(), (*in)->bytes().data());
  EXPECT_EQ(reals->elements.size(), data.size());
  CalibrateJob calibrate;
  calibrate.tensor.shape = {kElements};
  calibrate.tensor.data = (*in)->bytes().subspan(0, data.size());
  const auto calibrated = client->Calibrate(calibrate);
  ASSERT_TRUE(calibrated.ok()) << calibrated.status();
  EXPECT_EQ(calibrated->statistics().count(), kElements);
  const double bytes_in =
      MetricValue(server_.metrics(), "quantd_payload_bytes_total");
  EXPECT_GT(bytes_in, 0);
  in->reset();
  out->reset();
  ExpectAllGivenBack();
}

TEST_F(SharedMemoryTest, ClientsThatCantShareSaySo) {
  const auto allocate = [](const std::string& target, bool shared_memory,
                           absl::Duration timeout = absl::Seconds(5)) {
    ClientOptions options;
    options.target = target;
    options.shared_memory = shared_memory;
    options.timeout = timeout;
    return Client::Connect(std::move(options))
        .value()
        ->AllocateShared(4096)
        .status();
  };
  EXPECT_EQ(ErrorReason(allocate(address(), false)), "ARGUMENT_INVALID");
  EXPECT_EQ(ErrorReason(allocate(server_.server().addresses()[1], true)),
            "SHARED_MEMORY_UNAVAILABLE");
  EXPECT_EQ(ErrorReason(allocate(address() + "-nobody", true)),
            "SHARED_MEMORY_UNAVAILABLE");
  EXPECT_TRUE(allocate(address(), true, kPatience).ok());
}

TEST(SharedMemoryClientTest, ALostServerTakesTheRegionsWithIt) {
  const TemporaryDirectory directory;
  server::ServerOptions server_options;
  server_options.listen = {absl::StrCat("unix:", directory.File("quantd"))};
  server_options.shared_memory = true;
  auto server = std::make_unique<TestServer>(server_options);
  ClientOptions options;
  options.target = server->address();
  options.shared_memory = true;
  const std::unique_ptr<Client> client = Client::Connect(options).value();
  const std::unique_ptr<SharedBuffer> buffer =
      client->AllocateShared(4000).value();
  QuantizeJob job;
  job.tensor.shape = {1000};
  job.tensor.data = buffer->bytes().subspan(0, 4000);
  job.source = Int8();
  EXPECT_TRUE(client->Quantize(job).ok());
  server = nullptr;
  server = std::make_unique<TestServer>(server_options);
  EXPECT_EQ(ErrorReason(client->Quantize(job).status()), "REGION_NOT_FOUND");
  const std::unique_ptr<SharedBuffer> fresh =
      client->AllocateShared(4000).value();
  job.tensor.data = fresh->bytes().subspan(0, 4000);
  EXPECT_TRUE(client->Quantize(job).ok());
}

// --- Who may name what -----------------------------------------------------

TEST_F(SharedMemoryTest, ChecksEverySpan) {
  ControlConnection control(address());
  const auto region = control.Allocate(8192);
  ASSERT_NE(region, nullptr);
  const uint64_t size = region->bytes().size();
  const auto request = [&](const v1::SharedSpan& span) {
    v1::QuantizeRequest message;
    *message.mutable_header() = Int8Header(256);
    *message.mutable_shared() = span;
    return message;
  };
  const auto shared = [&](uint64_t offset, uint64_t bytes) {
    return FailureOf(stub(), request(region->Span(offset, bytes)));
  };
  constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();
  const std::string out_of_bounds = "REGION_INVALID at shared.size_bytes";
  EXPECT_EQ(shared(0, 1024), "");
  EXPECT_EQ(shared(size - 1024, 1024), "");
  EXPECT_EQ(shared(size - 1016, 1024), out_of_bounds);
  EXPECT_EQ(shared(size, 1024), out_of_bounds);
  EXPECT_EQ(shared(size + 8, 0), out_of_bounds);
  EXPECT_EQ(shared(8, kMax), out_of_bounds);
  EXPECT_EQ(shared(kMax - 7, 8), out_of_bounds);
  EXPECT_EQ(shared(kMax - 7, kMax), out_of_bounds);
  EXPECT_EQ(shared(uint64_t{1} << 63, uint64_t{1} << 63), out_of_bounds);
  EXPECT_EQ(shared(4, 1024), "REGION_INVALID at shared.offset_bytes");
  EXPECT_EQ(shared(0, 1032), "TENSOR_TOO_LONG at ");
  EXPECT_EQ(shared(0, 1023), "CHUNK_ALIGNMENT at ");
  EXPECT_EQ(shared(0, 1016), "TENSOR_INCOMPLETE at ");
  EXPECT_EQ(shared(0, 0), "TENSOR_INCOMPLETE at ");

  v1::QuantizeRequest both = request(region->Span(0, 1024));
  both.set_data(std::string(1024, '\0'));
  EXPECT_EQ(FailureOf(stub(), both), "REGION_INVALID at shared");

  const auto output = [&](uint64_t offset, uint64_t bytes) {
    v1::QuantizeRequest message = request(region->Span(0, 1024));
    *message.mutable_header()->mutable_output() = region->Span(offset, bytes);
    return FailureOf(stub(), message);
  };
  EXPECT_EQ(output(1024, 256), "");
  EXPECT_EQ(output(size - 256, 256), "");
  EXPECT_EQ(output(1024, 255), "REGION_INVALID at header.output");
  EXPECT_EQ(output(1028, 256), "REGION_INVALID at header.output.offset_bytes");
  EXPECT_EQ(output(size - 248, 256),
            "REGION_INVALID at header.output.size_bytes");
  EXPECT_EQ(output(kMax - 7, 256),
            "REGION_INVALID at header.output.size_bytes");
  // Codes would overwrite reals that are still to be read.
  EXPECT_EQ(output(0, 256), "REGION_INVALID at shared");
  EXPECT_EQ(output(1016, 1024), "REGION_INVALID at shared");

  v1::DequantizeHeader reals;
  *reals.mutable_tensor() = Description(256);
  *reals.mutable_encoding() = Int8();
  *reals.mutable_output() = region->Span(0, 1023);
  EXPECT_EQ(Dequantize(stub(), reals, std::string(256, '\1')).status().code(),
            absl::StatusCode::kInvalidArgument);
  v1::DequantizeRequest onto_itself;
  *onto_itself.mutable_header() = reals;
  *onto_itself.mutable_header()->mutable_output() = region->Span(128, 1024);
  *onto_itself.mutable_shared() = region->Span(0, 256);
  grpc::ClientContext context;
  const auto answers =
      Exchange(stub().Dequantize(&context), {onto_itself}).responses;
  ASSERT_FALSE(answers.empty());
  EXPECT_EQ(answers.back().error().reason(), "REGION_INVALID");
  EXPECT_EQ(answers.back().error().field(), "shared");
}

TEST_F(SharedMemoryTest, NamesOnlyWhatIsThere) {
  auto control = std::make_unique<ControlConnection>(address());
  const auto region = control->Allocate(4096);
  const auto named = [&](const std::string& id) {
    v1::QuantizeRequest message;
    *message.mutable_header() = Int8Header(256);
    *message.mutable_shared() = region->Span(0, 1024);
    message.mutable_shared()->set_region_id(id);
    return FailureOf(stub(), message);
  };
  const std::string not_found = "REGION_NOT_FOUND at shared.region_id";
  std::string similar = region->id();
  similar[15] ^= 1;
  EXPECT_EQ(named(region->id()), "");
  EXPECT_EQ(named(similar), not_found);
  EXPECT_EQ(named(""), not_found);
  EXPECT_EQ(named(region->id().substr(0, 15)), not_found);
  EXPECT_EQ(named(region->id() + region->id()), not_found);
  EXPECT_EQ(named(std::string(1 << 20, 'x')), not_found);
  control->Close();
  EXPECT_TRUE(
      PollUntil(kPatience, [&] { return named(region->id()) == not_found; }));
  ExpectAllGivenBack();
}

TEST_F(SharedMemoryTest, StreamsOverOtherSocketsNameNothing) {
  ControlConnection control(address());
  const auto region = control.Allocate(4096);
  v1::QuantizeRequest message;
  *message.mutable_header() = Int8Header(256);
  *message.mutable_shared() = region->Span(0, 1024);
  const auto tcp = v1::QuantizationService::NewStub(grpc::CreateChannel(
      server_.server().addresses()[1], grpc::InsecureChannelCredentials()));
  EXPECT_EQ(FailureOf(*tcp, message), "REGION_NOT_FOUND at shared.region_id");
  EXPECT_EQ(FailureOf(stub(), message), "");
}

TEST(SharedMemoryOffTest, AServerWithoutItKnowsNoRegions) {
  TestServer server;
  v1::QuantizeRequest message;
  *message.mutable_header() = Int8Header(256);
  message.mutable_shared()->set_size_bytes(1024);
  EXPECT_EQ(FailureOf(server.quantization(), message),
            "REGION_NOT_FOUND at shared.region_id");
}

// Of SharedMemoryTest.AStolenIdIsAsGoodAsNone: exit code 0 when the region of
// the parent is not found, in the words for one that does not exist.
TEST(SharedMemoryChild, NamesARegionOfItsParent) {
  const char* const address = std::getenv(kChildAddress);
  const char* const region = std::getenv(kChildRegion);
  if (address == nullptr || region == nullptr) GTEST_SKIP();
  const auto stub = v1::QuantizationService::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  std::vector<std::string> texts;
  for (const std::string& id :
       {absl::HexStringToBytes(region), std::string(16, 'x')}) {
    v1::QuantizeRequest message;
    *message.mutable_header() = Int8Header(256);
    message.mutable_shared()->set_region_id(id);
    message.mutable_shared()->set_size_bytes(1024);
    const auto answers = ExchangeQuantize(*stub, {message});
    ASSERT_EQ(answers.responses.size(), 1u);
    texts.push_back(answers.responses[0].error().SerializeAsString());
    EXPECT_EQ(answers.responses[0].error().reason(), "REGION_NOT_FOUND");
  }
  EXPECT_EQ(texts[0], texts[1]);
}

TEST_F(SharedMemoryTest, AStolenIdIsAsGoodAsNone) {
  ControlConnection control(address());
  const auto region = control.Allocate(4096);
  const pid_t child = StartChild(
      "NamesARegionOfItsParent",
      {absl::StrCat(kChildAddress, "=", address()),
       absl::StrCat(kChildRegion, "=", absl::BytesToHexString(region->id()))});
  int state = 0;
  ASSERT_EQ(waitpid(child, &state, 0), child);
  EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << state;
}

// --- What a client does with its memory ------------------------------------

TEST_F(SharedMemoryTest, RegionsKeepTheirSizeAndTheirSeals) {
  ControlConnection control(address());
  const auto region = control.Allocate(4097);
  ASSERT_NE(region, nullptr);
  const int page_bytes = getpagesize();
  EXPECT_EQ(static_cast<int>(region->bytes().size()), 2 * page_bytes);
  for (const off_t size : {0, page_bytes, 3 * page_bytes}) {
    EXPECT_EQ(ftruncate(region->file(), size), -1);
    EXPECT_EQ(errno, EPERM);
  }
  EXPECT_EQ(fcntl(region->file(), F_ADD_SEALS, F_SEAL_WRITE), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(fcntl(region->file(), F_GET_SEALS),
            F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  EXPECT_TRUE(std::all_of(region->bytes().begin(), region->bytes().end(),
                          [](uint8_t byte) { return byte == 0; }));
}

TEST_F(SharedMemoryTest, SurvivesDataThatChangeMeanwhile) {
  ControlConnection control(address());
  const int64_t count = 300001;
  const int64_t size = 4 * count;
  const auto in = control.Allocate(size);
  const auto out = control.Allocate(size);
  std::atomic<bool> stops{false};
  // One overwrites with everything that floats can be, one punches holes.
  std::thread scribbler([&] {
    std::mt19937_64 random(5);
    std::vector<uint64_t> noise(4096);
    while (!stops.load()) {
      for (uint64_t& word : noise) {
        word = random() % 2 == 0 ? random() : 0x7FC00000FF800000;
      }
      for (const auto& region : {in.get(), out.get()}) {
        const size_t words = region->bytes().size() / 8;
        const size_t begin = random() % (words - noise.size());
        std::memcpy(region->bytes().data() + 8 * begin, noise.data(),
                    8 * noise.size());
      }
    }
  });
  std::thread puncher([&] {
    constexpr int64_t kHoleBytes = 256 << 10;
    std::mt19937_64 random(6);
    while (!stops.load()) {
      const auto begin = static_cast<off_t>(random() % (size - kHoleBytes));
      for (const auto& region : {in.get(), out.get()}) {
        ASSERT_EQ(fallocate(region->file(),
                            FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin,
                            kHoleBytes),
                  0);
      }
    }
  });
  std::vector<v1::QuantizeHeader> quantize;
  for (const v1::NumberFormat format :
       {v1::NUMBER_FORMAT_INT8, v1::NUMBER_FORMAT_INT4, v1::NUMBER_FORMAT_UINT2,
        v1::NUMBER_FORMAT_INT12, v1::NUMBER_FORMAT_FLOAT8_E4M3FN,
        v1::NUMBER_FORMAT_FLOAT4_E2M1, v1::NUMBER_FORMAT_NF4,
        v1::NUMBER_FORMAT_MXFP4_E2M1, v1::NUMBER_FORMAT_NVFP4}) {
    for (const bool rejects : {false, true}) {
      v1::QuantizeHeader header;
      *header.mutable_tensor() = Description(count);
      *header.mutable_spec() = Spec(format);
      if (rejects) header.set_nan_policy(v1::NAN_POLICY_REJECT);
      *header.mutable_output() = out->Span(0, size);
      quantize.push_back(header);
      if (format == v1::NUMBER_FORMAT_INT8 ||
          format == v1::NUMBER_FORMAT_INT4) {
        *header.mutable_encoding() = Int8();
        header.mutable_encoding()->set_format(format);
        quantize.push_back(header);
      }
    }
  }
  v1::DequantizeHeader dequantize;
  *dequantize.mutable_tensor() = Description(count);
  *dequantize.mutable_encoding() = Int8();
  *dequantize.mutable_output() = out->Span(0, size);
  v1::CalibrateHeader calibrate;
  *calibrate.mutable_tensor() = Description(count);
  *calibrate.mutable_spec() = Spec(v1::NUMBER_FORMAT_INT8);
  calibrate.mutable_spec()->set_method(v1::CALIBRATION_METHOD_MSE);
  v1::EvaluateHeader evaluate;
  *evaluate.mutable_tensor() = Description(count);
  *evaluate.add_candidates()->mutable_encoding() = Int8();
  *evaluate.add_candidates()->mutable_spec() = Spec(v1::NUMBER_FORMAT_NF4);
  evaluate.set_with_distribution(true);

  const absl::Time end = absl::Now() + absl::Seconds(kSanitized ? 1 : 2);
  int rounds = 0;
  do {
    for (const v1::QuantizeHeader& header : quantize) {
      v1::QuantizeRequest request;
      *request.mutable_header() = header;
      *request.mutable_shared() = in->Span(0, size);
      const auto answers = ExchangeQuantize(stub(), {request});
      ASSERT_TRUE(answers.status.ok()) << answers.status;
      ASSERT_FALSE(answers.responses.empty());
    }
    v1::DequantizeRequest codes;
    *codes.mutable_header() = dequantize;
    *codes.mutable_shared() = in->Span(0, count);
    grpc::ClientContext context1;
    ASSERT_FALSE(
        Exchange(stub().Dequantize(&context1), {codes}).responses.empty());
    v1::CalibrateRequest statistics;
    *statistics.mutable_header() = calibrate;
    *statistics.mutable_shared() = in->Span(0, size);
    grpc::ClientContext context2;
    ASSERT_FALSE(
        Exchange(stub().Calibrate(&context2), {statistics}).responses.empty());
    v1::EvaluateRequest metrics;
    *metrics.mutable_header() = evaluate;
    *metrics.mutable_shared() = in->Span(0, size);
    grpc::ClientContext context3;
    ASSERT_FALSE(
        Exchange(stub().Evaluate(&context3), {metrics}).responses.empty());
    ++rounds;
  } while (absl::Now() < end);
  stops.store(true);
  scribbler.join();
  puncher.join();
  EXPECT_GT(rounds, 0);
  ExpectServing();
}

TEST_F(SharedMemoryTest, WorkGoesOnWhenTheClientLetsGo) {
  const std::string data = ToBytes(Reals(kElements));
  auto control = std::make_unique<ControlConnection>(address());
  auto region = control->Allocate(data.size());
  std::memcpy(region->bytes().data(), data.data(), data.size());
  grpc::ClientContext context;
  const auto stream = stub().Quantize(&context);
  v1::QuantizeRequest request;
  *request.mutable_header() = Int8Header(kElements);
  *request.mutable_shared() = region->Span(0, data.size());
  ASSERT_TRUE(stream->Write(request));
  // The first codes have come: the server is at work, and can't go on far
  // until they are read.
  v1::QuantizeResponse response;
  ASSERT_TRUE(stream->Read(&response));
  region = nullptr;
  control->Close();
  std::string codes = response.data();
  while (!response.has_summary() && stream->Read(&response)) {
    codes += response.data();
  }
  EXPECT_EQ(response.summary().count(), kElements);
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  const auto expected = Quantize(stub(), Int8Header(kElements), data, kMiB);
  EXPECT_TRUE(codes == expected->codes);
  ExpectAllGivenBack();
}

// Of SharedMemoryTest.AKilledClientLeavesNothingBehind: quantizes over and over
// until it is killed.
TEST(SharedMemoryChild, QuantizesForEver) {
  const char* const address = std::getenv(kChildAddress);
  if (address == nullptr) GTEST_SKIP();
  ClientOptions options;
  options.target = address;
  options.shared_memory = true;
  const std::unique_ptr<Client> client = Client::Connect(options).value();
  const std::unique_ptr<SharedBuffer> in =
      client->AllocateShared(4 * kElements).value();
  const std::unique_ptr<SharedBuffer> out =
      client->AllocateShared(kElements).value();
  QuantizeJob job;
  job.tensor.shape = {kElements};
  job.tensor.data = in->bytes().subspan(0, 4 * kElements);
  job.source = Int8();
  job.output = out->bytes();
  const std::unique_ptr<QuantizeStream> stream = client->OpenQuantize();
  for (int i = 0; i < 8; ++i) stream->Send(job);
  for (;;) {
    stream->Send(job);
    if (!stream->Receive().ok()) return;
  }
}

TEST_F(SharedMemoryTest, AKilledClientLeavesNothingBehind) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 3; ++i) {
    const double before =
        MetricValue(server_.metrics(), "quantd_elements_total");
    const pid_t child = StartChild(
        "QuantizesForEver", {absl::StrCat(kChildAddress, "=", address())});
    // It is in the middle of some tensor.
    const double already = std::isnan(before) ? 0 : before;
    EXPECT_TRUE(PollUntil(kPatience, [&] {
      return MetricValue(server_.metrics(), "quantd_elements_total") >=
             already + 3.0 * kElements;
    }));
    EXPECT_GT(server_.server().memory_used_bytes(), 5 * kElements);
    absl::SleepFor(absl::Microseconds(random() % 3000));
    kill(child, SIGKILL);
    ASSERT_EQ(waitpid(child, nullptr, 0), child);
    ExpectAllGivenBack();
    ExpectServing();
  }
}

// --- Limits ----------------------------------------------------------------

class SharedMemoryLimitTest : public SharedMemoryTest {
 protected:
  static server::ServerOptions Options() {
    server::ServerOptions options;
    options.limits.memory_budget_bytes = 40 * kMiB;
    options.limits.shared_connections = 3;
    options.limits.shared_regions = 4;
    return options;
  }
  SharedMemoryLimitTest() : SharedMemoryTest(Options()) {}
};

TEST_F(SharedMemoryLimitTest, RegionsCountAgainstTheMemoryBudget) {
  ControlConnection control(address());
  v1::RegionReply reply;
  const auto reason = [&](uint64_t size) {
    reply.Clear();
    control.Allocate(size, &reply);
    return reply.error().reason();
  };
  EXPECT_EQ(reason(0), "REGION_INVALID");
  EXPECT_EQ(reason(40 * kMiB + 1), "MEMORY_BUDGET");
  EXPECT_EQ(reply.error().retry_after_ms(), 0u);
  EXPECT_EQ(reason(std::numeric_limits<uint64_t>::max()), "MEMORY_BUDGET");
  EXPECT_EQ(reason(uint64_t{1} << 63), "MEMORY_BUDGET");
  auto region = control.Allocate(30 * kMiB);
  ASSERT_NE(region, nullptr);
  EXPECT_EQ(server_.server().memory_used_bytes(), 30 * kMiB);
  EXPECT_EQ(reason(11 * kMiB), "MEMORY_BUDGET");
  EXPECT_GT(reply.error().retry_after_ms(), 0u);
  ControlConnection other(address());
  EXPECT_NE(other.Allocate(10 * kMiB), nullptr);
  EXPECT_EQ(server_.server().memory_used_bytes(), 40 * kMiB);
  control.Close();
  EXPECT_TRUE(PollUntil(kPatience, [this] {
    return server_.server().memory_used_bytes() == 10 * kMiB;
  }));
  EXPECT_NE(other.Allocate(30 * kMiB), nullptr);
}

TEST_F(SharedMemoryLimitTest, BoundsRegionsAndConnections) {
  ControlConnection first(address());
  v1::RegionReply reply;
  for (int i = 0; i < 4; ++i) EXPECT_NE(first.Allocate(1), nullptr);
  EXPECT_EQ(first.Allocate(1, &reply), nullptr);
  EXPECT_EQ(reply.error().reason(), "REGION_LIMIT");
  auto second = std::make_unique<ControlConnection>(address());
  auto third = std::make_unique<ControlConnection>(address());
  EXPECT_NE(second->Allocate(1), nullptr);
  EXPECT_NE(third->Allocate(1), nullptr);
  {
    ControlConnection fourth(address());
    int file = -1;
    const auto told = fourth.Receive(&file);
    ASSERT_TRUE(told.has_value());
    EXPECT_EQ(told->error().reason(), "REGION_LIMIT");
    EXPECT_EQ(file, -1);
    EXPECT_FALSE(fourth.Receive(&file).has_value());
  }
  EXPECT_EQ(MetricValue(server_.metrics(), "quantd_shared_memory_regions"), 6);
  second = nullptr;
  EXPECT_TRUE(PollUntil(kPatience, [this] {
    return ControlConnection(address()).Allocate(1) != nullptr;
  }));
}

TEST_F(SharedMemoryTest, ControlSocketsTakeAnyPacket) {
  ControlConnection control(address());
  int file = -1;
  const auto reason = [&](const std::string& packet) -> std::string {
    if (!control.Send(packet)) return "closed";
    const auto reply = control.Receive(&file);
    if (!reply.has_value()) return "closed";
    EXPECT_EQ(file >= 0, !reply->has_error());
    if (file >= 0) close(file);
    return reply->error().reason();
  };
  EXPECT_EQ(reason("garbage"), "MESSAGE_MALFORMED");
  EXPECT_EQ(reason(""), "REGION_INVALID");
  EXPECT_EQ(reason(std::string(4097, '\0')), "MESSAGE_MALFORMED");
  EXPECT_EQ(reason(std::string(100000, '\x08')), "MESSAGE_MALFORMED");
  v1::RegionRequest request;
  request.set_size_bytes(1);
  EXPECT_EQ(reason(request.SerializeAsString()), "");
  // One that does not read its replies is cut off.
  while (control.Send(request.SerializeAsString())) {
  }
  ExpectAllGivenBack();
  ExpectServing();
}

// --- The sockets -----------------------------------------------------------

int OpenFiles() {
  int count = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    static_cast<void>(entry);
    ++count;
  }
  return count;
}

TEST_F(SharedMemoryTest, ConnectionsLeaveNothingOpen) {
  ExpectServing();
  const int before = OpenFiles();
  const int connections = kSanitized ? 100 : 1000;
  for (int i = 0; i < connections; ++i) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto stub =
        v1::QuantizationService::NewStub(grpc::CreateCustomChannel(
            address(), grpc::InsecureChannelCredentials(), arguments));
    ASSERT_TRUE(
        Quantize(*stub, Int8Header(2), ToBytes(std::vector<float>{1, 2})).ok());
  }
  EXPECT_TRUE(PollUntil(kPatience, [&] { return OpenFiles() <= before; }))
      << OpenFiles() << " of " << before;
}

TEST_F(SharedMemoryTest, DrainsWhileRegionsAreHeld) {
  ControlConnection control(address());
  const auto region = control.Allocate(16 * kMiB);
  ASSERT_NE(region, nullptr);
  grpc::ClientContext context;
  const auto stream = stub().Quantize(&context);
  v1::QuantizeRequest request;
  *request.mutable_header() = Int8Header(4 * kMiB);
  *request.mutable_shared() = region->Span(0, 16 * kMiB);
  ASSERT_TRUE(stream->Write(request));
  v1::QuantizeResponse response;
  ASSERT_TRUE(stream->Read(&response));
  std::thread drain([this] { server_.server().Drain(); });
  // What had begun is finished; then the stream is turned away.
  while (!response.has_summary() && stream->Read(&response)) {
  }
  EXPECT_EQ(response.summary().count(), 4u * kMiB);
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(FromGrpcStatus(stream->Finish()).code(),
            absl::StatusCode::kUnavailable);
  drain.join();
  const std::string path = directory_.File("quantd");
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_FALSE(std::filesystem::exists(path + ".memory"));
  EXPECT_EQ(server_.server().memory_used_bytes(), 0);
}

TEST(SharedMemorySocketTest, StaleSocketsAreReplacedAndForeignOnesKept) {
  const TemporaryDirectory directory;
  const std::string store = directory.File("encodings.db");
  const std::string path = directory.File("quantd");
  const std::vector<std::string> flags = {"--listen", "unix:" + path,
                                          "--shared-memory"};
  {
    ServerProcess killed(QuantdBinary(), store, flags);
    killed.Kill();
  }
  EXPECT_TRUE(std::filesystem::exists(path + ".memory"));
  ServerProcess first(QuantdBinary(), store, flags);
  EXPECT_NE(ControlConnection("unix:" + path).Allocate(1), nullptr);
  // Somebody cleans up too much, and another server comes.
  std::filesystem::remove(path);
  std::filesystem::remove(path + ".memory");
  ServerProcess second(QuantdBinary(), store, flags);
  EXPECT_EQ(first.Terminate(), 0);
  // The sockets are the second one's.
  EXPECT_NE(ControlConnection("unix:" + path).Allocate(1), nullptr);
  EXPECT_EQ(second.Terminate(), 0);
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_FALSE(std::filesystem::exists(path + ".memory"));
}

// --- Anything at all -------------------------------------------------------

TEST_F(SharedMemoryTest, SurvivesRandomMisuse) {
  std::mt19937_64 random(2026);
  const auto pick = [&](const std::vector<uint64_t>& values) {
    return values[random() % values.size()];
  };
  constexpr uint64_t kRegionBytes = 1 << 16;
  const auto control = std::make_unique<ControlConnection>(address());
  const auto kept = control->Allocate(kRegionBytes);
  ASSERT_NE(kept, nullptr);
  auto loose = std::make_unique<ControlConnection>(address());
  auto lost = loose->Allocate(kRegionBytes);
  const auto span = [&] {
    v1::SharedSpan named;
    switch (random() % 6) {
      case 0:
        named.set_region_id(std::string(random() % 20, 'x'));
        break;
      case 1:
        if (lost != nullptr) named.set_region_id(lost->id());
        break;
      default:
        named.set_region_id(kept->id());
    }
    named.set_offset_bytes(
        pick({0, 0, 0, 8, 4, 1024, kRegionBytes - 8, kRegionBytes,
              kRegionBytes + 8, uint64_t{1} << 63, ~uint64_t{7}, random()}));
    named.set_size_bytes(
        pick({0, 4, 1024, 1024, 4096, 4096, 4095, 4100, kRegionBytes,
              kRegionBytes + 8, ~uint64_t{0}, random()}));
    return named;
  };
  const int64_t sequences = Count("QUANTD_SHARED_MISUSES", 1000);
  int good = 0;
  for (int64_t i = 0; i < sequences; ++i) {
    if (random() % 50 == 0) {
      // Its regions go while others work, and maybe while they are used.
      if (random() % 2 == 0) loose->Send(std::string(random() % 9, '\x7F'));
      loose = std::make_unique<ControlConnection>(address());
      lost = loose->Allocate(pick({0, 1, kRegionBytes, ~uint64_t{0}}));
    }
    std::vector<v1::QuantizeRequest> requests;
    int opened = 0;
    for (size_t n = 1 + random() % 4; n > 0; --n) {
      v1::QuantizeRequest request;
      if (requests.empty() ? random() % 64 != 0 : random() % 2 == 0) {
        *request.mutable_header() =
            Int8Header(static_cast<int64_t>(pick({0, 1, 256, 1024, 1024})));
        if (random() % 4 == 0) {
          *request.mutable_header()->mutable_spec() =
              Spec(v1::NUMBER_FORMAT_INT4);
        }
        if (random() % 2 == 0) {
          *request.mutable_header()->mutable_output() = span();
        }
        ++opened;
      }
      if (random() % 4 != 0) *request.mutable_shared() = span();
      if (random() % 8 == 0) request.set_data(std::string(random() % 64, 'd'));
      request.set_offset(pick({0, 0, 0, 1024, random()}));
      requests.push_back(std::move(request));
    }
    const auto answers = ExchangeQuantize(stub(), requests);
    int ended = 0;
    for (const v1::QuantizeResponse& response : answers.responses) {
      if (response.has_summary()) ++good;
      if (response.has_summary() || response.has_error()) ++ended;
      if (response.has_error()) {
        ASSERT_FALSE(response.error().reason().empty());
        ASSERT_NE(response.error().reason(), "INTERNAL");
      }
    }
    if (answers.status.ok()) {
      ASSERT_EQ(ended, opened) << i;
    } else {
      ASSERT_EQ(answers.status.code(), absl::StatusCode::kInvalidArgument)
          << answers.status;
    }
  }
  // Some of it was right.
  EXPECT_GT(good, sequences / 100);
  control->Close();
  loose->Close();
  ExpectAllGivenBack();
  ExpectServing();
}

}  // namespace
}  // namespace quantd::testing::shared_memory_test
