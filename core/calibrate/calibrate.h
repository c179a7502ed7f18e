// From statistics to encodings.

#ifndef QUANTD_CORE_CALIBRATE_CALIBRATE_H_
#define QUANTD_CORE_CALIBRATE_CALIBRATE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/importance.h"
#include "core/calibrate/prediction.h"
#include "core/calibrate/range_scaler.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/held_tensor.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"

namespace quantd::core {

// An encoding, and what to expect of it.
struct Calibration {
  Encoding encoding;
  // Over the whole tensor; only with histograms in the statistics.
  absl::optional<Prediction> prediction;
  // Mantissa bits of the histograms that the ranges come from; 0 without
  // histograms.
  int mantissa_bits = 0;
};

// The encoding that Calibrate begins with: the format, its codes and how scales
// are stored, but no scales.
// `is_unsigned`  the data allow what spec.unsigned_if_non_negative asks for.
// Requires: a valid spec, resolved for the layout's shape.
Encoding EncodingWithoutScales(const EncodingSpec& spec,
                               const BlockLayout& layout, bool is_unsigned);

// One scale and zero point per scale index of `statistics`. First the method
// finds a range per scale index, then the range becomes a scale:
//
// asymmetric: the range is [min(min, 0), max(max, 0)]. Its scale = (max - min)
// / (qmax - qmin), rounded from float64 to float32. Then zero_point =
// clamp(qmin - rint(min / scale)) in float64 with the rounded scale. A real
// zero point is rounded to float32 only. Symmetric integers: see Symmetry.
// Floats and
// codebooks: scale = absmax / largest magnitude. All zero or no finite element:
// scale 1, zero point clamp(0), counted as degenerate. No scale is below the
// smallest normal float32. With exclude_zero the range is not extended and the
// zero point not clamped, unless the range is one single value, which is
// extended as usual. Powers of two, and after that float16 and
// bfloat16 scales, are rounded up from the float32 scale.
//
// E8M0: MxScaleRule, of the range's absmax in float32; mantissa bits of
// integers and codebooks are their bits less 2. A block with a non-finite
// element gets 0xFF, an all zero one 0. E4M3: outer = absmax of the outer block
// / (largest magnitude * 448), at least 2^-120; scale code = nearest E4M3FN of
// absmax / largest magnitude / outer, at least 2^-6. INTEGER: outer = largest
// scale of the outer block / integer_scale_max, code = clamp(rint(scale /
// outer), 1, integer_scale_max). An outer block of nothing but zeros has outer
// scale 1 and scales of 1.
//
// If outer maxima are given, they stand for the absmax of the outer blocks.
// With INTEGER scales the outer scale is then that of the range +-maximum.
// Outer magnitudes, of tensors that are tied, stand for the largest ranges in
// the same way. Outer scales do not depend on the elements then, so searches
// run once, under them.
//
// Methods: see quantd.v1.CalibrationMethod, percentile.h, range_search.h and
// entropy.h. Searches judge a range by the scale as it will be stored; under
// outer scales they run twice, first without to find those. A percentile of
// zero where not all elements are takes the whole range.
//
// Gives the same result on every machine, for any number of threads.
//
// `spec`            resolved for the layout's shape (see ResolveSpec).
// `layout`          of the tensor with spec.block_size.
// `statistics`      at that granularity; with histograms where the spec needs
//                   them, unless the tensor is held.
// `moving_average`  [scale_count] averaged extremes; where empty the extremes
//                   stand for them.
// `pool`            spreads the search; may be null.
// `held`            the tensor; may be null. Without histograms in the
//                   statistics one scale index at a time gets one, of
//                   MantissaBitsAtHand.
// `outer_maximum`   [outer scale count] the largest magnitude in each outer
//                   block; where empty it is found.
// `importance`      of the tensor's elements, for mse, sqnr and best-of: their
//                   squared errors count by it. May be null. All blocks are
//                   searched on their elements then, so that the tensor has to
//                   be held.
// `outer_magnitude` [outer scale count] that of the largest range in each outer
//                   block, see OuterMagnitudes; where empty it is found.
// Requires: not both an outer maximum and an outer magnitude.
// Errors: those of ValidateSpec; CANCELLED;
//   OUTER_MAXIMUM     an element beyond its maximum; not as many maxima as
//                     outer scales; one that is negative or not finite
//   METHOD_INVALID    the method needs histograms, and there are none, or
//                     coarser ones than spec.mantissa_bits; importance where
//                     the tensor is not held, or see CheckTakesImportance
// and of the smallest scale index that has one:
//   SCALE_OVERFLOW    the range needs a scale beyond the scale type
//   ZERO_POINT_RANGE  with exclude_zero: the range is too far from zero for its
//                     width
absl::StatusOr<Calibration> Calibrate(
    const EncodingSpec& spec, const BlockLayout& layout,
    const TensorStatistics& statistics,
    absl::Span<const Extremes> moving_average, ThreadPool* pool,
    StopToken stop = StopToken(), const HeldTensor* held = nullptr,
    absl::Span<const float> outer_maximum = {},
    const Importance* importance = nullptr,
    absl::Span<const double> outer_magnitude = {});

// [outer scale count] the magnitude of the largest range in each outer block: 0
// where all elements are 0. Calibrate makes outer scales of them. The largest
// of those of several tensors are those of the tensors put together.
// Errors: as Calibrate.
// Requires: the same, and a spec with outer scales.
absl::StatusOr<std::vector<double>> OuterMagnitudes(
    const EncodingSpec& spec, const BlockLayout& layout,
    const TensorStatistics& statistics,
    absl::Span<const Extremes> moving_average, ThreadPool* pool,
    StopToken stop);

// Errors: OUTER_MAXIMUM unless there are none, or as many as the layout's outer
// scales, finite and not negative.
// `spec`  resolved for the layout's shape.
absl::Status CheckOuterMaxima(const EncodingSpec& spec,
                              const BlockLayout& layout,
                              absl::Span<const float> outer_maximum);
// The outer scales that follow from maxima.
// Errors: SCALE_OVERFLOW.
absl::StatusOr<std::vector<float>> OuterScales(
    const RangeScaler& scaler, const BlockLayout& outer_layout,
    absl::Span<const float> outer_maximum);
// Errors: OUTER_MAXIMUM, naming `index`, for a block with an element beyond the
// maximum of its outer block.
absl::Status CheckOuterMaximum(int64_t index, const Extremes& extremes,
                               float outer_maximum);

// About what that takes in memory beside its result and, for a held tensor,
// HeldTensor::TableBytes for each thread.
int64_t CalibrationBytes(const EncodingSpec& spec, const BlockLayout& layout,
                         const TensorStatistics& statistics, ThreadPool* pool);

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_CALIBRATE_H_
