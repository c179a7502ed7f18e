#include "client/models/compressed_tensors.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cpp/errors.h"
#include "client/cpp/scales.h"
#include "client/models/quantized_layout.h"
#include "nlohmann/json.hpp"

namespace quantd {
namespace {

absl::Status NotInCompressedTensors(absl::string_view what) {
  return ArgumentInvalidError(absl::StrCat("compressed-tensors holds ", what));
}

// The "strategy": which elements share a scale. `columns` of a matrix.
// Errors: ARGUMENT_INVALID where the layout has no word for it.
absl::StatusOr<files::Json> StrategyOf(const std::vector<int64_t>& scale_shape,
                                       const Encoding& encoding, int64_t count,
                                       int64_t columns) {
  files::Json json = files::Json::object();
  const auto& block = encoding.block_size();
  // The strategy is the one that was asked for, also where a matrix has one
  // block: runtimes take layers of one kind.
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
  if (block.size() > 0 && block[0] == 1 && scale_shape[0] == count) {
    json["strategy"] = "channel";
    return json;
  }
  if (count == 1) {
    json["strategy"] = "tensor";
    return json;
  }
  return NotInCompressedTensors(
      "scales per tensor, per row, and of matrices in groups along rows or in "
      "blocks");
}

}  // namespace

absl::StatusOr<CompressedLayout> CompressedLayoutOf(
    const std::string& name, const std::vector<int64_t>& shape,
    const Encoding& encoding, bool has_zero_points, bool packs_all) {
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(encoding.format());
  if (!format.ok()) return format.status();
  const std::string module(ModuleOf(name));
  if (module.empty() || shape.size() != 2) {
    return NotInCompressedTensors(
        "matrices that are named MODULE.weight; experts.gate_up_proj and "
        "experts.down_proj become such if they are stacks of matrices whose "
        "shapes fit, without biases");
  }
  const std::vector<int64_t> block_size(encoding.block_size().begin(),
                                        encoding.block_size().end());
  const absl::StatusOr<std::vector<int64_t>> blocks =
      ScaleShape(shape, block_size);
  if (!blocks.ok()) return blocks.status();
  CompressedLayout layout;
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
  if (encoding.zero_points_are_real()) {
    return NotInCompressedTensors(
        "zero points that are codes, not between them");
  }
  const bool is_integer = format->kind == CodeKind::kInteger &&
                          format->bits <= kMostCompressedBits &&
                          scale_type <= v1::SCALE_TYPE_BFLOAT16;
  if (!(is_fp4 || layout.is_float8 || is_integer) ||
      (layout.is_float8 && !layout.is_mxfp8 &&
       scale_type > v1::SCALE_TYPE_BFLOAT16)) {
    return NotInCompressedTensors(
        absl::StrCat("integers of at most 8 bits, float8_e4m3fn, nvfp4, "
                     "mxfp4_e2m1 and mxfp8_e4m3, not ",
                     format_name));
  }
  const absl::StatusOr<ScaleCounts> counts = CountScales(shape, encoding);
  if (!counts.ok()) return counts.status();
  layout.count = counts->scale;
  absl::StatusOr<files::Json> scheme =
      StrategyOf(*blocks, encoding, layout.count, shape[1]);
  if (!scheme.ok()) return scheme.status();
  layout.is_symmetric = !has_zero_points && (!is_integer || format->is_signed);
  layout.is_packed =
      is_integer && (packs_all || format->bits < kMostCompressedBits);
  std::string layout_name =
      layout.is_packed ? "pack-quantized" : "int-quantized";
  if (layout.is_float8) layout_name = "float-quantized";
  if (is_fp4 || layout.is_mxfp8) {
    const int64_t group = layout.is_nvfp4 ? kNvfp4Group : kMxGroup;
    if (block_size.size() != 2 || block_size[0] != 1 ||
        block_size[1] != group || shape[1] % 2 != 0 ||
        counts->outer_scale > 1) {
      return NotInCompressedTensors(
          absl::StrCat(format_name,
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
  files::Json weights = {{"num_bits", is_fp4 ? 4 : format->bits},
                         {"type", is_integer ? "int" : "float"},
                         {"symmetric", layout.is_symmetric},
                         {"dynamic", false},
                         {"observer", "minmax"}};
  weights.update(*scheme);
  // Tells MXFP8 from FP8 in groups.
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
        {shape[0], PackedWords(shape[1], format->bits)});
    add(".weight_shape", files::Dtype::kI64, {2});
  } else {
    add(kCompressedWeight,
        layout.is_float8 ? files::Dtype::kF8E4M3 : files::Dtype::kI8, shape);
  }
  add(".weight_scale",
      layout.is_mxfp8 ? files::Dtype::kU8 : ScaleDtype(scale_type),
      layout.is_mxfp8 ? *blocks : scale_shape);
  if (layout.is_symmetric) return layout;
  if (PacksZeroPoints(layout)) {
    add(".weight_zero_point", files::Dtype::kI32,
        {PackedWords(shape[0], format->bits), (*blocks)[1]});
  } else {
    add(".weight_zero_point", files::Dtype::kI8, scale_shape);
  }
  return layout;
}

bool PacksZeroPoints(const CompressedLayout& layout) {
  const files::Json& strategy = layout.module["weights"]["strategy"];
  return layout.is_packed && (strategy == "group" || strategy == "channel");
}

absl::string_view ModuleOf(absl::string_view tensor) {
  return absl::ConsumeSuffix(&tensor, kCompressedWeight) ? tensor : "";
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
  return NotInCompressedTensors(absl::StrCat(
      "groups that divide the columns of a matrix, got ", columns,
      " columns and groups of ", group,
      "; take a group size that divides them, or per-channel (--spec "
      "PATTERN=SPEC for this tensor alone), or leave it out with --exclude"));
}

}  // namespace quantd
