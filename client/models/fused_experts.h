// Experts of a mixture whose weights lie in one tensor:
//
//   X.experts.gate_up_proj  [experts, 2 * inner, outer], gates first
//   X.experts.down_proj     [experts, outer, inner]
//
// or the last two dimensions of both the other way round. Their shapes tell
// which. Granite's are X.block_sparse_moe.input_linear and output_linear. All
// names may end in ".weight".

#ifndef QUANTD_CLIENT_MODELS_FUSED_EXPERTS_H_
#define QUANTD_CLIENT_MODELS_FUSED_EXPERTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/files/safetensors.h"
#include "client/models/tensor_input.h"

namespace quantd {

// A tensor of a file that has the weights of all experts. Plain value.
struct FusedExperts {
  std::string name;
  int64_t expert_count = 0;
  // The rows of a weight are columns here.
  bool is_transposed = false;
  // Patterns of the names of the matrices that it became, such as
  // "X.experts.*.gate_proj.weight".
  std::vector<std::string> patterns;
};

// Puts matrices in the place of such tensors, as vLLM reads them from
// compressed-tensors models: X.experts.N.gate_proj.weight, up_proj and
// down_proj, each [out, in]; of Granite, w1, w3 and w2, unless `model_type` is
// "granitemoehybrid". They point into the inputs, which are the shards of one
// model; transposed ones are made when they are held.
//
// Others stay: with biases, gates and ups take turns (GPT-OSS); of what was
// decoded from codes, one expert is not to be had without the others.
//
// Returns what was replaced.
std::vector<FusedExperts> SplitExperts(const std::vector<TensorInput*>& inputs,
                                       absl::string_view model_type);

// "X.experts" of a tensor of the experts of a layer, whatever the model calls
// it: with those of ExpertsOf, Granite's, other X.experts.Y, and X.gate_proj
// and the like of three dimensions (Step3). Empty for another.
std::string LayerOfExperts(const files::FileTensor& tensor);

// By which modules vLLM looks up how the experts of a layer, "X.experts", are
// quantized: "X.experts.0.gate_proj", up_proj and down_proj, whatever the
// matrices of the model are called.
std::vector<std::string> ModulesOfLayer(absl::string_view experts);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_FUSED_EXPERTS_H_
