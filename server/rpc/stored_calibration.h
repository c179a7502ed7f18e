// Encodings from stored statistics.

#ifndef QUANTD_SERVER_RPC_STORED_CALIBRATION_H_
#define QUANTD_SERVER_RPC_STORED_CALIBRATION_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "core/calibrate/encoding_spec.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/tensor_statistics.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_calibration.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// Calibrates one tensor after one spec or many: statistics that were made
// coarser are kept for the next one. Not thread-safe.
class StoredCalibrator {
 public:
  // Both must outlive the calibrator.
  StoredCalibrator(const RpcEnvironment& env, const StoredStatistics& stored)
      : env_(env), stored_(stored) {}

  // `spec`  valid, not resolved for the shape.
  // `transport`  of the scales in the answer; kChunks also where they are not
  //              in it.
  // `pool`       as for CalibrateTensor.
  // Errors: those of ResolveSpec and core::StatisticsAt; METHOD_INVALID (a
  // moving average over more than one source), at the fields of an
  // EncodingSpec; those of core::Calibrate.
  absl::StatusOr<CalibratedEncoding> Calibrate(const core::EncodingSpec& spec,
                                               ScaleTransport transport,
                                               core::ThreadPool* pool,
                                               core::StopToken stop);

 private:
  // The averaged extremes at that granularity.
  absl::StatusOr<std::vector<core::Extremes>> AveragesAt(
      const std::vector<int64_t>& block_size, core::StopToken stop) const;

  const RpcEnvironment& env_;
  const StoredStatistics& stored_;
  // Statistics at block_size_, when they have been made coarser to it.
  absl::optional<core::TensorStatistics> coarse_;
  std::vector<int64_t> block_size_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_STORED_CALIBRATION_H_
