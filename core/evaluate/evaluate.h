// The error of quantizing and dequantizing.

#ifndef QUANTD_CORE_EVALUATE_EVALUATE_H_
#define QUANTD_CORE_EVALUATE_EVALUATE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "core/evaluate/distribution.h"
#include "core/parallel/thread_pool.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"

namespace quantd::core {

// Sums over the elements of which both x and x' = dequantize(quantize(x)) are
// finite. The others count as non-finite and nowhere else: x is NaN or
// infinite, the scale is NaN, or a format that does not saturate overflows.
//
// x' has the arithmetic type (float32, or float64 for float64 tensors): it is
// not rounded to float16 or bfloat16. e = x' - x, products and sums are in
// float64. For float64 tensors, so is |e / x|. Otherwise e is rounded to
// float32, and so is the quotient, which is within 2^-23 of the exact one where
// it is normal. Where float32 cannot hold either, the quotient is in float64.
// Clipped: see quantize.h.
struct ErrorSums {
  int64_t count = 0;        // elements that the sums are over
  int64_t non_finite = 0;   // the others
  int64_t clipped_low = 0;  // of those that count, below the range
  int64_t clipped_high = 0;
  int64_t zero_flushed = 0;   // x != 0, x' == 0
  double squared_error = 0;   // sum of e^2
  double absolute_error = 0;  // sum of |e|
  double relative_error = 0;  // sum of |e / x|, 0 where x is 0
  double signal = 0;          // sum of x^2
  double reconstructed = 0;   // sum of x'^2
  double product = 0;         // sum of x x'
  double max_absolute_error = 0;
  double max_relative_error = 0;

  void Add(const ErrorSums& other);

  // Derived figures; see quantd.v1.ErrorMetrics.
  double MeanSquaredError() const;   // 0 when count is 0
  double MeanAbsoluteError() const;  // 0 when count is 0
  double MeanRelativeError() const;  // 0 when count is 0
  // NaN when count is 0.
  double SqnrDb() const;  // +Inf without errors, NaN when their squares are 0
  double CosineSimilarity() const;  // 1 when both are zero, 0 when one is
};

// Values that codes stand for, made ready for the kernels.
struct CodeValues;

// Set of ErrorSums that somebody will look at. Those have the same bits with
// either set; the others may be anything.
enum class ErrorSumSet {
  kAll,
  // count, non_finite, clipped_low, clipped_high, squared_error, signal and
  // max_absolute_error: less than half of the work.
  kNoise,
};

struct EvaluateOptions {
  // Keep sums per scale index as well.
  bool per_scale_index = false;
  // Keep what ErrorDistribution needs.
  bool with_distribution = false;
  ErrorSumSet sums = ErrorSumSet::kAll;
};

// Measures one encoding on one tensor that arrives in order.
//
// The elements' indices fix the order of sums:
//
// - The tensor is cut into leaves of kLeafElements, which are added in order.
// - In a leaf, element k adds to lane k mod 16. The lanes are added in a fixed
//   tree.
// - For sums per scale index, the part of a run (see BlockLayout) within a leaf
//   takes the leaf's place.
//
// So the result is the same for any number of threads and any SIMD target. Not
// thread-safe.
class Evaluator {
 public:
  static constexpr int64_t kLeafElements = 1024;

  // `encoding` and `layout` must outlive the evaluator.
  // Requires: a valid encoding that fits `layout`.
  Evaluator(const Encoding& encoding, const BlockLayout& layout,
            ElementType type, const EvaluateOptions& options);
  ~Evaluator();

  // Takes in elements [first, first + count).
  // `data`  [count] elements of the type, any alignment.
  // `pool`  spreads a large range over its threads; may be null.
  // Requires: first is a multiple of kLeafElements and where the last call
  // ended; count is a multiple of kLeafElements or up to the tensor's end.
  void Update(int64_t first, int64_t count, const uint8_t* data,
              ThreadPool* pool);

  const ErrorSums& overall() const { return overall_; }
  // Requires: with_distribution.
  ErrorDistribution distribution() const {
    return distribution_->Distribution();
  }
  // [scale_count] row-major, or empty.
  absl::Span<const ErrorSums> per_scale_index() const {
    return per_scale_index_;
  }

 private:
  const Encoding& encoding_;
  const BlockLayout& layout_;
  ElementType type_;
  const ErrorSumSet sums_;
  const std::unique_ptr<const CodeValues> values_;
  ErrorSums overall_;
  std::vector<ErrorSums> per_scale_index_;
  // Null unless asked for.
  std::unique_ptr<DistributionCounts> distribution_;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_EVALUATE_EVALUATE_H_
