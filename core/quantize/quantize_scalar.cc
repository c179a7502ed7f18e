#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/formats/packing.h"
#include "core/quantize/quantize_kernel.h"
#include "core/types/float_convert.h"

namespace quantd::core {
namespace {

template <typename T>
int32_t QuantizeElement(T x, T scale, int32_t zero_point, int32_t nan_code,
                        const Encoding& encoding, QuantizeCounts* counts) {
  if (std::isnan(x)) {
    ++counts->nan;
    return nan_code;
  }
  if (std::isinf(x)) {
    ++(x > 0 ? counts->positive_infinity : counts->negative_infinity);
  }
  // Codes less the zero point: all of these are exact in T.
  const T low = static_cast<T>(encoding.qmin - zero_point);
  const T high = static_cast<T>(encoding.qmax - zero_point);
  const T rounded = std::nearbyint(x / scale);
  if (rounded < low) ++counts->clipped_low;
  if (rounded > high) ++counts->clipped_high;
  return static_cast<int32_t>(std::clamp(rounded, low, high)) + zero_point;
}

template <typename T>
void QuantizeAll(const QuantizeRange& range, QuantizeCounts* counts) {
  const Encoding& encoding = range.encoding;
  range.layout.ForEachRun(
      range.first, range.count, [&](const BlockLayout::Run& run) {
        for (int64_t k = 0; k < run.count; ++k) {
          const int64_t scale_index = run.scale_index + k * run.scale_step;
          const int64_t i = run.begin + k - range.first;
          const int32_t zero_point = range.zero_point(scale_index);
          const int32_t code =
              QuantizeElement<T>(LoadElement<T>(range.type, range.in, i),
                                 encoding.scale[scale_index], zero_point,
                                 range.NanCode(zero_point), encoding, counts);
          StoreCode(range.format, code, i, range.out);
        }
      });
}

}  // namespace

int32_t QuantizeRange::NanCode(int32_t zero_point) const {
  return nan_policy == NanPolicy::kQmin
             ? encoding.qmin
             : std::clamp(zero_point, encoding.qmin, encoding.qmax);
}

void QuantizeScalar(const QuantizeRange& range, QuantizeCounts* counts) {
  std::memset(range.out, 0, range.format.SizeBytes(range.count));
  counts->total += range.count;
  if (range.type == ElementType::kFloat64) {
    QuantizeAll<double>(range, counts);
  } else {
    QuantizeAll<float>(range, counts);
  }
}

}  // namespace quantd::core
