#include "core/calibrate/calibrate.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/block_search.h"
#include "core/calibrate/prediction.h"
#include "core/calibrate/range_finder.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/scale_indices.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
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

// True if the codes are to be unsigned.
bool TurnsUnsigned(const EncodingSpec& spec,
                   const TensorStatistics& statistics) {
  const Extremes overall = statistics.overall();
  return spec.unsigned_if_non_negative &&
         (overall.empty() || overall.min >= 0) &&
         statistics.counts().negative_infinity == 0;
}

// Range of a scale index with zeros only.
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr Range kNoRange = {kNan, kNan};
bool IsNone(const Range& range) {
  return std::isnan(range.low) && std::isnan(range.high);
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
  encoding.zero_points_are_real = spec.real_zero_point;
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

namespace {

// One run of Calibrate.
class Calibrator {
 public:
  Calibrator(const EncodingSpec& spec, const BlockLayout& layout,
             const TensorStatistics& statistics,
             absl::Span<const Extremes> moving_average, ThreadPool* pool,
             StopToken stop, const HeldTensor* held,
             absl::Span<const float> outer_maximum,
             const Importance* importance,
             absl::Span<const double> outer_magnitude)
      : layout_(layout),
        statistics_(statistics),
        pool_(pool),
        stop_(stop),
        outer_maximum_(outer_maximum),
        has_outer_(!outer_maximum.empty() || !outer_magnitude.empty()),
        scale_count_(statistics.scale_count()),
        encoding_(EncodingWithoutScales(spec, layout,
                                        TurnsUnsigned(spec, statistics))),
        scaler_(spec, encoding_),
        finder_(spec, encoding_, scaler_, layout, &statistics, moving_average,
                held, importance),
        outer_magnitude_(outer_magnitude.begin(), outer_magnitude.end()) {}

  absl::StatusOr<Calibration> Run() {
    MakeRoom();
    if (has_outer_) {
      if (absl::Status s = FindOuterScales(); !s.ok()) return s;
    }
    if (absl::Status s = FindScales(); !s.ok()) return s;
    // Outer scales follow from the ranges without them.
    if (scaler_.has_outer_scales() && !has_outer_) {
      if (absl::Status s = FindOuterScales(); !s.ok()) return s;
      if (absl::Status s = FindScales(); !s.ok()) return s;
    }
    encoding_.degenerate_count = degenerate_count_.load();
    Calibration calibration;
    if (!statistics_.histograms().empty()) {
      absl::StatusOr<Prediction> prediction =
          Predict(encoding_, statistics_, pool_, stop_);
      if (!prediction.ok()) return prediction.status();
      calibration.prediction = *std::move(prediction);
    }
    calibration.mantissa_bits = finder_.mantissa_bits();
    calibration.encoding = std::move(encoding_);
    return calibration;
  }

  absl::StatusOr<std::vector<double>> FindOuterMagnitudes() {
    MakeRoom();
    if (absl::Status s = FindScales(); !s.ok()) return s;
    if (absl::Status s = FindOuterScales(); !s.ok()) return s;
    return std::move(outer_magnitude_);
  }

 private:
  void MakeRoom() {
    const auto count = static_cast<size_t>(scale_count_);
    encoding_.scale.resize(count);
    if (!scaler_.is_symmetric()) ResizeZeroPoints(count, &encoding_);
    if (HasScaleCodes(encoding_.scale_type)) encoding_.scale_code.resize(count);
    // Written before it is read, and large.
    if (scaler_.has_outer_scales()) ranges_.reset(new Range[count]);
  }

  // Finds the scales of all scale indices, under the outer scales if these are
  // known.
  absl::Status FindScales() {
    // Large batches where there are many: their scales are next to each other.
    constexpr int64_t kBatches = 64;
    constexpr int64_t kMostAtOnce = 256;
    const int64_t lanes = LaneCount(pool_);
    const int64_t at_once = std::clamp(scale_count_ / (kBatches * lanes),
                                       kScaleIndicesAtOnce, kMostAtOnce);
    const int64_t batches = (scale_count_ + at_once - 1) / at_once;
    std::atomic<int64_t> next{0};
    ParallelFor(pool_, std::min(lanes, batches), [&](int64_t) {
      // After an error only those before it matter, all of which are taken.
      while (!failed_.load() && !stop_.stopped()) {
        const int64_t begin = next.fetch_add(at_once);
        if (begin >= scale_count_) return;
        FindBatch(begin, std::min(scale_count_, begin + at_once));
      }
    });
    if (stop_.stopped()) return StoppedError();
    return error_.status();
  }

  void FindBatch(int64_t begin, int64_t end) {
    int64_t degenerate_count = 0;
    BlockElements elements;
    for (int64_t i = begin; i < end; ++i) {
      if (i % kScaleIndicesAtOnce == 0 && stop_.stopped()) return;
      if (absl::Status s = FindScale(i, &elements, &degenerate_count);
          !s.ok()) {
        error_.Set(i, std::move(s));
        failed_.store(true);
      }
    }
    // Only the last round counts.
    if (!scaler_.has_outer_scales() || outer_indices_ != nullptr) {
      degenerate_count_.fetch_add(degenerate_count);
    }
  }

  absl::Status FindScale(int64_t i, BlockElements* elements,
                         int64_t* degenerate_count) {
    if (encoding_.scale_type == ScaleType::kE8m0 &&
        statistics_.has_non_finite(i)) {
      if (ranges_ != nullptr) ranges_[i] = kNoRange;
      SetScale(i, scaler_.NanScale());
      return absl::OkStatus();
    }
    const int64_t outer_index =
        outer_indices_ != nullptr ? outer_indices_[i] : -1;
    const float outer =
        outer_index >= 0 ? encoding_.outer_scale[outer_index] : 0;
    if (!outer_maximum_.empty()) {
      absl::Status status = CheckOuterMaximum(i, statistics_.extremes()[i],
                                              outer_maximum_[outer_index]);
      if (!status.ok()) return status;
    }
    Range range;
    if (outer_index >= 0 && !has_outer_ && !finder_.searches()) {
      range = ranges_[i];
    } else {
      const absl::StatusOr<absl::optional<Range>> found =
          finder_.Find(i, outer, elements, stop_);
      if (!found.ok()) return found.status();
      range = found->value_or(kNoRange);
    }
    if (ranges_ != nullptr) ranges_[i] = range;
    if (IsNone(range)) {
      SetScale(
          i, scaler_.DegenerateScale(
                 outer, outer_index < 0 || outer_magnitude_[outer_index] == 0));
      ++*degenerate_count;
      return absl::OkStatus();
    }
    const absl::StatusOr<BlockScale> scale = scaler_.Scale(i, range, outer);
    if (!scale.ok()) return scale.status();
    SetScale(i, *scale);
    return absl::OkStatus();
  }

  void SetScale(int64_t i, const BlockScale& scale) {
    encoding_.scale[i] = scale.scale;
    SetZeroPoint(i, scale, &encoding_);
    if (!encoding_.scale_code.empty()) encoding_.scale_code[i] = scale.code;
  }

  // From the largest range of each outer block.
  absl::Status FindOuterScales() {
    const absl::StatusOr<BlockLayout> outer_layout =
        OuterLayout(encoding_, layout_.scale_shape());
    if (!outer_layout.ok()) return outer_layout.status();
    const auto count = static_cast<size_t>(outer_layout->scale_count());
    outer_magnitude_.resize(count);  // Those that are given stay.
    std::vector<int64_t> largest(count);
    outer_indices_.reset(new int64_t[static_cast<size_t>(scale_count_)]);
    constexpr int64_t kAtOnce = 4096;
    for (int64_t begin = 0; begin < scale_count_; begin += kAtOnce) {
      if (stop_.stopped()) return StoppedError();
      int64_t i = begin;
      outer_layout->ForEachRun(
          begin, std::min(kAtOnce, scale_count_ - begin),
          [&](const BlockLayout::Run& run) {
            for (int64_t k = 0; k < run.count; ++k, ++i) {
              const int64_t outer = run.scale_index + k * run.scale_step;
              outer_indices_[i] = outer;
              if (has_outer_ || IsNone(ranges_[i])) continue;
              const double magnitude = scaler_.Magnitude(ranges_[i]);
              if (magnitude > outer_magnitude_[outer]) {
                outer_magnitude_[outer] = magnitude;
                largest[outer] = i;
              }
            }
          });
    }
    if (!outer_maximum_.empty()) {
      outer_magnitude_.assign(outer_maximum_.begin(), outer_maximum_.end());
      absl::StatusOr<std::vector<float>> outer_scale =
          OuterScales(scaler_, *outer_layout, outer_maximum_);
      if (!outer_scale.ok()) return outer_scale.status();
      encoding_.outer_scale = *std::move(outer_scale);
      return absl::OkStatus();
    }
    encoding_.outer_scale.reserve(count);
    for (size_t outer = 0; outer < count; ++outer) {
      if (outer % kAtOnce == 0 && stop_.stopped()) return StoppedError();
      const absl::StatusOr<float> scale =
          scaler_.OuterScale(largest[outer], outer_magnitude_[outer]);
      if (!scale.ok()) return scale.status();
      encoding_.outer_scale.push_back(*scale);
    }
    return absl::OkStatus();
  }

  const BlockLayout& layout_;
  const TensorStatistics& statistics_;
  ThreadPool* const pool_;
  const StopToken stop_;
  const absl::Span<const float> outer_maximum_;
  // Outer scales follow from what was given.
  const bool has_outer_;
  const int64_t scale_count_;
  // Each thread writes the scales that it has taken.
  Encoding encoding_;
  const RangeScaler scaler_;
  const RangeFinder finder_;
  FirstError error_;
  std::atomic<bool> failed_{false};
  std::atomic<int64_t> degenerate_count_{0};

  // [scale_count] only with outer scales; of the first round or the latest.
  std::unique_ptr<Range[]> ranges_;
  // [scale_count] from FindOuterScales on.
  std::unique_ptr<int64_t[]> outer_indices_;
  // [outer scale count] the largest magnitude of a range.
  std::vector<double> outer_magnitude_;
};

// Errors: those of ValidateSpec, METHOD_INVALID.
absl::Status CheckInput(const EncodingSpec& spec, const BlockLayout& layout,
                        const TensorStatistics& statistics,
                        const HeldTensor* held, const Importance* importance) {
  absl::Status status = ValidateSpec(spec);
  if (!status.ok()) return status;
  if (importance != nullptr) {
    status = CheckTakesImportance(spec, layout);
    if (status.ok() && held == nullptr) {
      return MethodInvalidError(
          "importance weighs the elements, which statistics do not have; "
          "quantize the tensor itself with it");
    }
    return status;
  }
  if (!NeedsHistograms(spec)) return absl::OkStatus();
  const bool has_histograms = !statistics.histograms().empty();
  if (!has_histograms && held == nullptr) {
    return MethodInvalidError(
        "the method needs histograms, which the statistics do not have");
  }
  if (has_histograms && statistics.mantissa_bits() < spec.mantissa_bits) {
    return MethodInvalidError(absl::StrCat(
        "mantissa_bits is ", spec.mantissa_bits, "; the statistics have ",
        statistics.mantissa_bits(), ", expected no more than that"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Calibration> Calibrate(
    const EncodingSpec& spec, const BlockLayout& layout,
    const TensorStatistics& statistics,
    absl::Span<const Extremes> moving_average, ThreadPool* pool, StopToken stop,
    const HeldTensor* held, absl::Span<const float> outer_maximum,
    const Importance* importance, absl::Span<const double> outer_magnitude) {
  absl::Status status = CheckInput(spec, layout, statistics, held, importance);
  if (!status.ok()) return status;
  status = CheckOuterMaxima(spec, layout, outer_maximum);
  if (!status.ok()) return status;
  return Calibrator(spec, layout, statistics, moving_average, pool, stop, held,
                    outer_maximum, importance, outer_magnitude)
      .Run();
}

absl::StatusOr<std::vector<double>> OuterMagnitudes(
    const EncodingSpec& spec, const BlockLayout& layout,
    const TensorStatistics& statistics,
    absl::Span<const Extremes> moving_average, ThreadPool* pool,
    StopToken stop) {
  absl::Status status = CheckInput(spec, layout, statistics,
                                   /*held=*/nullptr, /*importance=*/nullptr);
  if (!status.ok()) return status;
  return Calibrator(spec, layout, statistics, moving_average, pool, stop,
                    /*held=*/nullptr, {}, /*importance=*/nullptr, {})
      .FindOuterMagnitudes();
}

absl::Status CheckOuterMaxima(const EncodingSpec& spec,
                              const BlockLayout& layout,
                              absl::Span<const float> outer_maximum) {
  if (outer_maximum.empty()) return absl::OkStatus();
  int64_t expected = 0;
  if (HasOuterScales(EffectiveScaleType(spec))) {
    const absl::StatusOr<BlockLayout> outer_layout = OuterLayout(
        EncodingWithoutScales(spec, layout, false), layout.scale_shape());
    if (!outer_layout.ok()) return outer_layout.status();
    expected = outer_layout->scale_count();
  }
  const auto count = static_cast<int64_t>(outer_maximum.size());
  if (count != expected) {
    return OuterMaximumError(absl::StrCat(count, " outer maxima, expected ",
                                          expected,
                                          ", one for each outer scale"));
  }
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(outer_maximum[i]) || outer_maximum[i] < 0) {
      return OuterMaximumError(
          absl::StrCat("outer maximum ", i, " is ", outer_maximum[i],
                       ", expected a finite number of at least 0"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<float>> OuterScales(
    const RangeScaler& scaler, const BlockLayout& outer_layout,
    absl::Span<const float> outer_maximum) {
  std::vector<float> outer_scale;
  outer_scale.reserve(outer_maximum.size());
  for (size_t outer = 0; outer < outer_maximum.size(); ++outer) {
    int64_t scale_index = 0, size = 0;
    BlockLayout::BlockCursor(outer_layout, static_cast<int64_t>(outer))
        .Next(&scale_index, &size);
    const absl::StatusOr<float> scale =
        scaler.OuterScale(scale_index, outer_maximum[outer]);
    if (!scale.ok()) return scale.status();
    outer_scale.push_back(*scale);
  }
  return outer_scale;
}

absl::Status CheckOuterMaximum(int64_t index, const Extremes& extremes,
                               float outer_maximum) {
  if (extremes.empty()) return absl::OkStatus();
  const double largest = std::max(-extremes.min, extremes.max);
  if (largest <= outer_maximum) return absl::OkStatus();
  return OuterMaximumError(absl::StrCat(
      "the block of scale ", index, " has magnitudes up to ", largest,
      ", expected at most its outer maximum of ", outer_maximum));
}

int64_t CalibrationBytes(const EncodingSpec& spec, const BlockLayout& layout,
                         const TensorStatistics& statistics, ThreadPool* pool) {
  int64_t bytes = 0;
  if (!spec.outer_block_size.empty()) {
    bytes += statistics.scale_count() *
             static_cast<int64_t>(sizeof(Range) + sizeof(int64_t));
  }
  if (!NeedsHistograms(spec)) return bytes;
  // A distribution for each thread: of as many masses as most blocks have bins.
  constexpr int64_t kMostMasses = 8192;
  constexpr int64_t kMassBytes = 96;
  return bytes + std::min(LaneCount(pool), statistics.scale_count()) *
                     std::min(kMostMasses, layout.largest_block()) * kMassBytes;
}

}  // namespace quantd::core
