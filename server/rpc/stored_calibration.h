// Encodings from stored statistics.

#ifndef QUANTD_SERVER_RPC_STORED_CALIBRATION_H_
#define QUANTD_SERVER_RPC_STORED_CALIBRATION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "core/calibrate/encoding_spec.h"
#include "core/statistics/statistics_state.h"
#include "core/statistics/tensor_statistics.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_input.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// Calibrates one tensor after many specs, each step by step. Statistics that
// were made coarser are kept for the next spec. Not thread-safe.
class StoredCalibrator {
 public:
  // Both must outlive the calibrator.
  StoredCalibrator(const RpcEnvironment& env, const StoredStatistics& stored)
      : env_(env), stored_(stored) {}

  // Begins with a spec; what the last one has left is dropped.
  // `spec`  valid, not resolved for the shape.
  // Errors: those of core::ResolveSpec, CheckedLayout and
  // core::StatisticsCoarsener; METHOD_INVALID (a moving average over more than
  // one source), at the fields of an EncodingSpec.
  absl::Status Begin(const core::EncodingSpec& spec);

  // Does the next step; answers whether that was the last.
  // Errors: those of core::Calibrator.
  absl::StatusOr<bool> Step();

  // Moves the result out. Requires: the last step was done.
  CalibratedEncoding Take() { return calibrator_->Take(); }

 private:
  // Makes statistics or averages coarser, where that is needed; answers whether
  // they are.
  bool Coarsen();

  const RpcEnvironment& env_;
  const StoredStatistics& stored_;
  ResolvedSpec spec_;
  // Statistics at block_size_, when they have been made coarser to it.
  absl::optional<core::StatisticsCoarsener> coarsener_;
  absl::optional<core::TensorStatistics> coarse_;
  std::vector<int64_t> block_size_;
  // The averaged extremes, as statistics without histograms, where the spec
  // asks for them at another granularity: those of a block that is made of
  // several are the outermost of theirs.
  absl::optional<core::StatisticsState> averages_;
  absl::optional<core::StatisticsCoarsener> averages_coarsener_;
  absl::optional<core::TensorStatistics> coarse_averages_;
  std::unique_ptr<TensorCalibrator> calibrator_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_STORED_CALIBRATION_H_
