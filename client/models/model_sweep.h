// Measures specs on the tensors of a file or a folder in one pass over the
// data, and chooses one for each tensor.

#ifndef QUANTD_CLIENT_MODELS_MODEL_SWEEP_H_
#define QUANTD_CLIENT_MODELS_MODEL_SWEEP_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/files/safetensors.h"
#include "client/models/model_importance.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"
#include "client/models/tie_groups.h"
#include "quantd/v1/encoding_service.pb.h"
#include "quantd/v1/quantization_service.pb.h"
#include "quantd/v1/tensor.pb.h"

namespace quantd {

// One spec on one tensor. Plain value.
struct MeasuredCandidate {
  // Why it failed; then nothing else is set.
  absl::Status status;
  // The counts and SweepMetrics(); the rest is not measured.
  v1::ErrorMetrics metrics;
  // Size of codes and scales.
  uint64_t size_bytes = 0;
  // sum e^2 / sum x^2; infinity where finite elements came back as others, 0
  // where none are finite.
  double noise_to_signal = 0;
  // The error at the output of the layer, for the inputs of SweepOptions.
  std::optional<v1::OutputNoise> output_noise;
  // True if importance weighed the errors in the search for scales.
  bool is_weighed = false;
};

// One tensor. Plain value.
struct MeasuredTensor {
  // A tensor of the input, which outlives it.
  const files::FileTensor* tensor = nullptr;
  // Statistics of the elements, unless every candidate of the server failed.
  v1::TensorStatistics statistics;
  // In the order of the specs.
  std::vector<MeasuredCandidate> candidates;

  uint64_t element_count() const;
};

// NaN and infinities, which are not measured.
uint64_t NonFiniteCount(const v1::TensorStatistics& statistics);

// A goal that a mixture has to reach. Plain value.
struct Budget {
  enum class Kind { kMinSqnr, kMaxBytes, kMaxBitsPerElement };
  Kind kind;
  double value;

  v1::MixtureTarget TargetFor(uint64_t element_count) const;
};

// The result of SweepTensors. Plain value.
struct ModelSweep {
  // In the order of the tensors.
  std::vector<MeasuredTensor> tensors;
  // In the order of the budgets, over the tensors on which a spec succeeded.
  std::vector<v1::SweepMixture> mixtures;
};

// Is told of each tensor that is done, one at a time, in any order, on other
// threads.
using OnTensor = std::function<void(const files::FileTensor&)>;

// How tensors are measured, and what mixtures keep small. Plain value.
struct SweepOptions {
  OnTensor on_tensor = nullptr;
  // Tensors that runtimes fuse: they share the outer scale of a spec that has
  // one, and a mixture has one spec for them.
  std::vector<TieGroup> ties = {};
  // Weighs errors in the search for scales, not those that are measured.
  ModelImportance importance = {};
  // The stored inputs of weights, by weight, whose Gram matrices tell the error
  // at the output of the layer.
  std::map<std::string, v1::TensorName> inputs = {};
  // By weight, how much of the noise at the output of its layer reaches the end
  // of the model. With them mixtures keep the sum of that noise small,
  // otherwise that of the tensors' noise. All tensors need a weight and inputs
  // then.
  std::map<std::string, double> output_weights = {};
};

// The tensors of reals that have at least two dimensions.
std::vector<const files::FileTensor*> WeightsOf(const TensorInput& input);

// The metrics that SweepTensors measures besides the counts.
std::vector<v1::ErrorMetric> SweepMetrics();

// A mixture for each budget, over the tensors on which a spec succeeded. Of
// `options` it takes ties and output_weights, of the metrics sqnr_db.
// Errors: of Client::ChooseMixture.
absl::StatusOr<std::vector<v1::SweepMixture>> ChooseMixtures(
    const std::vector<MeasuredTensor>& tensors,
    const std::vector<Budget>& budgets, size_t spec_count,
    const SweepOptions& options, Client* client);

// Measures all specs on all tensors, several tensors at a time over streams of
// their own. What is under way is bounded, whatever the file. Specs with a
// gguf_type are measured here, in a second pass, and have no output noise.
// Where some specs fail on a tensor the others are measured all the same. Then
// a mixture is chosen for each budget. Errors: that the server cannot be
// reached; of Client::ChooseMixture.
absl::StatusOr<ModelSweep> SweepTensors(
    const std::vector<const files::FileTensor*>& tensors,
    const std::vector<SpecTemplate>& specs, const std::vector<Budget>& budgets,
    Client* client, const SweepOptions& options = {});

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_MODEL_SWEEP_H_
