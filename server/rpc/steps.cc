#include "server/rpc/steps.h"

#include <functional>
#include <utility>

#include "core/parallel/thread_pool.h"

namespace quantd::server {
namespace {

core::ThreadPool* PoolOf(const RpcEnvironment& env, StepKind kind) {
  switch (kind) {
    case StepKind::kStore:
      return env.store_pool;
    case StepKind::kStatistics:
      return env.statistics_pool;
    case StepKind::kWrite:
      return env.write_pool;
    case StepKind::kLongWrite:
      return env.long_write_pool;
    case StepKind::kLong:
      return env.long_pool;
    case StepKind::kLight:
    case StepKind::kQuantum:
      break;
  }
  return env.pool;
}

}  // namespace

void Schedule(const RpcEnvironment& env, StepKind kind,
              std::function<void()> step) {
  PoolOf(env, kind)->Schedule(std::move(step));
}

int ComputingThreads(const RpcEnvironment& env, core::ThreadPool::Group group) {
  return env.pool->BusyThreads(group) + env.long_pool->BusyThreads(group);
}

}  // namespace quantd::server
