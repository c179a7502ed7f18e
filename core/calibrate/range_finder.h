// The range of one scale index after the other, by any method.

#ifndef QUANTD_CORE_CALIBRATE_RANGE_FINDER_H_
#define QUANTD_CORE_CALIBRATE_RANGE_FINDER_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/distribution.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/entropy.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/squared_error.h"
#include "core/parallel/stop_token.h"
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
  // `encoding` is read here only. Everything else that is passed by reference
  // outlives this, and so does what `moving_average` points at.
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

  // The range of a scale index, as RangeScaler::Extend gives it; none where
  // there is nothing but zeros.
  // `outer`  as for RangeScaler::Scale.
  // Errors: those of RangeScaler::Scale, where no range has a scale; CANCELLED.
  absl::StatusOr<absl::optional<Range>> Find(int64_t index, float outer,
                                             StopToken stop) const;

 private:
  // What histograms are searched for.
  struct Block {
    const int64_t index;
    const float outer;
    const Histogram& histogram;
    const Extremes& extremes;
    const Range whole;
    const Distribution distribution;
  };

  absl::StatusOr<Range> FindBy(CalibrationMethod method, const Block& block,
                               StopToken stop) const;
  // By the one of spec.methods whose range errs least. Those whose range has no
  // scale do not count, unless none has.
  absl::StatusOr<Range> FindBest(const Block& block, StopToken stop) const;
  Range Percentile(const Block& block) const;
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
