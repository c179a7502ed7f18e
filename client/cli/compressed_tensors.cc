#include "client/cli/compressed_tensors.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "client/cpp/element_bytes.h"
#include "client/cpp/errors.h"
#include "client/cpp/text_file.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/shard_index.h"
#include "nlohmann/json.hpp"
#include "re2/re2.h"

namespace quantd::cli {
namespace {

constexpr absl::string_view kWeight = ".weight";
constexpr absl::string_view kScale = ".weight_scale";
constexpr int kMaxBits = 8;
constexpr int64_t kNvfp4Group = 16;
constexpr int64_t kMxGroup = 32;

// Values of `bits` bits one behind the other in the words of a row.
class BitStream {
 public:
  BitStream(int bits, uint32_t* words, size_t stride)
      : bits_(bits), words_(words), stride_(stride) {}

  void Put(uint32_t value) {
    const uint64_t shifted = static_cast<uint64_t>(value) << (position_ % 32);
    const size_t word = position_ / 32;
    words_[word * stride_] |= static_cast<uint32_t>(shifted);
    if (shifted >> 32 != 0) {
      words_[(word + 1) * stride_] |= static_cast<uint32_t>(shifted >> 32);
    }
    position_ += static_cast<size_t>(bits_);
  }

  uint32_t Get() {
    const size_t word = position_ / 32;
    const size_t shift = position_ % 32;
    uint64_t value = words_[word * stride_];
    if (shift + static_cast<size_t>(bits_) > 32) {
      value |= static_cast<uint64_t>(words_[(word + 1) * stride_]) << 32;
    }
    position_ += static_cast<size_t>(bits_);
    return static_cast<uint32_t>(value >> shift) & ((1U << bits_) - 1);
  }

 private:
  const int bits_;
  uint32_t* const words_;
  const size_t stride_;
  size_t position_ = 0;
};

int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Code `index` of a tensor as the server packs it, from 0 on: plus 2^(bits - 1)
// where it is signed.
uint32_t CodeFromZero(const FormatInfo& format, absl::Span<const uint8_t> codes,
                      int64_t index) {
  const auto i = static_cast<size_t>(index);
  const auto per_byte = static_cast<size_t>(8 / format.storage_bits);
  uint32_t code = codes[i / per_byte] >>
                  (i % per_byte * static_cast<size_t>(format.storage_bits));
  code &= (1U << format.bits) - 1;
  return format.is_signed ? code ^ (1U << (format.bits - 1)) : code;
}

absl::Status NotHeld(absl::string_view what) {
  return ArgumentInvalidError(absl::StrCat("compressed-tensors holds ", what));
}

// Which elements share a scale, or nothing where the layout has no word for it.
// `columns` of a matrix.
absl::StatusOr<Json> StrategyOf(const std::vector<int64_t>& scale_shape,
                                const Encoding& encoding, int64_t count,
                                int64_t columns) {
  Json json = Json::object();
  const auto& block = encoding.block_size();
  // As it was asked for, also where a matrix has one block: runtimes take
  // layers of one kind.
  if (block.size() == 2 && block[0] > 1 && block[1] > 0) {
    json["strategy"] = "block";
    json["block_structure"] = {block[0], block[1]};
    return json;
  }
  if (block.size() == 2 && block[0] == 1 && block[1] > 0 &&
      (scale_shape[1] > 1 || block[1] == columns)) {
    json["strategy"] = "group";
    json["group_size"] = block[1];
    return json;
  }
  if (count == 1) {
    json["strategy"] = "tensor";
    return json;
  }
  if (scale_shape[0] == count && block[0] == 1) {
    json["strategy"] = "channel";
    return json;
  }
  return NotHeld(
      "scales per tensor, per row, and of matrices in groups along rows or in "
      "blocks");
}

template <typename T>
std::vector<T> Elements(const files::FileTensor& tensor) {
  return CopyElements<T>(tensor.data);
}

// How a quantized tensor lies in the file.
struct Layout {
  FormatInfo format;
  bool is_nvfp4 = false;
  bool is_mxfp4 = false;
  // With scales of powers of two.
  bool is_mxfp8 = false;
  bool is_float8 = false;
  bool is_packed = false;
  // As others mean it: without zero points, codes lie around 0. Those of
  // unsigned formats do not once they are signed.
  bool is_symmetric = true;
  // Scales along each dimension, and in all.
  std::vector<int64_t> blocks;
  int64_t count = 0;
  // What config.json says of the module.
  Json module;
  std::vector<CompressedPart> parts;
};

// The shape of packed zero points, which are those of a matrix with a scale for
// each group or row.
bool PacksZeroPoints(const Layout& layout) {
  const Json& strategy = layout.module["weights"]["strategy"];
  return layout.is_packed && (strategy == "group" || strategy == "channel");
}

// `encoding` may lack its scales.
// Errors: ARGUMENT_INVALID for what the layout does not hold.
absl::StatusOr<Layout> LayoutOf(const std::string& name,
                                const std::vector<int64_t>& shape,
                                const Encoding& encoding, bool has_zero_points,
                                bool packs_all) {
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(encoding.format());
  if (!format.ok()) return format.status();
  const std::string module(ModuleOf(name));
  if (module.empty()) {
    return NotHeld("tensors that are named MODULE.weight");
  }
  const std::vector<int64_t> block_size(encoding.block_size().begin(),
                                        encoding.block_size().end());
  const absl::StatusOr<std::vector<int64_t>> blocks =
      ScaleShape(shape, block_size);
  if (!blocks.ok()) return blocks.status();
  Layout layout;
  layout.format = *format;
  layout.blocks = *blocks;
  const v1::ScaleType scale_type = ScaleTypeOf(encoding);
  const std::string format_name = FormatName(encoding.format());
  layout.is_nvfp4 = encoding.format() == v1::NUMBER_FORMAT_NVFP4;
  layout.is_mxfp4 = encoding.format() == v1::NUMBER_FORMAT_MXFP4_E2M1;
  layout.is_mxfp8 = encoding.format() == v1::NUMBER_FORMAT_MXFP8_E4M3;
  layout.is_float8 =
      layout.is_mxfp8 || encoding.format() == v1::NUMBER_FORMAT_FLOAT8_E4M3FN;
  const bool is_fp4 = layout.is_nvfp4 || layout.is_mxfp4;
  const bool is_integer = format->kind == CodeKind::kInteger &&
                          format->bits <= kMaxBits &&
                          scale_type <= v1::SCALE_TYPE_BFLOAT16;
  if (!(is_fp4 || layout.is_float8 || is_integer) ||
      (layout.is_float8 && !layout.is_mxfp8 &&
       scale_type > v1::SCALE_TYPE_BFLOAT16)) {
    return NotHeld(
        absl::StrCat("integers of at most 8 bits, float8_e4m3fn, nvfp4, "
                     "mxfp4_e2m1 and mxfp8_e4m3, not ",
                     format_name));
  }
  const absl::StatusOr<ScaleCounts> counts = CountScales(shape, encoding);
  if (!counts.ok()) return counts.status();
  layout.count = counts->scale;
  const bool is_matrix = shape.size() == 2;
  absl::StatusOr<Json> scheme =
      StrategyOf(*blocks, encoding, layout.count, is_matrix ? shape[1] : 0);
  if (!scheme.ok()) return scheme.status();
  layout.is_symmetric = !has_zero_points && (!is_integer || format->is_signed);
  layout.is_packed =
      is_integer && is_matrix && (packs_all || format->bits < kMaxBits);
  std::string layout_name =
      layout.is_packed ? "pack-quantized" : "int-quantized";
  if (layout.is_float8) layout_name = "float-quantized";
  if (is_fp4 || layout.is_mxfp8) {
    const int64_t group = layout.is_nvfp4 ? kNvfp4Group : kMxGroup;
    if (!is_matrix || block_size.size() != 2 || block_size[0] != 1 ||
        block_size[1] != group || shape[1] % 2 != 0 ||
        counts->outer_scale > 1) {
      return NotHeld(absl::StrCat(format_name,
                                  " of matrices with an even "
                                  "number of columns in groups of ",
                                  group));
    }
    layout_name = layout.is_nvfp4   ? "nvfp4-pack-quantized"
                  : layout.is_mxfp4 ? "mxfp4-pack-quantized"
                                    : "mxfp8-quantized";
    (*scheme)["strategy"] = layout.is_nvfp4 ? "tensor_group" : "group";
    (*scheme)["group_size"] = group;
  }
  if (is_integer && !layout.is_packed && format->bits < kMaxBits) {
    return NotHeld("fewer than 8 bits of matrices alone");
  }
  Json weights = {{"num_bits", is_fp4 ? 4 : format->bits},
                  {"type", is_integer ? "int" : "float"},
                  {"symmetric", layout.is_symmetric},
                  {"dynamic", false},
                  {"observer", "minmax"}};
  weights.update(*scheme);
  // What tells it from FP8 in groups.
  if (layout.is_mxfp8) weights["scale_dtype"] = "torch.uint8";
  layout.module = {{"format", layout_name}, {"weights", std::move(weights)}};

  const auto add = [&](absl::string_view suffix, files::Dtype dtype,
                       const std::vector<int64_t>& part_shape) {
    layout.parts.push_back({absl::StrCat(module, suffix), dtype, part_shape});
  };
  const std::vector<int64_t> scale_shape =
      layout.module["weights"]["strategy"] == "tensor" ? std::vector<int64_t>{1}
                                                       : *blocks;
  if (is_fp4) {
    add(".weight_packed", files::Dtype::kU8, {shape[0], shape[1] / 2});
    add(".weight_scale",
        layout.is_nvfp4 ? files::Dtype::kF8E4M3 : files::Dtype::kU8, *blocks);
    if (layout.is_nvfp4) {
      add(".weight_global_scale", files::Dtype::kF32, {1});
    }
    return layout;
  }
  if (layout.is_packed) {
    add(".weight_packed", files::Dtype::kI32,
        {shape[0], CeilDivide(shape[1] * format->bits, 32)});
    add(".weight_shape", files::Dtype::kI64, {2});
  } else {
    add(kWeight, layout.is_float8 ? files::Dtype::kF8E4M3 : files::Dtype::kI8,
        shape);
  }
  add(".weight_scale",
      layout.is_mxfp8 ? files::Dtype::kU8 : ScaleDtype(scale_type),
      layout.is_mxfp8 ? *blocks : scale_shape);
  if (layout.is_symmetric) return layout;
  if (PacksZeroPoints(layout)) {
    add(".weight_zero_point", files::Dtype::kI32,
        {CeilDivide(shape[0] * format->bits, 32), (*blocks)[1]});
  } else {
    add(".weight_zero_point", files::Dtype::kI8, scale_shape);
  }
  return layout;
}

}  // namespace

absl::StatusOr<CompressedPlan> CompressedModel::PlanOf(
    const std::string& name, const std::vector<int64_t>& shape,
    const Encoding& expected) const {
  absl::StatusOr<Layout> layout = LayoutOf(
      name, shape, expected, expected.chunks_have_zero_points(), packs_all_);
  if (!layout.ok()) return layout.status();
  return CompressedPlan{std::move(layout->parts),
                        ModuleOfLayout(std::move(layout->module))};
}

absl::StatusOr<uint64_t> CompressedModel::Write(
    const std::string& name, const std::vector<int64_t>& shape,
    const Encoding& encoding, const Scales& scales,
    absl::Span<const uint8_t> codes, Add add_tensor) {
  absl::StatusOr<Layout> layout =
      LayoutOf(name, shape, encoding, !scales.zero_point.empty(), packs_all_);
  if (!layout.ok()) return layout.status();
  const FormatInfo& format = layout->format;
  std::vector<int32_t> zero_points = CopyElements<int32_t>(scales.zero_point);
  if (!layout->is_symmetric) {
    zero_points.resize(static_cast<size_t>(layout->count), 0);
  }
  uint64_t size_bytes = 0;
  size_t next = 0;
  absl::Status status;
  // Adds the next part.
  const auto add = [&](absl::Span<const uint8_t> data) {
    if (!status.ok()) return;
    const CompressedPart& part = layout->parts[next++];
    size_bytes += data.size();
    status = add_tensor(part.name, part.dtype, part.shape, data);
  };
  if (layout->is_nvfp4 || layout->is_mxfp4) {
    add(codes);
    add(scales.scale);
    if (layout->is_nvfp4) {
      const float outer = CopyElements<float>(scales.outer_scale)[0];
      const std::vector<float> inverse = {1.0f / outer};
      rounded_count_ += !IsExactInverse(inverse[0], outer);
      add(BytesOf(inverse));
    }
  } else {
    // Codes of integers from 0 on, then as this layout has them: signed.
    const int64_t half = int64_t{1} << (format.bits - 1);
    const int64_t elements = ElementCount(shape).value_or(0);
    if (layout->is_float8) {
      add(codes);
    } else if (!layout->is_packed) {
      std::vector<uint8_t> values(codes.begin(), codes.end());
      if (!format.is_signed) {
        for (uint8_t& value : values) value ^= 0x80;
      }
      add(values);
    } else {
      const int64_t row_words = layout->parts[0].shape[1];
      std::vector<uint32_t> words(static_cast<size_t>(shape[0] * row_words));
      int64_t index = 0;
      for (int64_t row = 0; row < shape[0] && elements > 0; ++row) {
        BitStream stream(format.bits, words.data() + row * row_words, 1);
        for (int64_t column = 0; column < shape[1]; ++column) {
          stream.Put(CodeFromZero(format, codes, index++));
        }
      }
      add(BytesOf(words));
      add(BytesOf(shape));
    }
    add(scales.scale);
    // Zero points move with the codes.
    const int64_t shift = format.is_signed ? 0 : half;
    if (layout->is_symmetric) {
      // There are none.
    } else if (PacksZeroPoints(*layout)) {
      const int64_t groups = layout->blocks[1];
      const int64_t rows = layout->parts[next].shape[0];
      std::vector<uint32_t> words(static_cast<size_t>(rows * groups));
      for (int64_t group = 0; group < groups; ++group) {
        BitStream stream(format.bits, words.data() + group,
                         static_cast<size_t>(groups));
        for (int64_t row = 0; row < shape[0]; ++row) {
          stream.Put(static_cast<uint32_t>(
              zero_points[static_cast<size_t>(row * groups + group)] - shift +
              half));
        }
      }
      add(BytesOf(words));
    } else {
      std::vector<int8_t> bytes;
      for (const int32_t zero_point : zero_points) {
        bytes.push_back(static_cast<int8_t>(zero_point - shift));
      }
      add(BytesOf(bytes));
    }
  }
  if (!status.ok()) return status;
  modules_[std::string(ModuleOf(name))] =
      ModuleOfLayout(std::move(layout->module));
  return size_bytes;
}

Json CompressedModel::ModuleOfLayout(Json module) const {
  if (!input_arguments_.is_null()) {
    module["input_activations"] = input_arguments_;
  }
  return module;
}

Json CompressedModel::Config(const std::vector<std::string>& ignored,
                             const Json& cache) const {
  absl::flat_hash_map<std::string, size_t> index;
  std::vector<std::pair<Json, Json>> groups;
  std::string format;
  for (const auto& [module, scheme] : modules_.items()) {
    const auto [found, is_new] = index.emplace(scheme.dump(), groups.size());
    if (is_new) groups.emplace_back(scheme, Json::array());
    groups[found->second].second.push_back(module);
    const std::string layout = scheme["format"];
    format = format.empty() || format == layout ? layout : "mixed-precision";
  }
  Json config_groups = Json::object();
  for (size_t i = 0; i < groups.size(); ++i) {
    Json group = {{"targets", groups[i].second},
                  {"weights", groups[i].first["weights"]},
                  {"input_activations",
                   groups[i].first.value("input_activations", Json())},
                  {"output_activations", nullptr},
                  {"format", groups[i].first["format"]}};
    config_groups[absl::StrCat("group_", i)] = std::move(group);
  }
  return {{"quant_method", "compressed-tensors"},
          {"quantization_status", "compressed"},
          {"format", format},
          {"global_compression_ratio", nullptr},
          {"kv_cache_scheme", cache},
          {"ignore", ignored},
          {"config_groups", std::move(config_groups)}};
}

namespace {

// Of the regular expressions among the targets of one file, which anybody may
// have written: with these a file takes seconds at most.
constexpr int kMaxPatterns = 256;
constexpr size_t kMaxPatternBytes = 1024;
constexpr int64_t kMaxPatternMemoryBytes = 1 << 20;

// By module; null for one that no group targets.
using Schemes = absl::flat_hash_map<std::string, const Json*>;

// Says which modules have the arguments of which group: the first that targets
// one. Not thread-safe.
class TargetMatcher {
 public:
  // `path` of the configuration, for errors. Of `schemes` the keys are the
  // modules.
  TargetMatcher(std::string path, Schemes* schemes)
      : path_(std::move(path)),
        schemes_(*schemes),
        left_count_(schemes->size()) {}

  // Reads the groups in their order, until every module has one.
  // Errors: FILE_UNSUPPORTED for a regular expression that is not RE2's or too
  // large.
  absl::Status Match(const Json& config) {
    const auto groups = config.find("config_groups");
    if (groups == config.end() || !groups->is_object()) return absl::OkStatus();
    for (const Json& group : *groups) {
      if (!group.is_object()) continue;
      const auto targets = group.find("targets");
      const auto weights = group.find("weights");
      if (targets == group.end() || !targets->is_array() ||
          weights == group.end() || !weights->is_object()) {
        continue;
      }
      for (const Json& target : *targets) {
        if (left_count_ == 0) return absl::OkStatus();
        if (!target.is_string()) continue;
        absl::Status status =
            MatchOne(target.get_ref<const std::string&>(), &*weights);
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::Status MatchOne(const std::string& target, const Json* weights) {
    absl::string_view pattern = target;
    if (absl::ConsumePrefix(&pattern, "re:")) {
      return MatchPattern(pattern, weights);
    }
    // Class names stand for all modules: the file does not say what class one
    // is.
    if (target == "Linear" || target == "Conv2d" || target == "Conv1d") {
      for (auto& [module, scheme] : schemes_) Give(weights, &scheme);
      return absl::OkStatus();
    }
    const auto found = schemes_.find(target);
    if (found != schemes_.end()) Give(weights, &found->second);
    return absl::OkStatus();
  }

  // As Python's re.match: from the beginning of the name on, not to its end.
  absl::Status MatchPattern(absl::string_view pattern, const Json* weights) {
    if (pattern.size() > kMaxPatternBytes) {
      return files::FileUnsupportedError(
          path_, absl::StrCat("a target of ", pattern.size(),
                              " bytes, expected regular expressions of at "
                              "most ",
                              kMaxPatternBytes));
    }
    if (++pattern_count_ > kMaxPatterns) {
      return files::FileUnsupportedError(
          path_, absl::StrCat("more than ", kMaxPatterns,
                              " regular expressions among the targets; name "
                              "the modules themselves"));
    }
    RE2::Options options;
    options.set_max_mem(kMaxPatternMemoryBytes);
    options.set_log_errors(false);
    const RE2 regex(re2::StringPiece(pattern.data(), pattern.size()), options);
    if (!regex.ok()) {
      return files::FileUnsupportedError(
          path_, absl::StrCat("the target \"re:", pattern,
                              "\" is not a regular expression of RE2, which "
                              "has no look-around and no back references: ",
                              regex.error()));
    }
    for (auto& [module, scheme] : schemes_) {
      if (scheme == nullptr &&
          regex.Match(module, 0, module.size(), RE2::ANCHOR_START,
                      /*submatch=*/nullptr, /*nsubmatch=*/0)) {
        Give(weights, &scheme);
      }
    }
    return absl::OkStatus();
  }

  void Give(const Json* weights, const Json** scheme) {
    if (*scheme != nullptr) return;
    *scheme = weights;
    --left_count_;
  }

  const std::string path_;
  Schemes& schemes_;
  size_t left_count_;
  int pattern_count_ = 0;
};

// Reads the tensors of one model. Not thread-safe.
class CompressedReader {
 public:
  CompressedReader(const TensorInput& input, const std::string& path)
      : input_(input), path_(path) {}

  // `config` is of `config_path`.
  absl::StatusOr<std::vector<QuantizedTensor>> ReadAll(
      const std::string& config_path, const Json& config) {
    Schemes schemes;
    for (const files::FileTensor& tensor : input_.tensors()) {
      absl::string_view module = tensor.name;
      if (absl::ConsumeSuffix(&module, kScale)) schemes[module] = nullptr;
    }
    absl::Status status = TargetMatcher(config_path, &schemes).Match(config);
    if (!status.ok()) return status;
    std::vector<QuantizedTensor> tensors;
    for (const files::FileTensor& tensor : input_.tensors()) {
      absl::string_view module = tensor.name;
      if (!absl::ConsumeSuffix(&module, kScale)) continue;
      absl::StatusOr<QuantizedTensor> read =
          Read(std::string(module), schemes[module], tensor);
      if (!read.ok()) return read.status();
      tensors.push_back(*std::move(read));
    }
    if (config.value("kv_cache_scheme", Json()).is_object()) {
      AddCacheParts(&tensors);
    }
    return tensors;
  }

 private:
  // Gives what says how the cache is quantized to the projections that fill
  // it. Where these are not quantized it goes to any tensor: it must leave the
  // model with the codes.
  void AddCacheParts(std::vector<QuantizedTensor>* tensors) const {
    if (tensors->empty()) return;
    for (const files::FileTensor& tensor : input_.tensors()) {
      absl::string_view cache = tensor.name;
      if (!absl::ConsumeSuffix(&cache, "_scale") &&
          !absl::ConsumeSuffix(&cache, "_zero_point")) {
        continue;
      }
      if (!absl::EndsWith(cache, ".k") && !absl::EndsWith(cache, ".v")) {
        continue;
      }
      const std::string weight = absl::StrCat(cache, "_proj", kWeight);
      const auto found =
          std::find_if(tensors->begin(), tensors->end(),
                       [&weight](const QuantizedTensor& quantized) {
                         return quantized.name == weight;
                       });
      if (found != tensors->end()) {
        found->parts.push_back(tensor.name);
      } else if (input_.Find(weight) != nullptr) {
        tensors->front().parts.push_back(tensor.name);
      }
    }
  }

  absl::Status Malformed(const std::string& module, absl::string_view what) {
    return files::FileMalformedError(
        path_, absl::StrCat("module \"", module, "\": ", what));
  }

  static int64_t IntegerOf(const Json& object, const char* key,
                           int64_t otherwise) {
    const auto found = object.find(key);
    return found != object.end() && found->is_number_integer()
               ? found->get<int64_t>()
               : otherwise;
  }

  static std::string StringOf(const Json& object, const char* key) {
    const auto found = object.find(key);
    return found != object.end() && found->is_string()
               ? found->get<std::string>()
               : "";
  }

  absl::StatusOr<QuantizedTensor> Read(const std::string& module,
                                       const Json* scheme,
                                       const files::FileTensor& scale) {
    if (scheme == nullptr) {
      return Malformed(module, "no group of config.json targets it");
    }
    const auto part = [&](absl::string_view suffix) {
      return input_.Find(absl::StrCat(module, suffix));
    };
    if (part(".weight_g_idx") != nullptr) {
      return files::FileUnsupportedError(
          path_, absl::StrCat("module \"", module, "\": reordered groups"));
    }
    QuantizedTensor tensor;
    tensor.name = absl::StrCat(module, kWeight);
    tensor.element_type =
        ElementTypeOf(scale.dtype).value_or(ElementType::kFloat32);
    for (const char* suffix :
         {".weight", ".weight_packed", ".weight_scale", ".weight_zero_point",
          ".weight_shape", ".weight_global_scale", ".input_scale",
          ".input_zero_point", ".input_global_scale"}) {
      if (part(suffix) != nullptr) {
        tensor.parts.push_back(absl::StrCat(module, suffix));
      }
    }
    const bool is_integer = StringOf(*scheme, "type") != "float";
    const int64_t bits = IntegerOf(*scheme, "num_bits", 8);
    if (bits < 2 || bits > kMaxBits) {
      return Malformed(module,
                       absl::StrCat("num_bits is ", bits, ", expected 2 to 8"));
    }
    const files::FileTensor* const plain = part(kWeight);
    const files::FileTensor* const packed = part(".weight_packed");
    if ((plain == nullptr) == (packed == nullptr)) {
      return Malformed(module, "expected weight or weight_packed");
    }
    absl::Status status;
    if (!is_integer && packed != nullptr) {
      status = ReadFloat4(module, *packed, scale, part(".weight_global_scale"),
                          &tensor);
    } else if (packed != nullptr) {
      status = ReadPacked(module, static_cast<int>(bits), *packed,
                          part(".weight_shape"), &tensor);
    } else {
      status = ReadPlain(module, is_integer, static_cast<int>(bits), *plain,
                         scale, &tensor);
    }
    if (!status.ok()) return status;
    status = AddScales(module, *scheme, scale, &tensor);
    if (!status.ok()) return status;
    const files::FileTensor* const zero_point = part(".weight_zero_point");
    if (zero_point != nullptr && is_integer) {
      status =
          AddZeroPoints(module, static_cast<int>(bits), *zero_point, &tensor);
      if (!status.ok()) return status;
    }
    return tensor;
  }

  absl::Status SetIntegers(int bits, QuantizedTensor* tensor) {
    const absl::StatusOr<v1::NumberFormat> format =
        IntegerFormat(bits, /*is_signed=*/true);
    if (!format.ok()) return format.status();
    tensor->encoding.set_format(*format);
    return absl::OkStatus();
  }

  // Codes as the server takes them, of values plus 2^(bits - 1).
  static void SetCodes(const FormatInfo& format,
                       const std::vector<uint8_t>& from_zero,
                       QuantizedTensor* tensor) {
    auto codes = std::make_shared<std::vector<uint8_t>>(static_cast<size_t>(
        format.SizeBytes(static_cast<int64_t>(from_zero.size()))));
    const uint32_t half = 1U << (format.bits - 1);
    for (size_t i = 0; i < from_zero.size(); ++i) {
      const uint32_t value = from_zero[i] - half;
      if (format.storage_bits == 8) {
        (*codes)[i] = static_cast<uint8_t>(value);
        continue;
      }
      const size_t per_byte = 8 / static_cast<size_t>(format.storage_bits);
      (*codes)[i / per_byte] |= static_cast<uint8_t>(
          (value & ((1U << format.bits) - 1))
          << (i % per_byte * static_cast<size_t>(format.storage_bits)));
    }
    tensor->codes = *codes;
    tensor->unpacked = std::move(codes);
  }

  absl::Status ReadPlain(const std::string& module, bool is_integer, int bits,
                         const files::FileTensor& plain,
                         const files::FileTensor& scale,
                         QuantizedTensor* tensor) {
    tensor->shape = plain.shape;
    tensor->codes = plain.data;
    if (!is_integer) {
      if (plain.dtype != files::Dtype::kF8E4M3) {
        return Malformed(module, "expected a weight of F8_E4M3");
      }
      const bool is_mxfp8 = scale.dtype == files::Dtype::kU8;
      tensor->encoding.set_format(is_mxfp8 ? v1::NUMBER_FORMAT_MXFP8_E4M3
                                           : v1::NUMBER_FORMAT_FLOAT8_E4M3FN);
      if (is_mxfp8) {
        tensor->element_type = ElementType::kFloat32;
        tensor->encoding.set_scale_code(scale.data.data(), scale.data.size());
      }
      return absl::OkStatus();
    }
    if (plain.dtype != files::Dtype::kI8) {
      return Malformed(module, "expected a weight of I8");
    }
    if (absl::Status s = SetIntegers(bits, tensor); !s.ok()) return s;
    if (bits == 8) return absl::OkStatus();
    const FormatInfo format = *GetFormatInfo(tensor->encoding.format());
    std::vector<uint8_t> from_zero;
    const int half = 1 << (bits - 1);
    for (const uint8_t byte : plain.data) {
      const int value = static_cast<int8_t>(byte);
      if (value < -half || value >= half) {
        return Malformed(module, absl::StrCat("a weight is ", value,
                                              ", not of ", bits, " bits"));
      }
      from_zero.push_back(static_cast<uint8_t>(value + half));
    }
    SetCodes(format, from_zero, tensor);
    return absl::OkStatus();
  }

  absl::Status ReadPacked(const std::string& module, int bits,
                          const files::FileTensor& packed,
                          const files::FileTensor* shape,
                          QuantizedTensor* tensor) {
    if (shape == nullptr || shape->shape != std::vector<int64_t>{2} ||
        (shape->dtype != files::Dtype::kI64 &&
         shape->dtype != files::Dtype::kI32)) {
      return Malformed(module, "expected a weight_shape of two integers");
    }
    if (shape->dtype == files::Dtype::kI64) {
      tensor->shape = Elements<int64_t>(*shape);
    } else {
      for (const int32_t size : Elements<int32_t>(*shape)) {
        tensor->shape.push_back(size);
      }
    }
    const absl::StatusOr<int64_t> count = ElementCount(tensor->shape);
    const int64_t rows = tensor->shape[0];
    const int64_t columns = tensor->shape[1];
    if (!count.ok() || packed.dtype != files::Dtype::kI32 ||
        packed.shape !=
            std::vector<int64_t>{rows, CeilDivide(columns * bits, 32)}) {
      return Malformed(
          module,
          absl::StrCat("expected a weight_packed of I32 that holds ", bits,
                       " bits for each of [", rows, ",", columns, "]"));
    }
    if (absl::Status s = SetIntegers(bits, tensor); !s.ok()) return s;
    std::vector<uint32_t> words = Elements<uint32_t>(packed);
    std::vector<uint8_t> from_zero;
    from_zero.reserve(static_cast<size_t>(*count));
    for (int64_t row = 0; *count > 0 && row < rows; ++row) {
      BitStream stream(bits, words.data() + row * packed.shape[1], 1);
      for (int64_t column = 0; column < columns; ++column) {
        from_zero.push_back(static_cast<uint8_t>(stream.Get()));
      }
    }
    SetCodes(*GetFormatInfo(tensor->encoding.format()), from_zero, tensor);
    return absl::OkStatus();
  }

  absl::Status ReadFloat4(const std::string& module,
                          const files::FileTensor& packed,
                          const files::FileTensor& scale,
                          const files::FileTensor* global,
                          QuantizedTensor* tensor) {
    if (packed.dtype != files::Dtype::kU8 || packed.shape.size() != 2 ||
        packed.shape[1] > INT64_MAX / 2) {
      return Malformed(module, "expected a weight_packed of U8, a matrix");
    }
    tensor->shape = {packed.shape[0], packed.shape[1] * 2};
    tensor->codes = packed.data;
    tensor->element_type = ElementType::kFloat32;
    Encoding& encoding = tensor->encoding;
    encoding.set_scale_code(scale.data.data(), scale.data.size());
    if (global == nullptr) {
      if (scale.dtype != files::Dtype::kU8) {
        return Malformed(module, "expected a weight_scale of U8");
      }
      encoding.set_format(v1::NUMBER_FORMAT_MXFP4_E2M1);
      return absl::OkStatus();
    }
    if (scale.dtype != files::Dtype::kF8E4M3 ||
        global->dtype != files::Dtype::kF32 || global->data.size() != 4) {
      return Malformed(module,
                       "expected a weight_scale of F8_E4M3 under one "
                       "weight_global_scale of F32");
    }
    encoding.set_format(v1::NUMBER_FORMAT_NVFP4);
    const float global_scale = Elements<float>(*global)[0];
    encoding.add_outer_scale(1.0f / global_scale);
    if (!IsExactInverse(global_scale, encoding.outer_scale(0))) {
      tensor->note =
          "the inverse of weight_global_scale is rounded: reals may differ "
          "in the last bit from those of readers that divide by it";
    }
    return absl::OkStatus();
  }

  absl::Status AddScales(const std::string& module, const Json& scheme,
                         const files::FileTensor& scale,
                         QuantizedTensor* tensor) {
    Encoding& encoding = tensor->encoding;
    const size_t rank = tensor->shape.size();
    const std::string strategy = StringOf(scheme, "strategy");
    std::vector<int64_t> block(rank, 0);
    if (strategy == "channel" && rank > 0) {
      block[0] = 1;
    } else if ((strategy == "group" || strategy == "tensor_group") &&
               rank == 2) {
      block = {1, IntegerOf(scheme, "group_size", 0)};
    } else if (strategy == "block" && rank == 2) {
      const auto found = scheme.find("block_structure");
      if (found == scheme.end() || !found->is_array() || found->size() != 2 ||
          !(*found)[0].is_number_integer() ||
          !(*found)[1].is_number_integer()) {
        return Malformed(module, "expected a block_structure of two integers");
      }
      block = {(*found)[0].get<int64_t>(), (*found)[1].get<int64_t>()};
    } else if (strategy != "tensor" && !strategy.empty()) {
      return files::FileUnsupportedError(
          path_, absl::StrCat("module \"", module, "\": strategy \"", strategy,
                              "\" of a tensor of ", rank, " dimensions"));
    }
    const absl::StatusOr<std::vector<int64_t>> shape =
        ScaleShape(tensor->shape, block);
    if (!shape.ok()) return Malformed(module, ErrorText(shape.status()));
    const absl::StatusOr<int64_t> expected = ElementCount(*shape);
    const int64_t got =
        static_cast<int64_t>(scale.data.size()) / DtypeSizeBytes(scale.dtype);
    if (!expected.ok() || *expected != got) {
      return Malformed(module, absl::StrCat("weight_scale has ", got,
                                            " elements, a ", strategy, " of [",
                                            absl::StrJoin(tensor->shape, ","),
                                            "] takes ", expected.value_or(0)));
    }
    for (const int64_t size : block) encoding.add_block_size(size);
    for (const int64_t size : *shape) encoding.add_scale_shape(size);
    if (!encoding.scale_code().empty()) return absl::OkStatus();
    if (!ReadScales(scale, &encoding)) {
      return Malformed(module, "expected a weight_scale of F32, F16 or BF16");
    }
    return absl::OkStatus();
  }

  absl::Status AddZeroPoints(const std::string& module, int bits,
                             const files::FileTensor& zero_point,
                             QuantizedTensor* tensor) {
    Encoding& encoding = tensor->encoding;
    const int count = encoding.scale_size();
    if (zero_point.dtype == files::Dtype::kI8 &&
        zero_point.data.size() == static_cast<size_t>(count)) {
      for (const int8_t value : Elements<int8_t>(zero_point)) {
        encoding.add_zero_point(value);
      }
      return absl::OkStatus();
    }
    const int64_t rows = tensor->shape.empty() ? 0 : tensor->shape[0];
    const int64_t groups = rows > 0 ? count / rows : 0;
    if (zero_point.dtype != files::Dtype::kI32 || groups * rows != count ||
        zero_point.shape !=
            std::vector<int64_t>{CeilDivide(rows * bits, 32), groups}) {
      return Malformed(module,
                       "expected a weight_zero_point as many as scales, I8 or "
                       "packed in I32");
    }
    std::vector<uint32_t> words = Elements<uint32_t>(zero_point);
    encoding.mutable_zero_point()->Resize(count, 0);
    for (int64_t group = 0; group < groups; ++group) {
      BitStream stream(bits, words.data() + group, static_cast<size_t>(groups));
      for (int64_t row = 0; row < rows; ++row) {
        encoding.set_zero_point(
            static_cast<int>(row * groups + group),
            static_cast<int32_t>(stream.Get()) - (1 << (bits - 1)));
      }
    }
    return absl::OkStatus();
  }

  const TensorInput& input_;
  const std::string& path_;
};

// What config.json says of the model before it was quantized.
absl::StatusOr<ElementType> ElementTypeOfModel(const Json& config) {
  for (const char* key : {"dtype", "torch_dtype"}) {
    const auto found = config.find(key);
    if (found == config.end() || !found->is_string()) continue;
    return ParseElementType(found->get<std::string>());
  }
  return absl::NotFoundError("no dtype");
}

}  // namespace

absl::string_view ModuleOf(absl::string_view tensor) {
  return absl::ConsumeSuffix(&tensor, kWeight) ? tensor : "";
}

absl::Status CheckGroups(const EncodingSpec& spec,
                         const std::vector<int64_t>& shape) {
  if (shape.size() != 2) return absl::OkStatus();
  const int64_t columns = shape[1];
  const auto& block = spec.block_size();
  // One group as long as a row, or longer, is a channel.
  int64_t group =
      block.size() == 2 && block[0] == 1 && block[1] < columns ? block[1] : 0;
  if (spec.format() == v1::NUMBER_FORMAT_NVFP4) group = kNvfp4Group;
  if (spec.format() == v1::NUMBER_FORMAT_MXFP4_E2M1 ||
      spec.format() == v1::NUMBER_FORMAT_MXFP8_E4M3) {
    group = kMxGroup;
  }
  // Rows of blocks may be ragged, columns not.
  if (block.size() == 2 && block[0] > 1) group = block[1];
  if (group == 0 || columns % group == 0) return absl::OkStatus();
  return NotHeld(absl::StrCat(
      "groups that divide the columns of a matrix, got ", columns,
      " columns and groups of ", group,
      "; take a group size that divides them, or per-channel (--spec "
      "PATTERN=SPEC for this tensor alone), or leave it out with --exclude"));
}

bool IsExactInverse(float global, float outer) {
  // E4M3 numbers are these times powers of two.
  for (int mantissa = 8; mantissa < 16; ++mantissa) {
    const auto number = static_cast<float>(mantissa);
    if (number / global != number * outer) return false;
  }
  return true;
}

absl::StatusOr<std::vector<QuantizedTensor>> ReadCompressed(
    const TensorInput& input, const std::string& path) {
  struct stat status;
  const bool is_folder =
      stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
  const size_t slash = path.rfind('/');
  const std::string folder = is_folder ? path
                             : slash == std::string::npos
                                 ? "."
                                 : path.substr(0, slash + 1);
  const std::string config_path = files::PathIn(folder, kModelConfigName);
  const absl::StatusOr<std::string> text = internal::ReadTextFile(config_path);
  if (absl::IsNotFound(text.status())) return std::vector<QuantizedTensor>();
  if (!text.ok()) return text.status();
  const Json document = Json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!document.is_object()) {
    return files::FileMalformedError(config_path, "expected a JSON object");
  }
  const auto config = document.find("quantization_config");
  if (config == document.end() || !config->is_object()) {
    return std::vector<QuantizedTensor>();
  }
  const auto method = config->find("quant_method");
  if (method == config->end() || *method != "compressed-tensors") {
    return files::FileUnsupportedError(
        config_path, "a quantization that is not of compressed-tensors");
  }
  absl::StatusOr<std::vector<QuantizedTensor>> tensors =
      CompressedReader(input, path).ReadAll(config_path, *config);
  if (!tensors.ok()) return tensors.status();
  const absl::StatusOr<ElementType> of_model = ElementTypeOfModel(document);
  for (QuantizedTensor& tensor : *tensors) {
    const auto told =
        input.metadata().find(absl::StrCat(kElementTypeKeyPrefix, tensor.name));
    if (told != input.metadata().end()) {
      const absl::StatusOr<ElementType> type = ParseElementType(told->second);
      if (!type.ok()) {
        return files::FileMalformedError(path, ErrorText(type.status()));
      }
      tensor.element_type = *type;
    } else if (tensor.element_type == ElementType::kFloat32 && of_model.ok()) {
      // Scales are often wider than what they came from.
      tensor.element_type = *of_model;
    }
  }
  return tensors;
}

}  // namespace quantd::cli
