// Encodings from stored statistics.

#ifndef QUANTD_SERVER_RPC_STORED_CALIBRATION_H_
#define QUANTD_SERVER_RPC_STORED_CALIBRATION_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "core/calibrate/encoding_spec.h"
#include "core/statistics/tensor_statistics.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_input.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// Calibrates one tensor after many specs. Statistics that were made coarser
// are kept for the next spec. Not thread-safe.
class StoredCalibrator {
 public:
  // Both must outlive the calibrator.
  StoredCalibrator(const RpcEnvironment& env, const StoredStatistics& stored)
      : env_(env), stored_(stored) {}

  // `spec`  valid, not resolved for the shape.
  // Errors: those of core::ResolveSpec, CheckedLayout, core::StatisticsAt and
  // core::Calibrate; METHOD_INVALID (a moving average over more than one
  // source), at the fields of an EncodingSpec.
  absl::StatusOr<CalibratedEncoding> Calibrate(const core::EncodingSpec& spec);

 private:
  const RpcEnvironment& env_;
  const StoredStatistics& stored_;
  // Statistics at block_size_; unless it is that of the state.
  absl::optional<core::TensorStatistics> coarse_;
  std::vector<int64_t> block_size_;
};

// One spec on one tensor; see StoredCalibrator.
absl::StatusOr<CalibratedEncoding> CalibrateStored(
    const RpcEnvironment& env, const core::EncodingSpec& spec,
    const StoredStatistics& stored);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_STORED_CALIBRATION_H_
