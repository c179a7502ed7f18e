// Evaluating one leaf: the contract between evaluate.cc and its kernels, and
// their scalar definition.

#ifndef QUANTD_CORE_EVALUATE_EVALUATE_KERNEL_H_
#define QUANTD_CORE_EVALUATE_EVALUATE_KERNEL_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/optional.h"
#include "core/evaluate/distribution.h"
#include "core/evaluate/evaluate.h"
#include "core/formats/grid.h"
#include "core/formats/number_format.h"
#include "core/parallel/thread_pool.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"

namespace quantd::core {

// Lanes of the sums of a leaf.
constexpr int64_t kSumLanes = 16;
// Leaves of a task.
constexpr int64_t kTaskLeaves = 64;

// Values that codes other than integers stand for.
struct CodeValues {
  // Requires: a valid encoding.
  explicit CodeValues(const Encoding& encoding);

  const CodeKind kind;
  // The one of the kind.
  absl::optional<FloatGrid> float_grid;
  absl::optional<CodebookGrid> codebook_grid;
};

// Consecutive leaves of a tensor.
struct EvaluateRange {
  const Encoding& encoding;
  const CodeValues& values;
  const BlockLayout& layout;
  ElementType type;
  // A multiple of Evaluator::kLeafElements.
  int64_t first;
  int64_t count;
  const uint8_t* in;
  // Sums that kernels have to add up; they may add up more.
  ErrorSumSet sums;
};

// The sums of a run's part within a leaf; of one element where every element
// has a scale index of its own.
struct ScalePortion {
  int64_t scale_index;
  ErrorSums sums;
};

// The truth, one element after the other. `leaves` takes the sums of each leaf
// [ceil(count / kLeafElements)]; `portions`, unless null, gets the parts of the
// scale indices appended in order; `distribution`, unless null, the pairs.
void EvaluateScalar(const EvaluateRange& range, ErrorSums* leaves,
                    std::vector<ScalePortion>* portions,
                    DistributionCounts* distribution);

// Cuts `count` elements into tasks of kTaskLeaves leaves, at most `wave_tasks`
// at a time, calls task(i, begin, count, leaves) for the i-th of a wave on the
// pool, and adds its leaves to `overall` in order; after_wave(tasks) follows
// every wave.
void SumLeaves(
    int64_t count, int64_t wave_tasks, ThreadPool* pool,
    absl::FunctionRef<void(int64_t, int64_t, int64_t, ErrorSums*)> task,
    absl::FunctionRef<void(int64_t)> after_wave, ErrorSums* overall);

// The sums of lanes in a fixed tree.
inline double AddLanes(const double lanes[kSumLanes]) {
  double sums[kSumLanes];
  for (int64_t i = 0; i < kSumLanes; ++i) sums[i] = lanes[i];
  for (int64_t half = kSumLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

// |e / x|, 0 where x is 0; of float32 the quotient of e rounded to float32,
// rounded likewise, where both are finite in it. Requires: finite.
inline double RelativeError(float real, float restored) {
  if (real == 0) return 0;
  const float relative = std::fabs((restored - real) / real);
  if (std::isfinite(relative)) return relative;
  return std::fabs((double{restored} - double{real}) / double{real});
}
inline double RelativeError(double real, double restored) {
  return real == 0 ? 0 : std::fabs((restored - real) / real);
}

// Sums of the elements of a leaf or portion, the k-th in lane k mod kSumLanes:
// the scalar definition.
class LaneSums {
 public:
  // `T` is float or double. Requires: finite.
  template <typename T>
  void Add(int64_t k, T x, T y) {
    const double relative = RelativeError(x, y);
    const double real = x;
    const double restored = y;
    const double error = std::fabs(restored - real);
    const int64_t lane = k % kSumLanes;
    ++sums_.count;
    sums_.zero_flushed += real != 0 && restored == 0;
    squared_error_[lane] += error * error;
    absolute_error_[lane] += error;
    relative_error_[lane] += relative;
    signal_[lane] += real * real;
    reconstructed_[lane] += restored * restored;
    product_[lane] += real * restored;
    sums_.max_absolute_error = std::fmax(sums_.max_absolute_error, error);
    sums_.max_relative_error = std::fmax(sums_.max_relative_error, relative);
  }
  void AddNonFinite() { ++sums_.non_finite; }
  void AddClipped(bool low, bool high) {
    sums_.clipped_low += low;
    sums_.clipped_high += high;
  }

  ErrorSums Total() const {
    ErrorSums sums = sums_;
    sums.squared_error = AddLanes(squared_error_);
    sums.absolute_error = AddLanes(absolute_error_);
    sums.relative_error = AddLanes(relative_error_);
    sums.signal = AddLanes(signal_);
    sums.reconstructed = AddLanes(reconstructed_);
    sums.product = AddLanes(product_);
    return sums;
  }

 private:
  // The counts and maxima.
  ErrorSums sums_;
  double squared_error_[kSumLanes] = {};
  double absolute_error_[kSumLanes] = {};
  double relative_error_[kSumLanes] = {};
  double signal_[kSumLanes] = {};
  double reconstructed_[kSumLanes] = {};
  double product_[kSumLanes] = {};
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_EVALUATE_EVALUATE_KERNEL_H_
