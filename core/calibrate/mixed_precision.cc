#include "core/calibrate/mixed_precision.h"

#include <cstdint>

namespace quantd::core {

Mixture SmallestMixture(absl::Span<const TensorOptions> tensors,
                        double min_sqnr_db) {
  return Mixture{std::vector<int>(tensors.size(), 0), true};
}

Mixture BestMixture(absl::Span<const TensorOptions> tensors,
                    int64_t max_size_bytes) {
  return Mixture{std::vector<int>(tensors.size(), 0), true};
}

}  // namespace quantd::core
