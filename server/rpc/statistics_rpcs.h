// The calls that compute from stored statistics. One file per RPC.

#ifndef QUANTD_SERVER_RPC_STATISTICS_RPCS_H_
#define QUANTD_SERVER_RPC_STATISTICS_RPCS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/encoding_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_stream.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// Each takes over a call. `env`, `registry` and `context` must outlive it.
grpc::ServerWriteReactor<v1::ComputeEncodingsResponse>* StartComputeEncodings(
    const RpcEnvironment& env, StreamRegistry* registry,
    grpc::CallbackServerContext* context,
    const v1::ComputeEncodingsRequest& request);
grpc::ServerWriteReactor<v1::SweepResponse>* StartSweep(
    const RpcEnvironment& env, StreamRegistry* registry,
    grpc::CallbackServerContext* context, const v1::SweepRequest& request);

// The most patterns of a request, and the most specs of a sweep.
constexpr int kMaxPatterns = 1000;
constexpr int kMaxSweepSpecs = 64;

// One revision's statistics, tensor by tensor. Calls wait for the store. Not
// thread-safe.
class RevisionStatistics {
 public:
  explicit RevisionStatistics(const RpcEnvironment& env) : env_(env) {}

  // Checks the names and lists all tensors, in order of name, as `store` has
  // them.
  // Errors: NAME_INVALID; STATISTICS_NOT_FOUND when there is none;
  // MEMORY_BUDGET.
  absl::Status Open(std::shared_ptr<StatisticsStore> store,
                    const std::string& model, const std::string& revision);

  std::vector<StatisticsListEntry>& entries() { return entries_; }
  const std::vector<StatisticsListEntry>& entries() const { return entries_; }
  EncodingKey KeyOf(const StatisticsListEntry& entry) const;

  // Reads a tensor's statistics and charges the memory budget with them. What
  // was loaded before must be gone.
  // `stopped`  as for StatisticsStore::ReadStatistics.
  // Errors: those of StatisticsStore::ReadStatistics, MEMORY_BUDGET.
  absl::Status Load(const StatisticsListEntry& entry,
                    absl::FunctionRef<bool()> stopped,
                    StoredStatistics* stored);
  // Gives back what Load has charged.
  void Unload() { lease_.Release(); }

 private:
  const RpcEnvironment& env_;
  // From Open on.
  std::shared_ptr<StatisticsStore> store_;
  std::string model_;
  std::string revision_;
  std::vector<StatisticsListEntry> entries_;
  // What entries_ take, and what was loaded.
  MemoryBudget::Lease entries_lease_;
  MemoryBudget::Lease lease_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_STATISTICS_RPCS_H_
