#include "client/models/model_importance.h"

#include <string>

#include "absl/types/span.h"
#include "client/cpp/tensor.h"
#include "quantd/v1/encoding.pb.h"
#include "quantd/v1/tensor.pb.h"

namespace quantd {

bool SearchesErrors(const EncodingSpec& spec) {
  return spec.method() == v1::CALIBRATION_METHOD_MSE ||
         spec.method() == v1::CALIBRATION_METHOD_SQNR ||
         spec.method() == v1::CALIBRATION_METHOD_BEST_OF;
}

bool NeedsInputs(const EncodingSpec& spec) {
  return spec.has_importance() && spec.importance().weight().empty() &&
         spec.importance().inputs().model().empty();
}

void ModelImportance::SetSource(const std::string& model,
                                const std::string& revision) {
  source_.set_model(model);
  source_.set_revision(revision);
}

void ModelImportance::Apply(const std::string& tensor,
                            EncodingSpec* spec) const {
  const auto weights = weights_.find(tensor);
  if (weights != weights_.end()) {
    if (!SearchesErrors(*spec)) return;
    spec->mutable_importance()->mutable_weight()->Assign(
        weights->second.begin(), weights->second.end());
    return;
  }
  if (!NeedsInputs(*spec)) return;
  v1::TensorName inputs = source_;
  inputs.set_tensor(spec->importance().inputs().tensor());
  if (inputs.tensor().empty()) {
    const auto found = inputs_.find(tensor);
    if (found == inputs_.end()) return spec->clear_importance();
    inputs.set_tensor(found->second);
  }
  *spec->mutable_importance()->mutable_inputs() = inputs;
}

absl::Span<const double> ModelImportance::WeightsOf(
    const std::string& tensor) const {
  const auto found = weights_.find(tensor);
  return found == weights_.end() ? absl::Span<const double>() : found->second;
}

}  // namespace quantd
