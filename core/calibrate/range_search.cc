#include "core/calibrate/range_search.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "core/calibrate/distribution.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/squared_error.h"
#include "core/parallel/stop_token.h"

namespace quantd::core {
namespace {

// Number of tries between two looks at the stop token: they take much longer
// than the look.
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

// The way of a range's end from nothing to all of it: position k is (first + k
// * (last - first) / count) / count of the way.
struct Way {
  int first;
  int last;
  int count;

  double Fraction(int k) const {
    return (static_cast<double>(first) +
            static_cast<double>(k) * (last - first) / count) /
           count;
  }
};

// Between the neighbours of position k of the whole way.
Way Around(int k, int most, int count) {
  return {k - 1, std::min(k + 1, most), count};
}

// The best of the ranges that were tried.
class BestRange {
 public:
  BestRange(const RangeScaler& scaler, int64_t index, float outer,
            const CodeNumbers& numbers, const Distribution& distribution,
            double gamma)
      : scaler_(scaler),
        index_(index),
        outer_(outer),
        numbers_(numbers),
        distribution_(distribution),
        gamma_(gamma) {}

  // True if the range is the best so far.
  bool Try(const Range& range) {
    const absl::StatusOr<BlockScale> scale =
        scaler_.Scale(index_, range, outer_);
    if (!scale.ok()) return false;
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

  const absl::optional<Range>& best() const { return best_; }

 private:
  const RangeScaler& scaler_;
  const int64_t index_;
  const float outer_;
  const CodeNumbers& numbers_;
  const Distribution& distribution_;
  const double gamma_;
  // No scale is 0.
  BlockScale last_ = {0, 0, 0};
  absl::optional<Range> best_;
  double error_ = std::numeric_limits<double>::infinity();
};

}  // namespace

absl::StatusOr<double> RangeError(const RangeScaler& scaler, int64_t index,
                                  float outer, const CodeNumbers& numbers,
                                  const Distribution& distribution,
                                  const Range& range, double gamma) {
  const absl::StatusOr<BlockScale> scale = scaler.Scale(index, range, outer);
  if (!scale.ok()) return scale.status();
  return ErrorUnder(*scale, numbers, distribution, gamma,
                    std::numeric_limits<double>::infinity());
}

absl::StatusOr<Range> SearchRange(const RangeScaler& scaler, int64_t index,
                                  float outer, const CodeNumbers& numbers,
                                  const Distribution& distribution,
                                  const Range& whole, double gamma, int steps,
                                  StopToken stop) {
  const int count = steps != 0              ? steps
                    : scaler.is_symmetric() ? kDefaultSteps
                                            : kDefaultStepsOfEachEnd;
  // Symmetric ranges may be wider than the whole one.
  const int most = static_cast<int>(count * scaler.widest());
  // Asymmetric ranges start here. An end that lies at the start stays there.
  // One end of a symmetric range follows the other.
  double from = 0;
  int least_low = count;
  int least_high = 1;
  if (!scaler.is_symmetric()) {
    const bool contains_zero = whole.low <= 0 && whole.high >= 0;
    from = contains_zero
               ? 0
               : std::clamp(distribution.mean(), whole.low, whole.high);
    if (whole.low != from) least_low = 1;
    if (whole.high == from) least_high = count;
  }
  BestRange best(scaler, index, outer, numbers, distribution, gamma);
  int best_low = count;
  int best_high = count;
  const int tries_at_once = TriesAtOnce(distribution);
  int tries = 0;
  // First the whole range, then what is near the best of it.
  for (const bool is_second_pass : {false, true}) {
    const Way whole_way = {0, count, count};
    const Way low_way =
        is_second_pass ? Around(best_low, most, count) : whole_way;
    const Way high_way =
        is_second_pass ? Around(best_high, most, count) : whole_way;
    const int first_high = is_second_pass ? count : most;
    for (int low = count; low >= least_low; --low) {
      for (int high = first_high; high >= least_high; --high) {
        if (++tries % tries_at_once == 0 && stop.stopped()) {
          return StoppedError();
        }
        Range range;
        if (scaler.is_symmetric()) {
          const double fraction = high_way.Fraction(high);
          range = {whole.low * fraction, whole.high * fraction};
        } else {
          range = {from + (whole.low - from) * low_way.Fraction(low),
                   from + (whole.high - from) * high_way.Fraction(high)};
        }
        if (best.Try(range)) {
          best_low = low;
          best_high = high;
        }
      }
    }
  }
  if (best.best().has_value()) return *best.best();
  return scaler.Scale(index, whole, outer).status();
}

}  // namespace quantd::core
