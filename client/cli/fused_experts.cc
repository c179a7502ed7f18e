#include "client/cli/fused_experts.h"

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

namespace quantd::cli {
namespace {

using files::FileTensor;

constexpr absl::string_view kGateUp = ".gate_up_proj";
constexpr absl::string_view kDown = ".down_proj";
constexpr absl::string_view kExperts = "experts";
// Of a side of what is transposed at once, so that it stays in the cache.
constexpr int64_t kTile = 32;

// The experts of one layer. Plain value.
struct Layer {
  const FileTensor* gate_up = nullptr;
  const FileTensor* down = nullptr;
  bool has_biases = false;
};

// "X.experts" of a name that goes on with `projection`; empty for another.
absl::string_view ExpertsOfStack(absl::string_view name,
                                 absl::string_view projection) {
  if (!absl::ConsumeSuffix(&name, projection)) return "";
  return name == kExperts || absl::EndsWith(name, ".experts") ? name : "";
}

std::map<std::string, Layer> FindLayers(
    const std::vector<TensorInput*>& inputs) {
  std::map<std::string, Layer> layers;
  for (const TensorInput* const input : inputs) {
    for (const FileTensor& tensor : input->tensors()) {
      absl::string_view name = tensor.name;
      if (absl::ConsumeSuffix(&name, "_bias") ||
          absl::ConsumeSuffix(&name, ".bias")) {
        for (const absl::string_view projection : {kGateUp, kDown}) {
          const absl::string_view experts = ExpertsOfStack(name, projection);
          if (!experts.empty()) layers[std::string(experts)].has_biases = true;
        }
        continue;
      }
      absl::ConsumeSuffix(&name, ".weight");
      const absl::string_view of_gate_up = ExpertsOfStack(name, kGateUp);
      const absl::string_view of_down = ExpertsOfStack(name, kDown);
      if (!of_gate_up.empty()) {
        layers[std::string(of_gate_up)].gate_up = &tensor;
      }
      if (!of_down.empty()) layers[std::string(of_down)].down = &tensor;
    }
  }
  return layers;
}

bool IsStack(const FileTensor* tensor) {
  return tensor != nullptr && tensor->shape.size() == 3 &&
         tensor->lazy == nullptr && !tensor->data.empty() &&
         ElementTypeOf(tensor->dtype).has_value();
}

// Whether the layer can be split; sets whether it lies transposed.
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

// The weights of all experts of a tensor.
void AddWeights(const FileTensor& stack, const std::string& experts,
                bool is_gate_up, bool is_transposed,
                std::vector<FileTensor>* weights) {
  const int64_t outputs = stack.shape[is_transposed ? 2 : 1];
  const int64_t count = is_gate_up ? outputs / 2 : outputs;
  for (int64_t expert = 0; expert < stack.shape[0]; ++expert) {
    const auto add = [&](const char* projection, int64_t first) {
      weights->push_back(WeightOf(
          stack, is_transposed, expert, first, count,
          absl::StrCat(experts, ".", expert, ".", projection, ".weight")));
    };
    if (is_gate_up) {
      add("gate_proj", 0);
      add("up_proj", count);
    } else {
      add("down_proj", 0);
    }
  }
}

}  // namespace

std::vector<FusedExperts> SplitExperts(
    const std::vector<TensorInput*>& inputs) {
  std::vector<FusedExperts> replaced;
  std::map<const FileTensor*, std::pair<std::string, bool>> stacks;
  for (const auto& [experts, layer] : FindLayers(inputs)) {
    bool is_transposed = false;
    if (!CanSplit(layer, &is_transposed)) continue;
    for (const FileTensor* const stack : {layer.gate_up, layer.down}) {
      stacks[stack] = {experts, is_transposed};
      replaced.push_back({stack->name, stack->shape[0], is_transposed});
    }
  }
  for (TensorInput* const input : inputs) {
    std::vector<std::string> names;
    std::vector<FileTensor> weights;
    for (const FileTensor& tensor : input->tensors()) {
      const auto found = stacks.find(&tensor);
      if (found == stacks.end()) continue;
      const auto& [experts, is_transposed] = found->second;
      names.push_back(tensor.name);
      AddWeights(tensor, experts, absl::StrContains(tensor.name, kGateUp),
                 is_transposed, &weights);
    }
    if (names.empty()) continue;
    input->Replace(names, std::move(weights), input->metadata());
  }
  return replaced;
}

std::vector<std::string> PatternsOf(const FusedExperts& experts) {
  const absl::string_view name = experts.name;
  const std::string prefix =
      absl::StrCat(name.substr(0, name.rfind(kExperts)), kExperts, ".*.");
  std::vector<std::string> patterns;
  for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
    const bool is_down = absl::string_view(projection) == "down_proj";
    if (is_down == absl::StrContains(experts.name, kGateUp)) continue;
    patterns.push_back(absl::StrCat(prefix, projection, ".weight"));
  }
  return patterns;
}

std::vector<std::string> ModulesOfLayer(absl::string_view experts) {
  std::vector<std::string> modules;
  for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
    modules.push_back(absl::StrCat(experts, ".0.", projection));
  }
  return modules;
}

}  // namespace quantd::cli
