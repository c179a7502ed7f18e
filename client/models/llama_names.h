// How llama.cpp calls the weights of a model.

#ifndef QUANTD_CLIENT_MODELS_LLAMA_NAMES_H_
#define QUANTD_CLIENT_MODELS_LLAMA_NAMES_H_

#include <string>

#include "absl/strings/string_view.h"

namespace quantd {

// llama.cpp's name of a weight that has its usual name in transformers, such as
// "blk.0.attn_q.weight" of "model.layers.0.self_attn.q_proj.weight". Knows
// attention, feed-forward layers and the head of models that are built like
// Llama, without experts. Empty for any other name.
std::string LlamaName(absl::string_view weight);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_LLAMA_NAMES_H_
