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
#include "core/calibrate/block_entropy.h"
#include "core/calibrate/block_search.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/squared_error.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/histogram.h"
#include "core/types/portable_log.h"

namespace quantd::core {
namespace {

constexpr int64_t kDefaultBins = 2048;

// Most levels of ranges that are all tried at once.
constexpr int64_t kMostLevelsAtOnce = 256;

// PortableLog(n / 2) for n up to twice the counts of blocks.
class HalfLogs {
 public:
  // The table for blocks with up to so many elements.
  static const HalfLogs& For(int64_t elements) {
    static const HalfLogs& few = *new HalfLogs(kFewDirectElements);
    if (elements <= kFewDirectElements) return few;
    static const HalfLogs& many = *new HalfLogs(kMostDivergenceElements);
    return many;
  }
  static const HalfLogs& OfFew() { return For(kFewDirectElements); }

  // 0 for n = 0.
  const double* data() const { return log_.data(); }
  // PortableLog(x).
  double Of(double x) const {
    if (!(x <= static_cast<double>(elements_))) return PortableLog(x);
    const auto n = static_cast<int64_t>(2 * x);
    return static_cast<double>(n) == 2 * x ? log_[static_cast<size_t>(n)]
                                           : PortableLog(x);
  }

 private:
  // Levels that are empty have half a count.
  explicit HalfLogs(int64_t elements)
      : elements_(elements),
        log_(static_cast<size_t>(2 * elements + kMostLevelsAtOnce + 1)) {
    for (size_t n = 1; n < log_.size(); ++n) {
      log_[n] = PortableLog(static_cast<double>(n) / 2);
    }
  }

  const int64_t elements_;
  std::vector<double> log_;
};

// Requires: x > 0.
double LogOf(double x) { return HalfLogs::OfFew().Of(x); }

double XLogX(double x) { return x > 0 ? x * LogOf(x) : 0; }

// Ends of the levels of a range of `size` bins: level l has the bins before
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
  // Logarithm of a count that is a power of two; otherwise -1.
  int shift_ = -1;
};

constexpr int64_t kWordBits = 64;

// Calls `function(t)` for each bit t that is set, ascending.
template <typename Function>
void ForEachBit(const uint64_t* words, int64_t count,
                const Function& function) {
  for (int64_t word = 0; word < count; ++word) {
    for (uint64_t bits = words[word]; bits != 0; bits &= bits - 1) {
      function(word * kWordBits + absl::countr_zero(bits));
    }
  }
}

// Counts in those linear bins that have elements, and running sums over them:
// time and memory follow what there is, but for 3/16 of a byte a bin.
class LinearBins {
 public:
  explicit LinearBins(const BinGrid& grid)
      : grid_(grid),
        filled_(static_cast<size_t>(grid.bins / kWordBits + 1)),
        before_word_(filled_.size()) {}

  // Before up to so many are added.
  void Reserve(int64_t count) { added_.reserve(static_cast<size_t>(count)); }
  // Zeros are left out. Add all, then Finish.
  void Add(double x, double count) {
    if (x == 0) return;
    const int64_t t = grid_.BinOf(grid_.of_magnitudes ? std::fabs(x) : x);
    filled_[t / kWordBits] |= uint64_t{1} << (t % kWordBits);
    added_.push_back({t, count});
  }
  void Finish() {
    uint32_t before = 0;
    for (size_t word = 0; word < filled_.size(); ++word) {
      before_word_[word] = before;
      before += static_cast<uint32_t>(absl::popcount(filled_[word]));
    }
    bin_.reserve(before);
    count_.reserve(before + 1);
    x_log_x_.reserve(before + 1);
    ForEachBit(filled_.data(), static_cast<int64_t>(filled_.size()),
               [this](int64_t t) { bin_.push_back(t); });
    std::vector<double> in_bin(bin_.size());
    for (const Added& added : added_) in_bin[Before(added.bin)] += added.count;
    for (const double count : in_bin) {
      count_.push_back(count_.back() + count);
      x_log_x_.push_back(x_log_x_.back() + XLogX(count));
    }
  }

  // Elements in all bins.
  double total() const { return count_.back(); }

  // The divergence with bins [first, last) in p and q.
  double Divergence(const EntropyLevels& levels, int64_t first,
                    int64_t last) const;

 private:
  struct Added {
    int64_t bin;
    double count;
  };

  // How many of bin_ come before bin t.
  size_t Before(int64_t t) const {
    const int64_t word = t / kWordBits;
    const uint64_t below = (uint64_t{1} << (t % kWordBits)) - 1;
    return before_word_[word] +
           static_cast<size_t>(absl::popcount(filled_[word] & below));
  }
  // Elements of bin_[begin] to bin_[end - 1].
  double Count(size_t begin, size_t end) const {
    return count_[end] - count_[begin];
  }

  const BinGrid grid_;
  // A bit for each bin that has elements, and one more.
  std::vector<uint64_t> filled_;
  // How many bins with elements come before each word of filled_.
  std::vector<uint32_t> before_word_;
  std::vector<Added> added_;
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
  // The levels at the ends also have what lies outside.
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
  return (p_log_p - p_log_q) / total() + (LogOf(q_total) - LogOf(total()));
}

// The ranges that are tried, and the bins that they have.
class TriedRanges {
 public:
  TriedRanges(const EntropyLevels& levels, const Range& whole, int steps,
              int bins)
      : levels_(levels),
        whole_(whole),
        steps_(steps == 0 ? kDefaultSteps : steps),
        // The range that is split into bins: grids of floats and codebooks are
        // laid about zero.
        span_(levels.of_magnitudes ? Range{0, whole.abs_max()}
              : levels.count == 0  ? Range{-whole.abs_max(), whole.abs_max()}
                                   : whole),
        from_(std::clamp(0.0, span_.low, span_.high)),
        grid_{levels.of_magnitudes, span_.low, span_.high - span_.low,
              bins == 0 ? std::max(kDefaultBins, 4 * levels.size()) : bins} {}

  const BinGrid& grid() const { return grid_; }
  int steps() const { return steps_; }
  Range Of(int k) const {
    if (k == steps_) return whole_;
    const Range range = Within(k);
    return levels_.of_magnitudes ? Range{-range.high, range.high} : range;
  }
  // The bins of range k: `first` and those before `last`. Returns whether there
  // are enough of them for the range to be tried.
  bool BinsOf(int k, int64_t* first, int64_t* last) const {
    *first = 0;
    *last = grid_.bins;
    if (k == steps_) return true;
    const Range range = Within(k);
    if (range.low != span_.low) *first = grid_.BinOf(range.low);
    *last = grid_.BinsUpTo(range.high);
    return *last - *first >= levels_.size();
  }

 private:
  Range Within(int k) const {
    const double fraction = static_cast<double>(k) / steps_;
    return {from_ + (span_.low - from_) * fraction,
            from_ + (span_.high - from_) * fraction};
  }

  const EntropyLevels& levels_;
  const Range whole_;
  const int steps_;
  const Range span_;
  const double from_;
  const BinGrid grid_;
};

// `fill`  adds what there is to the bins.
absl::StatusOr<Range> SearchBins(absl::FunctionRef<void(LinearBins*)> fill,
                                 const EntropyLevels& levels,
                                 const TriedRanges& ranges, StopToken stop) {
  LinearBins bins(ranges.grid());
  fill(&bins);
  bins.Finish();
  int best = ranges.steps();
  if (bins.total() == 0) return ranges.Of(best);
  double least = std::numeric_limits<double>::infinity();
  for (int k = ranges.steps(); k > 0; --k) {
    if (stop.stopped()) return StoppedError();
    int64_t first, last;
    if (!ranges.BinsOf(k, &first, &last)) break;
    const double divergence = bins.Divergence(levels, first, last);
    if (!(divergence < least)) continue;
    least = divergence;
    best = k;
  }
  return ranges.Of(best);
}

LevelCuts CutsOf(const EntropyLevels& levels) {
  LevelCuts cuts = {levels.boundaries, 1, 0.5};
  if (levels.count == 0) return cuts;
  // The first bin t with floor(t * levels / size) above the level.
  const auto count = static_cast<double>(levels.count);
  const bool is_power = (levels.count & (levels.count - 1)) == 0;
  for (int64_t level = 1; level < levels.count; ++level) {
    cuts.end.push_back(static_cast<double>(level) / (is_power ? count : 1));
  }
  cuts.divisor = is_power ? 1 : count;
  cuts.offset = 0;
  return cuts;
}

// Does the same as SearchBins, with all ranges at once.
Range SearchAtOnce(BlockElements* elements, const EntropyLevels& levels,
                   const TriedRanges& ranges) {
  EntropyRoom& room = elements->entropy_room();
  const BinGrid& grid = ranges.grid();
  const int64_t count = elements->count();
  MakeRoom(static_cast<size_t>(count), &room.bin);
  if (elements->is_double()) {
    FindBins(grid, elements->doubles(), count, room.bin.data());
  } else {
    FindBins(grid, elements->floats(), count, room.bin.data());
  }
  // And one for zeros.
  const int64_t words = grid.bins / kWordBits + 1;
  room.in_bin.assign(static_cast<size_t>(grid.bins) + 1, 0);
  room.filled.assign(static_cast<size_t>(words), 0);
  room.before.resize(static_cast<size_t>(grid.bins) + 1);
  MakeRoom(static_cast<size_t>(count) + 1, &room.x_log_x);
  uint16_t* const in_bin = room.in_bin.data();
  uint64_t* const filled = room.filled.data();
  uint32_t* const before = room.before.data();
  double* const x_log_x = room.x_log_x.data();
  const int32_t* const bin = room.bin.data();
  for (int64_t i = 0; i < count; ++i) {
    ++in_bin[bin[i]];
    filled[bin[i] / kWordBits] |= uint64_t{1} << (bin[i] % kWordBits);
  }
  filled[words - 1] &= ~(uint64_t{1} << (grid.bins % kWordBits));
  int64_t next = 0;
  uint32_t sum = 0;
  double log_sum = 0;
  int64_t bins_filled = 0;
  x_log_x[0] = 0;
  ForEachBit(filled, words, [&](int64_t t) {
    std::fill(before + next, before + t + 1, sum);
    next = t + 1;
    sum += (uint32_t{1} << 16) + in_bin[t];
    log_sum += XLogX(in_bin[t]);
    x_log_x[++bins_filled] = log_sum;
  });
  std::fill(before + next, before + grid.bins + 1, sum);
  if (bins_filled == 0) return ranges.Of(ranges.steps());

  const int64_t padded =
      (ranges.steps() + kRangeLanes - 1) / kRangeLanes * kRangeLanes;
  room.first.resize(static_cast<size_t>(padded));
  room.last.resize(static_cast<size_t>(padded));
  room.divergence.resize(static_cast<size_t>(padded));
  int32_t* const first = room.first.data();
  int32_t* const last = room.last.data();
  int64_t tried = 0;
  for (int k = ranges.steps(); k > 0; --k, ++tried) {
    int64_t begin, end;
    if (!ranges.BinsOf(k, &begin, &end)) break;
    first[tried] = static_cast<int32_t>(begin);
    last[tried] = static_cast<int32_t>(end);
  }
  const int64_t used = (tried + kRangeLanes - 1) / kRangeLanes * kRangeLanes;
  std::fill(first + tried, first + used, first[0]);
  std::fill(last + tried, last + used, last[0]);
  FindDivergences(CutsOf(levels),
                  {before, grid.bins, x_log_x, HalfLogs::For(count).data(),
                   used, first, last, room.divergence.data()});
  const double* const divergence = room.divergence.data();
  int64_t best = 0;
  for (int64_t i = 1; i < tried; ++i) {
    if (divergence[i] < divergence[best]) best = i;
  }
  return ranges.Of(ranges.steps() - static_cast<int>(best));
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

absl::StatusOr<Range> SearchEntropy(const Histogram& histogram,
                                    const EntropyLevels& levels,
                                    const Range& whole, int steps,
                                    int bin_count, StopToken stop) {
  return SearchBins(
      [&](LinearBins* bins) {
        histogram.ForEachBin([&](uint32_t key, const HistogramBin& bin) {
          // Cutting takes all elements of the bin to its base.
          bins->Add(HistogramBinEdges(key, histogram.mantissa_bits()).base,
                    static_cast<double>(bin.count));
        });
      },
      levels, TriedRanges(levels, whole, steps, bin_count), stop);
}

absl::StatusOr<Range> SearchEntropy(BlockElements* elements,
                                    const EntropyLevels& levels,
                                    const Range& whole, int steps,
                                    int bin_count, StopToken stop) {
  const TriedRanges ranges(levels, whole, steps, bin_count);
  // Most of many levels have no elements, and LinearBins passes over those.
  constexpr int64_t kFewLevels = 32;
  if (AreDivergencesVectorized() &&
      elements->count() <= kMostDivergenceElements &&
      levels.size() <=
          std::clamp(elements->count(), kFewLevels, kMostLevelsAtOnce)) {
    if (stop.stopped()) return StoppedError();
    return SearchAtOnce(elements, levels, ranges);
  }
  return SearchBins(
      [&](LinearBins* bins) {
        bins->Reserve(elements->count());
        for (int64_t i = 0; i < elements->count(); ++i) {
          bins->Add(elements->at(i), 1);
        }
      },
      levels, ranges, stop);
}

}  // namespace quantd::core
