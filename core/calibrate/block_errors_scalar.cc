#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/types/span.h"
#include "core/calibrate/block_errors.h"
#include "core/formats/codec.h"
#include "core/formats/number_format.h"

namespace quantd::core {
namespace {

template <typename T>
struct Deviation {
  T distance;
  bool is_clipped;
};

template <typename T>
Deviation<T> DeviationOf(const BlockGrid& grid, T quotient, T low, T high) {
  switch (grid.format.kind) {
    case CodeKind::kInteger: {
      const T distance =
          quotient - std::nearbyint(std::min(std::max(quotient, low), high));
      return {distance, std::fabs(distance) > T{kClippedDistance}};
    }
    case CodeKind::kFloat: {
      const FloatLayout& layout = grid.format.float_layout;
      const T largest = LargestFloat(layout);
      const T number = DecodeFloat(
          layout, EncodeFloat(layout, std::min(quotient, largest), true));
      return {quotient - number, quotient >= OverflowThreshold(layout)};
    }
    case CodeKind::kCodebook:
      break;
  }
  const absl::Span<const float> entries(grid.codebook->entry,
                                        grid.codebook->count);
  const T entry = entries[EncodeCodebook(entries, quotient)];
  return {quotient - entry,
          quotient < entries.front() || quotient > entries.back()};
}

template <typename T>
T PutTogether(const T* sums) {
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

template <typename T>
struct TwoSums {
  T first = 0;
  T second = 0;
};

// Both sums of what `add(i, &first, &second)` adds for each element.
template <typename T, typename Add>
TwoSums<T> SumElements(int64_t count, const Add& add) {
  TwoSums<T> sums;
  for (int64_t begin = 0; begin < count; begin += kErrorChunk) {
    T first[kErrorSums] = {};
    T second[kErrorSums] = {};
    const int64_t end = std::min(count, begin + kErrorChunk);
    for (int64_t i = begin; i < end; ++i) {
      add(i, &first[i % kErrorSums], &second[i % kErrorSums]);
    }
    sums.first += PutTogether(first);
    sums.second += PutTogether(second);
  }
  return sums;
}

}  // namespace

template <typename T>
int64_t SumBlockErrorsScalar(const BlockGrid& grid, const T* x, int64_t count,
                             const BlockTrials<T>& trials) {
  int64_t best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t k = 0; k < trials.count; ++k) {
    const T inverse = T{1} / trials.scale[k];
    const T low =
        trials.low == nullptr ? static_cast<T>(grid.qmin) : trials.low[k];
    const T high =
        trials.high == nullptr ? static_cast<T>(grid.qmax) : trials.high[k];
    const TwoSums<T> sums =
        SumElements<T>(count, [&](int64_t i, T* squares, T* clipped) {
          const Deviation<T> deviation =
              DeviationOf(grid, x[i] * inverse, low, high);
          T square = deviation.distance * deviation.distance;
          if (trials.weight != nullptr) square *= trials.weight[i];
          *squares += square;
          if (deviation.is_clipped) *clipped += square;
        });
    const double scale = trials.scale[k];
    const double unit = scale * scale;
    double error = sums.first;
    if (trials.gamma != 1) error += (trials.gamma - 1) * double{sums.second};
    error *= unit;
    trials.errors[k] = error;
    if (trials.clipped != nullptr) {
      trials.clipped[k] = double{sums.second} * unit;
    }
    if (!(error < least)) continue;
    least = error;
    best = k;
  }
  return best;
}

template <typename T>
void SumBeyondEndsScalar(const T* x, int64_t count, const BlockEnds<T>& ends) {
  for (int64_t k = 0; k < ends.count; ++k) {
    const TwoSums<T> sums =
        SumElements<T>(count, [&](int64_t i, T* below, T* above) {
          const T weight = ends.weight == nullptr ? T{1} : ends.weight[i];
          const T under = std::max(ends.low[k] - x[i], T{0});
          const T over = std::max(x[i] - ends.high[k], T{0});
          *below += under * under * weight;
          *above += over * over * weight;
        });
    ends.below[k] = sums.first;
    ends.above[k] = sums.second;
  }
}

template int64_t SumBlockErrorsScalar(const BlockGrid&, const float*, int64_t,
                                      const BlockTrials<float>&);
template int64_t SumBlockErrorsScalar(const BlockGrid&, const double*, int64_t,
                                      const BlockTrials<double>&);
template void SumBeyondEndsScalar(const float*, int64_t,
                                  const BlockEnds<float>&);
template void SumBeyondEndsScalar(const double*, int64_t,
                                  const BlockEnds<double>&);

}  // namespace quantd::core
