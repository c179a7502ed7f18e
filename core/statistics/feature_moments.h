// Count, sum and sum of squares of the elements of each feature, without
// rounding.

#ifndef QUANTD_CORE_STATISTICS_FEATURE_MOMENTS_H_
#define QUANTD_CORE_STATISTICS_FEATURE_MOMENTS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/exact_sum.h"
#include "core/statistics/histogram.h"
#include "core/statistics/line_allocator.h"
#include "core/types/element_type.h"

namespace quantd::core {

// The features of a tensor are the indices of one of its dimensions: for
// activations [tokens, n] those of dimension 1, for [N, C, H, W] as well.
// Element i has feature (i / inner) % count. Plain value.
struct FeatureAxis {
  int64_t count;
  // Elements that follow each other and have the same feature.
  int64_t inner;

  // `axis` counts from the end if it is negative.
  // Errors: SHAPE_INVALID of ElementCount; AXIS_UNKNOWN.
  static absl::StatusOr<FeatureAxis> Create(absl::Span<const int64_t> shape,
                                            int64_t axis);
};

// Exact sums, one for each feature: integers times 2^exponent.
struct ExactSums {
  // The largest of which all sums are multiples; 0 when all sums are 0.
  int exponent = 0;
  // Bytes of each integer: as few as hold all of them.
  int width = 0;
  // [features * width] two's complement, little-endian.
  std::vector<uint8_t> integers;
};

// Mergeable moments of each feature. The same elements give the same moments in
// any order, chunking and number of threads, on every SIMD target: no sum is
// rounded. Elements that are not finite are counted and left out. Elements of
// float64 are rounded to float32, to nearest even, those beyond it to its
// largest. Not thread-safe.
//
// Elements of float32 are integers of 24 bits times a power of two. Each
// feature has a window of 20 exponents, which follows the data. Elements in it
// are added as doubles: in such a way that 1,024 of them need at most the 53
// bits of a double. These sums, and elements outside of the window, are added
// to integers of many bits.
class FeatureMoments {
 public:
  // Elements that one feature may have, at most.
  static constexpr int64_t kMaxCount = int64_t{1} << 62;

  // Requires: feature_count >= 0.
  explicit FeatureMoments(int64_t feature_count);

  // Takes in elements [first, first + count) of a tensor.
  // `data`  [count] elements of `type`, any alignment.
  // `pool`  spreads a large range over its threads; may be null.
  // Requires: axis.count == feature_count(); no count passes kMaxCount.
  void Update(const FeatureAxis& axis, ElementType type, int64_t first,
              int64_t count, const uint8_t* data, ThreadPool* pool);

  // Adds the moments of features [first, first + other.feature_count()).
  // Requires: there are so many features; no count passes kMaxCount.
  void Merge(const FeatureMoments& other, int64_t first = 0);

  int64_t feature_count() const { return feature_count_; }
  // Finite elements of a feature.
  int64_t count(int64_t feature) const {
    return seen_[feature] - left_out_[feature];
  }
  // Elements of a feature that are NaN or infinite.
  int64_t left_out(int64_t feature) const { return left_out_[feature]; }
  // To nearest even.
  double sum(int64_t feature) const;
  double square_sum(int64_t feature) const;

  // True if all features together have the sums of the elements in histograms,
  // to the last bit.
  // Requires: no histogram has more elements than MaxElementCount.
  bool AddUpTo(absl::Span<const Histogram> histograms) const;

  // Bytes of memory that the moments take. Takes constant time.
  int64_t memory_bytes() const { return MemoryBytes(feature_count_); }
  // Bytes of memory for that many features.
  static int64_t MemoryBytes(int64_t feature_count);

  // The moments as they are stored: the same elements give the same parts.
  struct Parts {
    // [features]
    std::vector<int64_t> count;
    std::vector<int64_t> left_out;
    ExactSums sum;
    ExactSums square_sum;
  };
  Parts ToParts() const;
  // Errors: STATISTICS_INVALID for parts that no elements have.
  static absl::StatusOr<FeatureMoments> FromParts(const Parts& parts);

 private:
  // Sums of float32: the smallest is 2^-149, the largest below 2^128.
  using Sum = ExactSum<-149, 11>;
  using SquareSum = ExactSum<-298, 20>;
  struct Totals {
    Sum sum;
    SquareSum square_sum;
  };

  struct Strip;
  void AddStrip(const Strip& strip);
  void AddRuns(const Strip& strip);
  // The window whose end is a bit above the magnitude.
  void ChooseWindow(int64_t feature, float largest);
  void AddOutside(int64_t feature, float value);
  // Adds what is pending to the totals.
  void Settle(int64_t feature);
  // The totals of a feature with what is pending.
  Totals SettledTotals(int64_t feature) const;

  int64_t feature_count_;
  // [features], and some more that vectors may reach into.
  // Elements, finite or not.
  std::vector<int64_t> seen_;
  std::vector<int64_t> left_out_;
  // The smallest magnitude in the window, as bits; 0 where there is none yet.
  LineVector<int32_t> window_;
  // Splits a square in two: what remains of x^2 + divider.
  LineVector<double> divider_;
  // Up to kMaxPending elements of each feature that are not in the totals yet.
  std::vector<int32_t> pending_;
  LineVector<double> pending_sum_;
  LineVector<double> pending_high_;
  LineVector<double> pending_low_;
  std::vector<Totals> totals_;
  // Since the limbs of totals_ were carried, for each feature.
  std::vector<int32_t> adds_;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_STATISTICS_FEATURE_MOMENTS_H_
