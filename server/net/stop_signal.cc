#include "server/net/stop_signal.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <ctime>

#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"

namespace quantd::server {

StopSignal::StopSignal() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void StopSignal::Send() {
  // Fails only when it was sent 2^64 - 1 times before.
  eventfd_write(event_.get(), 1);
}

bool StopSignal::WaitFor(absl::Duration timeout) const {
  const absl::Duration end = core::SteadyNow() + timeout;
  pollfd polled = {event_.get(), POLLIN, 0};
  while (true) {
    const absl::Duration left =
        std::max(end - core::SteadyNow(), absl::ZeroDuration());
    const timespec wait = absl::ToTimespec(left);
    const int ready = ppoll(&polled, 1, &wait, nullptr);
    if (ready > 0) return true;
    if (ready == 0) return false;
  }
}

}  // namespace quantd::server
