#include "server/net/stop_signal.h"

#include <thread>

#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace quantd::server {
namespace {

TEST(StopSignalTest, StaysSent) {
  StopSignal signal;
  EXPECT_FALSE(signal.WaitFor(absl::ZeroDuration()));
  EXPECT_FALSE(signal.WaitFor(absl::Milliseconds(1)));
  signal.Send();
  signal.Send();
  EXPECT_TRUE(signal.WaitFor(absl::ZeroDuration()));
  EXPECT_TRUE(signal.WaitFor(absl::Seconds(60)));
}

TEST(StopSignalTest, WakesWhoWaits) {
  StopSignal signal;
  std::thread sender([&signal] { signal.Send(); });
  EXPECT_TRUE(signal.WaitFor(absl::Seconds(60)));
  sender.join();
}

}  // namespace
}  // namespace quantd::server
