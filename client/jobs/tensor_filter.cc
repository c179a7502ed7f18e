#include "client/jobs/tensor_filter.h"

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "client/files/safetensors.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"

namespace quantd::jobs {

bool TensorFilter::IsGiven() const {
  return !include.empty() || !exclude.empty() || all ||
         min_rank != TensorFilter().min_rank;
}

bool TensorFilter::Takes(const files::FileTensor& tensor) const {
  if (!ElementTypeOf(tensor.dtype).has_value()) return false;
  if (!all && static_cast<int64_t>(tensor.shape.size()) < min_rank) {
    return false;
  }
  return TakesName(tensor.name);
}

bool TensorFilter::TakesName(absl::string_view name) const {
  return (include.empty() || MatchesAny(include, name)) &&
         !MatchesAny(exclude, name);
}

}  // namespace quantd::jobs
