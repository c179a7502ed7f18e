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

// Numbers (first + j) * scale for j of 0 to last.
class UniformNumbers {
 public:
  UniformNumbers(double first, int64_t last, double scale)
      : first_(first), last_(last), scale_(scale) {}

  // Index of the nearest number, which is not before `from`.
  int64_t IndexFrom(int64_t /*from*/, double x) const { return Index(x); }
  // Index of the nearest number.
  int64_t Index(double x) const {
    const double index = x / scale_ - first_ + 0.5;
    if (!(index > 0)) return 0;
    return index < static_cast<double>(last_) ? static_cast<int64_t>(index)
                                              : last_;
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

  // There are few: from one element to the next it is not far.
  int64_t IndexFrom(int64_t from, double x) const {
    while (from < last() && middles_[static_cast<size_t>(from)] * scale_ <= x) {
      ++from;
    }
    return from;
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

// The mean of (x - b)+ over the uniform density, b = mean + t.
double UniformHinge(const Mass& mass, double t) {
  if (t >= mass.half_width) return 0;
  if (-t >= mass.half_width) return -t;
  const double rest = mass.half_width - t;
  return rest * rest / (4 * mass.half_width);
}

// The mean of (x - b)+ over the elements, b = mean + t within their support.
SquaredError MeanHinge(const Mass& mass, double t) {
  const double plain = std::max(0.0, -t);
  const double variance = mass.variance;
  if (variance == 0) return {plain, plain, plain};
  const double below = mass.mean - mass.low;
  const double above = mass.high - mass.mean;
  SquaredError hinge;
  hinge.low = std::max(plain, (variance - below * t) / (below + above));
  const double from_low = below * below + variance;
  const double from_high = above * above + variance;
  if (2 * below * (below + t) <= from_low) {
    hinge.high = below - (below + t) * (below * below / from_low);
  } else if (2 * above * (above - t) <= from_high) {
    hinge.high = (above - t) * (variance / from_high);
  } else {
    hinge.high = (std::sqrt(variance + t * t) - t) / 2;
  }
  hinge.high = std::max(hinge.low, hinge.high);
  hinge.estimate = std::clamp(UniformHinge(mass, t), hinge.low, hinge.high);
  return hinge;
}

// True if the uniform density lies within the support: then its hinges lie
// within their bounds.
bool IsUniformPossible(const Mass& mass) {
  return mass.half_width <= mass.mean - mass.low &&
         mass.half_width <= mass.high - mass.mean;
}

// The sum over a mass whose elements may be nearest to any of numbers `first`
// to `last`. Without bounds all three are the estimate.
template <bool kHasBounds, typename Numbers>
SquaredError SumMass(const Numbers& numbers, int64_t first, int64_t last,
                     const Mass& mass) {
  const double distance = mass.mean - numbers.Value(first);
  const double parabola = mass.spread + mass.count * distance * distance;
  if (first == last) return {parabola, parabola, parabola};

  // No element is further from its number than this.
  double furthest = std::max(numbers.Value(first) - mass.low,
                             mass.high - numbers.Value(last));
  SquaredError sum;
  if (last - first <= Numbers::kMaxHinges) {
    const bool is_plain = !kHasBounds && IsUniformPossible(mass);
    sum = {parabola, parabola, parabola};
    for (int64_t j = first + 1; j <= last; ++j) {
      const double step = numbers.Value(j) - numbers.Value(j - 1);
      furthest = std::max(furthest, step / 2);
      const double weight = 2 * step * mass.count;
      const double t = numbers.Boundary(j) - mass.mean;
      if (is_plain) {
        sum.estimate -= weight * UniformHinge(mass, t);
        continue;
      }
      const SquaredError hinge = MeanHinge(mass, t);
      sum.low -= weight * hinge.high;
      sum.estimate -= weight * hinge.estimate;
      sum.high -= weight * hinge.low;
    }
    if (is_plain) {
      const double estimate = std::max(sum.estimate, 0.0);
      return {estimate, estimate, estimate};
    }
  } else {
    furthest = std::max(furthest, numbers.LargestStep() / 2);
    const double half_width = std::min(
        {mass.half_width, mass.mean - mass.low, mass.high - mass.mean});
    sum.high = std::numeric_limits<double>::infinity();
    sum.estimate = mass.count *
                   (numbers.Integral(mass.mean + half_width) -
                    numbers.Integral(mass.mean - half_width)) /
                   (2 * half_width);
    // A density too narrow for the difference is as good as a point.
    if (!(half_width > 0x1p-20 * numbers.LargestStep())) {
      const double rest =
          mass.mean - numbers.Value(numbers.IndexFrom(first, mass.mean));
      sum.estimate = mass.count * rest * rest;
    }
  }
  sum.high = std::min(sum.high, mass.count * furthest * furthest);
  sum.low = std::clamp(sum.low, 0.0, sum.high);
  sum.estimate = std::clamp(sum.estimate, sum.low, sum.high);
  return sum;
}

template <typename Numbers>
SquaredError BoundAll(const Numbers& numbers,
                      const Distribution& distribution) {
  SquaredError sum;
  int64_t first = 0;
  for (const Mass& mass : distribution.masses()) {
    first = numbers.IndexFrom(first, mass.low);
    const SquaredError part = SumMass</*kHasBounds=*/true>(
        numbers, first, numbers.IndexFrom(first, mass.high), mass);
    sum.low += part.low;
    sum.estimate += part.estimate;
    sum.high += part.high;
  }
  return sum;
}

template <typename Numbers>
double EstimateAll(const Numbers& numbers, const Distribution& distribution,
                   double limit) {
  const auto masses = distribution.masses();
  double sum = 0;
  int64_t j = 0;
  for (size_t i = 0; i < masses.size() && !(sum > limit);) {
    j = numbers.IndexFrom(j, masses[i].low);
    const double upper = j == numbers.last()
                             ? std::numeric_limits<double>::infinity()
                             : numbers.Boundary(j + 1);
    if (masses[i].high <= upper) {
      const size_t end = distribution.FirstAbove(i, upper);
      sum += distribution.SquaredDistance(i, end, numbers.Value(j));
      i = end;
    } else {
      // Index may round otherwise than the boundary.
      const int64_t last = std::max(j, numbers.IndexFrom(j, masses[i].high));
      sum +=
          SumMass</*kHasBounds=*/false>(numbers, j, last, masses[i]).estimate;
      ++i;
    }
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
  const double low = std::max(mass.mean - mass.half_width, clip) - value;
  const double high = mass.mean + mass.half_width - value;
  if (high > low) {
    sum += mass.count * (high * high * high - low * low * low) /
           (6 * mass.half_width);
  }
  return sum;
}

// Sums (value - x)^2 over the elements below `clip`, which is not above
// `value`.
double SumBelow(const Distribution& distribution, double clip, double value) {
  const auto masses = distribution.masses();
  const size_t end = distribution.FirstAbove(0, clip);
  double sum = distribution.SquaredDistance(0, end, value);
  if (end == masses.size() || masses[end].low >= clip) return sum;
  const Mass& mass = masses[end];
  const double high = value - std::min(mass.mean + mass.half_width, clip);
  const double low = value - (mass.mean - mass.half_width);
  if (low > high) {
    sum += mass.count * (low * low * low - high * high * high) /
           (6 * mass.half_width);
  }
  return sum;
}

UniformNumbers Uniform(const CodeNumbers& numbers, double scale,
                       double zero_point) {
  return UniformNumbers(numbers.qmin - zero_point,
                        int64_t{numbers.qmax} - numbers.qmin, scale);
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

SquaredError BoundSquaredError(const CodeNumbers& numbers, double scale,
                               double zero_point,
                               const Distribution& distribution) {
  if (numbers.is_integer) {
    return BoundAll(Uniform(numbers, scale, zero_point), distribution);
  }
  return BoundAll(ListedNumbers(numbers, scale), distribution);
}

double EstimateSquaredError(const CodeNumbers& numbers, double scale,
                            double zero_point, const Distribution& distribution,
                            double limit) {
  if (numbers.is_integer) {
    return EstimateAll(Uniform(numbers, scale, zero_point), distribution,
                       limit);
  }
  return EstimateAll(ListedNumbers(numbers, scale), distribution, limit);
}

double ClippedSquaredError(const CodeNumbers& numbers, double scale,
                           double zero_point,
                           const Distribution& distribution) {
  return SumBelow(distribution, (numbers.clip_low - zero_point) * scale,
                  (numbers.lowest() - zero_point) * scale) +
         SumAbove(distribution, (numbers.clip_high - zero_point) * scale,
                  (numbers.highest() - zero_point) * scale);
}

}  // namespace quantd::core
