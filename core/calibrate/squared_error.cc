#include "core/calibrate/squared_error.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "core/calibrate/distribution.h"
#include "core/formats/codec.h"
#include "core/formats/number_format.h"

namespace quantd::core {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kSqrt3 = 1.7320508075688772;

// Numbers (first + j) * scale for j of 0 to last.
class UniformNumbers {
 public:
  UniformNumbers(double first, int64_t last, double scale)
      : first_(first), last_(last), scale_(scale) {}

  // Of the nearest number.
  int64_t Index(double x) const {
    const double index = std::floor(x / scale_ - first_ + 0.5);
    return static_cast<int64_t>(
        std::clamp<double>(index, 0, static_cast<double>(last_)));
  }
  double Value(int64_t j) const {
    return (first_ + static_cast<double>(j)) * scale_;
  }
  // Halfway to the number below.
  double Boundary(int64_t j) const {
    return (first_ + static_cast<double>(j) - 0.5) * scale_;
  }
  int64_t last() const { return last_; }

  // Above this many boundaries a bin is summed in closed form.
  static constexpr int64_t kMaxHinges = 8;

  // The integral of (x' - x)^2 from the middle of the first number to x.
  double Integral(double x) const {
    const int64_t j = Index(x);
    const double half = scale_ / 2;
    const double rest = x - Value(j);
    return static_cast<double>(j) * (scale_ * scale_ * scale_ / 12) +
           (rest * rest * rest + half * half * half) / 3;
  }
  double LargestStep() const { return scale_; }

 private:
  const double first_;
  const int64_t last_;
  const double scale_;
};

// Numbers levels[j] * scale.
class ListedNumbers {
 public:
  ListedNumbers(const CodeNumbers& numbers, double scale)
      : levels_(numbers.levels), middles_(numbers.middles), scale_(scale) {}

  int64_t Index(double x) const {
    return std::upper_bound(
               middles_.begin(), middles_.end(), x,
               [this](double a, double b) { return a < b * scale_; }) -
           middles_.begin();
  }
  double Value(int64_t j) const {
    return levels_[static_cast<size_t>(j)] * scale_;
  }
  double Boundary(int64_t j) const {
    return middles_[static_cast<size_t>(j - 1)] * scale_;
  }
  int64_t last() const { return static_cast<int64_t>(levels_.size()) - 1; }

  // There are few in all.
  static constexpr int64_t kMaxHinges = std::numeric_limits<int64_t>::max();

  double Integral(double) const { return 0; }
  double LargestStep() const { return 0; }

 private:
  const absl::Span<const double> levels_;
  const absl::Span<const double> middles_;
  const double scale_;
};

// Elements about their mean: [mean - below, mean + above] with that variance.
struct Spread {
  explicit Spread(const Mass& mass)
      : below(mass.mean - mass.low),
        above(mass.high - mass.mean),
        variance(std::min(mass.spread / mass.count, below * above)),
        half_width(kSqrt3 * std::sqrt(variance)) {}

  double below;
  double above;
  double variance;
  // Of a uniform density with that variance.
  double half_width;
};

// The mean of (x - b)+ with b = mean + t within the support.
SquaredError MeanHinge(const Spread& s, double t) {
  SquaredError hinge;
  const double plain = std::max(0.0, -t);
  if (s.variance == 0) return {plain, plain, plain};
  const double width = s.below + s.above;
  hinge.low = std::max(plain, (s.variance - s.below * t) / width);
  const double from_low = s.below * s.below + s.variance;
  const double from_high = s.above * s.above + s.variance;
  if (2 * s.below * (s.below + t) <= from_low) {
    hinge.high = s.below - (s.below + t) * (s.below * s.below / from_low);
  } else if (2 * s.above * (s.above - t) <= from_high) {
    hinge.high = (s.above - t) * (s.variance / from_high);
  } else {
    hinge.high = (std::sqrt(s.variance + t * t) - t) / 2;
  }
  const double rest = s.half_width - t;
  hinge.estimate = t >= s.half_width    ? 0
                   : -t >= s.half_width ? -t
                                        : rest * rest / (4 * s.half_width);
  hinge.high = std::max(hinge.low, hinge.high);
  hinge.estimate = std::clamp(hinge.estimate, hinge.low, hinge.high);
  return hinge;
}

// The sum over a mass whose elements may be nearest to any of numbers `first`
// to `last`.
template <typename Numbers>
SquaredError SumMass(const Numbers& numbers, int64_t first, int64_t last,
                     const Mass& mass) {
  const double distance = mass.mean - numbers.Value(first);
  const double parabola = mass.spread + mass.count * distance * distance;
  if (first == last) return {parabola, parabola, parabola};

  const Spread spread(mass);
  // No element is further from its number than this.
  double furthest = std::max(numbers.Value(first) - mass.low,
                             mass.high - numbers.Value(last));
  SquaredError sum;
  if (last - first <= Numbers::kMaxHinges) {
    sum = {parabola, parabola, parabola};
    for (int64_t j = first + 1; j <= last; ++j) {
      const double step = numbers.Value(j) - numbers.Value(j - 1);
      furthest = std::max(furthest, step / 2);
      const SquaredError hinge =
          MeanHinge(spread, numbers.Boundary(j) - mass.mean);
      const double weight = 2 * step * mass.count;
      sum.low -= weight * hinge.high;
      sum.estimate -= weight * hinge.estimate;
      sum.high -= weight * hinge.low;
    }
  } else {
    furthest = std::max(furthest, numbers.LargestStep() / 2);
    const double half_width =
        std::min({spread.half_width, spread.below, spread.above});
    sum.high = kInfinity;
    sum.estimate = mass.count *
                   (numbers.Integral(mass.mean + half_width) -
                    numbers.Integral(mass.mean - half_width)) /
                   (2 * half_width);
    // A density too narrow for the difference is as good as a point.
    if (!(half_width > 0x1p-20 * numbers.LargestStep())) {
      const double rest = mass.mean - numbers.Value(numbers.Index(mass.mean));
      sum.estimate = mass.count * rest * rest;
    }
  }
  sum.high = std::min(sum.high, mass.count * furthest * furthest);
  sum.low = std::clamp(sum.low, 0.0, sum.high);
  sum.estimate = std::clamp(sum.estimate, sum.low, sum.high);
  return sum;
}

template <typename Numbers>
SquaredError SumAll(const Numbers& numbers, const Distribution& distribution,
                    bool by_runs, double limit) {
  const auto masses = distribution.masses();
  SquaredError sum;
  for (size_t i = 0; i < masses.size() && !(sum.estimate > limit);) {
    const int64_t j = numbers.Index(masses[i].low);
    const double upper =
        j == numbers.last() ? kInfinity : numbers.Boundary(j + 1);
    if (by_runs && masses[i].high <= upper) {
      const size_t end = distribution.FirstAbove(i, upper);
      const double squares =
          distribution.SquaredDistance(i, end, numbers.Value(j));
      sum.low += squares;
      sum.estimate += squares;
      sum.high += squares;
      i = end;
      continue;
    }
    const int64_t last = masses[i].high <= upper
                             ? j
                             : std::max(j, numbers.Index(masses[i].high));
    const SquaredError mass = SumMass(numbers, j, last, masses[i]);
    sum.low += mass.low;
    sum.estimate += mass.estimate;
    sum.high += mass.high;
    ++i;
  }
  return sum;
}

// The sum of (x - value)^2 over elements above `clip`, which is not below
// `value`.
double SumAbove(const Distribution& distribution, double clip, double value) {
  const auto masses = distribution.masses();
  const size_t first = distribution.FirstAbove(0, clip);
  if (first == masses.size()) return 0;
  const Mass& mass = masses[first];
  if (mass.low > clip) {
    return distribution.SquaredDistance(first, masses.size(), value);
  }
  double sum = distribution.SquaredDistance(first + 1, masses.size(), value);
  const Spread spread(mass);
  const double low = std::max(mass.mean - spread.half_width, clip) - value;
  const double high = mass.mean + spread.half_width - value;
  if (high > low) {
    sum += mass.count * (high * high * high - low * low * low) /
           (6 * spread.half_width);
  }
  return sum;
}

// The same below `clip`, which is not above `value`.
double SumBelow(const Distribution& distribution, double clip, double value) {
  const auto masses = distribution.masses();
  const size_t end = distribution.FirstAbove(0, clip);
  double sum = distribution.SquaredDistance(0, end, value);
  if (end == masses.size() || masses[end].low >= clip) return sum;
  const Mass& mass = masses[end];
  const Spread spread(mass);
  const double high = value - std::min(mass.mean + spread.half_width, clip);
  const double low = value - (mass.mean - spread.half_width);
  if (low > high) {
    sum += mass.count * (low * low * low - high * high * high) /
           (6 * spread.half_width);
  }
  return sum;
}

}  // namespace

CodeNumbers::CodeNumbers(const Encoding& encoding)
    : is_integer(false), qmin(encoding.qmin), qmax(encoding.qmax) {
  const FormatInfo& format = *FindFormat(encoding.format);
  switch (format.kind) {
    case CodeKind::kInteger:
      is_integer = true;
      clip_low = qmin - 0.5;
      clip_high = qmax + 0.5;
      return;
    case CodeKind::kFloat:
      for (int32_t code = 0; code <= format.qmax; ++code) {
        const double level =
            DecodeFloat(format.float_layout, static_cast<uint32_t>(code));
        if (std::isfinite(level)) levels.push_back(level);
      }
      clip_high = OverflowThreshold(format.float_layout);
      clip_low = -clip_high;
      if (encoding.no_saturation) overflow = clip_high;
      break;
    case CodeKind::kCodebook: {
      const absl::Span<const float> entries = CodebookOf(encoding);
      levels.assign(entries.begin(), entries.end());
      clip_low = levels.front();
      clip_high = levels.back();
      break;
    }
  }
  std::sort(levels.begin(), levels.end());
  // The zeros of either sign are one.
  levels.erase(std::unique(levels.begin(), levels.end()), levels.end());
  for (size_t i = 1; i < levels.size(); ++i) {
    middles.push_back((levels[i - 1] + levels[i]) / 2);
  }
}

SquaredError SumSquaredError(const CodeNumbers& numbers, double scale,
                             int32_t zero_point,
                             const Distribution& distribution, bool by_runs,
                             double limit) {
  if (numbers.is_integer) {
    return SumAll(UniformNumbers(double{1} * numbers.qmin - zero_point,
                                 int64_t{numbers.qmax} - numbers.qmin, scale),
                  distribution, by_runs, limit);
  }
  return SumAll(ListedNumbers(numbers, scale), distribution, by_runs, limit);
}

double ClippedSquaredError(const CodeNumbers& numbers, double scale,
                           int32_t zero_point,
                           const Distribution& distribution) {
  return SumBelow(distribution, (numbers.clip_low - zero_point) * scale,
                  (numbers.lowest() - zero_point) * scale) +
         SumAbove(distribution, (numbers.clip_high - zero_point) * scale,
                  (numbers.highest() - zero_point) * scale);
}

}  // namespace quantd::core
