#include "core/calibrate/calibrate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/encoding.h"

namespace quantd::core {
namespace {

double AbsMax(const Extremes& extremes) {
  return extremes.empty()
             ? 0
             : std::max(std::fabs(extremes.min), std::fabs(extremes.max));
}

// The scale as float32, no smaller than the smallest normal one.
absl::StatusOr<float> RoundScale(int64_t index, double scale) {
  const float rounded = static_cast<float>(scale);
  if (!std::isfinite(rounded)) return ScaleOverflowError(index, scale);
  return std::max(rounded, std::numeric_limits<float>::min());
}

absl::Status CalibrateAsymmetric(const TensorStatistics& statistics,
                                 Encoding* encoding) {
  const int32_t qmin = encoding->qmin;
  const int32_t qmax = encoding->qmax;
  const auto extremes = statistics.extremes();
  for (size_t i = 0; i < extremes.size(); ++i) {
    double low = extremes[i].min;
    double high = extremes[i].max;
    if (extremes[i].empty() || (low == 0 && high == 0)) {
      encoding->scale.push_back(1);
      encoding->zero_point.push_back(std::clamp(0, qmin, qmax));
      ++encoding->degenerate_count;
      continue;
    }
    const bool extends = !encoding->exclude_zero || low == high;
    if (extends) {
      low = std::min(low, 0.0);
      high = std::max(high, 0.0);
    }
    const absl::StatusOr<float> scale =
        RoundScale(i, (high - low) / (qmax - qmin));
    if (!scale.ok()) return scale.status();
    double zero_point = qmin - std::rint(low / double{*scale});
    if (extends) {
      zero_point = std::clamp<double>(zero_point, qmin, qmax);
    } else if (!(std::fabs(zero_point) <= kMaxZeroPoint)) {
      return ZeroPointRangeError(
          absl::StrCat("zero point ", i, " would be ", zero_point,
                       ", expected one within +-", kMaxZeroPoint,
                       "; the range is too far from zero for its width"));
    }
    encoding->scale.push_back(*scale);
    encoding->zero_point.push_back(static_cast<int32_t>(zero_point));
  }
  return absl::OkStatus();
}

// scale = absmax / divisor * factor.
absl::Status CalibrateSymmetric(const TensorStatistics& statistics,
                                double divisor, double factor,
                                Encoding* encoding) {
  const auto extremes = statistics.extremes();
  for (size_t i = 0; i < extremes.size(); ++i) {
    const double abs_max = AbsMax(extremes[i]);
    if (abs_max == 0) {
      encoding->scale.push_back(1);
      ++encoding->degenerate_count;
      continue;
    }
    const absl::StatusOr<float> scale =
        RoundScale(i, abs_max / divisor * factor);
    if (!scale.ok()) return scale.status();
    encoding->scale.push_back(*scale);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Calibration> Calibrate(const EncodingSpec& spec,
                                      const BlockLayout& layout,
                                      const TensorStatistics& statistics,
                                      absl::Span<const Extremes> moving_average,
                                      ThreadPool* pool) {
  if (absl::Status status = ValidateSpec(spec); !status.ok()) return status;
  const FormatInfo& format = *FindFormat(spec.format);

  Encoding encoding;
  encoding.format = spec.format;
  encoding.block_size = spec.block_size;
  encoding.qmin = format.qmin;
  encoding.qmax = format.qmax;
  encoding.exclude_zero = spec.exclude_zero;
  encoding.scale.reserve(statistics.extremes().size());

  const Symmetry symmetry = EffectiveSymmetry(spec);
  absl::Status status;
  if (symmetry == Symmetry::kAsymmetric) {
    encoding.zero_point.reserve(statistics.extremes().size());
    status = CalibrateAsymmetric(statistics, &encoding);
  } else if (const Extremes overall = statistics.overall();
             spec.unsigned_if_non_negative &&
             (overall.empty() || overall.min >= 0) &&
             statistics.counts().negative_infinity == 0) {
    const FormatInfo& unsigned_format = IntegerFormat(format.bits, false);
    encoding.format = unsigned_format.format;
    encoding.qmin = unsigned_format.qmin;
    encoding.qmax = unsigned_format.qmax;
    status = CalibrateSymmetric(statistics, unsigned_format.qmax, 1, &encoding);
  } else if (symmetry == Symmetry::kHalfStep) {
    status =
        CalibrateSymmetric(statistics, (1 << format.bits) - 1, 2, &encoding);
  } else {
    if (symmetry == Symmetry::kStrict) encoding.qmin = -format.qmax;
    status = CalibrateSymmetric(statistics, format.qmax, 1, &encoding);
  }
  if (!status.ok()) return status;
  return Calibration{std::move(encoding), absl::nullopt};
}

}  // namespace quantd::core
