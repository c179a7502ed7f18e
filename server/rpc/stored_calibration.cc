#include "server/rpc/stored_calibration.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "core/statistics/statistics_state.h"

namespace quantd::server {
namespace {

bool UsesMovingAverage(const core::EncodingSpec& spec) {
  constexpr auto kMethod = core::CalibrationMethod::kMovingAverage;
  return spec.method == kMethod || absl::c_linear_search(spec.methods, kMethod);
}

}  // namespace

absl::StatusOr<CalibratedEncoding> StoredCalibrator::Calibrate(
    const core::EncodingSpec& spec, ScaleTransport transport,
    core::ThreadPool* pool, core::StopToken stop) {
  const core::StatisticsState& state = stored_.state;
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
  return CalibrateTensor(env_, *resolved,
                         is_coarse ? *coarse_ : state.statistics, *averages,
                         pool, stop);
}

// Those of a block that is made of several are the outermost of theirs.
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
