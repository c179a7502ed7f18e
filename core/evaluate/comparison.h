// The error of one tensor against another.

#ifndef QUANTD_CORE_EVALUATE_COMPARISON_H_
#define QUANTD_CORE_EVALUATE_COMPARISON_H_

#include <cstdint>
#include <memory>

#include "core/evaluate/distribution.h"
#include "core/evaluate/evaluate.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/element_type.h"

namespace quantd::core {

// Measures a test tensor against a reference; their elements come in pairs,
// reference first. Sums as in Evaluator, with the test for x'; a pair of which
// either is not finite counts as one non-finite element; nothing is clipped.
// Not thread-safe.
class Comparison {
 public:
  Comparison(ElementType type, bool with_distribution,
             ErrorSumSet sums = ErrorSumSet::kAll);

  // Takes in pairs [first, first + count).
  // `data`  [2 * count] elements of the type, any alignment.
  // `pool`  spreads a large range over its threads; may be null.
  // Requires: first is a multiple of Evaluator::kLeafElements and where the
  // last call ended; count is a multiple of it or up to the tensor's end.
  void Update(int64_t first, int64_t count, const uint8_t* data,
              ThreadPool* pool);

  const ErrorSums& overall() const { return overall_; }
  // Counts and extremes of the reference, per tensor.
  const TensorStatistics& reference() const { return reference_; }
  // Requires: with_distribution.
  ErrorDistribution distribution() const {
    return distribution_->Distribution();
  }

 private:
  const ElementType type_;
  const ErrorSumSet sums_;
  ErrorSums overall_;
  TensorStatistics reference_;
  // Null unless asked for.
  std::unique_ptr<DistributionCounts> distribution_;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_EVALUATE_COMPARISON_H_
