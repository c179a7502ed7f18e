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
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "onnx_model.pb.h"

namespace quantd::files {
namespace {

constexpr int kFloat = 1;
constexpr int kAttributeInt = 2;
constexpr int kExternal = 1;
// Graphs within graphs.
constexpr int kMaxDepth = 100;

// A type of codes.
struct CodeType {
  absl::string_view name;
  // TensorProto.DataType.
  int data_type;
  // The first version of DequantizeLinear that has it per tensor.
  int64_t opset;
  int bytes;
};

constexpr CodeType kTypes[] = {
    {"uint8", 2, 10, 1},          {"int8", 3, 10, 1},
    {"uint16", 4, 21, 2},         {"int16", 5, 21, 2},
    {"float8_e4m3fn", 17, 19, 1}, {"float8_e4m3fnuz", 18, 19, 1},
    {"float8_e5m2", 19, 19, 1},   {"float8_e5m2fnuz", 20, 19, 1},
    {"uint4", 21, 21, 0},         {"int4", 22, 21, 0},
    {"float4_e2m1", 23, 23, 0},   {"uint2", 25, 25, 0},
    {"int2", 26, 25, 0},
};
constexpr int64_t kPerAxisOpset = 13;
constexpr int64_t kBlockOpset = 21;

const CodeType* FindType(absl::string_view name) {
  for (const CodeType& type : kTypes) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

// Versions at which an operator came to mean something else for what a model of
// an older version may have; a graph that has one cannot go past it unchanged.
struct BreakingChange {
  absl::string_view op_type;
  int64_t opset;
};

constexpr BreakingChange kBreakingChanges[] = {
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

// Calls visit(node) for all nodes of a graph and the graphs in it.
template <typename Visit>
void ForEachNode(onnx::GraphProto* graph, Visit& visit, int depth = 0) {
  if (depth > kMaxDepth) return;
  for (onnx::NodeProto& node : *graph->mutable_node()) {
    visit(&node);
    for (onnx::AttributeProto& attribute : *node.mutable_attribute()) {
      if (attribute.has_g()) {
        ForEachNode(attribute.mutable_g(), visit, depth + 1);
      }
      for (onnx::GraphProto& inner : *attribute.mutable_graphs()) {
        ForEachNode(&inner, visit, depth + 1);
      }
    }
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

void AddInt(absl::string_view name, int64_t value, onnx::NodeProto* node) {
  onnx::AttributeProto* const attribute = node->add_attribute();
  attribute->set_name(std::string(name));
  attribute->set_type(kAttributeInt);
  attribute->set_i(value);
}

}  // namespace

struct OnnxModel::Graph {
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
};

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
    return FileMalformedError(path, "expected an ONNX model below 2 GiB");
  }
  onnx::GraphProto& main = *model.mutable_graph();
  auto note_names = [&graph](onnx::NodeProto* node) {
    graph->names.insert(node->input().begin(), node->input().end());
    graph->names.insert(node->output().begin(), node->output().end());
  };
  ForEachNode(&main, note_names);
  for (const onnx::ValueInfoProto& input : main.input()) {
    graph->names.insert(input.name());
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
    if (weight.dtype.has_value() && tensor.data_location() != kExternal) {
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
    result.graph_->names.insert(weight.name);
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

bool OnnxModel::HasActivation(absl::string_view name) const {
  return !name.empty() &&
         (graph_->inputs.contains(name) || graph_->producers.contains(name));
}

bool OnnxModel::HasType(absl::string_view type) {
  return FindType(type) != nullptr;
}

std::string OnnxModel::NewName(const std::string& name) {
  std::string unique = name;
  for (int i = 1; !graph_->names.insert(unique).second; ++i) {
    unique = absl::StrCat(name, "_", i);
  }
  return unique;
}

std::vector<std::string> OnnxModel::AddParameters(const std::string& name,
                                                  const Quantizer& quantizer) {
  const CodeType& type = *FindType(quantizer.type);
  needed_opset_ = std::max({needed_opset_, type.opset,
                            quantizer.block_size != 0       ? kBlockOpset
                            : quantizer.scale_shape.empty() ? type.opset
                                                            : kPerAxisOpset});
  onnx::GraphProto& graph = *graph_->model.mutable_graph();
  onnx::TensorProto& scale = *graph.add_initializer();
  scale.set_name(NewName(name + "_scale"));
  scale.set_data_type(kFloat);
  scale.mutable_dims()->Assign(quantizer.scale_shape.begin(),
                               quantizer.scale_shape.end());
  scale.set_raw_data(quantizer.scale.data(),
                     quantizer.scale.size() * sizeof(float));
  const std::string scale_name = scale.name();

  // It also says the type of the codes.
  onnx::TensorProto& zero_point = *graph.add_initializer();
  zero_point.set_name(NewName(name + "_zero_point"));
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

void OnnxModel::QuantizeWeight(absl::string_view name,
                               const Quantizer& quantizer,
                               absl::Span<const uint8_t> codes) {
  const int index = graph_->initializers.find(name)->second;
  onnx::GraphProto& graph = *graph_->model.mutable_graph();
  const std::string weight(name);
  const std::vector<std::string> parameters = AddParameters(weight, quantizer);
  onnx::TensorProto& tensor = *graph.mutable_initializer(index);
  tensor.set_name(NewName(weight + "_quantized"));
  tensor.set_data_type(FindType(quantizer.type)->data_type);
  tensor.set_raw_data(codes.data(), codes.size());
  weights_[static_cast<size_t>(index)].data = {};
  for (int i = 0; i < graph.input_size(); ++i) {
    if (graph.input(i).name() != weight) continue;
    graph.mutable_input()->DeleteSubrange(i, 1);
    break;
  }
  onnx::NodeProto& node = graph_->first.emplace_back();
  node.set_op_type("DequantizeLinear");
  node.set_name(NewName(weight + "_DequantizeLinear"));
  node.add_input(tensor.name());
  for (const std::string& input : parameters) node.add_input(input);
  node.add_output(weight);
  if (!quantizer.scale_shape.empty()) AddInt("axis", quantizer.axis, &node);
  if (quantizer.block_size != 0) {
    AddInt("block_size", quantizer.block_size, &node);
  }
}

void OnnxModel::QuantizeActivation(absl::string_view name,
                                   const Quantizer& quantizer) {
  const std::string value(name);
  onnx::GraphProto& graph = *graph_->model.mutable_graph();
  const std::vector<std::string> parameters = AddParameters(value, quantizer);
  const std::string codes = NewName(value + "_quantized");
  std::vector<onnx::NodeProto>* nodes = &graph_->first;
  std::string from = value;
  std::string to = value;
  const auto producer = graph_->producers.find(value);
  if (producer != graph_->producers.end()) {
    // All others go on by the name.
    from = NewName(value + "_float");
    onnx::NodeProto& node = *graph.mutable_node(producer->second);
    for (std::string& output : *node.mutable_output()) {
      if (output == value) output = from;
    }
    nodes = &graph_->behind[producer->second];
  } else {
    to = NewName(value + "_dequantized");
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
    node.set_name(NewName(absl::StrCat(value, "_", op_type)));
    node.add_input(input);
    for (const std::string& parameter : parameters) node.add_input(parameter);
    node.add_output(output);
    if (!quantizer.scale_shape.empty()) AddInt("axis", quantizer.axis, &node);
    if (quantizer.block_size != 0) {
      AddInt("block_size", quantizer.block_size, &node);
    }
  };
  add("QuantizeLinear", from, codes);
  add("DequantizeLinear", codes, to);
}

int64_t OnnxModel::opset() const {
  for (const onnx::OperatorSetIdProto& import : graph_->model.opset_import()) {
    if (IsOnnxDomain(import.domain())) return import.version();
  }
  return 1;
}

absl::Status OnnxModel::RaiseOpset(const std::string& path) {
  const int64_t from = opset();
  if (from >= needed_opset_) return absl::OkStatus();
  absl::Status status;
  auto check = [&](onnx::NodeProto* node) {
    if (!IsOnnxDomain(node->domain())) return;
    for (const BreakingChange& change : kBreakingChanges) {
      if (node->op_type() != change.op_type || change.opset <= from ||
          change.opset > needed_opset_) {
        continue;
      }
      status = FileUnsupportedError(
          path,
          absl::StrCat("operators of version ", needed_opset_,
                       " are needed, the model has ", from, ", and ",
                       node->op_type(), " is another one from ", change.opset,
                       " on; convert the model to that version first"));
    }
  };
  ForEachNode(graph_->model.mutable_graph(), check);
  if (!status.ok()) return status;
  onnx::OperatorSetIdProto* target = nullptr;
  for (onnx::OperatorSetIdProto& import :
       *graph_->model.mutable_opset_import()) {
    if (IsOnnxDomain(import.domain())) target = &import;
  }
  if (target == nullptr) target = graph_->model.add_opset_import();
  target->set_version(needed_opset_);
  graph_->model.set_ir_version(
      std::max(graph_->model.ir_version(), IrVersionOf(needed_opset_)));
  return absl::OkStatus();
}

absl::Status OnnxModel::Write(const std::string& path) {
  onnx::GraphProto& graph = *graph_->model.mutable_graph();
  for (const onnx::TensorProto& tensor : graph.initializer()) {
    if (tensor.data_location() == kExternal) {
      return FileUnsupportedError(
          path, absl::StrCat("initializer \"", tensor.name(),
                             "\" has its data in another file"));
    }
  }
  if (absl::Status s = RaiseOpset(path); !s.ok()) return s;
  google::protobuf::RepeatedPtrField<onnx::NodeProto> nodes;
  for (onnx::NodeProto& node : graph_->first) nodes.Add(std::move(node));
  for (int i = 0; i < graph.node_size(); ++i) {
    nodes.Add(std::move(*graph.mutable_node(i)));
    const auto behind = graph_->behind.find(i);
    if (behind == graph_->behind.end()) continue;
    for (onnx::NodeProto& node : behind->second) nodes.Add(std::move(node));
  }
  graph.mutable_node()->Swap(&nodes);
  graph_->first.clear();
  graph_->behind.clear();
  if (graph_->model.ByteSizeLong() > INT32_MAX) {
    return FileUnsupportedError(path, "the model would take over 2 GiB");
  }
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    // The same model gives the same bytes.
    coded.SetSerializationDeterministic(true);
    graph_->model.SerializeWithCachedSizes(&coded);
  }
  absl::StatusOr<AtomicFile> file = AtomicFile::Create(path);
  if (!file.ok()) return file.status();
  absl::Status status = file->Append(bytes);
  return status.ok() ? file->Commit() : status;
}

}  // namespace quantd::files
