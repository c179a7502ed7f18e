// The calls that compute from statistics and errors. One file per RPC.

#ifndef QUANTD_SERVER_RPC_STATISTICS_RPCS_H_
#define QUANTD_SERVER_RPC_STATISTICS_RPCS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/parallel/stop_token.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/encoding_call.h"
#include "server/rpc/rpc_environment.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// Each starts a call.
EncodingCall* StartComputeEncodings(const CallArguments& arguments);
EncodingCall* StartSweep(const CallArguments& arguments);
EncodingCall* StartChooseMixture(const CallArguments& arguments);

// The most specs of a sweep, and options of a tensor.
constexpr int kMaxSweepSpecs = 64;
// The most mixtures at once.
constexpr int kMaxMixtureTargets = 64;

// One revision's statistics, tensor by tensor. Calls wait for the store. Not
// thread-safe.
class RevisionStatistics {
 public:
  explicit RevisionStatistics(const RpcEnvironment& env) : env_(env) {}

  // Errors: NAME_INVALID.
  absl::Status Open(const std::string& model, const std::string& revision);

  // Lists the tensors, in order of name, as `store` has them, and keeps those
  // that are `wanted`.
  // Errors: STATISTICS_NOT_FOUND when the revision has none; MEMORY_BUDGET;
  // CANCELLED.
  absl::Status List(StatisticsStore* store,
                    absl::FunctionRef<bool(const std::string&)> wanted,
                    core::StopToken stop);

  const std::vector<StatisticsListEntry>& entries() const { return entries_; }
  EncodingKey KeyOf(const std::string& tensor) const;

  // Reads a tensor's statistics and charges the memory budget with them. What
  // was loaded before must be gone.
  // `stopped`  is asked now and then whether nobody wants them any more.
  // Errors: those of StatisticsStore::ReadStatistics, MEMORY_BUDGET, CANCELLED
  // when it is stopped.
  absl::Status Load(StatisticsStore* store, const std::string& tensor,
                    absl::FunctionRef<bool()> stopped,
                    StoredStatistics* stored);
  // Gives back what Load has charged.
  void Unload() { lease_.Release(); }

 private:
  const RpcEnvironment& env_;
  // From Open on.
  std::string model_;
  std::string revision_;
  // The entries that are wanted.
  std::vector<StatisticsListEntry> entries_;
  // Leases of entries_ and of the loaded statistics.
  MemoryBudget::Lease entries_lease_;
  MemoryBudget::Lease lease_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_STATISTICS_RPCS_H_
