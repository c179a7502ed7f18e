#include "core/types/encoding.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/formats/codec.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "core/types/block_layout.h"
#include "core/types/float_convert.h"

namespace quantd::core {

bool operator==(const Encoding& a, const Encoding& b) {
  // E8M0 scales may be NaN, on both sides.
  const bool same_scales =
      std::equal(a.scale.begin(), a.scale.end(), b.scale.begin(), b.scale.end(),
                 [](float x, float y) {
                   return x == y || (std::isnan(x) && std::isnan(y));
                 });
  return a.format == b.format && a.block_size == b.block_size && same_scales &&
         a.zero_point == b.zero_point &&
         a.real_zero_point == b.real_zero_point &&
         a.zero_points_are_real == b.zero_points_are_real && a.qmin == b.qmin &&
         a.qmax == b.qmax && a.exclude_zero == b.exclude_zero &&
         a.degenerate_count == b.degenerate_count &&
         a.scale_type == b.scale_type && a.scale_code == b.scale_code &&
         a.outer_scale == b.outer_scale &&
         a.outer_block_size == b.outer_block_size && a.codebook == b.codebook &&
         a.no_saturation == b.no_saturation && a.scale_shape == b.scale_shape;
}

namespace {

absl::Status BlockSizeAt(absl::string_view field, absl::string_view what) {
  return WithField(BlockSizeInvalidError(what), field);
}

// Rank and signs of a block size or a scale shape.
absl::Status CheckSizes(absl::string_view field,
                        const std::vector<int64_t>& sizes) {
  if (sizes.size() > kMaxRank) {
    return BlockSizeAt(field,
                       absl::StrCat(field, " has ", sizes.size(),
                                    " entries, expected at most ", kMaxRank));
  }
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] < 0) {
      return BlockSizeAt(field, absl::StrCat("entry ", d, " is ", sizes[d],
                                             ", expected at least 0"));
    }
  }
  return absl::OkStatus();
}

// The scale shape, where there is one, is that of `scale_count` scales in
// blocks of that size.
absl::Status CheckScaleShape(const Encoding& encoding, int64_t scale_count) {
  const std::vector<int64_t>& shape = encoding.scale_shape;
  const std::vector<int64_t>& block = encoding.block_size;
  if (shape.empty()) return absl::OkStatus();
  if (absl::Status s = CheckSizes("scale_shape", shape); !s.ok()) return s;
  if (!block.empty() && shape.size() != block.size()) {
    return BlockSizeAt(
        "scale_shape",
        absl::StrCat("scale_shape has ", shape.size(), " entries, expected ",
                     block.size(), ", as many as block_size"));
  }
  for (size_t d = 0; d < shape.size(); ++d) {
    if ((block.empty() || block[d] == 0) && shape[d] != 1) {
      return BlockSizeAt("scale_shape",
                         absl::StrCat("entry ", d, " is ", shape[d],
                                      ", expected 1 where one block takes the "
                                      "whole dimension"));
    }
  }
  const absl::StatusOr<int64_t> count = ElementCount(shape);
  if (!count.ok()) {
    return BlockSizeAt("scale_shape", ErrorText(count.status()));
  }
  if (*count != scale_count) {
    return WithField(ScaleShapeError(absl::StrCat(
                         "scale_shape is [", absl::StrJoin(shape, ","),
                         "], expected that of ", scale_count, " scales")),
                     "scale_shape");
  }
  return absl::OkStatus();
}

// Errors: BLOCK_SIZE_INVALID.
absl::Status CheckOuterBlockSize(const Encoding& encoding) {
  constexpr absl::string_view kField = "outer_block_size";
  const std::vector<int64_t>& outer = encoding.outer_block_size;
  const std::vector<int64_t>& inner = encoding.block_size;
  if (absl::Status s = CheckSizes(kField, outer); !s.ok()) return s;
  if (outer.empty() || inner.empty()) return absl::OkStatus();
  if (outer.size() != inner.size()) {
    return BlockSizeAt(kField,
                       absl::StrCat("outer_block_size has ", outer.size(),
                                    " entries, expected none or ", inner.size(),
                                    ", as many as block_size"));
  }
  for (size_t d = 0; d < outer.size(); ++d) {
    if (inner[d] > 0 && outer[d] % inner[d] != 0) {
      return BlockSizeAt(kField,
                         absl::StrCat("entry ", d, " is ", outer[d],
                                      ", expected 0 or a multiple of block_"
                                      "size's ",
                                      inner[d]));
    }
  }
  return absl::OkStatus();
}

bool IsPositiveNormal(float value) {
  // Written so that NaN fails.
  return value >= std::numeric_limits<float>::min() &&
         value <= std::numeric_limits<float>::max();
}

absl::Status ScaleAt(absl::string_view field, int64_t index, float value) {
  return WithField(ScaleInvalidError(index, value), field);
}

absl::Status ScaleValueAt(absl::string_view field, int64_t index, float value,
                          absl::string_view expected) {
  return WithField(ScaleValueError(index, value, expected), field);
}

const FormatInfo& E4m3Format() {
  static const FormatInfo& format = *FindFormatByName("float8_e4m3fn");
  return format;
}

// Everything about scale codes and outer scales but the scales themselves,
// which it makes from them [scale_code.size()].
// Requires: HasScaleCodes, a known format.
absl::StatusOr<std::vector<float>> ScalesFromCodes(const Encoding& encoding) {
  const std::vector<uint8_t>& code = encoding.scale_code;
  const int64_t count = static_cast<int64_t>(code.size());
  const int64_t outer_count = static_cast<int64_t>(encoding.outer_scale.size());
  if (count == 0) return WithField(ScaleCodeCountError(1, 0), "scale_code");
  if (absl::Status s = CheckSizes("block_size", encoding.block_size); !s.ok()) {
    return s;
  }
  if (absl::Status s = CheckScaleShape(encoding, count); !s.ok()) return s;

  std::vector<float> scale(code.size());
  if (encoding.scale_type == ScaleType::kE8m0) {
    for (int64_t i = 0; i < count; ++i) {
      scale[i] = ScaleOfCode(encoding, code[i], 0);
    }
    return scale;
  }

  if (absl::Status s = CheckOuterBlockSize(encoding); !s.ok()) return s;
  if (outer_count == 0) {
    return WithField(OuterScaleCountError(1, 0), "outer_scale");
  }
  if (outer_count > 1 && encoding.scale_shape.empty()) {
    return BlockSizeAt("scale_shape",
                       "no scale_shape, expected one with more than one outer "
                       "scale");
  }
  for (int64_t i = 0; i < outer_count; ++i) {
    absl::Status status = CheckOuterScale(i, encoding.outer_scale[i]);
    if (!status.ok()) return status;
  }
  const auto derive = [&](int64_t i, int64_t outer) {
    scale[i] = ScaleOfCode(encoding, code[i], encoding.outer_scale[outer]);
  };
  if (encoding.scale_shape.empty()) {
    for (int64_t i = 0; i < count; ++i) derive(i, 0);
  } else {
    const absl::StatusOr<BlockLayout> layout =
        OuterLayout(encoding, encoding.scale_shape);
    if (!layout.ok()) return layout.status();
    if (outer_count != layout->scale_count()) {
      return WithField(OuterScaleCountError(layout->scale_count(), outer_count),
                       "outer_scale");
    }
    layout->ForEachRun(0, count, [&](const BlockLayout::Run& run) {
      for (int64_t k = 0; k < run.count; ++k) {
        derive(run.begin + k, run.scale_index + k * run.scale_step);
      }
    });
  }
  for (int64_t i = 0; i < count; ++i) {
    absl::Status status = CheckScale(encoding, i, scale[i], code[i]);
    if (!status.ok()) return status;
  }
  return scale;
}

absl::Status CheckScaleType(const Encoding& encoding,
                            const FormatInfo& format) {
  const ScaleType type = encoding.scale_type;
  const int value = static_cast<int>(type);
  if (value <= static_cast<int>(ScaleType::kDefault) ||
      value > static_cast<int>(ScaleType::kInteger)) {
    return WithField(ScaleTypeInvalidError(absl::StrCat(
                         "scale type ", value, ", expected one of 1 to ",
                         static_cast<int>(ScaleType::kInteger))),
                     "scale_type");
  }
  if (format.scale_type != ScaleType::kDefault && type != format.scale_type) {
    return WithField(
        ScaleTypeInvalidError(absl::StrCat(
            "scale_type is ", ScaleTypeName(type), ", expected ",
            ScaleTypeName(format.scale_type), " with ", format.name)),
        "scale_type");
  }
  if (!HasScaleCodes(type) && !encoding.scale_code.empty()) {
    return WithField(ScaleTypeInvalidError(
                         absl::StrCat("scale_code needs E8M0, E4M3 or INTEGER "
                                      "scales, but the scales are ",
                                      ScaleTypeName(type))),
                     "scale_code");
  }
  if (!HasOuterScales(type) && !encoding.outer_scale.empty()) {
    return WithField(
        ScaleTypeInvalidError(absl::StrCat(
            "outer_scale needs E4M3 or INTEGER scales, but the scales are ",
            ScaleTypeName(type))),
        "outer_scale");
  }
  if (!HasOuterScales(type) && !encoding.outer_block_size.empty()) {
    return WithField(ScaleTypeInvalidError(
                         absl::StrCat("outer_block_size needs E4M3 or INTEGER "
                                      "scales, but the scales are ",
                                      ScaleTypeName(type))),
                     "outer_block_size");
  }
  if (HasScaleCodes(type) &&
      (HasZeroPoints(encoding) || encoding.zero_points_are_real)) {
    const absl::string_view field =
        encoding.zero_points_are_real ? "real_zero_point" : "zero_point";
    return WithField(ScaleTypeInvalidError(
                         absl::StrCat(field,
                                      " needs FLOAT32, FLOAT16 or BFLOAT16 "
                                      "scales, but the scales are ",
                                      ScaleTypeName(type))),
                     field);
  }
  return absl::OkStatus();
}

bool IsValueOf(ScaleType type, float scale) {
  switch (type) {
    case ScaleType::kFloat16:
      return HalfToFloat(FloatToHalf(scale)) == scale;
    case ScaleType::kBfloat16:
      return BfloatToFloat(FloatToBfloat(scale)) == scale;
    default:
      return true;
  }
}

absl::Status CheckScales(const Encoding& encoding) {
  const int64_t count = static_cast<int64_t>(encoding.scale.size());
  if (HasScaleCodes(encoding.scale_type)) {
    const absl::StatusOr<std::vector<float>> derived =
        ScalesFromCodes(encoding);
    if (!derived.ok()) return derived.status();
    if (derived->size() != encoding.scale.size()) {
      return WithField(
          ScaleCountError(static_cast<int64_t>(derived->size()), count),
          "scale");
    }
    for (int64_t i = 0; i < count; ++i) {
      const float scale = encoding.scale[i];
      const bool is_same = std::isnan((*derived)[i]) ? std::isnan(scale)
                                                     : scale == (*derived)[i];
      if (!is_same) {
        return ScaleValueAt("scale", i, scale,
                            absl::StrCat((*derived)[i], " by its scale code"));
      }
    }
    return absl::OkStatus();
  }
  if (count == 0) return WithField(ScaleCountError(1, 0), "scale");
  for (int64_t i = 0; i < count; ++i) {
    absl::Status status = CheckScale(encoding, i, encoding.scale[i], 0);
    if (!status.ok()) return status;
  }
  return CheckScaleShape(encoding, count);
}

absl::Status CheckCodebook(const Encoding& encoding, const FormatInfo& format) {
  const std::vector<float>& codebook = encoding.codebook;
  const auto error = [](absl::string_view what) {
    return WithField(CodebookInvalidError(what), "codebook");
  };
  if (format.kind != CodeKind::kCodebook || !format.codebook.empty()) {
    if (codebook.empty()) return absl::OkStatus();
    return error(absl::StrCat("codebook has ", codebook.size(),
                              " entries, expected none with ", format.name));
  }
  const size_t most = size_t{1} << format.bits;
  if (codebook.size() < 2 || codebook.size() > most) {
    return error(absl::StrCat("codebook has ", codebook.size(),
                              " entries, expected 2 to ", most));
  }
  for (size_t k = 0; k < codebook.size(); ++k) {
    if (!std::isfinite(codebook[k]) ||
        (k > 0 && codebook[k] <= codebook[k - 1])) {
      return error(absl::StrCat("entry ", k, " is ", codebook[k],
                                ", expected a finite number above the entry "
                                "before it"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckCodeRange(const Encoding& encoding,
                            const FormatInfo& format) {
  if (encoding.no_saturation && !format.has_nan() && !format.has_infinity()) {
    return WithField(CodeRangeInvalidError(
                         absl::StrCat("no_saturation needs a format with "
                                      "infinity or NaN, but the format is ",
                                      format.name)),
                     "no_saturation");
  }
  if (format.kind != CodeKind::kInteger) {
    const int32_t qmax =
        format.kind == CodeKind::kCodebook
            ? static_cast<int32_t>(CodebookOf(encoding).size()) - 1
            : format.qmax;
    if (encoding.qmin == 0 && encoding.qmax == qmax) return absl::OkStatus();
    return WithField(
        CodeRangeInvalidError(absl::StrCat("codes are [", encoding.qmin, ", ",
                                           encoding.qmax, "], expected all of ",
                                           format.name, ": [0, ", qmax, "]")),
        encoding.qmin != 0 ? "qmin" : "qmax");
  }
  if (encoding.qmin < format.qmin || encoding.qmax > format.qmax ||
      encoding.qmin >= encoding.qmax) {
    return WithField(CodeRangeInvalidError(absl::StrCat(
                         "codes are [", encoding.qmin, ", ", encoding.qmax,
                         "], expected a range of at least two codes within [",
                         format.qmin, ", ", format.qmax, "] of ", format.name)),
                     encoding.qmax > format.qmax ? "qmax" : "qmin");
  }
  return absl::OkStatus();
}

// The zero points that an encoding may have. They are `zero_point_count`.
absl::Status CheckZeroPointUse(const Encoding& encoding,
                               const FormatInfo& format,
                               int64_t zero_point_count) {
  const auto error = [](absl::string_view what) {
    return WithField(ZeroPointRangeError(what), "zero_point");
  };
  const auto real_error = [](absl::string_view what) {
    return WithField(ZeroPointRangeError(what), "real_zero_point");
  };
  if (format.kind != CodeKind::kInteger) {
    if (encoding.exclude_zero) {
      return WithField(
          ZeroPointRangeError(absl::StrCat(
              "exclude_zero needs an integer format, but the format is ",
              format.name)),
          "exclude_zero");
    }
    if (encoding.zero_points_are_real) {
      return real_error(absl::StrCat(
          "real zero points need an integer format, but the format is ",
          format.name));
    }
    if (zero_point_count == 0) return absl::OkStatus();
    return error(absl::StrCat(
        "zero_point needs an integer format, but the format is ", format.name));
  }
  if (encoding.zero_points_are_real && IsWideInteger(format)) {
    return real_error(
        absl::StrCat("all zero points of ", format.name, " are 0"));
  }
  // A NaN scale gives the code 0, whatever exclude_zero says.
  const bool needs_zero =
      !encoding.exclude_zero || HasScaleCodes(encoding.scale_type);
  if (zero_point_count == 0 && needs_zero &&
      (encoding.qmin > 0 || encoding.qmax < 0)) {
    return error(absl::StrCat("no zero points means 0, which is outside of [",
                              encoding.qmin, ", ", encoding.qmax, "]"));
  }
  return absl::OkStatus();
}

absl::Status CheckRealZeroPoints(const Encoding& encoding,
                                 const FormatInfo& format) {
  const std::vector<float>& zero_point = encoding.real_zero_point;
  if (!encoding.zero_point.empty()) {
    return WithField(
        ZeroPointRangeError("zero_point and real zero points are both given, "
                            "expected one kind"),
        "zero_point");
  }
  absl::Status status = CheckZeroPointUse(
      encoding, format, static_cast<int64_t>(zero_point.size()));
  if (!status.ok()) return status;
  if (zero_point.size() != encoding.scale.size()) {
    return WithField(
        ZeroPointCountError(static_cast<int64_t>(encoding.scale.size()),
                            static_cast<int64_t>(zero_point.size())),
        "real_zero_point");
  }
  for (size_t i = 0; i < zero_point.size(); ++i) {
    status =
        CheckRealZeroPoint(encoding, static_cast<int64_t>(i), zero_point[i]);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckZeroPoints(const Encoding& encoding,
                             const FormatInfo& format) {
  if (encoding.zero_points_are_real) {
    return CheckRealZeroPoints(encoding, format);
  }
  const std::vector<int32_t>& zero_point = encoding.zero_point;
  if (format.kind == CodeKind::kInteger && !zero_point.empty() &&
      zero_point.size() != encoding.scale.size()) {
    return WithField(
        ZeroPointCountError(static_cast<int64_t>(encoding.scale.size()),
                            static_cast<int64_t>(zero_point.size())),
        "zero_point");
  }
  absl::Status status = CheckZeroPointUse(
      encoding, format, static_cast<int64_t>(zero_point.size()));
  if (!status.ok()) return status;
  for (size_t i = 0; i < zero_point.size(); ++i) {
    status = CheckZeroPoint(encoding, static_cast<int64_t>(i), zero_point[i]);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Everything that does not concern scales and zero points.
absl::Status CheckFrame(const Encoding& encoding) {
  const FormatInfo* format = FindFormat(encoding.format);
  if (format == nullptr) {
    return WithField(FormatUnknownError(static_cast<int>(encoding.format)),
                     "format");
  }
  if (absl::Status s = CheckSizes("block_size", encoding.block_size); !s.ok()) {
    return s;
  }
  if (absl::Status s = CheckScaleType(encoding, *format); !s.ok()) return s;
  if (absl::Status s = CheckCodebook(encoding, *format); !s.ok()) return s;
  return CheckCodeRange(encoding, *format);
}

}  // namespace

absl::Status ValidateEncoding(const Encoding& encoding) {
  if (absl::Status s = CheckFrame(encoding); !s.ok()) return s;
  if (absl::Status s = CheckScales(encoding); !s.ok()) return s;
  return CheckZeroPoints(encoding, *FindFormat(encoding.format));
}

absl::Status ValidateWithoutScales(const Encoding& encoding,
                                   bool has_zero_points) {
  if (absl::Status s = CheckFrame(encoding); !s.ok()) return s;
  if (HasScaleCodes(encoding.scale_type) && has_zero_points) {
    return WithField(ScaleTypeInvalidError(
                         absl::StrCat("zero points need FLOAT32, FLOAT16 or "
                                      "BFLOAT16 scales, but the scales are ",
                                      ScaleTypeName(encoding.scale_type))),
                     "chunks_have_zero_points");
  }
  if (encoding.zero_points_are_real && !has_zero_points) {
    return WithField(
        ZeroPointRangeError(
            "zero_points_are_real needs zero points, but there are none"),
        "zero_points_are_real");
  }
  if (absl::Status s = CheckOuterBlockSize(encoding); !s.ok()) return s;
  return CheckZeroPointUse(encoding, *FindFormat(encoding.format),
                           has_zero_points ? 1 : 0);
}

float ScaleOfCode(const Encoding& encoding, uint8_t code, float outer_scale) {
  switch (encoding.scale_type) {
    case ScaleType::kE8m0:
      return code == kE8m0Nan
                 ? std::numeric_limits<float>::quiet_NaN()
                 : std::ldexp(
                       1.0f,
                       code - 127 + FindFormat(encoding.format)->step_exponent);
    case ScaleType::kE4m3:
      return FloatValues(E4m3Format())[code] * outer_scale;
    default:
      return static_cast<float>(code) * outer_scale;
  }
}

absl::Status CheckScale(const Encoding& encoding, int64_t index, float scale,
                        uint8_t code) {
  switch (encoding.scale_type) {
    case ScaleType::kE8m0:
      return absl::OkStatus();
    case ScaleType::kInteger:
      if (code == 0 || code > kMaxIntegerScale) {
        return ScaleValueAt("scale_code", index, code,
                            "an integer of 1 to 128");
      }
      [[fallthrough]];
    case ScaleType::kE4m3:
      return IsPositiveNormal(scale) ? absl::OkStatus()
                                     : ScaleAt("scale_code", index, scale);
    default:
      break;
  }
  if (!IsPositiveNormal(scale)) return ScaleAt("scale", index, scale);
  if (!IsValueOf(encoding.scale_type, scale)) {
    return ScaleValueAt("scale", index, scale,
                        "a number that the scale type holds exactly");
  }
  return absl::OkStatus();
}

absl::Status CheckOuterScale(int64_t index, float outer_scale) {
  return IsPositiveNormal(outer_scale)
             ? absl::OkStatus()
             : ScaleAt("outer_scale", index, outer_scale);
}

absl::Status CheckZeroPoint(const Encoding& encoding, int64_t index,
                            int32_t zero_point) {
  int32_t low = encoding.exclude_zero ? -kMaxZeroPoint : encoding.qmin;
  int32_t high = encoding.exclude_zero ? kMaxZeroPoint : encoding.qmax;
  if (IsWideInteger(*FindFormat(encoding.format))) low = high = 0;
  if (zero_point >= low && zero_point <= high) return absl::OkStatus();
  return WithField(ZeroPointRangeError(absl::StrCat(
                       "zero point ", index, " is ", zero_point,
                       ", expected one in [", low, ", ", high, "]")),
                   "zero_point");
}

absl::Status CheckRealZeroPoint(const Encoding& encoding, int64_t index,
                                float zero_point) {
  const int32_t low = encoding.exclude_zero ? -kMaxZeroPoint : encoding.qmin;
  const int32_t high = encoding.exclude_zero ? kMaxZeroPoint : encoding.qmax;
  // Written so that NaN fails.
  if (zero_point >= static_cast<float>(low) &&
      zero_point <= static_cast<float>(high)) {
    return absl::OkStatus();
  }
  return WithField(ZeroPointRangeError(absl::StrCat(
                       "zero point ", index, " is ", zero_point,
                       ", expected one in [", low, ", ", high, "]")),
                   "real_zero_point");
}

absl::Span<const float> CodebookOf(const Encoding& encoding) {
  const FormatInfo& format = *FindFormat(encoding.format);
  return format.codebook.empty() ? absl::MakeConstSpan(encoding.codebook)
                                 : format.codebook;
}

absl::StatusOr<BlockLayout> OuterLayout(const Encoding& encoding,
                                        absl::Span<const int64_t> scale_shape) {
  const std::vector<int64_t>& outer = encoding.outer_block_size;
  const std::vector<int64_t>& inner = encoding.block_size;
  std::vector<int64_t> ratio(outer.size(), 0);
  for (size_t d = 0; d < outer.size(); ++d) {
    // A block of the whole dimension has but one scale along it.
    if (!inner.empty() && inner[d] > 0) ratio[d] = outer[d] / inner[d];
  }
  absl::StatusOr<BlockLayout> layout = BlockLayout::Create(scale_shape, ratio);
  if (!layout.ok()) {
    return BlockSizeAt("outer_block_size", ErrorText(layout.status()));
  }
  return layout;
}

absl::Status DeriveScales(Encoding* encoding) {
  if (!HasScaleCodes(encoding->scale_type)) return absl::OkStatus();
  if (FindFormat(encoding->format) == nullptr) {
    return WithField(FormatUnknownError(static_cast<int>(encoding->format)),
                     "format");
  }
  absl::StatusOr<std::vector<float>> scale = ScalesFromCodes(*encoding);
  if (!scale.ok()) return scale.status();
  encoding->scale = *std::move(scale);
  return absl::OkStatus();
}

int64_t ZeroPointsSizeBytes(const Encoding& encoding, int64_t count) {
  return encoding.zero_points_are_real
             ? count * static_cast<int64_t>(sizeof(float))
             : FindFormat(encoding.format)->SizeBytes(count);
}

int64_t ScalesSizeBytes(const Encoding& encoding) {
  return static_cast<int64_t>(encoding.scale.size()) *
             ScaleSizeBytes(encoding.scale_type) +
         static_cast<int64_t>(encoding.outer_scale.size() * sizeof(float)) +
         (HasZeroPoints(encoding)
              ? ZeroPointsSizeBytes(encoding,
                                    static_cast<int64_t>(encoding.scale.size()))
              : 0);
}

absl::Status CheckEncodingFits(const Encoding& encoding,
                               const BlockLayout& layout) {
  const int64_t got = static_cast<int64_t>(encoding.scale.size());
  if (got != layout.scale_count()) {
    return ScaleCountError(layout.scale_count(), got);
  }
  // Per tensor fits any rank.
  if (encoding.block_size.empty()) return absl::OkStatus();
  if (!encoding.scale_shape.empty() &&
      absl::MakeConstSpan(encoding.scale_shape) != layout.scale_shape()) {
    return ScaleShapeError(
        absl::StrCat("encoding has scales of shape [",
                     absl::StrJoin(encoding.scale_shape, ","), "], expected [",
                     absl::StrJoin(layout.scale_shape(), ","), "]"));
  }
  if (HasOuterScales(encoding.scale_type)) {
    const absl::StatusOr<BlockLayout> outer =
        OuterLayout(encoding, layout.scale_shape());
    if (!outer.ok()) return outer.status();
    const int64_t outer_count =
        static_cast<int64_t>(encoding.outer_scale.size());
    if (outer_count != outer->scale_count()) {
      return OuterScaleCountError(outer->scale_count(), outer_count);
    }
  }
  return absl::OkStatus();
}

}  // namespace quantd::core
