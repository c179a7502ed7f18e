#include "core/calibrate/entropy.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/squared_error.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/histogram.h"

namespace quantd::core {
namespace {

constexpr int kDefaultSteps = 128;
constexpr int64_t kDefaultBins = 2048;

double XLogX(double x) { return x > 0 ? x * PortableLog(x) : 0; }

// Which level bin t of a range lies in; t must not fall.
class LevelCursor {
 public:
  // `size`  bins of the range.
  LevelCursor(const EntropyLevels& levels, int64_t size)
      : levels_(levels), size_(size) {}

  int64_t At(int64_t t) {
    if (levels_.count != 0) return t * levels_.count / size_;
    while (level_ < levels_.boundaries.size() && t >= End(level_)) ++level_;
    return static_cast<int64_t>(level_);
  }

 private:
  // The first bin whose middle is past the level.
  int64_t End(size_t level) const {
    return static_cast<int64_t>(std::ceil(
        levels_.boundaries[level] * static_cast<double>(size_) - 0.5));
  }

  const EntropyLevels& levels_;
  const int64_t size_;
  size_t level_ = 0;
};

// Counts in those linear bins that have elements, and running sums over them:
// time and memory follow what there is, not the number of bins or levels.
class LinearBins {
 public:
  // `low` and `width` of all bins together.
  LinearBins(const Histogram& histogram, bool of_magnitudes, double low,
             double width, int64_t bins)
      : low_(low), width_(width), bins_(bins) {
    std::vector<std::pair<int64_t, double>> counts;
    histogram.ForEachBin([&](uint32_t key, const HistogramBin& bin) {
      const BinEdges edges = HistogramBinEdges(key, histogram.mantissa_bits());
      // What all elements of the bin are when they are cut.
      const double cut = edges.base;
      if (cut == 0) return;
      counts.emplace_back(BinOf(of_magnitudes ? std::fabs(cut) : cut),
                          static_cast<double>(bin.count));
    });
    // Magnitudes come from both sides.
    std::sort(counts.begin(), counts.end());
    for (const auto& [t, count] : counts) {
      if (bin_.empty() || bin_.back() != t) {
        bin_.push_back(t);
        count_.push_back(count_.back());
      }
      count_.back() += count;
    }
    for (size_t i = 0; i < bin_.size(); ++i) {
      x_log_x_.push_back(x_log_x_[i] + XLogX(Count(i, i + 1)));
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
  double total() const { return count_.back(); }

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
  // How many of bin_ come before bin t.
  size_t Before(int64_t t) const {
    return static_cast<size_t>(std::lower_bound(bin_.begin(), bin_.end(), t) -
                               bin_.begin());
  }
  // Elements of bin_[begin] to bin_[end - 1].
  double Count(size_t begin, size_t end) const {
    return count_[end] - count_[begin];
  }

  const double low_;
  const double width_;
  const int64_t bins_;
  // Bins that have elements, ascending.
  std::vector<int64_t> bin_;
  // [bin_ + 1] each: sums over those before.
  std::vector<double> count_ = {0};
  std::vector<double> x_log_x_ = {0};
};

double LinearBins::Divergence(const EntropyLevels& levels, int64_t first,
                              int64_t last) const {
  const int64_t size = last - first;
  const size_t begin = Before(first);
  const size_t end = Before(last);
  const double below = Count(0, begin);
  const double above = Count(end, bin_.size());
  const bool has_first = begin < end && bin_[begin] == first;
  const bool has_last = begin < end && bin_[end - 1] == last - 1;
  const double first_count = has_first ? Count(begin, begin + 1) : 0;
  const double last_count = has_last ? Count(end - 1, end) : 0;

  // sum p log p, in counts.
  double p_log_p = x_log_x_[end] - x_log_x_[begin];
  if (size == 1) {
    p_log_p = XLogX(first_count + below + above);
  } else {
    if (below > 0) p_log_p += XLogX(first_count + below) - XLogX(first_count);
    if (above > 0) p_log_p += XLogX(last_count + above) - XLogX(last_count);
  }

  // sum p log q and sum q, in counts, level by level.
  double p_log_q = 0;
  double q_total = 0;
  const int64_t first_level = LevelCursor(levels, size).At(0);
  const int64_t last_level = LevelCursor(levels, size).At(size - 1);
  const auto add = [&](int64_t level, double count, int64_t filled) {
    double p = count;
    if (level == first_level && below > 0) {
      p += below;
      filled += !has_first;
    }
    if (level == last_level && above > 0) {
      p += above;
      filled += !has_last && !(size == 1 && below > 0);
    }
    constexpr double kHalf = 0.5;
    const double q = count > 0 ? count : kHalf;
    q_total += q;
    p_log_q += p * PortableLog(q / static_cast<double>(filled));
  };
  // The levels at the ends also have what lies outside.
  LevelCursor cursor(levels, size);
  int64_t added = -1;
  for (size_t i = begin; i < end;) {
    const int64_t level = cursor.At(bin_[i] - first);
    if (i == begin && level != first_level && below > 0) add(first_level, 0, 0);
    size_t next = i + 1;
    while (next < end && cursor.At(bin_[next] - first) == level) ++next;
    add(level, Count(i, next), static_cast<int64_t>(next - i));
    added = level;
    i = next;
  }
  if (begin == end && below > 0) {
    add(first_level, 0, 0);
    added = first_level;
  }
  if (added != last_level && above > 0) add(last_level, 0, 0);
  return (p_log_p - p_log_q) / total() +
         (PortableLog(q_total) - PortableLog(total()));
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

absl::StatusOr<Range> SearchEntropy(const Histogram& histogram,
                                    const EntropyLevels& levels,
                                    const Range& whole, int steps,
                                    int bin_count, StopToken stop) {
  const int count = steps == 0 ? kDefaultSteps : steps;
  // What is split into bins: grids of floats and codebooks are laid about zero.
  Range span = whole;
  if (levels.of_magnitudes) {
    span = {0, whole.abs_max()};
  } else if (levels.count == 0) {
    span = {-whole.abs_max(), whole.abs_max()};
  }
  const double from = std::clamp(0.0, span.low, span.high);
  const LinearBins bins(
      histogram, levels.of_magnitudes, span.low, span.high - span.low,
      bin_count == 0 ? std::max(kDefaultBins, 4 * levels.size()) : bin_count);
  if (bins.total() == 0) return whole;
  Range best = whole;
  double least = std::numeric_limits<double>::infinity();
  for (int k = count; k > 0; --k) {
    if (stop.stopped()) return StoppedError();
    const double fraction = static_cast<double>(k) / count;
    const Range range = {from + (span.low - from) * fraction,
                         from + (span.high - from) * fraction};
    const int64_t first = k == count ? 0 : bins.BinOf(range.low);
    const int64_t last = k == count ? bins.bins() : bins.BinsUpTo(range.high);
    if (k < count && last - first < levels.size()) break;
    const double divergence = bins.Divergence(levels, first, last);
    if (!(divergence < least)) continue;
    least = divergence;
    best = !levels.of_magnitudes ? range
           : k == count          ? whole
                                 : Range{-range.high, range.high};
  }
  return best;
}

}  // namespace quantd::core
