#include "core/calibrate/encoding_spec.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
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
// Limit where both ends move by themselves: the work grows with the square.
constexpr int kMaxSearchStepsOfTwoEnds = 128;
constexpr int kMaxEntropyBins = 16384;

template <typename Enum>
absl::Status CheckEnum(absl::string_view field, absl::string_view name,
                       Enum value, Enum last) {
  const int number = static_cast<int>(value);
  if (number >= 0 && number <= static_cast<int>(last)) {
    return absl::OkStatus();
  }
  return WithField(EnumUnknownError(name, number), field);
}

absl::Status CheckEnums(const EncodingSpec& spec) {
  absl::Status status = CheckEnum("method", "CalibrationMethod", spec.method,
                                  CalibrationMethod::kBestOf);
  status.Update(
      CheckEnum("symmetry", "Symmetry", spec.symmetry, Symmetry::kAimet));
  status.Update(CheckEnum("scale_type", "ScaleType", spec.scale_type,
                          ScaleType::kInteger));
  status.Update(CheckEnum("mx_scale_rule", "MxScaleRule", spec.mx_scale_rule,
                          MxScaleRule::kRceil));
  status.Update(CheckEnum("tail", "Tail", spec.tail, Tail::kLower));
  status.Update(
      CheckEnum("objective", "Objective", spec.objective, Objective::kSqnr));
  for (const CalibrationMethod method : spec.methods) {
    status.Update(CheckEnum("methods", "CalibrationMethod", method,
                            CalibrationMethod::kBestOf));
  }
  return status;
}

// A signed integer format that has an unsigned counterpart.
bool IsPlainSigned(const FormatInfo& format) {
  return format.kind == CodeKind::kInteger && format.is_signed &&
         !IsWideInteger(format) &&
         IntegerFormat(format.bits, true).format == format.format;
}

absl::Status CheckSymmetry(const EncodingSpec& spec, const FormatInfo& format) {
  const bool is_integer = format.kind == CodeKind::kInteger;
  const bool is_asymmetric = EffectiveSymmetry(spec) == Symmetry::kAsymmetric;
  if (!is_integer && spec.symmetry != Symmetry::kDefault &&
      spec.symmetry != Symmetry::kStrict) {
    return WithField(
        SymmetryInvalidError(absl::StrCat(
            format.name, " takes no symmetry but STRICT, its default")),
        "symmetry");
  }
  if (is_integer && !is_asymmetric && !format.is_signed) {
    return WithField(
        SymmetryInvalidError(absl::StrCat(
            "a symmetric range needs a signed format, but the format is ",
            format.name)),
        "symmetry");
  }
  if (is_asymmetric && IsWideInteger(format)) {
    return WithField(
        SymmetryInvalidError(absl::StrCat(
            format.name,
            " needs a symmetric range, for all its zero points are 0")),
        "symmetry");
  }
  if (!is_asymmetric && spec.exclude_zero) {
    return WithField(
        SymmetryInvalidError(
            "exclude_zero needs an asymmetric range, but the range is "
            "symmetric"),
        "exclude_zero");
  }
  if (!is_asymmetric && spec.real_zero_point) {
    return WithField(
        SymmetryInvalidError("real_zero_point needs an asymmetric range, but "
                             "the range is symmetric"),
        "real_zero_point");
  }
  if (is_asymmetric && spec.unsigned_if_non_negative) {
    return WithField(
        SymmetryInvalidError(
            "unsigned_if_non_negative needs a symmetric range, but the range "
            "is asymmetric"),
        "unsigned_if_non_negative");
  }
  if (spec.unsigned_if_non_negative && !IsPlainSigned(format)) {
    return WithField(
        SymmetryInvalidError(absl::StrCat(
            "unsigned_if_non_negative needs a signed integer format, int2 to "
            "int16, but the format is ",
            format.name)),
        "unsigned_if_non_negative");
  }
  return absl::OkStatus();
}

absl::Status CheckBlockSize(absl::string_view field,
                            absl::Span<const int64_t> block_size) {
  if (block_size.size() > kMaxRank) {
    return WithField(BlockSizeInvalidError(
                         absl::StrCat(field, " has ", block_size.size(),
                                      " entries, expected at most ", kMaxRank)),
                     field);
  }
  for (size_t d = 0; d < block_size.size(); ++d) {
    if (block_size[d] < 0) {
      return WithField(BlockSizeInvalidError(absl::StrCat(
                           "entry ", d, " of ", field, " is ", block_size[d],
                           ", expected at least 0")),
                       field);
    }
  }
  return absl::OkStatus();
}

// Checks that outer blocks are made of whole blocks.
absl::Status CheckOuterBlockSize(absl::Span<const int64_t> outer,
                                 absl::Span<const int64_t> inner) {
  if (outer.empty() || inner.empty()) return absl::OkStatus();
  if (outer.size() != inner.size()) {
    return BlockSizeInvalidError(absl::StrCat(
        "outer_block_size has ", outer.size(), " entries, expected ",
        inner.size(), ", as many as block_size"));
  }
  for (size_t d = 0; d < outer.size(); ++d) {
    if (inner[d] != 0 && outer[d] % inner[d] != 0) {
      return BlockSizeInvalidError(absl::StrCat(
          "entry ", d, " of outer_block_size is ", outer[d],
          ", expected 0 or a multiple of ", inner[d], ", that of block_size"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckScaleType(const EncodingSpec& spec,
                            const FormatInfo& format) {
  const ScaleType type = EffectiveScaleType(spec);
  const auto error_at = [](absl::string_view field, const auto&... what) {
    return WithField(ScaleTypeInvalidError(absl::StrCat(what...)), field);
  };
  const auto needs = [&](absl::string_view field, absl::string_view types) {
    return error_at(field, field, " needs ", types,
                    " scales, but the scales are ", ScaleTypeName(type));
  };
  if (format.scale_type != ScaleType::kDefault && type != format.scale_type) {
    return error_at("scale_type", "scale_type is ", ScaleTypeName(type),
                    ", expected ", ScaleTypeName(format.scale_type), " with ",
                    format.name);
  }
  if (HasScaleCodes(type) && EffectiveSymmetry(spec) == Symmetry::kAsymmetric) {
    return error_at("scale_type", ScaleTypeName(type),
                    " scales need a symmetric range, but the range is "
                    "asymmetric");
  }
  if (spec.mx_scale_rule != MxScaleRule::kDefault && type != ScaleType::kE8m0) {
    return needs("mx_scale_rule", "E8M0");
  }
  if (spec.power_of_two_scale && HasScaleCodes(type)) {
    return needs("power_of_two_scale", "FLOAT32, FLOAT16 or BFLOAT16");
  }
  if (spec.integer_scale_max != 0 && type != ScaleType::kInteger) {
    return needs("integer_scale_max", "INTEGER");
  }
  if (spec.integer_scale_max < 0 || spec.integer_scale_max > kMaxIntegerScale) {
    return error_at("integer_scale_max", "integer_scale_max is ",
                    spec.integer_scale_max, ", expected at most ",
                    kMaxIntegerScale);
  }
  if (!spec.outer_block_size.empty() && !HasOuterScales(type)) {
    return needs("outer_block_size", "E4M3 or INTEGER");
  }
  return absl::OkStatus();
}

absl::Status CheckCodebook(const EncodingSpec& spec, const FormatInfo& format) {
  const bool carries_codebook =
      format.kind == CodeKind::kCodebook && format.codebook.empty();
  if (!carries_codebook) {
    if (spec.codebook.empty()) return absl::OkStatus();
    return CodebookInvalidError(
        absl::StrCat("codebook has ", spec.codebook.size(),
                     " entries, expected none with ", format.name));
  }
  const size_t most = size_t{1} << format.bits;
  if (spec.codebook.size() < 2 || spec.codebook.size() > most) {
    return CodebookInvalidError(
        absl::StrCat("codebook has ", spec.codebook.size(),
                     " entries, expected 2 to ", most, " with ", format.name));
  }
  for (size_t i = 0; i < spec.codebook.size(); ++i) {
    if (!std::isfinite(spec.codebook[i])) {
      return CodebookInvalidError(absl::StrCat("entry ", i, " of codebook is ",
                                               spec.codebook[i],
                                               ", expected a finite number"));
    }
    if (i > 0 && !(spec.codebook[i - 1] < spec.codebook[i])) {
      return CodebookInvalidError(absl::StrCat(
          "entry ", i, " of codebook is ", spec.codebook[i], " after ",
          spec.codebook[i - 1], ", expected ascending entries"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckCodes(const EncodingSpec& spec, const FormatInfo& format) {
  if (spec.no_saturation && !format.has_nan()) {
    return WithField(
        CodeRangeInvalidError(absl::StrCat(
            "no_saturation needs a float format with NaN or infinity, but the "
            "format is ",
            format.name)),
        "no_saturation");
  }
  return WithField(CheckCodebook(spec, format), "codebook");
}

absl::Status MethodErrorAt(absl::string_view field, absl::string_view what) {
  return WithField(MethodInvalidError(what), field);
}

// True if the method tries ranges and compares their errors.
bool Searches(const EncodingSpec& spec) {
  return NeedsHistograms(spec) && spec.method != CalibrationMethod::kPercentile;
}

absl::Status CheckMethods(const EncodingSpec& spec) {
  if (spec.method != CalibrationMethod::kBestOf) {
    if (spec.methods.empty()) return absl::OkStatus();
    return MethodErrorAt("methods",
                         "methods needs the method BEST_OF, but the method is "
                         "another");
  }
  if (spec.methods.empty()) {
    return MethodErrorAt("method",
                         "the method BEST_OF needs methods to choose from, but "
                         "methods is empty");
  }
  std::vector<CalibrationMethod> seen;
  for (const CalibrationMethod given : spec.methods) {
    if (given == CalibrationMethod::kBestOf) {
      return MethodErrorAt("methods",
                           "methods has BEST_OF, expected other methods only");
    }
    const CalibrationMethod method = given == CalibrationMethod::kDefault
                                         ? CalibrationMethod::kMinMax
                                         : given;
    if (std::find(seen.begin(), seen.end(), method) != seen.end()) {
      return MethodErrorAt("methods", absl::StrCat("methods has method ",
                                                   static_cast<int>(given),
                                                   " twice, expected each "
                                                   "once"));
    }
    seen.push_back(method);
  }
  return absl::OkStatus();
}

// Checks the fixed ranges for each scale.
absl::Status CheckScaleRanges(const EncodingSpec& spec, bool has_fixed_range) {
  constexpr absl::string_view kField = "scale_range_min";
  if (!has_fixed_range) {
    return MethodErrorAt(kField,
                         "scale_range_min needs the method FIXED_RANGE, but "
                         "the method is another");
  }
  if (spec.scale_range_min.size() != spec.scale_range_max.size()) {
    return MethodErrorAt(kField, absl::StrCat("scale_range_min has ",
                                              spec.scale_range_min.size(),
                                              " entries and scale_range_max ",
                                              spec.scale_range_max.size(),
                                              ", expected as many of either"));
  }
  for (size_t i = 0; i < spec.scale_range_min.size(); ++i) {
    const double min = spec.scale_range_min[i];
    const double max = spec.scale_range_max[i];
    if (!(std::isfinite(min) && std::isfinite(max) && min < max)) {
      return MethodErrorAt(
          kField,
          absl::StrCat("the fixed range of scale ", i, " is [", min, ", ", max,
                       "], expected finite ends, the smaller one "
                       "first"));
    }
  }
  return absl::OkStatus();
}

// Checks that there is a fixed range for each scale, or one for all.
// Requires: a block size that fits the shape.
absl::Status CheckScaleRangeCount(const EncodingSpec& resolved,
                                  absl::Span<const int64_t> shape) {
  if (resolved.scale_range_min.empty()) return absl::OkStatus();
  const absl::StatusOr<BlockLayout> layout =
      BlockLayout::Create(shape, resolved.block_size);
  if (!layout.ok()) return layout.status();
  const auto count = static_cast<int64_t>(resolved.scale_range_min.size());
  if (count == layout->scale_count()) return absl::OkStatus();
  return MethodErrorAt(
      "scale_range_min",
      absl::StrCat("scale_range_min has ", count, " entries, expected ",
                   layout->scale_count(), ", one for each scale"));
}

// Conditions are written so that NaN fails.
absl::Status CheckMethod(const EncodingSpec& spec) {
  if (absl::Status s = CheckMethods(spec); !s.ok()) return s;
  // The searches know neither: steps of 2^-31 of the range leave nothing to be
  // gained, and zero points are codes.
  const FormatInfo& format = *FindFormat(spec.format);
  if (Searches(spec) && (spec.real_zero_point || IsWideInteger(format))) {
    return MethodErrorAt(
        "method",
        absl::StrCat(spec.real_zero_point ? "real_zero_point" : format.name,
                     " needs a method that does not search for the "
                     "least error: min-max, percentile, the fixed "
                     "range or the moving average"));
  }
  const auto out_of_range = [](absl::string_view field, auto value,
                               const auto&... expected) {
    return MethodErrorAt(
        field, absl::StrCat(field, " is ", value, ", expected ", expected...));
  };
  if (!(spec.tail_fraction >= 0 && spec.tail_fraction < 1)) {
    return out_of_range("tail_fraction", spec.tail_fraction, "one in [0, 1)");
  }
  if (!(spec.gamma > 0 && std::isfinite(spec.gamma))) {
    return out_of_range("gamma", spec.gamma, "a finite number above 0");
  }
  const int most = EffectiveSymmetry(spec) == Symmetry::kAsymmetric
                       ? kMaxSearchStepsOfTwoEnds
                       : kMaxSearchSteps;
  if (spec.search_steps != 0 &&
      (spec.search_steps < kMinSearchSteps || spec.search_steps > most)) {
    return out_of_range("search_steps", spec.search_steps, "0 or ",
                        kMinSearchSteps, " to ", most);
  }
  if (spec.entropy_bins < 0 || spec.entropy_bins > kMaxEntropyBins) {
    return out_of_range("entropy_bins", spec.entropy_bins, "0 to ",
                        kMaxEntropyBins);
  }
  if (spec.mantissa_bits != 0 && (spec.mantissa_bits < kMinMantissaBits ||
                                  spec.mantissa_bits > kMaxMantissaBits)) {
    return out_of_range("mantissa_bits", spec.mantissa_bits, "0 or ",
                        kMinMantissaBits, " to ", kMaxMantissaBits);
  }
  const bool has_fixed_range =
      spec.method == CalibrationMethod::kFixedRange ||
      std::find(spec.methods.begin(), spec.methods.end(),
                CalibrationMethod::kFixedRange) != spec.methods.end();
  if (!spec.scale_range_min.empty() || !spec.scale_range_max.empty()) {
    return CheckScaleRanges(spec, has_fixed_range);
  }
  if (has_fixed_range &&
      !(std::isfinite(spec.range_min) && std::isfinite(spec.range_max) &&
        spec.range_min < spec.range_max)) {
    return MethodErrorAt(
        spec.method == CalibrationMethod::kFixedRange ? "method" : "methods",
        absl::StrCat("the fixed range is [", spec.range_min, ", ",
                     spec.range_max,
                     "], expected finite ends, the smaller one first"));
  }
  return absl::OkStatus();
}

absl::Status CheckGranularity(const EncodingSpec& spec) {
  if (!spec.granularity.has_value()) return absl::OkStatus();
  if (!spec.block_size.empty()) {
    return BlockSizeInvalidError(
        "block_size and granularity are both set, expected one of them");
  }
  if (spec.granularity->group_size < 0) {
    return BlockSizeInvalidError(absl::StrCat("group_size is ",
                                              spec.granularity->group_size,
                                              ", expected at least 0"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateSpec(const EncodingSpec& spec) {
  const FormatInfo* format = FindFormat(spec.format);
  if (format == nullptr) {
    return WithField(FormatUnknownError(static_cast<int>(spec.format)),
                     "format");
  }
  const std::vector<int64_t>& inner = spec.block_size;
  const std::vector<int64_t>& outer = spec.outer_block_size;
  if (absl::Status s = CheckEnums(spec); !s.ok()) return s;
  if (absl::Status s = CheckSymmetry(spec, *format); !s.ok()) return s;
  if (absl::Status s = CheckBlockSize("block_size", inner); !s.ok()) return s;
  if (absl::Status s = CheckGranularity(spec); !s.ok()) {
    return WithField(std::move(s), "granularity");
  }
  if (absl::Status s = CheckScaleType(spec, *format); !s.ok()) return s;
  if (absl::Status s = CheckBlockSize("outer_block_size", outer); !s.ok()) {
    return s;
  }
  if (absl::Status s = CheckOuterBlockSize(outer, inner); !s.ok()) {
    return WithField(std::move(s), "outer_block_size");
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

double WidestRange(const EncodingSpec& spec) {
  switch (FindFormat(spec.format)->kind) {
    case CodeKind::kInteger:
      break;
    // The levels repeat themselves from one power of two to the next.
    case CodeKind::kFloat:
      return 2;
    // Measured with NF4 in groups of 16: more brings .03 dB at most.
    case CodeKind::kCodebook:
      return 1.5;
  }
  return 1;
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
        "block_size has ", spec.block_size.size(),
        " entries, expected none or ", rank, ", one per dimension"));
  }

  if (absl::Status s = CheckScaleRangeCount(resolved, shape); !s.ok()) {
    return s;
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
        "outer_block_size has ", outer.size(), " entries, expected none or ",
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
        "group_size is ", granularity.group_size, ", expected at least 0"));
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
