#include "client/files/onnx_model.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/atomic_file.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/mapped_file.h"
#include "client/files/onnx_tensors.h"
#include "client/files/safetensors.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "onnx_model.pb.h"

namespace quantd::files {
namespace {

constexpr int kFloat = 1;
constexpr int kAttributeInt = 2;
constexpr int kExternalLocation = 1;
// Graphs within graphs.
constexpr int kMaxGraphDepth = 100;

// A type of codes.
struct CodeType {
  absl::string_view name;
  // TensorProto.DataType.
  int data_type;
  // The first version of DequantizeLinear that has it per tensor.
  int64_t opset;
  int bytes;
};

// Type of biases alone: QuantizeLinear does not make it.
constexpr absl::string_view kBiasType = "int32";

constexpr CodeType kCodeTypes[] = {
    {"uint8", 2, 10, 1},
    {"int8", 3, 10, 1},
    {"uint16", 4, 21, 2},
    {"int16", 5, 21, 2},
    {kBiasType, 6, 10, 4},
    {"float8_e4m3fn", 17, 19, 1},
    {"float8_e4m3fnuz", 18, 19, 1},
    {"float8_e5m2", 19, 19, 1},
    {"float8_e5m2fnuz", 20, 19, 1},
    {"uint4", 21, 21, 0},
    {"int4", 22, 21, 0},
    {"float4_e2m1", 23, 23, 0},
    {"uint2", 25, 25, 0},
    {"int2", 26, 25, 0},
};
constexpr int64_t kPerAxisOpset = 13;
constexpr int64_t kBlockOpset = 21;
constexpr int64_t kCastBfloat16Opset = 13;
// Has Round, by which ONNX Runtime's optimizer makes codes of a float bias
// behind a quantized input.
constexpr int64_t kFloatBiasOpset = 11;
// Before it, operators without an axis of their own broadcast in other ways.
constexpr int64_t kOldestOpset = 7;

const CodeType* FindCodeType(absl::string_view name) {
  for (const CodeType& type : kCodeTypes) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

// Versions at which an operator came to mean something else for what a model of
// an older version may have; a graph that has one cannot go past it unchanged.
struct BreakingChange {
  absl::string_view op_type;
  int64_t opset;
  // If not empty, only nodes that have this attribute.
  absl::string_view attribute = "";
};

constexpr BreakingChange kBreakingChanges[] = {
    {"BatchNormalization", 9, "spatial"},
    {"Scan", 9},
    {"Upsample", 10},
    {"Slice", 10},
    {"TopK", 10},
    {"Resize", 11},
    {"Clip", 11},
    {"Pad", 11},
    {"TopK", 11},
    {"Scatter", 11},
    {"Dropout", 12},
    {"Squeeze", 13},
    {"Unsqueeze", 13},
    {"ReduceSum", 13},
    {"Split", 13},
    {"Softmax", 13},
    {"LogSoftmax", 13},
    {"Hardmax", 13},
    {"BatchNormalization", 14},
    {"RoiAlign", 16},
    {"ReduceMax", 18},
    {"ReduceMin", 18},
    {"ReduceMean", 18},
    {"ReduceProd", 18},
    {"ReduceL1", 18},
    {"ReduceL2", 18},
    {"ReduceLogSum", 18},
    {"ReduceLogSumExp", 18},
    {"ReduceSumSquare", 18},
    {"Split", 18},
    {"Resize", 18},
    {"Resize", 19},
    {"AveragePool", 19},
    {"GridSample", 20},
    {"DFT", 20},
    {"GroupNormalization", 21},
};

// The version of the file format that a version of the operators goes with.
int64_t IrVersionOf(int64_t opset) {
  if (opset >= 25) return 13;
  if (opset >= 24) return 12;
  if (opset >= 23) return 11;
  if (opset >= 21) return 10;
  if (opset >= 20) return 9;
  if (opset >= 15) return 8;
  return 7;
}

bool IsOnnxDomain(absl::string_view domain) {
  return domain.empty() || domain == "ai.onnx";
}

template <typename Visit>
void ForEachGraph(onnx::GraphProto* graph, Visit& visit, int depth = 0);

// Calls visit(graph) for all graphs in an attribute.
template <typename Visit>
void ForEachGraph(onnx::AttributeProto* attribute, Visit& visit,
                  int depth = 0) {
  if (attribute->has_g()) ForEachGraph(attribute->mutable_g(), visit, depth);
  for (onnx::GraphProto& graph : *attribute->mutable_graphs()) {
    ForEachGraph(&graph, visit, depth);
  }
}

// Calls visit(graph) for a graph and all those in it.
template <typename Visit>
void ForEachGraph(onnx::GraphProto* graph, Visit& visit, int depth) {
  if (depth > kMaxGraphDepth) return;
  visit(graph);
  for (onnx::NodeProto& node : *graph->mutable_node()) {
    for (onnx::AttributeProto& attribute : *node.mutable_attribute()) {
      ForEachGraph(&attribute, visit, depth + 1);
    }
  }
}

// Calls visit(node) for all nodes of a graph and the graphs in it.
template <typename Visit>
void ForEachNode(onnx::GraphProto* graph, Visit& visit) {
  auto visit_graph = [&visit](onnx::GraphProto* one) {
    for (onnx::NodeProto& node : *one->mutable_node()) visit(&node);
  };
  ForEachGraph(graph, visit_graph);
}

// Calls visit(node) for all nodes of a function and the graphs in it.
template <typename Visit>
void ForEachNode(onnx::FunctionProto* function, Visit& visit) {
  auto visit_graph = [&visit](onnx::GraphProto* one) {
    for (onnx::NodeProto& node : *one->mutable_node()) visit(&node);
  };
  for (onnx::NodeProto& node : *function->mutable_node()) {
    visit(&node);
    for (onnx::AttributeProto& attribute : *node.mutable_attribute()) {
      ForEachGraph(&attribute, visit_graph);
    }
  }
  for (onnx::AttributeProto& attribute : *function->mutable_attribute_proto()) {
    ForEachGraph(&attribute, visit_graph);
  }
}

// Calls visit(tensor) for the tensors of an attribute, but not for those of the
// graphs in it.
template <typename Visit>
void ForEachTensor(const onnx::AttributeProto& attribute, Visit& visit) {
  if (attribute.has_t()) visit(attribute.t());
  for (const onnx::TensorProto& tensor : attribute.tensors()) visit(tensor);
  if (attribute.has_sparse_tensor()) {
    visit(attribute.sparse_tensor().values());
    visit(attribute.sparse_tensor().indices());
  }
  for (const onnx::SparseTensorProto& tensor : attribute.sparse_tensors()) {
    visit(tensor.values());
    visit(tensor.indices());
  }
}

std::optional<Dtype> DtypeOf(int data_type) {
  switch (data_type) {
    case 1:
      return Dtype::kF32;
    case 10:
      return Dtype::kF16;
    case 11:
      return Dtype::kF64;
    case 16:
      return Dtype::kBF16;
    default:
      return std::nullopt;
  }
}

int DataTypeOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF16:
      return 10;
    case Dtype::kBF16:
      return 16;
    default:
      return kFloat;
  }
}

bool IsOtherFloat(int64_t data_type) {
  return data_type == 10 || data_type == 11 || data_type == 16;
}

// Moves the data of a float tensor to where all types may have them.
void MakeRaw(onnx::TensorProto* tensor) {
  if (tensor->has_raw_data()) return;
  std::string raw;
  const auto append = [&raw](auto value) {
    raw.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  switch (tensor->data_type()) {
    case 1:
      for (const float value : tensor->float_data()) append(value);
      tensor->clear_float_data();
      break;
    case 10:
    case 16:
      for (const int32_t value : tensor->int32_data()) {
        append(static_cast<uint16_t>(value));
      }
      tensor->clear_int32_data();
      break;
    case 11:
      for (const double value : tensor->double_data()) append(value);
      tensor->clear_double_data();
      break;
    default:
      return;
  }
  tensor->set_raw_data(std::move(raw));
}

bool HasAttribute(const onnx::NodeProto& node, absl::string_view name) {
  return std::any_of(node.attribute().begin(), node.attribute().end(),
                     [name](const onnx::AttributeProto& attribute) {
                       return attribute.name() == name;
                     });
}

// Raises the version of ONNX's own operators; false where there is none.
bool SetOpset(
    int64_t version,
    google::protobuf::RepeatedPtrField<onnx::OperatorSetIdProto>* imports) {
  bool is_set = false;
  for (onnx::OperatorSetIdProto& import : *imports) {
    if (!IsOnnxDomain(import.domain())) continue;
    import.set_version(std::max(import.version(), version));
    is_set = true;
  }
  return is_set;
}

void AddInt(absl::string_view name, int64_t value, onnx::NodeProto* node) {
  onnx::AttributeProto* const attribute = node->add_attribute();
  attribute->set_name(std::string(name));
  attribute->set_type(kAttributeInt);
  attribute->set_i(value);
}

// Makes initializers of the Constants of floats in the main graph, for they are
// weights as well. Numbers that have no dimensions stay.
void MoveConstants(onnx::GraphProto* graph) {
  absl::flat_hash_set<std::string> names;
  for (const onnx::TensorProto& tensor : graph->initializer()) {
    names.insert(tensor.name());
  }
  auto* const nodes = graph->mutable_node();
  nodes->erase(
      std::remove_if(
          nodes->begin(), nodes->end(),
          [&](onnx::NodeProto& node) {
            if (node.op_type() != "Constant" || !IsOnnxDomain(node.domain()) ||
                node.output_size() != 1 || node.output(0).empty() ||
                node.attribute_size() != 1 || !node.attribute(0).has_t()) {
              return false;
            }
            onnx::TensorProto& tensor = *node.mutable_attribute(0)->mutable_t();
            if (!DtypeOf(tensor.data_type()).has_value() ||
                tensor.dims_size() == 0 ||
                !names.insert(node.output(0)).second) {
              return false;
            }
            tensor.set_name(node.output(0));
            graph->add_initializer()->Swap(&tensor);
            return true;
          }),
      nodes->end());
}

// True if a layer, or the Add behind a MatMul, adds an initializer to products
// of a quantized input.
bool HasFloatBias(const onnx::GraphProto& graph) {
  absl::flat_hash_set<absl::string_view> initializers;
  for (const onnx::TensorProto& tensor : graph.initializer()) {
    initializers.insert(tensor.name());
  }
  absl::flat_hash_map<absl::string_view, const onnx::NodeProto*> producers;
  for (const onnx::NodeProto& node : graph.node()) {
    for (const std::string& output : node.output()) producers[output] = &node;
  }
  const auto makes = [&producers](absl::string_view op_type,
                                  const std::string& value) {
    const auto producer = producers.find(value);
    return producer != producers.end() && producer->second->op_type() == op_type
               ? producer->second
               : nullptr;
  };
  const auto is_bias_of = [&](const std::string& bias,
                              const onnx::NodeProto* layer) {
    return layer != nullptr && layer->input_size() >= 2 &&
           initializers.contains(bias) &&
           makes("DequantizeLinear", layer->input(0)) != nullptr;
  };
  for (const onnx::NodeProto& node : graph.node()) {
    if (!IsOnnxDomain(node.domain())) continue;
    const std::string& op_type = node.op_type();
    if ((op_type == "Conv" || op_type == "ConvTranspose" ||
         op_type == "Gemm") &&
        node.input_size() > 2 && is_bias_of(node.input(2), &node)) {
      return true;
    }
    if (op_type == "Add" && node.input_size() == 2 &&
        (is_bias_of(node.input(0), makes("MatMul", node.input(1))) ||
         is_bias_of(node.input(1), makes("MatMul", node.input(0))))) {
      return true;
    }
  }
  return false;
}

bool IsExternal(const onnx::TensorProto& tensor) {
  return tensor.data_location() == kExternalLocation;
}

// Puts the data of other files into the initializers that have them there.
absl::Status TakeInData(const std::string& path, onnx::GraphProto* graph) {
  if (std::none_of(graph->initializer().begin(), graph->initializer().end(),
                   IsExternal)) {
    return absl::OkStatus();
  }
  const absl::StatusOr<OnnxTensors> files = OnnxTensors::Open(path);
  if (!files.ok()) return files.status();
  absl::flat_hash_map<absl::string_view, const FileTensor*> tensors;
  for (const FileTensor& tensor : files->tensors()) {
    tensors[tensor.name] = &tensor;
  }
  for (onnx::TensorProto& tensor : *graph->mutable_initializer()) {
    const auto found = tensors.find(tensor.name());
    if (!IsExternal(tensor) || found == tensors.end()) continue;
    const absl::Span<const uint8_t> data = found->second->data;
    tensor.set_raw_data(data.data(), data.size());
    tensor.clear_external_data();
    tensor.clear_data_location();
  }
  return absl::OkStatus();
}

// A tensor anywhere in a model whose data are in another file, as errors call
// it; empty where there is none.
class ExternalFinder {
 public:
  std::string Find(onnx::ModelProto* model) {
    auto visit = [this](onnx::GraphProto* graph) { NoteGraph(*graph); };
    ForEachGraph(model->mutable_graph(), visit);
    for (onnx::TrainingInfoProto& training : *model->mutable_training_info()) {
      if (training.has_initialization()) {
        ForEachGraph(training.mutable_initialization(), visit);
      }
      if (training.has_algorithm()) {
        ForEachGraph(training.mutable_algorithm(), visit);
      }
    }
    for (onnx::FunctionProto& function : *model->mutable_functions()) {
      for (onnx::NodeProto& node : *function.mutable_node()) {
        NoteNode(node);
        for (onnx::AttributeProto& attribute : *node.mutable_attribute()) {
          ForEachGraph(&attribute, visit);
        }
      }
      for (onnx::AttributeProto& attribute :
           *function.mutable_attribute_proto()) {
        NoteAttribute(attribute,
                      absl::StrCat("function \"", function.name(), "\""));
        ForEachGraph(&attribute, visit);
      }
    }
    return found_;
  }

 private:
  void NoteGraph(const onnx::GraphProto& graph) {
    const auto note = [this](const onnx::TensorProto& tensor,
                             const std::string& name) {
      if (IsExternal(tensor)) found_ = absl::StrCat("tensor \"", name, "\"");
    };
    for (const onnx::TensorProto& tensor : graph.initializer()) {
      note(tensor, tensor.name());
    }
    for (const onnx::SparseTensorProto& tensor : graph.sparse_initializer()) {
      note(tensor.values(), tensor.values().name());
      note(tensor.indices(), tensor.values().name());
    }
    for (const onnx::NodeProto& node : graph.node()) NoteNode(node);
  }

  void NoteNode(const onnx::NodeProto& node) {
    const std::string& name = node.name().empty() && node.output_size() > 0
                                  ? node.output(0)
                                  : node.name();
    const std::string where =
        absl::StrCat(node.op_type(), " node \"", name, "\"");
    for (const onnx::AttributeProto& attribute : node.attribute()) {
      NoteAttribute(attribute, where);
    }
  }

  // `where` has the attribute.
  void NoteAttribute(const onnx::AttributeProto& attribute,
                     const std::string& where) {
    // Tensors in attributes seldom have names.
    const auto note = [&](const onnx::TensorProto& tensor) {
      if (!IsExternal(tensor)) return;
      found_ =
          absl::StrCat("attribute \"", attribute.name(), "\" of the ", where);
    };
    ForEachTensor(attribute, note);
  }

  std::string found_;
};

}  // namespace

struct OnnxModel::Graph {
  // Notes the names, and what tells of types, of a graph within the main one or
  // of that itself.
  void Note(const onnx::GraphProto& graph);
  // Notes what a node, of a graph or of a function, tells of types.
  void NoteFloats(const onnx::NodeProto& node);
  // Notes the type that a value of the main graph is said to have.
  void NoteType(const onnx::ValueInfoProto& value);
  // A name like `name` that nothing has.
  std::string NewName(const std::string& name);
  // Adds a DequantizeLinear before all other nodes, named after the value that
  // it makes.
  void AddDequantize(const std::string& codes,
                     const std::vector<std::string>& parameters,
                     const Quantizer& quantizer, const std::string& output);
  // Adds a Cast, named after the value that it makes.
  void AddCast(Dtype to, const std::string& input, const std::string& output,
               std::vector<onnx::NodeProto>* nodes);

  onnx::ModelProto model;
  absl::flat_hash_set<std::string> names;
  // Indices of initializers.
  absl::flat_hash_map<std::string, int> initializers;
  // Nodes that go before all others, and behind the one of an index.
  std::vector<onnx::NodeProto> first;
  absl::flat_hash_map<int, std::vector<onnx::NodeProto>> behind;
  // Index of the node that makes a value.
  absl::flat_hash_map<std::string, int> producers;
  absl::flat_hash_set<std::string> inputs;
  // Values whose type is told.
  absl::flat_hash_map<std::string, Activation> types;
  // Initializers that a node takes no more.
  absl::flat_hash_set<std::string> replaced;
  // Something is, or becomes, a float of another type than float32.
  bool has_other_floats = false;
};

void OnnxModel::Graph::Note(const onnx::GraphProto& graph) {
  for (const onnx::NodeProto& node : graph.node()) {
    names.insert(node.name());
    names.insert(node.input().begin(), node.input().end());
    names.insert(node.output().begin(), node.output().end());
    NoteFloats(node);
  }
  for (const onnx::TensorProto& tensor : graph.initializer()) {
    names.insert(tensor.name());
    has_other_floats |= IsOtherFloat(tensor.data_type());
  }
  for (const onnx::SparseTensorProto& tensor : graph.sparse_initializer()) {
    names.insert(tensor.values().name());
    has_other_floats |= IsOtherFloat(tensor.values().data_type());
  }
  for (const auto* values :
       {&graph.input(), &graph.output(), &graph.value_info()}) {
    for (const onnx::ValueInfoProto& value : *values) {
      names.insert(value.name());
      has_other_floats |= IsOtherFloat(value.type().tensor_type().elem_type());
    }
  }
}

void OnnxModel::Graph::NoteFloats(const onnx::NodeProto& node) {
  const auto note = [this](const onnx::TensorProto& tensor) {
    has_other_floats |= IsOtherFloat(tensor.data_type());
  };
  for (const onnx::AttributeProto& attribute : node.attribute()) {
    has_other_floats |=
        (attribute.name() == "to" || attribute.name() == "dtype") &&
        IsOtherFloat(attribute.i());
    ForEachTensor(attribute, note);
  }
}

void OnnxModel::Graph::NoteType(const onnx::ValueInfoProto& value) {
  const onnx::TensorTypeProto& type = value.type().tensor_type();
  if (type.elem_type() == 0) return;
  Activation& activation = types[value.name()];
  activation.dtype = DtypeOf(type.elem_type());
  activation.has_type = true;
  if (type.has_shape()) activation.rank = type.shape().dim_size();
}

std::string OnnxModel::Graph::NewName(const std::string& name) {
  std::string unique = name;
  for (int i = 1; !names.insert(unique).second; ++i) {
    unique = absl::StrCat(name, "_", i);
  }
  return unique;
}

void OnnxModel::Graph::AddCast(Dtype to, const std::string& input,
                               const std::string& output,
                               std::vector<onnx::NodeProto>* nodes) {
  onnx::NodeProto& node = nodes->emplace_back();
  node.set_op_type("Cast");
  node.set_name(NewName(output + "_Cast"));
  node.add_input(input);
  node.add_output(output);
  AddInt("to", DataTypeOf(to), &node);
}

void OnnxModel::Graph::AddDequantize(const std::string& codes,
                                     const std::vector<std::string>& parameters,
                                     const Quantizer& quantizer,
                                     const std::string& output) {
  onnx::NodeProto& node = first.emplace_back();
  node.set_op_type("DequantizeLinear");
  node.set_name(NewName(output + "_DequantizeLinear"));
  node.add_input(codes);
  for (const std::string& parameter : parameters) node.add_input(parameter);
  node.add_output(output);
  if (!quantizer.scale_shape.empty()) AddInt("axis", quantizer.axis, &node);
  if (quantizer.block_size != 0) {
    AddInt("block_size", quantizer.block_size, &node);
  }
}

OnnxModel::OnnxModel(std::unique_ptr<Graph> graph) : graph_(std::move(graph)) {}
OnnxModel::OnnxModel(OnnxModel&& other) noexcept = default;
OnnxModel& OnnxModel::operator=(OnnxModel&& other) noexcept = default;
OnnxModel::~OnnxModel() = default;

absl::StatusOr<OnnxModel> OnnxModel::Open(const std::string& path) {
  const absl::StatusOr<MappedFile> file = MappedFile::Open(path);
  if (!file.ok()) return file.status();
  const absl::Span<const uint8_t> bytes = file->bytes();
  auto graph = std::make_unique<Graph>();
  onnx::ModelProto& model = graph->model;
  // protobuf's own limit, which its sizes have too.
  if (bytes.size() > INT32_MAX ||
      !model.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) ||
      !model.has_graph()) {
    return FileMalformedError(
        path,
        absl::StrCat("expected an ONNX model below 2 GiB", GotInstead(bytes)));
  }
  onnx::GraphProto& main = *model.mutable_graph();
  MoveConstants(&main);
  if (absl::Status s = TakeInData(path, &main); !s.ok()) return s;
  auto note = [&graph](onnx::GraphProto* one) { graph->Note(*one); };
  ForEachGraph(&main, note);
  // Their names are their own.
  auto note_floats = [&graph](onnx::NodeProto* node) {
    graph->NoteFloats(*node);
  };
  for (onnx::FunctionProto& function : *model.mutable_functions()) {
    ForEachNode(&function, note_floats);
  }
  for (const auto* values :
       {&main.input(), &main.output(), &main.value_info()}) {
    for (const onnx::ValueInfoProto& value : *values) graph->NoteType(value);
  }
  for (const onnx::ValueInfoProto& input : main.input()) {
    graph->inputs.insert(input.name());
  }
  for (int i = 0; i < main.node_size(); ++i) {
    for (const std::string& output : main.node(i).output()) {
      graph->producers[output] = i;
    }
  }
  OnnxModel result(std::move(graph));
  for (int i = 0; i < main.initializer_size(); ++i) {
    onnx::TensorProto& tensor = *main.mutable_initializer(i);
    Weight weight;
    weight.name = tensor.name();
    weight.dtype = DtypeOf(tensor.data_type());
    weight.shape.assign(tensor.dims().begin(), tensor.dims().end());
    if (weight.dtype.has_value() && !IsExternal(tensor)) {
      MakeRaw(&tensor);
      const std::optional<int64_t> size =
          TensorSizeBytes(*weight.dtype, weight.shape);
      if (!size.has_value() ||
          static_cast<size_t>(*size) != tensor.raw_data().size()) {
        return FileMalformedError(
            path, absl::StrCat("initializer \"", weight.name,
                               "\": the data do not fit the dimensions"));
      }
      weight.data = absl::MakeConstSpan(
          reinterpret_cast<const uint8_t*>(tensor.raw_data().data()),
          tensor.raw_data().size());
    }
    // Old models list initializers as inputs with a default.
    result.graph_->inputs.erase(weight.name);
    result.graph_->initializers[weight.name] = i;
    result.weights_.push_back(std::move(weight));
  }
  return result;
}

const OnnxModel::Weight* OnnxModel::FindWeight(absl::string_view name) const {
  const auto found = graph_->initializers.find(name);
  return found == graph_->initializers.end()
             ? nullptr
             : &weights_[static_cast<size_t>(found->second)];
}

std::optional<OnnxModel::Activation> OnnxModel::FindActivation(
    absl::string_view name) const {
  if (name.empty() ||
      !(graph_->inputs.contains(name) || graph_->producers.contains(name))) {
    return std::nullopt;
  }
  const auto found = graph_->types.find(name);
  if (found != graph_->types.end()) return found->second;
  Activation activation;
  if (!graph_->has_other_floats) activation.dtype = Dtype::kF32;
  return activation;
}

std::vector<OnnxModel::Node> OnnxModel::nodes() const {
  std::vector<Node> nodes;
  for (const onnx::NodeProto& node : graph_->model.graph().node()) {
    nodes.push_back({node.name(),
                     node.op_type(),
                     {node.input().begin(), node.input().end()},
                     {node.output().begin(), node.output().end()}});
    for (const onnx::AttributeProto& attribute : node.attribute()) {
      if (attribute.name() == "transA") {
        nodes.back().transposes_a = attribute.i() != 0;
      } else if (attribute.name() == "transB") {
        nodes.back().transposes_b = attribute.i() != 0;
      } else if (attribute.name() == "alpha") {
        nodes.back().alpha = attribute.f();
      } else if (attribute.name() == "beta") {
        nodes.back().beta = attribute.f();
      } else if (attribute.name() == "perm") {
        nodes.back().permutation.assign(attribute.ints().begin(),
                                        attribute.ints().end());
      }
    }
  }
  return nodes;
}

bool OnnxModel::HasType(absl::string_view type) {
  return type != kBiasType && FindCodeType(type) != nullptr;
}

std::vector<std::string> OnnxModel::AddParameters(const std::string& name,
                                                  const Quantizer& quantizer) {
  const CodeType& type = *FindCodeType(quantizer.type);
  needed_opset_ = std::max({needed_opset_, type.opset,
                            quantizer.block_size != 0       ? kBlockOpset
                            : quantizer.scale_shape.empty() ? type.opset
                                                            : kPerAxisOpset});
  onnx::GraphProto& graph = *graph_->model.mutable_graph();
  if (!quantizer.scale_code.empty()) {
    const Quantizer& of_scales = quantizer.of_scales[0];
    const std::string scales = graph_->NewName(name + "_scale");
    const std::vector<std::string> parameters =
        AddParameters(scales, of_scales);
    onnx::TensorProto& codes = *graph.add_initializer();
    codes.set_name(graph_->NewName(scales + "_quantized"));
    codes.set_data_type(FindCodeType(of_scales.type)->data_type);
    codes.mutable_dims()->Assign(quantizer.scale_shape.begin(),
                                 quantizer.scale_shape.end());
    codes.set_raw_data(quantizer.scale_code.data(),
                       quantizer.scale_code.size());
    graph_->AddDequantize(codes.name(), parameters, of_scales, scales);
    return {scales};
  }
  onnx::TensorProto& scale = *graph.add_initializer();
  scale.set_name(graph_->NewName(name + "_scale"));
  scale.set_data_type(kFloat);
  scale.mutable_dims()->Assign(quantizer.scale_shape.begin(),
                               quantizer.scale_shape.end());
  scale.set_raw_data(quantizer.scale.data(),
                     quantizer.scale.size() * sizeof(float));
  const std::string scale_name = scale.name();

  // It also says the type of the codes.
  onnx::TensorProto& zero_point = *graph.add_initializer();
  zero_point.set_name(graph_->NewName(name + "_zero_point"));
  zero_point.set_data_type(type.data_type);
  zero_point.mutable_dims()->Assign(quantizer.scale_shape.begin(),
                                    quantizer.scale_shape.end());
  const size_t count = quantizer.scale.size();
  const int bits = type.bytes == 0 ? (type.data_type >= 25 ? 2 : 4) : 0;
  std::string raw(bits == 0 ? count * static_cast<size_t>(type.bytes)
                            : (count * static_cast<size_t>(bits) + 7) / 8,
                  '\0');
  for (size_t i = 0; i < quantizer.zero_point.size(); ++i) {
    const auto value = static_cast<uint32_t>(quantizer.zero_point[i]);
    if (bits != 0) {
      const size_t bit = i * static_cast<size_t>(bits);
      raw[bit / 8] =
          static_cast<char>(static_cast<uint8_t>(raw[bit / 8]) |
                            (value & ((1U << bits) - 1)) << (bit % 8));
      continue;
    }
    for (int byte = 0; byte < type.bytes; ++byte) {
      raw[i * static_cast<size_t>(type.bytes) + static_cast<size_t>(byte)] =
          static_cast<char>(value >> (8 * byte));
    }
  }
  zero_point.set_raw_data(std::move(raw));
  return {scale_name, zero_point.name()};
}

void OnnxModel::NeedCast(Dtype dtype) {
  if (dtype == Dtype::kBF16) {
    needed_opset_ = std::max(needed_opset_, kCastBfloat16Opset);
  }
}

void OnnxModel::QuantizeWeight(absl::string_view name,
                               const Quantizer& quantizer,
                               absl::Span<const uint8_t> codes) {
  const int index = graph_->initializers.find(name)->second;
  onnx::GraphProto& graph = *graph_->model.mutable_graph();
  const std::string weight(name);
  const std::vector<std::string> parameters = AddParameters(weight, quantizer);
  onnx::TensorProto& tensor = *graph.mutable_initializer(index);
  tensor.set_name(graph_->NewName(weight + "_quantized"));
  tensor.set_data_type(FindCodeType(quantizer.type)->data_type);
  tensor.set_raw_data(codes.data(), codes.size());
  weights_[static_cast<size_t>(index)].data = {};
  for (int i = 0; i < graph.input_size(); ++i) {
    if (graph.input(i).name() != weight) continue;
    graph.mutable_input()->DeleteSubrange(i, 1);
    break;
  }
  const Dtype dtype = *weights_[static_cast<size_t>(index)].dtype;
  NeedCast(dtype);
  const std::string output =
      dtype == Dtype::kF32 ? weight : graph_->NewName(weight + "_float32");
  graph_->AddDequantize(tensor.name(), parameters, quantizer, output);
  if (dtype != Dtype::kF32)
    graph_->AddCast(dtype, output, weight, &graph_->first);
}

void OnnxModel::QuantizeBias(size_t node, size_t input,
                             absl::Span<const float> scales,
                             absl::Span<const int32_t> codes) {
  onnx::GraphProto& graph = *graph_->model.mutable_graph();
  std::string& taken = *graph.mutable_node(static_cast<int>(node))
                            ->mutable_input(static_cast<int>(input));
  const std::string bias = taken;
  Quantizer quantizer;
  quantizer.type = std::string(kBiasType);
  quantizer.scale.assign(scales.begin(), scales.end());
  quantizer.zero_point.assign(scales.size(), 0);
  if (scales.size() > 1) {
    quantizer.scale_shape = {static_cast<int64_t>(scales.size())};
  }
  const std::vector<std::string> parameters = AddParameters(bias, quantizer);
  onnx::TensorProto& tensor = *graph.add_initializer();
  tensor.set_name(graph_->NewName(bias + "_quantized"));
  tensor.set_data_type(FindCodeType(kBiasType)->data_type);
  tensor.add_dims(static_cast<int64_t>(codes.size()));
  tensor.set_raw_data(codes.data(), codes.size() * sizeof(int32_t));
  taken = graph_->NewName(bias + "_dequantized");
  graph_->AddDequantize(tensor.name(), parameters, quantizer, taken);
  if (graph_->initializers.contains(bias)) graph_->replaced.insert(bias);
}

void OnnxModel::QuantizeActivation(absl::string_view name,
                                   const Quantizer& quantizer) {
  const std::string value(name);
  const Dtype dtype = *FindActivation(name)->dtype;
  NeedCast(dtype);
  onnx::GraphProto& graph = *graph_->model.mutable_graph();
  const std::vector<std::string> parameters = AddParameters(value, quantizer);
  const std::string codes = graph_->NewName(value + "_quantized");
  std::vector<onnx::NodeProto>* nodes = &graph_->first;
  std::string from = value;
  std::string to = value;
  const auto producer = graph_->producers.find(value);
  if (producer != graph_->producers.end()) {
    // All others go on by the name.
    from = graph_->NewName(value + "_float");
    onnx::NodeProto& node = *graph.mutable_node(producer->second);
    for (std::string& output : *node.mutable_output()) {
      if (output == value) output = from;
    }
    nodes = &graph_->behind[producer->second];
  } else {
    to = graph_->NewName(value + "_dequantized");
    auto rename = [&value, &to](onnx::NodeProto* node) {
      for (std::string& input : *node->mutable_input()) {
        if (input == value) input = to;
      }
    };
    ForEachNode(&graph, rename);
  }
  const auto add = [&](const char* op_type, const std::string& input,
                       const std::string& output) {
    onnx::NodeProto& node = nodes->emplace_back();
    node.set_op_type(op_type);
    node.set_name(graph_->NewName(absl::StrCat(value, "_", op_type)));
    node.add_input(input);
    for (const std::string& parameter : parameters) node.add_input(parameter);
    node.add_output(output);
    if (!quantizer.scale_shape.empty()) AddInt("axis", quantizer.axis, &node);
    if (quantizer.block_size != 0) {
      AddInt("block_size", quantizer.block_size, &node);
    }
    return &node;
  };
  std::string quantized_from = from;
  std::string dequantized_to = to;
  if (dtype != Dtype::kF32) {
    quantized_from = graph_->NewName(value + "_float32");
    dequantized_to = graph_->NewName(value + "_dequantized_float32");
    graph_->AddCast(Dtype::kF32, from, quantized_from, nodes);
  }
  onnx::NodeProto* const node = add("QuantizeLinear", quantized_from, codes);
  if (!quantizer.saturates) AddInt("saturate", 0, node);
  add("DequantizeLinear", codes, dequantized_to);
  if (dtype != Dtype::kF32) graph_->AddCast(dtype, dequantized_to, to, nodes);
}

int64_t OnnxModel::opset() const {
  for (const onnx::OperatorSetIdProto& import : graph_->model.opset_import()) {
    if (IsOnnxDomain(import.domain())) return import.version();
  }
  return 1;
}

absl::Status OnnxModel::RaiseOpset(const std::string& path) {
  onnx::ModelProto& model = graph_->model;
  // New types of codes need it too.
  model.set_ir_version(
      std::max(model.ir_version(), IrVersionOf(needed_opset_)));
  const int64_t from = opset();
  if (from >= needed_opset_) return absl::OkStatus();
  const std::string versions =
      absl::StrCat("operators of version ", needed_opset_,
                   " are needed, the model has ", from);
  constexpr absl::string_view kConvert =
      "; convert the model to that version first";
  if (from < kOldestOpset) {
    return FileUnsupportedError(
        path, absl::StrCat(versions, ", from before ", kOldestOpset, kConvert));
  }
  absl::Status status;
  auto check = [&](onnx::NodeProto* node) {
    if (!IsOnnxDomain(node->domain())) return;
    for (const BreakingChange& change : kBreakingChanges) {
      if (node->op_type() == change.op_type && change.opset > from &&
          change.opset <= needed_opset_ &&
          (change.attribute.empty() || HasAttribute(*node, change.attribute))) {
        status = FileUnsupportedError(
            path, absl::StrCat(versions, ", and ", node->op_type(),
                               " is another one from ", change.opset, " on",
                               kConvert));
      }
    }
  };
  ForEachNode(model.mutable_graph(), check);
  // The model's own functions take the new version with it.
  for (onnx::FunctionProto& function : *model.mutable_functions()) {
    ForEachNode(&function, check);
  }
  if (!status.ok()) return status;
  for (onnx::FunctionProto& function : *model.mutable_functions()) {
    SetOpset(needed_opset_, function.mutable_opset_import());
  }
  if (!SetOpset(needed_opset_, model.mutable_opset_import())) {
    model.add_opset_import()->set_version(needed_opset_);
  }
  return absl::OkStatus();
}

void OnnxModel::DropReplaced() {
  onnx::GraphProto& graph = *graph_->model.mutable_graph();
  const auto keep = [this](const std::string& name) {
    graph_->replaced.erase(name);
  };
  auto visit = [&keep](onnx::NodeProto* node) {
    for (const std::string& input : node->input()) keep(input);
  };
  ForEachNode(&graph, visit);
  auto visit_graph = [&keep](onnx::GraphProto* one) {
    for (const onnx::ValueInfoProto& output : one->output()) {
      keep(output.name());
    }
  };
  ForEachGraph(&graph, visit_graph);
  const auto is_gone = [this](const auto& value) {
    return graph_->replaced.contains(value.name());
  };
  auto* const initializers = graph.mutable_initializer();
  initializers->erase(
      std::remove_if(initializers->begin(), initializers->end(), is_gone),
      initializers->end());
  // Old models list them here, too.
  auto* const inputs = graph.mutable_input();
  inputs->erase(std::remove_if(inputs->begin(), inputs->end(), is_gone),
                inputs->end());
  graph_->replaced.clear();
}

absl::Status OnnxModel::Write(const std::string& path, IfExists if_exists) {
  onnx::GraphProto& graph = *graph_->model.mutable_graph();
  if (const std::string external = ExternalFinder().Find(&graph_->model);
      !external.empty()) {
    return FileUnsupportedError(
        path, absl::StrCat(external,
                           " has its data in another file, and it is of a "
                           "type that is not read, or not in the main graph; "
                           "first make one file of the model, as onnx.save "
                           "does"));
  }
  google::protobuf::RepeatedPtrField<onnx::NodeProto> nodes;
  for (onnx::NodeProto& node : graph_->first) nodes.Add(std::move(node));
  for (int i = 0; i < graph.node_size(); ++i) {
    nodes.Add(std::move(*graph.mutable_node(i)));
    const auto behind = graph_->behind.find(i);
    if (behind == graph_->behind.end()) continue;
    for (onnx::NodeProto& node : behind->second) nodes.Add(std::move(node));
  }
  graph.mutable_node()->Swap(&nodes);
  DropReplaced();
  graph_->first.clear();
  graph_->behind.clear();
  if (HasFloatBias(graph)) {
    needed_opset_ = std::max(needed_opset_, kFloatBiasOpset);
  }
  if (absl::Status s = RaiseOpset(path); !s.ok()) return s;
  if (graph_->model.ByteSizeLong() > INT32_MAX) {
    return FileUnsupportedError(path, "the model would take over 2 GiB");
  }
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    // Makes the bytes the same for the same model.
    coded.SetSerializationDeterministic(true);
    graph_->model.SerializeWithCachedSizes(&coded);
  }
  absl::StatusOr<AtomicFile> file = AtomicFile::Create(path, if_exists);
  if (!file.ok()) return file.status();
  absl::Status status = file->Append(bytes);
  return status.ok() ? file->Commit() : status;
}

}  // namespace quantd::files
