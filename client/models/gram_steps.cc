#include "client/models/gram_steps.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/base/casts.h"
#include "absl/types/span.h"
#include "client/cpp/tensor.h"
#include "client/files/dtype.h"
#include "client/models/tensor_input.h"

namespace quantd {
namespace {

// The largest magnitude of each feature of [rows, features], as the integer
// that its bits are; those from `infinity` on do not count.
template <typename Int>
std::vector<Int> LargestBitsOfFeatures(absl::Span<const uint8_t> data,
                                       size_t features, Int mask,
                                       Int infinity) {
  std::vector<Int> largest(features, Int{0});
  std::vector<Int> row(features);
  const size_t row_bytes = features * sizeof(Int);
  for (size_t at = 0; at + row_bytes <= data.size(); at += row_bytes) {
    std::memcpy(row.data(), data.data() + at, row_bytes);
    for (size_t i = 0; i < features; ++i) {
      const Int magnitude = static_cast<Int>(row[i] & mask);
      const Int finite = magnitude < infinity ? magnitude : Int{0};
      largest[i] = std::max(largest[i], finite);
    }
  }
  return largest;
}

std::vector<float> LargestMagnitudes(ElementType type,
                                     absl::Span<const uint8_t> data,
                                     size_t features) {
  std::vector<float> largest;
  largest.reserve(features);
  switch (type) {
    case ElementType::kFloat16:
      for (const int16_t bits :
           LargestBitsOfFeatures<int16_t>(data, features, 0x7FFF, 0x7C00)) {
        uint8_t bytes[sizeof(bits)];
        std::memcpy(bytes, &bits, sizeof(bits));
        largest.push_back(files::ReadHalf(bytes));
      }
      break;
    case ElementType::kBfloat16:
      for (const int16_t bits :
           LargestBitsOfFeatures<int16_t>(data, features, 0x7FFF, 0x7F80)) {
        largest.push_back(
            absl::bit_cast<float>(static_cast<int32_t>(bits) << 16));
      }
      break;
    case ElementType::kFloat32:
      for (const int32_t bits : LargestBitsOfFeatures<int32_t>(
               data, features, 0x7FFFFFFF, 0x7F800000)) {
        largest.push_back(absl::bit_cast<float>(bits));
      }
      break;
    case ElementType::kFloat64:
      // The service rounds to float32, which is infinite from there on.
      for (const int64_t bits : LargestBitsOfFeatures<int64_t>(
               data, features, 0x7FFFFFFFFFFFFFFF, 0x47EFFFFFF0000000)) {
        largest.push_back(static_cast<float>(absl::bit_cast<double>(bits)));
      }
      break;
  }
  return largest;
}

}  // namespace

std::vector<int> GramSteps(const files::FileTensor& tensor) {
  constexpr int kMinExponent = -149;
  constexpr int kMaxExponent = 116;
  const std::shared_ptr<const void> hold = tensor.Hold();
  const std::vector<float> largest =
      LargestMagnitudes(*ElementTypeOf(tensor.dtype), tensor.data,
                        static_cast<size_t>(tensor.shape.back()));
  const float most = *std::max_element(largest.begin(), largest.end());
  std::vector<int> exponents;
  exponents.reserve(largest.size());
  for (const float value : largest) {
    const float seen = value > 0 ? value : most > 0 ? most : 1.0f;
    exponents.push_back(
        std::clamp(std::ilogb(seen) - 11, kMinExponent, kMaxExponent));
  }
  return exponents;
}

}  // namespace quantd
