#include "client/jobs/gguf_output.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/errors.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/gguf_builder.h"
#include "client/files/gguf_encoders.h"
#include "client/files/gguf_types.h"
#include "client/files/safetensors.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/tensor_input.h"

namespace quantd::jobs {
namespace {

constexpr size_t kBlock = 32;

// A spec that has a type, and the least that is said of it.
struct Row {
  absl::string_view type;
  absl::string_view spec;
  v1::NumberFormat format;
  v1::ScaleType scale_type;
  bool has_minimum;
  // llama.cpp's number.
  uint32_t file_type;
};
constexpr Row kRows[] = {
    {"q8_0", "int8:group:32:scale=float16", v1::NUMBER_FORMAT_INT8,
     v1::SCALE_TYPE_FLOAT16, false, 7},
    {"q5_0", "int5:group:32:scale=float16", v1::NUMBER_FORMAT_INT5,
     v1::SCALE_TYPE_FLOAT16, false, 8},
    {"q5_1", "uint5:group:32:scale=float16", v1::NUMBER_FORMAT_UINT5,
     v1::SCALE_TYPE_FLOAT16, true, 9},
    {"q4_0", "int4:group:32:scale=float16", v1::NUMBER_FORMAT_INT4,
     v1::SCALE_TYPE_FLOAT16, false, 2},
    {"q4_1", "uint4:group:32:scale=float16", v1::NUMBER_FORMAT_UINT4,
     v1::SCALE_TYPE_FLOAT16, true, 3},
    {"mxfp4", "mxfp4_e2m1", v1::NUMBER_FORMAT_MXFP4_E2M1, v1::SCALE_TYPE_E8M0,
     false, 38},
};

// Types without a spec; those of llama.cpp's "small" mixtures, which have one
// type throughout.
struct BlockRow {
  absl::string_view type;
  uint32_t file_type;
};
constexpr BlockRow kBlockRows[] = {{"q6_K", 18}, {"q5_K", 16}, {"q4_K", 14}};

// Parts of the names of weights that llama.cpp does not quantize either: norms,
// routers, positions, token types, small matrices, and what its kernels take as
// floats.
constexpr absl::string_view kLeftInGguf[] = {"_norm.weight",
                                             "ffn_gate_inp.weight",
                                             "altup",
                                             "laurel",
                                             "per_layer_model_proj",
                                             "position_embd",
                                             "token_types.weight",
                                             "ssm_conv1d",
                                             "shortconv.conv.weight",
                                             "indexer.k_proj.weight",
                                             "indexer.q_proj.weight",
                                             "time_mix_first.weight",
                                             "time_mix_w0.weight",
                                             "time_mix_w1.weight",
                                             "time_mix_w2.weight",
                                             "time_mix_v0.weight",
                                             "time_mix_v1.weight",
                                             "time_mix_v2.weight",
                                             "time_mix_a0.weight",
                                             "time_mix_a1.weight",
                                             "time_mix_a2.weight",
                                             "time_mix_g1.weight",
                                             "time_mix_g2.weight",
                                             "time_mix_decay_w1.weight",
                                             "time_mix_decay_w2.weight",
                                             "time_mix_lerp_fused.weight",
                                             "attn_rel_b.weight",
                                             "sam.pos_embd",
                                             "sam.neck.",
                                             "sam.net_",
                                             ".rel_pos",
                                             ".patch_embd",
                                             ".patch_merger",
                                             "a.rvq.codebook",
                                             "mm.a.code_embd"};

const Row* FindRow(absl::string_view type) {
  for (const Row& row : kRows) {
    if (row.type == type) return &row;
  }
  return nullptr;
}

// Code i of packed or unpacked codes, as the bits that it is stored in.
int CodeBits(absl::Span<const uint8_t> codes, int storage_bits, size_t i) {
  return storage_bits == 4 ? codes[i / 2] >> (i % 2 * 4) & 15 : codes[i];
}

}  // namespace

const files::GgufType* GgufTypeOf(const EncodingSpec& spec,
                                  const std::vector<int64_t>& shape) {
  const Encoding expected = ExpectedEncoding(spec, shape);
  const bool is_asymmetric = spec.symmetry() == v1::SYMMETRY_ASYMMETRIC;
  const auto& block = expected.block_size();
  const bool is_grouped = !block.empty() && *block.rbegin() == kBlock &&
                          std::all_of(block.begin(), block.end() - 1,
                                      [](int64_t size) { return size == 1; });
  for (const Row& row : kRows) {
    if (row.format == expected.format() && is_grouped &&
        row.scale_type == ScaleTypeOf(expected) &&
        (row.has_minimum || !is_asymmetric) &&
        !spec.unsigned_if_non_negative() && !spec.real_zero_point()) {
      return files::FindGgufType(row.type);
    }
  }
  return nullptr;
}

absl::StatusOr<files::GgufEntry> GgufEntryOf(const std::string& path,
                                             const TensorInput& input,
                                             const files::FileTensor& tensor,
                                             const EncodingSpec* spec) {
  files::GgufEntry entry = {tensor.name, nullptr, tensor.shape};
  const auto blocks = input.blocks().find(tensor.name);
  if (spec != nullptr) {
    entry.type = GgufTypeOf(*spec, tensor.shape);
    if (entry.type == nullptr) {
      return ArgumentInvalidError(absl::StrCat(
          "expected a spec that has a type in GGUF for ",
          files::QuotedName(tensor.name), ": one of ", GgufSpecs()));
    }
  } else if (blocks != input.blocks().end()) {
    entry.type = blocks->second.type;
  } else {
    entry.type = files::FindGgufType(tensor.dtype);
  }
  if (entry.type == nullptr) {
    return files::FileUnsupportedError(
        path, absl::StrCat("tensor ", files::QuotedName(tensor.name),
                           ": GGUF has no type for ", DtypeName(tensor.dtype)));
  }
  const absl::Status status = files::CheckGgufEntry(path, entry);
  if (!status.ok()) return status;
  return entry;
}

bool IsLeftInGguf(const TensorFilter& filter, const files::FileTensor& tensor) {
  const auto first =
      absl::c_find_if(tensor.shape, [](int64_t size) { return size != 1; });
  return !absl::EndsWith(tensor.name, "weight") ||
         absl::c_any_of(kLeftInGguf,
                        [&tensor](absl::string_view part) {
                          return absl::StrContains(tensor.name, part);
                        }) ||
         (!filter.all && tensor.shape.end() - first < filter.min_rank);
}

std::string GgufSpecs() {
  std::vector<std::string> specs;
  for (const files::GgufType& type : files::GgufTypes()) {
    if (files::FindGgufEncoder(type) == nullptr) continue;
    specs.emplace_back(type.name);
  }
  for (const Row& row : kRows) {
    specs.push_back(absl::StrCat(row.spec, " (", row.type, ")"));
  }
  return absl::StrJoin(specs, ", ");
}

uint32_t GgufFileType(const files::GgufType& type) {
  for (const BlockRow& row : kBlockRows) {
    if (row.type == type.name) return row.file_type;
  }
  const Row* const row = FindRow(type.name);
  return row == nullptr ? 0 : row->file_type;
}

absl::StatusOr<std::vector<uint8_t>> PackGguf(const files::GgufType& type,
                                              const Encoding& encoding,
                                              const Scales& scales,
                                              absl::Span<const uint8_t> codes,
                                              bool* is_rounded) {
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(encoding.format());
  if (!format.ok()) return format.status();
  const Row& row = *FindRow(type.name);
  const size_t scale_bytes =
      static_cast<size_t>(ScaleSizeBytes(ScaleTypeOf(encoding)));
  const size_t count = scales.scale.size() / scale_bytes;
  const size_t block_bytes = static_cast<size_t>(type.block_bytes);
  // Two's complement becomes a distance from the lowest code, but for 8 bits.
  const int offset =
      format->is_signed && format->bits < 8 ? 1 << (format->bits - 1) : 0;
  const int mask = (1 << format->bits) - 1;
  std::vector<uint8_t> blocks(count * block_bytes);
  for (size_t b = 0; b < count; ++b) {
    uint8_t* at = &blocks[b * block_bytes];
    std::memcpy(at, &scales.scale[b * scale_bytes], scale_bytes);
    int32_t zero_point = 0;
    if (!scales.zero_point.empty()) {
      std::memcpy(&zero_point, &scales.zero_point[b * sizeof(zero_point)],
                  sizeof(zero_point));
    }
    if (row.scale_type == v1::SCALE_TYPE_E8M0 && *at == 255) {
      return ArgumentInvalidError("GGUF has no blocks whose scale is NaN");
    }
    if (!row.has_minimum && zero_point != 0) {
      return ArgumentInvalidError(
          absl::StrCat(type.name, " has no zero points, got ", zero_point));
    }
    int values[kBlock];
    for (size_t i = 0; i < kBlock; ++i) {
      const int bits = CodeBits(codes, format->storage_bits, b * kBlock + i);
      values[i] = (bits + offset) & mask;
    }
    if (row.has_minimum) {
      const float minimum =
          -static_cast<float>(zero_point + offset) * files::ReadHalf(at);
      if (std::fabs(minimum) > files::kMostHalf) {
        return ArgumentInvalidError(absl::StrCat(
            "the minimum of a block, ", minimum, ", is more than float16 has"));
      }
      const uint16_t half = files::NearestHalf(minimum);
      const uint8_t bytes[] = {static_cast<uint8_t>(half & 255),
                               static_cast<uint8_t>(half >> 8)};
      *is_rounded = *is_rounded || files::ReadHalf(bytes) != minimum;
      std::memcpy(at + scale_bytes, bytes, sizeof(bytes));
      at += sizeof(bytes);
    }
    at += scale_bytes;
    files::PutGgufCodes(values, format->bits, at);
  }
  return blocks;
}

}  // namespace quantd::jobs
