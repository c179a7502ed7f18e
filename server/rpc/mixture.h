// One spec for each tensor, as Sweep and ChooseMixture answer it.

#ifndef QUANTD_SERVER_RPC_MIXTURE_H_
#define QUANTD_SERVER_RPC_MIXTURE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/calibrate/mixed_precision.h"
#include "core/calibrate/precision_option.h"
#include "core/parallel/stop_token.h"
#include "quantd/v1/encoding_service.pb.h"

namespace quantd::server {

// Errors: TARGET_INVALID, also where the target is not set.
absl::Status CheckTarget(const v1::MixtureTarget& target);

// Memory that a tensor with so many options takes while a mixture is chosen,
// besides what core::MixtureBytes says.
constexpr int64_t MixtureTensorBytes(int64_t options) {
  constexpr int64_t kHeapBytes = 32;
  constexpr int64_t kTensorBytes =
      sizeof(core::TensorOptions) + kHeapBytes + core::kMixtureTensorBytes;
  constexpr int64_t kOptionBytes =
      sizeof(core::PrecisionOption) + core::kMixtureOptionBytes;
  return kTensorBytes + options * kOptionBytes;
}

// Adds one tensor to figures over several: those of SweepTotal and
// SweepMixture.
template <typename Figures>
void AddToFigures(const core::PrecisionOption& option, double sqnr_db,
                  bool first, Figures* figures) {
  figures->set_size_bytes(figures->size_bytes() + option.size_bytes);
  figures->set_noise_to_signal_sum(figures->noise_to_signal_sum() +
                                   option.noise_to_signal);
  if (first || sqnr_db < figures->min_sqnr_db()) {
    figures->set_min_sqnr_db(sqnr_db);
  }
}

// Chooses an option of each tensor, and says what they make together.
// `name_of(tensor)`         its name.
// `sqnr_of(tensor, option)` the SQNR of its option, in decibels.
// Requires: a target that CheckTarget takes.
// Errors: CANCELLED.
absl::Status MakeMixture(
    absl::Span<const core::TensorOptions> tensors,
    const v1::MixtureTarget& target,
    absl::FunctionRef<const std::string&(size_t tensor)> name_of,
    absl::FunctionRef<double(size_t tensor, int option)> sqnr_of,
    core::StopToken stop, v1::SweepMixture* mixture);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_MIXTURE_H_
