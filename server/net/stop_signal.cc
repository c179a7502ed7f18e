#include "server/net/stop_signal.h"

#include <poll.h>
#include <sys/eventfd.h>

#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "server/net/wait_for_events.h"

namespace quantd::server {

StopSignal::StopSignal() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void StopSignal::Send() {
  // Fails only when it was sent 2^64 - 1 times before.
  eventfd_write(event_.get(), 1);
}

bool StopSignal::WaitFor(absl::Duration timeout) const {
  return WaitForEvents(event_.get(), POLLIN, core::SteadyNow() + timeout);
}

}  // namespace quantd::server
