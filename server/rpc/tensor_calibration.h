// From the statistics of a tensor to its encoding: what that takes, and doing
// it.

#ifndef QUANTD_SERVER_RPC_TENSOR_CALIBRATION_H_
#define QUANTD_SERVER_RPC_TENSOR_CALIBRATION_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/calibrate.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/held_tensor.h"
#include "core/statistics/tensor_statistics.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/rpc_environment.h"

namespace quantd::server {

// The mantissa bits that an accumulator for the spec takes.
int MantissaBitsFor(const core::EncodingSpec& spec);
// Mantissa bits where the tensor is held: none for blocks that a calibrator may
// look at by themselves. Large ones get histograms as they arrive, which take
// less than the tensor then.
int MantissaBitsWhereHeld(const ResolvedSpec& spec);
// About how long one worker searches a tensor that is at hand; see
// core::SearchTime. With importance it looks at the elements of every block.
absl::Duration ElementSearchTime(const ResolvedSpec& spec);
// Bytes that the threads need beside that to search a tensor that is held: to
// be leased when its header comes.
int64_t SearchBytes(const RpcEnvironment& env, const ResolvedSpec& spec);
// Bytes that the threads need to search elements as they arrive, up to so many
// at once.
int64_t LocalSearchBytes(const RpcEnvironment& env, const ResolvedSpec& spec,
                         int64_t elements_at_once);

// An encoding that was calibrated, and what to expect of it.
struct CalibratedEncoding {
  ResolvedEncoding resolved;
  absl::optional<core::Prediction> prediction;
  // See core::Calibration.
  int mantissa_bits = 0;
};

// True if it may take more than kShortWork to calibrate that spec on statistics
// of `scale_count` scales and `element_count` elements, or on a held tensor
// with so many.
bool TakesLong(const core::EncodingSpec& spec, int64_t scale_count,
               int64_t element_count);

// The most elements whose scales a worker finds at a time, as they arrive: so
// many as take about twice kShortWork, because others need the worker.
int64_t SearchQuantumElements(const ResolvedSpec& spec);

// The encoding that comes of a tensor's statistics at the spec's granularity.
// `pool`  helps where it takes long; null where it does not.
// `held`  the tensor, where the statistics have no histograms.
// `outer_magnitude`  of a spec with one outer scale; see core::Calibrate.
// Errors: those of core::Calibrate, which see also for the others.
absl::StatusOr<CalibratedEncoding> CalibrateTensor(
    const RpcEnvironment& env, const ResolvedSpec& spec,
    const core::TensorStatistics& statistics,
    absl::Span<const core::Extremes> moving_average, core::ThreadPool* pool,
    core::StopToken stop, const core::HeldTensor* held = nullptr,
    absl::optional<double> outer_magnitude = absl::nullopt);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_TENSOR_CALIBRATION_H_
