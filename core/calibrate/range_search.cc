#include "core/calibrate/range_search.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/calibrate/distribution.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/squared_error.h"
#include "core/parallel/time_slice.h"

namespace quantd::core {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kDefaultSteps = 128;
constexpr int kDefaultStepsOfTwoEnds = 32;

// As many as take much longer than to look at the clock.
int TriesAtOnce(const Distribution& distribution) {
  constexpr size_t kMasses = 2048;
  return static_cast<int>(
      std::max<size_t>(1, kMasses / (distribution.masses().size() + 1)));
}

double ErrorUnder(const BlockScale& scale, const CodeNumbers& numbers,
                  const Distribution& distribution, double gamma,
                  double limit) {
  const double error = EstimateSquaredError(
      numbers, scale.scale, scale.zero_point, distribution, limit);
  // A sum that was not finished is no error to take anything from.
  if (gamma == 1 || error > limit) return error;
  return error + (gamma - 1) * ClippedSquaredError(numbers, scale.scale,
                                                   scale.zero_point,
                                                   distribution);
}

}  // namespace

absl::StatusOr<double> RangeError(const RangeScaler& scaler, int64_t index,
                                  float outer, const CodeNumbers& numbers,
                                  const Distribution& distribution,
                                  const Range& range, double gamma) {
  const absl::StatusOr<BlockScale> scale = scaler.Scale(index, range, outer);
  if (!scale.ok()) return scale.status();
  return ErrorUnder(*scale, numbers, distribution, gamma, kInfinity);
}

RangeSearch::RangeSearch(const RangeScaler& scaler, int64_t index, float outer,
                         const CodeNumbers& numbers,
                         const Distribution& distribution, const Range& whole,
                         double gamma, int steps)
    : scaler_(scaler),
      index_(index),
      outer_(outer),
      numbers_(numbers),
      distribution_(distribution),
      whole_(whole),
      gamma_(gamma),
      count_(steps != 0              ? steps
             : scaler.is_symmetric() ? kDefaultSteps
                                     : kDefaultStepsOfTwoEnds),
      tries_at_once_(TriesAtOnce(distribution)),
      best_low_(count_),
      best_high_(count_) {
  if (scaler.is_symmetric()) {
    least_low_ = count_;
  } else {
    const bool contains_zero = whole.low <= 0 && whole.high >= 0;
    from_ = contains_zero
                ? 0
                : std::clamp(distribution.mean(), whole.low, whole.high);
    if (whole.low == from_) least_low_ = count_;
    if (whole.high == from_) least_high_ = count_;
  }
  StartPass({0, count_, count_}, {0, count_, count_});
}

bool RangeSearch::Run(const TimeSlice& slice) {
  while (!done_) {
    for (int i = 0; i < tries_at_once_ && !done_; ++i) TryNext();
    if (!done_ && slice.over()) return false;
  }
  return true;
}

absl::StatusOr<Range> RangeSearch::best() const {
  if (!best_.has_value()) return status_;
  return *best_;
}

double RangeSearch::Way::Fraction(int k) const {
  return (static_cast<double>(first) +
          static_cast<double>(k) * (last - first) / count) /
         count;
}

RangeSearch::Way RangeSearch::Around(int k, int count) {
  return {k - 1, std::min(k + 1, count), count};
}

void RangeSearch::StartPass(const Way& low_way, const Way& high_way) {
  low_way_ = low_way;
  high_way_ = high_way;
  low_ = count_;
  high_ = count_;
}

void RangeSearch::TryNext() {
  Range range;
  if (scaler_.is_symmetric()) {
    const double fraction = high_way_.Fraction(high_);
    range = {whole_.low * fraction, whole_.high * fraction};
  } else {
    range = {from_ + (whole_.low - from_) * low_way_.Fraction(low_),
             from_ + (whole_.high - from_) * high_way_.Fraction(high_)};
  }
  if (Try(range)) {
    best_low_ = low_;
    best_high_ = high_;
  }
  if (--high_ >= least_high_) return;
  high_ = count_;
  if (--low_ >= least_low_) return;
  if (is_second_pass_) {
    done_ = true;
  } else {
    is_second_pass_ = true;
    StartPass(Around(best_low_, count_), Around(best_high_, count_));
  }
}

bool RangeSearch::Try(const Range& range) {
  const absl::StatusOr<BlockScale> scale = scaler_.Scale(index_, range, outer_);
  if (!scale.ok()) {
    if (status_.ok()) status_ = scale.status();
    return false;
  }
  // Scales that are rounded coarsely repeat themselves.
  if (last_ == *scale) return false;
  last_ = *scale;
  // Clipped elements that count less than once leave at least that part.
  const double limit = error_ / std::min(gamma_, 1.0);
  const double error =
      ErrorUnder(*scale, numbers_, distribution_, gamma_, limit);
  // All of them may be beyond float64: then the first is as good as any.
  if (best_.has_value() && !(error < error_)) return false;
  error_ = error;
  best_ = range;
  return true;
}

}  // namespace quantd::core
