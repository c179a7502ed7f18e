#include "server/rpc/call_registry.h"

#include <algorithm>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "server/guard/limits.h"

namespace quantd::server {

void CallRegistry::Drain() {
  draining_.store(true);
  absl::MutexLock lock(&mutex_);
  for (WatchedCall* call : calls_) call->Drain();
}

void CallRegistry::EndOverdue(const Limits& limits) {
  absl::MutexLock lock(&mutex_);
  for (WatchedCall* call : calls_) call->EndIfOverdue(limits);
}

void CallRegistry::LookAfterMemory() {
  absl::MutexLock lock(&mutex_);
  for (WatchedCall* call : calls_) call->LookAfterMemory();
}

void CallRegistry::EndAll() {
  absl::MutexLock lock(&mutex_);
  for (WatchedCall* call : calls_) call->EndNow();
}

bool CallRegistry::WaitUntilEmpty(absl::Duration timeout) {
  // Abseil's mutex waits for a time of day, which may be set meanwhile.
  constexpr absl::Duration kInterval = absl::Milliseconds(2);
  const absl::Duration end = core::SteadyNow() + timeout;
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (call_count_ == 0) return true;
    }
    const absl::Duration left = end - core::SteadyNow();
    if (left <= absl::ZeroDuration()) return false;
    absl::SleepFor(std::min(left, kInterval));
  }
}

void CallRegistry::WaitUntilQuiet(absl::Duration quiet,
                                  absl::Duration timeout) {
  const absl::Duration start = core::SteadyNow();
  while (true) {
    absl::Duration until;
    {
      absl::MutexLock lock(&mutex_);
      until = std::min(std::max(last_arrival_, start) + quiet, start + timeout);
    }
    const absl::Duration left = until - core::SteadyNow();
    if (left <= absl::ZeroDuration()) return;
    absl::SleepFor(left);
  }
}

void CallRegistry::Enter(WatchedCall* call) {
  absl::MutexLock lock(&mutex_);
  last_arrival_ = core::SteadyNow();
  calls_.insert(call);
  ++call_count_;
}

void CallRegistry::Leave(WatchedCall* call) {
  {
    absl::MutexLock lock(&mutex_);
    calls_.erase(call);
  }
  delete call;
  absl::MutexLock lock(&mutex_);
  --call_count_;
}

}  // namespace quantd::server
