// Objects that every handler works with.

#ifndef QUANTD_SERVER_RPC_RPC_ENVIRONMENT_H_
#define QUANTD_SERVER_RPC_RPC_ENVIRONMENT_H_

#include "absl/strings/string_view.h"
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
  // The threads of steps; see steps.h. Kernels are spread over the first, in
  // the group of their caller.
  core::ThreadPool* pool;
  core::ThreadPool* store_pool;
  core::ThreadPool* write_pool;
  core::ThreadPool* long_write_pool;
  // The statistics and long pools have a lower priority than those above.
  core::ThreadPool* statistics_pool;
  core::ThreadPool* long_pool;
  // Helps those computations, at their priority; null with one thread.
  core::ThreadPool* helper_pool;
  // Null without shared memory.
  RegionRegistry* regions;
  ImportQueue* imports;
  // The version of quantd.
  absl::string_view version;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_RPC_ENVIRONMENT_H_
