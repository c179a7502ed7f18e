// One spec for each tensor of a model.

#ifndef QUANTD_CORE_CALIBRATE_MIXED_PRECISION_H_
#define QUANTD_CORE_CALIBRATE_MIXED_PRECISION_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/calibrate/precision_option.h"
#include "core/parallel/stop_token.h"

namespace quantd::core {

struct Mixture {
  // [tensor count] index into the tensor's options.
  std::vector<int> choice;
  bool target_met = true;
};

// The smallest option of each tensor whose noise is at most that of
// `min_sqnr_db`; the one with the least noise where there is none, and then the
// target is not met. At equal size the less noise, then the smaller spec_index.
// Errors, as below: CANCELLED.
absl::StatusOr<Mixture> SmallestMixture(absl::Span<const TensorOptions> tensors,
                                        double min_sqnr_db,
                                        StopToken stop = StopToken());

// The least sum of noise_to_signal with at most `max_size_bytes` in all, or
// nearly. It is never above that of any one spec for all tensors that fits, nor
// more than one tensor's step above the optimum; it is the optimum, to
// rounding, unless SearchMixture, which is what looks for it, meets its bounds.
// The start is Lagrangian relaxation on the lower convex hull of each tensor's
// options, and the one spec; what either leaves is filled greedily. The
// smallest options where even they are too large, and then the target is not
// met.
//
// Noise that is not finite counts as 1e200.
absl::StatusOr<Mixture> BestMixture(absl::Span<const TensorOptions> tensors,
                                    int64_t max_size_bytes,
                                    StopToken stop = StopToken());

// What BestMixture takes at most: for each tensor a hull on the heap, a place
// in a queue and in three choices; for each option of it a place in its hull;
// and beside all that MixtureBytes, when a tensor has so many options.
constexpr int64_t kMixtureTensorBytes = 92;
constexpr int64_t kMixtureOptionBytes = sizeof(int);
int64_t MixtureBytes(int64_t options);

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_MIXED_PRECISION_H_
