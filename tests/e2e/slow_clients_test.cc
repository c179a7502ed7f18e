// What clients cost that do not read, or write a byte at a time, or do nothing
// at all. QUANTD_SLOW_SECONDS=20 lets the streams that nobody reads press on
// for that long, instead of 3 seconds, and holds them to a stricter bound on
// memory.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/quantization_service.pb.h"
#include "tests/support/count.h"
#include "tests/support/metric_value.h"
#include "tests/support/paths.h"
#include "tests/support/raw_stream.h"
#include "tests/support/sanitizers.h"
#include "tests/support/server_process.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/test_server.h"

namespace quantd::testing::slow_clients_test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr char kQuantize[] = "/quantd.v1.QuantizationService/Quantize";
constexpr char kDequantize[] = "/quantd.v1.QuantizationService/Dequantize";

// 0 unless the environment asks for the whole test, with the stricter bound.
int64_t FullSeconds() { return Count("QUANTD_SLOW_SECONDS", 0); }

grpc::ByteBuffer ToBuffer(const google::protobuf::MessageLite& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

// The next chunk of a tensor that comes in chunks of 1 MiB.
grpc::ByteBuffer ChunkAt(int64_t offset_bytes, const grpc::Slice& chunk) {
  v1::DequantizeRequest request;
  request.set_offset(offset_bytes);
  // The tag of `data` and its size.
  const grpc::Slice slices[] = {
      grpc::Slice(request.SerializeAsString() + "\x1a\x80\x80\x40"), chunk};
  return grpc::ByteBuffer(slices, 2);
}

// Writes what it is given, and never reads.
class DeafStream final
    : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // `first` again and again; or, where it begins one large tensor, chunks.
  DeafStream(const std::shared_ptr<grpc::Channel>& channel, const char* method,
             grpc::ByteBuffer first, bool is_large)
      : stub_(channel), is_large_(is_large), message_(std::move(first)) {
    stub_.PrepareBidiStreamingCall(&context_, method, {}, this);
    StartWrite(&message_);
    StartCall();
  }
  ~DeafStream() override {
    context_.TryCancel();
    done_.WaitForNotification();
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return;
    const int64_t written = written_.fetch_add(1) + 1;
    if (is_large_) message_ = ChunkAt(written * kMiB, chunk_);
    StartWrite(&message_);
  }
  void OnDone(const grpc::Status& status) override { done_.Notify(); }

  int64_t written() const { return written_.load(); }

 private:
  grpc::ClientContext context_;
  grpc::GenericStub stub_;
  const bool is_large_;
  const grpc::Slice chunk_{std::string(kMiB, '\x01')};
  grpc::ByteBuffer message_;
  std::atomic<int64_t> written_{0};
  absl::Notification done_;
};

v1::Encoding Int8Encoding() {
  v1::Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.5f);
  return encoding;
}

// The header of a tensor of that many float32 elements.
v1::QuantizeRequest Opening(int64_t count) {
  v1::QuantizeRequest request;
  v1::QuantizeHeader& header = *request.mutable_header();
  header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  header.mutable_tensor()->add_shape(count);
  *header.mutable_encoding() = Int8Encoding();
  return request;
}

// A tensor that has no end. Every fourth stream sends tensors of one chunk
// each.
std::unique_ptr<DeafStream> NewDeafStream(
    const std::shared_ptr<grpc::Channel>& channel, int index) {
  const std::string chunk(kMiB, '\x01');
  if (index % 4 == 0) {
    v1::QuantizeRequest whole = Opening(kMiB / 4);
    whole.set_data(chunk);
    return std::make_unique<DeafStream>(channel, kQuantize, ToBuffer(whole),
                                        /*is_large=*/false);
  }
  v1::DequantizeRequest first;
  v1::DequantizeHeader& header = *first.mutable_header();
  header.mutable_tensor()->set_element_type(
      index % 4 == 1 ? v1::ELEMENT_TYPE_FLOAT32 : v1::ELEMENT_TYPE_BFLOAT16);
  header.mutable_tensor()->add_shape(int64_t{1} << 36);
  *header.mutable_encoding() = Int8Encoding();
  first.set_data(chunk);
  return std::make_unique<DeafStream>(channel, kDequantize, ToBuffer(first),
                                      /*is_large=*/true);
}

// Of a process, from /proc: the most memory that it ever had.
int64_t PeakRssBytes(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  std::string line;
  int64_t kilobytes = -1;
  while (std::getline(file, line)) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    if (words.size() >= 2 && words[0] == "VmHWM:") {
      EXPECT_TRUE(absl::SimpleAtoi(words[1], &kilobytes));
    }
  }
  return kilobytes << 10;
}

// A TCP connection of its own.
class Socket {
 public:
  explicit Socket(const std::string& address) {
    const std::vector<std::string> parts = absl::StrSplit(address, ':');
    uint32_t port = 0;
    sockaddr_in peer = {};
    peer.sin_family = AF_INET;
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!absl::SimpleAtoi(parts[1], &port) ||
        inet_pton(AF_INET, parts[0].c_str(), &peer.sin_addr) != 1 ||
        (peer.sin_port = htons(static_cast<uint16_t>(port)),
         connect(fd_, reinterpret_cast<const sockaddr*>(&peer), sizeof(peer)) !=
             0)) {
      std::perror("connect");
      std::abort();
    }
    const timeval timeout = absl::ToTimeval(kLongEnough);
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  }
  ~Socket() { close(fd_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // False when the server has closed.
  bool Write(const std::string& bytes) {
    return send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  // Empty when the server has closed.
  std::string Read(size_t size) {
    std::string bytes(size, '\0');
    size_t got = 0;
    while (got < size) {
      const ssize_t n = recv(fd_, &bytes[got], size - got, 0);
      if (n <= 0) return "";
      got += static_cast<size_t>(n);
    }
    return bytes;
  }

 private:
  int fd_ = -1;
};

// HTTP/2 by hand.
enum FrameType : uint8_t { kData = 0, kHeaders = 1, kReset = 3, kSettings = 4 };

std::string Frame(FrameType type, uint8_t flags, uint32_t stream,
                  const std::string& payload) {
  const auto byte = [](uint64_t value, int shift) {
    return static_cast<char>(value >> shift);
  };
  const uint64_t size = payload.size();
  std::string frame = {byte(size, 16),
                       byte(size, 8),
                       byte(size, 0),
                       static_cast<char>(type),
                       static_cast<char>(flags),
                       byte(stream, 24),
                       byte(stream, 16),
                       byte(stream, 8),
                       byte(stream, 0)};
  return frame + payload;
}

std::string Preface() {
  return "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(kSettings, 0, 0, "");
}

std::string CallHeaders(const std::string& method) {
  std::string block;
  for (const auto& [name, value] :
       std::vector<std::pair<std::string, std::string>>{
           {":method", "POST"},
           {":scheme", "http"},
           {":path", method},
           {":authority", "localhost"},
           {"te", "trailers"},
           {"content-type", "application/grpc"}}) {
    // A literal that is not indexed.
    block += '\0';
    block += static_cast<char>(name.size());
    block += name;
    block += static_cast<char>(value.size());
    block += value;
  }
  constexpr uint8_t kEndHeaders = 4;
  return Frame(kHeaders, kEndHeaders, 1, block);
}

// With gRPC's prefix.
std::string Framed(const std::string& message) {
  const auto size = static_cast<uint32_t>(message.size());
  std::string framed = {'\0', static_cast<char>(size >> 24),
                        static_cast<char>(size >> 16),
                        static_cast<char>(size >> 8), static_cast<char>(size)};
  return framed + message;
}

// A health check, and how long it took.
absl::Duration TimeHealthCheck(const std::shared_ptr<grpc::Channel>& channel) {
  const absl::Time start = absl::Now();
  RawStream call(channel, "/grpc.health.v1.Health/Check", kLongEnough);
  call.Write("");
  call.WritesDone();
  std::string response;
  EXPECT_TRUE(call.Read(&response));
  EXPECT_EQ(response, "\x08\x01");
  EXPECT_TRUE(call.Finish().ok());
  return absl::Now() - start;
}

TEST(SlowClientsTest, StreamsThatNobodyReadsStayWithinTheMemoryBudget) {
  constexpr int64_t kBudgetBytes = 256 * kMiB;
  constexpr int kStreams = 128;
  constexpr int kConnections = 16;
  constexpr int kIdleConnections = kSanitized ? 200 : 1000;
  rlimit descriptors{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &descriptors), 0);
  descriptors.rlim_cur = descriptors.rlim_max;
  setrlimit(RLIMIT_NOFILE, &descriptors);
  if (descriptors.rlim_cur < 2 * kIdleConnections) GTEST_SKIP();

  TemporaryDirectory directory;
  ServerProcess server(QuantdBinary(), directory.File("encodings.db"),
                       {"--memory-budget-bytes", absl::StrCat(kBudgetBytes),
                        "--log-level", "warning"});
  const int64_t bytes_at_rest = PeakRssBytes(server.pid());
  const std::shared_ptr<grpc::Channel> health = server.NewChannel();
  TimeHealthCheck(health);

  std::vector<std::unique_ptr<Socket>> idle;
  for (int i = 0; i < kIdleConnections; ++i) {
    idle.push_back(std::make_unique<Socket>(server.address()));
    ASSERT_TRUE(idle.back()->Write(Preface()));
  }
  const int64_t bytes_idle = PeakRssBytes(server.pid());

  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int i = 0; i < kConnections; ++i) {
    channels.push_back(server.NewChannel());
  }
  std::vector<std::unique_ptr<DeafStream>> streams;
  for (int i = 0; i < kStreams; ++i) {
    streams.push_back(NewDeafStream(channels[i % kConnections], i));
  }
  std::vector<absl::Duration> checks;
  const auto written_chunks = [&streams] {
    int64_t sum = 0;
    for (const std::unique_ptr<DeafStream>& stream : streams) {
      sum += stream->written();
    }
    return sum;
  };
  const absl::Time end =
      absl::Now() + absl::Seconds(FullSeconds() > 0 ? FullSeconds()
                                  : kSanitized      ? 1
                                                    : 3);
  while (absl::Now() < end ||
         (written_chunks() <= kStreams && absl::Now() < end + kLongEnough)) {
    checks.push_back(TimeHealthCheck(health));
    absl::SleepFor(absl::Milliseconds(10));
  }
  const int64_t written = written_chunks();
  int silent = 0;
  for (const std::unique_ptr<DeafStream>& stream : streams) {
    if (stream->written() == 0) ++silent;
  }
  EXPECT_GT(written, kStreams);
  const int64_t bytes = PeakRssBytes(server.pid());
  std::sort(checks.begin(), checks.end());
  const absl::Duration slowest = checks.back();
  const absl::Duration p99 = checks[checks.size() * 99 / 100];
  std::printf(
      "[          ] RSS %lld MiB at rest, %lld MiB with %d idle connections, "
      "%lld MiB with %d streams that took %lld MiB (%d of them nothing); %zu "
      "health checks, p99 %.1f ms, slowest %.1f ms\n",
      static_cast<long long>(bytes_at_rest / kMiB),
      static_cast<long long>(bytes_idle / kMiB), kIdleConnections,
      static_cast<long long>(bytes / kMiB), kStreams,
      static_cast<long long>(written), silent, checks.size(),
      absl::ToDoubleMilliseconds(p99), absl::ToDoubleMilliseconds(slowest));
  if (!kSanitized) {
    EXPECT_LE(bytes, kBudgetBytes + (FullSeconds() > 0 ? 64 : 128) * kMiB);
  }
  streams.clear();
  TimeHealthCheck(health);
  EXPECT_EQ(server.Terminate(), 0);
}

// A message that comes byte by byte is no progress, however often a byte comes.
TEST(SlowClientsTest, AStreamThatWritesByteByByteEndsWithTheIdleTimeout) {
  server::ServerOptions options;
  options.threads = 1;
  options.limits.idle_timeout = absl::Milliseconds(500);
  TestServer server(options);
  const v1::QuantizeRequest first = Opening(1000);
  v1::QuantizeRequest rest;
  rest.set_data(std::string(4000, '\0'));
  const std::string slow = Framed(rest.SerializeAsString());

  const absl::Duration start = core::SteadyNow();
  Socket socket(server.address());
  ASSERT_TRUE(
      socket.Write(Preface() + CallHeaders(kQuantize) +
                   Frame(kData, 0, 1, Framed(first.SerializeAsString()))));
  std::atomic<bool> ended{false};
  std::thread writer([&] {
    for (const char byte : slow) {
      if (ended.load() ||
          !socket.Write(Frame(kData, 0, 1, std::string(1, byte)))) {
        return;
      }
      absl::SleepFor(absl::Milliseconds(20));
    }
  });
  bool answered = false;
  while (!ended.load()) {
    const std::string head = socket.Read(9);
    ASSERT_FALSE(head.empty());
    const size_t size = (static_cast<uint8_t>(head[0]) << 16) |
                        (static_cast<uint8_t>(head[1]) << 8) |
                        static_cast<uint8_t>(head[2]);
    const std::string payload = size > 0 ? socket.Read(size) : "";
    constexpr uint8_t kEndStream = 1;
    if (head[3] == kReset ||
        (head[3] == kHeaders && (head[4] & kEndStream) != 0)) {
      answered = absl::StrContains(payload, "STREAM_IDLE");
      ended.store(true);
    }
  }
  writer.join();
  EXPECT_TRUE(answered);
  EXPECT_GE(core::SteadyNow() - start, options.limits.idle_timeout);
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    return MetricValue(server.metrics(), "quantd_active_streams") == 0 &&
           server.server().memory_used_bytes() == 0;
  }));
}

// Tensors of four float32 elements, one after another on one stream. False, and
// nothing is learned, where this program was too slow for streams of that age:
// not all of them had a tensor in time, or the last was late.
bool OldStreamsEndBetweenTwoTensors(absl::Duration age) {
  server::ServerOptions options;
  options.threads = 1;
  // What is open has as long again.
  options.limits.stream_age = age;
  TestServer server(options);
  v1::QuantizeRequest request = Opening(4);
  request.set_data(std::string(16, '\0'));
  const std::string whole = request.SerializeAsString();
  request.set_data(std::string(8, '\0'));
  const std::string half = request.SerializeAsString();
  v1::QuantizeRequest second_half;
  second_half.set_offset(8);
  second_half.set_data(std::string(8, '\0'));
  const std::string end = absl::StrCat("STREAM_AGE: the stream was open for ",
                                       absl::FormatDuration(age),
                                       ", which is the limit; open another");

  const absl::Duration start = core::SteadyNow();
  RawStream resting(server.NewChannel(), kQuantize);
  RawStream busy(server.NewChannel(), kQuantize);
  RawStream stuck(server.NewChannel(), kQuantize);
  std::string answer;
  if (!resting.Write(whole) || !stuck.Write(half) || !resting.Read(&answer) ||
      !busy.Write(whole) || !busy.Read(&answer) ||
      core::SteadyNow() - start >= age) {
    return false;
  }
  // Every tensor that is not served is refused by the end of the stream.
  while (busy.Write(whole) && busy.Read(&answer)) {
    v1::QuantizeResponse response;
    EXPECT_TRUE(response.ParseFromString(answer));
    EXPECT_TRUE(response.has_summary());
  }
  for (RawStream* stream : {&busy, &resting}) {
    EXPECT_FALSE(stream->Read(&answer));
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_EQ(status.error_message(), end);
  }
  // A tensor that is open may be finished.
  stuck.Write(second_half.SerializeAsString());
  bool summarized = false;
  while (stuck.Read(&answer)) {
    v1::QuantizeResponse response;
    EXPECT_TRUE(response.ParseFromString(answer));
    summarized = summarized || response.has_summary();
  }
  if (!summarized && core::SteadyNow() - start >= 2 * age) return false;
  EXPECT_TRUE(summarized);
  EXPECT_EQ(stuck.Finish().error_message(), end);
  return true;
}

TEST(SlowClientsTest, AnOldStreamEndsBetweenTwoTensors) {
  absl::Duration age = absl::Seconds(2);
  while (!OldStreamsEndBetweenTwoTensors(age)) {
    age *= 2;
    ASSERT_LE(age, kLongEnough) << "this machine is too slow";
  }
}

TEST(SlowClientsTest, AnOpenTensorDoesNotKeepAStreamForever) {
  server::ServerOptions options;
  options.threads = 1;
  options.limits.stream_age = absl::Milliseconds(200);
  TestServer server(options);
  const v1::QuantizeRequest request = Opening(4);
  RawStream stream(server.NewChannel(), kQuantize);
  // On a busy machine it may end even before.
  stream.Write(request.SerializeAsString());
  std::string answer;
  while (stream.Read(&answer)) {
  }
  EXPECT_EQ(stream.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace quantd::testing::slow_clients_test
