#include "server/net/wait_for_events.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"

namespace quantd::server {

bool WaitForEvents(int fd, short events, absl::Duration end) {
  pollfd polled = {fd, events, 0};
  while (true) {
    const absl::Duration left =
        std::max(end - core::SteadyNow(), absl::ZeroDuration());
    const timespec wait = absl::ToTimespec(left);
    const int ready = ppoll(&polled, 1, &wait, nullptr);
    if (ready > 0) return true;
    if (ready == 0) {
      errno = ETIMEDOUT;
      return false;
    }
    if (errno != EINTR) return false;
  }
}

}  // namespace quantd::server
