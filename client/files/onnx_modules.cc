#include "client/files/onnx_modules.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/files/dtype.h"
#include "client/files/onnx_model.h"

namespace quantd::files {
namespace {

// How many nodes a weight goes through at most before it is multiplied by.
constexpr int kMostSteps = 8;

constexpr std::array<absl::string_view, 4> kLayers = {"Conv", "ConvTranspose",
                                                      "Gemm", "MatMul"};
constexpr std::array<absl::string_view, 4> kWeightForms = {
    "Transpose", "Cast", "Identity", "DequantizeLinear"};

bool ChangesForm(const OnnxModel::Node& node) {
  return std::find(kWeightForms.begin(), kWeightForms.end(), node.op_type) !=
         kWeightForms.end();
}

// True if a node gives a matrix with its rows as columns.
bool Transposes(const OnnxModel::Node& node) {
  // In order the dimensions stay where they are.
  return node.op_type == "Transpose" &&
         (node.permutation.empty() ||
          !std::is_sorted(node.permutation.begin(), node.permutation.end()));
}

absl::Status NoPlace(absl::string_view why) {
  return absl::NotFoundError(absl::StrCat("the model ", why));
}

// Why a layer takes no codes of int32 for its bias; empty if it does.
std::string ObstacleOf(const OnnxModel::Node& node,
                       bool has_element_for_each_output) {
  if (node.beta != 1) return "its layer has a beta that is not 1";
  if (!(node.alpha > 0)) return "its layer has an alpha that is not above 0";
  return has_element_for_each_output
             ? ""
             : "it is not of one dimension with an element for each output";
}

bool AddName(const std::string& name, std::vector<std::string>* names) {
  if (name.empty() ||
      std::find(names->begin(), names->end(), name) != names->end()) {
    return false;
  }
  names->push_back(name);
  return true;
}

}  // namespace

std::string ModuleOfNode(absl::string_view node_name) {
  if (!absl::ConsumePrefix(&node_name, "/")) return "";
  std::vector<absl::string_view> parts = absl::StrSplit(node_name, '/');
  parts.pop_back();
  // Modules in a Sequential or a ModuleList have its name before theirs.
  std::vector<absl::string_view> path;
  for (const absl::string_view part : parts) {
    if (!path.empty() && part.size() > path.back().size() &&
        absl::StartsWith(part, path.back()) &&
        part[path.back().size()] == '.') {
      path.pop_back();
    }
    path.push_back(part);
  }
  return absl::StrJoin(path, ".");
}

OnnxModules::OnnxModules(const OnnxModel& model)
    : model_(model), nodes_(model.nodes()) {
  for (size_t i = 0; i < nodes_.size(); ++i) {
    modules_.push_back(ModuleOfNode(nodes_[i].name));
    for (const std::string& input : nodes_[i].inputs) {
      takers_[input].push_back(i);
    }
    for (const std::string& output : nodes_[i].outputs) {
      producers_[output] = i;
    }
  }
}

bool OnnxModules::IsLayer(const OnnxModel::Node& node) {
  return node.inputs.size() >= 2 && !node.outputs.empty() &&
         std::find(kLayers.begin(), kLayers.end(), node.op_type) !=
             kLayers.end();
}

OnnxModules::Place OnnxModules::OriginOf(std::string value) const {
  Place origin;
  for (int step = 0; step < kMostSteps; ++step) {
    if (model_.FindWeight(value) != nullptr) {
      origin.name = value;
      return origin;
    }
    const auto producer = producers_.find(value);
    if (producer == producers_.end()) return {};
    const OnnxModel::Node& node = nodes_[producer->second];
    if (!ChangesForm(node) || node.inputs.empty()) return {};
    origin.is_transposed ^= Transposes(node);
    value = node.inputs[0];
  }
  return {};
}

OnnxModules::Place OnnxModules::WeightOf(const OnnxModel::Node& node,
                                         size_t input) const {
  Place place = OriginOf(node.inputs[input]);
  if (node.op_type == "Gemm" || node.op_type == "MatMul") {
    place.is_transposed ^= input == 1 ? !node.transposes_b : node.transposes_a;
  }
  return place;
}

std::vector<size_t> OnnxModules::TakersOf(const std::string& value,
                                          bool through_identity) const {
  std::vector<size_t> found;
  std::vector<std::string> values = {value};
  for (int step = 0; step < kMostSteps && !values.empty(); ++step) {
    std::vector<std::string> next;
    for (const std::string& name : values) {
      const auto takers = takers_.find(name);
      if (takers == takers_.end()) continue;
      for (const size_t taker : takers->second) {
        if (ChangesForm(nodes_[taker])) {
          if (!through_identity && nodes_[taker].op_type == "Identity") {
            continue;
          }
          for (const std::string& output : nodes_[taker].outputs) {
            next.push_back(output);
          }
        } else if (std::find(found.begin(), found.end(), taker) ==
                   found.end()) {
          found.push_back(taker);
        }
      }
    }
    values = std::move(next);
  }
  return found;
}

std::vector<OnnxModules::Layer> OnnxModules::LayersOf(
    const std::string& module) const {
  std::vector<Layer> layers;
  // Its weight is the second factor, in a MatMul sometimes the first.
  const auto add = [&](size_t index, const std::string& how) {
    const OnnxModel::Node& node = nodes_[index];
    if (!IsLayer(node)) return;
    for (const size_t input : {size_t{1}, size_t{0}}) {
      if (!IsConstant(node.inputs[input])) continue;
      layers.push_back({index, input, how});
      return;
    }
  };
  const std::string prefix = module.empty() ? "" : absl::StrCat(module, ".");
  for (const char* name : {"weight", "bias"}) {
    const std::string parameter = absl::StrCat(prefix, name);
    const std::string how = absl::StrCat("its ", name);
    for (const size_t taker : TakersOf(parameter, false)) {
      add(taker, how);
      if (nodes_[taker].op_type != "Add") continue;
      for (const std::string& input : nodes_[taker].inputs) {
        const auto producer = producers_.find(input);
        if (producer != producers_.end()) add(producer->second, how);
      }
    }
    if (layers.empty()) continue;
    if (parameter == prefix + "bias") KeepOwn(module, &layers);
    return layers;
  }
  if (module.empty()) return layers;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (modules_[i] == module) add(i, "names of nodes");
  }
  return layers;
}

void OnnxModules::KeepOwn(const std::string& module,
                          std::vector<Layer>* layers) const {
  const auto have_several_weights = [&] {
    return std::any_of(layers->begin(), layers->end(), [&](const Layer& layer) {
      return WeightOf(nodes_[layer.node], layer.weight_input).name !=
             WeightOf(nodes_[(*layers)[0].node], (*layers)[0].weight_input)
                 .name;
    });
  };
  if (!have_several_weights()) return;
  layers->erase(std::remove_if(layers->begin(), layers->end(),
                               [&](const Layer& layer) {
                                 return modules_[layer.node] != module;
                               }),
                layers->end());
  if (have_several_weights()) layers->clear();
}

std::optional<size_t> OnnxModules::SumBehind(size_t node) const {
  if (nodes_[node].op_type != "MatMul") return std::nullopt;
  const auto takers = takers_.find(nodes_[node].outputs[0]);
  if (takers == takers_.end() || takers->second.size() != 1 ||
      nodes_[takers->second[0]].op_type != "Add") {
    return std::nullopt;
  }
  return takers->second[0];
}

std::string OnnxModules::OutputOf(const Layer& layer) const {
  const OnnxModel::Node& node = nodes_[layer.node];
  const std::optional<size_t> sum = SumBehind(layer.node);
  if (!sum.has_value() || modules_[*sum] != modules_[layer.node]) {
    return node.outputs[0];
  }
  for (const std::string& input : nodes_[*sum].inputs) {
    if (IsConstant(input)) return nodes_[*sum].outputs[0];
  }
  return node.outputs[0];
}

std::vector<std::string> OnnxModules::Edges(const std::string& module,
                                            bool are_inputs) const {
  const std::string prefix = absl::StrCat(module, ".");
  const auto is_inside = [&](size_t node) {
    return modules_[node] == module || absl::StartsWith(modules_[node], prefix);
  };
  std::vector<std::string> edges;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (!is_inside(i) || nodes_[i].op_type == "Constant") continue;
    if (are_inputs) {
      for (const std::string& input : nodes_[i].inputs) {
        const auto producer = producers_.find(input);
        const bool is_own = producer != producers_.end() &&
                            (is_inside(producer->second) ||
                             nodes_[producer->second].op_type == "Constant");
        if (!is_own && !IsConstant(input)) AddName(input, &edges);
      }
      continue;
    }
    for (const std::string& output : nodes_[i].outputs) {
      const auto takers = takers_.find(output);
      // An output that nobody takes leaves the graph.
      if (takers == takers_.end() ||
          !std::all_of(takers->second.begin(), takers->second.end(),
                       is_inside)) {
        AddName(output, &edges);
      }
    }
  }
  return edges;
}

std::vector<std::string> OnnxModules::FormsOf(std::string value) const {
  std::vector<std::string> forms = {value};
  for (int step = 0; step < kMostSteps; ++step) {
    const auto producer = producers_.find(value);
    if (producer == producers_.end()) break;
    const OnnxModel::Node& node = nodes_[producer->second];
    if (!ChangesForm(node) || node.inputs.empty()) break;
    value = node.inputs[0];
    forms.push_back(value);
  }
  return forms;
}

std::vector<std::string> OnnxModules::FactorsOf(const std::string& module,
                                                size_t place) const {
  const std::string prefix = absl::StrCat(module, ".");
  std::vector<size_t> products;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (absl::StartsWith(modules_[i], prefix)) return {};
    if (modules_[i] != module) continue;
    if (nodes_[i].op_type == "MatMul" && nodes_[i].inputs.size() == 2) {
      products.push_back(i);
    } else if (!ChangesForm(nodes_[i])) {
      return {};
    }
  }
  std::vector<std::string> factors;
  for (const size_t product : products) {
    for (const size_t input : {size_t{0}, size_t{1}}) {
      const std::vector<std::string> forms =
          FormsOf(nodes_[product].inputs[input]);
      // The one that comes from outside.
      const auto given = std::find_if(
          forms.begin(), forms.end(), [&](const std::string& value) {
            const auto producer = producers_.find(value);
            return producer == producers_.end() ||
                   modules_[producer->second] != module;
          });
      if (given == forms.end()) return {};
      if (input == place) AddName(*given, &factors);
    }
  }
  return factors;
}

absl::StatusOr<std::vector<OnnxModules::Place>> OnnxModules::Find(
    absl::string_view tensor) const {
  // The hook for torch gives this name to the second input of a module.
  const bool is_second = absl::EndsWith(tensor, ".input.1");
  if (is_second) tensor.remove_suffix(2);
  const size_t dot = tensor.rfind('.');
  const std::string module(
      dot == absl::string_view::npos ? "" : tensor.substr(0, dot));
  const absl::string_view kind =
      dot == absl::string_view::npos ? tensor : tensor.substr(dot + 1);
  if (kind != "weight" && kind != "input" && kind != "output") {
    return NoPlace(
        "has no such tensor; MODULE.weight, MODULE.input, MODULE.input.1 and "
        "MODULE.output are looked for, all others by --map");
  }
  std::vector<Place> places;
  std::vector<std::string> names;
  for (const Layer& layer :
       is_second ? std::vector<Layer>() : LayersOf(module)) {
    const OnnxModel::Node& node = nodes_[layer.node];
    Place place;
    if (kind == "weight") {
      place = WeightOf(node, layer.weight_input);
    } else if (kind == "input") {
      place.name = node.inputs[1 - layer.weight_input];
    } else {
      place.name = OutputOf(layer);
    }
    place.how = layer.how;
    if (AddName(place.name, &names)) places.push_back(std::move(place));
  }
  if (!places.empty()) return places;
  if (kind == "input" && !module.empty()) {
    for (std::string& factor : FactorsOf(module, is_second ? 1 : 0)) {
      places.push_back({std::move(factor), false, "its factors"});
    }
    if (!places.empty()) return places;
  }
  if (is_second) {
    return NoPlace(absl::StrCat("has no module ", module,
                                " that does nothing but multiply its two "
                                "inputs; use --map"));
  }
  if (kind == "weight" || module.empty()) {
    return NoPlace(absl::StrCat("has no ", tensor,
                                ", and no Conv, Gemm or MatMul whose name "
                                "tells the module; use --map"));
  }
  names = Edges(module, kind == "input");
  if (names.size() == 1) {
    return std::vector<Place>{{names[0], false, "names of nodes"}};
  }
  return NoPlace(names.empty()
                     ? absl::StrCat("has no node whose name tells the module ",
                                    module, "; use --map")
                     : absl::StrCat("has several of ", module, ": ",
                                    absl::StrJoin(names, ", "), "; use --map"));
}

OnnxModules::Place OnnxModules::PlaceOfWeight(
    const std::string& initializer) const {
  Place place;
  place.name = initializer;
  for (const size_t taker : TakersOf(initializer, true)) {
    if (!IsLayer(nodes_[taker])) continue;
    for (const size_t input : {size_t{0}, size_t{1}}) {
      const Place weight = WeightOf(nodes_[taker], input);
      if (weight.name == initializer) {
        place.is_transposed |= weight.is_transposed;
      }
    }
  }
  return place;
}

std::vector<OnnxModules::LayerInput> OnnxModules::LayerInputs() const {
  std::vector<LayerInput> found;
  for (const OnnxModel::Node& node : nodes_) {
    if (!IsLayer(node)) continue;
    for (const size_t input : {size_t{0}, size_t{1}}) {
      if (!IsConstant(node.inputs[input])) {
        found.push_back(
            {node.name, node.inputs[input], FormsOf(node.inputs[input])});
      }
    }
  }
  return found;
}

std::vector<OnnxModules::Bias> OnnxModules::Biases() const {
  std::vector<Bias> found;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const OnnxModel::Node& node = nodes_[i];
    if (!IsLayer(node) || node.op_type == "ConvTranspose") continue;
    const Place weight = WeightOf(node, 1);
    if (weight.name.empty() || IsConstant(node.inputs[0])) continue;
    const std::vector<int64_t>& shape = model_.FindWeight(weight.name)->shape;
    const bool is_conv = node.op_type == "Conv";
    // A matrix of a Gemm or a MatMul, and none that is turned on the way.
    if (is_conv ? weight.is_transposed : shape.size() != 2) continue;
    // Nodes and their inputs where the bias may be.
    std::vector<std::pair<size_t, size_t>> inputs;
    if (const std::optional<size_t> sum = SumBehind(i); sum.has_value()) {
      for (size_t input = 0; input < nodes_[*sum].inputs.size(); ++input) {
        inputs.emplace_back(*sum, input);
      }
    } else if (node.inputs.size() > 2) {
      inputs.emplace_back(i, 2);
    }
    const int64_t axis = is_conv || !weight.is_transposed ? 0 : 1;
    for (const auto& [taker, input] : inputs) {
      const std::string name = OriginOf(nodes_[taker].inputs[input]).name;
      const OnnxModel::Weight* const bias = model_.FindWeight(name);
      if (bias == nullptr || bias->dtype != Dtype::kF32 || shape.empty()) {
        continue;
      }
      const bool has_each =
          bias->shape == std::vector<int64_t>{shape[static_cast<size_t>(axis)]};
      // What is added to a product later need not be a bias.
      if (!has_each && taker != i) continue;
      found.push_back({node.name, name, taker, input, weight.name, axis,
                       FormsOf(node.inputs[0]), node.alpha,
                       ObstacleOf(node, has_each)});
    }
  }
  return found;
}

std::vector<OnnxModules::Product> OnnxModules::Products() const {
  std::vector<Product> found;
  for (const OnnxModel::Node& node : nodes_) {
    if (!IsLayer(node) || node.op_type == "ConvTranspose") continue;
    Product& product = found.emplace_back();
    product.op_type = node.op_type;
    product.first = node.inputs[0];
    product.second = node.inputs[1];
    product.has_bias = node.inputs.size() > 2 && !node.inputs[2].empty();
    product.outputs = {node.outputs[0]};
    for (int step = 0; step < kMostSteps; ++step) {
      const auto takers = takers_.find(product.outputs.back());
      if (takers == takers_.end() || takers->second.size() != 1) break;
      const OnnxModel::Node& taker = nodes_[takers->second[0]];
      if (taker.op_type != "Relu" && taker.op_type != "Clip") break;
      product.outputs.push_back(taker.outputs[0]);
    }
  }
  return found;
}

}  // namespace quantd::files
