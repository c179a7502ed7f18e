#include "core/calibrate/range_finder.h"

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/percentile.h"

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

RangeFinder::Task::Task(const RangeFinder& finder, int64_t index, float outer)
    : finder_(finder), index_(index), outer_(outer) {
  const EncodingSpec& spec = finder.spec_;
  if (spec.method == CalibrationMethod::kFixedRange) {
    range_ = absl::optional<Range>(finder.FixedRange());
    found_ = true;
    return;
  }
  const Extremes& extremes = finder.statistics_.extremes()[index];
  const Extremes* const averaged = finder.Averaged(index);
  if (spec.method == CalibrationMethod::kMovingAverage && averaged != nullptr) {
    range_ = finder.Whole(*averaged);
    found_ = true;
    return;
  }
  const absl::optional<Range> whole = finder.Whole(extremes);
  range_ = whole;
  found_ = !whole.has_value() || !NeedsHistograms(spec);
  if (found_) return;
  const bool is_there = !finder.statistics_.histograms().empty();
  if (!is_there) {
    made_ = std::make_unique<const Histogram>(
        finder.held_->HistogramOf(index, finder.mantissa_bits()));
  }
  const Histogram& histogram =
      is_there ? finder.statistics_.histograms()[index] : *made_;
  block_.emplace(
      Block{histogram, extremes, *whole, Distribution(histogram, extremes)});
  // A state that was put together from parts may contradict itself.
  found_ = block_->distribution.count() == 0;
}

int64_t RangeFinder::Task::memory_bytes() const {
  return (made_ != nullptr ? made_->memory_bytes() : 0) +
         (block_.has_value() ? block_->distribution.memory_bytes() : 0);
}

bool RangeFinder::Task::Run(const TimeSlice& slice) {
  if (found_) return true;
  const bool is_best_of = finder_.spec_.method == CalibrationMethod::kBestOf;
  while (next_method_ < methods().size()) {
    absl::StatusOr<Range> range = block_->whole;
    if (!RunMethod(methods()[next_method_], slice, &range)) return false;
    ++next_method_;
    if (is_best_of) {
      Judge(range);
    } else if (range.ok()) {
      range_ = absl::optional<Range>(*range);
    } else {
      range_ = range.status();
    }
  }
  if (is_best_of) {
    if (best_.has_value()) {
      range_ = best_;
    } else {
      range_ = status_;
    }
  }
  found_ = true;
  return true;
}

absl::Span<const CalibrationMethod> RangeFinder::Task::methods() const {
  const EncodingSpec& spec = finder_.spec_;
  if (spec.method == CalibrationMethod::kBestOf) return spec.methods;
  return absl::MakeConstSpan(&spec.method, 1);
}

bool RangeFinder::Task::RunMethod(CalibrationMethod method,
                                  const TimeSlice& slice,
                                  absl::StatusOr<Range>* range) {
  const EncodingSpec& spec = finder_.spec_;
  switch (method) {
    case CalibrationMethod::kPercentile:
      *range = Percentile();
      return true;
    case CalibrationMethod::kMse:
    case CalibrationMethod::kSqnr:
      if (!range_search_.has_value()) {
        range_search_.emplace(
            finder_.scaler_, index_, outer_, finder_.numbers_,
            block_->distribution, block_->whole,
            method == CalibrationMethod::kMse ? 1 : spec.gamma,
            spec.search_steps);
      }
      if (!range_search_->Run(slice)) return false;
      *range = range_search_->best();
      range_search_.reset();
      return true;
    case CalibrationMethod::kEntropy:
      if (!entropy_search_.has_value()) {
        entropy_search_.emplace(block_->histogram, finder_.levels_,
                                block_->whole, spec.search_steps,
                                spec.entropy_bins);
      }
      if (!entropy_search_->Run(slice)) return false;
      *range = entropy_search_->best();
      entropy_search_.reset();
      return true;
    case CalibrationMethod::kFixedRange:
      *range = finder_.FixedRange();
      return true;
    case CalibrationMethod::kMovingAverage:
      if (const Extremes* averaged = finder_.Averaged(index_)) {
        *range = finder_.Whole(*averaged).value_or(block_->whole);
      }
      return true;
    case CalibrationMethod::kDefault:
    case CalibrationMethod::kMinMax:
    case CalibrationMethod::kBestOf:
      break;
  }
  return true;
}

Range RangeFinder::Task::Percentile() const {
  const EncodingSpec& spec = finder_.spec_;
  const bool is_mirrored = !finder_.scaler_.has_two_ends();
  const double cut = spec.tail_fraction;
  Tail tail = spec.tail;
  if (tail == Tail::kDefault) {
    tail = is_mirrored ? Tail::kMagnitude : Tail::kBoth;
  }
  const auto quantile = [&](double fraction) {
    return Quantile(block_->distribution, fraction);
  };
  Range range = {block_->extremes.min, block_->extremes.max};
  switch (tail) {
    case Tail::kDefault:
    case Tail::kMagnitude:
      range.high = Quantile(
          Distribution::OfMagnitudes(block_->histogram, block_->extremes),
          1 - cut);
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
  if (range.low == 0 && range.high == 0) return block_->whole;
  return finder_.scaler_.Extend(range);
}

void RangeFinder::Task::Judge(const absl::StatusOr<Range>& range) {
  const EncodingSpec& spec = finder_.spec_;
  const double gamma = spec.objective == Objective::kSqnr ? spec.gamma : 1;
  const absl::StatusOr<double> error =
      range.ok() ? RangeError(finder_.scaler_, index_, outer_, finder_.numbers_,
                              block_->distribution, *range, gamma)
                 : range.status();
  if (!error.ok()) {
    if (status_.ok()) status_ = error.status();
  } else if (!best_.has_value() || *error < least_) {
    least_ = *error;
    best_ = *range;
  }
}

}  // namespace quantd::core
