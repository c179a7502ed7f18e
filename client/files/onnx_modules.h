// The tensors of torch modules in a graph that torch exported: what torch calls
// "fc1.input" may be "/Relu_2_output_0" there.

#ifndef QUANTD_CLIENT_FILES_ONNX_MODULES_H_
#define QUANTD_CLIENT_FILES_ONNX_MODULES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/files/onnx_model.h"

namespace quantd::files {

// Immutable, thread-safe. Knows the graph as it was when it was made.
class OnnxModules {
 public:
  // The place of a tensor in the model.
  struct Place {
    // The initializer or activation.
    std::string name;
    // The initializer is the transpose of the module's weight.
    bool is_transposed = false;
    // For people: what told it.
    std::string how;
  };

  // The activation that a layer computes with.
  struct LayerInput {
    std::string layer;
    std::string activation;
    // The activation, and what it is the same in another form of.
    std::vector<std::string> values;
  };

  // A bias that a Conv or a Gemm, or the Add behind a MatMul, adds to the
  // products of a weight and an activation.
  struct Bias {
    std::string layer;
    // The initializer, and where it is taken: indices into the model's nodes
    // and the inputs of the node.
    std::string name;
    size_t node;
    size_t input;
    // The weight's initializer, and its dimension that the bias is along.
    std::string weight;
    int64_t axis;
    // The activation, and what it is the same in another form of.
    std::vector<std::string> activations;
    // The number that the products are multiplied by.
    float factor;
    // Why the layer takes no codes of int32 for it; empty if it does.
    std::string obstacle;
  };

  // A Conv, Gemm or MatMul of the main graph.
  struct Product {
    std::string op_type;
    // The values that it multiplies.
    std::string first;
    std::string second;
    bool has_bias = false;
    // What it gives, and what a Relu or Clip behind it makes of that.
    std::vector<std::string> outputs;
  };

  // `model` must outlive this.
  explicit OnnxModules(const OnnxModel& model);

  // The places of "MODULE.weight", "MODULE.input", "MODULE.input.1" or
  // "MODULE.output": several inputs or outputs where the module runs several
  // times. Found by the initializer of the module's weight or bias, and by the
  // module in the names of nodes. A second input is found where the module does
  // nothing but multiply its two inputs, the first by the second.
  // Errors: NOT_FOUND, which says why there is none.
  absl::StatusOr<std::vector<Place>> Find(absl::string_view tensor) const;

  // An initializer that somebody says is the weight of a module.
  Place PlaceOfWeight(const std::string& initializer) const;

  // The inputs of all Conv, ConvTranspose, Gemm and MatMul of the main graph.
  std::vector<LayerInput> LayerInputs() const;
  // The biases in the main graph that are float32: all those of a Conv or a
  // Gemm, and those of an Add that have an element for each output.
  std::vector<Bias> Biases() const;
  std::vector<Product> Products() const;

 private:
  // A node that multiplies by a weight.
  struct Layer {
    size_t node;
    size_t weight_input;
    std::string how;
  };

  // True if the node multiplies.
  static bool IsLayer(const OnnxModel::Node& node);
  // The initializer behind a value, through nodes that only change its form;
  // empty where there is none. It is transposed where an odd number of these
  // transpose.
  Place OriginOf(std::string value) const;
  bool IsConstant(const std::string& value) const {
    return !OriginOf(value).name.empty();
  }
  // The weight that a layer takes as that input. It is transposed where the
  // layer multiplies by it and not by its transpose, as torch does.
  Place WeightOf(const OnnxModel::Node& node, size_t input) const;
  // The nodes that take a value, through those that only change its form. What
  // Identity gives has a name of its own: exporters put it where parameters of
  // two modules are equal.
  std::vector<size_t> TakersOf(const std::string& value,
                               bool through_identity) const;
  // The output of the Add of a constant behind a MatMul, if that is of the
  // layer's module, or of the layer's own node.
  std::string OutputOf(const Layer& layer) const;
  // The Add that alone takes the product of a MatMul; nothing for others.
  std::optional<size_t> SumBehind(size_t node) const;
  std::vector<Layer> LayersOf(const std::string& module) const;
  // Keeps the module's own layers where modules share a bias: of layers with
  // several weights those whose names tell the module, and none where these
  // have several too.
  void KeepOwn(const std::string& module, std::vector<Layer>* layers) const;
  // The value, and those before it that it is another form of.
  std::vector<std::string> FormsOf(std::string value) const;
  // The values that a module multiplies as its first or second factor, where it
  // does nothing else.
  std::vector<std::string> FactorsOf(const std::string& module,
                                     size_t place) const;
  // The inputs or outputs of all nodes of a module.
  std::vector<std::string> Edges(const std::string& module,
                                 bool are_inputs) const;

  const OnnxModel& model_;
  std::vector<OnnxModel::Node> nodes_;
  // The module that the name of each node tells.
  std::vector<std::string> modules_;
  absl::flat_hash_map<std::string, size_t> producers_;
  absl::flat_hash_map<std::string, std::vector<size_t>> takers_;
};

// The module that the name of a node tells, as torch calls it: "block.0" of
// "/block/block.0/MatMul". Empty where it tells none.
std::string ModuleOfNode(absl::string_view node_name);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_ONNX_MODULES_H_
