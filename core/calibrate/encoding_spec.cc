#include "core/calibrate/encoding_spec.h"

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/types/block_layout.h"

namespace quantd::core {

absl::Status ValidateSpec(const EncodingSpec& spec) {
  const FormatInfo* format = FindFormat(spec.format);
  if (format == nullptr) {
    return FormatUnknownError(static_cast<int>(spec.format));
  }

  const int method = static_cast<int>(spec.method);
  if (method < 0 || method > static_cast<int>(CalibrationMethod::kBestOf)) {
    return EnumUnknownError("CalibrationMethod", method);
  }

  const int symmetry_value = static_cast<int>(spec.symmetry);
  if (symmetry_value < 0 ||
      symmetry_value > static_cast<int>(Symmetry::kHalfStep)) {
    return EnumUnknownError("Symmetry", symmetry_value);
  }
  const bool is_asymmetric = EffectiveSymmetry(spec) == Symmetry::kAsymmetric;
  if (!is_asymmetric && !format->is_signed) {
    return SymmetryInvalidError(
        absl::StrCat("symmetric ", format->name,
                     "; expected a signed format, or asymmetric"));
  }
  if (!is_asymmetric && spec.exclude_zero) {
    return SymmetryInvalidError(
        "exclude_zero with a symmetric range; expected asymmetric");
  }
  if (is_asymmetric && spec.unsigned_if_non_negative) {
    return SymmetryInvalidError(
        "unsigned_if_non_negative with an asymmetric range; expected a "
        "symmetric one");
  }
  if (spec.block_size.size() > kMaxRank) {
    return BlockSizeInvalidError(
        absl::StrCat("block size has ", spec.block_size.size(),
                     " entries, expected at most ", kMaxRank));
  }
  for (size_t d = 0; d < spec.block_size.size(); ++d) {
    if (spec.block_size[d] < 0) {
      return BlockSizeInvalidError(absl::StrCat(
          "entry ", d, " is ", spec.block_size[d], ", expected at least 0"));
    }
  }
  return absl::OkStatus();
}

Symmetry EffectiveSymmetry(const EncodingSpec& spec) {
  if (spec.symmetry != Symmetry::kDefault) return spec.symmetry;
  const FormatInfo& format = *FindFormat(spec.format);
  return format.is_signed ? Symmetry::kStrict : Symmetry::kAsymmetric;
}

ScaleType EffectiveScaleType(const EncodingSpec& spec) {
  if (spec.scale_type != ScaleType::kDefault) return spec.scale_type;
  const FormatInfo& format = *FindFormat(spec.format);
  return format.scale_type == ScaleType::kDefault ? ScaleType::kFloat32
                                                  : format.scale_type;
}

absl::StatusOr<EncodingSpec> ResolveSpec(const EncodingSpec& spec,
                                         absl::Span<const int64_t> shape) {
  EncodingSpec resolved = spec;
  if (spec.granularity.has_value()) {
    absl::StatusOr<std::vector<int64_t>> block_size =
        ResolveGranularity(*spec.granularity, shape);
    if (!block_size.ok()) return block_size.status();
    resolved.block_size = *block_size;
    resolved.granularity.reset();
  }
  return resolved;
}

absl::StatusOr<std::vector<int64_t>> ResolveGranularity(
    const Granularity& granularity, absl::Span<const int64_t> shape) {
  const int64_t rank = static_cast<int64_t>(shape.size());
  std::vector<int64_t> block_size;
  if (rank < 2) return block_size;
  const int64_t axis =
      granularity.axis < 0 ? granularity.axis + rank : granularity.axis;
  if (axis < 0 || axis >= rank) {
    return BlockSizeInvalidError(
        absl::StrCat("axis ", granularity.axis, " of a tensor of rank ", rank,
                     ", expected one in [", -rank, ", ", rank - 1, "]"));
  }
  block_size.assign(shape.size(), granularity.group_size > 0 ? 1 : 0);
  block_size[axis] = granularity.group_size > 0 ? granularity.group_size : 1;
  return block_size;
}

bool NeedsHistograms(const EncodingSpec& spec) {
  switch (spec.method) {
    case CalibrationMethod::kPercentile:
    case CalibrationMethod::kMse:
    case CalibrationMethod::kSqnr:
    case CalibrationMethod::kEntropy:
    case CalibrationMethod::kBestOf:
      return true;
    case CalibrationMethod::kDefault:
    case CalibrationMethod::kMinMax:
    case CalibrationMethod::kFixedRange:
    case CalibrationMethod::kMovingAverage:
      break;
  }
  return false;
}

}  // namespace quantd::core
