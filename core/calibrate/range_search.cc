#include "core/calibrate/range_search.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "core/calibrate/distribution.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/squared_error.h"

namespace quantd::core {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

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

// Tries ranges one after the other and keeps the first of the best.
class Search {
 public:
  Search(const RangeScaler& scaler, int64_t index, float outer,
         const CodeNumbers& numbers, const Distribution& distribution,
         double gamma)
      : scaler_(scaler),
        index_(index),
        outer_(outer),
        numbers_(numbers),
        distribution_(distribution),
        gamma_(gamma) {}

  // Whether the range is the best so far.
  bool Try(const Range& range) {
    const absl::StatusOr<BlockScale> scale =
        scaler_.Scale(index_, range, outer_);
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

  absl::StatusOr<Range> best() const {
    if (!best_.has_value()) return status_;
    return *best_;
  }

 private:
  const RangeScaler& scaler_;
  const int64_t index_;
  const float outer_;
  const CodeNumbers& numbers_;
  const Distribution& distribution_;
  const double gamma_;

  absl::Status status_;
  // No scale is 0.
  BlockScale last_ = {0, 0, 0};
  absl::optional<Range> best_;
  double error_ = kInfinity;
};

// Where the end of a range is on its way from nothing to all of it.
struct Steps {
  // Position k is (first + k * (last - first) / count) / count of the way.
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
Steps Around(int k, int count) {
  return {k - 1, std::min(k + 1, count), count};
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

absl::StatusOr<Range> SearchRange(const RangeScaler& scaler, int64_t index,
                                  float outer, const CodeNumbers& numbers,
                                  const Distribution& distribution,
                                  const Range& whole, double gamma, int steps) {
  Search search(scaler, index, outer, numbers, distribution, gamma);
  if (scaler.is_symmetric()) {
    constexpr int kDefaultSteps = 128;
    const int count = steps == 0 ? kDefaultSteps : steps;
    const double abs_max = whole.abs_max();
    int best = count;
    const auto try_all = [&](const Steps& way) {
      for (int k = count; k >= 1; --k) {
        const double end = abs_max * way.Fraction(k);
        if (search.Try({-end, end})) best = k;
      }
    };
    try_all({0, count, count});
    try_all(Around(best, count));
    return search.best();
  }

  constexpr int kDefaultSteps = 32;
  const int count = steps == 0 ? kDefaultSteps : steps;
  const bool contains_zero = whole.low <= 0 && whole.high >= 0;
  const double from =
      contains_zero ? 0
                    : std::clamp(distribution.mean(), whole.low, whole.high);
  int best_low = count;
  int best_high = count;
  const auto try_all = [&](const Steps& low_way, const Steps& high_way) {
    // An end where the range starts stays there.
    const int least_low = whole.low == from ? count : 1;
    const int least_high = whole.high == from ? count : 1;
    for (int i = count; i >= least_low; --i) {
      const double low = from + (whole.low - from) * low_way.Fraction(i);
      for (int j = count; j >= least_high; --j) {
        const double high = from + (whole.high - from) * high_way.Fraction(j);
        if (search.Try({low, high})) {
          best_low = i;
          best_high = j;
        }
      }
    }
  };
  try_all({0, count, count}, {0, count, count});
  try_all(Around(best_low, count), Around(best_high, count));
  return search.best();
}

}  // namespace quantd::core
