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
  const absl::Duration begin = clock->Now();
  const ThreadClock own = ThreadClock::OfThisThread();
  const absl::Duration end = own.Now() + 4 * kWork;
  while (own.Now() < end) continue;
  EXPECT_LT(clock->Now() - begin, kWork);
  let_go.Notify();
  waiting.join();
}

}  // namespace
}  // namespace quantd::core
