// What every handler works with.

#ifndef QUANTD_SERVER_RPC_RPC_ENVIRONMENT_H_
#define QUANTD_SERVER_RPC_RPC_ENVIRONMENT_H_

#include "core/parallel/thread_pool.h"
#include "server/guard/caller_share.h"
#include "server/guard/limits.h"
#include "server/guard/memory_budget.h"
#include "server/metrics/metrics.h"
#include "server/rpc/caller.h"
#include "server/rpc/import_queue.h"
#include "server/shared_memory/region_registry.h"

namespace quantd::server {

// Outlives every handler; all members are thread-safe.
struct RpcEnvironment {
  Limits limits;
  // And the way to the stores.
  const Authenticator* authenticator;
  Metrics* metrics;
  MemoryBudget* budget;
  CallerShares* shares;
  // Kernels and the tasks of streams, in the group of their caller.
  core::ThreadPool* pool;
  // What waits for the stores.
  core::ThreadPool* store_pool;
  // Null without shared memory.
  RegionRegistry* regions;
  ImportQueue* imports;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_RPC_ENVIRONMENT_H_
