#include "server/rpc/tied_statistics.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/formats/scale_type.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/encoding_memory.h"
#include "server/rpc/tensor_calibration.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

constexpr char kWayOutOfTies[] =
    "tie fewer tensors, or use fewer specs at once";

// An error of a tensor that others share: at its name, not at a field of the
// spec.
absl::Status AtTensor(const absl::Status& status, absl::string_view field) {
  if (core::ErrorField(status).empty()) return core::WithField(status, field);
  return core::WithField(absl::Status(status.code(), status.message()), field);
}

bool MayHaveOuterScales(absl::Span<const core::EncodingSpec> specs) {
  return absl::c_any_of(specs, [](const core::EncodingSpec& spec) {
    return core::HasOuterScales(core::EffectiveScaleType(spec));
  });
}

}  // namespace

absl::Status TiedStatistics::Open(
    const google::protobuf::RepeatedPtrField<v1::TiedTensors>& ties) {
  int64_t count = 0;
  for (const v1::TiedTensors& group : ties) count += group.tensors_size();
  if (count > kMaxTiedTensors) {
    return core::WithField(core::TieInvalidError(absl::StrCat(
                               count, " tensors, expected at most ",
                               kMaxTiedTensors, " in all groups together")),
                           "ties");
  }
  // A slot of the map, of which up to half and more are free, for each.
  constexpr int64_t kMemberBytes =
      2 * (sizeof(absl::string_view) + sizeof(Member) + 1);
  absl::Status charged = env_.budget->Grow(
      &lease_,
      count * kMemberBytes +
          int64_t{ties.size()} * static_cast<int64_t>(sizeof(Group)),
      kWayOutOfTies);
  if (!charged.ok()) return charged;
  members_.reserve(count);
  groups_.reserve(ties.size());
  for (const v1::TiedTensors& tensors : ties) {
    Group& group = groups_.emplace_back();
    group.tensors = &tensors;
    if (tensors.tensors_size() < 2) {
      return core::WithField(
          core::TieInvalidError(absl::StrCat(tensors.tensors_size(),
                                             " tensors, expected at least 2")),
          FieldOf(group));
    }
    for (int i = 0; i < tensors.tensors_size(); ++i) {
      const std::string& tensor = tensors.tensors(i);
      if (absl::Status s = CheckTensorName(tensor); !s.ok()) {
        return core::WithField(s, FieldOf(group, i));
      }
      if (!members_.try_emplace(tensor, Member{groups_.size() - 1, i}).second) {
        return core::WithField(
            core::TieInvalidError(
                absl::StrCat("\"", tensor,
                             "\" is tied twice, expected one group for each "
                             "tensor")),
            FieldOf(group, i));
      }
    }
  }
  return absl::OkStatus();
}

void TiedStatistics::See(absl::string_view tensor, int spec) {
  const auto found = members_.find(tensor);
  if (found == members_.end()) return;
  found->second.seen = true;
  if (spec < 0) return;
  Group& group = groups_[found->second.group];
  ++group.left;
  if (group.spec < 0) group.spec = spec;
  if (group.spec != spec && group.differs < 0) {
    group.differs = found->second.index;
  }
}

absl::Status TiedStatistics::CheckSeen(const std::string& model,
                                       const std::string& revision) const {
  for (const Group& group : groups_) {
    for (int i = 0; i < group.tensors->tensors_size(); ++i) {
      const std::string& tensor = group.tensors->tensors(i);
      if (members_.at(tensor).seen) continue;
      return core::WithField(
          core::StatisticsNotFoundError(
              model, revision.empty() ? kDefaultRevision : revision, tensor),
          FieldOf(group, i));
    }
    if (group.differs >= 0) {
      return core::WithField(
          core::TieInvalidError(
              absl::StrCat("\"", group.tensors->tensors(group.differs),
                           "\" has another spec than a tensor that it is tied "
                           "to, expected one spec for all")),
          FieldOf(group, group.differs));
    }
  }
  return absl::OkStatus();
}

const std::string* TiedStatistics::NextToTakeIn(
    absl::string_view tensor, absl::Span<const core::EncodingSpec> specs) {
  Group* const group = FindGroup(tensor);
  if (group == nullptr || !group->status.ok() ||
      group->taken_in == group->tensors->tensors_size()) {
    return nullptr;
  }
  if (!group->tensors->one_encoding() && !MayHaveOuterScales(specs)) {
    return nullptr;
  }
  return &group->tensors->tensors(group->taken_in);
}

absl::Status TiedStatistics::TakeIn(absl::string_view tensor,
                                    const absl::Status& read,
                                    const StoredStatistics& stored,
                                    absl::Span<const core::EncodingSpec> specs,
                                    ScaleTransport transport,
                                    core::StopToken stop) {
  Group* const group = FindGroup(tensor);
  group->status = read;
  if (read.ok() && group->shared.empty()) {
    group->status = env_.budget->Grow(
        &group->lease,
        static_cast<int64_t>(specs.size() * (sizeof(Shared) + sizeof(Merged))),
        kWayOutOfTies);
    if (group->status.ok()) {
      group->shared.resize(specs.size());
      group->merged.reserve(specs.size());
    }
  }
  if (!group->status.ok()) {
    group->status = AtTensor(group->status, FieldOf(*group, group->taken_in));
    group->merged = {};
    return absl::OkStatus();
  }
  StoredCalibrator calibrator(env_, stored);
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!group->shared[i].status.ok()) continue;
    TakeInUnder(specs[i], transport, stored, stop, &calibrator, group,
                &group->shared[i]);
    if (stop.stopped()) return core::StoppedError();
  }
  if (++group->taken_in == group->tensors->tensors_size()) {
    Finish(specs, transport, stop, group);
  }
  return stop.stopped() ? core::StoppedError() : absl::OkStatus();
}

void TiedStatistics::TakeInUnder(const core::EncodingSpec& spec,
                                 ScaleTransport transport,
                                 const StoredStatistics& stored,
                                 core::StopToken stop,
                                 StoredCalibrator* calibrator, Group* group,
                                 Shared* shared) {
  const auto fail = [&](const absl::Status& status) {
    shared->status = AtTensor(status, FieldOf(*group, group->taken_in));
  };
  const absl::StatusOr<StoredCalibrator::Resolved> resolved =
      calibrator->Resolve(spec, transport, stop);
  if (!resolved.ok()) return fail(resolved.status());
  const bool is_outer = HasOneOuterScale(resolved->spec.spec);
  if (group->taken_in > 0 &&
      is_outer != shared->scale.outer_magnitude.has_value()) {
    return fail(core::StatisticsMismatchError(
        "the tensor has another number of outer scales than a tensor that it "
        "is tied to, expected one for each or several for each"));
  }
  if (!is_outer) {
    if (!group->tensors->one_encoding()) return;
    absl::Status status = Merge(*resolved, stored, group, shared);
    if (!status.ok()) fail(status);
    return;
  }
  if (spec.unsigned_if_non_negative) {
    return fail(core::TieInvalidError(
        "unsigned_if_non_negative gives each tensor codes of its own, expected "
        "a spec without it for tensors that share one outer scale"));
  }
  const absl::StatusOr<double> magnitude =
      calibrator->OuterMagnitude(*resolved, env_.helper_pool, stop);
  if (!magnitude.ok()) return fail(magnitude.status());
  shared->scale.outer_magnitude =
      std::max(shared->scale.outer_magnitude.value_or(0), *magnitude);
}

absl::Status TiedStatistics::Merge(const StoredCalibrator::Resolved& resolved,
                                   const StoredStatistics& stored, Group* group,
                                   Shared* shared) {
  if (!resolved.averages.empty()) {
    return core::MethodInvalidError(
        "a moving average for tensors with one encoding; expected another "
        "method, because it depends on the order");
  }
  std::vector<int64_t> block_size =
      core::CanonicalBlockSize(resolved.spec.spec.block_size);
  // Histograms that no range comes from may differ.
  const bool with_histograms = core::NeedsHistograms(resolved.spec.spec);
  if (shared->merged < 0) {
    const auto found =
        absl::c_find_if(group->merged, [&](const Merged& merged) {
          return merged.with_histograms == with_histograms &&
                 merged.state.block_size == block_size;
        });
    shared->merged = static_cast<int>(found - group->merged.begin());
    if (found == group->merged.end()) {
      group->merged.emplace_back().with_histograms = with_histograms;
    }
  }
  Merged& merged = group->merged[shared->merged];
  // Another spec may have done this.
  if (merged.taken_in > group->taken_in) return merged.status;
  int64_t bytes = static_cast<int64_t>(group->shared.size() *
                                       (sizeof(Shared) + sizeof(Merged)));
  for (const Merged& other : group->merged) {
    bytes += other.state.statistics.memory_bytes();
  }
  // A copy, and what the others grow by.
  merged.status = env_.budget->Grow(
      &group->lease, bytes + 2 * resolved.statistics->memory_bytes(),
      kWayOutOfTies);
  if (merged.status.ok()) {
    core::StatisticsState part{std::move(block_size), stored.state.shape,
                               with_histograms
                                   ? *resolved.statistics
                                   : resolved.statistics->WithoutHistograms()};
    if (group->taken_in == 0) {
      merged.state = std::move(part);
    } else {
      merged.status = core::MergeState(part, &merged.state);
    }
  }
  ++merged.taken_in;
  return merged.status;
}

void TiedStatistics::Finish(absl::Span<const core::EncodingSpec> specs,
                            ScaleTransport transport, core::StopToken stop,
                            Group* group) {
  int64_t bytes = 0;
  StoredStatistics stored;
  for (size_t m = 0; m < group->merged.size(); ++m) {
    stored.state = std::move(group->merged[m].state);
    StoredCalibrator calibrator(env_, stored);
    for (size_t i = 0; i < specs.size(); ++i) {
      Shared& shared = group->shared[i];
      if (shared.merged != static_cast<int>(m) || !shared.status.ok()) continue;
      absl::StatusOr<CalibratedEncoding> calibrated =
          calibrator.Calibrate(specs[i], transport, env_.helper_pool, stop);
      if (stop.stopped()) return;
      if (!calibrated.ok()) {
        shared.status = AtTensor(calibrated.status(), FieldOf(*group));
        continue;
      }
      shared.scale.encoding = std::move(calibrated->resolved.encoding);
      bytes += core::MemoryBytes(*shared.scale.encoding);
    }
  }
  group->merged = {};
  group->lease.Release();
  env_.budget->Count(
      &group->lease,
      bytes + static_cast<int64_t>(group->shared.size() * sizeof(Shared)));
}

absl::StatusOr<TiedScale> TiedStatistics::ScaleOf(absl::string_view tensor,
                                                  size_t spec_index) const {
  const auto found = members_.find(tensor);
  if (found == members_.end()) return TiedScale();
  const Group& group = groups_[found->second.group];
  if (!group.status.ok()) return group.status;
  if (group.shared.empty()) return TiedScale();
  const Shared& shared = group.shared[spec_index];
  if (!shared.status.ok()) return shared.status;
  return shared.scale;
}

void TiedStatistics::Done(absl::string_view tensor) {
  Group* const group = FindGroup(tensor);
  if (group == nullptr || --group->left > 0) return;
  group->shared = {};
  group->lease.Release();
}

TiedStatistics::Group* TiedStatistics::FindGroup(absl::string_view tensor) {
  const auto found = members_.find(tensor);
  return found == members_.end() ? nullptr : &groups_[found->second.group];
}

std::string TiedStatistics::FieldOf(const Group& group) const {
  return absl::StrCat("ties[", &group - groups_.data(), "]");
}

std::string TiedStatistics::FieldOf(const Group& group, int index) const {
  return absl::StrCat(FieldOf(group), ".tensors[", index, "]");
}

}  // namespace quantd::server
