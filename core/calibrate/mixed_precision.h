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

// A small sum of noise_to_signal with at most `max_size_bytes` in all:
// - It is never above that of one spec for all tensors, if that fits.
// - It is at most one tensor's step above the optimum.
// - It is the optimum, to rounding, unless SearchMixture meets its bounds.
// There are two starts: Lagrangian relaxation on the lower convex hull of each
// tensor's options, and one spec for all. A greedy pass fills the bytes that a
// start leaves. Where even the smallest options are too large, the answer is
// those, and the target is not met.
//
// Noise that is not finite counts as 1e200.
absl::StatusOr<Mixture> BestMixture(absl::Span<const TensorOptions> tensors,
                                    int64_t max_size_bytes,
                                    StopToken stop = StopToken());

// Memory that BestMixture takes at most:
// - for each tensor a hull on the heap, places in a queue and three choices;
// - for each option a place in the hull of its tensor;
// - MixtureBytes of the largest number of options that a tensor has.
constexpr int64_t kMixtureTensorBytes = 92;
constexpr int64_t kMixtureOptionBytes = sizeof(int);
int64_t MixtureBytes(int64_t options);

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_MIXED_PRECISION_H_
