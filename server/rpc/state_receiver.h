// Statistics that come in place of a tensor's elements.

#ifndef QUANTD_SERVER_RPC_STATE_RECEIVER_H_
#define QUANTD_SERVER_RPC_STATE_RECEIVER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/statistics_state.h"
#include "core/types/tensor_slice.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/rpc_environment.h"
#include "server/wire/contribution_state.h"

namespace quantd::server {

// Holds the bytes of a v1.ContributionState as they arrive, and reads them. All
// that it takes is charged to the memory budget first, to what is read until
// Release. Not thread-safe.
class StateReceiver {
 public:
  // The state that the header announces.
  struct Expected {
    int64_t size_bytes = 0;
    // Shape of the whole tensor, and the part of it that the elements are.
    std::vector<int64_t> shape;
    absl::optional<core::TensorSlice> slice;
    // In its canonical form.
    std::vector<int64_t> block_size;
    int mantissa_bits = 0;
    // Outline of the Gram matrix, if there is to be one; valid.
    absl::optional<core::GramState::Parts> gram;
    // The axis of the moments, if there are to be some, and their features.
    absl::optional<int64_t> moments_axis;
    int64_t moments_feature_count = 0;
  };

  // `env` must outlive the receiver.
  StateReceiver(const RpcEnvironment& env, Expected expected);

  // Makes sure that there is room for all bytes, and after Split for reading
  // them. May be tried again.
  // Errors: MEMORY_BUDGET.
  absl::Status Reserve();

  // Requires: Reserve; no more than size_bytes in all.
  void Append(absl::Span<const uint8_t> data);

  // After the last byte: finds out what reading will take.
  // Errors: STATISTICS_INVALID.
  absl::Status Split();

  // Reads what the bytes say; they are gone then.
  // Requires: Split, Reserve.
  // Errors: STATISTICS_INVALID; CANCELLED.
  absl::StatusOr<core::StatisticsState> Read(core::StopToken stop);

  // Gives back the memory of the result, which is gone.
  void Release() { lease_.Release(); }

 private:
  absl::Status CheckAsExpected(const core::StatisticsState& state) const;
  // Adds what is kept beside histograms.
  // Errors: STATISTICS_INVALID.
  absl::Status ReadFeatures(core::StatisticsState* state, core::StopToken stop);
  const core::TensorSlice* slice() const {
    return expected_.slice.has_value() ? &*expected_.slice : nullptr;
  }

  const RpcEnvironment& env_;
  const Expected expected_;
  // Beside what is held already.
  int64_t reading_bytes_ = 0;
  MemoryBudget::Lease lease_;
  std::string bytes_;
  ContributionStateBytes split_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_STATE_RECEIVER_H_
