#include "server/rpc/layer_inputs.h"

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/gram_state.h"
#include "quantd/v1/tensor.pb.h"
#include "server/guard/memory_budget.h"
#include "server/store/encoding_store.h"
#include "server/store/statistics_store.h"

namespace quantd::server {
namespace {

absl::Status NoGramError() {
  return core::GramInvalidError(
      "the statistics have no Gram matrix, expected contributions with "
      "features.gram");
}

}  // namespace

v1::TensorName WithDefaults(v1::TensorName inputs,
                            const v1::TensorName& tensor) {
  if (inputs.model().empty()) inputs.set_model(tensor.model());
  if (inputs.revision().empty()) inputs.set_revision(tensor.revision());
  return inputs;
}

absl::StatusOr<core::GramState::Parts> LayerGram::Find() const {
  absl::StatusOr<absl::optional<core::GramState::Parts>> found =
      statistics_->FindGram(inputs_);
  if (!found.ok()) return found.status();
  if (!found->has_value()) {
    // ReadGram tells why there is none.
    const absl::Status status =
        statistics_
            ->ReadGram(inputs_,
                       [](int64_t /*memory*/) { return NoGramError(); })
            .status();
    return status.ok() ? NoGramError() : status;
  }
  const core::GramState::Parts& parts = **found;
  absl::Status status =
      Check(static_cast<int64_t>(parts.exponents.size()), parts.rows);
  if (!status.ok()) return status;
  return **std::move(found);
}

absl::StatusOr<core::GramState> LayerGram::Read(MemoryBudget* budget,
                                                MemoryBudget::Lease* lease,
                                                absl::string_view way_out,
                                                core::StopToken stop) const {
  absl::StatusOr<absl::optional<core::GramState>> gram =
      statistics_->ReadGram(inputs_, [&](int64_t bytes) {
        return stop.stopped() ? core::StoppedError()
                              : budget->Grow(lease, bytes, way_out);
      });
  if (!gram.ok()) return gram.status();
  if (!gram->has_value()) return NoGramError();
  absl::Status status = Check((*gram)->feature_count(), (*gram)->rows());
  if (!status.ok()) return status;
  return **std::move(gram);
}

absl::Status LayerGram::Check(int64_t features, int64_t rows) const {
  if (rows == 0) {
    return core::GramInvalidError(
        "a Gram matrix of no rows, expected at least one without NaN and "
        "infinities");
  }
  if (features != columns_) {
    return core::GramInvalidError(absl::StrCat(
        "a Gram matrix of ", features, " features, expected ", columns_,
        ", one for each element of a row of the tensor"));
  }
  return absl::OkStatus();
}

}  // namespace quantd::server
