#include "client/models/outer_maximum.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/base/casts.h"
#include "absl/types/span.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "client/models/tensor_input.h"

namespace quantd {
namespace {

// Magnitudes compare as the integers that their bits are; from `infinity` on
// they are not finite. Signed, because vectors compare those.
template <typename Int>
Int LargestBits(const uint8_t* data, int64_t count, Int mask, Int infinity) {
  // Elements that stay in cache while they are brought into place.
  constexpr int64_t kPiece = 4096;
  Int piece[kPiece];
  Int largest = 0;
  while (count > 0) {
    const int64_t size = std::min(count, kPiece);
    std::memcpy(piece, data, static_cast<size_t>(size) * sizeof(Int));
    for (int64_t i = 0; i < size; ++i) {
      const Int magnitude = static_cast<Int>(piece[i] & mask);
      const Int finite = magnitude < infinity ? magnitude : Int{0};
      largest = std::max(largest, finite);
    }
    data += size * static_cast<int64_t>(sizeof(Int));
    count -= size;
  }
  return largest;
}

float Largest(ElementType type, const uint8_t* data, int64_t count) {
  switch (type) {
    case ElementType::kFloat16: {
      const int bits = LargestBits<int16_t>(data, count, 0x7FFF, 0x7C00);
      const int exponent = bits >> 10;
      const int mantissa = bits & 1023;
      return exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                           : std::ldexp(static_cast<float>(1024 + mantissa),
                                        exponent - 25);
    }
    case ElementType::kBfloat16:
      return absl::bit_cast<float>(static_cast<uint32_t>(LargestBits<int16_t>(
                                       data, count, 0x7FFF, 0x7F80))
                                   << 16);
    default:
      return absl::bit_cast<float>(static_cast<uint32_t>(
          LargestBits<int32_t>(data, count, 0x7FFFFFFF, 0x7F800000)));
  }
}

}  // namespace

std::vector<float> OuterMaximum(ElementType type,
                                absl::Span<const int64_t> shape,
                                absl::Span<const int64_t> block_size,
                                absl::Span<const uint8_t> data) {
  const int64_t element_bytes = ElementSizeBytes(type);
  const int64_t count = static_cast<int64_t>(data.size()) / element_bytes;
  if (block_size.empty() || shape.empty()) {
    return {Largest(type, data.data(), count)};
  }
  const std::vector<int64_t> blocks = *ScaleShape(shape, block_size);
  int64_t block_count = 1;
  for (const int64_t size : blocks) block_count *= size;
  std::vector<float> maxima(static_cast<size_t>(block_count), 0.0f);
  if (count == 0) return maxima;
  const auto block_of = [&](size_t d) {
    return block_size[d] == 0 ? shape[d] : block_size[d];
  };
  // Dimensions that no block divides, from the last one on, make one run.
  size_t split = shape.size();
  int64_t run = 1;
  while (split > 0 && block_of(split - 1) >= shape[split - 1]) {
    run *= shape[--split];
  }
  // So does what a block has of the dimension before.
  int64_t piece = run;
  if (split > 0) piece *= block_of(split - 1);
  std::vector<int64_t> at(split, 0);
  int64_t begin = 0;
  while (begin < count) {
    int64_t size = piece;
    if (split > 0) {
      size = std::min(size, (shape[split - 1] - at[split - 1]) * run);
    }
    int64_t index = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      index = index * blocks[d] + (d < split ? at[d] / block_of(d) : 0);
    }
    float& maximum = maxima[static_cast<size_t>(index)];
    maximum = std::max(
        maximum, Largest(type, data.data() + begin * element_bytes, size));
    begin += size;
    if (split == 0) break;
    at[split - 1] += size / run;
    for (size_t d = split - 1; d > 0 && at[d] == shape[d]; --d) {
      at[d] = 0;
      ++at[d - 1];
    }
  }
  return maxima;
}

std::vector<float> OuterMaximumFor(const EncodingSpec& spec,
                                   const files::FileTensor& tensor) {
  const ElementType type = *ElementTypeOf(tensor.dtype);
  const Encoding expected = ExpectedEncoding(spec, tensor.shape);
  const bool is_min_max = spec.method() == v1::CALIBRATION_METHOD_UNSPECIFIED ||
                          spec.method() == v1::CALIBRATION_METHOD_MIN_MAX;
  if (!is_min_max || !HasOuterScales(expected.scale_type()) ||
      type == ElementType::kFloat64) {
    return {};
  }
  const std::vector<int64_t> outer(expected.outer_block_size().begin(),
                                   expected.outer_block_size().end());
  const std::shared_ptr<const void> hold = tensor.Hold();
  return OuterMaximum(type, tensor.shape, outer, tensor.data);
}

}  // namespace quantd
