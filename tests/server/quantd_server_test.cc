// What the limits of connections do.

#include "server/quantd_server.h"

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "tests/support/metric_value.h"
#include "tests/support/raw_stream.h"
#include "tests/support/test_server.h"

namespace quantd::testing {
namespace {

// For an answer that is not to come; a server that is in order takes less.
constexpr absl::Duration kUntilTakenToWait = absl::Milliseconds(300);
constexpr char kQuantize[] = "/quantd.v1.QuantizationService/Quantize";

grpc::Status ListModels(const std::shared_ptr<grpc::Channel>& channel,
                        const std::string& header = "") {
  const auto stub = v1::EncodingService::NewStub(channel);
  grpc::ClientContext context;
  context.AddMetadata("note", header);
  v1::ListModelsResponse response;
  return stub->ListModels(&context, v1::ListModelsRequest(), &response);
}

// Whether the connection of a channel that was used has gone, or goes.
bool IsLeft(const std::shared_ptr<grpc::Channel>& channel) {
  return channel->GetState(/*try_to_connect=*/false) != GRPC_CHANNEL_READY ||
         channel->WaitForStateChange(
             GRPC_CHANNEL_READY, absl::ToChronoTime(absl::Now() + kLongEnough));
}

TEST(QuantdServerTest, ACallBeyondTheStreamsOfAConnectionWaits) {
  server::ServerOptions options;
  options.limits.connection_streams = 2;
  TestServer server(std::move(options));
  const auto channel = server.NewChannel();
  RawStream first(channel, kQuantize);
  RawStream second(channel, kQuantize);
  const auto stub = v1::EncodingService::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kLongEnough));
  grpc::CompletionQueue queue;
  const auto call =
      stub->AsyncListModels(&context, v1::ListModelsRequest(), &queue);
  v1::ListModelsResponse response;
  grpc::Status status;
  call->Finish(&response, &status, &queue);
  void* tag = nullptr;
  bool ok = false;
  ASSERT_EQ(queue.AsyncNext(
                &tag, &ok, absl::ToChronoTime(absl::Now() + kUntilTakenToWait)),
            grpc::CompletionQueue::TIMEOUT);
  // Other connections do not wait.
  EXPECT_EQ(ListModels(server.NewChannel()).error_message(), "");
  first.WritesDone();
  EXPECT_EQ(first.Finish().error_message(), "");
  EXPECT_TRUE(queue.Next(&tag, &ok));
  EXPECT_EQ(status.error_message(), "");
  EXPECT_EQ(MetricValue(server.metrics(), "grpc_server_started_total"), 4);
  queue.Shutdown();
  EXPECT_FALSE(queue.Next(&tag, &ok));
}

TEST(QuantdServerTest, ClosesAConnectionWithoutCalls) {
  server::ServerOptions options;
  options.limits.connection_idle = absl::Milliseconds(100);
  TestServer server(std::move(options));
  const auto channel = server.NewChannel();
  EXPECT_EQ(ListModels(channel).error_message(), "");
  EXPECT_TRUE(IsLeft(channel));
  // Another one takes its place.
  EXPECT_EQ(ListModels(channel).error_message(), "");
}

TEST(QuantdServerTest, AnOldConnectionTakesNoNewCalls) {
  server::ServerOptions options;
  options.limits.connection_age = absl::Milliseconds(100);
  TestServer server(std::move(options));
  const auto channel = server.NewChannel();
  RawStream stream(channel, kQuantize);
  EXPECT_TRUE(IsLeft(channel));
  // What was under way goes on.
  stream.WritesDone();
  EXPECT_EQ(stream.Finish().error_message(), "");
}

TEST(QuantdServerTest, RefusesMoreHeadersThanItTakes) {
  server::ServerOptions options;
  options.limits.metadata_bytes = 2 << 10;
  TestServer server(std::move(options));
  const auto channel = server.NewChannel();
  EXPECT_EQ(ListModels(channel, std::string(1 << 10, 'x')).error_message(), "");
  EXPECT_EQ(ListModels(channel, std::string(3 << 10, 'x')).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
}

}  // namespace
}  // namespace quantd::testing
