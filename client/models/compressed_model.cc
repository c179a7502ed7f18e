#include "client/models/compressed_model.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/element_bytes.h"
#include "client/models/bit_stream.h"
#include "client/models/fused_experts.h"
#include "client/models/tie_groups.h"
#include "nlohmann/json.hpp"

namespace quantd {
namespace {

// A target of no module: it matches the texts, such as "re:.*up_proj.*", that
// vLLM up to 0.11.0 looks up in place of the names of experts.
constexpr char kExpertsTarget[] = "re:re:[.][*](gate|up|down)_proj[.][*]";

// Adds by which name vLLM looks up a module of a mixer of Granite 4 and its
// kin.
void AddNameOfMixer(absl::string_view module, files::Json* names) {
  std::string mixer = absl::StrReplaceAll(module, {{".mamba.", ".mixer."}});
  if (mixer != module) names->push_back(std::move(mixer));
}

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

}  // namespace

absl::StatusOr<CompressedPlan> CompressedModel::PlanOf(
    const std::string& name, const std::vector<int64_t>& shape,
    const Encoding& expected) const {
  absl::StatusOr<CompressedLayout> layout = CompressedLayoutOf(
      name, shape, expected, expected.chunks_have_zero_points(), packs_all_);
  if (!layout.ok()) return layout.status();
  return CompressedPlan{std::move(layout->parts),
                        ModuleOfLayout(std::move(layout->module))};
}

absl::StatusOr<uint64_t> CompressedModel::Write(
    const std::string& name, const std::vector<int64_t>& shape,
    const Encoding& encoding, const Scales& scales,
    absl::Span<const uint8_t> codes, Add add_tensor) {
  absl::StatusOr<CompressedLayout> layout = CompressedLayoutOf(
      name, shape, encoding, !scales.zero_point.empty(), packs_all_);
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
      if (format.storage_bits == format.bits &&
          shape[1] * format.bits == row_words * 32) {
        // The words have the bytes of the codes, but count codes from 0 on.
        uint8_t flip = 0;
        for (int bit = format.bits; format.is_signed && bit <= 8;
             bit += format.bits) {
          flip |= static_cast<uint8_t>(1U << (bit - 1));
        }
        auto* out = reinterpret_cast<uint8_t*>(words.data());
        for (const uint8_t byte : codes) *out++ = byte ^ flip;
        index = elements;
      }
      for (int64_t row = 0; index < elements; ++row) {
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

files::Json CompressedModel::ModuleOfLayout(files::Json module) const {
  if (!input_arguments_.is_null()) {
    module["input_activations"] = input_arguments_;
  }
  return module;
}

files::Json CompressedModel::Config(const std::vector<std::string>& ignored,
                                    const files::Json& cache) const {
  absl::flat_hash_map<std::string, size_t> index;
  std::vector<std::pair<files::Json, files::Json>> groups;
  std::string format;
  std::map<std::string, size_t> group_of_experts;
  for (const auto& [module, scheme] : modules_.items()) {
    const auto [found, is_new] = index.emplace(scheme.dump(), groups.size());
    if (is_new) groups.emplace_back(scheme, files::Json::array());
    groups[found->second].second.push_back(module);
    AddNameOfMixer(module, &groups[found->second].second);
    const std::string tensor = absl::StrCat(module, kCompressedWeight);
    if (const absl::string_view experts = ExpertsOf(tensor); !experts.empty()) {
      group_of_experts.emplace(experts, found->second);
    }
    const std::string layout = scheme["format"];
    format = format.empty() || format == layout ? layout : "mixed-precision";
  }
  const absl::flat_hash_set<std::string> is_ignored(ignored.begin(),
                                                    ignored.end());
  std::set<size_t> groups_with_experts;
  for (const auto& [experts, group] : group_of_experts) {
    groups_with_experts.insert(group);
    for (std::string& module : ModulesOfLayer(experts)) {
      if (modules_.contains(module) || is_ignored.contains(module)) continue;
      groups[group].second.push_back(std::move(module));
    }
  }
  if (groups_with_experts.size() == 1) {
    groups[*groups_with_experts.begin()].second.push_back(kExpertsTarget);
  }
  files::Json ignore = ignored;
  for (const std::string& module : ignored) AddNameOfMixer(module, &ignore);
  files::Json config_groups = files::Json::object();
  for (size_t i = 0; i < groups.size(); ++i) {
    files::Json group = {
        {"targets", groups[i].second},
        {"weights", groups[i].first["weights"]},
        {"input_activations",
         groups[i].first.value("input_activations", files::Json())},
        {"output_activations", nullptr},
        {"format", groups[i].first["format"]}};
    config_groups[absl::StrCat("group_", i)] = std::move(group);
  }
  return {{"quant_method", "compressed-tensors"},
          {"quantization_status", "compressed"},
          {"format", format},
          {"global_compression_ratio", nullptr},
          {"kv_cache_scheme", cache},
          {"ignore", std::move(ignore)},
          {"config_groups", std::move(config_groups)}};
}

bool IsExactInverse(float global, float outer) {
  // E4M3 numbers are these times powers of two.
  for (int mantissa = 8; mantissa < 16; ++mantissa) {
    const auto number = static_cast<float>(mantissa);
    if (number / global != number * outer) return false;
  }
  return true;
}

}  // namespace quantd
