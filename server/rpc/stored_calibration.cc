#include "server/rpc/stored_calibration.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/calibrate/calibrate.h"
#include "core/calibrate/prediction.h"
#include "core/errors.h"
#include "core/formats/scale_type.h"
#include "core/statistics/statistics_state.h"
#include "server/guard/memory_budget.h"

namespace quantd::server {
namespace {

bool UsesMovingAverage(const core::EncodingSpec& spec) {
  constexpr auto kMethod = core::CalibrationMethod::kMovingAverage;
  return spec.method == kMethod || absl::c_linear_search(spec.methods, kMethod);
}

}  // namespace

bool HasOneOuterScale(const core::EncodingSpec& spec) {
  return core::HasOuterScales(core::EffectiveScaleType(spec)) &&
         core::CanonicalBlockSize(spec.outer_block_size).empty();
}

absl::StatusOr<StoredCalibrator::Resolved> StoredCalibrator::Resolve(
    const core::EncodingSpec& spec, ScaleTransport transport,
    core::StopToken stop) {
  const core::StatisticsState& state = stored_.state;
  if (absl::Status s = core::CheckComplete(state); !s.ok()) return s;
  absl::StatusOr<ResolvedSpec> resolved =
      ResolveSpec(env_, spec, state.shape, transport);
  if (!resolved.ok()) return resolved.status();
  const std::vector<int64_t>& block_size = resolved->spec.block_size;
  const bool is_coarse = block_size != state.block_size;
  if (is_coarse && (!coarse_.has_value() || block_size != block_size_)) {
    coarse_.reset();
    absl::StatusOr<core::TensorStatistics> coarse =
        core::StatisticsAt(state, block_size, stop);
    if (!coarse.ok()) {
      return core::WithField(coarse.status(), spec.granularity.has_value()
                                                  ? "granularity"
                                                  : "block_size");
    }
    coarse_ = *std::move(coarse);
    block_size_ = block_size;
  }
  absl::StatusOr<std::vector<core::Extremes>> averages;
  if (UsesMovingAverage(spec)) {
    if (stored_.sources.size() > 1) {
      return core::WithField(
          core::MethodInvalidError(absl::StrCat(
              "a moving average of ", stored_.sources.size(),
              " sources; expected statistics of a single one, because it "
              "depends on the order")),
          "method");
    }
    averages = AveragesAt(block_size, stop);
    if (!averages.ok()) return averages.status();
  } else {
    averages.emplace();
  }
  return Resolved{*std::move(resolved),
                  is_coarse ? &*coarse_ : &state.statistics,
                  *std::move(averages)};
}

absl::StatusOr<CalibratedEncoding> StoredCalibrator::Calibrate(
    const core::EncodingSpec& spec, ScaleTransport transport,
    core::ThreadPool* pool, core::StopToken stop, const TiedScale& tied) {
  const absl::StatusOr<Resolved> resolved = Resolve(spec, transport, stop);
  if (!resolved.ok()) return resolved.status();
  if (tied.encoding == nullptr) {
    return CalibrateTensor(env_, resolved->spec, *resolved->statistics,
                           resolved->averages, pool, stop, /*held=*/nullptr,
                           HasOneOuterScale(resolved->spec.spec)
                               ? tied.outer_magnitude
                               : absl::nullopt);
  }
  // It was made of what there was a moment ago.
  const int64_t scale_count = resolved->statistics->scale_count();
  const auto tied_count = static_cast<int64_t>(tied.encoding->scale.size());
  if (scale_count != tied_count) {
    return core::StatisticsMismatchError(
        absl::StrCat("the tensor has ", scale_count, " scales, expected ",
                     tied_count, ", as the tensors tied to it have"));
  }
  CalibratedEncoding calibrated{{tied.encoding, resolved->spec.layout, ""},
                                absl::nullopt};
  if (!resolved->statistics->histograms().empty()) {
    absl::StatusOr<core::Prediction> prediction =
        core::Predict(*tied.encoding, *resolved->statistics, pool, stop);
    if (!prediction.ok()) return prediction.status();
    calibrated.prediction = *std::move(prediction);
  }
  return calibrated;
}

absl::StatusOr<double> StoredCalibrator::OuterMagnitude(
    const Resolved& resolved, core::ThreadPool* pool,
    core::StopToken stop) const {
  const core::TensorStatistics& statistics = *resolved.statistics;
  MemoryBudget::Lease lease;
  env_.budget->Count(
      &lease, core::CalibrationBytes(resolved.spec.spec, *resolved.spec.layout,
                                     statistics, pool));
  const absl::StatusOr<std::vector<double>> magnitudes =
      core::OuterMagnitudes(resolved.spec.spec, *resolved.spec.layout,
                            statistics, resolved.averages, pool, stop);
  if (!magnitudes.ok()) return magnitudes.status();
  return (*magnitudes)[0];
}

// The averages of a block that is made of several are the outermost of theirs.
absl::StatusOr<std::vector<core::Extremes>> StoredCalibrator::AveragesAt(
    const std::vector<int64_t>& block_size, core::StopToken stop) const {
  if (block_size == stored_.state.block_size) return stored_.moving_average;
  core::StatisticsState averages;
  averages.block_size = stored_.state.block_size;
  averages.shape = stored_.state.shape;
  averages.statistics = core::TensorStatistics::FromParts(
      core::ElementCounts(), stored_.moving_average, {}, /*mantissa_bits=*/0,
      {});
  const absl::StatusOr<core::TensorStatistics> coarse =
      core::StatisticsAt(averages, block_size, stop);
  if (!coarse.ok()) return coarse.status();
  return std::vector<core::Extremes>(coarse->extremes().begin(),
                                     coarse->extremes().end());
}

}  // namespace quantd::server
