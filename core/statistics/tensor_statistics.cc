#include "core/statistics/tensor_statistics.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/simd_internal.h"
#include "core/statistics/histogram_update.h"
#include "core/statistics/statistics_kernel.h"
#include "core/types/float_convert.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/statistics/tensor_statistics.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/types/float_convert-inl.h"

#ifndef QUANTD_CORE_STATISTICS_TENSOR_STATISTICS_ONCE
#define QUANTD_CORE_STATISTICS_TENSOR_STATISTICS_ONCE
namespace quantd::core {
namespace {

// Elements that go through the L1 buffer at a time.
constexpr int64_t kBlockElements = 2048;
// Elements of a task; a multiple of kBlockElements.
constexpr int64_t kTaskElements = 64 * 1024;

// Extremes of scale indices from scale_index on, in the type of the elements.
template <typename T>
struct TypedSegment {
  int64_t scale_index;
  std::vector<T> min;
  std::vector<T> max;
};

// The segment with scale indices [scale_index, scale_index + count), from among
// the latest, or a new one.
template <typename T>
TypedSegment<T>& FindSegment(int64_t scale_index, int64_t count,
                             std::vector<TypedSegment<T>>* segments) {
  constexpr size_t kLatest = 4;
  for (size_t i = 0; i < std::min(kLatest, segments->size()); ++i) {
    TypedSegment<T>& segment = (*segments)[segments->size() - 1 - i];
    if (segment.scale_index <= scale_index &&
        scale_index + count <=
            segment.scale_index + static_cast<int64_t>(segment.min.size())) {
      return segment;
    }
  }
  const T infinity = std::numeric_limits<T>::infinity();
  segments->push_back({scale_index, std::vector<T>(count, infinity),
                       std::vector<T>(count, -infinity)});
  return segments->back();
}

}  // namespace
}  // namespace quantd::core
#endif  // QUANTD_CORE_STATISTICS_TENSOR_STATISTICS_ONCE

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

void StatisticsSimd(const StatisticsRange& range, PartialStatistics* partial) {
  StatisticsScalar(range, partial);
}

#else

template <typename T>
void CountNonFinite(const uint8_t* HWY_RESTRICT in, int64_t count,
                    ElementCounts* counts) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const T infinity = std::numeric_limits<T>::infinity();
  int64_t nan = 0, positive = 0, negative = 0;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto x = LoadBytes(d, in + i * static_cast<int64_t>(sizeof(T)));
    nan += hn::CountTrue(d, hn::IsNaN(x));
    positive += hn::CountTrue(d, hn::Eq(x, hn::Set(d, infinity)));
    negative += hn::CountTrue(d, hn::Eq(x, hn::Set(d, -infinity)));
  }
  for (; i < count; ++i) {
    const T x = LoadUnaligned<T>(in + i * static_cast<int64_t>(sizeof(T)));
    nan += std::isnan(x);
    positive += x == infinity;
    negative += x == -infinity;
  }
  counts->nan += nan;
  counts->positive_infinity += positive;
  counts->negative_infinity += negative;
}

// The extremes over a vector's lanes as they build up.
template <class D>
struct Accumulator {
  hn::Vec<D> min;
  hn::Vec<D> max;
  // NaN in a lane once a non-finite element came by, otherwise zero.
  hn::Vec<D> taint;
  // Minus the number of zeros, as integers.
  hn::Vec<hn::RebindToSigned<D>> zeros;
};

template <class D>
HWY_INLINE void AddVector(D d, hn::Vec<D> x, Accumulator<D>& a) {
  a.min = hn::Min(a.min, x);
  a.max = hn::Max(a.max, x);
  a.taint = hn::MulAdd(x, hn::Zero(d), a.taint);
  const hn::RebindToSigned<D> di;
  a.zeros = hn::Add(
      a.zeros, hn::VecFromMask(di, hn::RebindMask(di, hn::Eq(x, hn::Zero(d)))));
}

// Extremes and counts of `count` elements, at most kBlockElements, of one scale
// index. Returns whether all are finite.
template <typename T>
bool AddUniform(const uint8_t* HWY_RESTRICT in, int64_t count, T* min, T* max,
                ElementCounts* counts) {
  using D = hn::ScalableTag<T>;
  const D d;
  const hn::RebindToSigned<D> di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int64_t kSize = sizeof(T);
  const T infinity = std::numeric_limits<T>::infinity();
  const Accumulator<D> empty{hn::Set(d, infinity), hn::Set(d, -infinity),
                             hn::Zero(d), hn::Zero(di)};
  Accumulator<D> a0 = empty, a1 = empty, a2 = empty, a3 = empty;
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    AddVector(d, LoadBytes(d, in + i * kSize), a0);
    AddVector(d, LoadBytes(d, in + (i + lanes) * kSize), a1);
    AddVector(d, LoadBytes(d, in + (i + 2 * lanes) * kSize), a2);
    AddVector(d, LoadBytes(d, in + (i + 3 * lanes) * kSize), a3);
  }
  for (; i + lanes <= count; i += lanes) {
    AddVector(d, LoadBytes(d, in + i * kSize), a0);
  }
  const auto taint =
      hn::Add(hn::Add(a0.taint, a1.taint), hn::Add(a2.taint, a3.taint));
  bool is_finite = hn::AllFalse(d, hn::IsNaN(taint));
  T low = hn::GetLane(hn::MinOfLanes(
      d, hn::Min(hn::Min(a0.min, a1.min), hn::Min(a2.min, a3.min))));
  T high = hn::GetLane(hn::MaxOfLanes(
      d, hn::Max(hn::Max(a0.max, a1.max), hn::Max(a2.max, a3.max))));
  int64_t zeros = -static_cast<int64_t>(hn::GetLane(hn::SumOfLanes(
      di, hn::Add(hn::Add(a0.zeros, a1.zeros), hn::Add(a2.zeros, a3.zeros)))));
  for (; i < count; ++i) {
    const T x = LoadUnaligned<T>(in + i * kSize);
    is_finite &= std::isfinite(x);
    low = x < low ? x : low;
    high = x > high ? x : high;
    zeros += x == 0;
  }
  counts->zero += zeros;
  if (HWY_UNLIKELY(!is_finite)) {
    CountNonFinite<T>(in, count, counts);
    auto clean_min = hn::Set(d, infinity);
    auto clean_max = hn::Set(d, -infinity);
    for (i = 0; i + lanes <= count; i += lanes) {
      const auto x = LoadBytes(d, in + i * kSize);
      const auto finite = hn::IsFinite(x);
      clean_min =
          hn::Min(clean_min, hn::IfThenElse(finite, x, hn::Set(d, infinity)));
      clean_max =
          hn::Max(clean_max, hn::IfThenElse(finite, x, hn::Set(d, -infinity)));
    }
    low = hn::GetLane(hn::MinOfLanes(d, clean_min));
    high = hn::GetLane(hn::MaxOfLanes(d, clean_max));
    for (; i < count; ++i) {
      const T x = LoadUnaligned<T>(in + i * kSize);
      if (!std::isfinite(x)) continue;
      low = std::min(low, x);
      high = std::max(high, x);
    }
  }
  *min = std::min(*min, low);
  *max = std::max(*max, high);
  return is_finite;
}

// `count` elements with a scale index each. Returns whether all are finite.
template <typename T>
bool AddStepping(const uint8_t* HWY_RESTRICT in, int64_t count,
                 T* HWY_RESTRICT min, T* HWY_RESTRICT max,
                 ElementCounts* counts) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int64_t kSize = sizeof(T);
  const auto infinity = hn::Set(d, std::numeric_limits<T>::infinity());
  int64_t zeros = 0;
  bool is_finite = true;
  int64_t i = 0;
  auto all_finite = hn::Eq(hn::Zero(d), hn::Zero(d));
  for (; i + lanes <= count; i += lanes) {
    const auto x = LoadBytes(d, in + i * kSize);
    const auto finite = hn::IsFinite(x);
    all_finite = hn::And(all_finite, finite);
    hn::StoreU(
        hn::Min(hn::LoadU(d, min + i), hn::IfThenElse(finite, x, infinity)), d,
        min + i);
    hn::StoreU(hn::Max(hn::LoadU(d, max + i),
                       hn::IfThenElse(finite, x, hn::Neg(infinity))),
               d, max + i);
    zeros += hn::CountTrue(d, hn::Eq(x, hn::Zero(d)));
  }
  is_finite = hn::AllTrue(d, all_finite);
  for (; i < count; ++i) {
    const T x = LoadUnaligned<T>(in + i * kSize);
    zeros += x == 0;
    if (std::isfinite(x)) {
      min[i] = std::min(min[i], x);
      max[i] = std::max(max[i], x);
    } else {
      is_finite = false;
    }
  }
  counts->zero += zeros;
  if (HWY_UNLIKELY(!is_finite)) CountNonFinite<T>(in, count, counts);
  return is_finite;
}

// Marks the scale indices, from `scale_index` on, of the elements that are not
// finite.
template <typename T>
void MarkNonFinite(const uint8_t* HWY_RESTRICT in, int64_t count,
                   int64_t scale_index, PartialStatistics* partial) {
  for (int64_t i = 0; i < count; ++i) {
    const T x = LoadUnaligned<T>(in + i * static_cast<int64_t>(sizeof(T)));
    if (!std::isfinite(x)) partial->MarkNonFinite(scale_index + i);
  }
}

template <typename T>
void StatisticsTyped(const StatisticsRange& range, PartialStatistics* partial) {
  const bool widens = sizeof(T) == 4 && range.type != ElementType::kFloat32;
  const int64_t element_bytes = ElementSizeBytes(range.type);
  HWY_ALIGN float wide[kBlockElements];
  const T infinity = std::numeric_limits<T>::infinity();
  std::vector<TypedSegment<T>> segments;

  BlockLayout::RunCursor cursor(range.layout, range.first, range.count);
  BlockLayout::Run run{};
  T min = infinity;
  T max = -infinity;
  for (int64_t begin = 0; begin < range.count; begin += kBlockElements) {
    const int64_t count = std::min(range.count - begin, kBlockElements);
    const uint8_t* in = range.in + begin * element_bytes;
    if (widens) {
      Widen(range.type, in, count, wide);
      in = reinterpret_cast<const uint8_t*>(wide);
    }
    for (int64_t i = 0; i < count;) {
      if (run.count == 0) cursor.Next(&run);
      const int64_t part = std::min(run.count, count - i);
      const uint8_t* part_in = in + i * static_cast<int64_t>(sizeof(T));
      if (run.scale_step == 1) {
        TypedSegment<T>& segment =
            FindSegment(run.scale_index, run.count, &segments);
        const int64_t offset = run.scale_index - segment.scale_index;
        if (!AddStepping<T>(part_in, part, segment.min.data() + offset,
                            segment.max.data() + offset, &partial->counts)) {
          MarkNonFinite<T>(part_in, part, run.scale_index, partial);
        }
      } else {
        if (!AddUniform<T>(part_in, part, &min, &max, &partial->counts)) {
          partial->MarkNonFinite(run.scale_index);
        }
        if (part == run.count) {
          partial->singles.push_back({run.scale_index, {min, max}});
          min = infinity;
          max = -infinity;
        }
      }
      run.count -= part;
      run.scale_index += part * run.scale_step;
      i += part;
    }
  }
  partial->counts.total += range.count;
  for (const TypedSegment<T>& segment : segments) {
    std::vector<Extremes> extremes(segment.min.size());
    for (size_t i = 0; i < extremes.size(); ++i) {
      extremes[i] = {segment.min[i], segment.max[i]};
    }
    partial->segments.push_back({segment.scale_index, std::move(extremes)});
  }
}

void StatisticsSimd(const StatisticsRange& range, PartialStatistics* partial) {
  if (range.type == ElementType::kFloat64) {
    StatisticsTyped<double>(range, partial);
  } else {
    StatisticsTyped<float>(range, partial);
  }
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quantd::core {
namespace {

HWY_EXPORT(StatisticsSimd);

}  // namespace

void ElementCounts::Merge(const ElementCounts& other) {
  total += other.total;
  nan += other.nan;
  positive_infinity += other.positive_infinity;
  negative_infinity += other.negative_infinity;
  zero += other.zero;
}

void Extremes::Merge(const Extremes& other) {
  // Adding zero turns -0 into +0: which of the two a minimum keeps would
  // depend on the order.
  min = std::min(min, other.min) + 0.0;
  max = std::max(max, other.max) + 0.0;
}

TensorStatistics::TensorStatistics(int64_t scale_count, int mantissa_bits)
    : extremes_(scale_count, kNoExtremes), mantissa_bits_(mantissa_bits) {
  if (mantissa_bits > 0) {
    histograms_.assign(scale_count, Histogram(mantissa_bits));
  }
  CountHistogramBytes();
}

void TensorStatistics::Update(const BlockLayout& layout, ElementType type,
                              int64_t first, int64_t count, const uint8_t* data,
                              ThreadPool* pool) {
  const int64_t tasks = (count + kTaskElements - 1) / kTaskElements;
  const bool is_scalar = internal::UsesScalarKernels();
  absl::optional<HistogramUpdate> histogram_update;
  if (mantissa_bits_ > 0 && count > 0) {
    histogram_update.emplace(absl::MakeSpan(histograms_));
  }
  absl::Mutex mutex;
  const auto run_task = [&](int64_t task) {
    const int64_t begin = task * kTaskElements;
    const StatisticsRange range{layout, type, first + begin,
                                std::min(kTaskElements, count - begin),
                                data + begin * ElementSizeBytes(type)};
    PartialStatistics partial;
    if (is_scalar) {
      StatisticsScalar(range, &partial);
    } else {
      HWY_DYNAMIC_DISPATCH(StatisticsSimd)(range, &partial);
    }
    // The elements are in the cache now.
    if (histogram_update.has_value()) histogram_update->Add(range);
    // Merging commutes, so that the order of the tasks does not matter.
    absl::MutexLock lock(&mutex);
    counts_.Merge(partial.counts);
    for (const PartialStatistics::Single& single : partial.singles) {
      extremes_[single.scale_index].Merge(single.extremes);
    }
    for (const PartialStatistics::Segment& segment : partial.segments) {
      for (size_t i = 0; i < segment.extremes.size(); ++i) {
        extremes_[segment.scale_index + i].Merge(segment.extremes[i]);
      }
    }
    if (partial.non_finite.empty()) return;
    if (has_non_finite_.empty()) has_non_finite_.resize(extremes_.size());
    for (const int64_t scale_index : partial.non_finite) {
      has_non_finite_[scale_index] = true;
    }
  };
  ParallelFor(pool, tasks, run_task);
  if (histogram_update.has_value()) {
    histogram_bytes_ += histogram_update->Finish();
  }
}

void TensorStatistics::Merge(const TensorStatistics& other) {
  counts_.Merge(other.counts_);
  for (size_t i = 0; i < extremes_.size(); ++i) {
    extremes_[i].Merge(other.extremes_[i]);
  }
  for (size_t i = 0; i < histograms_.size(); ++i) {
    histograms_[i].Merge(other.histograms_[i]);
  }
  CountHistogramBytes();
  if (other.has_non_finite_.empty()) return;
  has_non_finite_.resize(extremes_.size());
  for (size_t i = 0; i < extremes_.size(); ++i) {
    has_non_finite_[i] = has_non_finite_[i] || other.has_non_finite_[i];
  }
}

TensorStatistics TensorStatistics::Coarsen(absl::Span<const int64_t> map,
                                           int64_t scale_count_out) const {
  TensorStatistics coarse(scale_count_out, mantissa_bits_);
  coarse.counts_ = counts_;
  if (!has_non_finite_.empty()) coarse.has_non_finite_.resize(scale_count_out);
  for (size_t i = 0; i < extremes_.size(); ++i) {
    const int64_t to = map[i];
    coarse.extremes_[to].Merge(extremes_[i]);
    if (mantissa_bits_ > 0) coarse.histograms_[to].Merge(histograms_[i]);
    if (has_non_finite(i)) coarse.has_non_finite_[to] = true;
  }
  coarse.CountHistogramBytes();
  return coarse;
}

bool TensorStatistics::has_non_finite(int64_t scale_index) const {
  return !has_non_finite_.empty() && has_non_finite_[scale_index];
}

int64_t TensorStatistics::memory_bytes() const {
  return static_cast<int64_t>(sizeof(*this) +
                              extremes_.capacity() * sizeof(Extremes) +
                              has_non_finite_.capacity() / 8) +
         histogram_bytes_;
}

void TensorStatistics::CountHistogramBytes() {
  histogram_bytes_ = 0;
  for (const Histogram& histogram : histograms_) {
    histogram_bytes_ += histogram.memory_bytes();
  }
}

TensorStatistics TensorStatistics::FromParts(
    const ElementCounts& counts, std::vector<Extremes> extremes,
    absl::Span<const int64_t> non_finite_scale_indices, int mantissa_bits,
    std::vector<Histogram> histograms) {
  TensorStatistics statistics(0, mantissa_bits);
  statistics.counts_ = counts;
  statistics.extremes_ = std::move(extremes);
  statistics.histograms_ = std::move(histograms);
  statistics.CountHistogramBytes();
  if (!non_finite_scale_indices.empty()) {
    statistics.has_non_finite_.resize(statistics.extremes_.size());
    for (const int64_t i : non_finite_scale_indices) {
      statistics.has_non_finite_[i] = true;
    }
  }
  return statistics;
}

Extremes TensorStatistics::overall() const {
  Extremes overall = kNoExtremes;
  for (const Extremes& extremes : extremes_) overall.Merge(extremes);
  return overall;
}

}  // namespace quantd::core
#endif  // HWY_ONCE
