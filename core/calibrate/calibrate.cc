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
#include "core/calibrate/range_finder.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/scale_indices.h"
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

// That of a scale index without anything but zeros.
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

// Goes through the scale indices once, or twice under outer scales, which
// follow from the first round. In a round each of several lanes takes a few
// scale indices at a time; when the slice is over it keeps what it has begun.
class Calibrator::Work {
 public:
  Work(const EncodingSpec& spec, const BlockLayout& layout,
       const TensorStatistics& statistics,
       absl::Span<const Extremes> moving_average, const HeldTensor* held)
      : spec_(spec),
        layout_(layout),
        statistics_(statistics),
        scale_count_(statistics.scale_count()),
        encoding_(EncodingWithoutScales(spec, layout,
                                        TurnsUnsigned(spec, statistics))),
        scaler_(spec_, encoding_),
        finder_(spec_, encoding_, scaler_, statistics, moving_average, held) {}

  absl::StatusOr<bool> Run(const TimeSlice& slice, ThreadPool* pool) {
    for (;;) {
      absl::Status status;
      switch (phase_) {
        case Phase::kStart:
          Start(pool);
          phase_ = Phase::kRound;
          break;
        case Phase::kRound:
          if (!RunRound(slice, pool)) return false;
          if (status = error_.status(); !status.ok()) return status;
          phase_ = scaler_.has_outer_scales() && outer_layout_ == nullptr
                       ? Phase::kOuterRanges
                       : Phase::kPrediction;
          break;
        case Phase::kOuterRanges:
          if (status = StartOuter(); !status.ok()) return status;
          if (!MergeOuterRanges(slice)) return false;
          phase_ = Phase::kOuterScales;
          break;
        case Phase::kOuterScales: {
          const absl::StatusOr<bool> done = FindOuterScales(slice);
          if (!done.ok() || !*done) return done;
          next_ = 0;
          phase_ = Phase::kRound;
          break;
        }
        case Phase::kPrediction:
          encoding_.degenerate_count = 0;
          for (const Lane& lane : lanes_) {
            encoding_.degenerate_count += lane.degenerate_count;
          }
          if (statistics_.histograms().empty()) {
            phase_ = Phase::kDone;
            break;
          }
          if (predictor_ == nullptr) {
            predictor_ = std::make_unique<Predictor>(encoding_, statistics_);
          }
          if (!predictor_->Run(slice, pool)) return false;
          phase_ = Phase::kDone;
          break;
        case Phase::kDone:
          return true;
      }
      if (phase_ != Phase::kDone && slice.over()) return false;
    }
  }

  int64_t memory_bytes() const {
    int64_t bytes = 0;
    for (const Lane& lane : lanes_) {
      if (lane.task.has_value()) bytes += lane.task->memory_bytes();
    }
    if (ranges_ != nullptr) {
      bytes += scale_count_ * static_cast<int64_t>(sizeof(Range));
    }
    if (outer_indices_ != nullptr) {
      bytes += scale_count_ * static_cast<int64_t>(sizeof(int64_t));
    }
    return bytes;
  }

  Calibration Take() {
    Calibration calibration;
    if (predictor_ != nullptr) {
      calibration.prediction = predictor_->prediction();
    }
    predictor_ = nullptr;
    calibration.mantissa_bits = finder_.mantissa_bits();
    calibration.encoding = std::move(encoding_);
    return calibration;
  }

 private:
  enum class Phase {
    kStart,
    kRound,
    kOuterRanges,
    kOuterScales,
    kPrediction,
    kDone
  };

  // Scale indices that one thread has taken.
  struct Lane {
    int64_t next = 0;
    int64_t end = 0;
    int64_t degenerate_count = 0;
    // Of `next`, when it was begun.
    absl::optional<RangeFinder::Task> task;
  };

  void Start(ThreadPool* pool) {
    const auto count = static_cast<size_t>(scale_count_);
    encoding_.scale.resize(count);
    if (!scaler_.is_symmetric()) encoding_.zero_point.resize(count);
    if (HasScaleCodes(encoding_.scale_type)) encoding_.scale_code.resize(count);
    // Written before it is read, and large.
    if (scaler_.has_outer_scales()) ranges_.reset(new Range[count]);
    // Large batches where there are many: their scales are next to each other.
    constexpr int64_t kBatches = 64;
    constexpr int64_t kMostAtOnce = 256;
    const int64_t lanes = LaneCount(pool);
    at_once_ = std::clamp(scale_count_ / (kBatches * lanes),
                          kScaleIndicesAtOnce, kMostAtOnce);
    lanes_ = std::vector<Lane>(static_cast<size_t>(
        std::min(lanes, (scale_count_ + at_once_ - 1) / at_once_)));
  }

  // One of the two rounds: answers whether it got to its end.
  bool RunRound(const TimeSlice& slice, ThreadPool* pool) {
    ParallelFor(pool, static_cast<int64_t>(lanes_.size()),
                [&](int64_t lane) { RunLane(slice, &lanes_[lane]); });
    const bool is_any_left = next_.load() < scale_count_ && !failed_.load();
    return !is_any_left &&
           std::all_of(lanes_.begin(), lanes_.end(),
                       [](const Lane& lane) { return lane.next == lane.end; });
  }

  void RunLane(const TimeSlice& slice, Lane* lane) {
    do {
      if (lane->next == lane->end) {
        // After an error only those before it matter, all of which are taken.
        if (failed_.load()) return;
        const int64_t first = next_.fetch_add(at_once_);
        if (first >= scale_count_) return;
        lane->next = first;
        lane->end = std::min(scale_count_, first + at_once_);
      }
      const int64_t pause =
          std::min(lane->end, lane->next + kScaleIndicesAtOnce);
      for (; lane->next < pause; ++lane->next) {
        if (!RunScaleIndex(slice, lane)) return;
      }
    } while (!slice.over());
  }

  // Answers whether the scale index is done with.
  bool RunScaleIndex(const TimeSlice& slice, Lane* lane) {
    const int64_t i = lane->next;
    if (encoding_.scale_type == ScaleType::kE8m0 &&
        statistics_.has_non_finite(i)) {
      if (ranges_ != nullptr) ranges_[i] = kNoRange;
      SetScale(i, scaler_.NanScale());
      return true;
    }
    const int64_t outer_index =
        outer_layout_ != nullptr ? outer_indices_[i] : -1;
    const float outer =
        outer_index >= 0 ? encoding_.outer_scale[outer_index] : 0;
    Range range;
    if (outer_index >= 0 && !finder_.searches()) {
      range = ranges_[i];
    } else {
      if (!lane->task.has_value()) lane->task.emplace(finder_, i, outer);
      if (!lane->task->Run(slice)) return false;
      const absl::StatusOr<absl::optional<Range>>& found = lane->task->range();
      if (!found.ok()) Fail(i, found.status());
      range = found.ok() ? found->value_or(kNoRange) : kNoRange;
      lane->task.reset();
    }
    if (ranges_ != nullptr) ranges_[i] = range;
    if (IsNone(range)) {
      SetScale(
          i, scaler_.DegenerateScale(
                 outer, outer_index < 0 || outer_magnitude_[outer_index] == 0));
      // Only the last round counts.
      if (!scaler_.has_outer_scales() || outer_index >= 0) {
        ++lane->degenerate_count;
      }
      return true;
    }
    const absl::StatusOr<BlockScale> scale = scaler_.Scale(i, range, outer);
    if (scale.ok()) {
      SetScale(i, *scale);
    } else {
      Fail(i, scale.status());
    }
    return true;
  }

  void SetScale(int64_t i, const BlockScale& scale) {
    encoding_.scale[i] = scale.scale;
    if (!encoding_.zero_point.empty()) {
      encoding_.zero_point[i] = scale.zero_point;
    }
    if (!encoding_.scale_code.empty()) encoding_.scale_code[i] = scale.code;
  }

  void Fail(int64_t i, absl::Status status) {
    error_.Set(i, std::move(status));
    failed_.store(true);
  }

  absl::Status StartOuter() {
    if (outer_layout_ != nullptr) return absl::OkStatus();
    absl::StatusOr<BlockLayout> outer_layout =
        OuterLayout(encoding_, layout_.scale_shape());
    if (!outer_layout.ok()) return outer_layout.status();
    outer_layout_ =
        std::make_unique<const BlockLayout>(*std::move(outer_layout));
    const auto count = static_cast<size_t>(outer_layout_->scale_count());
    outer_magnitude_.resize(count);
    largest_.resize(count);
    outer_indices_.reset(new int64_t[static_cast<size_t>(scale_count_)]);
    next_outer_ = 0;
    return absl::OkStatus();
  }

  // The outer scale index of each scale index, and what outer scales follow
  // from.
  bool MergeOuterRanges(const TimeSlice& slice) {
    constexpr int64_t kAtOnce = 4096;
    while (next_outer_ < scale_count_) {
      const int64_t begin = next_outer_;
      next_outer_ = std::min(scale_count_, begin + kAtOnce);
      int64_t i = begin;
      outer_layout_->ForEachRun(
          begin, next_outer_ - begin, [&](const BlockLayout::Run& run) {
            for (int64_t k = 0; k < run.count; ++k, ++i) {
              const int64_t outer = run.scale_index + k * run.scale_step;
              outer_indices_[i] = outer;
              if (IsNone(ranges_[i])) continue;
              const double magnitude = scaler_.Magnitude(ranges_[i]);
              if (magnitude > outer_magnitude_[outer]) {
                outer_magnitude_[outer] = magnitude;
                largest_[outer] = i;
              }
            }
          });
      if (slice.over()) break;
    }
    if (next_outer_ < scale_count_) return false;
    next_outer_ = 0;
    encoding_.outer_scale.reserve(outer_magnitude_.size());
    return true;
  }

  absl::StatusOr<bool> FindOuterScales(const TimeSlice& slice) {
    constexpr int64_t kAtOnce = 256;
    const int64_t count = outer_layout_->scale_count();
    while (next_outer_ < count) {
      const int64_t end = std::min(count, next_outer_ + kAtOnce);
      for (; next_outer_ < end; ++next_outer_) {
        const absl::StatusOr<float> scale = scaler_.OuterScale(
            largest_[next_outer_], outer_magnitude_[next_outer_]);
        if (!scale.ok()) return scale.status();
        encoding_.outer_scale.push_back(*scale);
      }
      if (slice.over()) break;
    }
    return next_outer_ == count;
  }

  const EncodingSpec spec_;
  const BlockLayout& layout_;
  const TensorStatistics& statistics_;
  const int64_t scale_count_;
  // Each thread writes the scales that it has taken.
  Encoding encoding_;
  const RangeScaler scaler_;
  const RangeFinder finder_;

  Phase phase_ = Phase::kStart;
  // Each is used by one thread at a time.
  std::vector<Lane> lanes_;
  // Scale indices that a lane takes.
  int64_t at_once_ = 0;
  // What the lanes of a round take next.
  std::atomic<int64_t> next_{0};
  FirstError error_;
  std::atomic<bool> failed_{false};

  // [scale_count] only with outer scales; of the first round or the latest.
  std::unique_ptr<Range[]> ranges_;
  // From the first round on, with outer scales.
  std::unique_ptr<const BlockLayout> outer_layout_;
  // [scale_count]
  std::unique_ptr<int64_t[]> outer_indices_;
  // [outer scale count] the largest magnitude of a range, and a scale index
  // that has it.
  std::vector<double> outer_magnitude_;
  std::vector<int64_t> largest_;
  int64_t next_outer_ = 0;

  std::unique_ptr<Predictor> predictor_;
};

Calibrator::Calibrator(std::unique_ptr<Work> work) : work_(std::move(work)) {}

Calibrator::~Calibrator() = default;

absl::StatusOr<std::unique_ptr<Calibrator>> Calibrator::Create(
    const EncodingSpec& spec, const BlockLayout& layout,
    const TensorStatistics& statistics,
    absl::Span<const Extremes> moving_average, const HeldTensor* held) {
  if (absl::Status status = ValidateSpec(spec); !status.ok()) return status;
  if (NeedsHistograms(spec)) {
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
  }
  return std::unique_ptr<Calibrator>(new Calibrator(
      std::make_unique<Work>(spec, layout, statistics, moving_average, held)));
}

int64_t Calibrator::memory_bytes() const { return work_->memory_bytes(); }

absl::StatusOr<bool> Calibrator::Run(const TimeSlice& slice, ThreadPool* pool) {
  return work_->Run(slice, pool);
}

Calibration Calibrator::Take() { return work_->Take(); }

absl::StatusOr<Calibration> Calibrate(const EncodingSpec& spec,
                                      const BlockLayout& layout,
                                      const TensorStatistics& statistics,
                                      absl::Span<const Extremes> moving_average,
                                      ThreadPool* pool,
                                      const HeldTensor* held) {
  absl::StatusOr<std::unique_ptr<Calibrator>> calibrator =
      Calibrator::Create(spec, layout, statistics, moving_average, held);
  if (!calibrator.ok()) return calibrator.status();
  const absl::StatusOr<bool> done =
      (*calibrator)->Run(TimeSlice::Endless(), pool);
  if (!done.ok()) return done.status();
  return (*calibrator)->Take();
}

}  // namespace quantd::core
