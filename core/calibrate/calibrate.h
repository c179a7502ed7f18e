// From statistics to encodings.

#ifndef QUANTD_CORE_CALIBRATE_CALIBRATE_H_
#define QUANTD_CORE_CALIBRATE_CALIBRATE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/formats/number_format.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/encoding.h"

namespace quantd::core {

// The values are those of quantd.v1.Symmetry.
enum class Symmetry : int {
  kDefault = 0,     // kStrict for signed formats, kAsymmetric for unsigned
  kAsymmetric = 1,  // (max - min) / (qmax - qmin), a zero point
  kStrict = 2,      // absmax / (2^(b-1) - 1), qmin = -qmax
  kFullRange = 3,   // the same scale, qmin = -2^(b-1)
  kHalfStep = 4,    // absmax / (2^b - 1) * 2, qmin = -2^(b-1)
};

// The values are those of quantd.v1.CalibrationMethod.
enum class CalibrationMethod : int { kDefault = 0, kMinMax = 1 };

// How to compute an encoding from data.
struct EncodingSpec {
  NumberFormat format{};
  std::vector<int64_t> block_size;
  Symmetry symmetry = Symmetry::kDefault;
  CalibrationMethod method = CalibrationMethod::kDefault;
  bool exclude_zero = false;
  bool unsigned_if_non_negative = false;
};

// Errors: FORMAT_UNKNOWN, FORMAT_NOT_IMPLEMENTED, METHOD_NOT_IMPLEMENTED,
// SYMMETRY_INVALID (symmetric on an unsigned format; exclude_zero or
// unsigned_if_non_negative where they do not apply), BLOCK_SIZE_INVALID.
absl::Status ValidateSpec(const EncodingSpec& spec);

// One scale and zero point per scale index of `statistics`.
//
// asymmetric: scale = (max - min) / (qmax - qmin) over [min(min, 0),
// max(max, 0)], rounded from float64 to float32; zero_point = clamp(qmin -
// rint(min / scale)) in float64 with the rounded scale. Symmetric: see
// Symmetry. All zero or no finite element: scale 1, zero point clamp(0),
// counted as degenerate. No scale is below the smallest normal float32. With
// exclude_zero the range is not extended and the zero point not clamped, unless
// the range is one single value, which is extended as usual.
// Errors: those of ValidateSpec; SCALE_OVERFLOW (a float64 range that needs a
// scale beyond float32); ZERO_POINT_RANGE (with exclude_zero: the range is too
// far from zero for its width).
absl::StatusOr<Encoding> CalibrateEncoding(const EncodingSpec& spec,
                                           const TensorStatistics& statistics);

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_CALIBRATE_H_
