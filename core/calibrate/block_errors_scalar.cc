#include <algorithm>
#include <cmath>
#include <cstdint>

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

}  // namespace

template <typename T>
void SumBlockErrorsScalar(const BlockGrid& grid, const T* x, int64_t count,
                          const BlockTrials<T>& trials) {
  for (int64_t k = 0; k < trials.count; ++k) {
    T squares = 0;
    T clipped = 0;
    for (int64_t begin = 0; begin < count; begin += kErrorChunk) {
      T square_sums[kErrorSums] = {};
      T clipped_sums[kErrorSums] = {};
      const int64_t end = std::min(count, begin + kErrorChunk);
      for (int64_t i = begin; i < end; ++i) {
        const Deviation<T> deviation = DeviationOf(
            grid, x[i] * trials.inverse[k], trials.low[k], trials.high[k]);
        const T square = deviation.distance * deviation.distance;
        square_sums[i % kErrorSums] += square;
        if (deviation.is_clipped) clipped_sums[i % kErrorSums] += square;
      }
      squares += PutTogether(square_sums);
      clipped += PutTogether(clipped_sums);
    }
    trials.squares[k] = squares;
    if (trials.clipped != nullptr) trials.clipped[k] = clipped;
  }
}

template void SumBlockErrorsScalar(const BlockGrid&, const float*, int64_t,
                                   const BlockTrials<float>&);
template void SumBlockErrorsScalar(const BlockGrid&, const double*, int64_t,
                                   const BlockTrials<double>&);

}  // namespace quantd::core
