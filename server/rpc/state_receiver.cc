#include "server/rpc/state_receiver.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/errors.h"
#include "core/quantize/compensation_factor.h"
#include "core/statistics/feature_moments.h"
#include "core/statistics/gram_state.h"
#include "core/statistics/statistics_state.h"
#include "server/store/moments_pieces.h"

namespace quantd::server {

StateReceiver::StateReceiver(const RpcEnvironment& env, Expected expected)
    : env_(env), expected_(std::move(expected)) {}

absl::Status StateReceiver::Reserve() {
  int64_t bytes = expected_.size_bytes + reading_bytes_;
  if (expected_.gram.has_value()) {
    const auto features =
        static_cast<int64_t>(expected_.gram->exponents.size());
    const int64_t part_size = expected_.gram->part_size;
    const int64_t gram_bytes =
        core::GramState::MemoryBytes(features, part_size);
    // Its sums stand beside the bytes, and then beside the matrix. That is
    // checked when they are gone.
    bytes += std::max({expected_.size_bytes, gram_bytes,
                       gram_bytes +
                           core::SemidefiniteCheckBytes(features, part_size) -
                           expected_.size_bytes});
  }
  if (expected_.moments_axis.has_value()) {
    bytes += MergeMomentsBytes(expected_.moments_feature_count);
  }
  return env_.budget->Grow(&lease_, bytes,
                           "contribute to fewer tensors at once, with a "
                           "coarser granularity or smaller parts");
}

void StateReceiver::Append(absl::Span<const uint8_t> data) {
  if (bytes_.empty()) bytes_.reserve(expected_.size_bytes);
  bytes_.append(reinterpret_cast<const char*>(data.data()), data.size());
}

absl::Status StateReceiver::Split() {
  absl::StatusOr<ContributionStateBytes> split = SplitContributionState(bytes_);
  if (!split.ok()) return split.status();
  split_ = *std::move(split);
  reading_bytes_ = split_.statistics_memory_bytes + split_.moments_memory_bytes;
  const bool has_gram = split_.gram.has_value();
  if (has_gram != expected_.gram.has_value()) {
    return core::StatisticsInvalidError(absl::StrCat(
        "the state has ", has_gram ? "a" : "no", " Gram matrix, expected ",
        has_gram ? "none" : "one", ", as features.gram of the header says"));
  }
  const bool has_moments = split_.moments.has_value();
  if (has_moments != expected_.moments_axis.has_value()) {
    return core::StatisticsInvalidError(
        absl::StrCat("the state has ", has_moments ? "" : "no ",
                     "moments, expected ", has_moments ? "none" : "some",
                     ", as features.moments of the header says"));
  }
  if (has_gram && (split_.gram->exponents != expected_.gram->exponents ||
                   split_.gram->part_size != expected_.gram->part_size)) {
    return core::StatisticsInvalidError(absl::StrCat(
        "the Gram state has ", split_.gram->exponents.size(),
        " features in parts of ", split_.gram->part_size, ", expected ",
        expected_.gram->exponents.size(), " in ", expected_.gram->part_size,
        ", with the step exponents of the header"));
  }
  return absl::OkStatus();
}

absl::StatusOr<core::StatisticsState> StateReceiver::Read(
    core::StopToken stop) {
  absl::StatusOr<core::StatisticsState> state =
      ReadContributedStatistics(split_, expected_.shape, slice());
  if (!state.ok()) return state;
  if (absl::Status s = CheckAsExpected(*state); !s.ok()) return s;
  if (stop.stopped()) return core::StoppedError();
  if (absl::Status s = ReadFeatures(&*state, stop); !s.ok()) return s;
  int64_t kept_bytes = state->statistics.memory_bytes();
  if (state->gram.has_value()) kept_bytes += state->gram->memory_bytes();
  if (state->moments.has_value()) {
    kept_bytes += state->moments->moments.memory_bytes();
  }
  MemoryBudget::Lease kept;
  env_.budget->Count(&kept, kept_bytes);
  lease_ = std::move(kept);
  return state;
}

absl::Status StateReceiver::ReadFeatures(core::StatisticsState* state,
                                         core::StopToken stop) {
  if (split_.moments.has_value()) {
    absl::StatusOr<core::AxisMoments> moments = ReadContributedMoments(
        split_, *expected_.moments_axis, expected_.moments_feature_count);
    if (!moments.ok()) return moments.status();
    state->moments = *std::move(moments);
    absl::Status status = core::CheckMoments(*state, slice());
    if (!status.ok()) return status;
  }
  core::GramState::Parts parts;
  if (split_.gram.has_value()) parts = ReadContributedGram(split_);
  split_ = {};
  bytes_ = std::string();
  if (!expected_.gram.has_value()) return absl::OkStatus();
  absl::StatusOr<core::GramState> gram = core::GramState::FromParts(parts);
  if (!gram.ok()) return gram.status();
  parts = {};
  absl::Status status = CheckGramFits(*gram, state->statistics);
  if (!status.ok()) return status;
  status = core::CheckSemidefinite(*gram, env_.helper_pool, stop);
  if (!status.ok()) return status;
  state->gram = *std::move(gram);
  return absl::OkStatus();
}

absl::Status StateReceiver::CheckAsExpected(
    const core::StatisticsState& state) const {
  if (state.block_size != expected_.block_size) {
    return core::StatisticsInvalidError(absl::StrCat(
        "the state has blocks of [", absl::StrJoin(state.block_size, ", "),
        "], expected [", absl::StrJoin(expected_.block_size, ", "),
        "], those of the header"));
  }
  if (state.statistics.mantissa_bits() != expected_.mantissa_bits) {
    return core::StatisticsInvalidError(
        absl::StrCat("the state has ", state.statistics.mantissa_bits(),
                     " mantissa bits, expected ", expected_.mantissa_bits,
                     ", those of the header"));
  }
  return absl::OkStatus();
}

}  // namespace quantd::server
