// The range with the least error, of many.

#ifndef QUANTD_CORE_CALIBRATE_RANGE_SEARCH_H_
#define QUANTD_CORE_CALIBRATE_RANGE_SEARCH_H_

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "core/calibrate/distribution.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/squared_error.h"
#include "core/parallel/time_slice.h"

namespace quantd::core {

// What a range is judged by: the estimate of the squared error under the scale
// as it is stored, where clipped elements count `gamma` times.
// `outer`  the outer scale of the block, 0 where there is none or it is not
//          known yet.
// Errors: those of RangeScaler::Scale.
absl::StatusOr<double> RangeError(const RangeScaler& scaler, int64_t index,
                                  float outer, const CodeNumbers& numbers,
                                  const Distribution& distribution,
                                  const Range& range, double gamma);

// The best of the ranges k / steps of the whole one, 1 <= k <= steps, and then
// of as many between the two neighbours of that. Asymmetric ranges: of both
// ends by themselves, each measured from zero, or from the mean where the range
// leaves out zero. Of equally good ranges the widest. Not thread-safe.
class RangeSearch {
 public:
  // `steps`  0 for 128, and 32 for each of two ends.
  // `whole`  as RangeScaler::Extend gives it, not [0, 0].
  // What is passed by reference, but for `whole`, outlives the search.
  RangeSearch(const RangeScaler& scaler, int64_t index, float outer,
              const CodeNumbers& numbers, const Distribution& distribution,
              const Range& whole, double gamma, int steps);

  // Goes on until all ranges were tried, or until the slice is over; at least
  // one try. Answers whether all were.
  bool Run(const TimeSlice& slice);

  // Requires: all ranges were tried.
  // Errors: those of RangeScaler::Scale for the whole range, if there is no
  // range without.
  absl::StatusOr<Range> best() const;

 private:
  // Where the end of a range is on its way from nothing to all of it: position
  // k is (first + k * (last - first) / count) / count of the way.
  struct Way {
    int first;
    int last;
    int count;

    double Fraction(int k) const;
  };

  // Between the neighbours of position k of the whole way.
  static Way Around(int k, int count);

  void TryNext();
  // Whether the range is the best so far.
  bool Try(const Range& range);
  void StartPass(const Way& low_way, const Way& high_way);

  const RangeScaler& scaler_;
  const int64_t index_;
  const float outer_;
  const CodeNumbers& numbers_;
  const Distribution& distribution_;
  const Range whole_;
  const double gamma_;
  // Positions of an end.
  const int count_;
  // Tries between two looks at the clock.
  const int tries_at_once_;
  // Where asymmetric ranges start.
  double from_ = 0;
  // Where the ways of the ends end: an end where the range starts stays there,
  // and that of a symmetric one follows the other.
  int least_low_ = 1;
  int least_high_ = 1;

  // The first pass tries the whole range, the second what is near the best.
  bool is_second_pass_ = false;
  bool done_ = false;
  Way low_way_;
  Way high_way_;
  // What is tried next, and the best so far.
  int low_;
  int high_;
  int best_low_;
  int best_high_;

  absl::Status status_;
  // No scale is 0.
  BlockScale last_ = {0, 0, 0};
  absl::optional<Range> best_;
  double error_ = std::numeric_limits<double>::infinity();
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_RANGE_SEARCH_H_
