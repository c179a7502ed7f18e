#include "server/rpc/stream_transport.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/errors.h"
#include "grpcpp/grpcpp.h"

namespace quantd::server {
namespace {

constexpr int64_t kKiB = int64_t{1} << 10;

// Of no call: what it is told to start does not begin.
class IdleReactor final : public StreamTransport::Reactor {
 public:
  void OnDone() override {}
};

std::vector<grpc::ByteBuffer> Messages(int count, int64_t bytes) {
  const grpc::Slice slice(std::string(bytes, '\0'));
  return std::vector<grpc::ByteBuffer>(count, grpc::ByteBuffer(&slice, 1));
}

class StreamTransportTest : public ::testing::Test {
 protected:
  IdleReactor reactor_;
  StreamTransport transport_{&reactor_};
};

TEST_F(StreamTransportTest, FewerAnswersWaitWhenMemoryIsShort) {
  transport_.Answer(Messages(1, 255 * kKiB));
  EXPECT_FALSE(transport_.QueueIsFull(/*roomy=*/false));
  transport_.Answer(Messages(1, kKiB));
  EXPECT_TRUE(transport_.QueueIsFull(/*roomy=*/false));
  EXPECT_FALSE(transport_.QueueIsFull(/*roomy=*/true));
  transport_.Answer(Messages(7, 256 * kKiB));
  EXPECT_TRUE(transport_.QueueIsFull(/*roomy=*/true));
}

TEST_F(StreamTransportTest, HoldsAnswersUntilTheyAreWritten) {
  transport_.Answer(Messages(2, kKiB));
  const int64_t both_bytes = transport_.held_bytes();
  EXPECT_GT(both_bytes, 2 * kKiB);
  transport_.WriteNext();
  EXPECT_TRUE(transport_.write_start_time().has_value());
  transport_.WriteDone(/*ok=*/true);
  EXPECT_FALSE(transport_.write_start_time().has_value());
  EXPECT_EQ(transport_.held_bytes(), both_bytes / 2);
  transport_.WriteDone(/*ok=*/true);
  EXPECT_FALSE(transport_.has_answers());
  EXPECT_EQ(transport_.held_bytes(), 0);
}

TEST_F(StreamTransportTest, CountsWhatGrpcHasReadAheadOfLargeMessages) {
  transport_.Answer(Messages(1, 256 * kKiB));
  EXPECT_GT(transport_.held_bytes(), 256 * kKiB + kLookAheadBytes);
}

TEST_F(StreamTransportTest, EndsOnceWhenAllAnswersAreWritten) {
  transport_.Answer(Messages(1, kKiB));
  transport_.WriteNext();
  transport_.EndWith(core::DrainingError());
  transport_.EndWith(absl::CancelledError());
  EXPECT_EQ(transport_.end(), core::DrainingError());
  transport_.Finish();
  EXPECT_FALSE(transport_.finished());
  transport_.WriteDone(/*ok=*/true);
  EXPECT_FALSE(transport_.cancelled());
  transport_.Finish();
  EXPECT_TRUE(transport_.finished());
}

TEST_F(StreamTransportTest, ACancelledCallEndsWithItsAnswersUnwritten) {
  transport_.Answer(Messages(2, kKiB));
  transport_.WriteNext();
  transport_.EndWith(absl::CancelledError());
  transport_.WriteDone(/*ok=*/false);
  EXPECT_TRUE(transport_.cancelled());
  transport_.WriteNext();
  transport_.Finish();
  EXPECT_TRUE(transport_.finished());
}

}  // namespace
}  // namespace quantd::server
