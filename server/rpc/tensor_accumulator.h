// Statistics of a tensor, within the memory budget.

#ifndef QUANTD_SERVER_RPC_TENSOR_ACCUMULATOR_H_
#define QUANTD_SERVER_RPC_TENSOR_ACCUMULATOR_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/rpc_environment.h"

namespace quantd::server {

// Statistics of a tensor as it arrives, charged to the memory budget as they
// grow: at once, and refused afterwards if there was no room. Not thread-safe.
class TensorAccumulator {
 public:
  static constexpr int kNoHistograms = 0;
  // Stands for core::DefaultMantissaBits.
  static constexpr int kDefaultMantissaBits = -1;

  // Charges the memory budget with what the scale count needs, and
  // `more_bytes`.
  // Errors: MEMORY_BUDGET.
  static absl::StatusOr<std::unique_ptr<TensorAccumulator>> Create(
      const RpcEnvironment& env, core::ElementType element_type,
      std::shared_ptr<const core::BlockLayout> layout, int mantissa_bits,
      int64_t more_bytes = 0);

  // Makes sure that the memory budget has room for what the statistics take by
  // now, `copies` times. May be tried again.
  // Errors: MEMORY_BUDGET.
  absl::Status Reserve(int copies = 1);

  // Takes in the elements at `offset_bytes`, and counts what they add.
  void Update(int64_t offset_bytes, absl::Span<const uint8_t> data);

  const std::shared_ptr<const core::BlockLayout>& layout() const {
    return layout_;
  }
  const core::TensorStatistics& statistics() const { return statistics_; }
  // Bytes that the budget had room for.
  int64_t leased_bytes() const { return lease_.bytes(); }
  // Moves the statistics out; what they take stays charged.
  core::TensorStatistics Take() { return std::move(statistics_); }

 private:
  TensorAccumulator(const RpcEnvironment& env, core::ElementType element_type,
                    std::shared_ptr<const core::BlockLayout> layout,
                    int mantissa_bits, MemoryBudget::Lease lease);
  // Charges what the statistics take beyond lease_.
  void CountUnasked();

  const RpcEnvironment& env_;
  const core::ElementType element_type_;
  const std::shared_ptr<const core::BlockLayout> layout_;
  // Memory that the budget had room for, and memory that the latest elements
  // took without asking.
  MemoryBudget::Lease lease_;
  MemoryBudget::Lease unasked_lease_;
  core::TensorStatistics statistics_;
};

// How much of a tensor an accumulator takes at a time: less where histograms
// grow, which are charged only afterwards.
int64_t QuantumBytes(const RpcEnvironment& env,
                     const TensorAccumulator& accumulator);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_TENSOR_ACCUMULATOR_H_
