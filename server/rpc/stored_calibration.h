// Encodings from stored statistics.

#ifndef QUANTD_SERVER_RPC_STORED_CALIBRATION_H_
#define QUANTD_SERVER_RPC_STORED_CALIBRATION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "core/calibrate/encoding_spec.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/encoding.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_calibration.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// True if tensors have one outer scale each by that spec.
// `spec`  resolved.
bool HasOneOuterScale(const core::EncodingSpec& spec);

// The scale or encoding that tied tensors share under a spec: one of both, or
// nothing.
struct TiedScale {
  // For a spec with one outer scale: the magnitude of the largest range of all.
  absl::optional<double> outer_magnitude;
  // For any other spec: the encoding of all.
  std::shared_ptr<const core::Encoding> encoding = nullptr;
};

// Calibrates one tensor after one spec or many: statistics that were made
// coarser are kept for the next one. Not thread-safe.
class StoredCalibrator {
 public:
  // A spec on this tensor.
  struct Resolved {
    ResolvedSpec spec;
    // At the spec's granularity; until the next call.
    const core::TensorStatistics* statistics;
    // Only of specs that use them.
    std::vector<core::Extremes> averages;
  };

  // Both must outlive the calibrator.
  StoredCalibrator(const RpcEnvironment& env, const StoredStatistics& stored)
      : env_(env), stored_(stored) {}

  // `spec`  valid, not resolved for the shape.
  // `transport`  of the scales in the answer; kChunks also where they are not
  //              in it.
  // Errors: those of ResolveSpec, core::StatisticsAt and core::CheckComplete;
  // METHOD_INVALID (a moving average over more than one source), at the fields
  // of an EncodingSpec.
  absl::StatusOr<Resolved> Resolve(const core::EncodingSpec& spec,
                                   ScaleTransport transport,
                                   core::StopToken stop);

  // `pool`  as for CalibrateTensor.
  // `tied`  what the tensor shares with others.
  // Errors: those of Resolve and core::Calibrate; STATISTICS_MISMATCH where the
  // encoding of all is for another number of scales.
  absl::StatusOr<CalibratedEncoding> Calibrate(const core::EncodingSpec& spec,
                                               ScaleTransport transport,
                                               core::ThreadPool* pool,
                                               core::StopToken stop,
                                               const TiedScale& tied = {});

  // The magnitude of the largest range of the tensor.
  // `resolved`  of this calibrator; with HasOneOuterScale.
  // Errors: those of core::OuterMagnitudes.
  absl::StatusOr<double> OuterMagnitude(const Resolved& resolved,
                                        core::ThreadPool* pool,
                                        core::StopToken stop) const;

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
