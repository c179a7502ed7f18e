#include "core/evaluate/evaluate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/evaluate/evaluate_kernel.h"
#include "core/simd_internal.h"
#include "core/types/float_convert.h"
#include "core/types/portable_log.h"
#include "hwy/cache_control.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/evaluate/evaluate.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/evaluate/pair_sums-inl.h"
#include "core/formats/float_codec-inl.h"
#include "core/types/float_convert-inl.h"

#ifndef QUANTD_CORE_EVALUATE_EVALUATE_ONCE
#define QUANTD_CORE_EVALUATE_EVALUATE_ONCE
namespace quantd::core {
namespace {

// Columns of a task, a multiple of any vector's lanes, and rows that are added
// to a vector of them at a time.
constexpr int64_t kTaskColumns = 128;
constexpr int64_t kTileRows = 4;

// Rows of the same consecutive scale indices, an element for each, one row
// right after the other in memory.
struct ColumnPanel {
  // Index of the first element.
  int64_t first;
  int64_t scale_index;
  int64_t columns;
  int64_t rows;
  const uint8_t* in;
};

}  // namespace
}  // namespace quantd::core
#endif  // QUANTD_CORE_EVALUATE_EVALUATE_ONCE

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

void EvaluateSimd(const EvaluateRange& range, ErrorSums* leaves,
                  std::vector<ScalePortion>* portions,
                  DistributionCounts* distribution) {
  EvaluateScalar(range, leaves, portions, distribution);
}

void AddColumnsSimd(const EvaluateRange&, const ColumnPanel&, int64_t, int64_t,
                    ErrorSums*) {}

#else

constexpr int64_t kLeaf = Evaluator::kLeafElements;

template <CodeKind kKind>
HWY_INLINE const auto& GridOf(const CodeValues& values) {
  if constexpr (kKind == CodeKind::kFloat) {
    return *values.float_grid;
  } else {
    return *values.codebook_grid;
  }
}

// The run's scales and zero points, or its one scale and zero point if they do
// not step.
struct RunScales {
  const float* scale;
  // Null: all zero.
  const int32_t* zero_point;
};

RunScales ScalesAt(const Encoding& encoding, int64_t scale_index) {
  return {encoding.scale.data() + scale_index,
          encoding.zero_point.empty()
              ? nullptr
              : encoding.zero_point.data() + scale_index};
}

// Elements x, their quotients (integers: rounded, but not clamped), and x'.
template <class D>
struct Restored {
  HWY_INLINE Restored() {}

  hn::Vec<D> x;
  hn::Vec<D> quotient;
  hn::Vec<D> y;
  // Integers: the codes' range, less the zero point.
  hn::Vec<D> low;
  hn::Vec<D> high;
};

// Round, of what is in range.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V RoundInRange(D d, const FloatGrid& grid, V q) {
  const auto rounded = RoundMagnitude(d, grid, hn::Abs(q));
  const V value = hn::CopySignToAbs(hn::Sub(rounded.sum, rounded.magic), q);
  // Makes +0 of -0.
  return grid.has_negative_zero ? value : hn::Add(value, hn::Zero(d));
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE V RoundInRange(D d, const CodebookGrid& grid, V q) {
  return Round(d, grid, q);
}

// Lanes(d) elements from the i-th of a run on. kInRange: x' of elements that
// are not good may be anything.
template <CodeKind kKind, int kStep, bool kInRange, class D,
          class V = hn::Vec<D>>
HWY_INLINE Restored<D> Restore(D d, V x, const RunScales& run, int64_t i,
                               const EvaluateRange& range) {
  using T = hn::TFromD<D>;
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<float, D> df;
  const auto scale_f =
      kStep == 1 ? hn::LoadU(df, run.scale + i) : hn::Set(df, *run.scale);
  V scale;
  if constexpr (std::is_same_v<T, double>) {
    scale = hn::PromoteTo(d, scale_f);
  } else {
    scale = scale_f;
  }
  Restored<D> r;
  r.x = x;
  const V quotient = hn::Div(x, scale);
  if constexpr (kKind == CodeKind::kInteger) {
    auto zero = hn::Zero(di);
    if (run.zero_point != nullptr) {
      zero = kStep == 1 ? hn::LoadU(di, run.zero_point + i)
                        : hn::Set(di, *run.zero_point);
    }
    const auto low = hn::Sub(hn::Set(di, range.encoding.qmin), zero);
    const auto high = hn::Sub(hn::Set(di, range.encoding.qmax), zero);
    if constexpr (std::is_same_v<T, double>) {
      r.low = hn::PromoteTo(d, low);
      r.high = hn::PromoteTo(d, high);
    } else {
      r.low = hn::ConvertTo(d, low);
      r.high = hn::ConvertTo(d, high);
    }
    r.quotient = hn::Round(quotient);
    r.y = hn::Mul(hn::Min(hn::Max(r.quotient, r.low), r.high), scale);
  } else {
    r.low = r.high = hn::Zero(d);
    r.quotient = quotient;
    const auto& grid = GridOf<kKind>(range.values);
    r.y = hn::Mul(
        kInRange ? RoundInRange(d, grid, quotient) : Round(d, grid, quotient),
        scale);
  }
  return r;
}

// Lanes that count and are not clipped.
template <CodeKind kKind, class D>
HWY_INLINE hn::Mask<D> IsGood(D d, const Restored<D>& r,
                              const EvaluateRange& range) {
  // Quotients within the range are those of finite elements.
  if constexpr (kKind == CodeKind::kInteger) {
    const auto in_range =
        hn::And(hn::Ge(r.quotient, r.low), hn::Le(r.quotient, r.high));
    return hn::And(in_range, hn::IsFinite(r.y));
  } else {
    return hn::And(InRange(d, GridOf<kKind>(range.values), r.quotient),
                   hn::IsFinite(r.y));
  }
}

// Kinds that a lane counts as. Clipped ones are finite.
template <class D>
struct LaneKinds {
  HWY_INLINE LaneKinds() {}

  hn::Mask<D> finite;
  hn::Mask<D> low;
  hn::Mask<D> high;
};

template <CodeKind kKind, class D>
HWY_INLINE LaneKinds<D> KindsOf(D d, const Restored<D>& r,
                                const EvaluateRange& range) {
  LaneKinds<D> kinds;
  kinds.finite = hn::And(hn::IsFinite(r.x), hn::IsFinite(r.y));
  if constexpr (kKind == CodeKind::kInteger) {
    kinds.low = hn::And(kinds.finite, hn::Lt(r.quotient, r.low));
    kinds.high = hn::And(kinds.finite, hn::Gt(r.quotient, r.high));
  } else {
    const auto& grid = GridOf<kKind>(range.values);
    kinds.low = hn::And(kinds.finite, IsBelow(d, grid, r.quotient));
    kinds.high = hn::And(kinds.finite, IsAbove(d, grid, r.quotient));
  }
  return kinds;
}

// The parts of Restore that are the same for all elements of one scale index,
// for integers whose x' is found without a division. n, an integer near x / s
// within the range, is the code's if it is certain: with u the unit roundoff
// and N the largest |n|, |n s - x| < s (1/2 - 4 u (N + 1)) leaves neither the
// rounding of x / s nor those of n s and its difference from x (at most u (N +
// 1) each, in units of s) a way across a tie or the end of the range. All
// other elements are divided.
template <typename T>
class CertainIntegers {
 public:
  // Adding it rounds to nearest, ties to even.
  static constexpr T kMagic = T{1.5} / std::numeric_limits<T>::epsilon();

  explicit CertainIntegers(const Encoding& encoding) : encoding_(encoding) {
    SetZeroPoint(0);
  }

  // False if it is not worth trying.
  HWY_INLINE bool SetRun(const RunScales& run) {
    const int32_t zero_point = run.zero_point == nullptr ? 0 : *run.zero_point;
    if (zero_point != zero_point_) SetZeroPoint(zero_point);
    scale = *run.scale;
    reciprocal = T{1} / scale;
    limit = scale * margin_;
    // Far from the ends of the exponents nothing underflows or overflows.
    return has_few_levels_ && scale >= T{0x1p-100f} && scale <= T{0x1p100f};
  }

  // Scale of the run and its reciprocal, and the ends of its quotients.
  T scale = 0;
  T reciprocal = 0;
  T low = 0;
  T high = 0;
  // Errors below it are certain.
  T limit = 0;

 private:
  // With more than these too little is certain.
  static constexpr double kMaxLevels = sizeof(T) == 4 ? 0x1p10 : 0x1p24;

  void SetZeroPoint(int32_t zero_point) {
    constexpr T kUnit = std::numeric_limits<T>::epsilon() / 2;
    zero_point_ = zero_point;
    low = static_cast<T>(encoding_.qmin - zero_point);
    high = static_cast<T>(encoding_.qmax - zero_point);
    const T levels = std::max(-low, high) + 1;
    has_few_levels_ = levels <= kMaxLevels;
    margin_ = T{0.5} - 4 * kUnit * levels;
  }

  const Encoding& encoding_;
  int32_t zero_point_;
  T margin_;
  bool has_few_levels_;
};

// Lanes of `mask` with a < b.
template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Mask<D> AndLess(D d, hn::Mask<D> mask, V a, V b) {
#if HWY_TARGET == HWY_AVX3
  // One instruction instead of two.
  hn::Mask<D> less;
  if constexpr (sizeof(V) == 64 && sizeof(hn::TFromD<D>) == 4) {
    less.raw = _mm512_mask_cmp_ps_mask(mask.raw, a.raw, b.raw, _CMP_LT_OQ);
    return less;
  } else if constexpr (sizeof(V) == 64) {
    less.raw = _mm512_mask_cmp_pd_mask(mask.raw, a.raw, b.raw, _CMP_LT_OQ);
    return less;
  }
#endif
  return hn::And(mask, hn::Lt(a, b));
}

// Calls vector(i) for vectors that cover [0, count), the last of which may
// overlap the one before.
// Requires: count >= lanes.
template <class Function>
HWY_INLINE void ForEachOverlapping(int64_t lanes, int64_t count,
                                   const Function& vector) {
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) vector(i);
  if (i < count) vector(count - lanes);
}

// Restores elements of one scale index to `real` and `restored`. False if one
// of them is not certain.
template <typename T>
HWY_INLINE bool RestoreCertain(const CertainIntegers<T>& p,
                               const uint8_t* HWY_RESTRICT in, int64_t count,
                               T* HWY_RESTRICT real, T* HWY_RESTRICT restored) {
  const hn::ScalableTag<T> d;
  const auto magic = hn::Set(d, CertainIntegers<T>::kMagic);
  const auto reciprocal = hn::Set(d, p.reciprocal);
  const auto scale = hn::Set(d, p.scale);
  const auto low = hn::Set(d, p.low);
  const auto high = hn::Set(d, p.high);
  const auto limit = hn::Set(d, p.limit);
  auto good = hn::Eq(limit, limit);
  ForEachOverlapping(
      static_cast<int64_t>(hn::Lanes(d)), count, [&](int64_t i) HWY_ATTR {
        const uint8_t* at = in + i * static_cast<int64_t>(sizeof(T));
        const auto x = LoadBytes(d, at);
        const auto rounded = hn::Sub(hn::MulAdd(x, reciprocal, magic), magic);
        const auto y = hn::Mul(hn::Min(hn::Max(rounded, low), high), scale);
        good = AndLess(d, good, hn::Abs(hn::Sub(y, x)), limit);
        hn::StoreU(x, d, real + i);
        hn::StoreU(y, d, restored + i);
      });
  return hn::AllTrue(d, good);
}

// Restores elements of a run to `real` and `restored`. False if one of them is
// clipped or does not count.
template <CodeKind kKind, int kStep, typename T>
HWY_INLINE bool RestoreGood(const EvaluateRange& range, const RunScales& run,
                            int64_t first, const uint8_t* HWY_RESTRICT in,
                            int64_t count, T* HWY_RESTRICT real,
                            T* HWY_RESTRICT restored) {
  const hn::ScalableTag<T> d;
  auto good = hn::Eq(hn::Zero(d), hn::Zero(d));
  ForEachOverlapping(
      static_cast<int64_t>(hn::Lanes(d)), count, [&](int64_t i) HWY_ATTR {
        const uint8_t* at = in + i * static_cast<int64_t>(sizeof(T));
        const auto r = Restore<kKind, kStep, true>(d, LoadBytes(d, at), run,
                                                   first + i, range);
        good = hn::And(good, IsGood<kKind>(d, r, range));
        hn::StoreU(r.x, d, real + i);
        hn::StoreU(r.y, d, restored + i);
      });
  return hn::AllTrue(d, good);
}

// Restores elements of a run to `real` and `restored`, both 0 where either is
// not finite, so that it adds nothing to any sum.
template <CodeKind kKind, int kStep, typename T>
void RestoreAny(const EvaluateRange& range, const RunScales& run, int64_t first,
                const uint8_t* HWY_RESTRICT in, int64_t count,
                T* HWY_RESTRICT real, T* HWY_RESTRICT restored,
                PairCounts* counts) {
  const hn::ScalableTag<T> d;
  const hn::CappedTag<T, 1> d1;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto vector = [&](auto tag, int64_t i) HWY_ATTR {
    const auto x = LoadBytes(tag, in + i * static_cast<int64_t>(sizeof(T)));
    const auto r = Restore<kKind, kStep, false>(tag, x, run, first + i, range);
    const auto kinds = KindsOf<kKind>(tag, r, range);
    hn::StoreU(hn::IfThenElseZero(kinds.finite, r.x), tag, real + i);
    hn::StoreU(hn::IfThenElseZero(kinds.finite, r.y), tag, restored + i);
    counts->non_finite +=
        static_cast<int64_t>(hn::Lanes(tag)) -
        static_cast<int64_t>(hn::CountTrue(tag, kinds.finite));
    counts->clipped_low += hn::CountTrue(tag, kinds.low);
    counts->clipped_high += hn::CountTrue(tag, kinds.high);
  };
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) vector(d, i);
  for (; i < count; ++i) vector(d1, i);
}

// Elements that are done over when one of them is clipped or the like.
constexpr int64_t kPiece = 128;

template <CodeKind kKind, int kStep, typename T>
PairCounts RestoreRun(const EvaluateRange& range, int64_t scale_index,
                      CertainIntegers<T>* integers,
                      const uint8_t* HWY_RESTRICT in, int64_t count,
                      T* HWY_RESTRICT real, T* HWY_RESTRICT restored) {
  constexpr bool kMayBeCertain = kKind == CodeKind::kInteger && kStep == 0;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  const RunScales run = ScalesAt(range.encoding, scale_index);
  const bool tries = kMayBeCertain && integers->SetRun(run);
  PairCounts counts;
  for (int64_t i = 0; i < count; i += kPiece) {
    const int64_t piece = std::min(kPiece, count - i);
    const uint8_t* piece_in = in + i * static_cast<int64_t>(sizeof(T));
    bool is_done = false;
    if (piece < lanes) {
      // Too short for a vector.
    } else if (tries) {
      is_done =
          RestoreCertain(*integers, piece_in, piece, real + i, restored + i);
    } else {
      is_done = RestoreGood<kKind, kStep>(range, run, i, piece_in, piece,
                                          real + i, restored + i);
    }
    if (HWY_LIKELY(is_done)) continue;
    RestoreAny<kKind, kStep>(range, run, i, piece_in, piece, real + i,
                             restored + i, &counts);
  }
  return counts;
}

template <CodeKind kKind, typename T>
void EvaluateKind(const EvaluateRange& range, ErrorSums* leaves,
                  std::vector<ScalePortion>* portions,
                  DistributionCounts* distribution) {
  const bool widens = sizeof(T) == 4 && range.type != ElementType::kFloat32;
  const int64_t element_bytes = ElementSizeBytes(range.type);
  HWY_ALIGN float wide[kLeaf];
  HWY_ALIGN T real[kLeaf];
  HWY_ALIGN T restored[kLeaf];
  CertainIntegers<T> integers(range.encoding);
  for (int64_t begin = 0; begin < range.count; begin += kLeaf) {
    const int64_t count = std::min(range.count - begin, kLeaf);
    const int64_t first = range.first + begin;
    const uint8_t* in = range.in + begin * element_bytes;
    if (widens) {
      Widen(range.type, in, count, wide);
      in = reinterpret_cast<const uint8_t*>(wide);
    }
    const Ahead ahead = {range.in + (begin + kLeaf) * element_bytes,
                         element_bytes};
    PairCounts leaf_counts;
    // The one run of the leaf, and its portion.
    bool is_portion = false;
    range.layout.ForEachRun(
        first, count, [&](const BlockLayout::Run& run) HWY_ATTR {
          const int64_t i = run.begin - first;
          const uint8_t* run_in = in + i * static_cast<int64_t>(sizeof(T));
          const PairCounts counts =
              run.scale_step == 1
                  ? RestoreRun<kKind, 1>(range, run.scale_index, &integers,
                                         run_in, run.count, real + i,
                                         restored + i)
                  : RestoreRun<kKind, 0>(range, run.scale_index, &integers,
                                         run_in, run.count, real + i,
                                         restored + i);
          leaf_counts.Add(counts);
          if (portions == nullptr) return;
          portions->push_back({run.scale_index, ErrorSums()});
          is_portion = run.count == count;
          if (!is_portion) {
            portions->back().sums = SumPairs(real + i, restored + i, run.count,
                                             counts, range.sums, ahead);
          }
        });
    *leaves = SumPairs(real, restored, count, leaf_counts, range.sums, ahead);
    if (is_portion) portions->back().sums = *leaves;
    ++leaves;
    if (distribution != nullptr) {
      distribution->Add(real, restored, count, leaf_counts.non_finite);
    }
  }
}

template <typename T>
void EvaluateTyped(const EvaluateRange& range, ErrorSums* leaves,
                   std::vector<ScalePortion>* portions,
                   DistributionCounts* distribution) {
  switch (range.values.kind) {
    case CodeKind::kInteger:
      return EvaluateKind<CodeKind::kInteger, T>(range, leaves, portions,
                                                 distribution);
    case CodeKind::kFloat:
      return EvaluateKind<CodeKind::kFloat, T>(range, leaves, portions,
                                               distribution);
    case CodeKind::kCodebook:
      break;
  }
  EvaluateKind<CodeKind::kCodebook, T>(range, leaves, portions, distribution);
}

// Up to a vector of columns while rows are added to them.
template <typename T>
struct ColumnState {
  static constexpr int64_t kLanes = hn::MaxLanes(hn::ScalableTag<T>());
  using Count = hn::TFromD<hn::RebindToSigned<hn::ScalableTag<T>>>;

  // The columns past the last are never stored.
  int64_t count;
  HWY_ALIGN float scale[kLanes];
  HWY_ALIGN int32_t zero_point[kLanes];
  LaneArrays lanes;
  HWY_ALIGN T max_relative[kLanes] = {};
  // Less the elements that are so.
  HWY_ALIGN Count finite[kLanes] = {};
  HWY_ALIGN Count flushed[kLanes] = {};
  HWY_ALIGN Count clipped_low[kLanes] = {};
  HWY_ALIGN Count clipped_high[kLanes] = {};
};

// `sums` are those of the panel's columns.
template <typename T>
void StartColumns(const EvaluateRange& range, const ColumnPanel& panel,
                  int64_t column, const ErrorSums* sums,
                  ColumnState<T>* state) {
  const std::vector<int32_t>& zero_point = range.encoding.zero_point;
  state->count = std::min(ColumnState<T>::kLanes, panel.columns - column);
  for (int64_t c = 0; c < ColumnState<T>::kLanes; ++c) {
    const int64_t source = column + std::min(c, state->count - 1);
    const int64_t scale_index = panel.scale_index + source;
    state->scale[c] = range.encoding.scale[scale_index];
    state->zero_point[c] = zero_point.empty() ? 0 : zero_point[scale_index];
    state->lanes.squared[c] = sums[source].squared_error;
    state->lanes.absolute[c] = sums[source].absolute_error;
    state->lanes.relative[c] = sums[source].relative_error;
    state->lanes.signal[c] = sums[source].signal;
    state->lanes.reconstructed[c] = sums[source].reconstructed;
    state->lanes.product[c] = sums[source].product;
  }
}

// Adds a few rows, one after the other.
template <CodeKind kKind, typename T>
void AddRows(const EvaluateRange& range, const ColumnPanel& panel,
             int64_t column, int64_t first_row, int64_t end_row,
             ColumnState<T>* state) {
  const hn::ScalableTag<T> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::ScalableTag<double> d64;
  constexpr int64_t kLanes = ColumnState<T>::kLanes;
  constexpr int64_t kHalf = hn::MaxLanes(decltype(d64)());
  constexpr bool kFromFloat = std::is_same_v<T, float>;
  const int64_t count = state->count;
  const int64_t element_bytes = ElementSizeBytes(range.type);
  const int64_t row_bytes = panel.columns * element_bytes;
  const bool widens = element_bytes < static_cast<int64_t>(sizeof(T));
  const bool is_direct = count == kLanes && !widens;
  const RunScales run{state->scale, state->zero_point};

  auto low = state->lanes.Load(d64, 0);
  auto high = state->lanes.Load(d64, kLanes - kHalf);
  auto max_relative = hn::Load(d, state->max_relative);
  auto finite = hn::Load(di, state->finite);
  auto flushed = hn::Load(di, state->flushed);
  auto clipped_low = hn::Load(di, state->clipped_low);
  auto clipped_high = hn::Load(di, state->clipped_high);
  const auto subtract = [&](hn::Vec<decltype(di)> counts,
                            hn::Mask<decltype(d)> mask) HWY_ATTR {
    return hn::Add(counts, hn::VecFromMask(di, hn::RebindMask(di, mask)));
  };
  HWY_ALIGN T terms[3 * kLanes];
  T* const real = terms;
  T* const restored = terms + kLanes;
  T* const relative = terms + 2 * kLanes;
  HWY_ALIGN T elements[kLanes] = {};
  for (int64_t row = first_row; row < end_row; ++row) {
    const uint8_t* in = panel.in + row * row_bytes + column * element_bytes;
    // Prefetches the same columns a few rows on: they lie too far apart for
    // processors to foresee.
    hwy::Prefetch(in + kTileRows * row_bytes);
    if (!is_direct) {
      if constexpr (kFromFloat) {
        if (widens) {
          Widen(range.type, in, count, elements);
        } else {
          std::memcpy(elements, in, count * sizeof(T));
        }
      } else {
        std::memcpy(elements, in, count * sizeof(T));
      }
    }
    const auto element = is_direct ? LoadBytes(d, in) : hn::Load(d, elements);
    const auto r = Restore<kKind, 1, false>(d, element, run, 0, range);
    const auto kinds = KindsOf<kKind>(d, r, range);
    const auto x = hn::IfThenElseZero(kinds.finite, r.x);
    const auto y = hn::IfThenElseZero(kinds.finite, r.y);
    const auto errors = ErrorsOf(d, x, y);
    finite = subtract(finite, kinds.finite);
    flushed = subtract(flushed, errors.flushed);
    clipped_low = subtract(clipped_low, kinds.low);
    clipped_high = subtract(clipped_high, kinds.high);
    max_relative = hn::Max(max_relative, errors.relative);
    if constexpr (kFromFloat) {
      hn::Store(x, d, real);
      hn::Store(y, d, restored);
      hn::Store(errors.relative, d, relative);
      KeepInMemory(terms);
      low.template Add<true>(LoadDouble(d64, real), LoadDouble(d64, restored),
                             LoadDouble(d64, relative));
      high.template Add<true>(LoadDouble(d64, real + kHalf),
                              LoadDouble(d64, restored + kHalf),
                              LoadDouble(d64, relative + kHalf));
    } else {
      low.template Add<false>(x, y, errors.relative);
    }
  }
  // float64 has but one vector of lanes.
  if constexpr (kFromFloat) state->lanes.Store(d64, high, kHalf);
  state->lanes.Store(d64, low, 0);
  hn::Store(max_relative, d, state->max_relative);
  hn::Store(finite, di, state->finite);
  hn::Store(flushed, di, state->flushed);
  hn::Store(clipped_low, di, state->clipped_low);
  hn::Store(clipped_high, di, state->clipped_high);
}

// A column by its definition, where errors are such that only float64 holds
// them.
void AddWideColumn(const EvaluateRange& range, const ColumnPanel& panel,
                   int64_t column, ErrorSums* sum) {
  std::vector<ScalePortion> portions;
  for (int64_t row = 0; row < panel.rows; ++row) {
    const int64_t offset = row * panel.columns + column;
    ErrorSums leaf;
    portions.clear();
    EvaluateScalar(
        {range.encoding, range.values, range.layout, range.type,
         panel.first + offset, 1,
         panel.in + offset * ElementSizeBytes(range.type), range.sums},
        &leaf, &portions, nullptr);
    sum->Add(portions[0].sums);
  }
}

template <typename T>
void FinishColumns(const EvaluateRange& range, const ColumnPanel& panel,
                   int64_t column, const ColumnState<T>& state,
                   ErrorSums* sums) {
  for (int64_t c = 0; c < state.count; ++c) {
    if (std::is_same_v<T, float> && std::isinf(state.max_relative[c])) {
      AddWideColumn(range, panel, column + c, &sums[column + c]);
      continue;
    }
    ErrorSums& sum = sums[column + c];
    sum.count -= state.finite[c];
    sum.non_finite += panel.rows + state.finite[c];
    sum.zero_flushed -= state.flushed[c];
    sum.clipped_low -= state.clipped_low[c];
    sum.clipped_high -= state.clipped_high[c];
    sum.squared_error = state.lanes.squared[c];
    sum.absolute_error = state.lanes.absolute[c];
    sum.relative_error = state.lanes.relative[c];
    sum.signal = state.lanes.signal[c];
    sum.reconstructed = state.lanes.reconstructed[c];
    sum.product = state.lanes.product[c];
    sum.max_absolute_error =
        std::max(sum.max_absolute_error, state.lanes.max_absolute[c]);
    sum.max_relative_error =
        std::max<double>(sum.max_relative_error, state.max_relative[c]);
  }
}

// Columns [begin, begin + kTaskColumns) or to the end, a few rows at a time.
template <CodeKind kKind, typename T>
void AddColumnsKind(const EvaluateRange& range, const ColumnPanel& panel,
                    int64_t begin, int64_t end, ErrorSums* sums) {
  constexpr int64_t kLanes = ColumnState<T>::kLanes;
  ColumnState<T> states[kTaskColumns / kLanes];
  for (int64_t c = begin; c < end; c += kLanes) {
    StartColumns(range, panel, c, sums, &states[(c - begin) / kLanes]);
  }
  for (int64_t row = 0; row < panel.rows; row += kTileRows) {
    const int64_t end_row = std::min(row + kTileRows, panel.rows);
    for (int64_t c = begin; c < end; c += kLanes) {
      AddRows<kKind>(range, panel, c, row, end_row,
                     &states[(c - begin) / kLanes]);
    }
  }
  for (int64_t c = begin; c < end; c += kLanes) {
    FinishColumns(range, panel, c, states[(c - begin) / kLanes], sums);
  }
}

template <typename T>
void AddColumnsTyped(const EvaluateRange& range, const ColumnPanel& panel,
                     int64_t begin, int64_t end, ErrorSums* sums) {
  switch (range.values.kind) {
    case CodeKind::kInteger:
      return AddColumnsKind<CodeKind::kInteger, T>(range, panel, begin, end,
                                                   sums);
    case CodeKind::kFloat:
      return AddColumnsKind<CodeKind::kFloat, T>(range, panel, begin, end,
                                                 sums);
    case CodeKind::kCodebook:
      break;
  }
  AddColumnsKind<CodeKind::kCodebook, T>(range, panel, begin, end, sums);
}

void AddColumnsSimd(const EvaluateRange& range, const ColumnPanel& panel,
                    int64_t begin, int64_t end, ErrorSums* sums) {
  if (range.type == ElementType::kFloat64) {
    AddColumnsTyped<double>(range, panel, begin, end, sums);
  } else {
    AddColumnsTyped<float>(range, panel, begin, end, sums);
  }
}

void EvaluateSimd(const EvaluateRange& range, ErrorSums* leaves,
                  std::vector<ScalePortion>* portions,
                  DistributionCounts* distribution) {
  if (range.type == ElementType::kFloat64) {
    EvaluateTyped<double>(range, leaves, portions, distribution);
  } else {
    EvaluateTyped<float>(range, leaves, portions, distribution);
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

HWY_EXPORT(EvaluateSimd);
HWY_EXPORT(AddColumnsSimd);

// Tasks whose sums are kept before they are added up in order.
constexpr int64_t kWaveTasks = 256;
// Elements of a panel that are worth more than one thread.
constexpr int64_t kThreadsElements = 16 * 1024;
// Rows of a panel at most: so few that counts fit an int32.
constexpr int64_t kMaxPanelRows = int64_t{1} << 30;

// True if neighbours have scale indices of their own.
bool Steps(const BlockLayout& layout) {
  const int64_t count = std::min<int64_t>(layout.element_count(), 2);
  BlockLayout::Run run{};
  return BlockLayout::RunCursor(layout, 0, count).Next(&run) &&
         run.scale_step == 1;
}

// Adds the elements of a range whose layout steps to the sums of their scale
// indices, those of one index in order. Threads take columns apart.
void AddColumns(const EvaluateRange& range, ThreadPool* pool, ErrorSums* sums) {
  const auto add = [&](const ColumnPanel& panel) {
    ErrorSums* panel_sums = sums + panel.scale_index;
    ThreadPool* panel_pool =
        panel.columns * panel.rows < kThreadsElements ? nullptr : pool;
    const int64_t tasks = (panel.columns + kTaskColumns - 1) / kTaskColumns;
    ParallelFor(panel_pool, tasks, [&](int64_t task) {
      const int64_t begin = task * kTaskColumns;
      HWY_DYNAMIC_DISPATCH(AddColumnsSimd)
      (range, panel, begin, std::min(begin + kTaskColumns, panel.columns),
       panel_sums);
    });
  };
  ColumnPanel panel{};
  range.layout.ForEachRun(
      range.first, range.count, [&](const BlockLayout::Run& run) {
        if (run.scale_index == panel.scale_index &&
            run.count == panel.columns && panel.rows < kMaxPanelRows) {
          ++panel.rows;
          return;
        }
        if (panel.rows > 0) add(panel);
        panel = {run.begin, run.scale_index, run.count, 1,
                 range.in +
                     (run.begin - range.first) * ElementSizeBytes(range.type)};
      });
  if (panel.rows > 0) add(panel);
}

}  // namespace

void ErrorSums::Add(const ErrorSums& other) {
  count += other.count;
  non_finite += other.non_finite;
  clipped_low += other.clipped_low;
  clipped_high += other.clipped_high;
  zero_flushed += other.zero_flushed;
  squared_error += other.squared_error;
  absolute_error += other.absolute_error;
  relative_error += other.relative_error;
  signal += other.signal;
  reconstructed += other.reconstructed;
  product += other.product;
  max_absolute_error = std::max(max_absolute_error, other.max_absolute_error);
  max_relative_error = std::max(max_relative_error, other.max_relative_error);
}

double ErrorSums::MeanSquaredError() const {
  return count == 0 ? 0 : squared_error / static_cast<double>(count);
}

double ErrorSums::MeanAbsoluteError() const {
  return count == 0 ? 0 : absolute_error / static_cast<double>(count);
}

double ErrorSums::MeanRelativeError() const {
  return count == 0 ? 0 : relative_error / static_cast<double>(count);
}

double ErrorSums::SqnrDb() const {
  // The square of what is below 1e-162 is 0.
  const bool is_lost = squared_error == 0 && max_absolute_error > 0;
  return count == 0 || is_lost ? std::numeric_limits<double>::quiet_NaN()
                               : Decibels(signal, squared_error);
}

double ErrorSums::CosineSimilarity() const {
  if (count == 0) return std::numeric_limits<double>::quiet_NaN();
  if (signal == 0 && reconstructed == 0) return 1;
  if (signal == 0 || reconstructed == 0) return 0;
  // The roots apart: the product of the sums could overflow.
  return product / (std::sqrt(signal) * std::sqrt(reconstructed));
}

CodeValues::CodeValues(const Encoding& encoding)
    : kind(FindFormat(encoding.format)->kind) {
  if (kind == CodeKind::kFloat) {
    float_grid.emplace(FindFormat(encoding.format)->float_layout,
                       encoding.no_saturation);
  } else if (kind == CodeKind::kCodebook) {
    codebook_grid.emplace(CodebookOf(encoding));
  }
}

void SumLeaves(
    int64_t count, int64_t wave_tasks, ThreadPool* pool,
    absl::FunctionRef<void(int64_t, int64_t, int64_t, ErrorSums*)> task,
    absl::FunctionRef<void(int64_t)> after_wave, ErrorSums* overall) {
  constexpr int64_t kTaskElements = kTaskLeaves * Evaluator::kLeafElements;
  const int64_t leaf_count =
      (count + Evaluator::kLeafElements - 1) / Evaluator::kLeafElements;
  const int64_t task_count = (leaf_count + kTaskLeaves - 1) / kTaskLeaves;
  wave_tasks = std::min(wave_tasks, task_count);
  std::vector<ErrorSums> leaves(wave_tasks * kTaskLeaves);
  for (int64_t wave = 0; wave < task_count; wave += wave_tasks) {
    const int64_t tasks = std::min(wave_tasks, task_count - wave);
    ParallelFor(pool, tasks, [&](int64_t i) {
      const int64_t begin = (wave + i) * kTaskElements;
      task(i, begin, std::min(kTaskElements, count - begin),
           &leaves[i * kTaskLeaves]);
    });
    const int64_t wave_leaves =
        std::min(tasks * kTaskLeaves, leaf_count - wave * kTaskLeaves);
    for (int64_t leaf = 0; leaf < wave_leaves; ++leaf) {
      overall->Add(leaves[leaf]);
    }
    after_wave(tasks);
  }
}

Evaluator::Evaluator(const Encoding& encoding, const BlockLayout& layout,
                     ElementType type, const EvaluateOptions& options)
    : encoding_(encoding),
      layout_(layout),
      type_(type),
      sums_(options.sums),
      values_(std::make_unique<const CodeValues>(encoding)) {
  if (options.per_scale_index) per_scale_index_.resize(layout.scale_count());
  if (options.with_distribution) {
    distribution_ = std::make_unique<DistributionCounts>();
  }
}

Evaluator::~Evaluator() = default;

void Evaluator::Update(int64_t first, int64_t count, const uint8_t* data,
                       ThreadPool* pool) {
  // The kernels know neither int32 nor real zero points.
  const bool is_scalar = internal::UsesScalarKernels() ||
                         encoding_.zero_points_are_real ||
                         IsWideInteger(*FindFormat(encoding_.format));
  const bool per_scale_index = !per_scale_index_.empty();
  // The scalar definition has a portion for each element instead.
  const bool adds_columns = per_scale_index && !is_scalar && Steps(layout_);
  const bool has_portions = per_scale_index && !adds_columns;
  // Sums per scale index can be one per element: no more than the threads work
  // on are kept.
  const int64_t threads = pool == nullptr ? 1 : pool->thread_count() + 1;
  const int64_t wave_tasks = has_portions ? threads : kWaveTasks;
  std::vector<std::vector<ScalePortion>> portions(has_portions ? wave_tasks
                                                               : 0);
  DistributionScratch scratch;
  const auto range_of = [&](int64_t begin, int64_t range_count) {
    return EvaluateRange{encoding_,
                         *values_,
                         layout_,
                         type_,
                         first + begin,
                         range_count,
                         data + begin * ElementSizeBytes(type_),
                         sums_};
  };
  const auto task = [&](int64_t i, int64_t begin, int64_t task_count,
                        ErrorSums* leaves) {
    const EvaluateRange range = range_of(begin, task_count);
    std::vector<ScalePortion>* task_portions = nullptr;
    if (has_portions) {
      task_portions = &portions[i];
      task_portions->clear();
    }
    std::unique_ptr<DistributionCounts> counts;
    if (distribution_ != nullptr) counts = scratch.Take();
    if (is_scalar) {
      EvaluateScalar(range, leaves, task_portions, counts.get());
    } else {
      HWY_DYNAMIC_DISPATCH(EvaluateSimd)
      (range, leaves, task_portions, counts.get());
    }
    if (counts != nullptr) scratch.Return(std::move(counts));
  };
  const auto after_wave = [&](int64_t tasks) {
    if (!has_portions) return;
    for (int64_t i = 0; i < tasks; ++i) {
      for (const ScalePortion& portion : portions[i]) {
        per_scale_index_[portion.scale_index].Add(portion.sums);
      }
    }
  };
  SumLeaves(count, wave_tasks, pool, task, after_wave, &overall_);
  if (adds_columns) {
    AddColumns(range_of(0, count), pool, per_scale_index_.data());
  }
  if (distribution_ != nullptr) scratch.MergeInto(distribution_.get());
}

}  // namespace quantd::core
#endif  // HWY_ONCE
