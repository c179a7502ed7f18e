// Serialized contributions of statistics: whatever is taken is a state, a Gram
// matrix and moments that are the same after a round trip, and add to
// themselves.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/statistics/feature_moments.h"
#include "core/statistics/gram_state.h"
#include "core/statistics/statistics_state.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "quantd/v1/statistics.pb.h"
#include "server/wire/contribution_state.h"
#include "server/wire/statistics_proto.h"
#include "tests/fuzz/fuzz_target.h"

namespace quantd::fuzz {
namespace contribution_target {
namespace {

void GramToProto(const core::GramState& gram, v1::GramState* proto) {
  const core::GramState::Parts parts = gram.ToParts();
  proto->mutable_step_exponent()->Assign(parts.exponents.begin(),
                                         parts.exponents.end());
  proto->set_part_size(static_cast<uint64_t>(parts.part_size));
  proto->set_rows(static_cast<uint64_t>(parts.rows));
  proto->set_left_out_rows(static_cast<uint64_t>(parts.left_out_rows));
  proto->set_clipped_count(static_cast<uint64_t>(parts.clipped));
  proto->mutable_code_sum()->Assign(parts.code_sums.begin(),
                                    parts.code_sums.end());
}

std::string Serialized(const core::StatisticsState& state) {
  v1::ContributionState proto;
  server::StateToProto(state, proto.mutable_statistics());
  if (state.gram.has_value()) GramToProto(*state.gram, proto.mutable_gram());
  if (state.moments.has_value()) {
    server::MomentsToProto(*state.moments, proto.mutable_moments());
  }
  return proto.SerializeAsString();
}

absl::Status ReadMoments(const server::ContributionStateBytes& split,
                         core::StatisticsState* state) {
  if (!split.moments.has_value()) return absl::OkStatus();
  v1::FeatureMoments outline;
  const auto size = static_cast<int>(split.moments->size());
  if (!outline.ParseFromArray(split.moments->data(), size) ||
      outline.axis() >= state->shape.size() ||
      state->shape[outline.axis()] != outline.count_size()) {
    return core::StatisticsInvalidError("no moments of the tensor");
  }
  absl::StatusOr<core::AxisMoments> moments = server::ReadContributedMoments(
      split, outline.axis(), outline.count_size());
  if (!moments.ok()) return moments.status();
  state->moments = *std::move(moments);
  return core::CheckMoments(*state);
}

absl::StatusOr<core::StatisticsState> Read(absl::string_view bytes) {
  const absl::StatusOr<server::ContributionStateBytes> split =
      server::SplitContributionState(bytes);
  if (!split.ok()) return split.status();
  Require(split->statistics_memory_bytes > 0, "a message takes memory");
  // A header that says what the message says.
  v1::StatisticsState outline;
  if (!outline.ParseFromArray(split->statistics.data(),
                              static_cast<int>(split->statistics.size()))) {
    return core::StatisticsInvalidError("no message");
  }
  absl::StatusOr<core::StatisticsState> state =
      server::ReadContributedStatistics(
          *split,
          std::vector<int64_t>(outline.shape().begin(), outline.shape().end()),
          /*slice=*/nullptr);
  if (!state.ok()) return state;
  if (absl::Status s = ReadMoments(*split, &*state); !s.ok()) return s;
  if (!split->gram.has_value()) return state;
  absl::StatusOr<core::GramState> gram =
      core::GramState::FromParts(server::ReadContributedGram(*split));
  if (!gram.ok()) return gram.status();
  absl::Status fits = server::CheckGramFits(*gram, state->statistics);
  if (!fits.ok()) return fits;
  state->gram = *std::move(gram);
  return state;
}

void Run(absl::Span<const uint8_t> input) {
  const absl::string_view bytes(reinterpret_cast<const char*>(input.data()),
                                input.size());
  absl::StatusOr<core::StatisticsState> state = Read(bytes);
  if (!state.ok()) {
    Require(core::ErrorReason(state.status()) == "STATISTICS_INVALID",
            "what is no state is refused as such");
    return;
  }
  const std::string kept = Serialized(*state);
  const absl::StatusOr<core::StatisticsState> again = Read(kept);
  Require(again.ok(), "what is written is read");
  Require(Serialized(*again) == kept, "a round trip changes nothing");
  core::StatisticsState twice = *again;
  if (core::MergeState(*again, &twice).ok()) {
    Require(core::CheckElementCounts(twice).ok(),
            "states of whole tensors add to one");
    if (twice.moments.has_value()) {
      Require(core::MergeMoments(*again->moments, &*twice.moments).ok() &&
                  core::CheckMoments(twice).ok(),
              "moments add to those of the elements");
    }
  }
  if (state->gram.has_value() &&
      state->gram->CheckMergeable(*again->gram).ok()) {
    state->gram->Merge(*again->gram);
    Require(core::GramState::FromParts(state->gram->ToParts()).ok(),
            "Gram matrices add to one");
  }
}

std::string Seed(std::vector<int64_t> shape, std::vector<int64_t> block_size,
                 bool with_gram, float scale, int64_t moments_axis = -1) {
  const core::BlockLayout layout =
      *core::BlockLayout::Create(shape, block_size);
  const std::vector<float> data =
      MakeFloats(layout.element_count(), scale, shape.size());
  const auto* bytes = reinterpret_cast<const uint8_t*>(data.data());
  core::StatisticsState state;
  state.statistics = core::TensorStatistics(layout.scale_count(), 4);
  state.statistics.Update(layout, core::ElementType::kFloat32, 0,
                          layout.element_count(), bytes, nullptr);
  if (with_gram) {
    const int64_t features = shape.back();
    state.gram =
        *core::GramState::Create(std::vector<int>(features, -9), features);
    state.gram->Update(core::ElementType::kFloat32,
                       layout.element_count() / features, bytes, nullptr);
    state.gram->Finish(nullptr);
  }
  if (moments_axis >= 0) {
    const core::FeatureAxis axis =
        *core::FeatureAxis::Create(shape, moments_axis);
    core::AxisMoments& moments = state.moments.emplace();
    moments.axis = moments_axis;
    moments.moments = core::FeatureMoments(axis.count);
    moments.moments.Update(axis, core::ElementType::kFloat32, 0,
                           layout.element_count(), bytes, nullptr);
  }
  state.block_size = core::CanonicalBlockSize(block_size);
  state.shape = std::move(shape);
  return Serialized(state);
}

std::vector<std::string> Seeds() {
  return {Seed({5}, {}, false, 1),
          Seed({3, 4}, {0, 1}, true, 1),
          Seed({20, 3}, {}, true, 100),
          Seed({5, 3}, {2, 0}, false, 1),
          Seed({0, 3}, {0, 1}, false, 1),
          Seed({7, 3}, {}, false, 1, 1),
          Seed({2, 5, 3}, {0, 1, 0}, true, 10, 1)};
}

size_t MessageAt(absl::Span<const uint8_t> /*input*/) { return 0; }

}  // namespace
}  // namespace contribution_target

FuzzTarget ContributionTarget() {
  return {"contribution", contribution_target::Run, contribution_target::Seeds,
          contribution_target::MessageAt,
          &v1::ContributionState::default_instance()};
}

}  // namespace quantd::fuzz
