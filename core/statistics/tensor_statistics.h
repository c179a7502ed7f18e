// Statistics of a tensor: extremes and, if asked for, a histogram per scale
// index, and counts.

#ifndef QUANTD_CORE_STATISTICS_TENSOR_STATISTICS_H_
#define QUANTD_CORE_STATISTICS_TENSOR_STATISTICS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/histogram.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"

namespace quantd::core {

// Counts over the elements of a tensor.
struct ElementCounts {
  int64_t total = 0;
  int64_t nan = 0;
  int64_t positive_infinity = 0;
  int64_t negative_infinity = 0;
  int64_t zero = 0;  // +0 and -0

  void Merge(const ElementCounts& other);
};

// The finite extremes of the elements of one scale index. `min > max` while
// there is no finite element. A zero extreme is always +0.
struct Extremes {
  double min;
  double max;

  bool empty() const { return min > max; }
  void Merge(const Extremes& other);
};

// Mergeable statistics of one tensor at the granularity of a layout. The state
// does not depend on how the elements were split or ordered. Not thread-safe.
//
// Histograms keep float64 elements rounded to float32, to nearest even, those
// beyond it as its largest; extremes keep them as they are.
class TensorStatistics {
 public:
  // `mantissa_bits`  of the histograms; 0 for none.
  explicit TensorStatistics(int64_t scale_count, int mantissa_bits = 0);

  // Takes in elements [first, first + count) of a tensor of `layout`.
  // `data`  [count] elements of `type`, any alignment.
  // `pool`  spreads a large range over its threads; may be null.
  // Requires: layout.scale_count() == scale_count.
  void Update(const BlockLayout& layout, ElementType type, int64_t first,
              int64_t count, const uint8_t* data, ThreadPool* pool);

  // Requires: the same scale count and mantissa bits.
  void Merge(const TensorStatistics& other);

  // Returns the same elements in `scale_count` larger blocks, which
  // MergeScaleIndex has yet to fill.
  TensorStatistics Outline(int64_t scale_count) const;
  // Counts and extremes alone, at 0 mantissa bits.
  TensorStatistics WithoutHistograms() const;
  // Adds what `from` has at one scale index to another one here. The counts
  // over all elements stay.
  // Requires: the same mantissa bits.
  void MergeScaleIndex(const TensorStatistics& from, int64_t from_index,
                       int64_t to_index);

  const ElementCounts& counts() const { return counts_; }
  int64_t scale_count() const { return static_cast<int64_t>(extremes_.size()); }
  // [scale_count], row-major.
  absl::Span<const Extremes> extremes() const { return extremes_; }
  // Over all scale indices.
  Extremes overall() const;
  // True if an element of that scale index was NaN or infinite.
  bool has_non_finite(int64_t scale_index) const;

  // 0 when there are no histograms.
  int mantissa_bits() const { return mantissa_bits_; }
  // [scale_count], or empty.
  absl::Span<const Histogram> histograms() const { return histograms_; }

  // Bytes of memory that the statistics take. Takes constant time.
  int64_t memory_bytes() const;

  // The parts of a state that was serialized.
  // Requires: [scale_count] extremes and, unless mantissa_bits is 0,
  // histograms; non-finite scale indices below the scale count.
  static TensorStatistics FromParts(
      const ElementCounts& counts, std::vector<Extremes> extremes,
      absl::Span<const int64_t> non_finite_scale_indices, int mantissa_bits,
      std::vector<Histogram> histograms);

 private:
  void CountHistogramBytes();

  ElementCounts counts_;
  std::vector<Extremes> extremes_;
  // [scale_count] once a non-finite element was seen, before that empty.
  std::vector<bool> has_non_finite_;
  int mantissa_bits_;
  std::vector<Histogram> histograms_;
  int64_t histogram_bytes_ = 0;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_STATISTICS_TENSOR_STATISTICS_H_
