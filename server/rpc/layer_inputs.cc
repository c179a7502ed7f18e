#include "server/rpc/layer_inputs.h"

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "core/statistics/gram_state.h"
#include "quantd/v1/tensor.pb.h"
#include "server/store/encoding_store.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

v1::TensorName WithDefaults(v1::TensorName inputs,
                            const v1::TensorName& tensor) {
  if (inputs.model().empty()) inputs.set_model(tensor.model());
  if (inputs.revision().empty()) inputs.set_revision(tensor.revision());
  return inputs;
}

absl::Status NoGramError() {
  return core::GramInvalidError(
      "the statistics have no Gram matrix, expected contributions with "
      "features.gram");
}

absl::StatusOr<core::GramState::Parts> FindGram(StatisticsStore* statistics,
                                                const EncodingKey& inputs) {
  absl::StatusOr<absl::optional<core::GramState::Parts>> found =
      statistics->FindGram(inputs);
  if (!found.ok()) return found.status();
  if (found->has_value()) return **std::move(found);
  // Which tells why there is none.
  absl::Status status =
      statistics
          ->ReadGram(inputs, [](int64_t /*memory*/) { return NoGramError(); })
          .status();
  return status.ok() ? NoGramError() : status;
}

}  // namespace quantd::server
