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

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/numeric/int128.h"
#include "core/statistics/bin_table.h"

namespace quantd::core {

constexpr int kMinMantissaBits = 2;
constexpr int kMaxMantissaBits = 10;

// The default m: 7 for one scale index, 5 up to 256, otherwise 3.
int DefaultMantissaBits(int64_t scale_count);

// Count and moments that a bin keeps.
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

// A bin and its key.
struct KeyedBin {
  uint32_t key;
  HistogramBin bin;
};

// Numbers that the elements of a bin can be.
struct BinEdges {
  // The smallest and the largest element that the bin can have, both of its
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

// Not thread-safe. Few elements are kept as they are, 4 bytes each; more as a
// sorted array of bins, 24 bytes each until a counter could pass that.
class Histogram {
 public:
  // Elements that are kept as they are, at most.
  static constexpr int kMaxValues = 128;

  // Requires: kMinMantissaBits <= mantissa_bits <= kMaxMantissaBits.
  explicit Histogram(int mantissa_bits);

  Histogram(const Histogram& other);
  Histogram& operator=(const Histogram& other);
  Histogram(Histogram&&) noexcept = default;
  Histogram& operator=(Histogram&&) noexcept = default;
  ~Histogram() = default;

  // Adds `count` elements. NaN and infinities are left out; -0 counts as +0.
  void Add(const float* x, int64_t count);
  // Adds `count` elements by way of `table`, which is empty before and after
  // and of the same mantissa bits.
  void Add(const float* x, int64_t count, BinTable* table);
  // Adds what `table`, of the same mantissa bits, holds, and empties it.
  void Drain(BinTable* table);
  // Quick for keys in ascending order. Requires: key < 2^(9 + m), of finite
  // elements; moments that bin.count elements of the bin have.
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
    Visit(visit);
  }

  // Bytes of memory that the histogram takes, itself included. Depends on how
  // the elements came as well.
  int64_t memory_bytes() const;

  friend bool operator==(const Histogram& a, const Histogram& b);

 private:
  // Ascending by key; `wide` if is_wide, otherwise `narrow`.
  struct Bins {
    bool is_wide = false;
    std::vector<PackedBin> narrow;
    std::vector<KeyedBin> wide;
  };

  void Visit(
      absl::FunctionRef<void(uint32_t, const HistogramBin&)> visit) const;
  // Requires: room for them, all finite.
  void AppendValues(const float* x, int count);
  // Keeps `bin` as one or two elements. False, and does nothing, if it cannot
  // be kept so.
  bool AppendBin(uint32_t key, const HistogramBin& bin);
  // Adds bins in ascending order of key that have `count` elements in all.
  template <typename Bin>
  void MergeBins(const Bin* bins, size_t bin_count, uint64_t count);

  // [value_capacity_], of which value_count_ elements are held, finite.
  std::unique_ptr<float[]> values_;
  // Null until there are more elements than values_ holds.
  std::unique_ptr<Bins> bins_;
  // In values_ and bins_.
  uint64_t count_ = 0;
  uint8_t mantissa_bits_;
  uint8_t value_count_ = 0;
  uint8_t value_capacity_ = 0;
};

// Sums over elements.
struct Moments {
  double sum = 0;
  double square_sum = 0;
};

// Moments of the elements of a bin, each rounded once.
Moments BinMoments(const BinEdges& edges, const HistogramBin& bin);
// Moments of all elements of a histogram: off by less than 1e-15 of the sum of
// |x|, and of the sum of squares. The same on every machine.
Moments HistogramMoments(const Histogram& histogram);

}  // namespace quantd::core

#endif  // QUANTD_CORE_STATISTICS_HISTOGRAM_H_
