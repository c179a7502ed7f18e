#include "server/rpc/reflection_guard.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
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

TEST(ReflectionTest, DoesNotKeepAServerThatDrains) {
  server::ServerOptions options;
  options.drain_grace = kLongEnough;
  TestServer server(std::move(options));
  const auto channel = server.NewChannel();
  // An open tensor keeps it.
  RawStream tensor(channel, "/quantd.v1.QuantizationService/Quantize");
  v1::QuantizeRequest request;
  v1::TensorDescription* const description =
      request.mutable_header()->mutable_tensor();
  description->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  description->add_shape(4);
  v1::Encoding* const encoding = request.mutable_header()->mutable_encoding();
  encoding->set_format(v1::NUMBER_FORMAT_INT8);
  encoding->add_scale(1);
  request.set_data(std::string(4, '\0'));
  ASSERT_TRUE(tensor.Write(request.SerializeAsString()));
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
  EXPECT_TRUE(PollUntil(kLongEnough / 2, [&] { return drained.load(); }));
  late.Cancel();
  drain.join();
}

}  // namespace
}  // namespace quantd::testing
