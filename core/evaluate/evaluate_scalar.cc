#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "core/evaluate/evaluate_kernel.h"
#include "core/formats/codec.h"
#include "core/types/float_convert.h"

namespace quantd::core {
namespace {

// One element, quantized and dequantized.
template <typename T>
struct Pair {
  T real;
  T restored;
  bool clipped_low;
  bool clipped_high;

  bool is_finite() const {
    return std::isfinite(real) && std::isfinite(restored);
  }
};

template <typename T>
Pair<T> Restore(T x, int64_t scale_index, const Encoding& encoding,
                const FormatInfo& format) {
  const T scale = encoding.scale[scale_index];
  const T quotient = x / scale;
  switch (format.kind) {
    case CodeKind::kInteger: {
      if (!encoding.real_zero_point.empty()) {
        const T zero = encoding.real_zero_point[scale_index];
        const T least = static_cast<T>(encoding.qmin);
        const T most = static_cast<T>(encoding.qmax);
        const T code = std::nearbyint(quotient + zero);
        return {x, (std::clamp(code, least, most) - zero) * scale,
                code<least, code> most};
      }
      const int32_t zero_point =
          encoding.zero_point.empty() ? 0 : encoding.zero_point[scale_index];
      // With int32 these ends and the product below are rounded, as they are
      // where codes are made and restored.
      const T low = static_cast<T>(encoding.qmin - zero_point);
      const T high = static_cast<T>(encoding.qmax - zero_point);
      const T rounded = std::nearbyint(quotient);
      return {x, std::clamp(rounded, low, high) * scale,
              rounded<low, rounded> high};
    }
    case CodeKind::kFloat: {
      const FloatLayout& layout = format.float_layout;
      const double overflow = OverflowThreshold(layout);
      const uint32_t code =
          EncodeFloat(layout, quotient, !encoding.no_saturation);
      return {x, DecodeFloat(layout, code) * scale, quotient <= -overflow,
              quotient >= overflow};
    }
    case CodeKind::kCodebook:
      break;
  }
  const absl::Span<const float> codebook = CodebookOf(encoding);
  return {x, codebook[EncodeCodebook(codebook, quotient)] * scale,
          quotient<codebook.front(), quotient> codebook.back()};
}

// An element that is left out still takes its place, so that lanes do not
// depend on it.
template <typename T>
void Add(int64_t k, const Pair<T>& pair, LaneSums* sums) {
  if (!pair.is_finite()) {
    sums->AddNonFinite();
    return;
  }
  sums->Add(k, pair.real, pair.restored);
  sums->AddClipped(pair.clipped_low, pair.clipped_high);
}

template <typename T>
void EvaluateLeaf(const EvaluateRange& range, int64_t begin, int64_t count,
                  ErrorSums* leaf, std::vector<ScalePortion>* portions,
                  DistributionCounts* distribution) {
  const FormatInfo& format = *FindFormat(range.encoding.format);
  LaneSums leaf_sums;
  range.layout.ForEachRun(begin, count, [&](const BlockLayout::Run& run) {
    LaneSums run_sums;
    for (int64_t k = 0; k < run.count; ++k) {
      const int64_t scale_index = run.scale_index + k * run.scale_step;
      const int64_t i = run.begin + k;
      const Pair<T> pair =
          Restore(LoadElement<T>(range.type, range.in, i - range.first),
                  scale_index, range.encoding, format);
      Add(i - begin, pair, &leaf_sums);
      if (distribution != nullptr && pair.is_finite()) {
        distribution->Add(&pair.real, &pair.restored, 1, 0);
      }
      if (portions == nullptr) continue;
      if (run.scale_step == 1) {
        LaneSums element_sums;
        Add(0, pair, &element_sums);
        portions->push_back({scale_index, element_sums.Total()});
      } else {
        Add(k, pair, &run_sums);
      }
    }
    if (portions != nullptr && run.scale_step == 0) {
      portions->push_back({run.scale_index, run_sums.Total()});
    }
  });
  *leaf = leaf_sums.Total();
}

}  // namespace

void EvaluateScalar(const EvaluateRange& range, ErrorSums* leaves,
                    std::vector<ScalePortion>* portions,
                    DistributionCounts* distribution) {
  for (int64_t begin = 0; begin < range.count;
       begin += Evaluator::kLeafElements) {
    const int64_t count =
        std::min(Evaluator::kLeafElements, range.count - begin);
    if (range.type == ElementType::kFloat64) {
      EvaluateLeaf<double>(range, range.first + begin, count, leaves++,
                           portions, distribution);
    } else {
      EvaluateLeaf<float>(range, range.first + begin, count, leaves++, portions,
                          distribution);
    }
  }
}

}  // namespace quantd::core
