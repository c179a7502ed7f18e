#include "server/store/metering.h"

#include <chrono>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "core/errors.h"
#include "server/logging.h"

namespace quantd::server {
namespace {

using Clock = std::chrono::steady_clock;

struct Throttle {
  absl::Mutex mutex;
  Clock::time_point next ABSL_GUARDED_BY(mutex);
  int64_t left_out ABSL_GUARDED_BY(mutex) = 0;
};

}  // namespace

void LogStoreError(const absl::Status& status) {
  static Throttle& throttle = *new Throttle;
  int64_t left_out;
  {
    absl::MutexLock lock(&throttle.mutex);
    const Clock::time_point now = Clock::now();
    if (now < throttle.next) {
      ++throttle.left_out;
      return;
    }
    throttle.next = now + std::chrono::seconds(1);
    left_out = throttle.left_out;
    throttle.left_out = 0;
  }
  Log(LogLevel::kError, "the store fails",
      {{"error", status.message()},
       {"detail", core::ErrorDetail(status)},
       {"left_out", left_out}});
}

}  // namespace quantd::server
