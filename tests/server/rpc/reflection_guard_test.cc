#include "server/rpc/reflection_guard.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/support/metric_value.h"
#include "tests/support/raw_stream.h"
#include "tests/support/test_server.h"

namespace quantd::testing {
namespace {

constexpr absl::Duration kLongEnough = absl::Seconds(60);
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
  TestServer server;
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
  options.limits.idle_timeout = absl::Milliseconds(200);
  TestServer server(std::move(options));
  const auto channel = server.NewChannel();
  const auto streams = OpenStreams(channel);
  EXPECT_TRUE(PollUntil(kLongEnough,
                        [&] { return Ask(channel) == grpc::StatusCode::OK; }));
}

}  // namespace
}  // namespace quantd::testing
