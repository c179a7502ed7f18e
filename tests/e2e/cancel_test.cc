// Calls that end at any moment leave nothing behind, stop computing, and do not
// keep others waiting.
//
// QUANTD_CANCELS sets how many are cancelled or run out of time; the whole
// count of the promise is 10000. With it the figures are written to stderr.

#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "tests/support/count.h"
#include "tests/support/metric_value.h"
#include "tests/support/paths.h"
#include "tests/support/raw_stream.h"
#include "tests/support/sanitizers.h"
#include "tests/support/server_process.h"
#include "tests/support/shared_region.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tensor_streams.h"

namespace quantd::testing::cancel_test {
namespace {

constexpr char kService[] = "/quantd.v1.QuantizationService/";
constexpr char kEncodingService[] = "/quantd.v1.EncodingService/";
constexpr char kModel[] = "acme/net";
constexpr char kSmallBlocks[] = "a slow search in small blocks";
constexpr char kBestOf[] = "the best of slow searches";
constexpr int kClients = 4;
constexpr int kDefaultCancels = kThreadSanitized ? 100 : 150;

bool IsFullCount() { return std::getenv("QUANTD_CANCELS") != nullptr; }

std::string Reals(int64_t count) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(normal(random));
  return ToBytes(values);
}

// Seconds of search for each scale index.
v1::EncodingSpec SlowSpec() {
  v1::EncodingSpec spec;
  spec.set_format(v1::NUMBER_FORMAT_INT16);
  spec.set_symmetry(v1::SYMMETRY_ASYMMETRIC);
  spec.set_method(v1::CALIBRATION_METHOD_MSE);
  spec.set_search_steps(128);
  return spec;
}

v1::EncodingSpec SlowSpec(std::initializer_list<int64_t> block_size) {
  v1::EncodingSpec spec = SlowSpec();
  for (const int64_t size : block_size) spec.add_block_size(size);
  return spec;
}

// Rows of kColumns are searched by their histograms: elements are searched for
// the entropy of so many levels in short rows only.
v1::EncodingSpec SlowSpecOfRows() {
  v1::EncodingSpec spec = SlowSpec({1, 0});
  spec.set_method(v1::CALIBRATION_METHOD_BEST_OF);
  spec.add_methods(v1::CALIBRATION_METHOD_ENTROPY);
  spec.add_methods(v1::CALIBRATION_METHOD_MSE);
  return spec;
}

v1::EncodingSpec SlowSpecOfColumns() {
  v1::EncodingSpec spec = SlowSpec({0, 1});
  spec.set_method(v1::CALIBRATION_METHOD_BEST_OF);
  spec.add_methods(v1::CALIBRATION_METHOD_ENTROPY);
  spec.add_methods(v1::CALIBRATION_METHOD_MSE);
  spec.add_methods(v1::CALIBRATION_METHOD_SQNR);
  return spec;
}

template <typename Header>
void Describe(Header* header, const std::string& tensor, int64_t rows,
              int64_t columns) {
  header->mutable_tensor()->mutable_name()->set_model(kModel);
  header->mutable_tensor()->mutable_name()->set_tensor(tensor);
  header->mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  header->mutable_tensor()->add_shape(rows);
  header->mutable_tensor()->add_shape(columns);
}

// A call: what is sent, and whether the answer is read.
struct Call {
  std::string name;
  std::string method;
  std::vector<std::string> messages;
  bool reads = true;
  // Computes for minutes.
  bool is_slow = false;
};

// A tensor in chunks, the header with the first.
template <typename Request, typename Header>
std::vector<std::string> Chunks(const Header& header, const std::string& data,
                                size_t chunk_bytes) {
  std::vector<std::string> messages;
  for (size_t offset = 0; offset == 0 || offset < data.size();
       offset += chunk_bytes) {
    Request request;
    if (offset == 0) *request.mutable_header() = header;
    request.set_offset(offset);
    request.set_data(data.substr(offset, chunk_bytes));
    messages.push_back(request.SerializeAsString());
  }
  return messages;
}

constexpr int64_t kRows = 128;
constexpr int64_t kColumns = 8192;

// All RPCs, and all that their jobs do.
std::vector<Call> AllCalls() {
  constexpr size_t kChunk = 256 << 10;
  const std::string large = Reals(kRows * kColumns);
  const std::string small = large.substr(0, 1024);
  std::vector<Call> calls;
  v1::QuantizeHeader quantize;
  const auto add_quantize = [&](const std::string& name, bool is_small) {
    calls.push_back({name, absl::StrCat(kService, "Quantize"),
                     Chunks<v1::QuantizeRequest>(
                         quantize, is_small ? small : large, kChunk)});
    return &calls.back();
  };

  Describe(&quantize, "w", 1, 256);
  quantize.mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT8);
  quantize.mutable_encoding()->add_scale(0.5f);
  add_quantize("small tensors", true);
  for (int i = 0; i < 200; ++i) {
    calls.back().messages.push_back(calls.back().messages[0]);
  }
  quantize.Clear();
  Describe(&quantize, "w", kRows, kColumns);
  quantize.mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT8);
  quantize.mutable_encoding()->add_scale(0.5f);
  add_quantize("a large tensor", false);

  quantize.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  quantize.set_store(true);
  add_quantize("quantizing by blocks, to the store", false);
  quantize.mutable_spec()->set_method(v1::CALIBRATION_METHOD_PERCENTILE);
  add_quantize("calibrating, to the store", false);
  *quantize.mutable_spec() = SlowSpecOfRows();
  add_quantize("a slow search in channels", false)->is_slow = true;
  *quantize.mutable_spec() = SlowSpec({1, 16});
  quantize.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  add_quantize(kSmallBlocks, false)->is_slow = true;
  // One tensor takes a fast machine less than the tests wait for.
  const std::vector<std::string> one_tensor = calls.back().messages;
  for (int i = 0; i < 15; ++i) {
    calls.back().messages.insert(calls.back().messages.end(),
                                 one_tensor.begin(), one_tensor.end());
  }
  // A column is a block: all of them are searched when the last row has come.
  *quantize.mutable_spec() = SlowSpecOfColumns();
  quantize.set_scales_in_chunks(true);
  add_quantize("a slow search in columns", false)->is_slow = true;

  v1::CalibrateHeader calibrate;
  Describe(&calibrate, "w", kRows, kColumns);
  calls.push_back({"calibrating alone", absl::StrCat(kService, "Calibrate"),
                   Chunks<v1::CalibrateRequest>(calibrate, large, kChunk)});
  *calibrate.mutable_spec() = SlowSpecOfRows();
  calls.push_back({kBestOf, absl::StrCat(kService, "Calibrate"),
                   Chunks<v1::CalibrateRequest>(calibrate, large, kChunk)});
  calls.back().is_slow = true;
  v1::CalibrateHeader contribute;
  Describe(&contribute, "contributed", kRows, kColumns);
  contribute.mutable_contribution()->set_source("somebody");
  contribute.mutable_contribution()->set_sequence(1);
  contribute.mutable_contribution()->add_block_size(1);
  contribute.mutable_contribution()->add_block_size(0);
  calls.push_back({"contributing", absl::StrCat(kService, "Calibrate"),
                   Chunks<v1::CalibrateRequest>(contribute, large, kChunk)});

  v1::EvaluateHeader evaluate;
  Describe(&evaluate, "w", kRows, kColumns);
  evaluate.set_with_distribution(true);
  for (int i = 0; i < 3; ++i) {
    v1::Encoding* encoding = evaluate.add_candidates()->mutable_encoding();
    encoding->set_format(v1::NUMBER_FORMAT_INT8);
    encoding->add_scale(0.5f + i);
  }
  calls.push_back({"evaluating", absl::StrCat(kService, "Evaluate"),
                   Chunks<v1::EvaluateRequest>(evaluate, large, kChunk)});
  *evaluate.add_candidates()->mutable_spec() = SlowSpecOfRows();
  calls.push_back({"evaluating a slow search",
                   absl::StrCat(kService, "Evaluate"),
                   Chunks<v1::EvaluateRequest>(evaluate, large, kChunk)});
  calls.back().is_slow = true;

  v1::DequantizeHeader dequantize;
  Describe(&dequantize, "w", kRows, kColumns * 4);
  dequantize.mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT8);
  dequantize.mutable_encoding()->add_scale(0.5f);
  const std::vector<std::string> codes =
      Chunks<v1::DequantizeRequest>(dequantize, large, kChunk);
  calls.push_back(
      {"dequantizing", absl::StrCat(kService, "Dequantize"), codes});
  calls.push_back({"dequantizing, a reader that does not read",
                   absl::StrCat(kService, "Dequantize"), codes});
  calls.back().reads = false;

  v1::ComputeEncodingsRequest compute;
  compute.set_model(kModel);
  *compute.mutable_default_spec() = SlowSpec();
  compute.mutable_default_spec()->mutable_granularity()->set_axis(0);
  calls.push_back({"computing encodings",
                   absl::StrCat(kEncodingService, "ComputeEncodings"),
                   {compute.SerializeAsString()}});
  calls.back().is_slow = true;
  v1::SweepRequest sweep;
  sweep.set_model(kModel);
  for (int i = 0; i < 8; ++i) *sweep.add_specs() = SlowSpec();
  calls.push_back({"a sweep",
                   absl::StrCat(kEncodingService, "Sweep"),
                   {sweep.SerializeAsString()}});
  calls.back().is_slow = true;
  v1::GetStatisticsRequest statistics;
  statistics.mutable_name()->set_model(kModel);
  statistics.mutable_name()->set_tensor("kept-0");
  calls.push_back({"getting statistics",
                   absl::StrCat(kEncodingService, "GetStatistics"),
                   {statistics.SerializeAsString()}});
  v1::ListEncodingsRequest list;
  list.set_model(kModel);
  calls.push_back({"listing encodings",
                   absl::StrCat(kEncodingService, "ListEncodings"),
                   {list.SerializeAsString()}});
  return calls;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

class CancelTest : public ::testing::Test {
 protected:
  // Number of the server's threads at the most, without those of gRPC: its
  // pools start 2 + 1 + 4 + 4 + 64 as tasks come, and some dozen threads wait
  // for connections, files and time.
  static constexpr int64_t kMostThreads = 88;

  CancelTest()
      : unix_address_(absl::StrCat("unix:", directory_.path(), "/grpc")),
        server_(QuantdBinary(), directory_.path() + "/store.db",
                {"--listen", unix_address_, "--shared-memory", "--threads", "2",
                 "--idle-timeout", "60s"}),
        channel_(server_.NewChannel()) {}

  // What ComputeEncodings and Sweep work on.
  void Contribute() {
    const auto stub = v1::QuantizationService::NewStub(channel_);
    const std::string data = Reals(kRows * kColumns);
    for (int i = 0; i < 2; ++i) {
      v1::CalibrateHeader header;
      Describe(&header, absl::StrCat("kept-", i), kRows, kColumns);
      header.mutable_contribution()->set_source("somebody");
      header.mutable_contribution()->set_sequence(1);
      header.mutable_contribution()->add_block_size(1);
      header.mutable_contribution()->add_block_size(0);
      ASSERT_TRUE(Calibrate(*stub, header, data, 256 << 10).ok());
    }
  }

  // CPU time of the server so far.
  absl::Duration CpuTime() const {
    clockid_t clock;
    timespec time = {};
    EXPECT_EQ(clock_getcpuclockid(server_.pid(), &clock), 0);
    EXPECT_EQ(clock_gettime(clock, &time), 0);
    return absl::DurationFromTimespec(time);
  }

  // Waits until the server has computed for some time since it had used
  // `before` of the processors: more than it takes to receive a call. That
  // comes later on a busy machine, but it comes.
  void AwaitComputing(absl::Duration before) const {
    const absl::Duration least = absl::Milliseconds(kSanitized ? 600 : 200);
    EXPECT_TRUE(
        PollUntil(kLongEnough, [&] { return CpuTime() - before > least; }));
  }

  // A field of /proc/PID/status in its own unit.
  int64_t ProcessStatus(const std::string& field) const {
    for (absl::string_view line : absl::StrSplit(
             ReadFile(absl::StrCat("/proc/", server_.pid(), "/status")),
             '\n')) {
      const std::pair<std::string, std::string> parts =
          absl::StrSplit(line, absl::MaxSplits(':', 1));
      if (parts.first == field) {
        return std::strtoll(parts.second.c_str(), nullptr, 10);
      }
    }
    return -1;
  }

  // Number of the server's threads less those of gRPC, which come and go. gRPC
  // names its threads; the others have the name of the program.
  int64_t OwnThreads() const {
    const std::string process = absl::StrCat("/proc/", server_.pid());
    const std::string program = ReadFile(process + "/comm");
    int64_t count = 0;
    std::error_code error;
    for (const auto& thread :
         std::filesystem::directory_iterator(process + "/task", error)) {
      count += ReadFile(thread.path() / "comm") == program;
    }
    return count;
  }

  // The sum over all series of a metric; -1 while it cannot be read.
  double Metric(const std::string& name) const {
    const std::vector<std::string> address =
        absl::StrSplit(server_.metrics_address(), ':');
    const int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(std::stoi(address[1])));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    std::string text;
    const std::string request =
        "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    if (connect(descriptor, reinterpret_cast<sockaddr*>(&to), sizeof(to)) ==
            0 &&
        write(descriptor, request.data(), request.size()) > 0) {
      char buffer[4096];
      for (ssize_t n; (n = read(descriptor, buffer, sizeof(buffer))) > 0;) {
        text.append(buffer, static_cast<size_t>(n));
      }
    }
    close(descriptor);
    double sum = -1;
    for (absl::string_view line : absl::StrSplit(text, '\n')) {
      if (line.substr(0, name.size()) != name) continue;
      const absl::string_view rest = line.substr(name.size());
      if (rest.empty() || (rest[0] != ' ' && rest[0] != '{')) continue;
      double value = 0;
      const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
      if (absl::SimpleAtod(absl::StripAsciiWhitespace(words.back()), &value)) {
        sum = std::max(sum, 0.0) + value;
      }
    }
    return sum;
  }

  void ExpectAtRest() const {
    EXPECT_TRUE(PollUntil(kLongEnough, [&] {
      return Metric("quantd_active_streams") == 0;
    })) << Metric("quantd_active_streams");
    EXPECT_TRUE(PollUntil(kLongEnough, [&] {
      return Metric("quantd_active_tensors") == 0;
    })) << Metric("quantd_active_tensors");
    EXPECT_TRUE(PollUntil(kLongEnough, [&] {
      return Metric("quantd_memory_budget_used_bytes") == 0;
    })) << Metric("quantd_memory_budget_used_bytes");
    EXPECT_TRUE(PollUntil(kLongEnough,
                          [&] {
                            return Metric("grpc_server_started_total") ==
                                   Metric("grpc_server_handled_total");
                          }))
        << Metric("grpc_server_started_total") << " started, "
        << Metric("grpc_server_handled_total") << " handled";
  }

  TemporaryDirectory directory_;
  const std::string unix_address_;
  ServerProcess server_;
  const std::shared_ptr<grpc::Channel> channel_;
};

// Sends a call and takes its answer until it ends, one way or the other.
void Exchange(const Call& call, RawStream* stream) {
  for (const std::string& message : call.messages) {
    if (!stream->Write(message)) break;
  }
  if (call.reads) {
    stream->WritesDone();
    std::string message;
    while (stream->Read(&message)) {
    }
  }
}

// Lets many calls end at random moments, by a cancel or by their deadline.
class RandomEnds {
 public:
  RandomEnds(const std::vector<Call>& calls, int64_t count)
      : calls_(calls), left_(count) {}

  void RunAll(const std::function<std::shared_ptr<grpc::Channel>()>& connect) {
    std::vector<std::thread> clients;
    for (int i = 0; i < kClients; ++i) {
      clients.emplace_back([this, i, channel = connect()] {
        std::mt19937 random(static_cast<unsigned>(i));
        while (left_.fetch_sub(1) > 0) RunOne(channel, &random);
      });
    }
    for (std::thread& client : clients) client.join();
  }

 private:
  void RunOne(const std::shared_ptr<grpc::Channel>& channel,
              std::mt19937* random) {
    const Call& call = calls_[std::uniform_int_distribution<size_t>(
        0, calls_.size() - 1)(*random)];
    // From before the first message to well within the calculation.
    const double log_ms = std::uniform_real_distribution<>(-2, 5)(*random);
    const absl::Duration after = absl::Milliseconds(std::exp(log_ms));
    const bool by_deadline = std::bernoulli_distribution()(*random);
    RawStream stream(channel, call.method, by_deadline ? after : kLongEnough);
    std::thread canceller;
    if (!by_deadline) {
      canceller = std::thread([&] {
        absl::SleepFor(after);
        stream.Cancel();
      });
    }
    Exchange(call, &stream);
    // A client that does not read waits for its end.
    const grpc::Status status = stream.Finish();
    // A quick call may end before, and tensors are turned away while the
    // workers are far behind.
    EXPECT_TRUE(status.ok() ||
                status.error_code() == grpc::StatusCode::CANCELLED ||
                status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED)
        << call.name << ": " << status.error_code() << " "
        << status.error_message();
    if (canceller.joinable()) canceller.join();
  }

  const std::vector<Call>& calls_;
  std::atomic<int64_t> left_;
};

TEST_F(CancelTest, LeavesNothingBehindWhenCallsEndAtRandomMoments) {
  ASSERT_NO_FATAL_FAILURE(Contribute());
  const std::vector<Call> calls = AllCalls();
  const auto connect = [this] { return server_.NewChannel(); };
  const int64_t count = Count("QUANTD_CANCELS", kDefaultCancels);
  RandomEnds(calls, IsFullCount() ? count : count / 2).RunAll(connect);
  ExpectAtRest();
  const int64_t resident_kb = ProcessStatus("VmRSS");
  RandomEnds(calls, count).RunAll(connect);
  ExpectAtRest();
  const int64_t threads = OwnThreads();
  EXPECT_GT(threads, 0);
  EXPECT_LE(threads, kMostThreads);
  const int64_t after_kb = ProcessStatus("VmRSS");
  // Allocators keep some of what they had, those of sanitizers more.
  EXPECT_LE(after_kb, IsFullCount() ? resident_kb * 21 / 20
                                    : resident_kb * 2 + (512 << 10));
  if (IsFullCount()) {
    std::fprintf(stderr,
                 "%ld ended: resident %ld KiB before and %ld after, "
                 "%ld threads\n",
                 count, resident_kb, after_kb, threads);
  }
}

TEST_F(CancelTest, LeavesNothingBehindInSharedMemory) {
  ControlConnection control(unix_address_);
  constexpr int64_t kElements = int64_t{4} << 20;
  const auto region = control.Allocate(kElements * 5);
  ASSERT_NE(region, nullptr);
  v1::QuantizeRequest request;
  Describe(request.mutable_header(), "w", 1024, kElements / 1024);
  *request.mutable_header()->mutable_output() =
      region->Span(kElements * 4, kElements);
  *request.mutable_shared() = region->Span(0, kElements * 4);
  std::vector<Call> calls;
  request.mutable_header()->mutable_encoding()->set_format(
      v1::NUMBER_FORMAT_INT8);
  request.mutable_header()->mutable_encoding()->add_scale(0.5f);
  calls.push_back({"quantizing shared memory",
                   absl::StrCat(kService, "Quantize"),
                   {request.SerializeAsString()}});
  request.mutable_header()->mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  request.mutable_header()->mutable_spec()->set_method(
      v1::CALIBRATION_METHOD_PERCENTILE);
  calls.push_back({"calibrating shared memory",
                   absl::StrCat(kService, "Quantize"),
                   {request.SerializeAsString()}});
  RandomEnds(calls, std::max<int64_t>(
                        40, Count("QUANTD_CANCELS", kDefaultCancels) / 50))
      .RunAll([this] {
        grpc::ChannelArguments arguments;
        arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
        return grpc::CreateCustomChannel(
            unix_address_, grpc::InsecureChannelCredentials(), arguments);
      });
  control.Close();
  ExpectAtRest();
}

// What is searched is held until nobody computes with it any more.
TEST_F(CancelTest, StopsComputing) {
  ASSERT_NO_FATAL_FAILURE(Contribute());
  for (const Call& call : AllCalls()) {
    if (!call.is_slow) continue;
    SCOPED_TRACE(call.name);
    const absl::Duration before = CpuTime();
    RawStream stream(channel_, call.method, absl::InfiniteDuration());
    std::thread runner([&] { Exchange(call, &stream); });
    // The search is under way, which takes minutes.
    AwaitComputing(before);
    stream.Cancel();
    if (IsFullCount()) {
      absl::SleepFor(absl::Milliseconds(50));
      const absl::Duration at_once = CpuTime();
      absl::SleepFor(absl::Milliseconds(200));
      const absl::Duration later = CpuTime() - at_once;
      std::fprintf(stderr, "%s: %.1f ms of CPU later than 50 ms after\n",
                   call.name.c_str(), absl::ToDoubleMilliseconds(later));
    }
    runner.join();
    EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::CANCELLED);
    ExpectAtRest();
  }
}

// Small tensors go on beside searches of the same caller: those that begin when
// all has come, and those of small blocks as they come.
class SlowCallsTest : public CancelTest,
                      public ::testing::WithParamInterface<const char*> {
 protected:
  // Minutes of it are left when all has come.
  static bool SearchesAtTheEnd() { return GetParam() == kBestOf; }
};

INSTANTIATE_TEST_SUITE_P(Calls, SlowCallsTest,
                         ::testing::Values(kBestOf, kSmallBlocks),
                         [](const auto& info) {
                           return info.param == kBestOf ? "AtTheEnd"
                                                        : "AsTheyCome";
                         });

TEST_P(SlowCallsTest, TakeTurns) {
  const std::vector<Call> calls = AllCalls();
  const auto slow =
      std::find_if(calls.begin(), calls.end(),
                   [](const Call& call) { return call.name == GetParam(); });
  ASSERT_NE(slow, calls.end());
  std::vector<std::unique_ptr<RawStream>> streams;
  std::vector<std::thread> runners;
  std::atomic<int> ended{0};
  for (int i = 0; i < kClients; ++i) {
    streams.push_back(std::make_unique<RawStream>(channel_, slow->method,
                                                  absl::InfiniteDuration()));
    runners.emplace_back([&ended, &slow, stream = streams.back().get()] {
      Exchange(*slow, stream);
      ++ended;
    });
  }
  const auto cancel = absl::MakeCleanup([&] {
    for (const auto& stream : streams) stream->Cancel();
    for (std::thread& runner : runners) runner.join();
  });
  if (SearchesAtTheEnd()) {
    EXPECT_TRUE(PollUntil(kLongEnough, [&] {
      return Metric("quantd_payload_bytes_total") >=
             kClients * kRows * kColumns * 4.0;
    }));
  }
  AwaitComputing(CpuTime());
  // Each is open, or has ended.
  EXPECT_TRUE(PollUntil(
      kLongEnough,
      [&] {
        return Metric("quantd_active_tensors") + ended.load() == kClients;
      }))
      << Metric("quantd_active_tensors") << " are open, " << ended.load()
      << " have ended";

  // Admission refuses those that came when another of their caller had all
  // workers.
  const int refused = ended.load();
  ASSERT_LE(refused, kClients - 1);

  // 1 KiB each, one after the other, that go to the workers too.
  const auto stub = v1::QuantizationService::NewStub(server_.NewChannel());
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kLongEnough));
  const auto stream = stub->Quantize(&context);
  v1::QuantizeRequest request;
  Describe(request.mutable_header(), "small", 16, 16);
  request.mutable_header()->mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  request.mutable_header()->mutable_spec()->set_method(
      v1::CALIBRATION_METHOD_MSE);
  request.set_data(Reals(256));
  std::vector<absl::Duration> latencies;
  // A sanitizer makes each of them wait for up to a second.
  const int count = IsFullCount() ? 400 : (kSanitized ? 10 : 50);
  for (int i = 0; i < count; ++i) {
    const absl::Time start = absl::Now();
    ASSERT_TRUE(stream->Write(request));
    v1::QuantizeResponse response;
    do {
      ASSERT_TRUE(stream->Read(&response)) << i;
      ASSERT_FALSE(response.has_error()) << response.error().message();
    } while (!response.has_summary());
    latencies.push_back(absl::Now() - start);
  }
  if (SearchesAtTheEnd()) {
    EXPECT_EQ(ended.load(), refused);
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  if (IsFullCount()) {
    std::sort(latencies.begin(), latencies.end());
    std::fprintf(
        stderr,
        "1 KiB beside %zu slow searches: p50 %.2f ms, p99 %.2f ms, "
        "most %.2f ms\n",
        streams.size(),
        absl::ToDoubleMilliseconds(latencies[latencies.size() / 2]),
        absl::ToDoubleMilliseconds(latencies[latencies.size() * 99 / 100]),
        absl::ToDoubleMilliseconds(latencies.back()));
  }
}

}  // namespace
}  // namespace quantd::testing::cancel_test
