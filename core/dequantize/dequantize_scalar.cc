#include <cstdint>

#include "core/dequantize/dequantize_kernel.h"
#include "core/formats/packing.h"
#include "core/types/float_convert.h"

namespace quantd::core {
namespace {

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
          const int32_t difference =
              LoadCode(range.format, range.in, i) - zero_point;
          const T scale = encoding.scale[scale_index];
          StoreElement<T>(range.type, static_cast<T>(difference) * scale,
                          range.out, i);
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
