// The stored statistics of a layer's inputs, which a request names.

#ifndef QUANTD_SERVER_RPC_LAYER_INPUTS_H_
#define QUANTD_SERVER_RPC_LAYER_INPUTS_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/statistics/gram_state.h"
#include "quantd/v1/tensor.pb.h"
#include "server/store/encoding_store.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// `inputs`, whose model and revision default to those of the weight `tensor`.
v1::TensorName WithDefaults(v1::TensorName inputs,
                            const v1::TensorName& tensor);

// GRAM_INVALID: the statistics have no Gram matrix.
absl::Status NoGramError();

// Steps, parts and counts of the Gram matrix of the inputs, without its sums.
// Errors: GRAM_INVALID where there is none; those of the store, such as
// STATISTICS_NOT_FOUND.
absl::StatusOr<core::GramState::Parts> FindGram(StatisticsStore* statistics,
                                                const EncodingKey& inputs);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_LAYER_INPUTS_H_
