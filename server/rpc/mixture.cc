#include "server/rpc/mixture.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/calibrate/mixed_precision.h"
#include "core/calibrate/precision_option.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"

namespace quantd::server {

absl::Status CheckTarget(const v1::MixtureTarget& target) {
  switch (target.target_case()) {
    case v1::MixtureTarget::kMinSqnrDb:
      if (std::isfinite(target.min_sqnr_db())) return absl::OkStatus();
      return core::WithField(core::TargetInvalidError(absl::StrCat(
                                 "min_sqnr_db is ", target.min_sqnr_db(),
                                 ", expected a finite number")),
                             "min_sqnr_db");
    case v1::MixtureTarget::kMaxSizeBytes: {
      constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
      const uint64_t bytes = target.max_size_bytes();
      if (bytes >= 1 && bytes <= kMax) return absl::OkStatus();
      return core::WithField(
          core::TargetInvalidError(absl::StrCat("max_size_bytes is ", bytes,
                                                ", expected 1 to ", kMax)),
          "max_size_bytes");
    }
    case v1::MixtureTarget::TARGET_NOT_SET:
      break;
  }
  return core::TargetInvalidError(
      "expected min_sqnr_db or max_size_bytes, got neither");
}

absl::Status MakeMixture(
    absl::Span<const core::TensorOptions> tensors,
    const v1::MixtureTarget& target,
    absl::FunctionRef<const std::string&(size_t tensor)> name_of,
    absl::FunctionRef<double(size_t tensor, int option)> sqnr_of,
    core::StopToken stop, v1::SweepMixture* mixture) {
  const absl::StatusOr<core::Mixture> chosen =
      target.has_min_sqnr_db()
          ? core::SmallestMixture(tensors, target.min_sqnr_db(), stop)
          : core::BestMixture(
                tensors, static_cast<int64_t>(target.max_size_bytes()), stop);
  if (!chosen.ok()) return chosen.status();
  mixture->set_target_met(chosen->target_met);
  mixture->mutable_choices()->Reserve(static_cast<int>(tensors.size()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int option = chosen->choice[i];
    v1::SweepMixture::Choice* const choice = mixture->add_choices();
    choice->set_tensor(name_of(i));
    choice->set_spec_index(tensors[i][option].spec_index);
    AddToFigures(tensors[i][option], sqnr_of(i, option), i == 0, mixture);
  }
  return absl::OkStatus();
}

}  // namespace quantd::server
