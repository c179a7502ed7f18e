#include "client/models/fused_experts.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "client/files/dtype.h"
#include "client/files/lazy_bytes.h"
#include "client/files/safetensors.h"
#include "client/models/tie_groups.h"

namespace quantd {
namespace {

using files::FileTensor;

constexpr absl::string_view kExperts = "experts";
constexpr absl::string_view kGranite = "block_sparse_moe";
constexpr absl::string_view kWeight = ".weight";
// Side of the tiles that are transposed at once, so that a tile stays in the
// cache.
constexpr int64_t kTile = 32;

// Names of the matrices of an expert.
struct Projections {
  const char* gate;
  const char* up;
  const char* down;
};

constexpr Projections kProjections = {"gate_proj", "up_proj", "down_proj"};
constexpr Projections kGraniteProjections = {"w1", "w3", "w2"};

// The experts of one layer. Plain value.
struct Layer {
  const FileTensor* gate_up = nullptr;
  const FileTensor* down = nullptr;
  bool has_biases = false;
};

// Consumes the last part of a name, with the dot before it, if it is `what`.
bool ConsumePart(absl::string_view* name, absl::string_view what) {
  absl::string_view rest = *name;
  if (!absl::ConsumeSuffix(&rest, what)) return false;
  if (!rest.empty() && !absl::ConsumeSuffix(&rest, ".")) return false;
  *name = rest;
  return true;
}

// True if the last part of the name is `what`.
bool EndsInPart(absl::string_view name, absl::string_view what) {
  return ConsumePart(&name, what);
}

// "X.experts" of a stack, without ".weight", of gates and ups, or of downs.
// Empty for another name.
std::string ExpertsOfStack(absl::string_view name, bool is_gate_up) {
  absl::string_view layer = name;
  if (ConsumePart(&layer, is_gate_up ? "gate_up_proj" : "down_proj") &&
      EndsInPart(layer, kExperts)) {
    return std::string(layer);
  }
  layer = name;
  if (ConsumePart(&layer, is_gate_up ? "input_linear" : "output_linear") &&
      EndsInPart(layer, kGranite)) {
    return absl::StrCat(layer, ".", kExperts);
  }
  return "";
}

std::map<std::string, Layer> FindLayers(
    const std::vector<TensorInput*>& inputs) {
  std::map<std::string, Layer> layers;
  for (const TensorInput* const input : inputs) {
    for (const FileTensor& tensor : input->tensors()) {
      absl::string_view name = tensor.name;
      const bool is_bias = absl::ConsumeSuffix(&name, "_bias") ||
                           absl::ConsumeSuffix(&name, ".bias");
      if (!is_bias) absl::ConsumeSuffix(&name, kWeight);
      for (const bool is_gate_up : {true, false}) {
        const std::string experts = ExpertsOfStack(name, is_gate_up);
        if (experts.empty()) continue;
        Layer& layer = layers[experts];
        if (is_bias) {
          layer.has_biases = true;
        } else {
          (is_gate_up ? layer.gate_up : layer.down) = &tensor;
        }
      }
    }
  }
  return layers;
}

bool IsStack(const FileTensor* tensor) {
  return tensor != nullptr && tensor->shape.size() == 3 &&
         tensor->lazy == nullptr && !tensor->data.empty() &&
         ElementTypeOf(tensor->dtype).has_value();
}

// True if the layer can be split; sets whether it lies transposed.
bool CanSplit(const Layer& layer, bool* is_transposed) {
  if (layer.has_biases || !IsStack(layer.gate_up) || !IsStack(layer.down)) {
    return false;
  }
  const std::vector<int64_t>& gate_up = layer.gate_up->shape;
  const std::vector<int64_t>& down = layer.down->shape;
  if (gate_up[0] != down[0]) return false;
  *is_transposed = gate_up[2] == 2 * down[1] && gate_up[1] == down[2];
  return *is_transposed || (gate_up[1] == 2 * down[2] && gate_up[2] == down[1]);
}

// Rows of the result are columns of `data`, which has `columns`; the first is
// at the beginning of `data`.
void TransposeTiles(absl::Span<const uint8_t> data, int64_t columns,
                    size_t element_bytes, int64_t row_count,
                    int64_t column_count, uint8_t* out) {
  for (int64_t row = 0; row < row_count; row += kTile) {
    for (int64_t column = 0; column < column_count; column += kTile) {
      const int64_t row_end = std::min(row + kTile, row_count);
      const int64_t column_end = std::min(column + kTile, column_count);
      for (int64_t i = row; i < row_end; ++i) {
        for (int64_t j = column; j < column_end; ++j) {
          std::memcpy(
              out + static_cast<size_t>(i * column_count + j) * element_bytes,
              data.data() +
                  static_cast<size_t>(j * columns + i) * element_bytes,
              element_bytes);
        }
      }
    }
  }
}

// `count` outputs of an expert, from `first` on.
FileTensor WeightOf(const FileTensor& stack, bool is_transposed, int64_t expert,
                    int64_t first, int64_t count, std::string name) {
  const size_t element_bytes = static_cast<size_t>(DtypeSizeBytes(stack.dtype));
  const int64_t inputs = stack.shape[is_transposed ? 1 : 2];
  const int64_t outputs = stack.shape[is_transposed ? 2 : 1];
  const auto bytes = [element_bytes](int64_t elements) {
    return static_cast<size_t>(elements) * element_bytes;
  };
  const absl::Span<const uint8_t> whole = stack.data.subspan(
      bytes(expert * inputs * outputs), bytes(inputs * outputs));
  FileTensor weight = {std::move(name), stack.dtype, {count, inputs}, {}};
  if (!is_transposed) {
    weight.data = whole.subspan(bytes(first * inputs), bytes(count * inputs));
    return weight;
  }
  weight.lazy = std::make_shared<files::LazyBytes>(
      bytes(count * inputs),
      [data = whole.subspan(bytes(first)), outputs, element_bytes, count,
       inputs](absl::Span<uint8_t> out) {
        TransposeTiles(data, outputs, element_bytes, count, inputs, out.data());
      });
  weight.data = weight.lazy->span();
  return weight;
}

// A tensor that is replaced. Plain value.
struct Stack {
  std::string experts;
  // In the order of its rows.
  std::vector<const char*> projections;
  bool is_transposed = false;
};

// The weights of all experts of a tensor.
void AddWeights(const FileTensor& tensor, const Stack& stack,
                std::vector<FileTensor>* weights) {
  const int64_t outputs = tensor.shape[stack.is_transposed ? 2 : 1];
  const int64_t count =
      outputs / static_cast<int64_t>(stack.projections.size());
  for (int64_t expert = 0; expert < tensor.shape[0]; ++expert) {
    int64_t first = 0;
    for (const char* const projection : stack.projections) {
      weights->push_back(WeightOf(
          tensor, stack.is_transposed, expert, first, count,
          absl::StrCat(stack.experts, ".", expert, ".", projection, kWeight)));
      first += count;
    }
  }
}

}  // namespace

std::vector<FusedExperts> SplitExperts(const std::vector<TensorInput*>& inputs,
                                       absl::string_view model_type) {
  std::vector<FusedExperts> replaced;
  std::map<const FileTensor*, Stack> stacks;
  for (const auto& [experts, layer] : FindLayers(inputs)) {
    bool is_transposed = false;
    if (!CanSplit(layer, &is_transposed)) continue;
    const bool is_granite =
        absl::StrContains(layer.down->name, "output_linear");
    const Projections& names = is_granite && model_type != "granitemoehybrid"
                                   ? kGraniteProjections
                                   : kProjections;
    stacks[layer.gate_up] = {experts, {names.gate, names.up}, is_transposed};
    stacks[layer.down] = {experts, {names.down}, is_transposed};
    for (const FileTensor* const tensor : {layer.gate_up, layer.down}) {
      FusedExperts one = {tensor->name, tensor->shape[0], is_transposed,
                          /*patterns=*/{}};
      for (const char* const projection : stacks[tensor].projections) {
        one.patterns.push_back(
            absl::StrCat(experts, ".*.", projection, kWeight));
      }
      replaced.push_back(std::move(one));
    }
  }
  for (TensorInput* const input : inputs) {
    std::vector<std::string> names;
    std::vector<FileTensor> weights;
    for (const FileTensor& tensor : input->tensors()) {
      const auto found = stacks.find(&tensor);
      if (found == stacks.end()) continue;
      names.push_back(tensor.name);
      AddWeights(tensor, found->second, &weights);
    }
    if (names.empty()) continue;
    input->Replace(names, std::move(weights), input->metadata());
  }
  return replaced;
}

std::string LayerOfExperts(const FileTensor& tensor) {
  absl::string_view name = tensor.name;
  const absl::string_view experts = ExpertsOf(name);
  if (!experts.empty()) return std::string(experts);
  absl::ConsumeSuffix(&name, kWeight);
  for (const bool is_gate_up : {true, false}) {
    std::string layer = ExpertsOfStack(name, is_gate_up);
    if (!layer.empty()) return layer;
  }
  constexpr absl::string_view kOfExperts = ".experts.";
  const size_t at = name.find(kOfExperts);
  if (at != absl::string_view::npos) {
    return std::string(name.substr(0, at + kOfExperts.size() - 1));
  }
  for (const char* const projection :
       {kProjections.gate, kProjections.up, kProjections.down}) {
    absl::string_view layer = name;
    if (tensor.shape.size() == 3 && ConsumePart(&layer, projection) &&
        !layer.empty()) {
      return absl::StrCat(layer, ".", kExperts);
    }
  }
  return "";
}

std::vector<std::string> ModulesOfLayer(absl::string_view experts) {
  std::vector<std::string> modules;
  for (const char* const projection :
       {kProjections.gate, kProjections.up, kProjections.down}) {
    modules.push_back(absl::StrCat(experts, ".0.", projection));
  }
  return modules;
}

}  // namespace quantd
