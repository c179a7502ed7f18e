// The stored statistics of a layer's inputs, which a request names.

#ifndef QUANTD_SERVER_RPC_LAYER_INPUTS_H_
#define QUANTD_SERVER_RPC_LAYER_INPUTS_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/gram_state.h"
#include "quantd/v1/tensor.pb.h"
#include "server/guard/memory_budget.h"
#include "server/store/encoding_store.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// `inputs`, whose model and revision default to those of the weight `tensor`.
v1::TensorName WithDefaults(v1::TensorName inputs,
                            const v1::TensorName& tensor);

// The stored Gram matrix of the inputs of one layer, which a weight needs whose
// rows have `columns` elements. Thread-safe.
class LayerGram {
 public:
  LayerGram(EncodingKey inputs, std::shared_ptr<StatisticsStore> statistics,
            int64_t columns)
      : inputs_(std::move(inputs)),
        statistics_(std::move(statistics)),
        columns_(columns) {}

  // Steps, parts and counts, without the sums. Waits for the store.
  // Errors: GRAM_INVALID where there is none, none of that many features, or
  // one of no rows; those of the store, such as STATISTICS_NOT_FOUND.
  absl::StatusOr<core::GramState::Parts> Find() const;

  // The matrix, which may be another than Find found. Waits for the store.
  // `lease`  grows to what reading takes; `way_out`  of MEMORY_BUDGET.
  // Errors: those of Find, MEMORY_BUDGET, CANCELLED.
  absl::StatusOr<core::GramState> Read(MemoryBudget* budget,
                                       MemoryBudget::Lease* lease,
                                       absl::string_view way_out,
                                       core::StopToken stop) const;

 private:
  absl::Status Check(int64_t features, int64_t rows) const;

  const EncodingKey inputs_;
  const std::shared_ptr<StatisticsStore> statistics_;
  const int64_t columns_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_LAYER_INPUTS_H_
