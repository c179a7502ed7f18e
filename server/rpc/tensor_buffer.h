// A tensor that is held until it is complete.

#ifndef QUANTD_SERVER_RPC_TENSOR_BUFFER_H_
#define QUANTD_SERVER_RPC_TENSOR_BUFFER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/statistics/held_tensor.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/rpc_environment.h"

namespace quantd::server {

// Keeps bytes in blocks that are charged to the memory budget and allocated as
// bytes arrive, never ahead of them. Not thread-safe.
class TensorBuffer {
 public:
  static constexpr int64_t kBlockBytes = int64_t{1} << 20;

  // A buffer for `total_bytes` of a tensor, for which `beside_bytes` are leased
  // besides.
  TensorBuffer(const RpcEnvironment& env, int64_t total_bytes,
               int64_t beside_bytes);

  // Charges the budget with room for `bytes` more. May be tried again.
  // Errors: MEMORY_BUDGET.
  absl::Status Reserve(int64_t bytes);

  // Requires: reserved.
  void Append(absl::Span<const uint8_t> data);

  // Blocks of kBlockBytes, the last may be short.
  int64_t block_count() const { return static_cast<int64_t>(blocks_.size()); }
  absl::Span<const uint8_t> block(int64_t index) const;
  // Copies bytes [offset, offset + out.size()).
  // Requires: they are there.
  void Copy(int64_t offset, absl::Span<uint8_t> out) const;
  // Calls body(row, rows, reals) with copies of `band_rows` rows of `row_bytes`
  // at a time, the last may be fewer, until an error.
  absl::Status ForEachBand(int64_t row_bytes, int64_t band_rows,
                           absl::FunctionRef<absl::Status(
                               int64_t row, int64_t rows, const uint8_t* reals)>
                               body) const;

  // All of it, as the elements of a tensor of that layout, which outlives what
  // is returned, as does this.
  core::HeldTensor Held(const core::BlockLayout& layout,
                        core::ElementType type) const;

 private:
  const RpcEnvironment& env_;
  const int64_t total_bytes_;
  const int64_t beside_bytes_;
  int64_t size_bytes_ = 0;
  MemoryBudget::Lease lease_;
  std::vector<std::unique_ptr<uint8_t[]>> blocks_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_TENSOR_BUFFER_H_
