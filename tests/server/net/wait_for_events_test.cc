#include "server/net/wait_for_events.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>

#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "gtest/gtest.h"
#include "server/net/file_descriptor.h"

namespace quantd::server {
namespace {

class WaitForEventsTest : public ::testing::Test {
 protected:
  WaitForEventsTest() {
    int fds[2];
    EXPECT_EQ(pipe(fds), 0);
    read_end_ = FileDescriptor(fds[0]);
    write_end_ = FileDescriptor(fds[1]);
  }

  FileDescriptor read_end_;
  FileDescriptor write_end_;
};

TEST_F(WaitForEventsTest, SaysThatTheTimeIsOver) {
  const absl::Duration end = core::SteadyNow() + absl::Milliseconds(20);
  EXPECT_FALSE(WaitForEvents(read_end_.get(), POLLIN, end));
  EXPECT_EQ(errno, ETIMEDOUT);
  EXPECT_GE(core::SteadyNow(), end);
}

TEST_F(WaitForEventsTest, SeesWhatIsThere) {
  ASSERT_EQ(write(write_end_.get(), "x", 1), 1);
  EXPECT_TRUE(WaitForEvents(read_end_.get(), POLLIN,
                            core::SteadyNow() + absl::Seconds(20)));
  // Even when the time was over before.
  EXPECT_TRUE(WaitForEvents(read_end_.get(), POLLIN, absl::ZeroDuration()));
}

TEST_F(WaitForEventsTest, LooksAtTheEventsAskedFor) {
  EXPECT_TRUE(WaitForEvents(write_end_.get(), POLLOUT, absl::ZeroDuration()));
  EXPECT_FALSE(WaitForEvents(read_end_.get(), POLLIN, absl::ZeroDuration()));
}

}  // namespace
}  // namespace quantd::server
