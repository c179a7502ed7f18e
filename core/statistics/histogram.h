// A mergeable histogram of float32 with no range to choose and exact moments.
//
// The key of an element is the top 9 + m bits of its order-preserving pattern:
// all bits of a negative flipped, of any other the sign bit. A bin keeps three
// integers: the count, the sum of the low 23 - m bits of the elements' patterns
// (not flipped) and the sum of their squares. Within a bin the elements are
//
//   x = sign * (base + low * unit)
//
// with one base and unit, so that the first and second moments are exact.
// Adding histograms is adding integers: associative, commutative, exact.
// With m = 7 a bfloat16 tensor is kept exactly, with m = 10 a float16 one.

#ifndef QUANTD_CORE_STATISTICS_HISTOGRAM_H_
#define QUANTD_CORE_STATISTICS_HISTOGRAM_H_

#include <cstdint>
#include <map>

#include "absl/numeric/int128.h"

namespace quantd::core {

constexpr int kMinMantissaBits = 2;
constexpr int kMaxMantissaBits = 10;

// The default m: 7 for one scale index, 5 up to 256, otherwise 3.
int DefaultMantissaBits(int64_t scale_count);

// What a bin keeps.
struct HistogramBin {
  uint64_t count = 0;
  uint64_t low_sum = 0;
  absl::uint128 low_square_sum = 0;

  void Add(const HistogramBin& other) {
    count += other.count;
    low_sum += other.low_sum;
    low_square_sum += other.low_square_sum;
  }
  friend bool operator==(const HistogramBin& a, const HistogramBin& b) {
    return a.count == b.count && a.low_sum == b.low_sum &&
           a.low_square_sum == b.low_square_sum;
  }
};

// Where the elements of a bin lie.
struct BinEdges {
  // Of the smallest and the largest element that the bin can have, both of its
  // sign; -0 does not occur.
  float low;
  float high;
  // x = base + low * unit, with base and unit negative for negative bins; base
  // is `low` for positive bins and `high` for negative ones. Exact in float64.
  double base;
  double unit;
};

// Keys of finite elements have 9 + mantissa_bits bits.
uint32_t HistogramKey(float x, int mantissa_bits);
BinEdges HistogramBinEdges(uint32_t key, int mantissa_bits);

// Not thread-safe.
class Histogram {
 public:
  // Requires: kMinMantissaBits <= mantissa_bits <= kMaxMantissaBits.
  explicit Histogram(int mantissa_bits);

  // Adds `count` elements. NaN and infinities are left out; -0 counts as +0.
  void Add(const float* x, int64_t count);
  // Requires: key < 2^(9 + m), of finite elements.
  void AddBin(uint32_t key, const HistogramBin& bin);
  // Requires: the same mantissa bits.
  void Merge(const Histogram& other);

  int mantissa_bits() const { return mantissa_bits_; }
  // Finite elements.
  uint64_t count() const { return count_; }
  // Calls `visit(uint32_t key, const HistogramBin&)` for every bin that has
  // elements, in ascending order of key, which is that of the elements.
  template <typename Visitor>
  void ForEachBin(Visitor&& visit) const {
    for (const auto& [key, bin] : bins_) visit(key, bin);
  }

  // What the histogram takes in memory, itself included.
  int64_t memory_bytes() const;

  friend bool operator==(const Histogram& a, const Histogram& b);

 private:
  int mantissa_bits_;
  uint64_t count_ = 0;
  std::map<uint32_t, HistogramBin> bins_;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_STATISTICS_HISTOGRAM_H_
