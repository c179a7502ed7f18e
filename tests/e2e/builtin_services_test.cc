// Limits of reflection and health, and of all open calls of a caller.

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "grpcpp/create_channel_posix.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "tests/support/metric_value.h"
#include "tests/support/raw_stream.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"

namespace quantd::testing::builtin_services_test {
namespace {

constexpr char kReflection[] =
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
// ServerReflectionRequest {7: list_services}.
const char kListServices[] = "\x3a\x01*";

// How a stream ends that asks something.
grpc::StatusCode Ask(const std::shared_ptr<grpc::Channel>& channel) {
  RawStream stream(channel, kReflection);
  stream.Write(kListServices);
  stream.WritesDone();
  std::string answer;
  while (stream.Read(&answer)) {
  }
  return stream.Finish().error_code();
}

std::vector<std::unique_ptr<RawStream>> OpenStreams(
    const std::shared_ptr<grpc::Channel>& channel) {
  constexpr int kCount = 40;
  std::vector<std::unique_ptr<RawStream>> streams;
  for (int i = 0; i < kCount; ++i) {
    streams.push_back(std::make_unique<RawStream>(channel, kReflection));
    streams.back()->Write(kListServices);
  }
  return streams;
}

TEST(ReflectionTest, ServesFewStreamsAtOnce) {
  server::ServerOptions options;
  // None of them ends for that.
  options.limits.idle_timeout = absl::Hours(1);
  TestServer server(std::move(options));
  const auto channel = server.NewChannel();
  {
    const auto streams = OpenStreams(channel);
    EXPECT_EQ(Ask(channel), grpc::StatusCode::RESOURCE_EXHAUSTED);
  }
  EXPECT_TRUE(PollUntil(kLongEnough,
                        [&] { return Ask(channel) == grpc::StatusCode::OK; }));
}

TEST(ReflectionTest, EndsStreamsThatStayOpen) {
  server::ServerOptions options;
  options.limits.idle_timeout = absl::Seconds(1);
  TestServer server(std::move(options));
  const auto channel = server.NewChannel();
  const auto streams = OpenStreams(channel);
  EXPECT_TRUE(PollUntil(kLongEnough,
                        [&] { return Ask(channel) == grpc::StatusCode::OK; }));
}

TEST(ReflectionTest, DoesNotKeepAServerThatDrains) {
  server::ServerOptions options;
  // Longer than anybody waits.
  options.drain_grace = absl::Hours(1);
  options.limits.idle_timeout = absl::Hours(1);
  TestServer server(std::move(options));
  const auto channel = server.NewChannel();
  // An open tensor keeps it.
  RawStream tensor(channel, "/quantd.v1.QuantizationService/Quantize");
  ASSERT_TRUE(tensor.Write(OpenTensorRequest().SerializeAsString()));
  std::string answer;
  ASSERT_TRUE(tensor.Read(&answer));
  std::atomic<bool> drained = false;
  std::thread drain([&] {
    server.server().Drain();
    drained.store(true);
  });
  // Turned away, once it drains.
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    grpc::ClientContext context;
    v1::ListModelsResponse response;
    return !server.encodings()
                .ListModels(&context, v1::ListModelsRequest(), &response)
                .ok();
  }));
  RawStream late(channel, kReflection);
  late.Write(kListServices);
  late.Read(&answer);
  tensor.Cancel();
  EXPECT_TRUE(PollUntil(kLongEnough, [&] { return drained.load(); }));
  late.Cancel();
  drain.join();
}

// Over a connection that comes from that address of this machine.
std::shared_ptr<grpc::Channel> ChannelFrom(const TestServer& server,
                                           const std::string& address) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in from = {};
  from.sin_family = AF_INET;
  EXPECT_EQ(inet_pton(AF_INET, address.c_str(), &from.sin_addr), 1);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&from), sizeof(from)), 0);
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const std::string& listens = server.address();
  to.sin_port = htons(
      static_cast<uint16_t>(std::stoi(listens.substr(listens.rfind(':') + 1))));
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
  fcntl(fd, F_SETFL, O_NONBLOCK);
  return grpc::CreateInsecureChannelFromFd("quantd", fd);
}

class CallLimitTest : public ::testing::Test {
 protected:
  static server::ServerOptions Options() {
    server::ServerOptions options;
    options.limits.calls = kCalls;
    // None of them ends for that.
    options.limits.idle_timeout = absl::Hours(1);
    return options;
  }

  // Whether the server takes the call and says something.
  bool IsAnswered(RawStream* stream, const std::string& request) {
    std::string answer;
    return stream->Write(request) && stream->Read(&answer);
  }

  std::string Reason(const grpc::Status& status) {
    return std::string(core::ErrorReason(
        absl::ResourceExhaustedError(status.error_message())));
  }

  double Refused() {
    return MetricValue(server_.metrics(), "quantd_limit_rejections_total");
  }

  static std::string OpenTensor() {
    return OpenTensorRequest().SerializeAsString();
  }

  // As many streams as a caller may have.
  std::vector<std::unique_ptr<RawStream>> Fill(
      const std::shared_ptr<grpc::Channel>& channel) {
    std::vector<std::unique_ptr<RawStream>> streams;
    for (int i = 0; i < kCalls / 2; ++i) {
      streams.push_back(std::make_unique<RawStream>(channel, kQuantize));
      EXPECT_TRUE(IsAnswered(streams.back().get(), OpenTensor()));
    }
    return streams;
  }

  static constexpr int kCalls = 32;
  static constexpr char kQuantize[] = "/quantd.v1.QuantizationService/Quantize";
  static constexpr char kWatch[] = "/grpc.health.v1.Health/Watch";
  static constexpr char kCheck[] = "/grpc.health.v1.Health/Check";

  TestServer server_{Options()};
  const std::shared_ptr<grpc::Channel> mine_ =
      ChannelFrom(server_, "127.0.0.2");
  const std::shared_ptr<grpc::Channel> yours_ =
      ChannelFrom(server_, "127.0.0.3");
};

TEST_F(CallLimitTest, RefusesTheCallsOfOneCallerAndServesTheNext) {
  auto streams = Fill(mine_);
  for (const char* method :
       {kQuantize, "/quantd.v1.EncodingService/ListModels"}) {
    RawStream beyond(mine_, method);
    std::string answer;
    EXPECT_FALSE(beyond.Read(&answer)) << method;
    const grpc::Status status = beyond.Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(Reason(status), "CALL_LIMIT") << method;
  }
  EXPECT_EQ(Refused(), 2);
  // All, with those of the next.
  const auto others = Fill(yours_);
  const auto third = ChannelFrom(server_, "127.0.0.4");
  EXPECT_EQ(Reason(RawStream(third, kQuantize).Finish()), "CALL_LIMIT");
  // The health has room of its own.
  RawStream check(third, kCheck);
  EXPECT_TRUE(IsAnswered(&check, ""));
  RawStream watch(third, kWatch);
  EXPECT_TRUE(IsAnswered(&watch, ""));
  streams.clear();
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    RawStream stream(third, kQuantize);
    return IsAnswered(&stream, OpenTensor());
  }));
}

TEST_F(CallLimitTest, CancelsThoseThatWatchTheHealthWithoutRoom) {
  std::vector<std::unique_ptr<RawStream>> watching;
  for (int i = 0; i < kCalls / 16; ++i) {
    watching.push_back(std::make_unique<RawStream>(mine_, kWatch));
    EXPECT_TRUE(IsAnswered(watching.back().get(), ""));
  }
  RawStream beyond(mine_, kWatch);
  beyond.Write("");
  EXPECT_EQ(beyond.Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(Refused(), 1);
  RawStream check(mine_, kCheck);
  EXPECT_TRUE(IsAnswered(&check, ""));
  // The others go on.
  RawStream next(yours_, kWatch);
  EXPECT_TRUE(IsAnswered(&next, ""));
  watching.front().reset();
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    RawStream stream(mine_, kWatch);
    return IsAnswered(&stream, "");
  }));
}

}  // namespace
}  // namespace quantd::testing::builtin_services_test
