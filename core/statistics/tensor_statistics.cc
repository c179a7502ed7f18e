#include "core/statistics/tensor_statistics.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/simd_internal.h"
#include "core/statistics/histogram_update.h"
#include "core/statistics/statistics_kernel.h"
#include "core/types/element_type.h"
#include "core/types/float_convert.h"
#include "hwy/cache_control.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/statistics/tensor_statistics.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/statistics/extremes-inl.h"
#include "core/types/float_convert-inl.h"

#ifndef QUANTD_CORE_STATISTICS_TENSOR_STATISTICS_ONCE
#define QUANTD_CORE_STATISTICS_TENSOR_STATISTICS_ONCE
namespace quantd::core {
namespace {

// Elements of a task.
constexpr int64_t kTaskElements = 64 * 1024;
// Bytes of tensors that no cache near the processor holds: what comes next is
// fetched ahead.
constexpr int64_t kFarBytes = 1 << 20;
constexpr int64_t kAheadBytes = 4096;
// Columns whose extremes are gathered at a time: few enough for the L1 cache.
constexpr int64_t kTileColumns = 1024;

// The segment with scale indices [scale_index, scale_index + count), from among
// the latest, or a new one.
PartialStatistics::Segment& FindSegment(int64_t scale_index, int64_t count,
                                        PartialStatistics* partial) {
  constexpr size_t kLatest = 4;
  auto& segments = partial->segments;
  for (size_t i = 0; i < std::min(kLatest, segments.size()); ++i) {
    PartialStatistics::Segment& segment = segments[segments.size() - 1 - i];
    if (segment.scale_index <= scale_index &&
        scale_index + count <=
            segment.scale_index +
                static_cast<int64_t>(segment.extremes.size())) {
      return segment;
    }
  }
  segments.push_back({scale_index, std::vector<Extremes>(count, kNoExtremes)});
  return segments.back();
}

void MergeExtremesScalar(const Extremes* from, int64_t count, Extremes* to) {
  for (int64_t i = 0; i < count; ++i) to[i].Merge(from[i]);
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

void MergeExtremes(const Extremes* from, int64_t count, Extremes* to) {
  MergeExtremesScalar(from, count, to);
}

#else

// Counts elements that are not finite, and zeros.
template <ElementType kType>
HWY_NOINLINE void CountSpecial(const uint8_t* HWY_RESTRICT in, int64_t count,
                               ElementCounts* counts) {
  using T = Real<kType>;
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t size = ElementSizeBytes(kType);
  const T infinity = std::numeric_limits<T>::infinity();
  int64_t nan = 0, positive = 0, negative = 0, zero = 0;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto x = LoadReals<kType>(d, in + i * size);
    nan += hn::CountTrue(d, hn::IsNaN(x));
    positive += hn::CountTrue(d, hn::Eq(x, hn::Set(d, infinity)));
    negative += hn::CountTrue(d, hn::Eq(x, hn::Set(d, -infinity)));
    zero += hn::CountTrue(d, hn::Eq(x, hn::Zero(d)));
  }
  for (; i < count; ++i) {
    const T x = LoadElement<T>(kType, in, i);
    nan += std::isnan(x);
    positive += x == infinity;
    negative += x == -infinity;
    zero += x == 0;
  }
  counts->nan += nan;
  counts->positive_infinity += positive;
  counts->negative_infinity += negative;
  counts->zero += zero;
}

template <typename T>
struct TypedExtremes {
  T min = std::numeric_limits<T>::infinity();
  T max = -std::numeric_limits<T>::infinity();
};

// The finite extremes and all counts where some elements are not finite.
template <ElementType kType>
HWY_NOINLINE TypedExtremes<Real<kType>> ReduceSpecial(
    const uint8_t* HWY_RESTRICT in, int64_t count, ElementCounts* counts) {
  using T = Real<kType>;
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t size = ElementSizeBytes(kType);
  CountSpecial<kType>(in, count, counts);
  TypedExtremes<T> result;
  auto min = hn::Set(d, result.min);
  auto max = hn::Set(d, result.max);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto x = LoadReals<kType>(d, in + i * size);
    const auto finite = hn::IsFinite(x);
    min = hn::IfThenElse(finite, hn::Min(min, x), min);
    max = hn::IfThenElse(finite, hn::Max(max, x), max);
  }
  result.min = hn::GetLane(hn::MinOfLanes(d, min));
  result.max = hn::GetLane(hn::MaxOfLanes(d, max));
  for (; i < count; ++i) {
    const T x = LoadElement<T>(kType, in, i);
    if (!std::isfinite(x)) continue;
    result.min = std::min(result.min, x);
    result.max = std::max(result.max, x);
  }
  return result;
}

HWY_INLINE void FetchAhead(const uint8_t* in, int64_t bytes) {
  constexpr int64_t kLineBytes = 64;
  for (int64_t k = 0; k < bytes; k += kLineBytes) {
    hwy::Prefetch(in + kAheadBytes + k);
  }
}

// Extremes and counts of `count` elements of one scale index, at most
// kTaskElements. `all_finite` becomes false where one is not.
template <ElementType kType>
HWY_INLINE TypedExtremes<Real<kType>> Reduce(const uint8_t* HWY_RESTRICT in,
                                             int64_t count, bool is_far,
                                             ElementCounts* counts,
                                             bool* all_finite) {
  using T = Real<kType>;
  using D = hn::ScalableTag<T>;
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t size = ElementSizeBytes(kType);
  TypedExtremes<T> result;
  bool is_finite = true;
  int64_t zeros = 0;
  int64_t i = 0;
  if (count >= lanes) {
    auto min0 = hn::Set(d, result.min), min1 = min0, min2 = min0, min3 = min0;
    auto max0 = hn::Set(d, result.max), max1 = max0, max2 = max0, max3 = max0;
    Tally<D> t0, t1, t2, t3;
    for (; i + 4 * lanes <= count; i += 4 * lanes) {
      if (is_far) FetchAhead(in + i * size, 4 * lanes * size);
      const auto x0 = LoadReals<kType>(d, in + i * size);
      const auto x1 = LoadReals<kType>(d, in + (i + lanes) * size);
      const auto x2 = LoadReals<kType>(d, in + (i + 2 * lanes) * size);
      const auto x3 = LoadReals<kType>(d, in + (i + 3 * lanes) * size);
      min0 = hn::Min(min0, x0);
      min1 = hn::Min(min1, x1);
      min2 = hn::Min(min2, x2);
      min3 = hn::Min(min3, x3);
      max0 = hn::Max(max0, x0);
      max1 = hn::Max(max1, x1);
      max2 = hn::Max(max2, x2);
      max3 = hn::Max(max3, x3);
      t0.Add(d, x0);
      t1.Add(d, x1);
      t2.Add(d, x2);
      t3.Add(d, x3);
    }
    for (; i + lanes <= count; i += lanes) {
      const auto x = LoadReals<kType>(d, in + i * size);
      min0 = hn::Min(min0, x);
      max0 = hn::Max(max0, x);
      t0.Add(d, x);
    }
    t0.Add(d, t1);
    t2.Add(d, t3);
    t0.Add(d, t2);
    is_finite = t0.AllFinite(d);
    zeros = is_finite ? t0.Zeros(d) : 0;
    result.min = hn::GetLane(
        hn::MinOfLanes(d, hn::Min(hn::Min(min0, min1), hn::Min(min2, min3))));
    result.max = hn::GetLane(
        hn::MaxOfLanes(d, hn::Max(hn::Max(max0, max1), hn::Max(max2, max3))));
  }
  for (; i < count; ++i) {
    const T x = LoadElement<T>(kType, in, i);
    is_finite &= std::isfinite(x);
    result.min = x < result.min ? x : result.min;
    result.max = x > result.max ? x : result.max;
    zeros += x == 0;
  }
  if (HWY_UNLIKELY(!is_finite)) {
    *all_finite = false;
    return ReduceSpecial<kType>(in, count, counts);
  }
  counts->zero += zeros;
  return result;
}

// Stores min[i] and max[i] as extremes.
template <typename T>
void StoreExtremes(const T* HWY_RESTRICT min, const T* HWY_RESTRICT max,
                   int64_t count, Extremes* HWY_RESTRICT out) {
  for (int64_t i = 0; i < count; ++i) out[i] = {min[i], max[i]};
}

void MergeExtremes(const Extremes* from, int64_t count, Extremes* to) {
  static_assert(sizeof(Extremes) == 2 * sizeof(double));
  const hn::ScalableTag<double> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; (i + 1) * lanes <= count * 2; ++i) {
    const double* in = &from->min + i * lanes;
    double* out = &to->min + i * lanes;
    const auto a = hn::LoadU(d, in);
    const auto b = hn::LoadU(d, out);
    // Adding zero: see Extremes::Merge.
    hn::StoreU(hn::Add(hn::OddEven(hn::Max(a, b), hn::Min(a, b)), hn::Zero(d)),
               d, out);
  }
  const int64_t done = i * lanes / 2;
  MergeExtremesScalar(from + done, count - done, to + done);
}

// Extremes of each of up to kTileColumns columns of a [rows, columns] matrix in
// which some elements are not finite.
template <ElementType kType>
HWY_NOINLINE void ReduceColumnsSpecial(const uint8_t* HWY_RESTRICT in,
                                       int64_t stride_bytes, int64_t rows,
                                       int64_t columns, int64_t scale_index,
                                       Real<kType>* HWY_RESTRICT min,
                                       Real<kType>* HWY_RESTRICT max,
                                       PartialStatistics* partial) {
  using T = Real<kType>;
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t size = ElementSizeBytes(kType);
  const TypedExtremes<T> none;
  std::fill_n(min, columns, none.min);
  std::fill_n(max, columns, none.max);
  for (int64_t row = 0; row < rows; ++row, in += stride_bytes) {
    CountSpecial<kType>(in, columns, &partial->counts);
    int64_t k = 0;
    while (k < columns) {
      if (k + lanes <= columns) {
        const auto x = LoadReals<kType>(d, in + k * size);
        if (hn::AllTrue(d, hn::IsFinite(x))) {
          hn::StoreU(hn::Min(hn::LoadU(d, min + k), x), d, min + k);
          hn::StoreU(hn::Max(hn::LoadU(d, max + k), x), d, max + k);
          k += lanes;
          continue;
        }
      }
      for (const int64_t end = std::min(k + lanes, columns); k < end; ++k) {
        const T x = LoadElement<T>(kType, in, k);
        if (std::isfinite(x)) {
          min[k] = std::min(min[k], x);
          max[k] = std::max(max[k], x);
        } else {
          partial->MarkNonFinite(scale_index + k);
        }
      }
    }
  }
}

// Like ReduceColumnsSpecial, but for elements that are all finite. Returns true
// if they are: otherwise nothing was counted, and the extremes are wrong.
template <ElementType kType>
bool ReduceColumns(const uint8_t* HWY_RESTRICT in, int64_t stride_bytes,
                   int64_t rows, int64_t columns, Real<kType>* HWY_RESTRICT min,
                   Real<kType>* HWY_RESTRICT max, ElementCounts* counts) {
  using T = Real<kType>;
  using D = hn::ScalableTag<T>;
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t size = ElementSizeBytes(kType);
  const TypedExtremes<T> none;
  std::fill_n(min, columns, none.min);
  std::fill_n(max, columns, none.max);
  const int64_t whole = columns / lanes * lanes;
  Tally<D> t0, t1;
  int64_t zeros = 0;
  bool is_finite = true;
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) {
    const uint8_t* r0 = in + row * stride_bytes;
    const uint8_t* r1 = r0 + stride_bytes;
    const uint8_t* r2 = r1 + stride_bytes;
    const uint8_t* r3 = r2 + stride_bytes;
    for (int64_t k = 0; k < whole; k += lanes) {
      const auto x0 = LoadReals<kType>(d, r0 + k * size);
      const auto x1 = LoadReals<kType>(d, r1 + k * size);
      const auto x2 = LoadReals<kType>(d, r2 + k * size);
      const auto x3 = LoadReals<kType>(d, r3 + k * size);
      t0.Add(d, x0);
      t1.Add(d, x1);
      t0.Add(d, x2);
      t1.Add(d, x3);
      const auto low = hn::Min(hn::Min(x0, x1), hn::Min(x2, x3));
      const auto high = hn::Max(hn::Max(x0, x1), hn::Max(x2, x3));
      hn::StoreU(hn::Min(hn::LoadU(d, min + k), low), d, min + k);
      hn::StoreU(hn::Max(hn::LoadU(d, max + k), high), d, max + k);
    }
  }
  for (; row < rows; ++row) {
    const uint8_t* r = in + row * stride_bytes;
    for (int64_t k = 0; k < whole; k += lanes) {
      const auto x = LoadReals<kType>(d, r + k * size);
      t0.Add(d, x);
      hn::StoreU(hn::Min(hn::LoadU(d, min + k), x), d, min + k);
      hn::StoreU(hn::Max(hn::LoadU(d, max + k), x), d, max + k);
    }
  }
  for (int64_t k = whole; k < columns; ++k) {
    for (row = 0; row < rows; ++row) {
      const T x = LoadElement<T>(kType, in + row * stride_bytes, k);
      is_finite &= std::isfinite(x);
      zeros += x == 0;
      min[k] = x < min[k] ? x : min[k];
      max[k] = x > max[k] ? x : max[k];
    }
  }
  t0.Add(d, t1);
  if (!is_finite || !t0.AllFinite(d)) return false;
  counts->zero += zeros + t0.Zeros(d);
  return true;
}

// A matrix whose columns have a scale index each.
template <ElementType kType>
void AddMatrix(const uint8_t* HWY_RESTRICT in, int64_t rows, int64_t columns,
               int64_t scale_index, PartialStatistics* partial) {
  using T = Real<kType>;
  const int64_t size = ElementSizeBytes(kType);
  HWY_ALIGN T min[kTileColumns];
  HWY_ALIGN T max[kTileColumns];
  Extremes extremes[kTileColumns];
  PartialStatistics::Segment& segment =
      FindSegment(scale_index, columns, partial);
  Extremes* to = segment.extremes.data() + (scale_index - segment.scale_index);
  for (int64_t k = 0; k < columns; k += kTileColumns) {
    const int64_t width = std::min(columns - k, kTileColumns);
    if (HWY_UNLIKELY(!ReduceColumns<kType>(in + k * size, columns * size, rows,
                                           width, min, max,
                                           &partial->counts))) {
      ReduceColumnsSpecial<kType>(in + k * size, columns * size, rows, width,
                                  scale_index + k, min, max, partial);
    }
    StoreExtremes(min, max, width, extremes);
    MergeExtremes(extremes, width, to + k);
  }
}

// A row whose blocks are consecutive elements.
template <ElementType kType>
void AddRow(const uint8_t* HWY_RESTRICT in, const BlockLayout::Row& row,
            bool is_far, PartialStatistics* partial) {
  const int64_t size = ElementSizeBytes(kType);
  // Positions are those from the beginning of the first block.
  const int64_t end = row.offset + row.count;
  const auto reduce_one = [&](int64_t* position) HWY_ATTR {
    const int64_t index = *position / row.block;
    const int64_t part = std::min((index + 1) * row.block, end) - *position;
    bool all_finite = true;
    const auto one = Reduce<kType>(in + (*position - row.offset) * size, part,
                                   is_far, &partial->counts, &all_finite);
    if (!all_finite) partial->MarkNonFinite(row.scale_index + index);
    *position += part;
    return Extremes{one.min, one.max};
  };
  int64_t position = row.offset;
  if constexpr (kHasGroups && kType != ElementType::kFloat64) {
    using D = hn::ScalableTag<float>;
    const D d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    if (row.block <= kMaxGroup && row.block % lanes == 0 &&
        end >= (lanes + 1) * row.block) {
      const int64_t blocks = (end + row.block - 1) / row.block;
      PartialStatistics::Segment& segment =
          FindSegment(row.scale_index, blocks, partial);
      Extremes* to =
          segment.extremes.data() + (row.scale_index - segment.scale_index);
      const auto add_one = [&]() HWY_ATTR {
        Extremes& extremes = to[position / row.block];
        extremes.Merge(reduce_one(&position));
      };
      if (position > 0) add_one();
      Tally<D> total;
      while (position + lanes * row.block <= end) {
        Tally<D> tally;
        const uint8_t* groups = in + (position - row.offset) * size;
        if (is_far) FetchAhead(groups, lanes * row.block * size);
        const auto reduced = ReduceGroups<kType>(d, groups, row.block, tally);
        if (HWY_UNLIKELY(!tally.AllFinite(d))) {
          for (int64_t g = 0; g < lanes; ++g) add_one();
          continue;
        }
        total.Add(d, tally);
        HWY_ALIGN float min[hn::MaxLanes(D())];
        HWY_ALIGN float max[hn::MaxLanes(D())];
        Extremes extremes[hn::MaxLanes(D())];
        hn::Store(reduced.min, d, min);
        hn::Store(reduced.max, d, max);
        StoreExtremes(min, max, lanes, extremes);
        MergeExtremes(extremes, lanes, to + position / row.block);
        position += lanes * row.block;
      }
      partial->counts.zero += total.Zeros(d);
      while (position < end) add_one();
      return;
    }
  }
  while (position < end) {
    const int64_t scale_index = row.scale_index + position / row.block;
    partial->singles.push_back({scale_index, reduce_one(&position)});
  }
}

template <ElementType kType>
void StatisticsTyped(const StatisticsRange& range, PartialStatistics* partial) {
  const int64_t size = ElementSizeBytes(kType);
  const bool is_far = range.layout.element_count() * size > kFarBytes;
  partial->counts.total += range.count;
  BlockLayout::RowCursor cursor(range.layout, range.first, range.count);
  BlockLayout::Row row;
  bool has_row = cursor.Next(&row);
  while (has_row) {
    const BlockLayout::Row first = row;
    const uint8_t* in = range.in + (row.begin - range.first) * size;
    has_row = cursor.Next(&row);
    if (first.block > 1) {
      AddRow<kType>(in, first, is_far, partial);
      continue;
    }
    // Rows that step through the same scale indices follow each other.
    int64_t rows = 1;
    for (; has_row && row.scale_index == first.scale_index &&
           row.count == first.count;
         ++rows) {
      has_row = cursor.Next(&row);
    }
    AddMatrix<kType>(in, rows, first.count, first.scale_index, partial);
  }
}

void StatisticsSimd(const StatisticsRange& range, PartialStatistics* partial) {
  switch (range.type) {
    case ElementType::kFloat32:
      StatisticsTyped<ElementType::kFloat32>(range, partial);
      return;
    case ElementType::kFloat16:
      StatisticsTyped<ElementType::kFloat16>(range, partial);
      return;
    case ElementType::kBfloat16:
      StatisticsTyped<ElementType::kBfloat16>(range, partial);
      return;
    case ElementType::kFloat64:
      StatisticsTyped<ElementType::kFloat64>(range, partial);
      return;
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
HWY_EXPORT(MergeExtremes);

}  // namespace

void ComputeStatistics(const StatisticsRange& range,
                       PartialStatistics* partial) {
  if (internal::UsesScalarKernels()) {
    StatisticsScalar(range, partial);
  } else {
    HWY_DYNAMIC_DISPATCH(StatisticsSimd)(range, partial);
  }
}

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
  // Whole rows of many columns with a scale index each go into the histograms
  // by columns.
  const int64_t columns = layout.row_size();
  const int64_t rows_first = (first + columns - 1) / columns * columns;
  const int64_t rows_end = (first + count) / columns * columns;
  const bool by_columns = histogram_update.has_value() && columns > 1 &&
                          layout.row_block() == 1 &&
                          layout.rows_share_scales() && rows_first < rows_end;
  absl::Mutex mutex;
  const auto run_task = [&](int64_t task) {
    const int64_t begin = task * kTaskElements;
    const StatisticsRange range{layout, type, first + begin,
                                std::min(kTaskElements, count - begin),
                                data + begin * ElementSizeBytes(type)};
    PartialStatistics partial;
    ComputeStatistics(range, &partial);
    // The elements are in the cache now.
    if (histogram_update.has_value() && !by_columns) {
      histogram_update->Add(range);
    }
    // Merging commutes, so that the order of the tasks does not matter.
    absl::MutexLock lock(&mutex);
    counts_.Merge(partial.counts);
    for (const PartialStatistics::Single& single : partial.singles) {
      extremes_[single.scale_index].Merge(single.extremes);
    }
    for (const PartialStatistics::Segment& segment : partial.segments) {
      const int64_t scales = static_cast<int64_t>(segment.extremes.size());
      Extremes* to = extremes_.data() + segment.scale_index;
      if (is_scalar) {
        MergeExtremesScalar(segment.extremes.data(), scales, to);
      } else {
        HWY_DYNAMIC_DISPATCH(MergeExtremes)
        (segment.extremes.data(), scales, to);
      }
    }
    if (partial.non_finite.empty()) return;
    if (has_non_finite_.empty()) has_non_finite_.resize(extremes_.size());
    for (const int64_t scale_index : partial.non_finite) {
      has_non_finite_[scale_index] = true;
    }
  };
  ParallelFor(pool, tasks, run_task);
  const auto part = [&](int64_t begin, int64_t end) {
    return StatisticsRange{layout, type, begin, end - begin,
                           data + (begin - first) * ElementSizeBytes(type)};
  };
  if (by_columns) {
    constexpr int64_t kStrip = HistogramUpdate::kMaxColumns;
    ParallelFor(pool, (columns + kStrip - 1) / kStrip, [&](int64_t strip) {
      const int64_t column = strip * kStrip;
      histogram_update->AddColumns(part(rows_first, rows_end), column,
                                   std::min(kStrip, columns - column));
    });
    histogram_update->Add(part(first, rows_first));
    histogram_update->Add(part(rows_end, first + count));
  }
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

TensorStatistics TensorStatistics::Outline(int64_t scale_count) const {
  TensorStatistics outline(scale_count, mantissa_bits_);
  outline.counts_ = counts_;
  if (!has_non_finite_.empty()) outline.has_non_finite_.resize(scale_count);
  return outline;
}

TensorStatistics TensorStatistics::WithoutHistograms() const {
  TensorStatistics outline(0);
  outline.counts_ = counts_;
  outline.extremes_ = extremes_;
  outline.has_non_finite_ = has_non_finite_;
  return outline;
}

void TensorStatistics::MergeScaleIndex(const TensorStatistics& from,
                                       int64_t from_index, int64_t to_index) {
  extremes_[to_index].Merge(from.extremes_[from_index]);
  if (mantissa_bits_ > 0) {
    Histogram& histogram = histograms_[to_index];
    histogram_bytes_ -= histogram.memory_bytes();
    histogram.Merge(from.histograms_[from_index]);
    histogram_bytes_ += histogram.memory_bytes();
  }
  if (from.has_non_finite(from_index)) {
    has_non_finite_.resize(extremes_.size());
    has_non_finite_[to_index] = true;
  }
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
