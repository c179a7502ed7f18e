// The importance of a spec: how much the squared error of each element counts.

#ifndef QUANTD_SERVER_RPC_SPEC_IMPORTANCE_H_
#define QUANTD_SERVER_RPC_SPEC_IMPORTANCE_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/importance.h"
#include "core/parallel/stop_token.h"
#include "core/types/block_layout.h"
#include "quantd/v1/encoding.pb.h"
#include "quantd/v1/tensor.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/caller.h"
#include "server/rpc/rpc_environment.h"
#include "server/store/statistics_store.h"
#include "server/wire/encoding_proto.h"

namespace quantd::server {

// Weights that come with the spec, or from stored statistics. Until those are
// read, all weights are 1. Not thread-safe.
class SpecImportance {
 public:
  // `tensor`       the name of the tensor that has the spec.
  // `spec`         resolved for `layout`, which is that of the shape.
  // `description`  of a slice, the weights are those of the whole.
  // Errors: METHOD_INVALID, NAME_INVALID, MEMORY_BUDGET; at the fields of an
  // Importance, or at none.
  static absl::StatusOr<std::shared_ptr<SpecImportance>> Create(
      const RpcEnvironment& env, const Caller& caller,
      const v1::Importance& proto, const v1::TensorName& tensor,
      const core::EncodingSpec& spec, const core::BlockLayout& layout,
      const TensorDescription& description);

  // Read asks the store, which may take long.
  bool waits() const { return inputs_.has_value(); }
  // Reads the weights; once.
  // Errors: STATISTICS_NOT_FOUND, METHOD_INVALID, MEMORY_BUDGET, CANCELLED, of
  // the store; at the fields of an Importance.
  absl::Status Read(const RpcEnvironment& env, core::StopToken stop);

  // Stays where it is.
  const core::Importance* get() const { return &importance_; }

 private:
  SpecImportance(core::Importance importance, TensorDescription description,
                 int64_t axis, MemoryBudget::Lease lease)
      : importance_(std::move(importance)),
        description_(std::move(description)),
        axis_(axis),
        lease_(std::move(lease)) {}

  absl::StatusOr<std::vector<double>> ReadWeights(const RpcEnvironment& env,
                                                  core::StopToken stop) const;

  core::Importance importance_;
  const TensorDescription description_;
  const int64_t axis_;
  const MemoryBudget::Lease lease_;
  // Whose statistics are still to be read.
  absl::optional<EncodingKey> inputs_;
  std::shared_ptr<StatisticsStore> statistics_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_SPEC_IMPORTANCE_H_
