#include "client/files/onnx_tensors.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/mapped_file.h"
#include "client/files/safetensors.h"
#include "client/files/shard_index.h"
#include "nlohmann/json.hpp"

namespace quantd::files {
namespace {

using Bytes = absl::Span<const uint8_t>;

// How protobuf writes a field.
enum WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kDelimited = 2,
  kFixed32 = 5,
};

// Numbers of fields, in the messages of onnx.proto.
constexpr uint32_t kModelGraph = 7;
constexpr uint32_t kModelFunction = 25;
constexpr uint32_t kFunctionName = 1;
constexpr uint32_t kFunctionNode = 7;
constexpr uint32_t kFunctionAttribute = 11;
constexpr uint32_t kGraphNode = 1;
constexpr uint32_t kGraphInitializer = 5;
constexpr uint32_t kGraphSparseInitializer = 15;
constexpr uint32_t kSparseValues = 1;
constexpr uint32_t kSparseIndices = 2;
constexpr uint32_t kNodeInput = 1;
constexpr uint32_t kNodeOutput = 2;
constexpr uint32_t kNodeName = 3;
constexpr uint32_t kNodeOpType = 4;
constexpr uint32_t kNodeAttribute = 5;
constexpr uint32_t kAttributeTensor = 5;
constexpr uint32_t kAttributeGraph = 6;
constexpr uint32_t kAttributeTensors = 10;
constexpr uint32_t kAttributeGraphs = 11;
constexpr uint32_t kAttributeSparse = 22;
constexpr uint32_t kAttributeSparses = 23;
constexpr uint32_t kTensorDims = 1;
constexpr uint32_t kTensorDataType = 2;
constexpr uint32_t kTensorFloatData = 4;
constexpr uint32_t kTensorInt32Data = 5;
constexpr uint32_t kTensorInt64Data = 7;
constexpr uint32_t kTensorName = 8;
constexpr uint32_t kTensorRawData = 9;
constexpr uint32_t kTensorDoubleData = 10;
constexpr uint32_t kTensorUint64Data = 11;
constexpr uint32_t kTensorExternalData = 13;
constexpr uint32_t kTensorDataLocation = 14;
constexpr uint32_t kEntryKey = 1;
constexpr uint32_t kEntryValue = 2;

constexpr uint64_t kDataLocationExternal = 1;

// No weight has as many, and a model may name millions.
constexpr size_t kMostOnnxDimensions = 16;
// Graphs within graphs.
constexpr int kMaxNestedGraphs = 100;

// A type of elements: where it has its data, if not in raw_data.
struct Type {
  Dtype dtype;
  uint32_t field;
};

std::optional<Type> FindType(uint64_t data_type) {
  switch (data_type) {
    case 1:
      return Type{Dtype::kF32, kTensorFloatData};
    case 2:
      return Type{Dtype::kU8, kTensorInt32Data};
    case 3:
      return Type{Dtype::kI8, kTensorInt32Data};
    case 4:
      return Type{Dtype::kU16, kTensorInt32Data};
    case 5:
      return Type{Dtype::kI16, kTensorInt32Data};
    case 6:
      return Type{Dtype::kI32, kTensorInt32Data};
    case 7:
      return Type{Dtype::kI64, kTensorInt64Data};
    case 9:
      return Type{Dtype::kBool, kTensorInt32Data};
    case 10:
      return Type{Dtype::kF16, kTensorInt32Data};
    case 11:
      return Type{Dtype::kF64, kTensorDoubleData};
    case 12:
      return Type{Dtype::kU32, kTensorUint64Data};
    case 13:
      return Type{Dtype::kU64, kTensorUint64Data};
    case 16:
      return Type{Dtype::kBF16, kTensorInt32Data};
    case 17:
      return Type{Dtype::kF8E4M3, kTensorInt32Data};
    case 19:
      return Type{Dtype::kF8E5M2, kTensorInt32Data};
    default:
      return std::nullopt;
  }
}

bool IsFloat(Dtype dtype) {
  return dtype == Dtype::kF16 || dtype == Dtype::kBF16 ||
         dtype == Dtype::kF32 || dtype == Dtype::kF64;
}

// How one element of a field of numbers is written.
WireType ElementWireType(uint32_t field) {
  switch (field) {
    case kTensorFloatData:
      return kFixed32;
    case kTensorDoubleData:
      return kFixed64;
    default:
      return kVarint;
  }
}

// Takes a number from the front; nothing where it does not end.
std::optional<uint64_t> TakeVarint(Bytes* bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < 10 && i < bytes->size(); ++i) {
    const uint64_t byte = (*bytes)[i];
    value |= (byte & 127) << (7 * i);
    if (byte < 128) {
      bytes->remove_prefix(i + 1);
      return value;
    }
  }
  return std::nullopt;
}

// A field of a message.
struct Field {
  uint32_t number = 0;
  uint32_t type = 0;
  // Value of a kVarint.
  uint64_t value = 0;
  // Bytes behind the tag, and behind the size of a kDelimited.
  Bytes bytes;
};

absl::string_view Text(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

bool IsUtf8(absl::string_view text) {
  using Json = nlohmann::json;
  // Text that is not UTF-8 does not come back.
  const std::string written = Json(text).dump(
      /*indent=*/-1, ' ', /*ensure_ascii=*/false,
      Json::error_handler_t::ignore);
  return Json::parse(written).get<std::string>() == text;
}

// The fields of a message.
class Fields {
 public:
  explicit Fields(Bytes bytes) : bytes_(bytes) {}

  // False at the end, and where the bytes are not sound.
  bool Next(Field* field) {
    if (bytes_.empty() || !is_sound_) return false;
    is_sound_ = Take(field);
    return is_sound_;
  }

  bool is_sound() const { return is_sound_; }

 private:
  bool Take(Field* field) {
    const std::optional<uint64_t> tag = TakeVarint(&bytes_);
    if (!tag.has_value() || *tag > UINT32_MAX || *tag < 8) return false;
    field->number = static_cast<uint32_t>(*tag >> 3);
    field->type = static_cast<uint32_t>(*tag & 7);
    uint64_t size = 0;
    switch (field->type) {
      case kVarint: {
        const Bytes before = bytes_;
        const std::optional<uint64_t> value = TakeVarint(&bytes_);
        if (!value.has_value()) return false;
        field->value = *value;
        field->bytes = before.first(before.size() - bytes_.size());
        return true;
      }
      case kFixed64:
        size = 8;
        break;
      case kFixed32:
        size = 4;
        break;
      case kDelimited: {
        const std::optional<uint64_t> length = TakeVarint(&bytes_);
        if (!length.has_value()) return false;
        size = *length;
        break;
      }
      default:
        return false;
    }
    if (size > bytes_.size()) return false;
    field->bytes = bytes_.first(static_cast<size_t>(size));
    bytes_.remove_prefix(static_cast<size_t>(size));
    return true;
  }

  Bytes bytes_;
  bool is_sound_ = true;
};

// Inputs of nodes that are codes, by the operator.
struct CodeInput {
  absl::string_view op_type;
  size_t input;
};

constexpr std::array<CodeInput, 15> kCodeInputs = {{
    {"DequantizeLinear", 0},
    {"QLinearConv", 3},
    {"QLinearMatMul", 0},
    {"QLinearMatMul", 3},
    {"ConvInteger", 1},
    {"MatMulInteger", 0},
    {"MatMulInteger", 1},
    // Operators of ONNX Runtime.
    {"QGemm", 3},
    {"DynamicQuantizeMatMul", 1},
    {"MatMulIntegerToFloat", 1},
    {"MatMulNBits", 1},
    {"GatherBlockQuantized", 0},
    {"DynamicQuantizeLSTM", 1},
    {"DynamicQuantizeLSTM", 2},
    {"QAttention", 1},
}};

// Operators that give the elements of their first input in another form.
constexpr std::array<absl::string_view, 7> kShapeForms = {
    "Cast",    "Flatten",   "Identity", "Reshape",
    "Squeeze", "Transpose", "Unsqueeze"};
// How many of them stand between codes and what takes them, at most.
constexpr int kMostForms = 8;

}  // namespace

class OnnxTensors::Parser {
 public:
  Parser(const std::string& path, OtherFiles other_files, OnnxTensors* tensors)
      : path_(path), other_files_(other_files), tensors_(*tensors) {}

  absl::Status Run() {
    absl::StatusOr<MappedFile> file = MappedFile::Open(path_);
    if (!file.ok()) return file.status();
    tensors_.files_.push_back(*std::move(file));
    Fields model(tensors_.files_[0].bytes());
    bool has_graph = false;
    Field field;
    while (model.Next(&field)) {
      if (field.type != kDelimited) continue;
      absl::Status status;
      if (field.number == kModelGraph) {
        has_graph = true;
        status = ReadGraph(field.bytes, {});
      } else if (field.number == kModelFunction) {
        status = ReadFunction(field.bytes);
      }
      if (!status.ok()) return status;
    }
    if (!model.is_sound() || !has_graph) return NotSound();
    for (absl::string_view name : taken_as_codes_) {
      for (int step = 0; step < kMostForms && !IsTensor(name); ++step) {
        const auto form = forms_.find(name);
        if (form == forms_.end()) break;
        name = form->second;
      }
      if (!IsTensor(name)) continue;
      tensors_.codes_ = std::string(name);
      break;
    }
    FindCastCodes();
    NameTensors();
    return absl::OkStatus();
  }

 private:
  // Tells every file which tensors it has. There may be a file for each.
  void NameTensors() {
    std::vector<const FileTensor*> sorted;
    for (const FileTensor& tensor : tensors_.tensors_) {
      sorted.push_back(&tensor);
    }
    std::sort(sorted.begin(), sorted.end(),
              [](const FileTensor* a, const FileTensor* b) {
                return a->data.data() < b->data.data();
              });
    for (MappedFile& file : tensors_.files_) {
      auto next =
          std::lower_bound(sorted.begin(), sorted.end(), file.bytes().data(),
                           [](const FileTensor* tensor, const uint8_t* begin) {
                             return tensor->data.data() < begin;
                           });
      const uint8_t* const end = file.bytes().data() + file.bytes().size();
      std::vector<TensorBytes> named;
      for (; next != sorted.end() && (*next)->data.data() < end; ++next) {
        named.push_back({(*next)->name, (*next)->data});
      }
      file.SetTensors(std::move(named));
    }
  }

  // Fields of an initializer.
  struct Info {
    absl::string_view name;
    std::vector<int64_t> shape;
    uint64_t data_type = 0;
    std::optional<Bytes> raw;
    bool is_external = false;
    std::map<absl::string_view, absl::string_view> external;
  };

  // A tensor of the main graph behind a value, through nodes that change its
  // form, and behind a Cast of codes through a Sub of their zero point.
  struct Origin {
    const FileTensor* tensor = nullptr;
    bool is_cast = false;
  };

  Origin OriginOf(absl::string_view value,
                  const absl::flat_hash_map<absl::string_view,
                                            const FileTensor*>& tensors) const {
    Origin origin;
    for (int step = 0; step <= kMostForms; ++step) {
      const auto tensor = tensors.find(value);
      if (tensor != tensors.end()) {
        origin.tensor = tensor->second;
        return origin;
      }
      auto before = forms_.find(value);
      if (before == forms_.end()) {
        before = differences_.find(value);
        if (before == differences_.end()) return {};
      }
      origin.is_cast |= casts_.contains(value);
      value = before->second;
    }
    return {};
  }

  // See cast_codes(). Indices have 64 bits, masks are bool.
  void FindCastCodes() {
    absl::flat_hash_map<absl::string_view, const FileTensor*> tensors;
    if (products_.empty() || casts_.empty()) return;
    for (const FileTensor& tensor : tensors_.tensors_) {
      tensors[tensor.name] = &tensor;
    }
    absl::flat_hash_set<absl::string_view> found;
    for (const auto& [first, second] : products_) {
      for (const auto& [codes, scales] :
           {std::pair(first, second), std::pair(second, first)}) {
        const Origin origin = OriginOf(codes, tensors);
        const Origin other = OriginOf(scales, tensors);
        if (origin.tensor == nullptr || other.tensor == nullptr ||
            !origin.is_cast || !IsFloat(other.tensor->dtype)) {
          continue;
        }
        switch (origin.tensor->dtype) {
          case Dtype::kI8:
          case Dtype::kU8:
          case Dtype::kI16:
          case Dtype::kU16:
          case Dtype::kI32:
          case Dtype::kU32:
            if (found.insert(origin.tensor->name).second) {
              tensors_.cast_codes_.push_back(
                  {origin.tensor->name, other.tensor->name});
            }
            break;
          default:
            break;
        }
      }
    }
  }

  bool IsTensor(absl::string_view name) const {
    return names_.contains(name) || names_elsewhere_.contains(name);
  }

  absl::Status NotSound() const {
    return FileMalformedError(path_, "expected an ONNX model");
  }

  absl::Status Malformed(const Info& info, absl::string_view what) const {
    return FileMalformedError(
        path_, absl::StrCat("initializer ", QuotedName(info.name), ": ", what));
  }

  // Place of a graph in the model.
  struct Where {
    // Graphs around it.
    int depth = 0;
    // "a graph within ..." for people; empty for the main graph.
    std::string what;
  };

  absl::Status ReadGraph(Bytes bytes, const Where& where) {
    if (where.depth > kMaxNestedGraphs) return NotSound();
    Fields graph(bytes);
    Field field;
    while (graph.Next(&field)) {
      if (field.type != kDelimited) continue;
      absl::Status status;
      if (field.number == kGraphNode) {
        status = ReadNode(field.bytes, where);
      } else if (field.number == kGraphInitializer) {
        status = where.what.empty()
                     ? ReadTensor(field.bytes, std::nullopt)
                     : NoteElsewhere(field.bytes, "", where.what);
      } else if (field.number == kGraphSparseInitializer) {
        status = ReadSparse(field.bytes, "", where);
      }
      if (!status.ok()) return status;
    }
    return graph.is_sound() ? absl::OkStatus() : NotSound();
  }

  absl::Status ReadFunction(Bytes bytes) {
    absl::string_view name;
    std::vector<Bytes> nodes;
    std::vector<Bytes> attributes;
    Fields function(bytes);
    Field field;
    while (function.Next(&field)) {
      if (field.type != kDelimited) continue;
      if (field.number == kFunctionName) name = Text(field.bytes);
      if (field.number == kFunctionNode) nodes.push_back(field.bytes);
      if (field.number == kFunctionAttribute) attributes.push_back(field.bytes);
    }
    if (!function.is_sound()) return NotSound();
    const Where where = {1, absl::StrCat("the function ", QuotedName(name))};
    for (const Bytes node : nodes) {
      if (absl::Status s = ReadNode(node, where); !s.ok()) return s;
    }
    Node defaults;
    defaults.op_type = name;
    for (const Bytes attribute : attributes) {
      const absl::Status status = ReadAttribute(attribute, defaults, where);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Fields that are read of a node.
  struct Node {
    absl::string_view name;
    absl::string_view op_type;
    std::vector<absl::string_view> inputs;
    absl::string_view output;
    std::vector<Bytes> attributes;
  };

  absl::Status ReadNode(Bytes bytes, const Where& where) {
    Node node;
    Fields fields(bytes);
    Field field;
    while (fields.Next(&field)) {
      if (field.type != kDelimited) continue;
      if (field.number == kNodeName) node.name = Text(field.bytes);
      if (field.number == kNodeOpType) node.op_type = Text(field.bytes);
      if (field.number == kNodeInput) node.inputs.push_back(Text(field.bytes));
      if (field.number == kNodeOutput) node.output = Text(field.bytes);
      if (field.number == kNodeAttribute) {
        node.attributes.push_back(field.bytes);
      }
    }
    if (!fields.is_sound()) return NotSound();
    for (const CodeInput& codes : kCodeInputs) {
      if (codes.op_type == node.op_type && codes.input < node.inputs.size()) {
        taken_as_codes_.push_back(node.inputs[codes.input]);
      }
    }
    if (!node.inputs.empty() &&
        std::find(kShapeForms.begin(), kShapeForms.end(), node.op_type) !=
            kShapeForms.end()) {
      forms_[node.output] = node.inputs[0];
      if (node.op_type == "Cast") casts_.insert(node.output);
    }
    if (node.inputs.size() == 2 && node.op_type == "Sub") {
      differences_[node.output] = node.inputs[0];
    } else if (node.inputs.size() == 2 && node.op_type == "Mul") {
      products_.emplace_back(node.inputs[0], node.inputs[1]);
    }
    for (const Bytes attribute : node.attributes) {
      const absl::Status status = ReadAttribute(attribute, node, where);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // The tensors and graphs of an attribute.
  absl::Status ReadAttribute(Bytes bytes, const Node& node,
                             const Where& where) {
    const bool is_constant = node.op_type == "Constant";
    // Tells, for people, the place of what is in the attribute.
    const auto what = [&node](absl::string_view prefix) {
      return absl::StrCat(
          prefix, node.op_type, " node ",
          QuotedName(node.name.empty() ? node.output : node.name));
    };
    Fields attribute(bytes);
    Field field;
    while (attribute.Next(&field)) {
      if (field.type != kDelimited) continue;
      absl::Status status;
      switch (field.number) {
        case kAttributeTensor:
        case kAttributeTensors:
          if (is_constant) {
            // A tensor that nothing can take is no weight.
            if (node.output.empty()) break;
            status = where.what.empty()
                         ? ReadTensor(field.bytes, node.output)
                         : NoteElsewhere(field.bytes, node.output, where.what);
          } else {
            status = NoteElsewhere(field.bytes, node.output,
                                   what("an attribute of the "));
          }
          break;
        case kAttributeSparse:
        case kAttributeSparses:
          status = ReadSparse(field.bytes, node.output, where);
          break;
        case kAttributeGraph:
        case kAttributeGraphs:
          status = ReadGraph(field.bytes,
                             {where.depth + 1, what("a graph within the ")});
          break;
        default:
          break;
      }
      if (!status.ok()) return status;
    }
    return attribute.is_sound() ? absl::OkStatus() : NotSound();
  }

  // Notes a tensor that is not in the main graph. `output` is its name where it
  // has none of its own.
  absl::Status NoteElsewhere(Bytes bytes, absl::string_view output,
                             absl::string_view where) {
    Info info;
    if (absl::Status s = ReadInfo(bytes, &info); !s.ok()) return s;
    if (!info.name.empty()) names_elsewhere_.insert(info.name);
    if (!output.empty()) names_elsewhere_.insert(output);
    const std::optional<Type> type = FindType(info.data_type);
    if (!type.has_value() || !IsFloat(type->dtype)) return absl::OkStatus();
    const std::optional<int64_t> size =
        TensorSizeBytes(type->dtype, info.shape);
    if (size.has_value() && *size <= DtypeSizeBytes(type->dtype)) {
      return absl::OkStatus();
    }
    // Constants have the name of what they give.
    return AddElsewhere(output.empty() ? info.name : output, where);
  }

  absl::Status AddElsewhere(absl::string_view name, absl::string_view where) {
    if (!IsUtf8(name)) {
      return FileMalformedError(path_,
                                absl::StrCat("tensor ", QuotedName(name),
                                             ": expected a name of UTF-8"));
    }
    tensors_.elsewhere_.push_back(
        {std::string(name),
         absl::StrCat("it is in ", where,
                      ", and quantctl reads only initializers and Constants of "
                      "the main graph")});
    return absl::OkStatus();
  }

  // `output` is the name where the values have none.
  absl::Status ReadSparse(Bytes bytes, absl::string_view output,
                          const Where& where) {
    Fields sparse(bytes);
    Field field;
    while (sparse.Next(&field)) {
      if (field.type != kDelimited ||
          (field.number != kSparseValues && field.number != kSparseIndices)) {
        continue;
      }
      Info info;
      if (absl::Status s = ReadInfo(field.bytes, &info); !s.ok()) return s;
      if (field.number == kSparseIndices) continue;
      const absl::string_view name = output.empty() ? info.name : output;
      if (!where.what.empty()) {
        if (absl::Status s = AddElsewhere(name, where.what); !s.ok()) return s;
      } else if (!IsUtf8(name)) {
        return Malformed(info, "expected a name of UTF-8");
      } else {
        tensors_.unread_.push_back(
            {std::string(name), "it is sparse, which quantctl does not read"});
      }
    }
    return sparse.is_sound() ? absl::OkStatus() : NotSound();
  }

  // All but the data of typed fields.
  absl::Status ReadInfo(Bytes bytes, Info* info) {
    // Keeps one dimension more than there may be.
    const auto add = [info](uint64_t size) {
      if (info->shape.size() > kMostOnnxDimensions) return;
      info->shape.push_back(static_cast<int64_t>(size));
    };
    Fields tensor(bytes);
    Field field;
    while (tensor.Next(&field)) {
      switch (field.number) {
        case kTensorDims:
          if (field.type == kVarint) {
            add(field.value);
          } else if (field.type == kDelimited) {
            while (!field.bytes.empty()) {
              const std::optional<uint64_t> size = TakeVarint(&field.bytes);
              if (!size.has_value()) return NotSound();
              add(*size);
            }
          }
          break;
        case kTensorDataType:
          if (field.type == kVarint) info->data_type = field.value;
          break;
        case kTensorName:
          if (field.type == kDelimited) info->name = Text(field.bytes);
          break;
        case kTensorRawData:
          if (field.type == kDelimited) info->raw = field.bytes;
          break;
        case kTensorDataLocation:
          if (field.type == kVarint) {
            info->is_external = field.value == kDataLocationExternal;
          }
          break;
        case kTensorExternalData:
          if (field.type == kDelimited) {
            absl::Status status = ReadEntry(field.bytes, info);
            if (!status.ok()) return status;
          }
          break;
        default:
          break;
      }
    }
    if (!tensor.is_sound()) return NotSound();
    const auto location = info->external.find("location");
    if (info->is_external && location != info->external.end() &&
        named_files_.insert(location->second).second) {
      tensors_.data_paths_.push_back(DataPath(location->second));
    }
    if (!IsUtf8(info->name)) {
      return Malformed(*info, "expected a name of UTF-8");
    }
    if (info->shape.size() > kMostOnnxDimensions) {
      return Malformed(*info, absl::StrCat("expected at most ",
                                           kMostOnnxDimensions, " dimensions"));
    }
    return absl::OkStatus();
  }

  absl::Status ReadEntry(Bytes bytes, Info* info) const {
    absl::string_view key;
    absl::string_view value;
    Fields entry(bytes);
    Field field;
    while (entry.Next(&field)) {
      if (field.type != kDelimited) continue;
      if (field.number == kEntryKey) key = Text(field.bytes);
      if (field.number == kEntryValue) value = Text(field.bytes);
    }
    info->external[key] = value;
    return entry.is_sound() ? absl::OkStatus() : NotSound();
  }

  // An initializer, or the tensor of a Constant, which `output` then names.
  absl::Status ReadTensor(Bytes bytes,
                          std::optional<absl::string_view> output) {
    Info info;
    if (absl::Status s = ReadInfo(bytes, &info); !s.ok()) return s;
    if (output.has_value()) {
      info.name = *output;
      if (!IsUtf8(info.name)) {
        return Malformed(info, "expected a name of UTF-8");
      }
    }
    if (info.name.empty()) return Malformed(info, "expected a name");
    if (!names_.insert(info.name).second) {
      return Malformed(info, "another one has the name too");
    }
    const std::optional<Type> type = FindType(info.data_type);
    if (!type.has_value()) {
      tensors_.unread_.push_back(
          {std::string(info.name), std::string(kTypeNotKnown)});
      return absl::OkStatus();
    }
    const std::optional<int64_t> size =
        TensorSizeBytes(type->dtype, info.shape);
    if (!size.has_value()) {
      return Malformed(info, "the data do not fit the dimensions");
    }
    const bool is_left = info.is_external && other_files_ == OtherFiles::kLeave;
    const absl::StatusOr<Bytes> data =
        is_left                ? absl::StatusOr<Bytes>(Bytes())
        : info.is_external     ? ReadExternal(info, *size)
        : info.raw.has_value() ? absl::StatusOr<Bytes>(*info.raw)
                               : ReadTyped(info, *type, *size, bytes);
    if (!data.ok()) return data.status();
    if (!is_left && data->size() != static_cast<size_t>(*size)) {
      return Malformed(info, "the data do not fit the dimensions");
    }
    tensors_.tensors_.push_back(
        {std::string(info.name), type->dtype, std::move(info.shape), *data});
    return absl::OkStatus();
  }

  // Numbers in a field of their own: each written by itself, or all together.
  absl::StatusOr<Bytes> ReadTyped(const Info& info, const Type& type,
                                  int64_t size_bytes, Bytes bytes) {
    const auto size = static_cast<size_t>(size_bytes);
    const WireType element = ElementWireType(type.field);
    const auto width = static_cast<size_t>(DtypeSizeBytes(type.dtype));
    std::vector<uint8_t> copy;
    std::optional<Bytes> whole;
    Fields tensor(bytes);
    Field field;
    while (tensor.Next(&field)) {
      if (field.number != type.field ||
          (field.type != element && field.type != kDelimited)) {
        continue;
      }
      if (element != kVarint) {
        // Elements as they lie in memory.
        if (!whole.has_value() && field.bytes.size() == size) {
          whole = field.bytes;
          continue;
        }
        if (whole.has_value() || field.bytes.size() > size - copy.size()) {
          return Malformed(info, "the data do not fit the dimensions");
        }
        copy.insert(copy.end(), field.bytes.begin(), field.bytes.end());
        continue;
      }
      if (copy.empty()) {
        copy.reserve(std::min(size, width * field.bytes.size()));
      }
      while (!field.bytes.empty()) {
        if (copy.size() >= size) {
          return Malformed(info, "the data do not fit the dimensions");
        }
        const std::optional<uint64_t> value = TakeVarint(&field.bytes);
        if (!value.has_value()) return NotSound();
        for (size_t byte = 0; byte < width; ++byte) {
          copy.push_back(static_cast<uint8_t>(*value >> (8 * byte)));
        }
      }
    }
    if (whole.has_value() && copy.empty()) return *whole;
    tensors_.copies_.push_back(std::move(copy));
    return Bytes(tensors_.copies_.back());
  }

  absl::StatusOr<Bytes> ReadExternal(const Info& info, int64_t size_bytes) {
    const auto number = [&info](absl::string_view key,
                                uint64_t otherwise) -> std::optional<uint64_t> {
      const auto found = info.external.find(key);
      if (found == info.external.end()) return otherwise;
      uint64_t value = 0;
      if (!absl::SimpleAtoi(found->second, &value)) return std::nullopt;
      return value;
    };
    const auto size = static_cast<uint64_t>(size_bytes);
    const std::optional<uint64_t> offset = number("offset", 0);
    const std::optional<uint64_t> length = number("length", size);
    const auto location = info.external.find("location");
    if (!offset.has_value() || !length.has_value() ||
        location == info.external.end()) {
      return Malformed(info,
                       "expected the location, offset and length of its data");
    }
    if (*length != size) {
      return Malformed(info, "the data do not fit the dimensions");
    }
    const absl::StatusOr<Bytes> file = OpenData(info, location->second);
    if (!file.ok()) return file.status();
    if (*offset > file->size() || file->size() - *offset < size) {
      return Malformed(info, absl::StrCat("expected its data in ",
                                          QuotedName(location->second),
                                          ", which ends before"));
    }
    return file->subspan(static_cast<size_t>(*offset),
                         static_cast<size_t>(size));
  }

  std::string DataPath(absl::string_view location) const {
    const size_t slash = path_.rfind('/');
    return slash == std::string::npos || absl::StartsWith(location, "/")
               ? std::string(location)
               : PathIn(path_.substr(0, slash + 1), std::string(location));
  }

  // A model must not name files of others.
  absl::StatusOr<Bytes> OpenData(const Info& info, absl::string_view location) {
    const std::vector<absl::string_view> parts = absl::StrSplit(location, '/');
    if (location.empty() || location[0] == '/' ||
        std::find(parts.begin(), parts.end(), "..") != parts.end() ||
        location.find('\0') != absl::string_view::npos) {
      return Malformed(
          info, absl::StrCat("expected its data in the folder of the model, "
                             "got location ",
                             QuotedName(location)));
    }
    const auto [found, is_new] =
        data_files_.insert({std::string(location), tensors_.files_.size()});
    if (is_new) {
      absl::StatusOr<MappedFile> file = MappedFile::Open(DataPath(location));
      if (!file.ok()) return file.status();
      tensors_.files_.push_back(*std::move(file));
    }
    return tensors_.files_[found->second].bytes();
  }

  const std::string& path_;
  const OtherFiles other_files_;
  OnnxTensors& tensors_;
  absl::flat_hash_set<absl::string_view> names_;
  // Names of tensors that are not in the main graph.
  absl::flat_hash_set<absl::string_view> names_elsewhere_;
  // Inputs of nodes.
  std::vector<absl::string_view> taken_as_codes_;
  // By what it gives: the first input of a node that changes its form.
  absl::flat_hash_map<absl::string_view, absl::string_view> forms_;
  // Outputs of these nodes that a Cast gives.
  absl::flat_hash_set<absl::string_view> casts_;
  // By what it gives: the first input of a Sub.
  absl::flat_hash_map<absl::string_view, absl::string_view> differences_;
  // The inputs of each Mul.
  std::vector<std::pair<absl::string_view, absl::string_view>> products_;
  // Indices into the files, by location.
  std::map<std::string, size_t> data_files_;
  // Locations of data_paths().
  absl::flat_hash_set<absl::string_view> named_files_;
};

absl::StatusOr<OnnxTensors> OnnxTensors::Open(const std::string& path,
                                              OtherFiles other_files) {
  OnnxTensors tensors;
  const absl::Status status = Parser(path, other_files, &tensors).Run();
  if (!status.ok()) return status;
  return tensors;
}

}  // namespace quantd::files
