#include "core/parallel/thread_clock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"

namespace quantd::core {
namespace {

constexpr absl::Duration kWork = absl::Milliseconds(5);

TEST(ThreadClockTest, RunsWhileItsThreadComputes) {
  const ThreadClock clock = ThreadClock::OfThisThread();
  const absl::Duration begin = clock.Now();
  while (clock.Now() < begin + kWork) continue;
}

TEST(ThreadClockTest, StandsWhileItsThreadWaits) {
  absl::optional<ThreadClock> clock;
  absl::Notification begun;
  absl::Notification let_go;
  std::thread waiting([&] {
    clock = ThreadClock::OfThisThread();
    begun.Notify();
    let_go.WaitForNotification();
  });
  begun.WaitForNotification();
  const ThreadClock own = ThreadClock::OfThisThread();
  // It may still be on its way to where it waits. From then on not a nanosecond
  // is added, however much others compute.
  bool stood = false;
  for (int i = 0; i < 1000 && !stood; ++i) {
    const absl::Duration begin = clock->Now();
    const absl::Duration end = own.Now() + kWork;
    while (own.Now() < end) continue;
    stood = clock->Now() == begin;
  }
  EXPECT_TRUE(stood);
  let_go.Notify();
  waiting.join();
}

}  // namespace
}  // namespace quantd::core
