// How to compute an encoding from data.

#ifndef QUANTD_CORE_CALIBRATE_ENCODING_SPEC_H_
#define QUANTD_CORE_CALIBRATE_ENCODING_SPEC_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"

namespace quantd::core {

// Values of EncodingSpec::search_steps where it is 0.
constexpr int kDefaultSteps = 128;
// For each end of an asymmetric range under kMse and kSqnr.
constexpr int kDefaultStepsOfEachEnd = 32;

// The values are those of quantd.v1.Symmetry.
enum class Symmetry : int {
  kDefault = 0,     // kStrict for signed formats, kAsymmetric for unsigned
  kAsymmetric = 1,  // (max - min) / (qmax - qmin), a zero point
  kStrict = 2,      // absmax / (2^(b-1) - 1), qmin = -qmax
  kFullRange = 3,   // the same scale, qmin = -2^(b-1)
  kHalfStep = 4,    // absmax / (2^b - 1) * 2, qmin = -2^(b-1)
  // max(max / (2^(b-1) - 1), -min / 2^(b-1)), qmin = -2^(b-1)
  kAimet = 5,
};

// The values are those of quantd.v1.CalibrationMethod.
enum class CalibrationMethod : int {
  kDefault = 0,
  kMinMax = 1,
  kPercentile = 2,
  kMse = 3,
  kSqnr = 4,
  kEntropy = 5,
  kFixedRange = 6,
  kMovingAverage = 7,
  kBestOf = 8,
};

// The values are those of quantd.v1.MxScaleRule.
enum class MxScaleRule : int {
  kDefault = 0,
  kFloor = 1,
  kCeil = 2,
  kEven = 3,
  kRceil = 4,
};

// The values are those of quantd.v1.Tail.
enum class Tail : int {
  kDefault = 0,
  kMagnitude = 1,
  kBoth = 2,
  kUpper = 3,
  kLower = 4,
};

// The values are those of quantd.v1.Objective.
enum class Objective : int { kDefault = 0, kMse = 1, kSqnr = 2 };

// Block sizes for tensors of any rank; see quantd.v1.Granularity.
struct Granularity {
  int64_t axis = 0;
  int64_t group_size = 0;
};

// See quantd.v1.EncodingSpec for every field.
struct EncodingSpec {
  NumberFormat format{};
  std::vector<int64_t> block_size;
  Symmetry symmetry = Symmetry::kDefault;
  CalibrationMethod method = CalibrationMethod::kDefault;
  bool exclude_zero = false;
  bool unsigned_if_non_negative = false;
  absl::optional<Granularity> granularity;
  ScaleType scale_type = ScaleType::kDefault;
  MxScaleRule mx_scale_rule = MxScaleRule::kDefault;
  bool power_of_two_scale = false;
  std::vector<int64_t> outer_block_size;
  int integer_scale_max = 0;
  std::vector<float> codebook;
  double tail_fraction = 0.001;
  Tail tail = Tail::kDefault;
  double gamma = 3;
  int search_steps = 0;
  int entropy_bins = 0;
  double range_min = 0;
  double range_max = 0;
  std::vector<CalibrationMethod> methods;
  Objective objective = Objective::kDefault;
  bool no_saturation = false;
  // Mantissa bits of the histograms that ranges come from; 0 for the default.
  int mantissa_bits = 0;
  bool real_zero_point = false;
  // [scale count] or empty: range_min and range_max of each scale.
  std::vector<double> scale_range_min;
  std::vector<double> scale_range_max;
};

// Checks a spec by itself.
// Errors:
//   FORMAT_UNKNOWN, ENUM_UNKNOWN, BLOCK_SIZE_INVALID, CODEBOOK_INVALID
//   SYMMETRY_INVALID    symmetric on an unsigned format; asymmetric on one that
//                       is not integer, or on int32; exclude_zero or
//                       unsigned_if_non_negative where they do not apply;
//                       real_zero_point without an asymmetric range
//   SCALE_TYPE_INVALID  not the format's; asymmetric with scale codes;
//                       power_of_two_scale, mx_scale_rule, integer_scale_max
//                       or outer_block_size where they do not apply
//   CODE_RANGE_INVALID  no_saturation on a format without NaN and infinity
//   METHOD_INVALID      a parameter of the method out of its range; methods
//                       without or within best-of; a search for the range of
//                       int32 or with real zero points
absl::Status ValidateSpec(const EncodingSpec& spec);

// The spec's choice, with defaults filled in.
Symmetry EffectiveSymmetry(const EncodingSpec& spec);
ScaleType EffectiveScaleType(const EncodingSpec& spec);

// The widest range that the methods mse and sqnr try, in whole ranges. The
// levels of floats and codebooks lie unevenly: with a larger scale the largest
// element takes another level, and the rest may come nearer to theirs.
double WidestRange(const EncodingSpec& spec);

// The spec for a tensor of that shape. block_size comes from granularity, which
// is cleared, or from the format's default group. outer_block_size gets the
// default of the scale type, rounded up to whole blocks.
// Errors: BLOCK_SIZE_INVALID for a rank or axis that does not fit, or an outer
// block that is not made of whole blocks; METHOD_INVALID for fixed ranges that
// are not as many as scales.
absl::StatusOr<EncodingSpec> ResolveSpec(const EncodingSpec& spec,
                                         absl::Span<const int64_t> shape);

// The block size that a granularity means for that shape; empty (per tensor)
// for a rank below 2.
// Errors: BLOCK_SIZE_INVALID.
absl::StatusOr<std::vector<int64_t>> ResolveGranularity(
    const Granularity& granularity, absl::Span<const int64_t> shape);

// True if calibrating needs histograms: all methods but min-max, fixed range
// and moving average.
bool NeedsHistograms(const EncodingSpec& spec);

// The mantissa bits of those histograms where they come from a tensor that is
// at hand; 0 for none.
int MantissaBitsAtHand(const EncodingSpec& spec);

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_ENCODING_SPEC_H_
