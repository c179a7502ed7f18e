#include "client/cpp/scale_chunks.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/element_bytes.h"
#include "client/cpp/errors.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"

namespace quantd::internal {
namespace {

template <typename Wide, typename Narrow>
std::vector<Wide> Widen(absl::Span<const uint8_t> bytes) {
  const std::vector<Narrow> values = CopyElements<Narrow>(bytes);
  return std::vector<Wide>(values.begin(), values.end());
}

template <typename Narrow>
std::string Narrowed(absl::Span<const uint8_t> int32s) {
  std::string bytes(int32s.size() / sizeof(int32_t) * sizeof(Narrow), '\0');
  size_t at = 0;
  for (const int32_t value : CopyElements<int32_t>(int32s)) {
    const Narrow narrow = static_cast<Narrow>(value);
    std::memcpy(&bytes[at], &narrow, sizeof(narrow));
    at += sizeof(narrow);
  }
  return bytes;
}

}  // namespace

int64_t ZeroPointSizeBytes(const Encoding& encoding) {
  if (encoding.exclude_zero() || encoding.zero_points_are_real()) return 4;
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(encoding.format());
  return format.ok() ? std::max(format->storage_bits / 8, 1) : 1;
}

absl::StatusOr<uint64_t> CountOfChunk(const Encoding& encoding,
                                      const v1::ScaleChunk& chunk) {
  const auto scale_bytes =
      static_cast<uint64_t>(ScaleSizeBytes(ScaleTypeOf(encoding)));
  const uint64_t count = chunk.scale().size() / scale_bytes;
  const uint64_t zero_point_bytes =
      encoding.chunks_have_zero_points()
          ? count * static_cast<uint64_t>(ZeroPointSizeBytes(encoding))
          : 0;
  if (chunk.scale().size() % scale_bytes != 0 ||
      chunk.zero_point().size() != zero_point_bytes ||
      chunk.outer_scale().size() % sizeof(float) != 0) {
    return ResponseMalformedError("a chunk of scales that are not whole");
  }
  return count;
}

std::vector<int32_t> WidenZeroPoints(const Encoding& encoding,
                                     absl::Span<const uint8_t> bytes) {
  const bool is_signed = GetFormatInfo(encoding.format())->is_signed;
  switch (ZeroPointSizeBytes(encoding)) {
    case 4:
      return CopyElements<int32_t>(bytes);
    case 2:
      return is_signed ? Widen<int32_t, int16_t>(bytes)
                       : Widen<int32_t, uint16_t>(bytes);
    default:
      return is_signed ? Widen<int32_t, int8_t>(bytes)
                       : Widen<int32_t, uint8_t>(bytes);
  }
}

std::string NarrowZeroPoints(const Encoding& encoding,
                             absl::Span<const uint8_t> int32s) {
  switch (ZeroPointSizeBytes(encoding)) {
    case 4:
      return std::string(reinterpret_cast<const char*>(int32s.data()),
                         int32s.size());
    case 2:
      return Narrowed<uint16_t>(int32s);
    default:
      return Narrowed<uint8_t>(int32s);
  }
}

int64_t ScalesOfFirst(absl::Span<const int64_t> shape,
                      absl::Span<const int64_t> block_size, int64_t count) {
  if (block_size.empty()) return 1;
  const std::vector<int64_t> scale_shape = *ScaleShape(shape, block_size);
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) {
    strides[d - 1] = strides[d] * shape[d];
  }
  // The largest index is found dimension by dimension. Where a slice before the
  // last one is in the same block, the further dimensions are there whole.
  int64_t rest = count - 1;
  int64_t index = 0;
  bool is_whole = false;
  for (size_t d = 0; d < shape.size(); ++d) {
    const int64_t block = block_size[d] == 0 ? shape[d] : block_size[d];
    int64_t at = scale_shape[d] - 1;
    if (!is_whole) {
      const int64_t coordinate = rest / strides[d];
      rest %= strides[d];
      at = coordinate / block;
      is_whole = coordinate % block != 0;
    }
    index = index * scale_shape[d] + at;
  }
  return index + 1;
}

}  // namespace quantd::internal
