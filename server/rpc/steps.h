// Who does a step of a call.

#ifndef QUANTD_SERVER_RPC_STEPS_H_
#define QUANTD_SERVER_RPC_STEPS_H_

#include <functional>

#include "absl/time/time.h"
#include "core/parallel/thread_pool.h"
#include "server/rpc/rpc_environment.h"

namespace quantd::server {

// Work that is as well done by the thread that is there: to hand it to another
// takes a hundredth of that, and others wait no longer for it.
constexpr absl::Duration kShortWork = absl::Milliseconds(2);

// The kind of a step, which decides where it is done. Calls say no more about
// threads than that.
enum class StepKind {
  // Takes some microseconds: whoever is there does it, one of gRPC's threads
  // too, because changing threads would take longer.
  kLight,
  // Takes up to kShortWork: a worker of the caller.
  kQuantum,
  // Waits for a store: a thread that may wait and runs no kernel.
  kStore,
  // Like kStore, but reads statistics and puts those of all sources together,
  // which may take seconds: apart, so that no other read waits behind it, and
  // of lower priority, as kLong.
  kStatistics,
  // Like kStore, but writes, which others may keep waiting for seconds: apart,
  // so that no read waits behind it.
  kWrite,
  // Like kWrite, but in many transactions, with which others take turns: apart,
  // so that no short write waits behind all of them.
  kLongWrite,
  // May take more than kShortWork: a thread of its own, to its end, of lower
  // priority than those above. The operating system shares the processors; see
  // core/parallel/stop_token.h. Nothing else is done there, and no call of
  // gRPC, whose threads would be as low as those that start them.
  kLong,
};

// True if the thread of such a step waits for a store.
constexpr bool MayWait(StepKind kind) {
  return kind == StepKind::kStore || kind == StepKind::kStatistics ||
         kind == StepKind::kWrite || kind == StepKind::kLongWrite;
}

// True if the step is of lower priority, and so calls nothing of gRPC.
constexpr bool IsLowPriority(StepKind kind) {
  return kind == StepKind::kStatistics || kind == StepKind::kLong;
}

// True if a thread for steps of kind `there` may do one of kind `next`.
constexpr bool MayDo(StepKind there, StepKind next) {
  return there == next ||
         (there == StepKind::kQuantum && next == StepKind::kLight);
}

// Has a step done, in the group of the calling thread.
void Schedule(const RpcEnvironment& env, StepKind kind,
              std::function<void()> step);

// How many threads compute for the group: long computations share the
// processors with the workers.
int ComputingThreads(const RpcEnvironment& env, core::ThreadPool::Group group);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_STEPS_H_
