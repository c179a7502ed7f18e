#include "client/cpp/scales.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/element_bytes.h"
#include "client/cpp/tensor.h"
#include "client/files/half.h"

namespace quantd {
namespace {

// Scales are positive and normal float32, and values of the type, so that only
// exponents and zeros are cut: that makes these exact.
uint16_t ToHalf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const int exponent = static_cast<int>(bits >> 23) - 127;
  const uint32_t mantissa = (bits & 0x7FFFFF) | 0x800000;
  if (exponent < -14) {
    return static_cast<uint16_t>(mantissa >> std::min(-1 - exponent, 31));
  }
  return static_cast<uint16_t>(((exponent + 14) << 10) + (mantissa >> 13));
}

uint16_t ToBfloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

float FromBfloat(uint16_t bfloat) {
  const uint32_t bits = static_cast<uint32_t>(bfloat) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

Buffer MakeBuffer(size_t size_bytes) {
  return {std::unique_ptr<uint8_t[]>(new uint8_t[size_bytes]), size_bytes};
}

Buffer CopyOf(const void* bytes, size_t size_bytes) {
  Buffer buffer = MakeBuffer(size_bytes);
  if (size_bytes > 0) std::memcpy(buffer.bytes.get(), bytes, size_bytes);
  return buffer;
}

template <typename T>
Buffer CopyOf(const google::protobuf::RepeatedField<T>& values) {
  return CopyOf(values.data(), static_cast<size_t>(values.size()) * sizeof(T));
}

int64_t Product(const std::vector<int64_t>& sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

}  // namespace

int64_t ScaleSizeBytes(v1::ScaleType type) {
  switch (type) {
    case v1::SCALE_TYPE_FLOAT16:
    case v1::SCALE_TYPE_BFLOAT16:
      return 2;
    case v1::SCALE_TYPE_E8M0:
    case v1::SCALE_TYPE_E4M3:
    case v1::SCALE_TYPE_INTEGER:
      return 1;
    default:
      return 4;
  }
}

bool HasOuterScales(v1::ScaleType type) {
  return type == v1::SCALE_TYPE_E4M3 || type == v1::SCALE_TYPE_INTEGER;
}

absl::StatusOr<ScaleCounts> CountScales(absl::Span<const int64_t> shape,
                                        const Encoding& encoding) {
  const std::vector<int64_t> block(encoding.block_size().begin(),
                                   encoding.block_size().end());
  const absl::StatusOr<std::vector<int64_t>> scales = ScaleShape(shape, block);
  if (!scales.ok()) return scales.status();
  ScaleCounts counts;
  counts.scale = Product(*scales);
  if (!HasOuterScales(ScaleTypeOf(encoding))) return counts;
  counts.outer_scale = 1;
  // One scale fits any shape, and so does what is said of its outer one.
  if (block.empty()) return counts;
  std::vector<int64_t> outer(encoding.outer_block_size().begin(),
                             encoding.outer_block_size().end());
  // A block of a whole dimension has one outer scale, whatever its size.
  for (size_t d = 0; d < outer.size() && d < block.size(); ++d) {
    if (block[d] == 0) outer[d] = 0;
  }
  const absl::StatusOr<std::vector<int64_t>> outer_scales =
      ScaleShape(shape, outer);
  if (!outer_scales.ok()) return outer_scales.status();
  counts.outer_scale = Product(*outer_scales);
  return counts;
}

ScaleBuffers TakeScales(const Encoding& encoding) {
  ScaleBuffers buffers;
  const v1::ScaleType type = ScaleTypeOf(encoding);
  switch (ScaleSizeBytes(type)) {
    case 4:
      buffers.scale = CopyOf(encoding.scale());
      break;
    case 2: {
      std::vector<uint16_t> narrow;
      for (const float scale : encoding.scale()) {
        narrow.push_back(type == v1::SCALE_TYPE_FLOAT16 ? ToHalf(scale)
                                                        : ToBfloat(scale));
      }
      buffers.scale = CopyOf(narrow.data(), narrow.size() * sizeof(uint16_t));
      break;
    }
    default:
      buffers.scale =
          CopyOf(encoding.scale_code().data(), encoding.scale_code().size());
  }
  buffers.zero_point = encoding.real_zero_point_size() > 0
                           ? CopyOf(encoding.real_zero_point())
                           : CopyOf(encoding.zero_point());
  buffers.outer_scale = CopyOf(encoding.outer_scale());
  return buffers;
}

std::vector<int64_t> BlockSizeOf(const EncodingSpec& spec,
                                 const std::vector<int64_t>& shape) {
  const size_t rank = shape.size();
  std::vector<int64_t> block_size(spec.block_size().begin(),
                                  spec.block_size().end());
  if (spec.has_granularity()) {
    if (rank < 2) return {};
    const int64_t group_size = spec.granularity().group_size();
    const int64_t axis = spec.granularity().axis();
    const size_t at = static_cast<size_t>(axis) + (axis < 0 ? rank : 0);
    block_size.assign(rank, group_size > 0 ? 1 : 0);
    if (at < rank) block_size[at] = std::max<int64_t>(1, group_size);
    return block_size;
  }
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(spec.format());
  if (!block_size.empty() || !format.ok() || format->default_group == 0 ||
      rank == 0) {
    return block_size;
  }
  block_size.assign(rank, 1);
  block_size.back() = format->default_group;
  return block_size;
}

Encoding ExpectedEncoding(const EncodingSpec& spec,
                          const std::vector<int64_t>& shape) {
  Encoding encoding;
  encoding.set_format(spec.format());
  const std::vector<int64_t> block = BlockSizeOf(spec, shape);
  encoding.mutable_block_size()->Assign(block.begin(), block.end());
  encoding.set_exclude_zero(spec.exclude_zero());
  encoding.set_zero_points_are_real(spec.real_zero_point());
  encoding.set_scale_type(spec.scale_type());
  encoding.set_scale_type(ScaleTypeOf(encoding));
  encoding.set_no_saturation(spec.no_saturation());
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(spec.format());
  if (format.ok() && format->kind == CodeKind::kCodebook) {
    *encoding.mutable_codebook() = spec.codebook();
  }
  if (HasOuterScales(encoding.scale_type())) {
    *encoding.mutable_outer_block_size() = spec.outer_block_size();
    if (spec.outer_block_size().empty() && shape.size() >= 2 &&
        encoding.scale_type() == v1::SCALE_TYPE_INTEGER) {
      // One for each channel, or as many as share a block.
      encoding.mutable_outer_block_size()->Resize(
          static_cast<int>(shape.size()), 0);
      encoding.set_outer_block_size(0, block.empty() ? 0 : block[0]);
    }
  }
  encoding.set_scales_in_chunks(true);
  encoding.set_chunks_have_zero_points(
      format.ok() && format->kind == CodeKind::kInteger &&
      (spec.symmetry() == v1::SYMMETRY_ASYMMETRIC ||
       (spec.symmetry() == v1::SYMMETRY_UNSPECIFIED && !format->is_signed)));
  return encoding;
}

Encoding WithoutScales(const Encoding& encoding, bool has_zero_points) {
  Encoding outline = encoding;
  outline.set_scales_in_chunks(true);
  outline.set_chunks_have_zero_points(has_zero_points);
  outline.clear_scale();
  outline.clear_scale_code();
  outline.clear_zero_point();
  if (encoding.real_zero_point_size() > 0) {
    outline.set_zero_points_are_real(true);
    outline.clear_real_zero_point();
  }
  outline.clear_outer_scale();
  return outline;
}

Encoding WithScales(const Encoding& encoding, const Scales& scales) {
  Encoding whole = encoding;
  whole.clear_scales_in_chunks();
  whole.clear_chunks_have_zero_points();
  const v1::ScaleType type = ScaleTypeOf(encoding);
  switch (ScaleSizeBytes(type)) {
    case 4:
      whole.mutable_scale()->Resize(
          static_cast<int>(scales.scale.size() / sizeof(float)), 0);
      if (!scales.scale.empty()) {
        std::memcpy(whole.mutable_scale()->mutable_data(), scales.scale.data(),
                    static_cast<size_t>(whole.scale_size()) * sizeof(float));
      }
      break;
    case 2:
      whole.clear_scale();
      for (const uint16_t narrow : CopyElements<uint16_t>(scales.scale)) {
        whole.add_scale(type == v1::SCALE_TYPE_FLOAT16
                            ? files::HalfValue(narrow)
                            : FromBfloat(narrow));
      }
      break;
    default:
      whole.set_scale_code(scales.scale.data(), scales.scale.size());
  }
  if (encoding.zero_points_are_real()) {
    const std::vector<float> zero_point =
        CopyElements<float>(scales.zero_point);
    whole.mutable_real_zero_point()->Assign(zero_point.begin(),
                                            zero_point.end());
  } else {
    const std::vector<int32_t> zero_point =
        CopyElements<int32_t>(scales.zero_point);
    whole.mutable_zero_point()->Assign(zero_point.begin(), zero_point.end());
  }
  const std::vector<float> outer = CopyElements<float>(scales.outer_scale);
  whole.mutable_outer_scale()->Assign(outer.begin(), outer.end());
  return whole;
}

}  // namespace quantd
