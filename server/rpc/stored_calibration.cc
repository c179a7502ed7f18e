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
#include "core/calibrate/calibrate.h"
#include "core/errors.h"
#include "core/statistics/statistics_state.h"

namespace quantd::server {
namespace {

bool UsesMovingAverage(const core::EncodingSpec& spec) {
  constexpr auto kMethod = core::CalibrationMethod::kMovingAverage;
  return spec.method == kMethod || absl::c_linear_search(spec.methods, kMethod);
}

// The averaged extremes at another granularity: those of a block that is made
// of several are the outermost of theirs.
absl::StatusOr<std::vector<core::Extremes>> AveragesAt(
    const StoredStatistics& stored, absl::Span<const int64_t> block_size) {
  core::StatisticsState averages;
  averages.block_size = stored.state.block_size;
  averages.shape = stored.state.shape;
  averages.statistics = core::TensorStatistics::FromParts(
      core::ElementCounts(), stored.moving_average, {}, /*mantissa_bits=*/0,
      {});
  absl::StatusOr<core::TensorStatistics> coarse =
      core::StatisticsAt(averages, block_size);
  if (!coarse.ok()) return coarse.status();
  return std::vector<core::Extremes>(coarse->extremes().begin(),
                                     coarse->extremes().end());
}

}  // namespace

absl::StatusOr<CalibratedEncoding> StoredCalibrator::Calibrate(
    const core::EncodingSpec& spec) {
  const core::StatisticsState& state = stored_.state;
  absl::StatusOr<ResolvedSpec> resolved = ResolveSpec(env_, spec, state.shape);
  if (!resolved.ok()) return resolved.status();
  const std::vector<int64_t>& block_size = resolved->spec.block_size;
  const core::TensorStatistics* statistics = &state.statistics;
  if (block_size != state.block_size) {
    if (!coarse_.has_value() || block_size != block_size_) {
      coarse_.reset();
      absl::StatusOr<core::TensorStatistics> coarse =
          core::StatisticsAt(state, block_size);
      if (!coarse.ok()) {
        return core::WithField(coarse.status(), spec.granularity.has_value()
                                                    ? "granularity"
                                                    : "block_size");
      }
      coarse_ = *std::move(coarse);
      block_size_ = block_size;
    }
    statistics = &*coarse_;
  }
  std::vector<core::Extremes> averages;
  if (UsesMovingAverage(spec)) {
    if (stored_.sources.size() > 1) {
      return core::WithField(
          core::MethodInvalidError(absl::StrCat(
              "a moving average of ", stored_.sources.size(),
              " sources; expected statistics of a single one, because it "
              "depends on the order")),
          "method");
    }
    absl::StatusOr<std::vector<core::Extremes>> at =
        AveragesAt(stored_, block_size);
    if (!at.ok()) return at.status();
    averages = *std::move(at);
  }
  absl::StatusOr<core::Calibration> calibration = core::Calibrate(
      resolved->spec, *resolved->layout, *statistics, averages, env_.pool);
  if (!calibration.ok()) return calibration.status();
  return CalibratedEncoding{
      {std::make_shared<const core::Encoding>(std::move(calibration->encoding)),
       resolved->layout, ""},
      std::move(calibration->prediction)};
}

absl::StatusOr<CalibratedEncoding> CalibrateStored(
    const RpcEnvironment& env, const core::EncodingSpec& spec,
    const StoredStatistics& stored) {
  return StoredCalibrator(env, stored).Calibrate(spec);
}

}  // namespace quantd::server
