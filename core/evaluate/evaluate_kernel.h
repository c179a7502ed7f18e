// Evaluating one leaf: the contract between evaluate.cc and its kernels, and
// their scalar definition.

#ifndef QUANTD_CORE_EVALUATE_EVALUATE_KERNEL_H_
#define QUANTD_CORE_EVALUATE_EVALUATE_KERNEL_H_

#include <cstdint>
#include <vector>

#include "core/evaluate/evaluate.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"

namespace quantd::core {

// Lanes of the sums of a leaf.
constexpr int64_t kSumLanes = 16;

// Consecutive leaves of a tensor.
struct EvaluateRange {
  const Encoding& encoding;
  const BlockLayout& layout;
  ElementType type;
  // A multiple of Evaluator::kLeafElements.
  int64_t first;
  int64_t count;
  const uint8_t* in;
};

// The sums of a run's part within a leaf; of one element where every element
// has a scale index of its own.
struct ScalePortion {
  int64_t scale_index;
  ErrorSums sums;
};

// The truth, one element after the other. `leaves` takes the sums of each leaf
// [ceil(count / kLeafElements)]; `portions`, unless null, gets the parts of the
// scale indices appended in order.
void EvaluateScalar(const EvaluateRange& range, ErrorSums* leaves,
                    std::vector<ScalePortion>* portions);

// The sums of lanes in a fixed tree.
inline double AddLanes(const double lanes[kSumLanes]) {
  double sums[kSumLanes];
  for (int64_t i = 0; i < kSumLanes; ++i) sums[i] = lanes[i];
  for (int64_t half = kSumLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

}  // namespace quantd::core

#endif  // QUANTD_CORE_EVALUATE_EVALUATE_KERNEL_H_
