// The range of one scale index after the other, by any method.

#ifndef QUANTD_CORE_CALIBRATE_RANGE_FINDER_H_
#define QUANTD_CORE_CALIBRATE_RANGE_FINDER_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/distribution.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/entropy.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/range_search.h"
#include "core/calibrate/squared_error.h"
#include "core/parallel/time_slice.h"
#include "core/statistics/held_tensor.h"
#include "core/statistics/histogram.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/encoding.h"

namespace quantd::core {

// The formulas are those of calibrate.h. Immutable, thread-safe.
class RangeFinder {
 public:
  // `encoding`        has the format, qmin, qmax and codebook.
  // `moving_average`  [scale_count] averaged extremes, or empty.
  // What is passed by reference, but for `encoding`, outlives this, as does
  // what `moving_average` points at.
  // `held`            the tensor, or null.
  // Requires: a valid spec, and where it needs histograms those or the tensor.
  RangeFinder(const EncodingSpec& spec, const Encoding& encoding,
              const RangeScaler& scaler, const TensorStatistics& statistics,
              absl::Span<const Extremes> moving_average,
              const HeldTensor* held);

  // Of the histograms that ranges come from; 0 where they come from none.
  int mantissa_bits() const;

  // Whether ranges depend on how their scales are stored.
  bool searches() const;

  // Finds the range of one scale index. Not thread-safe.
  class Task {
   public:
    // `outer` as for RangeScaler::Scale. `finder` outlives this.
    Task(const RangeFinder& finder, int64_t index, float outer);

    Task(const Task&) = delete;
    Task& operator=(const Task&) = delete;

    // Goes on until the range is found, or until the slice is over; with some
    // of it in any case. Answers whether it is found.
    bool Run(const TimeSlice& slice);

    // The range, as RangeScaler::Extend gives it; none where there is nothing
    // but zeros.
    // Requires: it is found.
    const absl::StatusOr<absl::optional<Range>>& range() const {
      return range_;
    }

    int64_t memory_bytes() const;

   private:
    // What histograms are searched for.
    struct Block {
      const Histogram& histogram;
      const Extremes& extremes;
      const Range whole;
      const Distribution distribution;
    };

    // Those of best-of, or the one of the spec.
    absl::Span<const CalibrationMethod> methods() const;
    // Goes on with the method that is under way; answers whether it has ended,
    // and with what.
    bool RunMethod(CalibrationMethod method, const TimeSlice& slice,
                   absl::StatusOr<Range>* range);
    Range Percentile() const;
    // Takes what a method of best-of has found. One whose range has no scale
    // does not count, unless none has.
    void Judge(const absl::StatusOr<Range>& range);

    const RangeFinder& finder_;
    const int64_t index_;
    const float outer_;
    bool found_ = false;
    absl::StatusOr<absl::optional<Range>> range_ = absl::optional<Range>();

    // While it is not found. The histogram only where the statistics have none.
    std::unique_ptr<const Histogram> made_;
    absl::optional<Block> block_;
    size_t next_method_ = 0;
    // Of the method under way.
    absl::optional<RangeSearch> range_search_;
    absl::optional<EntropySearch> entropy_search_;
    // Of the methods of best-of so far.
    absl::Status status_;
    absl::optional<Range> best_;
    double least_ = std::numeric_limits<double>::infinity();
  };

 private:
  absl::optional<Range> Whole(const Extremes& extremes) const;
  Range FixedRange() const;
  // Null where there is none.
  const Extremes* Averaged(int64_t index) const;

  const EncodingSpec& spec_;
  const RangeScaler& scaler_;
  const CodeNumbers numbers_;
  const EntropyLevels levels_;
  const TensorStatistics& statistics_;
  const absl::Span<const Extremes> moving_average_;
  const HeldTensor* const held_;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_RANGE_FINDER_H_
