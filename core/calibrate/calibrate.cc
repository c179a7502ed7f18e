#include "core/calibrate/calibrate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "core/calibrate/distribution.h"
#include "core/calibrate/entropy.h"
#include "core/calibrate/percentile.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/range_search.h"
#include "core/calibrate/scale_indices.h"
#include "core/calibrate/squared_error.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/encoding.h"

namespace quantd::core {
namespace {

// The error of the smallest scale index that has one. Thread-safe.
class FirstError {
 public:
  void Set(int64_t index, absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (status_.ok() || index < index_) {
      index_ = index;
      status_ = std::move(status);
    }
  }
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return status_;
  }

 private:
  mutable absl::Mutex mutex_;
  int64_t index_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

// Whether the codes are to be unsigned.
bool TurnsUnsigned(const EncodingSpec& spec,
                   const TensorStatistics& statistics) {
  const Extremes overall = statistics.overall();
  return spec.unsigned_if_non_negative &&
         (overall.empty() || overall.min >= 0) &&
         statistics.counts().negative_infinity == 0;
}

// The outer scale index of each scale index.
std::vector<int64_t> OuterIndices(const BlockLayout& outer_layout) {
  std::vector<int64_t> indices;
  indices.reserve(static_cast<size_t>(outer_layout.element_count()));
  outer_layout.ForEachRun(
      0, outer_layout.element_count(), [&](const BlockLayout::Run& run) {
        for (int64_t k = 0; k < run.count; ++k) {
          indices.push_back(run.scale_index + k * run.scale_step);
        }
      });
  return indices;
}

// Finds the range of one scale index after the other. Thread-safe.
class RangeFinder {
 public:
  RangeFinder(const EncodingSpec& spec, const Encoding& encoding,
              const RangeScaler& scaler, const TensorStatistics& statistics,
              absl::Span<const Extremes> moving_average)
      : spec_(spec),
        scaler_(scaler),
        numbers_(encoding),
        levels_(LevelsOf(numbers_, scaler.is_symmetric())),
        statistics_(statistics),
        moving_average_(moving_average) {}

  // The range, as RangeScaler::Extend gives it; none where there is nothing but
  // zeros. `outer` as for RangeScaler::Scale.
  absl::StatusOr<absl::optional<Range>> Find(int64_t index, float outer) const {
    if (spec_.method == CalibrationMethod::kFixedRange) return FixedRange();
    const Extremes& extremes = statistics_.extremes()[index];
    if (spec_.method == CalibrationMethod::kMovingAverage &&
        !moving_average_.empty() && !moving_average_[index].empty()) {
      return Whole(moving_average_[index]);
    }
    const absl::optional<Range> whole = Whole(extremes);
    if (!whole.has_value() || !NeedsHistograms(spec_)) return whole;
    const Block block(statistics_.histograms()[index], extremes, *whole, index,
                      outer);
    // A state that was put together from parts may contradict itself.
    if (block.distribution.count() == 0) return whole;
    const absl::StatusOr<Range> range =
        spec_.method == CalibrationMethod::kBestOf ? BestOf(block)
                                                   : Run(spec_.method, block);
    if (!range.ok()) return range.status();
    return absl::optional<Range>(*range);
  }

  // Whether the range depends on how its scale is stored.
  bool Searches() const {
    return spec_.method == CalibrationMethod::kMse ||
           spec_.method == CalibrationMethod::kSqnr ||
           spec_.method == CalibrationMethod::kBestOf;
  }

 private:
  struct Block {
    Block(const Histogram& histogram_in, const Extremes& extremes_in,
          const Range& whole_in, int64_t index_in, float outer_in)
        : histogram(histogram_in),
          extremes(extremes_in),
          whole(whole_in),
          index(index_in),
          outer(outer_in),
          distribution(histogram_in, extremes_in) {}

    const Histogram& histogram;
    const Extremes& extremes;
    const Range whole;
    const int64_t index;
    const float outer;
    const Distribution distribution;
  };

  absl::optional<Range> Whole(const Extremes& extremes) const {
    // Written so that NaN, which a state from outside may have, is nothing.
    if (!(extremes.min <= extremes.max) ||
        (extremes.min == 0 && extremes.max == 0)) {
      return absl::nullopt;
    }
    return scaler_.Extend({extremes.min, extremes.max});
  }

  absl::optional<Range> FixedRange() const {
    return scaler_.Extend({spec_.range_min, spec_.range_max});
  }

  absl::StatusOr<Range> Run(CalibrationMethod method,
                            const Block& block) const {
    switch (method) {
      case CalibrationMethod::kPercentile:
        return Percentile(block);
      case CalibrationMethod::kMse:
        return SearchRange(scaler_, block.index, block.outer, numbers_,
                           block.distribution, block.whole, /*gamma=*/1,
                           spec_.search_steps);
      case CalibrationMethod::kSqnr:
        return SearchRange(scaler_, block.index, block.outer, numbers_,
                           block.distribution, block.whole, spec_.gamma,
                           spec_.search_steps);
      case CalibrationMethod::kEntropy:
        return EntropyRange(block.histogram, levels_, block.whole,
                            spec_.search_steps, spec_.entropy_bins);
      case CalibrationMethod::kFixedRange:
        return *FixedRange();
      case CalibrationMethod::kMovingAverage:
        if (!moving_average_.empty() && !moving_average_[block.index].empty()) {
          return Whole(moving_average_[block.index]).value_or(block.whole);
        }
        return block.whole;
      case CalibrationMethod::kDefault:
      case CalibrationMethod::kMinMax:
      case CalibrationMethod::kBestOf:
        break;
    }
    return block.whole;
  }

  Range Percentile(const Block& block) const {
    const double cut = spec_.tail_fraction;
    Tail tail = spec_.tail;
    if (tail == Tail::kDefault) {
      tail = scaler_.is_symmetric() ? Tail::kMagnitude : Tail::kBoth;
    }
    const auto quantile = [&](double fraction) {
      return Quantile(block.distribution, fraction);
    };
    Range range = {block.extremes.min, block.extremes.max};
    switch (tail) {
      case Tail::kDefault:
      case Tail::kMagnitude:
        range.high = Quantile(
            Distribution::OfMagnitudes(block.histogram, block.extremes),
            1 - cut);
        range.low = -range.high;
        break;
      case Tail::kBoth:
        range = {quantile(cut / 2), quantile(1 - cut / 2)};
        break;
      case Tail::kUpper:
        range.high = quantile(1 - cut);
        if (scaler_.is_symmetric()) range.low = range.high;
        break;
      case Tail::kLower:
        range.low = quantile(cut);
        if (scaler_.is_symmetric()) range.high = range.low;
        break;
    }
    // Where nearly all elements are zero, a scale needs what is left of them.
    if (range.low == 0 && range.high == 0) return block.whole;
    return scaler_.Extend(range);
  }

  // A method whose range has no scale does not count, unless none has.
  absl::StatusOr<Range> BestOf(const Block& block) const {
    const double gamma = spec_.objective == Objective::kSqnr ? spec_.gamma : 1;
    absl::Status status;
    absl::optional<Range> best;
    double least = std::numeric_limits<double>::infinity();
    for (const CalibrationMethod method : spec_.methods) {
      const absl::StatusOr<Range> range = Run(method, block);
      const absl::StatusOr<double> error =
          range.ok() ? RangeError(scaler_, block.index, block.outer, numbers_,
                                  block.distribution, *range, gamma)
                     : range.status();
      if (!error.ok()) {
        if (status.ok()) status = error.status();
      } else if (!best.has_value() || *error < least) {
        least = *error;
        best = *range;
      }
    }
    if (!best.has_value()) return status;
    return *best;
  }

  const EncodingSpec& spec_;
  const RangeScaler& scaler_;
  const CodeNumbers numbers_;
  const EntropyLevels levels_;
  const TensorStatistics& statistics_;
  const absl::Span<const Extremes> moving_average_;
};

// What was found for one scale index.
struct Found {
  absl::optional<Range> range;
  BlockScale scale{};
};

// The outer scales, from the ranges that were found without them.
absl::StatusOr<std::vector<float>> OuterScales(
    const RangeScaler& scaler, absl::Span<const int64_t> outer_indices,
    absl::Span<const Found> found, std::vector<double>* abs_max) {
  std::vector<int64_t> largest(abs_max->size(), 0);
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i].range.has_value()) continue;
    const int64_t outer = outer_indices[i];
    if (found[i].range->abs_max() > (*abs_max)[outer]) {
      (*abs_max)[outer] = found[i].range->abs_max();
      largest[outer] = static_cast<int64_t>(i);
    }
  }
  std::vector<float> scales;
  for (size_t i = 0; i < abs_max->size(); ++i) {
    const absl::StatusOr<float> scale =
        scaler.OuterScale(largest[i], (*abs_max)[i]);
    if (!scale.ok()) return scale.status();
    scales.push_back(*scale);
  }
  return scales;
}

}  // namespace

Encoding EncodingWithoutScales(const EncodingSpec& spec,
                               const BlockLayout& layout, bool is_unsigned) {
  const FormatInfo& format = *FindFormat(spec.format);
  Encoding encoding;
  encoding.format = spec.format;
  encoding.block_size = spec.block_size;
  encoding.qmin = format.qmin;
  encoding.qmax = format.qmax;
  encoding.exclude_zero = spec.exclude_zero;
  encoding.scale_type = EffectiveScaleType(spec);
  if (HasOuterScales(encoding.scale_type)) {
    encoding.outer_block_size = spec.outer_block_size;
  }
  encoding.no_saturation = spec.no_saturation;
  encoding.scale_shape.assign(layout.scale_shape().begin(),
                              layout.scale_shape().end());
  if (format.kind == CodeKind::kCodebook && format.codebook.empty()) {
    encoding.codebook = spec.codebook;
    encoding.qmax = static_cast<int32_t>(spec.codebook.size()) - 1;
  }
  if (is_unsigned) {
    const FormatInfo& unsigned_format = IntegerFormat(format.bits, false);
    encoding.format = unsigned_format.format;
    encoding.qmin = unsigned_format.qmin;
    encoding.qmax = unsigned_format.qmax;
  } else if (format.kind == CodeKind::kInteger &&
             EffectiveSymmetry(spec) == Symmetry::kStrict) {
    encoding.qmin = -format.qmax;
  }
  return encoding;
}

absl::StatusOr<Calibration> Calibrate(const EncodingSpec& spec,
                                      const BlockLayout& layout,
                                      const TensorStatistics& statistics,
                                      absl::Span<const Extremes> moving_average,
                                      ThreadPool* pool) {
  if (absl::Status status = ValidateSpec(spec); !status.ok()) return status;
  const bool has_histograms = !statistics.histograms().empty();
  if (NeedsHistograms(spec) && !has_histograms) {
    return MethodInvalidError(
        "the method needs histograms, which the statistics do not have");
  }
  Encoding encoding =
      EncodingWithoutScales(spec, layout, TurnsUnsigned(spec, statistics));
  const RangeScaler scaler(spec, encoding);
  const RangeFinder finder(spec, encoding, scaler, statistics, moving_average);
  const int64_t scale_count = statistics.scale_count();
  std::vector<Found> found(static_cast<size_t>(scale_count));

  const bool has_nan_scales = encoding.scale_type == ScaleType::kE8m0;
  FirstError error;
  // `outer`: 0 in the first of two rounds.
  const auto find = [&](int64_t i, float outer, bool outer_is_zero) {
    Found& block = found[static_cast<size_t>(i)];
    if (has_nan_scales && statistics.has_non_finite(i)) {
      block.scale = scaler.NanScale();
      return;
    }
    const bool is_known = outer != 0 && !finder.Searches();
    if (!is_known) {
      absl::StatusOr<absl::optional<Range>> range = finder.Find(i, outer);
      if (!range.ok()) return error.Set(i, range.status());
      block.range = *range;
    }
    if (!block.range.has_value()) {
      block.scale = scaler.DegenerateScale(outer, outer_is_zero);
      return;
    }
    const absl::StatusOr<BlockScale> scale =
        scaler.Scale(i, *block.range, outer);
    if (!scale.ok()) return error.Set(i, scale.status());
    block.scale = *scale;
  };
  ForEachScaleIndex(pool, scale_count,
                    [&](int64_t i) { find(i, 0, /*outer_is_zero=*/true); });
  if (absl::Status status = error.status(); !status.ok()) return status;

  if (scaler.has_outer_scales()) {
    const absl::StatusOr<BlockLayout> outer_layout =
        OuterLayout(encoding, layout.scale_shape());
    if (!outer_layout.ok()) return outer_layout.status();
    const std::vector<int64_t> outer_indices = OuterIndices(*outer_layout);
    std::vector<double> abs_max(
        static_cast<size_t>(outer_layout->scale_count()), 0);
    absl::StatusOr<std::vector<float>> outer =
        OuterScales(scaler, outer_indices, found, &abs_max);
    if (!outer.ok()) return outer.status();
    encoding.outer_scale = *std::move(outer);
    ForEachScaleIndex(pool, scale_count, [&](int64_t i) {
      const int64_t block = outer_indices[i];
      find(i, encoding.outer_scale[block], abs_max[block] == 0);
    });
    if (absl::Status status = error.status(); !status.ok()) return status;
  }

  encoding.scale.reserve(found.size());
  for (const Found& block : found) {
    encoding.scale.push_back(block.scale.scale);
    if (!scaler.is_symmetric()) {
      encoding.zero_point.push_back(block.scale.zero_point);
    }
    if (HasScaleCodes(encoding.scale_type)) {
      encoding.scale_code.push_back(block.scale.code);
    }
    encoding.degenerate_count +=
        !block.range.has_value() && !std::isnan(block.scale.scale);
  }

  Calibration calibration{std::move(encoding), absl::nullopt};
  if (has_histograms) {
    calibration.prediction = Predict(calibration.encoding, statistics, pool);
  }
  return calibration;
}

}  // namespace quantd::core
