// How much errors in each column of a model's weights count.

#ifndef QUANTD_CLIENT_MODELS_MODEL_IMPORTANCE_H_
#define QUANTD_CLIENT_MODELS_MODEL_IMPORTANCE_H_

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "client/cpp/tensor.h"
#include "quantd/v1/tensor.pb.h"

namespace quantd {

// True if a spec compares errors, which importance weighs.
bool SearchesErrors(const EncodingSpec& spec);

// True if a spec takes importance from stored statistics, and does not say of
// which model.
bool NeedsInputs(const EncodingSpec& spec);

// Weights of columns by tensor, or the stored inputs that they follow from.
// Plain value.
class ModelImportance {
 public:
  // Errors in each column of the tensor count so much, whatever its spec.
  void SetWeights(const std::string& tensor, std::vector<double> weights) {
    weights_[tensor] = std::move(weights);
  }
  // The revision whose statistics specs with importance take.
  void SetSource(const std::string& model, const std::string& revision);
  // Names the inputs of a tensor, where its spec does not name them.
  void SetInputs(const std::string& tensor, const std::string& inputs) {
    inputs_[tensor] = inputs;
  }

  // Makes the spec of a tensor one that the server takes: with the weights, if
  // it searches; with the full name of the inputs; or without importance, where
  // there is nothing.
  void Apply(const std::string& tensor, EncodingSpec* spec) const;
  // Weights of a tensor's columns; empty where all columns count the same.
  absl::Span<const double> WeightsOf(const std::string& tensor) const;

 private:
  std::map<std::string, std::vector<double>> weights_;
  v1::TensorName source_;
  std::map<std::string, std::string> inputs_;
};

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_MODEL_IMPORTANCE_H_
