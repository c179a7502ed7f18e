#include "core/calibrate/entropy.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/numeric/bits.h"
#include "absl/status/statusor.h"
#include "core/calibrate/block_search.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/squared_error.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/histogram.h"

namespace quantd::core {
namespace {

constexpr int kDefaultSteps = 128;
constexpr int64_t kDefaultBins = 2048;

// PortableLog(n / 2) for n up to twice the counts of small blocks.
class HalfLogs {
 public:
  static const HalfLogs& Get() {
    static const HalfLogs& logs = *new HalfLogs();
    return logs;
  }

  // Requires: 0 < n <= 2 * kMaxDirectElements.
  double OfHalves(int64_t n) const { return log_[n]; }
  // PortableLog(x).
  double Of(double x) const {
    if (!(x <= kMaxDirectElements)) return PortableLog(x);
    const auto n = static_cast<int64_t>(2 * x);
    return static_cast<double>(n) == 2 * x ? log_[n] : PortableLog(x);
  }

 private:
  HalfLogs() {
    for (int64_t n = 1; n <= 2 * kMaxDirectElements; ++n) {
      log_[n] = PortableLog(static_cast<double>(n) / 2);
    }
  }

  double log_[2 * kMaxDirectElements + 1] = {};
};

// Requires: x > 0.
double LogOf(double x) { return HalfLogs::Get().Of(x); }

double XLogX(double x) { return x > 0 ? x * LogOf(x) : 0; }

// Where the levels of a range of `size` bins end: level l has the bins before
// End(l) that no level before it has.
class LevelEnds {
 public:
  LevelEnds(const EntropyLevels& levels, int64_t size)
      : levels_(levels), size_(size), last_(levels.size() - 1) {
    if (levels.count > 0 && (levels.count & (levels.count - 1)) == 0) {
      shift_ = absl::countr_zero(static_cast<uint64_t>(levels.count));
    }
  }

  int64_t End(int64_t level) const {
    if (level >= last_) return size_;
    if (levels_.count != 0) {
      // The first bin t with floor(t * levels / size) above the level.
      const int64_t end = (level + 1) * size_ + levels_.count - 1;
      return shift_ >= 0 ? end >> shift_ : end / levels_.count;
    }
    // The first bin whose middle is past the level.
    const double end =
        std::ceil(levels_.boundaries[level] * static_cast<double>(size_) - 0.5);
    return std::clamp<int64_t>(static_cast<int64_t>(end), 0, size_);
  }
  // The level that bin t lies in, not before `from`.
  int64_t At(int64_t t, int64_t from) const {
    if (levels_.count != 0) return t * levels_.count / size_;
    while (from < last_ && t >= End(from)) ++from;
    return from;
  }

 private:
  const EntropyLevels& levels_;
  const int64_t size_;
  const int64_t last_;
  // Of a count that is a power of two; otherwise -1.
  int shift_ = -1;
};

// Counts in those linear bins that have elements, and running sums over them:
// time and memory follow what there is, not the number of bins or levels.
class LinearBins {
 public:
  // `low` and `width` of all bins together.
  LinearBins(bool of_magnitudes, double low, double width, int64_t bins)
      : of_magnitudes_(of_magnitudes),
        low_(low),
        width_(width),
        bins_(bins),
        in_bin_(static_cast<size_t>(bins)),
        filled_(static_cast<size_t>((bins + kWordBits - 1) / kWordBits)),
        before_(static_cast<size_t>(bins + 1)) {}

  // Zeros are left out. Add all, then Finish.
  void Add(double x, double count) {
    if (x == 0) return;
    const int64_t t = BinOf(of_magnitudes_ ? std::fabs(x) : x);
    in_bin_[t] += count;
    filled_[t / kWordBits] |= uint64_t{1} << (t % kWordBits);
  }
  void Finish() {
    int64_t next = 0;
    for (size_t word = 0; word < filled_.size(); ++word) {
      for (uint64_t bits = filled_[word]; bits != 0; bits &= bits - 1) {
        const int64_t t =
            static_cast<int64_t>(word) * kWordBits + absl::countr_zero(bits);
        std::fill(before_.begin() + next, before_.begin() + t + 1,
                  static_cast<uint32_t>(bin_.size()));
        next = t + 1;
        bin_.push_back(t);
        count_.push_back(count_.back() + in_bin_[t]);
        x_log_x_.push_back(x_log_x_.back() + XLogX(in_bin_[t]));
      }
    }
    std::fill(before_.begin() + next, before_.end(),
              static_cast<uint32_t>(bin_.size()));
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
  size_t Before(int64_t t) const { return before_[static_cast<size_t>(t)]; }
  // Elements of bin_[begin] to bin_[end - 1].
  double Count(size_t begin, size_t end) const {
    return count_[end] - count_[begin];
  }

  const bool of_magnitudes_;
  const double low_;
  const double width_;
  const int64_t bins_;
  static constexpr int64_t kWordBits = 64;
  // [bins] elements, and a bit for those that have some.
  std::vector<double> in_bin_;
  std::vector<uint64_t> filled_;
  // [bins + 1] how many bins before have elements.
  std::vector<uint32_t> before_;
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
  const LevelEnds ends(levels, size);
  const int64_t first_level = ends.At(0, 0);
  const int64_t last_level = ends.At(size - 1, 0);
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
    p_log_q += p * (LogOf(q) - LogOf(static_cast<double>(filled)));
  };
  // The levels at the ends also have what lies outside. Where there are many
  // levels, those without elements are passed over.
  constexpr int64_t kFewLevels = 32;
  if (total() <= kMaxDirectElements && levels.size() <= kFewLevels) {
    const HalfLogs& logs = HalfLogs::Get();
    int64_t q_halves = 0;
    size_t i = begin;
    for (int64_t level = 0; level < levels.size(); ++level) {
      const size_t next = Before(first + ends.End(level));
      double p = Count(i, next);
      auto filled = static_cast<int64_t>(next - i);
      const int64_t q = filled > 0 ? 2 * static_cast<int64_t>(p) : 1;
      if (level == first_level && below > 0) {
        p += below;
        filled += !has_first;
      }
      if (level == last_level && above > 0) {
        p += above;
        filled += !has_last && !(size == 1 && below > 0);
      }
      i = next;
      if (filled == 0) continue;
      q_halves += q;
      p_log_q += p * (logs.OfHalves(q) - logs.OfHalves(2 * filled));
    }
    q_total = static_cast<double>(q_halves) / 2;
  } else {
    int64_t added = -1;
    int64_t level = 0;
    for (size_t i = begin; i < end;) {
      level = ends.At(bin_[i] - first, level);
      if (i == begin && level != first_level && below > 0) {
        add(first_level, 0, 0);
      }
      const size_t next =
          std::min(end, std::max(i + 1, Before(first + ends.End(level))));
      add(level, Count(i, next), static_cast<int64_t>(next - i));
      added = level;
      i = next;
    }
    if (begin == end && below > 0) {
      add(first_level, 0, 0);
      added = first_level;
    }
    if (added != last_level && above > 0) add(last_level, 0, 0);
  }
  return (p_log_p - p_log_q) / total() + (LogOf(q_total) - LogOf(total()));
}

// `fill`  adds what there is to the bins.
absl::StatusOr<Range> SearchBins(absl::FunctionRef<void(LinearBins*)> fill,
                                 const EntropyLevels& levels,
                                 const Range& whole, int steps, int bin_count,
                                 StopToken stop) {
  const int count = steps == 0 ? kDefaultSteps : steps;
  // What is split into bins: grids of floats and codebooks are laid about zero.
  Range span = whole;
  if (levels.of_magnitudes) {
    span = {0, whole.abs_max()};
  } else if (levels.count == 0) {
    span = {-whole.abs_max(), whole.abs_max()};
  }
  const double from = std::clamp(0.0, span.low, span.high);
  LinearBins bins(
      levels.of_magnitudes, span.low, span.high - span.low,
      bin_count == 0 ? std::max(kDefaultBins, 4 * levels.size()) : bin_count);
  fill(&bins);
  bins.Finish();
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
  return SearchBins(
      [&](LinearBins* bins) {
        histogram.ForEachBin([&](uint32_t key, const HistogramBin& bin) {
          // What all elements of the bin are when they are cut.
          bins->Add(HistogramBinEdges(key, histogram.mantissa_bits()).base,
                    static_cast<double>(bin.count));
        });
      },
      levels, whole, steps, bin_count, stop);
}

absl::StatusOr<Range> SearchEntropy(const BlockElements& elements,
                                    const EntropyLevels& levels,
                                    const Range& whole, int steps,
                                    int bin_count, StopToken stop) {
  return SearchBins(
      [&](LinearBins* bins) {
        for (int64_t i = 0; i < elements.count(); ++i) {
          bins->Add(elements.at(i), 1);
        }
      },
      levels, whole, steps, bin_count, stop);
}

}  // namespace quantd::core
