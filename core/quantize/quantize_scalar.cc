#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "absl/types/span.h"
#include "core/formats/codec.h"
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
    return std::isnan(scale) ? 0 : nan_code;
  }
  if (std::isinf(x)) {
    ++(x > 0 ? counts->positive_infinity : counts->negative_infinity);
  }
  if (std::isnan(scale)) return 0;
  // Codes less the zero point: all of these are exact in T, but those of int32,
  // which has no zero points. It is clamped where they are exact.
  const int32_t least = encoding.qmin - zero_point;
  const int32_t most = encoding.qmax - zero_point;
  const T rounded = std::nearbyint(x / scale);
  if (rounded < static_cast<T>(least)) ++counts->clipped_low;
  if (rounded > static_cast<T>(most)) ++counts->clipped_high;
  return static_cast<int32_t>(std::clamp<double>(rounded, least, most)) +
         zero_point;
}

// Like QuantizeElement, but with a real zero point.
template <typename T>
int32_t QuantizeAffine(T x, T scale, T zero_point, const QuantizeRange& range,
                       QuantizeCounts* counts) {
  const Encoding& encoding = range.encoding;
  if (std::isnan(x)) {
    ++counts->nan;
    return range.NanCode(static_cast<int32_t>(std::nearbyint(zero_point)));
  }
  if (std::isinf(x)) {
    ++(x > 0 ? counts->positive_infinity : counts->negative_infinity);
  }
  const T low = static_cast<T>(encoding.qmin);
  const T high = static_cast<T>(encoding.qmax);
  const T rounded = std::nearbyint(x / scale + zero_point);
  if (rounded < low) ++counts->clipped_low;
  if (rounded > high) ++counts->clipped_high;
  return static_cast<int32_t>(std::clamp(rounded, low, high));
}

// Codes of floats and codebooks.
template <typename T>
int32_t EncodeElement(T x, T scale, int32_t nan_code,
                      const QuantizeRange& range, QuantizeCounts* counts) {
  const FormatInfo& format = range.format;
  const bool is_float = format.kind == CodeKind::kFloat;
  const absl::Span<const float> codebook = CodebookOf(range.encoding);
  counts->nan += std::isnan(x);
  counts->positive_infinity += std::isinf(x) && x > 0;
  counts->negative_infinity += std::isinf(x) && x < 0;
  if (std::isnan(x) && !std::isnan(scale)) return nan_code;
  // The zero point: it makes +0 of -0.
  const T quotient = x / scale + T{0};
  if (is_float) {
    const double threshold = OverflowThreshold(format.float_layout);
    counts->clipped_low += quotient <= -threshold;
    counts->clipped_high += quotient >= threshold;
  } else {
    counts->clipped_low += quotient < codebook.front();
    counts->clipped_high += quotient > codebook.back();
  }
  return static_cast<int32_t>(is_float
                                  ? EncodeFloat(format.float_layout, quotient,
                                                !range.encoding.no_saturation)
                                  : EncodeCodebook(codebook, quotient));
}

template <typename T>
void QuantizeAll(const QuantizeRange& range, QuantizeCounts* counts) {
  const Encoding& encoding = range.encoding;
  range.layout.ForEachRun(
      range.first, range.count, [&](const BlockLayout::Run& run) {
        for (int64_t k = 0; k < run.count; ++k) {
          const int64_t scale_index = run.scale_index + k * run.scale_step;
          const int64_t i = run.begin + k - range.first;
          const T x = LoadElement<T>(range.type, range.in, i);
          const T scale = encoding.scale[scale_index];
          if (!encoding.real_zero_point.empty()) {
            StoreCode(range.format,
                      QuantizeAffine<T>(x, scale,
                                        encoding.real_zero_point[scale_index],
                                        range, counts),
                      i, range.out);
            continue;
          }
          const int32_t zero_point = range.zero_point(scale_index);
          const int32_t nan_code = range.NanCode(zero_point);
          const int32_t code =
              range.format.kind == CodeKind::kInteger
                  ? QuantizeElement<T>(x, scale, zero_point, nan_code, encoding,
                                       counts)
                  : EncodeElement<T>(x, scale, nan_code, range, counts);
          StoreCode(range.format, code, i, range.out);
        }
      });
}

}  // namespace

int32_t QuantizeRange::NanCode(int32_t zero_point) const {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  switch (format.kind) {
    case CodeKind::kInteger:
      return nan_policy == NanPolicy::kQmin
                 ? encoding.qmin
                 : std::clamp(zero_point, encoding.qmin, encoding.qmax);
    case CodeKind::kFloat:
      return static_cast<int32_t>(EncodeFloat(
          format.float_layout,
          nan_policy == NanPolicy::kQmin ? -LargestFloat(format.float_layout)
          : nan_policy == NanPolicy::kZeroPoint ? 0
                                                : kNan,
          !encoding.no_saturation));
    case CodeKind::kCodebook:
      return nan_policy == NanPolicy::kQmin
                 ? 0
                 : static_cast<int32_t>(
                       EncodeCodebook(CodebookOf(encoding), kNan));
  }
  return 0;
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
