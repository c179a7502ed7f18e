// What a client that does not read costs, and how a server comes to rest.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "tests/support/metric_value.h"
#include "tests/support/raw_stream.h"
#include "tests/support/sanitizers.h"
#include "tests/support/test_server.h"

namespace quantd::testing::flow_control_test {
namespace {

constexpr char kQuantize[] = "/quantd.v1.QuantizationService/Quantize";

using DequantizeStream =
    grpc::ClientReaderWriter<v1::DequantizeRequest, v1::DequantizeResponse>;

// Codes become reals of eight times their size.
v1::DequantizeHeader CodesHeader(int64_t count) {
  v1::DequantizeHeader header;
  header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT64);
  header.mutable_tensor()->add_shape(count);
  header.mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT8);
  header.mutable_encoding()->add_scale(0.5f);
  return header;
}

// Messages of one stream, and what their answers add up to.
struct Traffic {
  std::string name;
  int64_t message_count;
  std::function<v1::DequantizeRequest(int64_t)> message;
  int64_t element_count;

  friend std::ostream& operator<<(std::ostream& os, const Traffic& traffic) {
    return os << traffic.name;
  }
};

// One tensor in many chunks.
Traffic LargeTensor(int64_t chunk_count) {
  constexpr int64_t kChunkBytes = 64 << 10;
  return {"one large tensor", chunk_count,
          [chunk_count](int64_t i) {
            v1::DequantizeRequest request;
            if (i == 0) {
              *request.mutable_header() =
                  CodesHeader(chunk_count * kChunkBytes);
            }
            request.set_offset(i * kChunkBytes);
            request.set_data(std::string(kChunkBytes, '\x01'));
            return request;
          },
          chunk_count * kChunkBytes};
}

// Many tensors of one message each.
Traffic SmallTensors(int64_t count) {
  constexpr int64_t kElements = 256;
  return {"many small tensors", count,
          [](int64_t) {
            v1::DequantizeRequest request;
            *request.mutable_header() = CodesHeader(kElements);
            request.set_data(std::string(kElements, '\x01'));
            return request;
          },
          count * kElements};
}

// Writes all messages, then half-closes; counts what it got rid of.
void WriteAll(const Traffic& traffic, DequantizeStream* stream,
              std::atomic<int64_t>* written) {
  for (int64_t i = 0; i < traffic.message_count; ++i) {
    if (!stream->Write(traffic.message(i))) return;
    written->fetch_add(1);
  }
  stream->WritesDone();
}

// Reads to the end; every element has to come.
void ReadAll(const Traffic& traffic, DequantizeStream* stream) {
  v1::DequantizeResponse response;
  int64_t bytes = 0;
  uint64_t count = 0;
  while (stream->Read(&response)) {
    EXPECT_FALSE(response.has_error()) << response.error().message();
    bytes += static_cast<int64_t>(response.data().size());
    count += response.summary().count();
  }
  EXPECT_EQ(bytes, traffic.element_count * 8);
  EXPECT_EQ(count, static_cast<uint64_t>(traffic.element_count));
}

class SlowReaderTest : public ::testing::TestWithParam<Traffic> {};

TEST_P(SlowReaderTest, StopsTheServerFromReadingAndNobodyElse) {
  const Traffic& traffic = GetParam();
  server::ServerOptions options;
  options.threads = 2;
  // Neither is turned away, nor is the one that is stalled ended, however busy
  // the machine is.
  options.limits.queue_delay = absl::Hours(1);
  options.limits.idle_timeout = absl::Hours(1);
  TestServer server(options);

  const auto stub = v1::QuantizationService::NewStub(server.NewChannel());
  grpc::ClientContext context;
  const auto stalled = stub->Dequantize(&context);
  std::atomic<int64_t> written{0};
  std::thread writer([&] { WriteAll(traffic, stalled.get(), &written); });

  // As much traffic passes on another stream: time enough for all of it to
  // pass on the first one, if the server went on reading.
  {
    grpc::ClientContext other_context;
    const auto other = server.quantization().Dequantize(&other_context);
    std::atomic<int64_t> other_written{0};
    std::thread other_writer(
        [&] { WriteAll(traffic, other.get(), &other_written); });
    ReadAll(traffic, other.get());
    other_writer.join();
    EXPECT_TRUE(other->Finish().ok());
  }
  const int64_t stalled_at = written.load();
  EXPECT_LT(stalled_at, traffic.message_count / 2);
  RecordProperty("messages_taken", static_cast<int>(stalled_at));

  // The client begins to read, and the server goes on as if nothing had been.
  ReadAll(traffic, stalled.get());
  writer.join();
  EXPECT_EQ(written.load(), traffic.message_count);
  EXPECT_TRUE(stalled->Finish().ok());
}

INSTANTIATE_TEST_SUITE_P(Traffic, SlowReaderTest,
                         ::testing::Values(LargeTensor(kThreadSanitized ? 150
                                                                        : 400),
                                           SmallTensors(20000)),
                         [](const ::testing::TestParamInfo<Traffic>& info) {
                           return info.index == 0 ? "OneLargeTensor"
                                                  : "ManySmallTensors";
                         });

// Tensors of four float32 elements, whole or in halves.
std::string Tensor(int64_t elements_sent) {
  v1::QuantizeRequest request;
  v1::QuantizeHeader& header = *request.mutable_header();
  header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  header.mutable_tensor()->add_shape(4);
  header.mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT8);
  header.mutable_encoding()->add_scale(1);
  request.set_data(std::string(elements_sent * 4, '\0'));
  return request.SerializeAsString();
}
std::string SecondHalf() {
  v1::QuantizeRequest request;
  request.set_offset(8);
  request.set_data(std::string(8, '\0'));
  return request.SerializeAsString();
}

// The next answer that ends a tensor: "OK", or the reason of its error; "END"
// when the stream has none.
std::string NextAnswer(RawStream& stream) {
  std::string bytes;
  while (stream.Read(&bytes)) {
    v1::QuantizeResponse response;
    EXPECT_TRUE(response.ParseFromString(bytes));
    if (response.has_error()) return response.error().reason();
    if (response.has_summary()) return "OK";
  }
  return "END";
}

// "UNAVAILABLE DRAINING: the server ...".
std::string Text(const grpc::Status& status) {
  return absl::StrCat(absl::StatusCodeToString(
                          static_cast<absl::StatusCode>(status.error_code())),
                      " ", status.error_message());
}

constexpr char kDraining[] =
    "UNAVAILABLE DRAINING: the server is about to stop; try another";

class DrainTest : public ::testing::Test {
 protected:
  // By default longer than any stream lasts.
  explicit DrainTest(absl::Duration grace = absl::Hours(1))
      : server_(Options(grace)), channel_(server_.NewChannel()) {}
  ~DrainTest() override {
    if (draining_.joinable()) draining_.join();
  }

  static server::ServerOptions Options(absl::Duration grace) {
    server::ServerOptions options;
    options.threads = 2;
    options.drain_grace = grace;
    options.limits.idle_timeout = absl::Hours(1);
    return options;
  }

  // Starts to drain and returns when streams are turned away.
  void StartDraining() {
    RawStream idle(channel_, kQuantize);
    idle.Write(Tensor(4));
    EXPECT_EQ(NextAnswer(idle), "OK");
    draining_ = std::thread([this] { server_.server().Drain(); });
    EXPECT_EQ(NextAnswer(idle), "END");
  }

  // grpc.health.v1.HealthCheckResponse: {1: status}, 1 is SERVING and 2
  // NOT_SERVING.
  std::string Health() {
    RawStream call(server_.NewChannel(), "/grpc.health.v1.Health/Check");
    call.Write("");
    call.WritesDone();
    std::string response;
    call.Read(&response);
    call.Finish();
    return response;
  }

  void WaitForOpenTensors(int count) {
    EXPECT_TRUE(PollUntil(kLongEnough, [&] {
      return MetricValue(server_.metrics(), "quantd_active_tensors") == count;
    }));
  }

  TestServer server_;
  const std::shared_ptr<grpc::Channel> channel_;
  std::thread draining_;
};

TEST_F(DrainTest, LetsOpenTensorsFinishAndTurnsAwayNewOnes) {
  RawStream watch(channel_, "/grpc.health.v1.Health/Watch");
  watch.Write("");
  std::string health;
  EXPECT_TRUE(watch.Read(&health));
  EXPECT_EQ(health, "\x08\x01");
  RawStream open(channel_, kQuantize);
  open.Write(Tensor(2));
  RawStream open_with_more(channel_, kQuantize);
  open_with_more.Write(Tensor(2));
  RawStream served(channel_, kQuantize);
  served.Write(Tensor(4));
  EXPECT_EQ(NextAnswer(served), "OK");
  RawStream failed(channel_, kQuantize);
  failed.Write(Tensor(5));
  EXPECT_EQ(NextAnswer(failed), "TENSOR_TOO_LONG");
  WaitForOpenTensors(2);

  StartDraining();

  EXPECT_TRUE(watch.Read(&health));
  EXPECT_EQ(health, "\x08\x02");
  watch.Cancel();
  // Streams without an open tensor end, in words.
  EXPECT_EQ(NextAnswer(served), "END");
  EXPECT_EQ(Text(served.Finish()), kDraining);
  EXPECT_EQ(NextAnswer(failed), "END");
  EXPECT_EQ(Text(failed.Finish()), kDraining);
  // There is nobody else to call.
  RawStream late(channel_, kQuantize);
  late.Write(Tensor(4));
  EXPECT_EQ(NextAnswer(late), "END");
  EXPECT_EQ(late.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_FALSE(server_.server().CheckReady().ok());

  // Tensors that were open are served, those behind them are not.
  EXPECT_TRUE(open.Write(SecondHalf()));
  EXPECT_EQ(NextAnswer(open), "OK");
  EXPECT_EQ(NextAnswer(open), "END");
  EXPECT_EQ(Text(open.Finish()), kDraining);
  EXPECT_TRUE(open_with_more.Write(SecondHalf()));
  open_with_more.Write(Tensor(4));
  EXPECT_EQ(NextAnswer(open_with_more), "OK");
  EXPECT_EQ(NextAnswer(open_with_more), "END");
  EXPECT_EQ(Text(open_with_more.Finish()), kDraining);

  // With the last stream gone, so is the server.
  draining_.join();
  EXPECT_EQ(MetricValue(server_.metrics(), "quantd_active_streams"), 0);
}

TEST_F(DrainTest, SendsClientsElsewhereWhileItFinishesATensor) {
  TestServer other;
  grpc::ChannelArguments arguments;
  arguments.SetLoadBalancingPolicyName("round_robin");
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto stub = v1::EncodingService::NewStub(grpc::CreateCustomChannel(
      absl::StrCat("ipv4:", server_.address(), ",", other.address()),
      grpc::InsecureChannelCredentials(), arguments));
  const auto call = [&] {
    grpc::ClientContext context;
    v1::ListModelsResponse response;
    return Text(stub->ListModels(&context, v1::ListModelsRequest(), &response));
  };
  const auto called = [](TestServer& server) {
    return MetricValue(server.metrics(), "grpc_server_started_total");
  };
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    EXPECT_EQ(call(), "OK ");
    return called(server_) > 0 && called(other) > 0;
  }));
  RawStream open(channel_, kQuantize);
  open.Write(Tensor(2));
  WaitForOpenTensors(1);
  draining_ = std::thread([this] { server_.server().Drain(); });
  // Once the client has heard of it, all calls go to the other. One that hears
  // late, on a busy machine, may be told to.
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    const double before = called(server_);
    bool are_served = true;
    for (int i = 0; i < 20; ++i) {
      const std::string end = call();
      EXPECT_TRUE(end == "OK " || end == kDraining) << end;
      are_served = are_served && end == "OK ";
    }
    return are_served && called(server_) == before && Health().empty();
  }));
  EXPECT_TRUE(open.Write(SecondHalf()));
  open.WritesDone();
  EXPECT_EQ(NextAnswer(open), "OK");
  EXPECT_EQ(NextAnswer(open), "END");
  EXPECT_EQ(Text(open.Finish()), "OK ");
}

TEST_F(DrainTest, AnEarlyHeaderIsTurnedAwayToo) {
  RawStream stream(channel_, kQuantize);
  stream.Write(Tensor(2));
  WaitForOpenTensors(1);
  StartDraining();
  stream.Write(Tensor(4));
  EXPECT_EQ(NextAnswer(stream), "TENSOR_INCOMPLETE");
  EXPECT_EQ(NextAnswer(stream), "END");
  EXPECT_EQ(Text(stream.Finish()), kDraining);
}

class ShortGraceTest : public DrainTest {
 protected:
  ShortGraceTest() : DrainTest(absl::Milliseconds(50)) {}
};

TEST_F(ShortGraceTest, ATensorThatOutlastsTheGraceMayBeSentElsewhere) {
  RawStream stream(channel_, kQuantize);
  stream.Write(Tensor(2));
  WaitForOpenTensors(1);
  draining_ = std::thread([this] { server_.server().Drain(); });
  EXPECT_EQ(NextAnswer(stream), "END");
  EXPECT_EQ(Text(stream.Finish()), kDraining);
}

}  // namespace
}  // namespace quantd::testing::flow_control_test
