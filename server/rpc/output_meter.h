// Noise that candidates add to the output of a weight's layer.

#ifndef QUANTD_SERVER_RPC_OUTPUT_METER_H_
#define QUANTD_SERVER_RPC_OUTPUT_METER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/gram_state.h"
#include "quantd/v1/tensor.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/caller.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/layer_inputs.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_buffer.h"
#include "server/rpc/tensor_header.h"
#include "server/store/encoding_store.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// Measures the noise at the output of the layer of one weight, with the stored
// Gram matrix of the layer's inputs. Find, Reserve, Read and Measure are called
// in this order. Not thread-safe.
class OutputMeter {
 public:
  // `inputs`  whose statistics have the Gram matrix; model and revision default
  //           to those of `tensor`.
  // `env`     outlives it.
  // Errors: NAME_INVALID, at a field of `inputs`; SHAPE_INVALID for a tensor
  // without a row of one element, at no field.
  static absl::StatusOr<std::unique_ptr<OutputMeter>> Create(
      const RpcEnvironment& env, const Caller& caller,
      const v1::TensorName& inputs, const v1::TensorName& tensor,
      const TensorDescription& description);

  // About how long one worker measures so many candidates.
  absl::Duration Time(int64_t candidates) const;

  // Waits for the store: whether the matrix is there and fits.
  // Errors: GRAM_INVALID, STATISTICS_NOT_FOUND.
  absl::Status Find();
  // Takes the memory that is needed until the end. May be tried again.
  // Errors: MEMORY_BUDGET.
  absl::Status Reserve();
  // Waits for the store: reads the matrix.
  // Errors: those of Find and Reserve, CANCELLED.
  absl::Status Read(core::StopToken stop);
  bool has_read() const { return gram_.has_value(); }
  // Requires: has_read().
  int64_t clipped_input_count() const { return gram_->clipped(); }

  // The squared error at the output divided by the output's square, for each of
  // `encodings`. `tensor`  all of it.
  // Errors: CANCELLED.
  absl::StatusOr<std::vector<double>> Measure(
      const TensorBuffer& tensor,
      absl::Span<const ResolvedEncoding* const> encodings,
      core::StopToken stop) const;

 private:
  OutputMeter(const RpcEnvironment& env, EncodingKey inputs,
              std::shared_ptr<StatisticsStore> statistics,
              const TensorDescription& description);

  int64_t threads() const;
  // Rows that are measured together, a task for each thread.
  int64_t band_rows() const;
  // With a matrix in such parts.
  int64_t WorkBytes(int64_t part_size) const;

  const RpcEnvironment& env_;
  const core::ElementType type_;
  const int64_t rows_;
  const int64_t columns_;
  const LayerGram inputs_;
  int64_t part_size_;
  MemoryBudget::Lease lease_;
  absl::optional<core::GramState> gram_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_OUTPUT_METER_H_
