#include "core/calibrate/entropy.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/calibrate/range_scaler.h"
#include "core/calibrate/squared_error.h"
#include "core/statistics/histogram.h"

namespace quantd::core {
namespace {

double XLogX(double x) { return x > 0 ? x * PortableLog(x) : 0; }

// Counts in linear bins, and running sums over them.
class LinearBins {
 public:
  // `low` and `width` of all bins together.
  LinearBins(const Histogram& histogram, bool of_magnitudes, double low,
             double width, int64_t bins)
      : low_(low),
        width_(width),
        bins_(bins),
        count_(static_cast<size_t>(bins) + 1),
        x_log_x_(count_.size()),
        filled_(count_.size()) {
    histogram.ForEachBin([&](uint32_t key, const HistogramBin& bin) {
      const BinEdges edges = HistogramBinEdges(key, histogram.mantissa_bits());
      // What all elements of the bin are when they are cut.
      const double cut = edges.base;
      if (cut == 0) return;
      total_ += static_cast<double>(bin.count);
      count_[static_cast<size_t>(BinOf(of_magnitudes ? std::fabs(cut) : cut)) +
             1] += static_cast<double>(bin.count);
    });
    for (size_t t = 1; t < count_.size(); ++t) {
      x_log_x_[t] = x_log_x_[t - 1] + XLogX(count_[t]);
      filled_[t] = filled_[t - 1] + (count_[t] > 0);
      count_[t] += count_[t - 1];
    }
  }

  // The bin that x lies in, or the one nearest to it.
  int64_t BinOf(double x) const {
    return Clamped(std::floor(Position(x)), 0, bins_ - 1);
  }
  // How many bins lie before x, the one it is in among them.
  int64_t BinsUpTo(double x) const {
    return Clamped(std::ceil(Position(x)), 1, bins_);
  }
  int64_t bins() const { return bins_; }
  // Elements in all bins.
  double total() const { return total_; }

  // The divergence with bins [first, last) in p and q.
  double Divergence(const EntropyLevels& levels, int64_t first,
                    int64_t last) const;

 private:
  // Written so that NaN is in the range too.
  static int64_t Clamped(double x, int64_t low, int64_t high) {
    if (!(x > static_cast<double>(low))) return low;
    return x < static_cast<double>(high) ? static_cast<int64_t>(x) : high;
  }
  double Position(double x) const {
    return (x - low_) * static_cast<double>(bins_) / width_;
  }
  double Count(int64_t first, int64_t last) const {
    return count_[static_cast<size_t>(last)] -
           count_[static_cast<size_t>(first)];
  }

  const double low_;
  const double width_;
  const int64_t bins_;
  double total_ = 0;
  // [bins + 1] each: sums over the bins before.
  std::vector<double> count_;
  std::vector<double> x_log_x_;
  std::vector<int32_t> filled_;
};

double LinearBins::Divergence(const EntropyLevels& levels, int64_t first,
                              int64_t last) const {
  const int64_t size = last - first;
  const double below = Count(0, first);
  const double above = Count(last, bins_);
  const double first_count = Count(first, first + 1);
  const double last_count = Count(last - 1, last);

  // sum p log p, in counts.
  double p_log_p = x_log_x_[static_cast<size_t>(last)] -
                   x_log_x_[static_cast<size_t>(first)];
  if (size == 1) {
    p_log_p = XLogX(first_count + below + above);
  } else {
    if (below > 0) p_log_p += XLogX(first_count + below) - XLogX(first_count);
    if (above > 0) p_log_p += XLogX(last_count + above) - XLogX(last_count);
  }

  // sum p log q and sum q, in counts, level by level.
  double p_log_q = 0;
  double q_total = 0;
  const int64_t level_count = levels.size();
  int64_t begin = first;
  for (int64_t level = 0; level < level_count && begin < last; ++level) {
    int64_t end = last;
    if (level + 1 < level_count) {
      if (levels.count != 0) {
        // The first bin t with floor(t * levels / size) > level.
        end = first + ((level + 1) * size + level_count - 1) / level_count;
      } else {
        end = first + static_cast<int64_t>(std::ceil(
                          levels.boundaries[static_cast<size_t>(level)] *
                              static_cast<double>(size) -
                          0.5));
      }
      end = std::clamp(end, begin, last);
    }
    if (end == begin) continue;
    const double count = Count(begin, end);
    double p = count;
    int64_t filled =
        filled_[static_cast<size_t>(end)] - filled_[static_cast<size_t>(begin)];
    const bool is_one_bin = size == 1;
    if (begin == first && below > 0) {
      p += below;
      filled += first_count == 0;
    }
    if (end == last && above > 0) {
      p += above;
      filled += last_count == 0 && !(is_one_bin && below > 0);
    }
    if (filled > 0) {
      constexpr double kHalf = 0.5;
      const double q = count > 0 ? count : kHalf;
      q_total += q;
      p_log_q += p * PortableLog(q / static_cast<double>(filled));
    }
    begin = end;
  }
  return (p_log_p - p_log_q) / total_ +
         (PortableLog(q_total) - PortableLog(total_));
}

}  // namespace

EntropyLevels LevelsOf(const CodeNumbers& numbers, bool is_symmetric) {
  EntropyLevels levels;
  if (numbers.is_integer) {
    levels.of_magnitudes = is_symmetric;
    // Without and with a number for -2^(b-1), which magnitudes do not have.
    levels.count = is_symmetric ? int64_t{numbers.qmax} + 1
                                : int64_t{numbers.qmax} - numbers.qmin + 1;
    return levels;
  }
  const double largest =
      std::max(std::fabs(numbers.lowest()), std::fabs(numbers.highest()));
  for (const double middle : numbers.middles) {
    levels.boundaries.push_back((middle / largest + 1) / 2);
  }
  return levels;
}

double PortableLog(double x) {
  constexpr double kLn2High = 0x1.62e42fefap-1;
  constexpr double kLn2Low = 0x1.cf79abc9e3b3ap-40;
  constexpr double kSqrtHalf = 0.70710678118654752;
  int exponent;
  double mantissa = std::frexp(x, &exponent);
  if (mantissa < kSqrtHalf) {
    mantissa *= 2;
    --exponent;
  }
  // log m = 2 artanh((m - 1) / (m + 1)), as its Taylor series.
  const double t = (mantissa - 1) / (mantissa + 1);
  const double square = t * t;
  constexpr int kLastTerm = 23;
  double series = 0;
  for (int k = kLastTerm; k >= 3; k -= 2) {
    series = (series + 1.0 / k) * square;
  }
  return exponent * kLn2High + (2 * t + (2 * t * series + exponent * kLn2Low));
}

Range EntropyRange(const Histogram& histogram, const EntropyLevels& levels,
                   const Range& whole, int steps, int bins) {
  constexpr int kDefaultSteps = 128;
  constexpr int64_t kDefaultBins = 2048;
  const int count = steps == 0 ? kDefaultSteps : steps;
  const int64_t bin_count =
      bins == 0 ? std::max(kDefaultBins, 4 * levels.size()) : bins;
  const double abs_max = whole.abs_max();
  // Grids of floats and codebooks are laid about zero.
  Range span = whole;
  if (levels.of_magnitudes) {
    span = {0, abs_max};
  } else if (levels.count == 0) {
    span = {-abs_max, abs_max};
  }
  const LinearBins linear(histogram, levels.of_magnitudes, span.low,
                          span.high - span.low, bin_count);
  if (linear.total() == 0) return whole;
  Range best = whole;
  double least = std::numeric_limits<double>::infinity();
  const double from = std::clamp(0.0, span.low, span.high);
  for (int k = count; k >= 1; --k) {
    const double fraction = static_cast<double>(k) / count;
    const Range range = {from + (span.low - from) * fraction,
                         from + (span.high - from) * fraction};
    const int64_t first = k == count ? 0 : linear.BinOf(range.low);
    const int64_t last =
        k == count ? linear.bins() : linear.BinsUpTo(range.high);
    if (k < count && last - first < levels.size()) break;
    const double divergence = linear.Divergence(levels, first, last);
    if (divergence < least) {
      least = divergence;
      best = levels.of_magnitudes ? Range{-range.high, range.high} : range;
    }
  }
  return best;
}

}  // namespace quantd::core
