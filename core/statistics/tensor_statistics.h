// What a tensor is made of: extremes per scale index, and counts.

#ifndef QUANTD_CORE_STATISTICS_TENSOR_STATISTICS_H_
#define QUANTD_CORE_STATISTICS_TENSOR_STATISTICS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "core/parallel/thread_pool.h"
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
class TensorStatistics {
 public:
  explicit TensorStatistics(int64_t scale_count);

  // Takes in elements [first, first + count) of a tensor of `layout`.
  // `data`  [count] elements of `type`, any alignment.
  // `pool`  spreads a large range over its threads; may be null.
  // Requires: layout.scale_count() == scale_count.
  void Update(const BlockLayout& layout, ElementType type, int64_t first,
              int64_t count, const uint8_t* data, ThreadPool* pool);

  // Requires: the same scale count.
  void Merge(const TensorStatistics& other);

  const ElementCounts& counts() const { return counts_; }
  // [scale_count], row-major.
  absl::Span<const Extremes> extremes() const { return extremes_; }
  // Over all scale indices.
  Extremes overall() const;

 private:
  ElementCounts counts_;
  std::vector<Extremes> extremes_;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_STATISTICS_TENSOR_STATISTICS_H_
