#include "core/calibrate/encoding_spec.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/statistics/histogram.h"
#include "core/types/block_layout.h"

namespace quantd::core {

namespace {

constexpr int kMinSearchSteps = 2;
constexpr int kMaxSearchSteps = 2048;
// Of both ends by themselves: the work grows with the square.
constexpr int kMaxSearchStepsOfTwoEnds = 128;
constexpr int kMaxEntropyBins = 16384;

template <typename Enum>
absl::Status CheckEnum(absl::string_view name, Enum value, Enum last) {
  const int number = static_cast<int>(value);
  if (number >= 0 && number <= static_cast<int>(last)) {
    return absl::OkStatus();
  }
  return EnumUnknownError(name, number);
}

absl::Status CheckEnums(const EncodingSpec& spec) {
  absl::Status status =
      CheckEnum("CalibrationMethod", spec.method, CalibrationMethod::kBestOf);
  status.Update(CheckEnum("Symmetry", spec.symmetry, Symmetry::kAimet));
  status.Update(CheckEnum("ScaleType", spec.scale_type, ScaleType::kInteger));
  status.Update(
      CheckEnum("MxScaleRule", spec.mx_scale_rule, MxScaleRule::kRceil));
  status.Update(CheckEnum("Tail", spec.tail, Tail::kLower));
  status.Update(CheckEnum("Objective", spec.objective, Objective::kSqnr));
  for (const CalibrationMethod method : spec.methods) {
    status.Update(
        CheckEnum("CalibrationMethod", method, CalibrationMethod::kBestOf));
  }
  return status;
}

// A signed integer format that has an unsigned counterpart.
bool IsPlainSigned(const FormatInfo& format) {
  return format.kind == CodeKind::kInteger && format.is_signed &&
         IntegerFormat(format.bits, true).format == format.format;
}

absl::Status CheckSymmetry(const EncodingSpec& spec, const FormatInfo& format) {
  const bool is_integer = format.kind == CodeKind::kInteger;
  const bool is_asymmetric = EffectiveSymmetry(spec) == Symmetry::kAsymmetric;
  if (!is_integer && spec.symmetry != Symmetry::kDefault &&
      spec.symmetry != Symmetry::kStrict) {
    return SymmetryInvalidError(
        absl::StrCat(format.name,
                     " is symmetric about zero; expected no "
                     "other symmetry"));
  }
  if (is_integer && !is_asymmetric && !format.is_signed) {
    return SymmetryInvalidError(
        absl::StrCat("symmetric ", format.name,
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
  if (spec.unsigned_if_non_negative && !IsPlainSigned(format)) {
    return SymmetryInvalidError(
        absl::StrCat("unsigned_if_non_negative with ", format.name,
                     "; expected a signed integer format, int2 to int16"));
  }
  return absl::OkStatus();
}

absl::Status CheckBlockSize(absl::string_view name,
                            absl::Span<const int64_t> block_size) {
  if (block_size.size() > kMaxRank) {
    return BlockSizeInvalidError(absl::StrCat(name, " has ", block_size.size(),
                                              " entries, expected at most ",
                                              kMaxRank));
  }
  for (size_t d = 0; d < block_size.size(); ++d) {
    if (block_size[d] < 0) {
      return BlockSizeInvalidError(absl::StrCat("entry ", d, " of ", name,
                                                " is ", block_size[d],
                                                ", expected at least 0"));
    }
  }
  return absl::OkStatus();
}

// That outer blocks are made of whole blocks.
absl::Status CheckOuterBlockSize(absl::Span<const int64_t> outer,
                                 absl::Span<const int64_t> inner) {
  if (outer.empty() || inner.empty()) return absl::OkStatus();
  if (outer.size() != inner.size()) {
    return BlockSizeInvalidError(absl::StrCat(
        "outer block size has ", outer.size(), " entries, expected ",
        inner.size(), ", as many as block size"));
  }
  for (size_t d = 0; d < outer.size(); ++d) {
    if (inner[d] != 0 && outer[d] % inner[d] != 0) {
      return BlockSizeInvalidError(absl::StrCat(
          "entry ", d, " of outer block size is ", outer[d],
          ", expected 0 or a multiple of ", inner[d], ", that of block size"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckScaleType(const EncodingSpec& spec,
                            const FormatInfo& format) {
  const ScaleType type = EffectiveScaleType(spec);
  if (format.scale_type != ScaleType::kDefault && type != format.scale_type) {
    return ScaleTypeInvalidError(absl::StrCat(
        "scale type ", static_cast<int>(type), " with ", format.name,
        "; expected ", static_cast<int>(format.scale_type),
        ", the format's own"));
  }
  if (HasScaleCodes(type) && EffectiveSymmetry(spec) == Symmetry::kAsymmetric) {
    return ScaleTypeInvalidError(
        "scale codes with an asymmetric range; expected a symmetric one");
  }
  if (spec.mx_scale_rule != MxScaleRule::kDefault && type != ScaleType::kE8m0) {
    return ScaleTypeInvalidError("mx_scale_rule; expected it with E8M0 scales");
  }
  if (spec.power_of_two_scale && HasScaleCodes(type)) {
    return ScaleTypeInvalidError(
        "power_of_two_scale; expected it with float scales");
  }
  if (spec.integer_scale_max != 0 && type != ScaleType::kInteger) {
    return ScaleTypeInvalidError(
        "integer_scale_max; expected it with INTEGER scales");
  }
  if (spec.integer_scale_max < 0 || spec.integer_scale_max > kMaxIntegerScale) {
    return ScaleTypeInvalidError(
        absl::StrCat("integer_scale_max is ", spec.integer_scale_max,
                     ", expected at most ", kMaxIntegerScale));
  }
  if (!spec.outer_block_size.empty() && !HasOuterScales(type)) {
    return ScaleTypeInvalidError(
        "outer_block_size; expected it with E4M3 or INTEGER scales");
  }
  return absl::OkStatus();
}

absl::Status CheckCodes(const EncodingSpec& spec, const FormatInfo& format) {
  if (spec.no_saturation && !format.has_nan()) {
    return CodeRangeInvalidError(
        absl::StrCat("no_saturation with ", format.name,
                     "; expected a float format with NaN or infinity"));
  }
  const bool carries_codebook =
      format.kind == CodeKind::kCodebook && format.codebook.empty();
  if (!carries_codebook) {
    if (spec.codebook.empty()) return absl::OkStatus();
    return CodebookInvalidError(absl::StrCat("a codebook with ", format.name,
                                             "; expected a codebook format"));
  }
  const size_t most = size_t{1} << format.bits;
  if (spec.codebook.size() < 2 || spec.codebook.size() > most) {
    return CodebookInvalidError(
        absl::StrCat("the codebook has ", spec.codebook.size(),
                     " entries, expected 2 to ", most, " for ", format.name));
  }
  for (size_t i = 0; i < spec.codebook.size(); ++i) {
    if (!std::isfinite(spec.codebook[i])) {
      return CodebookInvalidError(absl::StrCat(
          "entry ", i, " is ", spec.codebook[i], ", expected a finite number"));
    }
    if (i > 0 && !(spec.codebook[i - 1] < spec.codebook[i])) {
      return CodebookInvalidError(
          absl::StrCat("entry ", i, " is ", spec.codebook[i], " after ",
                       spec.codebook[i - 1], ", expected ascending entries"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckMethods(const EncodingSpec& spec) {
  if (spec.method != CalibrationMethod::kBestOf) {
    if (spec.methods.empty()) return absl::OkStatus();
    return MethodInvalidError("methods; expected them with best-of");
  }
  if (spec.methods.empty()) {
    return MethodInvalidError("best-of without methods; expected at least one");
  }
  std::vector<CalibrationMethod> seen;
  for (const CalibrationMethod given : spec.methods) {
    if (given == CalibrationMethod::kBestOf) {
      return MethodInvalidError("best-of within best-of");
    }
    const CalibrationMethod method = given == CalibrationMethod::kDefault
                                         ? CalibrationMethod::kMinMax
                                         : given;
    if (std::find(seen.begin(), seen.end(), method) != seen.end()) {
      return MethodInvalidError(
          absl::StrCat("method ", static_cast<int>(given),
                       " twice in best-of, expected each once"));
    }
    seen.push_back(method);
  }
  return absl::OkStatus();
}

// Conditions are written so that NaN fails.
absl::Status CheckMethod(const EncodingSpec& spec) {
  if (absl::Status s = CheckMethods(spec); !s.ok()) return s;
  if (!(spec.tail_fraction >= 0 && spec.tail_fraction < 1)) {
    return MethodInvalidError(absl::StrCat(
        "tail_fraction is ", spec.tail_fraction, ", expected one in [0, 1)"));
  }
  if (!(spec.gamma > 0 && std::isfinite(spec.gamma))) {
    return MethodInvalidError(absl::StrCat(
        "gamma is ", spec.gamma, ", expected a finite number above 0"));
  }
  const int most = EffectiveSymmetry(spec) == Symmetry::kAsymmetric
                       ? kMaxSearchStepsOfTwoEnds
                       : kMaxSearchSteps;
  if (spec.search_steps != 0 &&
      (spec.search_steps < kMinSearchSteps || spec.search_steps > most)) {
    return MethodInvalidError(
        absl::StrCat("search_steps is ", spec.search_steps, ", expected 0 or ",
                     kMinSearchSteps, " to ", most));
  }
  if (spec.entropy_bins < 0 || spec.entropy_bins > kMaxEntropyBins) {
    return MethodInvalidError(
        absl::StrCat("entropy_bins is ", spec.entropy_bins, ", expected 0 to ",
                     kMaxEntropyBins));
  }
  if (spec.mantissa_bits != 0 && (spec.mantissa_bits < kMinMantissaBits ||
                                  spec.mantissa_bits > kMaxMantissaBits)) {
    return MethodInvalidError(absl::StrCat(
        "mantissa_bits is ", spec.mantissa_bits, ", expected 0 or ",
        kMinMantissaBits, " to ", kMaxMantissaBits));
  }
  const bool has_fixed_range =
      spec.method == CalibrationMethod::kFixedRange ||
      std::find(spec.methods.begin(), spec.methods.end(),
                CalibrationMethod::kFixedRange) != spec.methods.end();
  if (has_fixed_range &&
      !(std::isfinite(spec.range_min) && std::isfinite(spec.range_max) &&
        spec.range_min < spec.range_max)) {
    return MethodInvalidError(
        absl::StrCat("the range is [", spec.range_min, ", ", spec.range_max,
                     "], expected finite ends, the smaller one first"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateSpec(const EncodingSpec& spec) {
  const FormatInfo* format = FindFormat(spec.format);
  if (format == nullptr) {
    return FormatUnknownError(static_cast<int>(spec.format));
  }
  if (absl::Status s = CheckEnums(spec); !s.ok()) return s;
  if (absl::Status s = CheckSymmetry(spec, *format); !s.ok()) return s;
  if (absl::Status s = CheckBlockSize("block size", spec.block_size); !s.ok()) {
    return s;
  }
  if (spec.granularity.has_value()) {
    if (!spec.block_size.empty()) {
      return BlockSizeInvalidError(
          "both block size and granularity, expected one of them");
    }
    if (spec.granularity->group_size < 0) {
      return BlockSizeInvalidError(absl::StrCat("group size is ",
                                                spec.granularity->group_size,
                                                ", expected at least 0"));
    }
  }
  if (absl::Status s = CheckScaleType(spec, *format); !s.ok()) return s;
  if (absl::Status s =
          CheckBlockSize("outer block size", spec.outer_block_size);
      !s.ok()) {
    return s;
  }
  if (absl::Status s =
          CheckOuterBlockSize(spec.outer_block_size, spec.block_size);
      !s.ok()) {
    return s;
  }
  if (absl::Status s = CheckCodes(spec, *format); !s.ok()) return s;
  return CheckMethod(spec);
}

Symmetry EffectiveSymmetry(const EncodingSpec& spec) {
  if (spec.symmetry != Symmetry::kDefault) return spec.symmetry;
  const FormatInfo& format = *FindFormat(spec.format);
  return format.is_signed || format.kind != CodeKind::kInteger
             ? Symmetry::kStrict
             : Symmetry::kAsymmetric;
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
  const size_t rank = shape.size();
  const FormatInfo* format = FindFormat(spec.format);
  if (format == nullptr) {
    return FormatUnknownError(static_cast<int>(spec.format));
  }
  if (spec.granularity.has_value()) {
    absl::StatusOr<std::vector<int64_t>> block_size =
        ResolveGranularity(*spec.granularity, shape);
    if (!block_size.ok()) return block_size.status();
    resolved.block_size = *block_size;
    resolved.granularity.reset();
    // Said in so many words: none would be the format's default group.
    if (resolved.block_size.empty() && format->default_group > 0) {
      resolved.block_size.assign(rank, 0);
    }
  } else if (spec.block_size.empty() && format->default_group > 0 && rank > 0) {
    resolved.block_size.assign(rank, 1);
    resolved.block_size.back() = format->default_group;
  } else if (!spec.block_size.empty() && spec.block_size.size() != rank) {
    return BlockSizeInvalidError(absl::StrCat(
        "block size has ", spec.block_size.size(),
        " entries, expected none or ", rank, ", one per dimension"));
  }

  std::vector<int64_t>& outer = resolved.outer_block_size;
  if (outer.empty()) {
    if (EffectiveScaleType(spec) == ScaleType::kInteger && rank >= 2) {
      outer.assign(rank, 0);
      // One channel, or as many as share a block.
      outer[0] = resolved.block_size.empty() ? 0 : resolved.block_size[0];
    }
    return resolved;
  }
  if (outer.size() != rank) {
    return BlockSizeInvalidError(absl::StrCat(
        "outer block size has ", outer.size(), " entries, expected none or ",
        rank, ", one per dimension"));
  }
  if (absl::Status s = CheckOuterBlockSize(outer, resolved.block_size);
      !s.ok()) {
    return s;
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
  if (granularity.group_size < 0) {
    return BlockSizeInvalidError(absl::StrCat(
        "group size is ", granularity.group_size, ", expected at least 0"));
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

int MantissaBitsAtHand(const EncodingSpec& spec) {
  // However many scales the tensor has.
  constexpr int kDefault = 7;
  if (!NeedsHistograms(spec)) return 0;
  return spec.mantissa_bits != 0 ? spec.mantissa_bits : kDefault;
}

}  // namespace quantd::core
