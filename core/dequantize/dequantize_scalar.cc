#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/types/span.h"
#include "core/dequantize/dequantize_kernel.h"
#include "core/formats/codec.h"
#include "core/formats/packing.h"
#include "core/types/float_convert.h"

namespace quantd::core {
namespace {

// Value that a code stands for under scale 1; exact, except for int32 in
// float32, where it is rounded to the nearest.
template <typename T>
T ValueOf(const DequantizeRange& range, int32_t code, int32_t zero_point) {
  switch (range.format.kind) {
    case CodeKind::kInteger:
      return static_cast<T>(code - zero_point);
    case CodeKind::kFloat: {
      const uint32_t mask = (uint32_t{1} << range.format.bits) - 1;
      return DecodeFloat(range.format.float_layout,
                         static_cast<uint32_t>(code) & mask);
    }
    case CodeKind::kCodebook: {
      const absl::Span<const float> codebook = CodebookOf(range.encoding);
      const size_t index = static_cast<size_t>(code);
      return index < codebook.size() ? codebook[index]
                                     : std::numeric_limits<T>::quiet_NaN();
    }
  }
  return 0;
}

template <typename T>
void DequantizeAll(const DequantizeRange& range) {
  const Encoding& encoding = range.encoding;
  range.layout.ForEachRun(
      range.first, range.count, [&](const BlockLayout::Run& run) {
        for (int64_t k = 0; k < run.count; ++k) {
          const int64_t scale_index = run.scale_index + k * run.scale_step;
          const int64_t i = run.begin + k - range.first;
          const int32_t zero_point = encoding.zero_point.empty()
                                         ? 0
                                         : encoding.zero_point[scale_index];
          const int32_t code = LoadCode(range.format, range.in, i);
          const T value =
              encoding.real_zero_point.empty()
                  ? ValueOf<T>(range, code, zero_point)
                  : static_cast<T>(code) -
                        static_cast<T>(encoding.real_zero_point[scale_index]);
          const T scale = encoding.scale[scale_index];
          StoreElement<T>(range.type, value * scale, range.out, i);
        }
      });
}

}  // namespace

void DequantizeScalar(const DequantizeRange& range) {
  if (range.type == ElementType::kFloat64) {
    DequantizeAll<double>(range);
  } else {
    DequantizeAll<float>(range);
  }
}

}  // namespace quantd::core
