#include "client/models/spec_syntax.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "client/cpp/errors.h"
#include "client/cpp/tensor.h"
#include "client/cpp/text_file.h"
#include "client/files/errors.h"
#include "client/files/gguf_encoders.h"
#include "client/files/gguf_types.h"
#include "client/files/json.h"
#include "google/protobuf/util/json_util.h"
#include "nlohmann/json.hpp"

namespace quantd {
namespace {

constexpr absl::string_view kScaleTypePrefix = "SCALE_TYPE_";

struct Method {
  absl::string_view name;
  v1::CalibrationMethod method;
};

constexpr Method kMethods[] = {
    {"minmax", v1::CALIBRATION_METHOD_MIN_MAX},
    {"percentile", v1::CALIBRATION_METHOD_PERCENTILE},
    {"mse", v1::CALIBRATION_METHOD_MSE},
    {"sqnr", v1::CALIBRATION_METHOD_SQNR},
    {"entropy", v1::CALIBRATION_METHOD_ENTROPY},
    {"fixed", v1::CALIBRATION_METHOD_FIXED_RANGE},
    {"moving-average", v1::CALIBRATION_METHOD_MOVING_AVERAGE},
    {"best-of", v1::CALIBRATION_METHOD_BEST_OF},
};

// True if `text` is a method, with or without a parameter.
bool IsMethod(absl::string_view text) {
  const absl::string_view name = text.substr(0, text.find('='));
  return std::any_of(std::begin(kMethods), std::end(kMethods),
                     [name](const Method& row) { return row.name == name; });
}

// The least elements that blocks of GGUF need in a row.
constexpr int kGgufBlock = 32;

absl::Status NumberError(absl::string_view option, absl::string_view text) {
  return ArgumentInvalidError(absl::StrCat("expected a number such as ", option,
                                           "=256, got \"", text, "\""));
}

// The name of a tensor in which "%3A" stands for ":" and "%25" for "%".
absl::StatusOr<std::string> UnescapeName(absl::string_view text) {
  std::string name =
      absl::StrReplaceAll(text, {{"%25", "%"}, {"%3A", ":"}, {"%3a", ":"}});
  if (!name.empty()) return name;
  return ArgumentInvalidError(
      "expected the name of a tensor behind \"importance=\", got none");
}

absl::StatusOr<v1::Symmetry> ParseSymmetry(absl::string_view text) {
  if (text == "default") return v1::SYMMETRY_UNSPECIFIED;
  if (text == "asymmetric") return v1::SYMMETRY_ASYMMETRIC;
  if (text == "strict" || text == "symmetric") return v1::SYMMETRY_STRICT;
  if (text == "full-range") return v1::SYMMETRY_FULL_RANGE;
  if (text == "half-step") return v1::SYMMETRY_HALF_STEP;
  if (text == "aimet") return v1::SYMMETRY_AIMET;
  return ArgumentInvalidError(
      absl::StrCat("expected default, asymmetric, strict, full-range, "
                   "half-step or aimet, got \"",
                   text, "\""));
}

// "MIN,MAX".
absl::Status ParseRange(absl::string_view text, EncodingSpec* spec) {
  const std::pair<absl::string_view, absl::string_view> ends =
      absl::StrSplit(text, absl::MaxSplits(',', 1));
  double min = 0;
  double max = 0;
  if (!absl::SimpleAtod(ends.first, &min) ||
      !absl::SimpleAtod(ends.second, &max) || !(min < max)) {
    return ArgumentInvalidError(
        absl::StrCat("expected a range such as -1,1, got \"", text, "\""));
  }
  spec->set_range_min(min);
  spec->set_range_max(max);
  return absl::OkStatus();
}

// "NAME", "NAME=PARAMETER" or "NAME:PARAMETER". "fixed" alone leaves the range
// as it is.
absl::Status ParseMethod(absl::string_view text, EncodingSpec* spec) {
  const size_t separator = text.find_first_of("=:");
  const absl::string_view name = text.substr(0, separator);
  const bool has_parameter = separator != absl::string_view::npos;
  const absl::string_view parameter =
      has_parameter ? text.substr(separator + 1) : "";
  const Method* method = nullptr;
  for (const Method& row : kMethods) {
    if (row.name == name) method = &row;
  }
  const auto invalid = [&](absl::string_view expected) {
    return ArgumentInvalidError(
        absl::StrCat("expected ", expected, ", got \"", text, "\""));
  };
  if (method == nullptr) {
    return invalid(
        "minmax, percentile, mse, sqnr, entropy, fixed, moving-average or "
        "best-of");
  }
  spec->set_method(method->method);
  if (method->method == v1::CALIBRATION_METHOD_BEST_OF) {
    for (const absl::string_view part : absl::StrSplit(parameter, ',')) {
      const Method* const found =
          std::find_if(std::begin(kMethods), std::end(kMethods),
                       [part](const Method& row) { return row.name == part; });
      if (found == std::end(kMethods)) {
        return invalid("methods such as best-of=mse,percentile");
      }
      spec->add_methods(found->method);
    }
    return absl::OkStatus();
  }
  if (!has_parameter) return absl::OkStatus();
  uint32_t steps = 0;
  double number = 0;
  switch (method->method) {
    case v1::CALIBRATION_METHOD_PERCENTILE:
      if (absl::string_view text = parameter; absl::ConsumeSuffix(&text, "%")) {
        if (absl::SimpleAtod(text, &number)) number /= 100;
      } else if (!absl::SimpleAtod(parameter, &number)) {
        number = 0;
      }
      if (!(number > 0) || !(number <= 1)) {
        return invalid(
            "the part that is kept, such as percentile=0.999 or 99.9%");
      }
      // 1 - 0.999 is to be 0.001, as it was written.
      spec->set_tail_fraction(std::round((1 - number) * 1e12) / 1e12);
      return absl::OkStatus();
    case v1::CALIBRATION_METHOD_MSE:
    case v1::CALIBRATION_METHOD_ENTROPY:
      if (!absl::SimpleAtoi(parameter, &steps)) {
        return invalid("a number of steps, such as mse=256");
      }
      spec->set_search_steps(steps);
      return absl::OkStatus();
    case v1::CALIBRATION_METHOD_SQNR:
      if (!absl::SimpleAtod(parameter, &number)) {
        return invalid("a weight of clipped elements, such as sqnr=3");
      }
      spec->set_gamma(number);
      return absl::OkStatus();
    case v1::CALIBRATION_METHOD_FIXED_RANGE:
      return ParseRange(parameter, spec);
    default:
      return invalid("a method without a parameter");
  }
}

absl::StatusOr<v1::Tail> ParseTail(absl::string_view text) {
  if (text == "default") return v1::TAIL_UNSPECIFIED;
  if (text == "magnitude") return v1::TAIL_MAGNITUDE;
  if (text == "both") return v1::TAIL_BOTH;
  if (text == "upper") return v1::TAIL_UPPER;
  if (text == "lower") return v1::TAIL_LOWER;
  return ArgumentInvalidError(absl::StrCat(
      "expected default, magnitude, both, upper or lower, got \"", text, "\""));
}

absl::StatusOr<v1::MxScaleRule> ParseMxScaleRule(absl::string_view text) {
  if (text == "default") return v1::MX_SCALE_RULE_UNSPECIFIED;
  if (text == "floor") return v1::MX_SCALE_RULE_FLOOR;
  if (text == "ceil") return v1::MX_SCALE_RULE_CEIL;
  if (text == "even") return v1::MX_SCALE_RULE_EVEN;
  if (text == "rceil") return v1::MX_SCALE_RULE_RCEIL;
  return ArgumentInvalidError(absl::StrCat(
      "expected default, floor, ceil, even or rceil, got \"", text, "\""));
}

// Numbers with commas, or the name of a file that has them, also with spaces,
// line ends and brackets between them.
absl::StatusOr<std::vector<float>> ParseCodebook(const std::string& text) {
  const auto parse = [](absl::string_view numbers,
                        std::vector<float>* codebook) {
    for (const absl::string_view entry : absl::StrSplit(
             numbers, absl::ByAnyChar(", \t\r\n[]"), absl::SkipEmpty())) {
      float value = 0;
      if (!absl::SimpleAtof(entry, &value)) return false;
      codebook->push_back(value);
    }
    return !codebook->empty();
  };
  std::vector<float> codebook;
  if (parse(text, &codebook)) return codebook;
  const absl::StatusOr<std::string> content = internal::ReadTextFile(text);
  if (!content.ok()) return content.status();
  codebook.clear();
  if (parse(*content, &codebook)) return codebook;
  return ArgumentInvalidError(
      absl::StrCat("expected numbers in \"", text, "\""));
}

}  // namespace

std::vector<std::string> FormatNames() {
  std::vector<std::string> names;
  for (int number = 1; number < v1::NumberFormat_ARRAYSIZE; ++number) {
    if (!v1::NumberFormat_IsValid(number)) continue;
    names.push_back(FormatName(static_cast<v1::NumberFormat>(number)));
  }
  return names;
}

std::string FormatList() {
  std::string list = "int2 to int16, int32, uint2 to uint16";
  for (const std::string& name : FormatNames()) {
    if (GetFormatInfo(*ParseFormat(name))->IsPlainInteger()) continue;
    absl::StrAppend(&list, ", ", name);
  }
  return list;
}

std::vector<std::string> GranularityNames() {
  return {"default", "per-tensor", "per-channel", "group:32"};
}

std::string MethodName(v1::CalibrationMethod method) {
  if (method == v1::CALIBRATION_METHOD_UNSPECIFIED) {
    method = v1::CALIBRATION_METHOD_MIN_MAX;
  }
  for (const Method& row : kMethods) {
    if (row.method == method) return std::string(row.name);
  }
  return "";
}

absl::StatusOr<Granularity> ParseGranularity(absl::string_view text) {
  Granularity granularity;
  absl::string_view rest = text;
  if (text == "default") return granularity;
  if (text == "per-tensor") {
    granularity.kind = Granularity::Kind::kPerTensor;
    return granularity;
  }
  if (absl::ConsumePrefix(&rest, "per-channel")) {
    granularity.kind = Granularity::Kind::kPerChannel;
    if (rest.empty()) return granularity;
    if (absl::ConsumePrefix(&rest, ":") &&
        absl::SimpleAtoi(rest, &granularity.axis)) {
      return granularity;
    }
  } else if (absl::ConsumePrefix(&rest, "group:")) {
    granularity.kind = Granularity::Kind::kGroup;
    granularity.axis = -1;
    const std::vector<absl::string_view> parts =
        absl::StrSplit(rest, absl::MaxSplits(':', 1));
    if (absl::SimpleAtoi(parts[0], &granularity.group) &&
        granularity.group > 0 &&
        (parts.size() == 1 || absl::SimpleAtoi(parts[1], &granularity.axis))) {
      return granularity;
    }
  }
  return ArgumentInvalidError(absl::StrCat(
      "expected default, per-tensor, per-channel, per-channel:AXIS, group:N "
      "or group:N:AXIS, got \"",
      text, "\""));
}

absl::StatusOr<Granularity> ParseBlockSize(absl::string_view text) {
  Granularity granularity;
  granularity.kind = Granularity::Kind::kBlockSize;
  for (const absl::string_view entry : absl::StrSplit(text, ',')) {
    int64_t value = 0;
    if (!absl::SimpleAtoi(entry, &value) || value < 0) {
      return ArgumentInvalidError(absl::StrCat(
          "expected a block size such as 1,0,32, got \"", text, "\""));
    }
    granularity.block_size.push_back(value);
  }
  return granularity;
}

absl::StatusOr<std::vector<int64_t>> BlockSizeOf(
    const Granularity& granularity, absl::Span<const int64_t> shape) {
  const int64_t rank = static_cast<int64_t>(shape.size());
  switch (granularity.kind) {
    case Granularity::Kind::kDefault:
    case Granularity::Kind::kPerTensor:
      return std::vector<int64_t>();
    case Granularity::Kind::kPerChannel:
    case Granularity::Kind::kGroup: {
      if (rank < 2) return std::vector<int64_t>();
      const int64_t axis = granularity.axis + (granularity.axis < 0 ? rank : 0);
      if (axis < 0 || axis >= rank) {
        return ArgumentInvalidError(
            absl::StrCat("expected an axis below the rank ", rank, ", got ",
                         granularity.axis));
      }
      const bool is_group = granularity.kind == Granularity::Kind::kGroup;
      std::vector<int64_t> block_size(shape.size(), is_group ? 1 : 0);
      block_size[static_cast<size_t>(axis)] = is_group ? granularity.group : 1;
      return block_size;
    }
    case Granularity::Kind::kBlockSize:
      break;
  }
  if (static_cast<int64_t>(granularity.block_size.size()) != rank) {
    return ArgumentInvalidError(absl::StrCat(
        "expected a tensor of rank ", granularity.block_size.size(),
        " for the block size, got rank ", rank));
  }
  return granularity.block_size;
}

absl::StatusOr<v1::ScaleType> ParseScaleType(absl::string_view text) {
  if (text == "default") return v1::SCALE_TYPE_UNSPECIFIED;
  v1::ScaleType type;
  if (v1::ScaleType_Parse(
          absl::StrCat(kScaleTypePrefix, absl::AsciiStrToUpper(text)), &type) &&
      type != v1::SCALE_TYPE_UNSPECIFIED) {
    return type;
  }
  return ArgumentInvalidError(absl::StrCat(
      "expected default, float32, float16, bfloat16, e8m0, e4m3 or integer, "
      "got \"",
      text, "\""));
}

std::string ScaleTypeName(v1::ScaleType type) {
  return absl::AsciiStrToLower(absl::StripPrefix(
      absl::string_view(v1::ScaleType_Name(type)), kScaleTypePrefix));
}

absl::StatusOr<EncodingSpec> SpecTemplate::SpecOf(
    absl::Span<const int64_t> shape) const {
  if (!gguf_type.empty()) {
    return ArgumentInvalidError(absl::StrCat(
        "expected rows of a multiple of ", kGgufBlock, " elements for ",
        gguf_type, ", got ", shape.empty() ? 1 : shape.back()));
  }
  const absl::StatusOr<std::vector<int64_t>> block_size =
      BlockSizeOf(granularity, shape);
  if (!block_size.ok()) return block_size.status();
  EncodingSpec result = spec;
  for (const int64_t size : *block_size) result.add_block_size(size);
  // Without entries a format of blocks would take its own.
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(spec.format());
  if (block_size->empty() && granularity.kind != Granularity::Kind::kDefault &&
      format.ok() && format->default_group != 0) {
    for (size_t d = 0; d < shape.size(); ++d) result.add_block_size(0);
  }
  return result;
}

absl::StatusOr<EncodingSpec> SpecTemplate::SpecOfAny() const {
  EncodingSpec result = spec;
  if (granularity.kind == Granularity::Kind::kPerTensor) {
    const absl::StatusOr<FormatInfo> format = GetFormatInfo(spec.format());
    if (format.ok() && format->default_group != 0) {
      return ArgumentInvalidError(absl::StrCat(
          FormatName(spec.format()),
          " comes in blocks; per-tensor needs the shape of the tensor"));
    }
  }
  SetGranularity(granularity, &result);
  return result;
}

namespace {

absl::Status JsonSpecError(absl::string_view text, absl::string_view what) {
  return ArgumentInvalidError(absl::StrCat(
      "expected a spec as JSON, such as {\"spec\": {\"format\": "
      "\"NUMBER_FORMAT_INT8\"}, \"granularity\": \"per-channel\"}, got ",
      text, what));
}

absl::StatusOr<Granularity> ParseJsonGranularity(const std::string& text) {
  absl::string_view blocks = text;
  return absl::ConsumePrefix(&blocks, "block=") ? ParseBlockSize(blocks)
                                                : ParseGranularity(text);
}

// A spec of JSON. Sets `pattern` to that of "pattern"; null for a spec that may
// have none.
absl::StatusOr<SpecTemplate> ParseJsonSpec(
    absl::string_view text, std::optional<std::string>* pattern) {
  const files::Json json = files::ParseJson(text);
  if (!json.is_object()) return JsonSpecError(text, "");
  SpecTemplate result;
  bool has_spec = false;
  bool is_message = false;
  for (const auto& [key, value] : json.items()) {
    if (key == "pattern" && value.is_string() && pattern != nullptr) {
      *pattern = value.get<std::string>();
    } else if (key == "spec" && value.is_object()) {
      const auto status = google::protobuf::util::JsonStringToMessage(
          value.dump(), &result.spec);
      if (!status.ok()) {
        return JsonSpecError(text,
                             absl::StrCat(": ", std::string(status.message())));
      }
      has_spec = is_message = true;
    } else if (key == "spec" && value.is_string()) {
      absl::StatusOr<SpecTemplate> spec =
          ParseSpecOrGgufType(value.get_ref<const std::string&>());
      if (!spec.ok()) return spec.status();
      result = *std::move(spec);
      has_spec = true;
    } else if (key != "granularity" || !value.is_string()) {
      return JsonSpecError(text, absl::StrCat(": \"", key, "\""));
    }
  }
  if (!has_spec) return JsonSpecError(text, ": no \"spec\"");
  if (json.contains("granularity")) {
    if (!is_message) {
      return JsonSpecError(text, ": \"granularity\" beside words");
    }
    absl::StatusOr<Granularity> granularity =
        ParseJsonGranularity(json["granularity"].get<std::string>());
    if (!granularity.ok()) return granularity.status();
    result.granularity = *std::move(granularity);
  }
  if (result.spec.block_size_size() > 0 || result.spec.has_granularity()) {
    return JsonSpecError(
        text, ": block_size and granularity belong into \"granularity\"");
  }
  return result;
}

}  // namespace

absl::StatusOr<SpecTemplate> ParseSpec(absl::string_view text) {
  if (absl::StartsWith(text, "{")) return ParseJsonSpec(text, nullptr);
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ':');
  const absl::StatusOr<v1::NumberFormat> format = ParseFormat(parts[0]);
  if (!format.ok()) return format.status();
  SpecTemplate result;
  result.spec.set_format(*format);
  bool has_symmetry = false;
  bool has_method = false;
  const auto twice = [text](absl::string_view what) {
    return ArgumentInvalidError(
        absl::StrCat("expected one ", what, " in \"", text, "\", got two"));
  };
  for (size_t i = 1; i < parts.size(); ++i) {
    absl::string_view part = parts[i];
    const bool has_next = i + 1 < parts.size();
    // Granularities and methods may have a colon of their own.
    std::string joined(part);
    int64_t axis = 0;
    if (part == "group" && i + 2 < parts.size() &&
        absl::SimpleAtoi(parts[i + 2], &axis)) {
      absl::StrAppend(&joined, ":", parts[++i]);
      absl::StrAppend(&joined, ":", parts[++i]);
    } else if (has_next &&
               (part == "group" || part == "best-of" ||
                (part == "fixed" && absl::StrContains(parts[i + 1], ',')) ||
                (part == "per-channel" &&
                 absl::SimpleAtoi(parts[i + 1], &axis)))) {
      absl::StrAppend(&joined, ":", parts[++i]);
    }
    if (part == "per-tensor" || part == "per-channel" || part == "group") {
      if (result.granularity.kind != Granularity::Kind::kDefault) {
        return twice("granularity");
      }
      const absl::StatusOr<Granularity> granularity = ParseGranularity(joined);
      if (!granularity.ok()) return granularity.status();
      result.granularity = *granularity;
    } else if (const absl::StatusOr<v1::Symmetry> symmetry =
                   ParseSymmetry(part);
               symmetry.ok()) {
      if (has_symmetry) return twice("symmetry");
      has_symmetry = true;
      result.spec.set_symmetry(*symmetry);
    } else if (part == "power-of-two") {
      result.spec.set_power_of_two_scale(true);
    } else if (part == "no-saturation") {
      result.spec.set_no_saturation(true);
    } else if (part == "real-zero-point") {
      result.spec.set_real_zero_point(true);
    } else if (absl::ConsumePrefix(&part, "mantissa-bits=")) {
      uint32_t bits = 0;
      if (!absl::SimpleAtoi(part, &bits)) {
        return ArgumentInvalidError(absl::StrCat(
            "expected mantissa-bits=7 or the like, got \"", text, "\""));
      }
      result.spec.set_mantissa_bits(bits);
    } else if (absl::ConsumePrefix(&part, "scale=")) {
      const absl::StatusOr<v1::ScaleType> type = ParseScaleType(part);
      if (!type.ok()) return type.status();
      result.spec.set_scale_type(*type);
    } else if (absl::ConsumePrefix(&part, "rule=")) {
      const absl::StatusOr<v1::MxScaleRule> rule = ParseMxScaleRule(part);
      if (!rule.ok()) return rule.status();
      result.spec.set_mx_scale_rule(*rule);
    } else if (absl::ConsumePrefix(&part, "block=")) {
      if (result.granularity.kind != Granularity::Kind::kDefault) {
        return twice("granularity");
      }
      const absl::StatusOr<Granularity> granularity = ParseBlockSize(part);
      if (!granularity.ok()) return granularity.status();
      result.granularity = *granularity;
    } else if (absl::ConsumePrefix(&part, "tail=")) {
      const absl::StatusOr<v1::Tail> tail = ParseTail(part);
      if (!tail.ok()) return tail.status();
      result.spec.set_tail(*tail);
    } else if (absl::ConsumePrefix(&part, "steps=")) {
      uint32_t steps = 0;
      if (!absl::SimpleAtoi(part, &steps)) return NumberError("steps", part);
      result.spec.set_search_steps(steps);
    } else if (absl::ConsumePrefix(&part, "bins=")) {
      uint32_t bins = 0;
      if (!absl::SimpleAtoi(part, &bins)) return NumberError("bins", part);
      result.spec.set_entropy_bins(bins);
    } else if (absl::ConsumePrefix(&part, "entries=")) {
      const absl::StatusOr<std::vector<float>> entries =
          ParseCodebook(std::string(part));
      if (!entries.ok()) return entries.status();
      result.spec.mutable_codebook()->Assign(entries->begin(), entries->end());
    } else if (part == "importance" ||
               absl::ConsumePrefix(&part, "importance=")) {
      v1::Importance* const importance = result.spec.mutable_importance();
      if (importance->has_inputs()) return twice("importance");
      v1::TensorName* const inputs = importance->mutable_inputs();
      if (part != "importance") {
        absl::StatusOr<std::string> name = UnescapeName(part);
        if (!name.ok()) return name.status();
        inputs->set_tensor(*std::move(name));
      }
    } else if (absl::ConsumePrefix(&part, "importance-axis=")) {
      int32_t index = 0;
      if (!absl::SimpleAtoi(part, &index)) {
        return NumberError("importance-axis", part);
      }
      result.spec.mutable_importance()->set_axis(index);
    } else if (IsMethod(part)) {
      if (has_method) return twice("method");
      has_method = true;
      const absl::Status status = ParseMethod(joined, &result.spec);
      if (!status.ok()) return status;
    } else {
      return ArgumentInvalidError(absl::StrCat(
          "expected a granularity (per-tensor, per-channel, group:N), a "
          "symmetry (asymmetric, strict, full-range, half-step, aimet), a "
          "method (minmax, percentile, mse, sqnr, entropy, fixed, "
          "moving-average, best-of) or an option in \"",
          text, "\", got \"", part, "\""));
    }
  }
  return result;
}

absl::StatusOr<SpecTemplate> ParseSpecOrGgufType(absl::string_view text) {
  for (const files::GgufType& type : files::GgufTypes()) {
    if (files::FindGgufEncoder(type) == nullptr) continue;
    if (absl::EqualsIgnoreCase(text, type.name)) {
      SpecTemplate spec;
      spec.gguf_type = std::string(type.name);
      return spec;
    }
    if (absl::StartsWithIgnoreCase(text, absl::StrCat(type.name, ":"))) {
      return ArgumentInvalidError(absl::StrCat("expected ", type.name,
                                               " alone, which says all, got \"",
                                               text, "\""));
    }
  }
  return ParseSpec(text);
}

const SpecTemplate* SpecSet::For(absl::string_view tensor) const {
  for (const Override& entry : overrides) {
    if (MatchesGlob(entry.pattern, tensor)) return &entry.spec;
  }
  return has_base ? &base : nullptr;
}

absl::Status AddSpec(const std::string& text, SpecSet* set, bool* has_base) {
  if (!text.empty() && text[0] == '@') {
    const absl::StatusOr<std::string> content =
        internal::ReadTextFile(text.substr(1));
    if (!content.ok()) return content.status();
    const std::vector<absl::string_view> lines =
        absl::StrSplit(*content, '\n', absl::SkipWhitespace());
    if (lines.empty()) {
      return ArgumentInvalidError(
          absl::StrCat("expected specs in ", text, ", got none"));
    }
    const size_t before = set->overrides.size();
    for (const absl::string_view line : lines) {
      const std::string entry(absl::StripAsciiWhitespace(line));
      if (entry[0] == '@') {
        return ArgumentInvalidError(
            absl::StrCat("expected specs in ", text, ", got \"", entry, "\""));
      }
      const absl::Status status = AddSpec(entry, set, has_base);
      if (!status.ok()) return status;
    }
    for (size_t i = before; i < set->overrides.size(); ++i) {
      set->overrides[i].is_from_file = true;
    }
    return absl::OkStatus();
  }
  std::optional<std::string> pattern;
  const absl::StatusOr<SpecTemplate> base = absl::StartsWith(text, "{")
                                                ? ParseJsonSpec(text, &pattern)
                                                : ParseSpecOrGgufType(text);
  if (base.ok() && pattern.has_value()) {
    set->overrides.push_back({*std::move(pattern), *base});
    return absl::OkStatus();
  }
  if (base.ok()) {
    if (*has_base) {
      return ArgumentInvalidError(absl::StrCat(
          "expected one spec without a pattern, got \"", text, "\" too"));
    }
    *has_base = true;
    set->base = *base;
    return absl::OkStatus();
  }
  // Only JSON, or a spec whose format is known, can have been meant without a
  // pattern.
  const size_t equals = text.find('=');
  const bool is_format =
      absl::StartsWith(text, "{") ||
      ParseFormat(text.substr(0, text.find_first_of(":="))).ok();
  if (equals == std::string::npos || is_format) return base.status();
  const absl::StatusOr<SpecTemplate> spec =
      ParseSpecOrGgufType(absl::string_view(text).substr(equals + 1));
  if (!spec.ok()) return spec.status();
  set->overrides.push_back({text.substr(0, equals), *spec});
  return absl::OkStatus();
}

absl::Status CheckNameForSpecFile(const std::string& tensor) {
  const std::string line = absl::StrCat(tensor, "=int8");
  SpecSet set;
  bool has_base = false;
  // Files are read line by line, without the spaces around each.
  const bool is_read = tensor.find_first_of("\n\r*?") == std::string::npos &&
                       !absl::StartsWith(tensor, "@") &&
                       absl::StripAsciiWhitespace(line) == line &&
                       AddSpec(line, &set, &has_base).ok() &&
                       set.overrides.size() == 1 &&
                       set.overrides[0].pattern == tensor;
  if (is_read) return absl::OkStatus();
  return ArgumentInvalidError(absl::StrCat(
      "the name of the tensor ", files::QuotedName(tensor),
      " cannot be in a file of specs, as it has a line break, \"=\", \"*\" or "
      "\"?\" or begins with a space, \"@\" or a format; sweep without it or "
      "without -o"));
}

absl::StatusOr<Candidate> ParseCandidate(absl::string_view text) {
  Candidate candidate;
  candidate.label = std::string(text);
  if (text == "stored") {
    candidate.is_stored = true;
    return candidate;
  }
  const absl::StatusOr<SpecTemplate> spec = ParseSpecOrGgufType(text);
  if (!spec.ok()) return spec.status();
  candidate.spec = *spec;
  return candidate;
}

bool MatchesGlob(absl::string_view pattern, absl::string_view text) {
  // On a mismatch the last "*" takes one more byte: no earlier one can help,
  // so this is O(pattern * text) at worst.
  size_t p = 0;
  size_t t = 0;
  size_t star = absl::string_view::npos;
  size_t star_text = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      star_text = t;
    } else if (p < pattern.size() &&
               (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p;
      ++t;
    } else if (star != absl::string_view::npos) {
      p = star + 1;
      t = ++star_text;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace quantd
