// A histogram laid out for searching: where the elements lie, and sums over any
// of its bins in constant time.

#ifndef QUANTD_CORE_CALIBRATE_DISTRIBUTION_H_
#define QUANTD_CORE_CALIBRATE_DISTRIBUTION_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "core/statistics/histogram.h"
#include "core/statistics/tensor_statistics.h"

namespace quantd::core {

// Elements of which the count and the first two moments are known, and that all
// lie in [low, high]. Where low == high all of them are that value.
struct Mass {
  double low;
  double high;
  double count;
  double mean;
  // Sum of (x - mean)^2, and its mean.
  double spread;
  double variance;
  // Half width of the uniform density with that mean and variance.
  double half_width;
};

// Sum with the rounding errors carried along: as good as if it were rounded
// once. (Neumaier, 1974)
class CompensatedSum {
 public:
  void Add(double x);
  double value() const { return std::isfinite(sum_) ? sum_ + carry_ : sum_; }

 private:
  double sum_ = 0;
  double carry_ = 0;
};

// The masses are the bins, with two exceptions. A bin of one or two elements,
// or of equal ones, gives these elements back exactly. The extremes are known
// exactly too. Everything is in float64, in one order: the same bits on every
// machine. Immutable, thread-safe.
class Distribution {
 public:
  // Elements of `histogram`, whose extremes narrow down the outermost bins.
  Distribution(const Histogram& histogram, const Extremes& extremes);

  // The distribution of |x|.
  static Distribution OfMagnitudes(const Histogram& histogram,
                                   const Extremes& extremes);

  // Ascending: the high of one is at most the low of the next.
  absl::Span<const Mass> masses() const { return masses_; }
  uint64_t count() const { return rank_.back(); }
  // [masses + 1] how many elements come before each mass.
  absl::Span<const uint64_t> rank() const { return rank_; }
  int64_t memory_bytes() const;
  // Sum of x^2.
  double signal() const { return signal_; }
  // Requires: count() > 0.
  double mean() const { return sum_ / static_cast<double>(count()); }

  // The first mass from `first` on with an element that may be above x.
  // Quick when it is near.
  size_t FirstAbove(size_t first, double x) const;

  // Sum of (x - value)^2 over masses [first, last). Rounding costs some 2^-50
  // of the sum of x^2 over elements closer to zero.
  double SquaredDistance(size_t first, size_t last, double value) const;

 private:
  // A bin as it is split up.
  struct Piece {
    double low;
    double high;
    double base;
    double unit;
    HistogramBin bin;
  };
  struct Moments {
    double count = 0;
    double sum = 0;
    double square_sum = 0;
  };

  Distribution(std::vector<Piece> pieces, const Extremes& extremes);

  // Takes one element out of a bin, if it can be in it and is not known anyway.
  static bool TakeOut(double x, Piece* piece);
  void AddPiece(const Piece& piece);
  void AddPoint(double x, uint64_t count);
  void AddSums();

  std::vector<Mass> masses_;
  // [masses] the high of each mass, packed for FirstAbove.
  std::vector<double> high_;
  std::vector<uint64_t> rank_ = {0};
  // [masses + 1] running from zero outwards, so that sums of small elements are
  // not lost beside those of large ones.
  std::vector<Moments> moments_;
  double signal_ = 0;
  double sum_ = 0;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_DISTRIBUTION_H_
