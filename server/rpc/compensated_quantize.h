// Quantize with rounding that makes up for its own errors.

#ifndef QUANTD_SERVER_RPC_COMPENSATED_QUANTIZE_H_
#define QUANTD_SERVER_RPC_COMPENSATED_QUANTIZE_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/quantize/compensation_factor.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/rpc/caller.h"
#include "server/rpc/code_producer.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_job.h"
#include "server/store/encoding_store.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// A Rounding that asks for it, checked.
struct CompensatedRounding {
  // Whose statistics have the Gram matrix of the layer's inputs.
  EncodingKey inputs;
  // The caller's.
  std::shared_ptr<StatisticsStore> statistics;
  core::CompensationOptions options;
  bool measure_output = false;
};

// None where elements are rounded by themselves.
// `tensor`  that is quantized.
// Errors: ENUM_UNKNOWN, METHOD_INVALID, NAME_INVALID, at fields of a Rounding.
absl::StatusOr<absl::optional<CompensatedRounding>> CheckRounding(
    const v1::Rounding& proto, const v1::TensorName& tensor,
    const Caller& caller);

// Holds the tensor, and the Gram matrix while it rounds. The encoding comes
// from `spec` or, where that is null, from `source`, at `source_field`, which
// outlives the job.
// Errors: SHAPE_INVALID for a tensor without a row, MEMORY_BUDGET.
absl::StatusOr<std::unique_ptr<TensorJob>> MakeCompensatedQuantizeJob(
    const RpcEnvironment& env, QuantizeTask task, CompensatedRounding rounding,
    std::shared_ptr<const ResolvedSpec> spec,
    absl::optional<EncodingSource> source, absl::string_view source_field);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_COMPENSATED_QUANTIZE_H_
