// The range with the least error, of many.

#ifndef QUANTD_CORE_CALIBRATE_RANGE_SEARCH_H_
#define QUANTD_CORE_CALIBRATE_RANGE_SEARCH_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "core/calibrate/distribution.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/squared_error.h"
#include "core/parallel/stop_token.h"

namespace quantd::core {

// The cost of a range: the estimate of the squared error under the scale as it
// is stored, where clipped elements count `gamma` times.
// `outer`  the outer scale of the block, 0 where there is none or it is not
//          known yet.
// Errors: those of RangeScaler::Scale.
absl::StatusOr<double> RangeError(const RangeScaler& scaler, int64_t index,
                                  float outer, const CodeNumbers& numbers,
                                  const Distribution& distribution,
                                  const Range& range, double gamma);

// The best of the ranges k / steps of the whole one, 1 <= k <= steps *
// WidestRange, and then of `steps` between the two neighbours of that. Only
// symmetric ranges are wider than the whole one. The two ends of asymmetric
// ranges move by themselves, each measured from zero, or from the mean where
// the range leaves out zero. Of equally good ranges the widest wins.
// `steps`  0 for 128, and 32 for each of two ends.
// `whole`  as RangeScaler::Extend gives it, not [0, 0].
// Errors: those of RangeScaler::Scale for the whole range, if there is no range
// without; CANCELLED.
absl::StatusOr<Range> SearchRange(const RangeScaler& scaler, int64_t index,
                                  float outer, const CodeNumbers& numbers,
                                  const Distribution& distribution,
                                  const Range& whole, double gamma, int steps,
                                  StopToken stop = StopToken());

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_RANGE_SEARCH_H_
