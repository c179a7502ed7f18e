#include "server/rpc/stream_watchdog.h"

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/parallel/steady_clock.h"
#include "server/rpc/call_registry.h"

namespace quantd::server {
namespace {

// How long a stream that has nothing open stays, while the server drains.
constexpr absl::Duration kLastWordTime = absl::Milliseconds(100);

}  // namespace

StreamWatchdog::StreamWatchdog(const CallRegistry* registry,
                               absl::Duration stream_age,
                               absl::Duration start_time)
    : registry_(registry), stream_age_(stream_age), start_time_(start_time) {}

absl::Status StreamWatchdog::CheckMayOpen() const {
  if (registry_->draining()) return core::DrainingError();
  if (old_.load()) return core::StreamAgeError(stream_age_);
  return absl::OkStatus();
}

absl::Status StreamWatchdog::CheckMayIdle(absl::Duration since) const {
  if (registry_->draining() && core::SteadyNow() - since < kLastWordTime) {
    return absl::OkStatus();
  }
  return CheckMayOpen();
}

absl::Status StreamWatchdog::CheckAge() {
  const absl::Duration age = this->age();
  if (age >= stream_age_) old_.store(true);
  return age >= 2 * stream_age_ ? core::StreamAgeError(stream_age_)
                                : absl::OkStatus();
}

}  // namespace quantd::server
