#include "server/rpc/call_registry.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/parallel/steady_clock.h"
#include "core/parallel/thread_pool.h"
#include "server/guard/limits.h"

namespace quantd::server {
namespace {

// Ratio of the room for calls to the room for those that watch the health.
constexpr int64_t kWatchShare = 8;

}  // namespace

CallRegistry::CallRegistry(int64_t limit)
    : call_room_(limit), watch_room_(limit / kWatchShare) {}

void CallRegistry::Drain() {
  draining_.store(true);
  absl::MutexLock lock(&mutex_);
  for (const auto& item : calls_) item.first->Drain();
}

void CallRegistry::EndOverdue(const Limits& limits) {
  absl::MutexLock lock(&mutex_);
  for (const auto& item : calls_) item.first->EndIfOverdue(limits);
}

void CallRegistry::LookAfterMemory() {
  absl::MutexLock lock(&mutex_);
  for (const auto& item : calls_) item.first->LookAfterMemory();
}

void CallRegistry::EndAll() {
  absl::MutexLock lock(&mutex_);
  for (const auto& item : calls_) item.first->EndNow();
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

absl::Duration CallRegistry::last_arrival() const {
  absl::MutexLock lock(&mutex_);
  return last_arrival_;
}

absl::Status CallRegistry::Enter(WatchedCall* call,
                                 core::ThreadPool::Group caller, Kind kind) {
  absl::MutexLock lock(&mutex_);
  last_arrival_ = core::SteadyNow();
  Room* const room = kind == Kind::kWatch ? &watch_room_ : &call_room_;
  absl::Status status = room->Take(caller);
  calls_.emplace(call, Entry{caller, status.ok() ? room : nullptr});
  ++call_count_;
  return status;
}

void CallRegistry::Leave(WatchedCall* call) {
  Entry entry{};
  {
    absl::MutexLock lock(&mutex_);
    const auto found = calls_.find(call);
    entry = found->second;
    calls_.erase(found);
  }
  delete call;
  absl::MutexLock lock(&mutex_);
  if (entry.room != nullptr) entry.room->Return(entry.caller);
  --call_count_;
}

absl::Status CallRegistry::Room::Take(core::ThreadPool::Group caller) {
  if (count >= limit) return core::CallLimitError(limit, "");
  int64_t& own_count = counts[caller];
  if (own_count >= limit / 2) {
    return core::CallLimitError(limit / 2, " of this caller");
  }
  ++own_count;
  ++count;
  return absl::OkStatus();
}

void CallRegistry::Room::Return(core::ThreadPool::Group caller) {
  --count;
  const auto found = counts.find(caller);
  if (--found->second == 0) counts.erase(found);
}

}  // namespace quantd::server
