#include "client/jobs/compressed_scheme.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cpp/errors.h"
#include "client/models/spec_syntax.h"

namespace quantd::jobs {
namespace {

using Kind = ActivationsChoice::Kind;

// Limits of vLLM's kernels.
constexpr char kMarlinIntegerLimits[] =
    "vLLM's Marlin kernels take rows (those of fused matrices together) in "
    "multiples of 64, columns in multiples of 128, and groups of 32, 64 or "
    "128; other shapes it loads in float16 only, or not at all";
constexpr char kMarlinFloatLimits[] =
    "vLLM's Marlin kernels take weights of floats with rows (those of fused "
    "matrices together) in multiples of 64 and columns in multiples of 128, or "
    "of 128 and 64; other shapes vLLM of before July 2026 does not load";
constexpr char kFloat8InputLimits[] =
    "vLLM's kernels for int4 weights and float8 inputs take rows (those of "
    "fused matrices together) and columns in multiples of 128; other shapes it "
    "does not load";
constexpr char kZeroPointLimits[] =
    "vLLM's kernels for packed 8-bit weights with zero points need a Hopper "
    "GPU, rows (those of fused matrices together) in multiples of 128, columns "
    "in multiples of 64, and groups of 64 or 128; int8 has no zero points";

// The largest E2M1 number times the largest E4M3 number.
constexpr float kNvfp4Largest = 6.0f * 448.0f;

template <typename T>
std::vector<uint8_t> BytesOfOne(T value) {
  std::vector<uint8_t> bytes(sizeof(T));
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

// The spec of inputs that goes with weights of these arguments.
std::string SpecOfWeights(const files::Json& weights) {
  if (weights["type"] == "int") return "int8";
  const bool is_group = weights["strategy"] == "group";
  if (weights["num_bits"] == 8) {
    if (is_group) return "mxfp8_e4m3";
    return weights["strategy"] == "block" ? "float8_e4m3fn:group:128"
                                          : "float8_e4m3fn";
  }
  return is_group ? "mxfp4_e2m1" : "nvfp4";
}

absl::Status NoWordsError(absl::string_view spec, absl::string_view expected) {
  return ArgumentInvalidError(
      absl::StrCat("compressed-tensors has no words for activations of \"",
                   spec, "\"; expected ", expected));
}

files::Json Arguments(int bits, const char* type, bool is_symmetric) {
  return {{"num_bits", bits}, {"type", type}, {"symmetric", is_symmetric}};
}

// In blocks along rows, as formats of blocks have them.
absl::StatusOr<files::Json> BlockArguments(absl::string_view spec,
                                           v1::NumberFormat format,
                                           bool is_dynamic) {
  if (format == v1::NUMBER_FORMAT_NVFP4) {
    if (is_dynamic) {
      return NoWordsError(spec,
                          "static=nvfp4: one global scale is stored, the "
                          "scales of groups are computed at run time");
    }
    files::Json json = Arguments(4, "float", true);
    json.update({{"strategy", "tensor_group"},
                 {"group_size", kNvfp4Group},
                 {"dynamic", "local"},
                 {"observer", "minmax"}});
    return json;
  }
  if (!is_dynamic) return NoWordsError(spec, "dynamic for it");
  files::Json json =
      Arguments(format == v1::NUMBER_FORMAT_MXFP4_E2M1 ? 4 : 8, "float", true);
  json.update({{"strategy", "group"},
               {"group_size", kMxGroup},
               {"dynamic", true},
               {"observer", nullptr},
               {"scale_dtype", "torch.uint8"}});
  return json;
}

absl::StatusOr<files::Json> ArgumentsOf(absl::string_view spec,
                                        bool is_dynamic) {
  const absl::StatusOr<SpecTemplate> parsed = ParseSpec(spec);
  if (!parsed.ok()) return parsed.status();
  const v1::NumberFormat format = parsed->spec.format();
  if (format == v1::NUMBER_FORMAT_NVFP4 ||
      format == v1::NUMBER_FORMAT_MXFP4_E2M1 ||
      format == v1::NUMBER_FORMAT_MXFP8_E4M3) {
    return BlockArguments(spec, format, is_dynamic);
  }
  const absl::StatusOr<FormatInfo> info = GetFormatInfo(format);
  if (!info.ok()) return info.status();
  const bool is_integer = info->IsPlainInteger() &&
                          (info->bits == 8 || (info->bits == 4 && is_dynamic));
  if (!is_integer && format != v1::NUMBER_FORMAT_FLOAT8_E4M3FN) {
    return NoWordsError(spec,
                        "int8, int4 (dynamic), float8_e4m3fn, nvfp4 (static), "
                        "mxfp4_e2m1 or mxfp8_e4m3 (dynamic)");
  }
  const bool is_symmetric =
      !is_integer ||
      (info->is_signed && parsed->spec.symmetry() != v1::SYMMETRY_ASYMMETRIC);
  files::Json json =
      Arguments(info->bits, is_integer ? "int" : "float", is_symmetric);
  const Granularity& granularity = parsed->granularity;
  const bool is_group = granularity.kind == Granularity::Kind::kGroup;
  const bool is_tensor = granularity.kind == Granularity::Kind::kPerTensor;
  const bool is_default = granularity.kind == Granularity::Kind::kDefault;
  if (!(is_default || is_tensor ||
        (is_group && is_dynamic && granularity.axis == -1))) {
    return NoWordsError(
        spec, is_dynamic ? "the default (a scale for each token), per-tensor "
                           "or group:N"
                         : "one scale for the tensor");
  }
  json["strategy"] = is_group                   ? "group"
                     : is_tensor || !is_dynamic ? "tensor"
                                                : "token";
  if (is_group) json["group_size"] = granularity.group;
  json["dynamic"] = is_dynamic;
  json["observer"] = is_dynamic ? files::Json() : files::Json("minmax");
  return json;
}

absl::Status OuterScalesError(const v1::Encoding& encoding) {
  return ArgumentInvalidError(absl::StrCat(
      "is ", FormatName(encoding.format()), " with ",
      encoding.outer_scale_size(), " outer scales, expected none"));
}

// The largest magnitude that an encoding of one scale reaches.
absl::StatusOr<float> ReachOf(const v1::Encoding& encoding) {
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(encoding.format());
  if (!format.ok()) return format.status();
  if (encoding.format() == v1::NUMBER_FORMAT_NVFP4 &&
      encoding.outer_scale_size() == 1) {
    return encoding.outer_scale(0) * kNvfp4Largest;
  }
  if (encoding.outer_scale_size() > 0) return OuterScalesError(encoding);
  if (encoding.scale_size() != 1) {
    return ArgumentInvalidError(
        absl::StrCat("has ", encoding.scale_size(), " scales, expected one"));
  }
  if (format->kind != CodeKind::kInteger) {
    return encoding.scale(0) * static_cast<float>(format->max_value);
  }
  const double zero_point =
      encoding.real_zero_point_size() == 1 ? encoding.real_zero_point(0)
      : encoding.zero_point_size() == 1    ? encoding.zero_point(0)
                                           : 0;
  const int64_t qmin = encoding.has_qmin() ? encoding.qmin() : format->qmin;
  const int64_t qmax = encoding.has_qmax() ? encoding.qmax() : format->qmax;
  return encoding.scale(0) *
         static_cast<float>(
             std::max(std::abs(static_cast<double>(qmin) - zero_point),
                      std::abs(static_cast<double>(qmax) - zero_point)));
}

bool Is(const files::Json& arguments, const char* strategy, int bits,
        const char* type) {
  return arguments["strategy"] == strategy && arguments["num_bits"] == bits &&
         arguments["type"] == type;
}

// True if vLLM has kernels for weights whose inputs are not quantized.
bool HasKernelsAlone(const files::Json& weights, bool is_packed) {
  const files::Json& strategy = weights["strategy"];
  const int bits = weights["num_bits"];
  if (weights["type"] == "int") {
    return is_packed && (bits == 4 || bits == 8) &&
           (strategy == "channel" || strategy == "group");
  }
  // The floats in groups that it has kernels for are NVFP4 and MX.
  return bits == 4 || strategy != "group" || weights.contains("scale_dtype");
}

}  // namespace

const std::vector<SchemePreset>& SchemePresets() {
  const char* const compressed = "compressed-tensors";
  static const auto* const kPresets = new std::vector<SchemePreset>{
      {"W8A8", "int8:per-channel", compressed, "dynamic=int8"},
      {"FP8", "float8_e4m3fn:per-tensor", compressed, "static=float8_e4m3fn"},
      {"FP8_DYNAMIC", "float8_e4m3fn:per-channel", compressed,
       "dynamic=float8_e4m3fn"},
      {"FP8_BLOCK", "float8_e4m3fn:block=128,128", compressed,
       "dynamic=float8_e4m3fn:group:128"},
      {"NVFP4", "nvfp4", compressed, "static=nvfp4"},
      {"NVFP4A16", "nvfp4", compressed, "none"},
      {"MXFP4", "mxfp4_e2m1", compressed, "dynamic=mxfp4_e2m1"},
      {"MXFP4A16", "mxfp4_e2m1", compressed, "none"},
      {"MXFP8", "mxfp8_e4m3", compressed, "dynamic=mxfp8_e4m3"},
      {"MXFP8A16", "mxfp8_e4m3", compressed, "none"},
      {"W4A16", "int4:group:128", compressed, "none", true},
      {"W4A16_ASYM", "uint4:group:128", compressed, "none", true},
      {"W8A16", "int8:group:128", "pack-quantized", "none", true},
      {"W4AFP8", "int4:group:128", compressed, "dynamic=float8_e4m3fn"}};
  return *kPresets;
}

const SchemePreset* FindPreset(absl::string_view name) {
  for (const SchemePreset& preset : SchemePresets()) {
    if (preset.name == name) return &preset;
  }
  return nullptr;
}

absl::StatusOr<ActivationsChoice> ParseActivations(absl::string_view text) {
  ActivationsChoice choice;
  absl::string_view rest = text;
  if (text == "none") return choice;
  if (absl::ConsumePrefix(&rest, "dynamic")) {
    choice.kind = Kind::kDynamic;
  } else if (absl::ConsumePrefix(&rest, "static")) {
    choice.kind = Kind::kStatic;
  }
  if (choice.kind == Kind::kNone ||
      (!rest.empty() && (!absl::ConsumePrefix(&rest, "=") || rest.empty()))) {
    return ArgumentInvalidError(absl::StrCat(
        "expected --activations none, dynamic[=SPEC] or static[=SPEC], got \"",
        text, "\""));
  }
  choice.spec = std::string(rest);
  return choice;
}

absl::StatusOr<files::Json> InputArguments(const ActivationsChoice& choice,
                                           const files::Json& weights) {
  if (choice.kind == Kind::kNone) return files::Json();
  return ArgumentsOf(choice.spec.empty() ? SpecOfWeights(weights) : choice.spec,
                     choice.kind == Kind::kDynamic);
}

bool TakesStored(const files::Json& input_arguments) {
  return !input_arguments.is_null() && input_arguments["dynamic"] != true;
}

absl::StatusOr<files::Json> CacheArguments(absl::string_view spec) {
  absl::StatusOr<files::Json> json = ArgumentsOf(spec, /*is_dynamic=*/false);
  if (!json.ok()) return json.status();
  if ((*json)["strategy"] != "tensor" || (*json)["symmetric"] != true) {
    return ArgumentInvalidError(absl::StrCat(
        "expected --kv-cache float8_e4m3fn or int8, got \"", spec, "\""));
  }
  return json;
}

absl::StatusOr<std::vector<CompressedData>> RangeParts(
    const std::string& prefix, const v1::Encoding& encoding,
    files::Json* arguments) {
  std::vector<CompressedData> parts;
  if ((*arguments)["strategy"] == "tensor_group") {
    const absl::StatusOr<float> reach = ReachOf(encoding);
    if (!reach.ok()) return reach.status();
    parts.push_back(
        {{absl::StrCat(prefix, "_global_scale"), files::Dtype::kF32, {1}},
         BytesOfOne(kNvfp4Largest / *reach)});
    return parts;
  }
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(encoding.format());
  if (!format.ok()) return format.status();
  const bool is_integer = (*arguments)["type"] == "int";
  const bool fits = is_integer
                        ? format->IsPlainInteger() && format->bits == 8
                        : encoding.format() == v1::NUMBER_FORMAT_FLOAT8_E4M3FN;
  if (!fits || encoding.scale_size() != 1) {
    return ArgumentInvalidError(absl::StrCat(
        "is ", FormatName(encoding.format()), " with ", encoding.scale_size(),
        " scales, expected ", is_integer ? "int8 or uint8" : "float8_e4m3fn",
        " with one"));
  }
  if (encoding.outer_scale_size() > 0) return OuterScalesError(encoding);
  parts.push_back({{absl::StrCat(prefix, "_scale"), files::Dtype::kF32, {1}},
                   BytesOfOne(encoding.scale(0))});
  if (!is_integer) return parts;
  if (encoding.real_zero_point_size() > 0) {
    return ArgumentInvalidError(
        "has a zero point between codes, expected one that is a code");
  }
  // Codes are signed in this layout, and zero points move with them.
  const int64_t zero_point =
      int64_t{encoding.zero_point_size() == 1 ? encoding.zero_point(0) : 0} -
      (format->is_signed ? 0 : 128);
  if (zero_point < INT8_MIN || zero_point > INT8_MAX) {
    return ArgumentInvalidError(absl::StrCat(
        "has the zero point ", encoding.zero_point(0), ", expected ",
        format->is_signed ? "-128 to 127" : "0 to 255", ", as int8 holds it"));
  }
  if ((*arguments)["symmetric"] == true && zero_point == 0) return parts;
  (*arguments)["symmetric"] = false;
  parts.push_back(
      {{absl::StrCat(prefix, "_zero_point"), files::Dtype::kI8, {1}},
       BytesOfOne(static_cast<int8_t>(zero_point))});
  return parts;
}

bool HasKernels(const files::Json& module, const files::Json& input_arguments) {
  const files::Json& weights = module["weights"];
  const bool is_packed = module["format"] == "pack-quantized";
  const bool is_row_or_tensor =
      weights["strategy"] == "channel" || weights["strategy"] == "tensor";
  if (input_arguments.is_null()) return HasKernelsAlone(weights, is_packed);
  const bool is_token = input_arguments["strategy"] == "token";
  const bool is_token_or_tensor =
      is_token || input_arguments["strategy"] == "tensor";
  const bool is_float8 =
      input_arguments["num_bits"] == 8 && input_arguments["type"] == "float";
  if (input_arguments["type"] == "int") {
    return input_arguments["num_bits"] == 8 && weights["symmetric"] == true &&
           weights["num_bits"] == 8 && weights["type"] == "int" && !is_packed &&
           is_row_or_tensor &&
           (is_token || (input_arguments["strategy"] == "tensor" &&
                         input_arguments["dynamic"] != true));
  }
  if (is_float8 && is_token_or_tensor) {
    return (weights["type"] == "float" && weights["num_bits"] == 8 &&
            is_row_or_tensor) ||
           (Is(weights, "group", 4, "int") && weights["group_size"] == 128 &&
            weights["symmetric"] == true && is_token);
  }
  if (is_float8 && input_arguments["group_size"] == 128) {
    return Is(weights, "block", 8, "float") &&
           weights["block_structure"] == files::Json({128, 128});
  }
  // Floats in blocks, the same for both.
  return weights["type"] == "float" &&
         weights["strategy"] == input_arguments["strategy"] &&
         weights["num_bits"] == input_arguments["num_bits"] &&
         weights["group_size"] == input_arguments["group_size"] &&
         (weights["num_bits"] == 4 ||
          (weights.contains("scale_dtype") &&
           input_arguments.contains("scale_dtype")));
}

std::string LimitsText(const files::Json& module,
                       const files::Json& input_arguments, int64_t rows,
                       int64_t columns) {
  const files::Json& weights = module["weights"];
  const auto is_multiple = [&](int64_t of_rows, int64_t of_columns) {
    return rows % of_rows == 0 && columns % of_columns == 0;
  };
  if (!input_arguments.is_null()) {
    const bool is_w4a8 = weights["type"] == "int" && weights["num_bits"] == 4;
    return is_w4a8 && !is_multiple(128, 128) ? kFloat8InputLimits : "";
  }
  // These take either of two tiles, others one.
  if (weights["type"] == "float") {
    return is_multiple(64, 128) || is_multiple(128, 64) ? ""
                                                        : kMarlinFloatLimits;
  }
  if (weights["num_bits"] == 8 && weights["symmetric"] != true) {
    return kZeroPointLimits;
  }
  const bool has_group =
      weights["strategy"] != "group" || weights["group_size"] == 32 ||
      weights["group_size"] == 64 || weights["group_size"] == 128;
  return is_multiple(64, 128) && has_group ? "" : kMarlinIntegerLimits;
}

bool HasExpertKernels(const files::Json& module,
                      const files::Json& input_arguments) {
  const files::Json& weights = module["weights"];
  if (weights["symmetric"] != true || module["format"] == "mxfp8-quantized") {
    return false;
  }
  // Integers for each token, not for the whole tensor.
  return input_arguments.is_null() || input_arguments["type"] != "int" ||
         (input_arguments["strategy"] == "token" &&
          weights["strategy"] == "channel");
}

}  // namespace quantd::jobs
