#include "core/types/encoding.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/types/block_layout.h"

namespace quantd::core {

bool operator==(const Encoding& a, const Encoding& b) {
  return a.format == b.format && a.block_size == b.block_size &&
         a.scale == b.scale && a.zero_point == b.zero_point &&
         a.qmin == b.qmin && a.qmax == b.qmax &&
         a.exclude_zero == b.exclude_zero &&
         a.degenerate_count == b.degenerate_count &&
         a.scale_type == b.scale_type && a.scale_code == b.scale_code &&
         a.outer_scale == b.outer_scale &&
         a.outer_block_size == b.outer_block_size && a.codebook == b.codebook &&
         a.no_saturation == b.no_saturation && a.scale_shape == b.scale_shape;
}

absl::Status ValidateEncoding(const Encoding& encoding) {
  const FormatInfo* format = FindFormat(encoding.format);
  if (format == nullptr) {
    return FormatUnknownError(static_cast<int>(encoding.format));
  }
  if (encoding.block_size.size() > kMaxRank) {
    return BlockSizeInvalidError(
        absl::StrCat("block size has ", encoding.block_size.size(),
                     " entries, expected at most ", kMaxRank));
  }
  for (size_t d = 0; d < encoding.block_size.size(); ++d) {
    if (encoding.block_size[d] < 0) {
      return BlockSizeInvalidError(absl::StrCat("entry ", d, " is ",
                                                encoding.block_size[d],
                                                ", expected at least 0"));
    }
  }
  if (encoding.qmin < format->qmin || encoding.qmax > format->qmax ||
      encoding.qmin >= encoding.qmax) {
    return CodeRangeInvalidError(
        absl::StrCat("codes are [", encoding.qmin, ", ", encoding.qmax,
                     "], expected a range of at least two codes within [",
                     format->qmin, ", ", format->qmax, "] of ", format->name));
  }
  const int64_t scale_count = static_cast<int64_t>(encoding.scale.size());
  if (scale_count == 0) return ScaleCountError(1, 0);
  if (!encoding.zero_point.empty() &&
      encoding.zero_point.size() != encoding.scale.size()) {
    return ZeroPointCountError(
        scale_count, static_cast<int64_t>(encoding.zero_point.size()));
  }
  for (int64_t i = 0; i < scale_count; ++i) {
    const float scale = encoding.scale[i];
    // Written so that NaN fails.
    if (!(scale >= std::numeric_limits<float>::min() &&
          scale <= std::numeric_limits<float>::max())) {
      return ScaleInvalidError(i, scale);
    }
  }
  const int32_t low = encoding.exclude_zero ? -kMaxZeroPoint : encoding.qmin;
  const int32_t high = encoding.exclude_zero ? kMaxZeroPoint : encoding.qmax;
  if (encoding.zero_point.empty() && (low > 0 || high < 0)) {
    return ZeroPointRangeError(absl::StrCat(
        "no zero points means 0, which is outside of [", low, ", ", high, "]"));
  }
  for (size_t i = 0; i < encoding.zero_point.size(); ++i) {
    if (encoding.zero_point[i] < low || encoding.zero_point[i] > high) {
      return ZeroPointRangeError(
          absl::StrCat("zero point ", i, " is ", encoding.zero_point[i],
                       ", expected one in [", low, ", ", high, "]"));
    }
  }
  return absl::OkStatus();
}

absl::Span<const float> CodebookOf(const Encoding& encoding) {
  const FormatInfo& format = *FindFormat(encoding.format);
  return format.codebook.empty() ? absl::MakeConstSpan(encoding.codebook)
                                 : format.codebook;
}

absl::Status DeriveScales(Encoding* encoding) { return absl::OkStatus(); }

int64_t ScalesSizeBytes(const Encoding& encoding) {
  return static_cast<int64_t>(encoding.scale.size()) *
         ScaleSizeBytes(encoding.scale_type);
}

absl::Status CheckEncodingFits(const Encoding& encoding,
                               const BlockLayout& layout) {
  const int64_t got = static_cast<int64_t>(encoding.scale.size());
  if (got != layout.scale_count()) {
    return ScaleCountError(layout.scale_count(), got);
  }
  return absl::OkStatus();
}

}  // namespace quantd::core
