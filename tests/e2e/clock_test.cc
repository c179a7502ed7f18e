// Somebody sets the clock while the server runs.

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "server/net/stop_signal.h"
#include "tests/support/metric_value.h"
#include "tests/support/test_server.h"

namespace {

// By how much the time of day is off.
std::atomic<int64_t> g_step_seconds{0};

}  // namespace

// In place of the library's, for everything in this program.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (result == 0 && clock == CLOCK_REALTIME) {
    time->tv_sec += g_step_seconds.load();
  }
  return result;
}

namespace quantd {
namespace {

class ClockTest : public ::testing::TestWithParam<int> {
 protected:
  // By an hour, forwards or back. Abseil looks at the clock every two seconds
  // when it is asked often.
  static void Step() {
    const absl::Time before = absl::Now();
    g_step_seconds.store(GetParam() * 3600);
    ASSERT_TRUE(testing::PollUntil(testing::kLongEnough, [before] {
      return absl::AbsDuration(absl::Now() - before) > absl::Minutes(59);
    }));
  }
  void TearDown() override { g_step_seconds.store(0); }
};

// A stream with half of a tensor.
class HalfTensor {
 public:
  explicit HalfTensor(testing::TestServer& server)
      : stub_(v1::QuantizationService::NewStub(server.NewChannel())),
        stream_(stub_->Quantize(&context_)) {
    // So that what nobody ends fails the test, and does not hang.
    canceller_ = std::thread([this] {
      if (!ended_.WaitFor(testing::kLongEnough)) context_.TryCancel();
    });
    v1::TensorDescription* tensor = message_.mutable_header()->mutable_tensor();
    tensor->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
    tensor->add_shape(8);
    message_.mutable_header()->mutable_spec()->set_format(
        v1::NUMBER_FORMAT_INT8);
    message_.set_data(std::string(16, '\0'));
    stream_->Write(message_);
  }

  ~HalfTensor() {
    ended_.Send();
    canceller_.join();
  }

  void SendRest() {
    message_.clear_header();
    message_.set_offset(16);
    stream_->Write(message_);
    stream_->WritesDone();
  }

  grpc::Status Finish() {
    v1::QuantizeResponse response;
    while (stream_->Read(&response)) {
    }
    return stream_->Finish();
  }

 private:
  server::StopSignal ended_;
  std::thread canceller_;
  grpc::ClientContext context_;
  std::unique_ptr<v1::QuantizationService::Stub> stub_;
  std::unique_ptr<
      grpc::ClientReaderWriter<v1::QuantizeRequest, v1::QuantizeResponse>>
      stream_;
  v1::QuantizeRequest message_;
};

// Until the server has read all of the half.
void WaitForHalf(testing::TestServer& server) {
  ASSERT_TRUE(testing::PollUntil(testing::kLongEnough, [&server] {
    return testing::MetricValue(server.metrics(),
                                "quantd_payload_bytes_total") >= 16;
  }));
}

// Until it holds that.
void WaitForTensor(testing::TestServer& server) {
  WaitForHalf(server);
  ASSERT_TRUE(testing::PollUntil(testing::kLongEnough, [&server] {
    return server.server().memory_used_bytes() > 0;
  }));
}

// Neither at once nor an hour later, when the test has long given up.
TEST_P(ClockTest, EndsIdleStreams) {
  server::ServerOptions options;
  options.limits.idle_timeout = absl::Seconds(3);
  testing::TestServer server(options);
  const absl::Duration start = core::SteadyNow();
  HalfTensor tensor(server);
  WaitForHalf(server);
  Step();
  const grpc::Status status = tensor.Finish();
  EXPECT_EQ(status.error_message().substr(0, 12), "STREAM_IDLE:")
      << status.error_message();
  EXPECT_GE(core::SteadyNow() - start, options.limits.idle_timeout);
}

TEST_P(ClockTest, LetsYoungStreamsGoOn) {
  server::ServerOptions options;
  options.limits.stream_age = absl::Minutes(10);
  testing::TestServer server(options);
  HalfTensor tensor(server);
  WaitForTensor(server);
  Step();
  // For the server to look at its streams.
  absl::SleepFor(absl::Milliseconds(100));
  tensor.SendRest();
  const grpc::Status status = tensor.Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

// The same of a drain.
TEST_P(ClockTest, DrainsAfterTheGrace) {
  server::ServerOptions options;
  options.drain_delay = absl::ZeroDuration();
  options.drain_grace = absl::Milliseconds(300);
  testing::TestServer server(options);
  HalfTensor tensor(server);
  WaitForTensor(server);
  Step();
  const absl::Duration start = core::SteadyNow();
  server.server().Drain();
  EXPECT_GE(core::SteadyNow() - start, options.drain_grace);
  EXPECT_EQ(tensor.Finish().error_message().substr(0, 9), "DRAINING:");
}

INSTANTIATE_TEST_SUITE_P(ForwardsAndBack, ClockTest, ::testing::Values(1, -1));

}  // namespace
}  // namespace quantd
