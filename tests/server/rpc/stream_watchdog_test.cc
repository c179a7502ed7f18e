#include "server/rpc/stream_watchdog.h"

#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/parallel/steady_clock.h"
#include "server/rpc/call_registry.h"

namespace quantd::server {
namespace {

constexpr absl::Duration kNever = absl::InfiniteDuration();

TEST(StreamWatchdogTest, AYoungStreamGoesOn) {
  const CallRegistry registry(/*limit=*/16);
  StreamWatchdog watchdog(&registry, kNever);
  EXPECT_TRUE(watchdog.CheckAge().ok());
  EXPECT_TRUE(watchdog.CheckMayOpen().ok());
  EXPECT_TRUE(watchdog.CheckMayIdle(-kNever).ok());
}

TEST(StreamWatchdogTest, AnOldStreamFinishesItsTensorAndOpensNoOther) {
  const CallRegistry registry(/*limit=*/16);
  const absl::Duration age = absl::Hours(1);
  // Far from the age, and from twice that.
  StreamWatchdog watchdog(&registry, age, core::SteadyNow() - 1.5 * age);
  EXPECT_TRUE(watchdog.CheckMayOpen().ok()) << "nobody has looked at its age";
  EXPECT_TRUE(watchdog.CheckAge().ok());
  EXPECT_EQ(core::ErrorReason(watchdog.CheckMayOpen()), "STREAM_AGE");
  EXPECT_EQ(core::ErrorReason(watchdog.CheckMayIdle(core::SteadyNow())),
            "STREAM_AGE");
}

TEST(StreamWatchdogTest, AStreamOfTwiceTheAgeEndsAtOnce) {
  const CallRegistry registry(/*limit=*/16);
  const absl::Duration age = absl::Hours(1);
  StreamWatchdog watchdog(&registry, age, core::SteadyNow() - 2 * age);
  EXPECT_EQ(core::ErrorReason(watchdog.CheckAge()), "STREAM_AGE");
}

TEST(StreamWatchdogTest, AClientHasAMomentForItsLastWordWhileTheServerDrains) {
  CallRegistry registry(/*limit=*/16);
  const StreamWatchdog watchdog(&registry, kNever);
  registry.Drain();
  EXPECT_EQ(core::ErrorReason(watchdog.CheckMayOpen()), "DRAINING");
  EXPECT_TRUE(watchdog.CheckMayIdle(kNever).ok());
  EXPECT_EQ(core::ErrorReason(
                watchdog.CheckMayIdle(core::SteadyNow() - absl::Seconds(1))),
            "DRAINING");
}

}  // namespace
}  // namespace quantd::server
