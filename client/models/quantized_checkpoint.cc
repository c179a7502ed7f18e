#include "client/models/quantized_checkpoint.h"

#include <algorithm>
#include <cstddef>
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
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "client/cpp/element_bytes.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/models/model_config.h"
#include "nlohmann/json.hpp"

namespace quantd {
namespace {

using Json = nlohmann::ordered_json;
using files::CodedTensor;
using files::CodeStream;
using files::CodeValues;
using files::Dtype;
using files::FileTensor;

constexpr int64_t kMxGroup = 32;
constexpr absl::string_view kNoConfigNote =
    "no configuration was found beside the file: zero points are taken as of "
    "version 1 of GPTQ, which stores them less 1; those of gptq_v2 would be "
    "others";
// Places of AWQ's values in a word.
constexpr uint8_t kAwqPlaces4[] = {0, 4, 1, 5, 2, 6, 3, 7};
constexpr uint8_t kAwqPlaces8[] = {0, 2, 1, 3};

int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0); }

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ","), "]");
}

bool IsFloatScale(Dtype dtype) {
  return dtype == Dtype::kF32 || dtype == Dtype::kF16 || dtype == Dtype::kBF16;
}

// True if a tensor that nobody decoded has the type of codes, or the name of
// their scales.
bool MayBeCodes(const FileTensor& tensor) {
  switch (tensor.dtype) {
    case Dtype::kF8E4M3:
    case Dtype::kF8E5M2:
    case Dtype::kF8E8M0:
      return true;
    case Dtype::kI8:
    case Dtype::kU8:
    case Dtype::kI16:
    case Dtype::kI32:
      // A bias of two dimensions is a mask.
      return tensor.shape.size() >= 2 && !absl::EndsWith(tensor.name, ".bias");
    default:
      return absl::StrContains(tensor.name, "weight_scale");
  }
}

// The first of elements of an unsigned type that is above `most` and not
// `exception`.
template <typename T>
std::optional<int64_t> FindAbove(absl::Span<const uint8_t> data, T most,
                                 T exception) {
  const size_t count = data.size() / sizeof(T);
  for (size_t i = 0; i < count; ++i) {
    T bits = 0;
    std::memcpy(&bits, data.data() + i * sizeof(T), sizeof(T));
    if (bits > most && bits != exception) return static_cast<int64_t>(i);
  }
  return std::nullopt;
}

// The first scale that is negative or not finite; those of U8 are powers of
// two. -0 is neither.
std::optional<int64_t> FindWrongScale(Dtype dtype,
                                      absl::Span<const uint8_t> data) {
  switch (dtype) {
    case Dtype::kU8:
      return FindAbove<uint8_t>(data, 254, 0);
    case Dtype::kF8E4M3:
      return FindAbove<uint8_t>(data, 0x7E, 0x80);
    case Dtype::kF16:
      return FindAbove<uint16_t>(data, 0x7BFF, 0x8000);
    case Dtype::kBF16:
      return FindAbove<uint16_t>(data, 0x7F7F, 0x8000);
    default:
      return FindAbove<uint32_t>(data, 0x7F7FFFFF, 0x80000000);
  }
}

// Settings in the files beside the tensors; 0 and empty where these do not say
// them.
struct Config {
  int64_t bits = 0;
  // -1: all inputs.
  int64_t group_size = 0;
  int64_t block_rows = 128;
  int64_t block_columns = 128;
  std::string method;
  // In lower case.
  std::string version;
  std::string checkpoint_format;
  // For AutoRound.
  std::string packing_format;
  // Some modules have other bits and groups than these.
  bool is_mixed = false;
  // For AWQ: true without zero points.
  bool is_symmetric = false;
  // Some file says how the tensors are quantized.
  bool is_found = false;
};

void TakeInteger(const Json& object, const char* key, int64_t* value) {
  const auto found = object.find(key);
  if (found != object.end() && found->is_number_integer()) {
    *value = found->get<int64_t>();
  }
}

void TakeString(const Json& object, const char* key, std::string* value) {
  const auto found = object.find(key);
  if (found != object.end() && found->is_string()) {
    *value = absl::AsciiStrToLower(found->get<std::string>());
  }
}

void TakeConfig(const Json& object, Config* config) {
  config->is_found = config->is_found || !object.empty();
  // Names in old files of AutoAWQ.
  TakeInteger(object, "w_bit", &config->bits);
  TakeInteger(object, "q_group_size", &config->group_size);
  TakeInteger(object, "bits", &config->bits);
  TakeInteger(object, "group_size", &config->group_size);
  TakeString(object, "quant_method", &config->method);
  TakeString(object, "version", &config->version);
  TakeString(object, "checkpoint_format", &config->checkpoint_format);
  TakeString(object, "packing_format", &config->packing_format);
  // Settings of single modules: of GPTQModel, by regular expressions, and of
  // AutoRound, by names.
  for (const char* key : {"dynamic", "extra_config"}) {
    const auto found = object.find(key);
    config->is_mixed =
        config->is_mixed ||
        (found != object.end() && found->is_object() && !found->empty());
  }
  const auto zero_point = object.find("zero_point");
  if (zero_point != object.end() && zero_point->is_boolean()) {
    config->is_symmetric = !zero_point->get<bool>();
  }
  const auto block = object.find("weight_block_size");
  if (block != object.end() && block->is_array() && block->size() == 2 &&
      (*block)[0].is_number_integer() && (*block)[1].is_number_integer()) {
    config->block_rows = (*block)[0].get<int64_t>();
    config->block_columns = (*block)[1].get<int64_t>();
  }
}

absl::StatusOr<Config> ReadConfigs(const std::string& path) {
  Config config;
  for (const char* name : {"quant_config.json", "quantize_config.json"}) {
    const absl::StatusOr<Json> plain = ReadConfig(path, name);
    if (!plain.ok()) return plain.status();
    TakeConfig(*plain, &config);
  }
  const absl::StatusOr<Json> hugging_face = ReadConfig(path, "config.json");
  if (!hugging_face.ok()) return hugging_face.status();
  const Json* const found = FindQuantization(*hugging_face);
  if (found != nullptr) TakeConfig(*found, &config);
  if (!config.method.empty()) return config;
  const absl::StatusOr<Json> modelopt =
      ReadConfig(path, "hf_quant_config.json");
  if (!modelopt.ok()) return modelopt.status();
  if (modelopt->contains("quantization")) {
    config.method = "modelopt";
    config.is_found = true;
  }
  return config;
}

// True if floats of eight bits have scales: then a tensor of them without
// scales does not hold the numbers that it stands for.
bool HasScaledFloats(const TensorInput& input) {
  return std::any_of(
      input.tensors().begin(), input.tensors().end(),
      [&input](const FileTensor& tensor) {
        return (tensor.dtype == Dtype::kF8E4M3 ||
                tensor.dtype == Dtype::kF8E5M2) &&
               (input.Find(absl::StrCat(tensor.name, "_scale")) != nullptr ||
                input.Find(absl::StrCat(tensor.name, "_scale_inv")) != nullptr);
      });
}

// True if the last part of a name is one of scales, whoever wrote it. The scale
// of logits is a parameter.
bool IsOfScales(absl::string_view part) {
  if (part == "logit_scale") return false;
  const std::string lower = absl::AsciiStrToLower(part);
  return absl::StrContains(lower, "scal") || absl::StrContains(lower, "amax") ||
         absl::StrContains(lower, "absmax") ||
         absl::StrContains(lower, "quant");
}

// The end of the part of a name that its module has: behind the last dot.
size_t ModuleBytes(absl::string_view name) {
  const size_t dot = name.rfind('.');
  return dot == absl::string_view::npos ? 0 : dot + 1;
}

// Finds what beside a float of eight bits may be its scale under a name that
// is not known.
class ScaleFinder {
 public:
  explicit ScaleFinder(const TensorInput& input) {
    for (const FileTensor& tensor : input.tensors()) {
      const absl::string_view name = tensor.name;
      sorted_.push_back(&tensor);
      const size_t bytes = ModuleBytes(name);
      if (IsOfScales(name.substr(bytes))) {
        of_scales_[name.substr(0, bytes)].push_back(&tensor);
      }
    }
    std::sort(sorted_.begin(), sorted_.end(),
              [](const FileTensor* a, const FileTensor* b) {
                return a->name < b->name;
              });
  }

  // Null where there is none.
  const FileTensor* Find(const FileTensor& codes) const {
    const absl::string_view name = codes.name;
    const absl::string_view module = name.substr(0, ModuleBytes(name));
    const auto found = of_scales_.find(module);
    // A tensor that norms call their scale is not that of their bias.
    if (found != of_scales_.end() && !absl::EndsWith(name, "bias")) {
      for (const FileTensor* const other : found->second) {
        if (other != &codes) return other;
      }
    }
    // A weight has all of its module.
    const bool is_weight = name.substr(module.size()) == "weight";
    const absl::string_view prefix = is_weight ? module : name;
    for (auto it = std::lower_bound(
             sorted_.begin(), sorted_.end(), prefix,
             [](const FileTensor*tensor, absl::string_view text) {
               return tensor->name < text;
             });
         it != sorted_.end() && absl::StartsWith((*it)->name, prefix); ++it) {
      const absl::string_view rest =
          absl::string_view((*it)->name).substr(prefix.size());
      const bool is_beside =
          is_weight || (!rest.empty() && (rest[0] == '.' || rest[0] == '_'));
      if (*it != &codes && is_beside && MayBeScale(**it, rest)) return *it;
    }
    return nullptr;
  }

 private:
  // Other floats than those that modules without scales have.
  static bool MayBeScale(const FileTensor& tensor, absl::string_view rest) {
    if (IsOfScales(rest)) return true;
    const absl::string_view last = rest.substr(ModuleBytes(rest));
    const bool is_plain = last == "weight" || absl::EndsWith(last, "bias") ||
                          last == "running_mean" || last == "running_var";
    return !is_plain && IsFloat(tensor.dtype);
  }

  static bool IsFloat(Dtype dtype) {
    return IsFloatScale(dtype) || dtype == Dtype::kF64 ||
           dtype == Dtype::kF8E4M3 || dtype == Dtype::kF8E5M2 ||
           dtype == Dtype::kF8E8M0;
  }

  std::vector<const FileTensor*> sorted_;
  // By module; the names are those of the input.
  absl::flat_hash_map<absl::string_view, std::vector<const FileTensor*>>
      of_scales_;
};

// Reads the tensors of one input. Not thread-safe.
class CheckpointReader {
 public:
  CheckpointReader(const TensorInput& input, const std::string& path,
                   Config config)
      : input_(input),
        path_(path),
        config_(std::move(config)),
        has_scaled_floats_(HasScaledFloats(input)) {}

  absl::StatusOr<std::vector<CodedTensor>> ReadAll() {
    if (config_.block_rows <= 0 || config_.block_columns <= 0) {
      return files::FileMalformedError(
          path_, "expected a weight_block_size of two positive numbers");
    }
    std::vector<CodedTensor> tensors;
    absl::flat_hash_set<std::string> parts;
    absl::flat_hash_set<std::string> names;
    for (const FileTensor& tensor : input_.tensors()) {
      absl::StatusOr<std::optional<CodedTensor>> read = Read(tensor);
      if (!read.ok()) return read.status();
      if (!read->has_value()) continue;
      const CodedTensor& coded = **read;
      absl::Status status = CheckModule(coded.name);
      status.Update(CheckScales(coded));
      if (!status.ok()) return status;
      const bool is_part = std::find(coded.parts.begin(), coded.parts.end(),
                                     coded.name) != coded.parts.end();
      if (!names.insert(coded.name).second ||
          (!is_part && input_.Find(coded.name) != nullptr)) {
        return Malformed(coded.name, "another tensor has this name");
      }
      parts.insert(coded.parts.begin(), coded.parts.end());
      tensors.push_back(**std::move(read));
    }
    const absl::Status status = CheckOthers(parts);
    if (!status.ok()) return status;
    return tensors;
  }

 private:
  absl::Status Malformed(const std::string& name,
                         absl::string_view what) const {
    return files::FileMalformedError(
        path_,
        absl::StrCat("quantized tensor ", files::QuotedName(name), ": ", what));
  }

  absl::Status Unsupported(const std::string& name,
                           absl::string_view what) const {
    return files::FileUnsupportedError(
        path_,
        absl::StrCat("quantized tensor ", files::QuotedName(name), ": ", what));
  }

  // Checks that a module has nothing that changes what its codes stand for.
  absl::Status CheckModule(const std::string& name) const {
    absl::string_view module = name;
    if (!absl::ConsumeSuffix(&module, ".weight")) return absl::OkStatus();
    for (const char* suffix : {".pre_quant_scale", ".comfy_quant",
                               ".scale_weight", "._extra_state"}) {
      const std::string other = absl::StrCat(module, suffix);
      if (input_.Find(other) == nullptr) continue;
      return Unsupported(name, absl::StrCat(other, " is not read"));
    }
    return absl::OkStatus();
  }

  absl::Status CheckScales(const CodedTensor& tensor) const {
    const files::CodeScales& scales = tensor.scales;
    std::optional<int64_t> wrong = FindWrongScale(scales.dtype, scales.data);
    const char* kind = "scale";
    if (!wrong.has_value()) {
      wrong = FindWrongScale(Dtype::kF32, scales.outer);
      kind = "outer scale";
    }
    if (!wrong.has_value()) return absl::OkStatus();
    return Malformed(tensor.name,
                     absl::StrCat("expected finite scales of at least 0, got a "
                                  "negative or non-finite one, ",
                                  kind, " ", *wrong));
  }

  // Checks that all other tensors are plain where something is not. Codes that
  // would stay under a name of their own are not to pass for numbers.
  absl::Status CheckOthers(
      const absl::flat_hash_set<std::string>& parts) const {
    if (parts.empty() && config_.method.empty()) return absl::OkStatus();
    for (const FileTensor& tensor : input_.tensors()) {
      if (parts.contains(tensor.name) || !MayBeCodes(tensor)) continue;
      return files::FileUnsupportedError(
          path_,
          absl::StrCat("tensor ", files::QuotedName(tensor.name), ", ",
                       DtypeName(tensor.dtype), " ", ShapeText(tensor.shape),
                       ", is quantized in a way that is not read"));
    }
    return absl::OkStatus();
  }

  // The coded tensor, if the tensor has codes.
  absl::StatusOr<std::optional<CodedTensor>> Read(const FileTensor& tensor) {
    absl::string_view stem = tensor.name;
    if (absl::ConsumeSuffix(&stem, ".qweight")) {
      return ReadInteger(std::string(stem), tensor);
    }
    for (const char* suffix : {"_blocks", ".blocks"}) {
      stem = tensor.name;
      if (tensor.dtype == Dtype::kU8 && tensor.shape.size() >= 3 &&
          tensor.shape.back() == kMxGroup / 2 &&
          absl::ConsumeSuffix(&stem, suffix) &&
          HasBlockScales(stem, suffix[0])) {
        return ReadBlocks(std::string(stem), suffix[0], tensor);
      }
    }
    if (tensor.dtype == Dtype::kF8E4M3 || tensor.dtype == Dtype::kF8E5M2) {
      return ReadBytes(tensor);
    }
    if (tensor.dtype == Dtype::kI8 && Part(tensor.name, "_scale") != nullptr) {
      return ReadBytes(tensor);
    }
    if (tensor.dtype == Dtype::kU8 && Part(tensor.name, "_scale") != nullptr) {
      return ReadFloat4(tensor);
    }
    return std::optional<CodedTensor>();
  }

  // Images may be called blocks too, but have no scales.
  bool HasBlockScales(absl::string_view stem, char separator) const {
    const FileTensor* const scale =
        input_.Find(absl::StrCat(stem, std::string(1, separator), "scales"));
    return !config_.method.empty() ||
           (scale != nullptr && files::IsPowerScale(scale->dtype));
  }

  const ScaleFinder& ScalesBeside() {
    if (!scale_finder_.has_value()) scale_finder_.emplace(input_);
    return *scale_finder_;
  }

  const FileTensor* Part(const std::string& name,
                         absl::string_view suffix) const {
    return input_.Find(absl::StrCat(name, suffix));
  }

  // Sets rows and columns from the last dimensions; those before them count
  // matrices.
  static void SetShape(const std::vector<int64_t>& shape, CodedTensor* tensor) {
    tensor->shape = shape;
    const size_t rank = shape.size();
    tensor->columns = rank > 0 ? shape[rank - 1] : 1;
    tensor->rows = rank > 1 ? shape[rank - 2] : 1;
    for (size_t d = 0; d + 2 < rank; ++d) tensor->matrices *= shape[d];
  }

  // The codes, their scales, and what the module has for activations, which
  // goes with them.
  void SetParts(const FileTensor& codes,
                const std::vector<const FileTensor*>& others,
                CodedTensor* tensor) const {
    tensor->parts.push_back(codes.name);
    for (const FileTensor* const other : others) {
      if (other != nullptr) tensor->parts.push_back(other->name);
    }
    absl::string_view module = tensor->name;
    if (!absl::ConsumeSuffix(&module, ".weight")) return;
    for (const char* suffix : {".input_scale", ".input_scale_ub",
                               ".input_zero_point", ".input_global_scale"}) {
      const std::string name = absl::StrCat(module, suffix);
      if (input_.Find(name) != nullptr) tensor->parts.push_back(name);
    }
  }

  // F8_E4M3, F8_E5M2 or I8, in the tensor's shape.
  absl::StatusOr<std::optional<CodedTensor>> ReadBytes(
      const FileTensor& codes) {
    const FileTensor* scale = Part(codes.name, "_scale_inv");
    if (scale != nullptr && Part(codes.name, "_scale") != nullptr) {
      return Unsupported(codes.name,
                         absl::StrCat("expected ", codes.name,
                                      "_scale_inv or _scale, got both"));
    }
    if (scale == nullptr) scale = Part(codes.name, "_scale");
    absl::string_view module = codes.name;
    if (absl::ConsumeSuffix(&module, ".weight_scale") &&
        input_.Find(absl::StrCat(module, ".weight_packed")) != nullptr) {
      return Unsupported(
          absl::StrCat(module, ".weight"),
          "it is of compressed-tensors, whose config.json is missing");
    }
    if (scale == nullptr && (!config_.method.empty() || has_scaled_floats_)) {
      if (config_.method.empty() || !absl::EndsWith(codes.name, ".weight")) {
        return std::optional<CodedTensor>();
      }
      return Malformed(codes.name, absl::StrCat("expected ", codes.name,
                                                "_scale_inv or _scale, got "
                                                "none"));
    }
    if (scale == nullptr) {
      const FileTensor* const beside = ScalesBeside().Find(codes);
      if (beside != nullptr) {
        return Unsupported(
            codes.name,
            absl::StrCat("expected ", codes.name,
                         "_scale_inv or _scale, or numbers without a scale; ",
                         beside->name, " may be one and is not read"));
      }
    }
    CodedTensor tensor;
    tensor.name = codes.name;
    tensor.layout = codes.dtype == Dtype::kI8 ? "INT8" : "FP8";
    SetShape(codes.shape, &tensor);
    absl::Status status;
    if (scale == nullptr) {
      SetNoScale(&tensor);
    } else if (HasScaleForEachOutput(codes.shape, *scale)) {
      status = SetOutputScales(*scale, &tensor);
    } else {
      status = SetScales(*scale, &tensor);
    }
    tensor.codes.bytes = codes.data;
    tensor.codes.line_words = tensor.columns;
    tensor.values = codes.dtype == Dtype::kI8       ? CodeValues::kSigned
                    : codes.dtype == Dtype::kF8E4M3 ? CodeValues::kE4M3
                                                    : CodeValues::kE5M2;
    const FileTensor* const zero_point = Part(codes.name, "_zero_point");
    if (status.ok() && zero_point != nullptr) {
      status = codes.dtype == Dtype::kI8
                   ? SetZeroPoints(*scale, *zero_point, &tensor)
                   : CheckZero(*zero_point, tensor.name);
    }
    if (!status.ok()) return status;
    SetParts(codes, {scale, zero_point}, &tensor);
    return std::optional<CodedTensor>(std::move(tensor));
  }

  // True for a convolution, whose first dimension is that of its outputs, with
  // a scale for each. Tensors of fewer dimensions are read as stacks of
  // matrices, which comes to the same.
  static bool HasScaleForEachOutput(const std::vector<int64_t>& shape,
                                    const FileTensor& scale) {
    const int64_t size = DtypeSizeBytes(scale.dtype);
    return shape.size() > 3 && IsFloatScale(scale.dtype) && shape[0] > 0 &&
           static_cast<int64_t>(scale.data.size()) == shape[0] * size &&
           !scale.shape.empty() && scale.shape[0] == shape[0];
  }

  // The codes are the numbers themselves.
  static void SetNoScale(CodedTensor* tensor) {
    static constexpr float kOne = 1;
    tensor->scales.data = {reinterpret_cast<const uint8_t*>(&kOne),
                           sizeof(kOne)};
    tensor->scales.rows = std::max<int64_t>(1, tensor->rows);
    tensor->scales.columns = std::max<int64_t>(1, tensor->columns);
  }

  static absl::Status SetOutputScales(const FileTensor& scale,
                                      CodedTensor* tensor) {
    const std::vector<int64_t>& shape = tensor->shape;
    tensor->matrices = shape[0];
    tensor->rows = shape[1];
    tensor->columns = 1;
    for (size_t d = 2; d < shape.size(); ++d) tensor->columns *= shape[d];
    files::CodeScales& scales = tensor->scales;
    scales.dtype = scale.dtype;
    scales.data = scale.data;
    scales.rows = std::max<int64_t>(1, tensor->rows);
    scales.columns = std::max<int64_t>(1, tensor->columns);
    scales.matrix_step = 1;
    return absl::OkStatus();
  }

  absl::Status CheckZero(const FileTensor& zero_point,
                         const std::string& name) const {
    const bool is_zero =
        std::all_of(zero_point.data.begin(), zero_point.data.end(),
                    [](uint8_t byte) { return byte == 0; });
    return is_zero
               ? absl::OkStatus()
               : Unsupported(name, absl::StrCat("expected ", zero_point.name,
                                                " of zeros for FP8"));
  }

  // One for each scale.
  absl::Status SetZeroPoints(const FileTensor& scale,
                             const FileTensor& zero_point,
                             CodedTensor* tensor) const {
    if (zero_point.dtype != Dtype::kI8 ||
        zero_point.data.size() *
                static_cast<size_t>(DtypeSizeBytes(scale.dtype)) !=
            scale.data.size()) {
      return Malformed(tensor->name,
                       absl::StrCat("expected ", zero_point.name,
                                    " of I8, as many as scales, got ",
                                    DtypeName(zero_point.dtype), " ",
                                    ShapeText(zero_point.shape)));
    }
    auto wide = std::make_shared<std::vector<int32_t>>();
    for (const uint8_t byte : zero_point.data) {
      wide->push_back(static_cast<int8_t>(byte));
    }
    tensor->zero_points = *wide;
    tensor->owner = std::move(wide);
    return absl::OkStatus();
  }

  // Sets the scales, and the size of their blocks by their shape.
  absl::Status SetScales(const FileTensor& scale, CodedTensor* tensor) const {
    files::CodeScales& scales = tensor->scales;
    scales.dtype = files::IsPowerScale(scale.dtype) ? Dtype::kU8 : scale.dtype;
    scales.data = scale.data;
    const int64_t rows = tensor->rows;
    const int64_t columns = tensor->columns;
    const int64_t count =
        static_cast<int64_t>(scale.data.size()) / DtypeSizeBytes(scale.dtype);
    const auto wrong = [&] {
      return Malformed(
          tensor->name,
          absl::StrCat("expected ", scale.name, " with a scale for the tensor,",
                       " for each row or each block of ", config_.block_rows,
                       " x ", config_.block_columns, ", got ",
                       DtypeName(scale.dtype), " ", ShapeText(scale.shape),
                       " for ", ShapeText(tensor->shape)));
    };
    if (!files::IsPowerScale(scale.dtype) && !IsFloatScale(scale.dtype))
      return wrong();
    if (tensor->matrices * rows * columns == 0) return absl::OkStatus();
    if (count == 1 && scale.dtype != Dtype::kU8) {
      scales.rows = rows;
      scales.columns = columns;
      return absl::OkStatus();
    }
    if (count % tensor->matrices != 0) return wrong();
    // Rows and columns of the scales of one matrix.
    int64_t scale_rows = count / tensor->matrices;
    int64_t scale_columns = 1;
    if (scale.shape.size() == tensor->shape.size() && scale.shape.size() >= 2) {
      scale_rows = scale.shape[scale.shape.size() - 2];
      scale_columns = scale.shape.back();
      if (!std::equal(scale.shape.begin(), scale.shape.end() - 2,
                      tensor->shape.begin())) {
        return wrong();
      }
    } else if (scale.shape.size() + 1 != tensor->shape.size() &&
               scale.shape.size() != 1) {
      return wrong();
    }
    // Bytes are always of groups.
    const bool is_mx = scale.dtype == Dtype::kU8 ||
                       (scale.dtype == Dtype::kF8E8M0 && scale_rows == rows &&
                        scale_columns == CeilDivide(columns, kMxGroup));
    if (is_mx) {
      scales.columns = kMxGroup;
      if (scale_rows != rows ||
          scale_columns != CeilDivide(columns, kMxGroup)) {
        return wrong();
      }
    } else if (scale_columns == 1 && scale_rows == 1) {
      scales.rows = rows;
      scales.columns = columns;
    } else if (scale_columns == 1 && scale_rows == rows) {
      scales.columns = columns;
    } else if (scale_rows == CeilDivide(rows, config_.block_rows) &&
               scale_columns == CeilDivide(columns, config_.block_columns)) {
      scales.rows = config_.block_rows;
      scales.columns = config_.block_columns;
    } else if (scale_rows == rows && scale_columns > 0 &&
               columns % scale_columns == 0) {
      scales.columns = columns / scale_columns;
    } else if ((tensor->shape.size() > 2 || rows != columns) &&
               scale_rows == 1 && scale_columns == columns) {
      // As broadcast, such as of experts that lie [inputs, outputs]. Of a
      // square matrix others have written the scales of rows so.
      scales.rows = rows;
    } else {
      return wrong();
    }
    scales.matrix_step = scale_rows * scale_columns;
    scales.row_step = scale_columns;
    scales.column_step = 1;
    return absl::OkStatus();
  }

  // NVFP4 under a scale of the tensor, or MXFP4.
  absl::StatusOr<std::optional<CodedTensor>> ReadFloat4(
      const FileTensor& codes) {
    const FileTensor& scale = *Part(codes.name, "_scale");
    const FileTensor* const outer = Part(codes.name, "_scale_2");
    if (scale.dtype != Dtype::kF8E4M3 && !files::IsPowerScale(scale.dtype)) {
      // Something else than what is read; whoever quantizes refuses it.
      return std::optional<CodedTensor>();
    }
    CodedTensor tensor;
    tensor.name = codes.name;
    const bool is_mx = files::IsPowerScale(scale.dtype);
    const int64_t group = is_mx ? kMxGroup : 16;
    tensor.layout = is_mx ? "MXFP4" : "NVFP4";
    std::vector<int64_t> shape = codes.shape;
    if (shape.size() < 2 || shape.back() > INT64_MAX / 2) {
      return Malformed(tensor.name, "expected a matrix of U8");
    }
    shape.back() *= 2;
    SetShape(shape, &tensor);
    std::vector<int64_t> expected = shape;
    expected.back() = CeilDivide(expected.back(), group);
    if (scale.shape != expected) {
      return Malformed(
          tensor.name,
          absl::StrCat("expected ", scale.name, " of ", ShapeText(expected),
                       ", got ", ShapeText(scale.shape)));
    }
    if (!is_mx) {
      const absl::Status status = SetOuter(outer, &tensor);
      if (!status.ok()) return status;
    }
    tensor.codes.bytes = codes.data;
    tensor.codes.bits = 4;
    tensor.codes.line_words = codes.shape.back();
    tensor.values = CodeValues::kE2M1;
    tensor.scales.dtype = is_mx ? Dtype::kU8 : scale.dtype;
    tensor.scales.data = scale.data;
    tensor.scales.columns = group;
    tensor.scales.row_step = expected.back();
    tensor.scales.column_step = 1;
    tensor.scales.matrix_step = tensor.rows * expected.back();
    SetParts(codes, {&scale, outer}, &tensor);
    return std::optional<CodedTensor>(std::move(tensor));
  }

  absl::Status SetOuter(const FileTensor* outer, CodedTensor* tensor) const {
    const int64_t count =
        outer == nullptr ? 0 : static_cast<int64_t>(outer->data.size() / 4);
    if (outer == nullptr || outer->dtype != Dtype::kF32 ||
        (count != 1 && count != tensor->matrices)) {
      return Malformed(
          tensor->name,
          absl::StrCat(
              "expected ", tensor->name, "_scale_2, one scale of F32, got ",
              outer == nullptr ? "none"
                               : absl::StrCat(DtypeName(outer->dtype), " ",
                                              ShapeText(outer->shape))));
    }
    tensor->scales.outer = outer->data;
    return absl::OkStatus();
  }

  // Blocks of 16 bytes. With '_' the tensor lies transposed.
  absl::StatusOr<std::optional<CodedTensor>> ReadBlocks(
      const std::string& name, char separator, const FileTensor& blocks) {
    const std::string scale_name =
        absl::StrCat(name, std::string(1, separator), "scales");
    const FileTensor* const scale = input_.Find(scale_name);
    const std::vector<int64_t> expected(blocks.shape.begin(),
                                        blocks.shape.end() - 1);
    if (scale == nullptr || !files::IsPowerScale(scale->dtype) ||
        scale->shape != expected) {
      return Malformed(
          name, absl::StrCat("expected ", scale_name, " of U8 ",
                             ShapeText(expected), ", got ",
                             scale == nullptr
                                 ? "none"
                                 : absl::StrCat(DtypeName(scale->dtype), " ",
                                                ShapeText(scale->shape))));
    }
    const int64_t groups = expected.back();
    CodedTensor tensor;
    tensor.name = name;
    tensor.layout = "GPT-OSS";
    std::vector<int64_t> shape(expected.begin(), expected.end() - 1);
    shape.push_back(groups * kMxGroup);
    tensor.codes.bytes = blocks.data;
    tensor.codes.bits = 4;
    tensor.codes.line_words = groups * kMxGroup / 2;
    tensor.values = CodeValues::kE2M1;
    tensor.scales.dtype = Dtype::kU8;
    tensor.scales.data = scale->data;
    if (separator == '_') {
      std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
      tensor.lines_are_columns = true;
      tensor.scales.rows = kMxGroup;
      tensor.scales.row_step = 1;
      tensor.scales.column_step = groups;
    } else {
      tensor.scales.columns = kMxGroup;
      tensor.scales.row_step = groups;
      tensor.scales.column_step = 1;
    }
    SetShape(shape, &tensor);
    tensor.scales.matrix_step =
        groups * (separator == '_' ? tensor.columns : tensor.rows);
    SetParts(blocks, {scale}, &tensor);
    return std::optional<CodedTensor>(std::move(tensor));
  }

  // GPTQ or AWQ; the shapes tell which.
  absl::StatusOr<std::optional<CodedTensor>> ReadInteger(
      const std::string& module, const FileTensor& codes) {
    const FileTensor* const scale = Part(module, ".scales");
    const FileTensor* const zeros = Part(module, ".qzeros");
    const FileTensor* const groups = Part(module, ".g_idx");
    CodedTensor tensor;
    tensor.name = absl::StrCat(module, ".weight");
    const auto expect = [&](const char* what, const FileTensor* got) {
      return Malformed(
          tensor.name,
          absl::StrCat("expected ", module, what, ", got ",
                       got == nullptr ? "none"
                                      : absl::StrCat(DtypeName(got->dtype), " ",
                                                     ShapeText(got->shape))));
    };
    if (input_.Find(tensor.name) != nullptr) {
      return Malformed(tensor.name,
                       absl::StrCat(codes.name, " is beside the weight"));
    }
    if (codes.dtype != Dtype::kI32 || codes.shape.size() != 2) {
      // SVDQuant and LLM-AWQ have others under this name.
      return Unsupported(
          tensor.name,
          absl::StrCat("expected ", codes.name,
                       " of I32, a matrix, as of GPTQ and AWQ, got ",
                       DtypeName(codes.dtype), " ", ShapeText(codes.shape)));
    }
    if (scale == nullptr || !IsFloatScale(scale->dtype) ||
        scale->shape.size() != 2 || scale->shape[0] == 0 ||
        scale->shape[1] == 0) {
      return expect(".scales of F16, BF16 or F32, [groups,outputs]", scale);
    }
    const int64_t group_count = scale->shape[0];
    const int64_t outputs = scale->shape[1];
    const bool is_awq = codes.shape[1] != outputs;
    const bool has_zeros = zeros != nullptr || !is_awq || !config_.is_symmetric;
    if (has_zeros &&
        (zeros == nullptr || zeros->dtype != Dtype::kI32 ||
         zeros->shape.size() != 2 || zeros->shape[0] != group_count)) {
      return expect(".qzeros of I32 for the groups of .scales", zeros);
    }
    tensor.layout = is_awq ? "AWQ" : "GPTQ";
    absl::Status status = CheckKind(tensor.name, is_awq);
    if (!status.ok()) return status;
    // The zero points have as many bits as the codes.
    const int64_t words = has_zeros ? zeros->shape[1] : codes.shape[1];
    int64_t bits = words * 32 / outputs;
    if (config_.is_mixed) {
      const absl::StatusOr<int64_t> own =
          BitsByShapes(tensor.name, codes, words, outputs, groups, is_awq);
      if (!own.ok()) return own.status();
      bits = *own;
    } else if (config_.bits > 0) {
      bits = config_.bits;
    }
    const bool is_known =
        is_awq ? bits == 4 || bits == 8
               : bits == 2 || bits == 3 || bits == 4 || bits == 8;
    if (!is_known) {
      return files::FileUnsupportedError(
          path_,
          absl::StrCat("quantized tensor ", files::QuotedName(tensor.name),
                       ": expected ", is_awq ? "4 or 8" : "2, 3, 4 or 8",
                       " bits, got ", bits));
    }
    if (has_zeros && words != CeilDivide(outputs * bits, 32)) {
      return expect(".qzeros packed along the outputs", zeros);
    }
    if (is_awq && codes.shape[1] * 32 != outputs * bits) {
      return expect(".qweight packed along the outputs", &codes);
    }
    const int64_t inputs = is_awq ? codes.shape[0] : codes.shape[0] * 32 / bits;
    if (inputs == 0 || (!is_awq && codes.shape[0] * 32 % bits != 0)) {
      return expect(".qweight packed along the inputs", &codes);
    }
    SetShape({outputs, inputs}, &tensor);
    tensor.codes.bytes = codes.data;
    tensor.codes.bits = static_cast<int>(bits);
    tensor.codes.word_bytes = 4;
    tensor.codes.line_words = is_awq ? codes.shape[1] : 1;
    tensor.codes.stride_words = is_awq ? 1 : outputs;
    tensor.lines_are_columns = is_awq;
    tensor.scales.dtype = scale->dtype;
    tensor.scales.data = scale->data;
    tensor.scales.row_step = 1;
    tensor.scales.column_step = outputs;
    if (is_awq) {
      tensor.codes.places = bits == 4 ? kAwqPlaces4 : kAwqPlaces8;
    } else if (config_.packing_format.empty()
                   ? config_.checkpoint_format != "gptq_v2"
                   : absl::EndsWith(config_.packing_format, ":auto_gptq")) {
      tensor.zero_point_add = 1;
      if (!config_.is_found) tensor.note = std::string(kNoConfigNote);
    }
    if (has_zeros) {
      CodeStream stream;
      stream.bytes = zeros->data;
      stream.bits = static_cast<int>(bits);
      stream.word_bytes = 4;
      stream.line_words = words;
      stream.places = tensor.codes.places;
      tensor.zero_point_stream = stream;
    } else {
      // In the middle of the codes.
      const auto middle = std::make_shared<const std::vector<int32_t>>(
          group_count * outputs, int32_t{1} << (bits - 1));
      tensor.zero_points = *middle;
      tensor.owner = middle;
    }
    status = SetGroups(group_count, is_awq ? nullptr : groups, &tensor);
    if (!status.ok()) return status;
    SetParts(codes, {zeros, scale, groups}, &tensor);
    return std::optional<CodedTensor>(std::move(tensor));
  }

  // The bits of a module whose shapes tell them. What says it in words are
  // regular expressions with look-around.
  absl::StatusOr<int64_t> BitsByShapes(const std::string& name,
                                       const FileTensor& codes,
                                       int64_t words_of_outputs,
                                       int64_t outputs,
                                       const FileTensor* groups,
                                       bool is_awq) const {
    std::vector<int64_t> fitting;
    for (const int64_t bits : {2, 3, 4, 8}) {
      if (CeilDivide(outputs * bits, 32) != words_of_outputs) continue;
      const int64_t words = codes.shape[0];
      const bool fits =
          is_awq ||
          (words * 32 % bits == 0 &&
           (groups == nullptr ||
            groups->shape == std::vector<int64_t>{words * 32 / bits}));
      if (fits) fitting.push_back(bits);
    }
    if (fitting.size() == 1) return fitting[0];
    return Unsupported(
        name, absl::StrCat("modules of this model have different bits, and "
                           "shapes that fit ",
                           fitting.empty() ? "none of 2, 3, 4 and 8"
                                           : absl::StrJoin(fitting, " and "),
                           " do not tell those of this one"));
  }

  // Others pack the same names in other ways.
  absl::Status CheckKind(const std::string& name, bool is_awq) const {
    const std::string& packing = config_.packing_format;
    if (!packing.empty()) {
      const bool is_packed_so = is_awq
                                    ? absl::EndsWith(packing, ":auto_awq")
                                    : packing == "auto_round" ||
                                          packing == "auto_round:gptqmodel" ||
                                          absl::EndsWith(packing, ":auto_gptq");
      if (is_packed_so) return absl::OkStatus();
      return Unsupported(
          name, absl::StrCat("codes of ", is_awq ? "AWQ" : "GPTQ",
                             " with packing_format ",
                             files::QuotedName(packing), " are not read"));
    }
    const std::string& kind =
        is_awq ? config_.version : config_.checkpoint_format;
    const bool is_known =
        kind.empty() ||
        (is_awq ? kind == "gemm" : kind == "gptq" || kind == "gptq_v2");
    if (is_known) return absl::OkStatus();
    return files::FileUnsupportedError(
        path_,
        absl::StrCat("quantized tensor ", files::QuotedName(name),
                     is_awq ? ": expected version gemm of AWQ, got "
                            : ": expected checkpoint_format gptq or gptq_v2, "
                              "got ",
                     files::QuotedName(kind)));
  }

  absl::Status SetGroups(int64_t group_count, const FileTensor* groups,
                         CodedTensor* tensor) const {
    const int64_t inputs = tensor->columns;
    int64_t size = config_.group_size;
    if (size == 0 && inputs % group_count == 0) size = inputs / group_count;
    if (size < 0) size = inputs;
    // Modules of their own size are known by what they have. A shorter last
    // group is no sign of one.
    const bool fits = size > 0 && CeilDivide(inputs, size) == group_count;
    if (config_.is_mixed && !fits && inputs % group_count == 0) {
      size = inputs / group_count;
    }
    if (size == 0 || CeilDivide(inputs, size) != group_count) {
      return Malformed(
          tensor->name,
          absl::StrCat("expected scales for groups of ", size, " of ", inputs,
                       " inputs, got ", group_count, " groups"));
    }
    tensor->scales.columns = size;
    if (groups == nullptr) return absl::OkStatus();
    if (groups->dtype != Dtype::kI32 ||
        groups->shape != std::vector<int64_t>{inputs}) {
      return Malformed(tensor->name,
                       absl::StrCat("expected ", groups->name, " of I32 [",
                                    inputs, "], got ", DtypeName(groups->dtype),
                                    " ", ShapeText(groups->shape)));
    }
    bool is_in_order = true;
    // Zeros beside several groups are what it was allocated with.
    bool is_set = group_count == 1;
    for (int64_t i = 0; i < inputs; ++i) {
      int32_t group = 0;
      std::memcpy(&group, groups->data.data() + i * 4, sizeof(group));
      if (group < 0 || group >= group_count) {
        return Malformed(
            tensor->name,
            absl::StrCat("expected ", groups->name, " between 0 and ",
                         group_count - 1, ", got ", group));
      }
      is_in_order = is_in_order && group == i / size;
      is_set = is_set || group != 0;
    }
    if (is_set && !is_in_order) tensor->scales.column_blocks = groups->data;
    return absl::OkStatus();
  }

  const TensorInput& input_;
  const std::string& path_;
  const Config config_;
  const bool has_scaled_floats_;
  std::optional<ScaleFinder> scale_finder_;
};

// True if scales are those of the OCP's MX formats.
bool IsMx(const files::CodeScales& scales) {
  return scales.dtype == Dtype::kU8 && scales.rows == 1 &&
         scales.columns == kMxGroup;
}

// True if scales are those of the MX formats, also with rows and columns the
// other way round.
bool IsMxOf(const CodedTensor& tensor) {
  return IsMx(tensor.scales) ||
         (tensor.scales.dtype == Dtype::kU8 && tensor.lines_are_columns);
}

// The format of the codes; nothing where there is none.
std::optional<v1::NumberFormat> FormatOf(const CodedTensor& tensor) {
  const bool is_mx = IsMxOf(tensor);
  switch (tensor.values) {
    case CodeValues::kE2M1:
      return is_mx ? v1::NUMBER_FORMAT_MXFP4_E2M1 : v1::NUMBER_FORMAT_NVFP4;
    case CodeValues::kE4M3:
      return is_mx ? v1::NUMBER_FORMAT_MXFP8_E4M3
                   : v1::NUMBER_FORMAT_FLOAT8_E4M3FN;
    case CodeValues::kE5M2:
      return is_mx ? v1::NUMBER_FORMAT_MXFP8_E5M2
                   : v1::NUMBER_FORMAT_FLOAT8_E5M2;
    case CodeValues::kUnsigned:
    case CodeValues::kSigned:
      break;
  }
  const absl::StatusOr<v1::NumberFormat> format =
      IntegerFormat(tensor.codes.bits, tensor.values == CodeValues::kSigned);
  if (!format.ok()) return std::nullopt;
  return *format;
}

// The scales in the order of an encoding.
void AddScales(const CodedTensor& tensor, Encoding* encoding) {
  const files::CodeScales& scales = tensor.scales;
  const bool has_codes = IsMxOf(tensor) || scales.dtype == Dtype::kF8E4M3;
  const int64_t matrices = scales.matrix_step == 0 ? 1 : tensor.matrices;
  const int64_t blocks = CeilDivide(tensor.columns, scales.columns);
  for (int64_t matrix = 0; matrix < matrices; ++matrix) {
    for (int64_t row = 0; row < tensor.rows; row += scales.rows) {
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t index = scales.IndexOf(matrix, row, block);
        if (has_codes) {
          encoding->mutable_scale_code()->push_back(
              static_cast<char>(scales.data[static_cast<size_t>(index)]));
        } else {
          encoding->add_scale(scales.At(matrix, index));
        }
        if (tensor.zero_point_stream.has_value()) {
          encoding->add_zero_point(
              static_cast<int32_t>(tensor.zero_point_stream->Get(block, row)) +
              tensor.zero_point_add);
        } else if (!tensor.zero_points.empty()) {
          encoding->add_zero_point(
              tensor.zero_points[static_cast<size_t>(index)]);
        }
      }
    }
  }
}

// 0 for all of a dimension.
int64_t BlockSize(int64_t block, int64_t size) {
  return block >= size ? 0 : block;
}

}  // namespace

absl::StatusOr<std::vector<CodedTensor>> ReadCheckpoint(
    const TensorInput& input, const std::string& path) {
  absl::StatusOr<Config> config = ReadConfigs(path);
  if (!config.ok()) return config.status();
  return CheckpointReader(input, path, *std::move(config)).ReadAll();
}

absl::StatusOr<CodedTensor> CodedTensorOf(const QuantizedTensor& tensor,
                                          const std::string& path) {
  const auto unsupported = [&](absl::string_view what) {
    return files::FileUnsupportedError(
        path, absl::StrCat("quantized tensor ", files::QuotedName(tensor.name),
                           ": ", what));
  };
  // Spans point into it.
  const auto owner = std::make_shared<Encoding>(tensor.Whole());
  if (tensor.divisor.has_value()) owner->set_outer_scale(0, *tensor.divisor);
  const Encoding& encoding = *owner;
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(encoding.format());
  if (!format.ok()) return format.status();
  if (encoding.real_zero_point_size() > 0) {
    return unsupported("zero points between codes");
  }
  CodedTensor coded;
  coded.name = tensor.name;
  coded.dtype = DtypeOf(tensor.element_type);
  coded.shape = tensor.shape;
  coded.layout = FormatName(encoding.format());
  coded.parts = tensor.parts;
  // The shape as a matrix: blocks that are not of a matrix have whole rows.
  const size_t rank = coded.shape.size();
  std::vector<int64_t> block(encoding.block_size().begin(),
                             encoding.block_size().end());
  block.resize(rank, 0);
  coded.rows = rank > 1 ? coded.shape[0] : 1;
  for (size_t d = rank > 1 ? 1 : 0; d < rank; ++d) {
    coded.columns *= coded.shape[d];
    if (d > 1 && block[d] != 0) return unsupported("blocks of 3 dimensions");
  }
  if (rank > 2 && block[1] != 0) return unsupported("blocks of 3 dimensions");
  // At least 1, also where there are no elements.
  const auto size_or = [](int64_t size, int64_t whole) {
    return std::max<int64_t>(1, size == 0 ? whole : size);
  };
  files::CodeScales& scales = coded.scales;
  scales.rows = rank > 1 ? size_or(block[0], coded.rows) : 1;
  scales.columns =
      rank == 0 ? 1 : size_or(rank == 1 ? block[0] : block[1], coded.columns);
  scales.column_step = 1;
  scales.row_step = CeilDivide(coded.columns, scales.columns);
  scales.column_blocks = tensor.column_groups;
  if (!encoding.scale_code().empty()) {
    scales.dtype = ScaleTypeOf(encoding) == v1::SCALE_TYPE_E8M0
                       ? Dtype::kU8
                       : Dtype::kF8E4M3;
    scales.data = BytesOf(encoding.scale_code());
    if (encoding.outer_scale_size() == 1) {
      scales.outer = BytesOf(encoding.outer_scale());
      scales.divides_by_outer = tensor.divisor.has_value();
    }
  } else {
    scales.data = BytesOf(encoding.scale());
  }
  coded.zero_points = {encoding.zero_point().data(),
                       static_cast<size_t>(encoding.zero_point_size())};
  coded.codes.bytes = tensor.codes;
  coded.codes.bits = format->storage_bits;
  coded.codes.line_values = coded.columns;
  switch (encoding.format()) {
    case v1::NUMBER_FORMAT_NVFP4:
    case v1::NUMBER_FORMAT_MXFP4_E2M1:
      coded.values = CodeValues::kE2M1;
      break;
    case v1::NUMBER_FORMAT_MXFP8_E4M3:
    case v1::NUMBER_FORMAT_FLOAT8_E4M3FN:
      coded.values = CodeValues::kE4M3;
      break;
    default:
      if (!format->IsPlainInteger() || format->storage_bits > 8) {
        return unsupported(FormatName(encoding.format()));
      }
      coded.values =
          format->is_signed ? CodeValues::kSigned : CodeValues::kUnsigned;
  }
  coded.owner = owner;
  coded.lazy = tensor.lazy;
  return coded;
}

absl::StatusOr<Encoding> EncodingOf(const CodedTensor& tensor,
                                    const std::string& path) {
  const auto unsupported = [&](absl::string_view what) {
    return files::FileUnsupportedError(
        path, absl::StrCat("quantized tensor ", files::QuotedName(tensor.name),
                           ": ", what));
  };
  const files::CodeScales& scales = tensor.scales;
  const std::optional<v1::NumberFormat> format = FormatOf(tensor);
  if (!format.has_value()) return unsupported("no format has these codes");
  if (!scales.column_blocks.empty()) {
    return unsupported(
        "g_idx has the groups in another order, which no encoding says");
  }
  Encoding encoding;
  encoding.set_format(*format);
  const size_t rank = tensor.shape.size();
  // Dimensions from here on are those of a matrix; more than two have one
  // scale.
  size_t of_matrix = rank < 2 ? 0 : rank - 2;
  if (scales.matrix_step != 0 && of_matrix > 1 &&
      tensor.matrices == tensor.shape[0] && tensor.rows == tensor.shape[1]) {
    of_matrix = 1;
  }
  for (size_t d = 0; d < rank; ++d) {
    int64_t block = scales.matrix_step == 0 || d >= of_matrix ? 0 : 1;
    if (d + 1 == rank) block = BlockSize(scales.columns, tensor.columns);
    if (d + 2 == rank && of_matrix + 2 == rank) {
      block = BlockSize(scales.rows, tensor.rows);
    }
    encoding.add_block_size(block);
    encoding.add_scale_shape(block == 0 ? 1
                                        : CeilDivide(tensor.shape[d], block));
  }
  AddScales(tensor, &encoding);
  if (!scales.outer.empty()) {
    std::vector<float> outer(scales.outer.size() / sizeof(float));
    std::memcpy(outer.data(), scales.outer.data(), scales.outer.size());
    encoding.mutable_outer_scale()->Add(outer.begin(), outer.end());
    for (size_t d = 0; outer.size() > 1 && d < rank; ++d) {
      encoding.add_outer_block_size(d + 2 < rank ? 1 : 0);
    }
  }
  switch (scales.dtype) {
    case Dtype::kF16:
      encoding.set_scale_type(v1::SCALE_TYPE_FLOAT16);
      break;
    case Dtype::kBF16:
      encoding.set_scale_type(v1::SCALE_TYPE_BFLOAT16);
      break;
    case Dtype::kF32:
      encoding.set_scale_type(v1::SCALE_TYPE_FLOAT32);
      break;
    default:
      break;
  }
  const FormatInfo info = *GetFormatInfo(*format);
  for (const int32_t zero_point : encoding.zero_point()) {
    if (zero_point < info.qmin || zero_point > info.qmax) {
      return unsupported(absl::StrCat("zero point ", zero_point,
                                      " is no code of ", FormatName(*format)));
    }
  }
  return encoding;
}

}  // namespace quantd
