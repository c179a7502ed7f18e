#include "server/rpc/stored_calibration.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/parallel/time_slice.h"
#include "core/statistics/statistics_state.h"

namespace quantd::server {
namespace {

bool UsesMovingAverage(const core::EncodingSpec& spec) {
  constexpr auto kMethod = core::CalibrationMethod::kMovingAverage;
  return spec.method == kMethod || absl::c_linear_search(spec.methods, kMethod);
}

}  // namespace

absl::Status StoredCalibrator::Begin(const core::EncodingSpec& spec) {
  calibrator_.reset();
  coarsener_.reset();
  averages_coarsener_.reset();
  coarse_averages_.reset();
  averages_.reset();
  const core::StatisticsState& state = stored_.state;
  absl::StatusOr<ResolvedSpec> resolved = ResolveSpec(env_, spec, state.shape);
  if (!resolved.ok()) return resolved.status();
  spec_ = *std::move(resolved);
  const std::vector<int64_t>& block_size = spec_.spec.block_size;
  if (block_size != state.block_size &&
      (!coarse_.has_value() || block_size != block_size_)) {
    coarse_.reset();
    absl::StatusOr<core::StatisticsCoarsener> coarsener =
        core::StatisticsCoarsener::Create(state, block_size);
    if (!coarsener.ok()) {
      return core::WithField(coarsener.status(), spec.granularity.has_value()
                                                     ? "granularity"
                                                     : "block_size");
    }
    coarsener_ = *std::move(coarsener);
    block_size_ = block_size;
  }
  if (!UsesMovingAverage(spec)) return absl::OkStatus();
  if (stored_.sources.size() > 1) {
    return core::WithField(
        core::MethodInvalidError(absl::StrCat(
            "a moving average of ", stored_.sources.size(),
            " sources; expected statistics of a single one, because it "
            "depends on the order")),
        "method");
  }
  if (block_size == state.block_size) return absl::OkStatus();
  averages_.emplace();
  averages_->block_size = state.block_size;
  averages_->shape = state.shape;
  averages_->statistics = core::TensorStatistics::FromParts(
      core::ElementCounts(), stored_.moving_average, {}, /*mantissa_bits=*/0,
      {});
  absl::StatusOr<core::StatisticsCoarsener> coarsener =
      core::StatisticsCoarsener::Create(*averages_, block_size);
  if (!coarsener.ok()) return coarsener.status();
  averages_coarsener_ = *std::move(coarsener);
  return absl::OkStatus();
}

bool StoredCalibrator::Coarsen() {
  const core::TimeSlice slice(kCalibrationSlice);
  if (coarsener_.has_value()) {
    if (!coarsener_->Run(slice)) return false;
    coarse_ = coarsener_->Take();
    coarsener_.reset();
  }
  if (averages_coarsener_.has_value()) {
    if (!averages_coarsener_->Run(slice)) return false;
    coarse_averages_ = averages_coarsener_->Take();
    averages_coarsener_.reset();
  }
  return true;
}

absl::StatusOr<bool> StoredCalibrator::Step() {
  if (calibrator_ == nullptr) {
    if (!Coarsen()) return false;
    absl::Span<const core::Extremes> averages;
    if (UsesMovingAverage(spec_.spec)) {
      averages = coarse_averages_.has_value() ? coarse_averages_->extremes()
                                              : stored_.moving_average;
    }
    const bool is_coarse = spec_.spec.block_size != stored_.state.block_size;
    absl::StatusOr<std::unique_ptr<TensorCalibrator>> calibrator =
        TensorCalibrator::Create(
            env_, spec_, is_coarse ? *coarse_ : stored_.state.statistics,
            averages);
    if (!calibrator.ok()) return calibrator.status();
    calibrator_ = *std::move(calibrator);
  }
  return calibrator_->Step();
}

}  // namespace quantd::server
