// One spec for each tensor of a model.

#ifndef QUANTD_CORE_CALIBRATE_MIXED_PRECISION_H_
#define QUANTD_CORE_CALIBRATE_MIXED_PRECISION_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace quantd::core {

// What a spec would do to one tensor.
struct PrecisionOption {
  int spec_index;
  int64_t size_bytes;
  // sum e^2 / sum x^2.
  double noise_to_signal;
};

// The options of one tensor; at least one.
using TensorOptions = std::vector<PrecisionOption>;

struct Mixture {
  // [tensor count] index into the tensor's options.
  std::vector<int> choice;
  bool target_met = true;
};

// The smallest option of each tensor whose noise is at most that of
// `min_sqnr_db`; the one with the least noise where there is none, and then the
// target is not met. At equal size the less noise, then the smaller spec_index.
Mixture SmallestMixture(absl::Span<const TensorOptions> tensors,
                        double min_sqnr_db);

// The least sum of noise_to_signal with at most `max_size_bytes` in all, by
// Lagrangian relaxation on the lower convex hull of each tensor's options and
// then a greedy fill of what is left: no more than one tensor's step above the
// optimum. The smallest options where even they are too large, and then the
// target is not met.
Mixture BestMixture(absl::Span<const TensorOptions> tensors,
                    int64_t max_size_bytes);

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_MIXED_PRECISION_H_
