#include "core/calibrate/range_finder.h"

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/percentile.h"
#include "core/calibrate/range_search.h"

namespace quantd::core {

RangeFinder::RangeFinder(const EncodingSpec& spec, const Encoding& encoding,
                         const RangeScaler& scaler,
                         const TensorStatistics& statistics,
                         absl::Span<const Extremes> moving_average,
                         const HeldTensor* held)
    : spec_(spec),
      scaler_(scaler),
      numbers_(encoding),
      levels_(LevelsOf(numbers_, scaler.is_symmetric())),
      statistics_(statistics),
      moving_average_(moving_average),
      held_(held) {}

int RangeFinder::mantissa_bits() const {
  if (!NeedsHistograms(spec_)) return 0;
  return statistics_.histograms().empty() ? MantissaBitsAtHand(spec_)
                                          : statistics_.mantissa_bits();
}

bool RangeFinder::searches() const {
  return spec_.method == CalibrationMethod::kMse ||
         spec_.method == CalibrationMethod::kSqnr ||
         spec_.method == CalibrationMethod::kBestOf;
}

absl::optional<Range> RangeFinder::Whole(const Extremes& extremes) const {
  // Written so that NaN, which a state from outside may have, is nothing.
  if (!(extremes.min <= extremes.max) ||
      (extremes.min == 0 && extremes.max == 0)) {
    return absl::nullopt;
  }
  return scaler_.Extend({extremes.min, extremes.max});
}

Range RangeFinder::FixedRange() const {
  return scaler_.Extend({spec_.range_min, spec_.range_max});
}

const Extremes* RangeFinder::Averaged(int64_t index) const {
  if (moving_average_.empty() || moving_average_[index].empty()) return nullptr;
  return &moving_average_[index];
}

absl::StatusOr<absl::optional<Range>> RangeFinder::Find(int64_t index,
                                                        float outer,
                                                        StopToken stop) const {
  if (spec_.method == CalibrationMethod::kFixedRange) return FixedRange();
  const Extremes* const averaged = Averaged(index);
  if (spec_.method == CalibrationMethod::kMovingAverage &&
      averaged != nullptr) {
    return Whole(*averaged);
  }
  const Extremes& extremes = statistics_.extremes()[index];
  const absl::optional<Range> whole = Whole(extremes);
  if (!whole.has_value() || !NeedsHistograms(spec_)) return whole;
  const bool is_there = !statistics_.histograms().empty();
  absl::optional<Histogram> made;
  if (!is_there) made.emplace(held_->HistogramOf(index, mantissa_bits()));
  const Histogram& histogram =
      is_there ? statistics_.histograms()[index] : *made;
  const Block block = {index,    outer,  histogram,
                       extremes, *whole, Distribution(histogram, extremes)};
  // A state that was put together from parts may contradict itself.
  if (block.distribution.count() == 0) return whole;
  return spec_.method == CalibrationMethod::kBestOf
             ? FindBest(block, stop)
             : FindBy(spec_.method, block, stop);
}

absl::StatusOr<Range> RangeFinder::FindBest(const Block& block,
                                            StopToken stop) const {
  const double gamma = spec_.objective == Objective::kSqnr ? spec_.gamma : 1;
  absl::Status first_error;
  absl::optional<Range> best;
  double least = std::numeric_limits<double>::infinity();
  for (const CalibrationMethod method : spec_.methods) {
    const absl::StatusOr<Range> range = FindBy(method, block, stop);
    if (stop.stopped()) return StoppedError();
    const absl::StatusOr<double> error =
        range.ok() ? RangeError(scaler_, block.index, block.outer, numbers_,
                                block.distribution, *range, gamma)
                   : range.status();
    if (!error.ok()) {
      if (first_error.ok()) first_error = error.status();
    } else if (!best.has_value() || *error < least) {
      least = *error;
      best = *range;
    }
  }
  if (!best.has_value()) return first_error;
  return *best;
}

absl::StatusOr<Range> RangeFinder::FindBy(CalibrationMethod method,
                                          const Block& block,
                                          StopToken stop) const {
  switch (method) {
    case CalibrationMethod::kPercentile:
      return Percentile(block);
    case CalibrationMethod::kMse:
    case CalibrationMethod::kSqnr:
      return SearchRange(scaler_, block.index, block.outer, numbers_,
                         block.distribution, block.whole,
                         method == CalibrationMethod::kMse ? 1 : spec_.gamma,
                         spec_.search_steps, stop);
    case CalibrationMethod::kEntropy:
      return SearchEntropy(block.histogram, levels_, block.whole,
                           spec_.search_steps, spec_.entropy_bins, stop);
    case CalibrationMethod::kFixedRange:
      return FixedRange();
    case CalibrationMethod::kMovingAverage:
      if (const Extremes* averaged = Averaged(block.index)) {
        return Whole(*averaged).value_or(block.whole);
      }
      break;
    case CalibrationMethod::kDefault:
    case CalibrationMethod::kMinMax:
    case CalibrationMethod::kBestOf:
      break;
  }
  return block.whole;
}

Range RangeFinder::Percentile(const Block& block) const {
  const bool is_mirrored = !scaler_.has_two_ends();
  const double cut = spec_.tail_fraction;
  Tail tail = spec_.tail;
  if (tail == Tail::kDefault) {
    tail = is_mirrored ? Tail::kMagnitude : Tail::kBoth;
  }
  const auto quantile = [&](double fraction) {
    return Quantile(block.distribution, fraction);
  };
  Range range = {block.extremes.min, block.extremes.max};
  switch (tail) {
    case Tail::kDefault:
    case Tail::kMagnitude:
      range.high = Quantile(
          Distribution::OfMagnitudes(block.histogram, block.extremes), 1 - cut);
      range.low = -range.high;
      break;
    case Tail::kBoth:
      range = {quantile(cut / 2), quantile(1 - cut / 2)};
      break;
    case Tail::kUpper:
      range.high = quantile(1 - cut);
      if (is_mirrored) range.low = range.high;
      break;
    case Tail::kLower:
      range.low = quantile(cut);
      if (is_mirrored) range.high = range.low;
      break;
  }
  // Where nearly all elements are zero, a scale needs what is left of them.
  if (range.low == 0 && range.high == 0) return block.whole;
  return scaler_.Extend(range);
}

}  // namespace quantd::core
