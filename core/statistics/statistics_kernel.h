// Statistics of one range on one thread: the contract between
// tensor_statistics.cc and its kernels, and their scalar definition.

#ifndef QUANTD_CORE_STATISTICS_STATISTICS_KERNEL_H_
#define QUANTD_CORE_STATISTICS_STATISTICS_KERNEL_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"

namespace quantd::core {

// The extremes of no element.
constexpr Extremes kNoExtremes = {std::numeric_limits<double>::infinity(),
                                  -std::numeric_limits<double>::infinity()};

// The largest blocks that are reduced many at a time.
constexpr int64_t kMaxGroup = 128;

// The arguments of TensorStatistics::Update, less the threads.
struct StatisticsRange {
  const BlockLayout& layout;
  ElementType type;
  int64_t first;
  int64_t count;
  const uint8_t* in;
};

// Statistics that one range adds. Their size follows the range, not the number
// of scales.
struct PartialStatistics {
  // The extremes of one scale index.
  struct Single {
    int64_t scale_index;
    Extremes extremes;
  };
  // Extremes of scale indices [scale_index, scale_index + extremes.size()).
  struct Segment {
    int64_t scale_index;
    std::vector<Extremes> extremes;
  };

  ElementCounts counts;
  // In any order, with repetitions.
  absl::InlinedVector<Single, 4> singles;
  std::vector<Segment> segments;
  // Scale indices that had a non-finite element, in any order, with
  // repetitions.
  std::vector<int64_t> non_finite;

  void MarkNonFinite(int64_t scale_index) {
    if (non_finite.empty() || non_finite.back() != scale_index) {
      non_finite.push_back(scale_index);
    }
  }
};

// On the SIMD target in use. The same as StatisticsScalar, but the parts of one
// scale index may be cut differently, and a zero extreme may be -0.
void ComputeStatistics(const StatisticsRange& range,
                       PartialStatistics* partial);

// The truth: one element after the other, as tensor_statistics.h says it.
void StatisticsScalar(const StatisticsRange& range, PartialStatistics* partial);

}  // namespace quantd::core

#endif  // QUANTD_CORE_STATISTICS_STATISTICS_KERNEL_H_
