#include "core/calibrate/range_finder.h"

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/block_search.h"
#include "core/calibrate/distribution.h"
#include "core/calibrate/entropy.h"
#include "core/calibrate/percentile.h"
#include "core/calibrate/range_search.h"

namespace quantd::core {

// A block as its histogram.
class RangeFinder::Bins {
 public:
  Bins(const RangeFinder& finder, int64_t index, float outer,
       const Histogram& histogram, const Extremes& extremes, const Range& whole)
      : finder_(finder),
        index_(index),
        outer_(outer),
        histogram_(histogram),
        extremes_(extremes),
        whole_(whole),
        distribution_(histogram, extremes) {}

  int64_t index() const { return index_; }
  const Extremes& extremes() const { return extremes_; }
  const Range& whole() const { return whole_; }
  // A state that was put together from parts may contradict itself.
  bool empty() const { return distribution_.count() == 0; }

  absl::StatusOr<double> Error(const Range& range, double gamma) const {
    return RangeError(finder_.scaler_, index_, outer_,
                      finder_.searched_->numbers, distribution_, range, gamma);
  }
  absl::StatusOr<Range> Search(double gamma, int steps, StopToken stop) const {
    return SearchRange(finder_.scaler_, index_, outer_,
                       finder_.searched_->numbers, distribution_, whole_, gamma,
                       steps, stop);
  }
  absl::StatusOr<Range> Entropy(int steps, int bins, StopToken stop) const {
    return SearchEntropy(histogram_, finder_.searched_->levels, whole_, steps,
                         bins, stop);
  }
  double QuantileOf(double fraction) const {
    return Quantile(distribution_, fraction);
  }
  double QuantileOfMagnitudes(double fraction) const {
    return Quantile(Distribution::OfMagnitudes(histogram_, extremes_),
                    fraction);
  }

 private:
  const RangeFinder& finder_;
  const int64_t index_;
  const float outer_;
  const Histogram& histogram_;
  const Extremes& extremes_;
  const Range whole_;
  const Distribution distribution_;
};

// A block as its elements.
class RangeFinder::Elements {
 public:
  Elements(const RangeFinder& finder, int64_t index, float outer,
           const Extremes& extremes, const Range& whole,
           BlockElements* elements)
      : finder_(finder),
        index_(index),
        outer_(outer),
        extremes_(extremes),
        whole_(whole),
        elements_(elements) {}

  int64_t index() const { return index_; }
  const Extremes& extremes() const { return extremes_; }
  const Range& whole() const { return whole_; }
  // Statistics and tensor may contradict each other.
  bool empty() const { return elements_->count() == 0; }

  absl::StatusOr<double> Error(const Range& range, double gamma) const {
    return finder_.searched_->search.Error(index_, outer_, range, gamma,
                                           elements_);
  }
  absl::StatusOr<Range> Search(double gamma, int steps, StopToken stop) const {
    return finder_.searched_->search.Search(index_, outer_, whole_, gamma,
                                            steps, elements_, stop);
  }
  absl::StatusOr<Range> Entropy(int steps, int bins, StopToken stop) const {
    return SearchEntropy(elements_, finder_.searched_->levels, whole_, steps,
                         bins, stop);
  }
  double QuantileOf(double fraction) const {
    return BlockSearch::Quantile(fraction, /*of_magnitudes=*/false, elements_);
  }
  double QuantileOfMagnitudes(double fraction) const {
    return BlockSearch::Quantile(fraction, /*of_magnitudes=*/true, elements_);
  }

 private:
  const RangeFinder& finder_;
  const int64_t index_;
  const float outer_;
  const Extremes& extremes_;
  const Range whole_;
  BlockElements* const elements_;
};

RangeFinder::RangeFinder(const EncodingSpec& spec, const Encoding& encoding,
                         const RangeScaler& scaler, const BlockLayout& layout,
                         const TensorStatistics* statistics,
                         absl::Span<const Extremes> moving_average,
                         const HeldTensor* held, const Importance* importance)
    : spec_(spec),
      scaler_(scaler),
      layout_(layout),
      is_direct_(importance != nullptr ||
                 (IsSearchedDirectly(spec, layout) &&
                  (statistics == nullptr || statistics->histograms().empty()))),
      statistics_(statistics),
      moving_average_(moving_average),
      held_(held),
      importance_(importance) {
  if (NeedsHistograms(spec)) searched_.emplace(spec, encoding, scaler);
}

int RangeFinder::mantissa_bits() const {
  if (!NeedsHistograms(spec_) || is_direct_) return 0;
  return statistics_->histograms().empty() ? MantissaBitsAtHand(spec_)
                                           : statistics_->mantissa_bits();
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

Range RangeFinder::FixedRange(int64_t index) const {
  if (!spec_.scale_range_min.empty()) {
    const auto at = static_cast<size_t>(index);
    return scaler_.Extend(
        {spec_.scale_range_min[at], spec_.scale_range_max[at]});
  }
  return scaler_.Extend({spec_.range_min, spec_.range_max});
}

const Extremes* RangeFinder::Averaged(int64_t index) const {
  if (moving_average_.empty() || moving_average_[index].empty()) return nullptr;
  return &moving_average_[index];
}

absl::optional<absl::optional<Range>> RangeFinder::FindAtOnce(
    int64_t index, const Extremes& extremes) const {
  if (spec_.method == CalibrationMethod::kFixedRange) {
    return {FixedRange(index)};
  }
  const Extremes* const averaged = Averaged(index);
  if (spec_.method == CalibrationMethod::kMovingAverage &&
      averaged != nullptr) {
    return Whole(*averaged);
  }
  const absl::optional<Range> whole = Whole(extremes);
  if (!whole.has_value() || !NeedsHistograms(spec_)) return whole;
  return absl::nullopt;
}

absl::StatusOr<absl::optional<Range>> RangeFinder::Find(int64_t index,
                                                        float outer,
                                                        BlockElements* elements,
                                                        StopToken stop) const {
  const Extremes& extremes = statistics_->extremes()[index];
  if (is_direct_) {
    elements->Assign(*held_, layout_, index, importance_);
    return FindAmong(index, outer, extremes, elements, stop);
  }
  const auto at_once = FindAtOnce(index, extremes);
  if (at_once.has_value()) return *at_once;
  const bool is_there = !statistics_->histograms().empty();
  absl::optional<Histogram> made;
  if (!is_there) made.emplace(held_->HistogramOf(index, mantissa_bits()));
  Bins block(*this, index, outer,
             is_there ? statistics_->histograms()[index] : *made, extremes,
             *Whole(extremes));
  return FindIn(block, stop);
}

absl::StatusOr<absl::optional<Range>> RangeFinder::FindAmong(
    int64_t index, float outer, const Extremes& extremes,
    BlockElements* elements, StopToken stop) const {
  const auto at_once = FindAtOnce(index, extremes);
  if (at_once.has_value()) return *at_once;
  Elements block(*this, index, outer, extremes, *Whole(extremes), elements);
  return FindIn(block, stop);
}

template <typename Block>
absl::StatusOr<absl::optional<Range>> RangeFinder::FindIn(
    Block& block, StopToken stop) const {
  if (block.empty()) return block.whole();
  return spec_.method == CalibrationMethod::kBestOf
             ? FindBest(block, stop)
             : FindBy(spec_.method, block, stop);
}

template <typename Block>
absl::StatusOr<Range> RangeFinder::FindBest(Block& block,
                                            StopToken stop) const {
  const double gamma = spec_.objective == Objective::kSqnr ? spec_.gamma : 1;
  absl::Status first_error;
  absl::optional<Range> best;
  double least = std::numeric_limits<double>::infinity();
  for (const CalibrationMethod method : spec_.methods) {
    const absl::StatusOr<Range> range = FindBy(method, block, stop);
    if (stop.stopped()) return StoppedError();
    const absl::StatusOr<double> error =
        range.ok() ? block.Error(*range, gamma) : range.status();
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

template <typename Block>
absl::StatusOr<Range> RangeFinder::FindBy(CalibrationMethod method,
                                          Block& block, StopToken stop) const {
  switch (method) {
    case CalibrationMethod::kPercentile:
      return Percentile(block);
    case CalibrationMethod::kMse:
    case CalibrationMethod::kSqnr:
      return block.Search(method == CalibrationMethod::kMse ? 1 : spec_.gamma,
                          spec_.search_steps, stop);
    case CalibrationMethod::kEntropy:
      return block.Entropy(spec_.search_steps, spec_.entropy_bins, stop);
    case CalibrationMethod::kFixedRange:
      return FixedRange(block.index());
    case CalibrationMethod::kMovingAverage:
      if (const Extremes* averaged = Averaged(block.index())) {
        return Whole(*averaged).value_or(block.whole());
      }
      break;
    case CalibrationMethod::kDefault:
    case CalibrationMethod::kMinMax:
    case CalibrationMethod::kBestOf:
      break;
  }
  return block.whole();
}

template <typename Block>
Range RangeFinder::Percentile(Block& block) const {
  const bool is_mirrored = !scaler_.has_two_ends();
  const double cut = spec_.tail_fraction;
  Tail tail = spec_.tail;
  if (tail == Tail::kDefault) {
    tail = is_mirrored ? Tail::kMagnitude : Tail::kBoth;
  }
  const auto quantile = [&](double fraction) {
    return block.QuantileOf(fraction);
  };
  Range range = {block.extremes().min, block.extremes().max};
  switch (tail) {
    case Tail::kDefault:
    case Tail::kMagnitude:
      range.high = block.QuantileOfMagnitudes(1 - cut);
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
  // If nearly all elements are zero, the others need a scale.
  if (range.low == 0 && range.high == 0) return block.whole();
  return scaler_.Extend(range);
}

}  // namespace quantd::core
