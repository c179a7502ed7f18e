#include "core/calibrate/block_errors.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/formats/number_format.h"
#include "core/simd_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/calibrate/block_errors.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/formats/float_codec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE

int64_t SumFloatErrors(const BlockGrid& grid, const float* x, int64_t count,
                       const BlockTrials<float>& trials) {
  return SumBlockErrorsScalar(grid, x, count, trials);
}

int64_t SumDoubleErrors(const BlockGrid& grid, const double* x, int64_t count,
                        const BlockTrials<double>& trials) {
  return SumBlockErrorsScalar(grid, x, count, trials);
}

void SumBeyondFloatEnds(const float* x, int64_t count,
                        const BlockEnds<float>& ends) {
  SumBeyondEndsScalar(x, count, ends);
}

void SumBeyondDoubleEnds(const double* x, int64_t count,
                         const BlockEnds<double>& ends) {
  SumBeyondEndsScalar(x, count, ends);
}

#else

// How far quotients are from the numbers nearest to them, and which of them are
// clipped. A lane is a scale.

// The k-th of the numbers and those behind it; if there are none, the same
// number in all lanes.
template <class D>
HWY_INLINE hn::Vec<D> LoadOrSet(D d, const hn::TFromD<D>* numbers, int64_t k,
                                int32_t number) {
  return numbers == nullptr ? hn::Set(d, static_cast<hn::TFromD<D>>(number))
                            : hn::LoadU(d, numbers + k);
}

template <class D>
class IntegerRounder {
 public:
  IntegerRounder(D d, const BlockGrid& grid,
                 const BlockTrials<hn::TFromD<D>>& trials, int64_t k)
      : low_(LoadOrSet(d, trials.low, k, grid.qmin)),
        high_(LoadOrSet(d, trials.high, k, grid.qmax)) {}

  HWY_INLINE hn::Vec<D> Distance(D /*d*/, hn::Vec<D> q) const {
    return hn::Sub(q, hn::Round(hn::Min(hn::Max(q, low_), high_)));
  }
  HWY_INLINE hn::Mask<D> IsClipped(D d, hn::Vec<D> /*q*/,
                                   hn::Vec<D> distance) const {
    return hn::Gt(hn::Abs(distance),
                  hn::Set(d, hn::TFromD<D>{kClippedDistance}));
  }

 private:
  const hn::Vec<D> low_;
  const hn::Vec<D> high_;
};

// Rounds magnitudes.
template <class D>
class MirroredRounder {
 public:
  MirroredRounder(D d, const BlockGrid& grid,
                  const BlockTrials<hn::TFromD<D>>& trials, int64_t k)
      : high_(LoadOrSet(d, trials.high, k, grid.qmax)) {}

  HWY_INLINE hn::Vec<D> Distance(D /*d*/, hn::Vec<D> q) const {
    return hn::Sub(q, hn::Round(hn::Min(q, high_)));
  }
  HWY_INLINE hn::Mask<D> IsClipped(D d, hn::Vec<D> /*q*/,
                                   hn::Vec<D> distance) const {
    return hn::Gt(distance, hn::Set(d, hn::TFromD<D>{kClippedDistance}));
  }

 private:
  const hn::Vec<D> high_;
};

// Rounds magnitudes.
template <class D>
class FloatRounder {
 public:
  FloatRounder(D /*d*/, const BlockGrid& grid,
               const BlockTrials<hn::TFromD<D>>& /*trials*/, int64_t /*k*/)
      : grid_(*grid.floats) {}

  HWY_INLINE hn::Vec<D> Distance(D d, hn::Vec<D> q) const {
    const auto rounded = RoundMagnitude(d, grid_, q);
    return hn::Sub(q, hn::Sub(rounded.sum, rounded.magic));
  }
  HWY_INLINE hn::Mask<D> IsClipped(D d, hn::Vec<D> q,
                                   hn::Vec<D> /*distance*/) const {
    return IsAbove(d, grid_, q);
  }

 private:
  const FloatGrid& grid_;
};

template <class D>
class CodebookRounder {
 public:
  CodebookRounder(D /*d*/, const BlockGrid& grid,
                  const BlockTrials<hn::TFromD<D>>& /*trials*/, int64_t /*k*/)
      : grid_(*grid.codebook) {}

  HWY_INLINE hn::Vec<D> Distance(D d, hn::Vec<D> q) const {
    return hn::Sub(q, Round(d, grid_, q));
  }
  HWY_INLINE hn::Mask<D> IsClipped(D d, hn::Vec<D> q,
                                   hn::Vec<D> /*distance*/) const {
    return hn::Or(IsBelow(d, grid_, q), IsAbove(d, grid_, q));
  }

 private:
  const CodebookGrid& grid_;
};

// The sums of a chunk.
template <class D>
struct ChunkSums {
  explicit ChunkSums(D d)
      : sum0(hn::Zero(d)),
        sum1(hn::Zero(d)),
        sum2(hn::Zero(d)),
        sum3(hn::Zero(d)) {}

  HWY_INLINE hn::Vec<D> PutTogether() const {
    return hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
  }

  hn::Vec<D> sum0;
  hn::Vec<D> sum1;
  hn::Vec<D> sum2;
  hn::Vec<D> sum3;
};

// Both sums of what `add(i, first, second)` adds for each element.
template <class D, class Add>
HWY_INLINE void SumElements(D d, int64_t count, const Add& add,
                            hn::Vec<D>* HWY_RESTRICT first,
                            hn::Vec<D>* HWY_RESTRICT second) {
  *first = hn::Zero(d);
  *second = hn::Zero(d);
  for (int64_t begin = 0; begin < count; begin += kErrorChunk) {
    ChunkSums<D> a(d);
    ChunkSums<D> b(d);
    const int64_t end = HWY_MIN(count, begin + kErrorChunk);
    int64_t i = begin;
    for (; i + kErrorSums <= end; i += kErrorSums) {
      add(i, a.sum0, b.sum0);
      add(i + 1, a.sum1, b.sum1);
      add(i + 2, a.sum2, b.sum2);
      add(i + 3, a.sum3, b.sum3);
    }
    if (i < end) add(i, a.sum0, b.sum0);
    if (i + 1 < end) add(i + 1, a.sum1, b.sum1);
    if (i + 2 < end) add(i + 2, a.sum2, b.sum2);
    *first = hn::Add(*first, a.PutTogether());
    *second = hn::Add(*second, b.PutTogether());
  }
}

template <class D>
HWY_INLINE hn::Vec<D> LoadDoubles(D d, const float* from) {
  const hn::Rebind<float, D> df;
  return hn::PromoteTo(d, hn::LoadU(df, from));
}
template <class D>
HWY_INLINE hn::Vec<D> LoadDoubles(D d, const double* from) {
  return hn::LoadU(d, from);
}

// The first of the least errors, lane by lane.
template <class D>
class LeastError {
 public:
  explicit LeastError(D d)
      : error_(hn::Set(d, std::numeric_limits<double>::infinity())),
        index_(hn::Zero(d)) {}

  // Takes in the errors of the trials from the k-th on, one in each lane. Calls
  // come in the order of the trials.
  HWY_INLINE void Add(D d, hn::Vec<D> error, int64_t k) {
    const auto is_less = hn::Lt(error, error_);
    error_ = hn::IfThenElse(is_less, error, error_);
    index_ =
        hn::IfThenElse(is_less, hn::Iota(d, static_cast<double>(k)), index_);
  }
  HWY_INLINE int64_t Index(D d) const {
    double error[kTrialLanes], index[kTrialLanes];
    hn::StoreU(error_, d, error);
    hn::StoreU(index_, d, index);
    size_t best = 0;
    for (size_t i = 1; i < hn::Lanes(d); ++i) {
      if (error[i] < error[best] ||
          (error[i] == error[best] && index[i] < index[best])) {
        best = i;
      }
    }
    return static_cast<int64_t>(index[best]);
  }

 private:
  hn::Vec<D> error_;
  hn::Vec<D> index_;
};

template <template <class> class Rounder, bool kClips, bool kIsWeighed,
          typename T>
int64_t SumErrors(const BlockGrid& grid, const T* HWY_RESTRICT x, int64_t count,
                  const BlockTrials<T>& trials) {
  const hn::CappedTag<T, kTrialLanes> d;
  using D = decltype(d);
  using V = hn::Vec<D>;
  const hn::CappedTag<double, kTrialLanes> dd;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t double_lanes = static_cast<int64_t>(hn::Lanes(dd));
  const bool weighs = trials.gamma != 1;
  const auto more = hn::Set(dd, trials.gamma - 1);
  LeastError<decltype(dd)> least(dd);
  for (int64_t k = 0; k < trials.count; k += lanes) {
    const Rounder<D> rounder(d, grid, trials, k);
    const V inverse = hn::Div(hn::Set(d, T{1}), hn::LoadU(d, trials.scale + k));
    V squares, clipped;
    SumElements(
        d, count,
        [&](int64_t i, V& square_sum, V& clipped_sum) HWY_ATTR {
          const V q = hn::Mul(hn::Set(d, x[i]), inverse);
          const V distance = rounder.Distance(d, q);
          V square = hn::Mul(distance, distance);
          if constexpr (kIsWeighed) {
            square = hn::Mul(square, hn::Set(d, trials.weight[i]));
          }
          square_sum = hn::Add(square_sum, square);
          if constexpr (kClips) {
            clipped_sum = hn::Add(
                clipped_sum,
                hn::IfThenElseZero(rounder.IsClipped(d, q, distance), square));
          }
        },
        &squares, &clipped);
    HWY_ALIGN T square_of[kTrialLanes];
    HWY_ALIGN T clipped_of[kTrialLanes];
    hn::Store(squares, d, square_of);
    if constexpr (kClips) hn::Store(clipped, d, clipped_of);
    for (int64_t i = 0; i < lanes; i += double_lanes) {
      const auto scale = LoadDoubles(dd, trials.scale + k + i);
      const auto unit = hn::Mul(scale, scale);
      auto error = LoadDoubles(dd, square_of + i);
      if constexpr (kClips) {
        const auto beyond = LoadDoubles(dd, clipped_of + i);
        if (weighs) error = hn::Add(error, hn::Mul(more, beyond));
        if (trials.clipped != nullptr) {
          hn::StoreU(hn::Mul(beyond, unit), dd, trials.clipped + k + i);
        }
      }
      error = hn::Mul(error, unit);
      hn::StoreU(error, dd, trials.errors + k + i);
      least.Add(dd, error, k + i);
    }
  }
  return least.Index(dd);
}

template <template <class> class Rounder, typename T>
int64_t SumErrorsBy(const BlockGrid& grid, const T* x, int64_t count,
                    const BlockTrials<T>& trials) {
  if (trials.weight != nullptr) {
    return SumErrors<Rounder, true, true>(grid, x, count, trials);
  }
  return trials.clipped != nullptr || trials.gamma != 1
             ? SumErrors<Rounder, true, false>(grid, x, count, trials)
             : SumErrors<Rounder, false, false>(grid, x, count, trials);
}

template <typename T>
int64_t SumAnyErrors(const BlockGrid& grid, const T* x, int64_t count,
                     const BlockTrials<T>& trials) {
  switch (grid.format.kind) {
    case CodeKind::kInteger:
      return grid.is_mirrored
                 ? SumErrorsBy<MirroredRounder>(grid, x, count, trials)
                 : SumErrorsBy<IntegerRounder>(grid, x, count, trials);
    case CodeKind::kFloat:
      return SumErrorsBy<FloatRounder>(grid, x, count, trials);
    case CodeKind::kCodebook:
      break;
  }
  return SumErrorsBy<CodebookRounder>(grid, x, count, trials);
}

template <bool kIsWeighed, typename T>
void SumBeyondEndsBy(const T* HWY_RESTRICT x, int64_t count,
                     const BlockEnds<T>& ends) {
  const hn::CappedTag<T, kTrialLanes> d;
  using V = hn::Vec<decltype(d)>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t k = 0; k < ends.count; k += lanes) {
    const V low = hn::LoadU(d, ends.low + k);
    const V high = hn::LoadU(d, ends.high + k);
    V below, above;
    SumElements(
        d, count,
        [&](int64_t i, V& below_sum, V& above_sum) HWY_ATTR {
          const V element = hn::Set(d, x[i]);
          const V under = hn::Max(hn::Sub(low, element), hn::Zero(d));
          const V over = hn::Max(hn::Sub(element, high), hn::Zero(d));
          V under_square = hn::Mul(under, under);
          V over_square = hn::Mul(over, over);
          if constexpr (kIsWeighed) {
            const V weight = hn::Set(d, ends.weight[i]);
            under_square = hn::Mul(under_square, weight);
            over_square = hn::Mul(over_square, weight);
          }
          below_sum = hn::Add(below_sum, under_square);
          above_sum = hn::Add(above_sum, over_square);
        },
        &below, &above);
    hn::StoreU(below, d, ends.below + k);
    hn::StoreU(above, d, ends.above + k);
  }
}

template <typename T>
void SumBeyondAnyEnds(const T* x, int64_t count, const BlockEnds<T>& ends) {
  if (ends.weight != nullptr) {
    SumBeyondEndsBy<true>(x, count, ends);
  } else {
    SumBeyondEndsBy<false>(x, count, ends);
  }
}

int64_t SumFloatErrors(const BlockGrid& grid, const float* x, int64_t count,
                       const BlockTrials<float>& trials) {
  return SumAnyErrors(grid, x, count, trials);
}

int64_t SumDoubleErrors(const BlockGrid& grid, const double* x, int64_t count,
                        const BlockTrials<double>& trials) {
  return SumAnyErrors(grid, x, count, trials);
}

void SumBeyondFloatEnds(const float* x, int64_t count,
                        const BlockEnds<float>& ends) {
  SumBeyondAnyEnds(x, count, ends);
}

void SumBeyondDoubleEnds(const double* x, int64_t count,
                         const BlockEnds<double>& ends) {
  SumBeyondAnyEnds(x, count, ends);
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quantd::core {
namespace {

HWY_EXPORT(SumFloatErrors);
HWY_EXPORT(SumDoubleErrors);
HWY_EXPORT(SumBeyondFloatEnds);
HWY_EXPORT(SumBeyondDoubleEnds);

int64_t SumPiece(const BlockGrid& grid, const float* x, int64_t count,
                 const BlockTrials<float>& trials) {
  return internal::UsesScalarKernels()
             ? SumBlockErrorsScalar(grid, x, count, trials)
             : HWY_DYNAMIC_DISPATCH(SumFloatErrors)(grid, x, count, trials);
}

int64_t SumPiece(const BlockGrid& grid, const double* x, int64_t count,
                 const BlockTrials<double>& trials) {
  return internal::UsesScalarKernels()
             ? SumBlockErrorsScalar(grid, x, count, trials)
             : HWY_DYNAMIC_DISPATCH(SumDoubleErrors)(grid, x, count, trials);
}

// Adds up the pieces of kTrialLanes trials from the k-th on. Ends where all
// errors are above the limit, unless what is clipped is wanted.
template <typename T>
void SumPieces(const BlockGrid& grid, const T* x, int64_t count,
               const BlockTrials<T>& trials, int64_t k, double limit) {
  const auto from = [k](auto* numbers) {
    return numbers == nullptr ? nullptr : numbers + k;
  };
  double* const errors = trials.errors + k;
  double* const clipped = from(trials.clipped);
  std::fill_n(errors, kTrialLanes, 0);
  if (clipped != nullptr) std::fill_n(clipped, kTrialLanes, 0);
  for (int64_t begin = 0; begin < count; begin += kErrorPiece) {
    double piece_errors[kTrialLanes], piece_clipped[kTrialLanes];
    SumPiece(grid, x + begin, std::min(kErrorPiece, count - begin),
             {kTrialLanes, trials.scale + k, from(trials.low),
              from(trials.high), trials.gamma, piece_errors,
              clipped == nullptr ? nullptr : piece_clipped,
              std::numeric_limits<double>::infinity(),
              trials.weight == nullptr ? nullptr : trials.weight + begin});
    bool is_below = clipped != nullptr;
    for (int64_t i = 0; i < kTrialLanes; ++i) {
      errors[i] += piece_errors[i];
      if (clipped != nullptr) clipped[i] += piece_clipped[i];
      is_below |= !(errors[i] > limit);
    }
    if (!is_below) return;
  }
}

}  // namespace

BlockGrid::BlockGrid(const Encoding& encoding, bool has_zero_points)
    : format(*FindFormat(encoding.format)),
      is_mirrored(format.kind == CodeKind::kFloat ||
                  (format.kind == CodeKind::kInteger && !has_zero_points &&
                   encoding.qmin == -encoding.qmax)),
      qmin(encoding.qmin),
      qmax(encoding.qmax) {
  if (format.kind == CodeKind::kFloat) {
    floats.emplace(format.float_layout, /*no_saturation=*/false);
  } else if (format.kind == CodeKind::kCodebook) {
    codebook.emplace(CodebookOf(encoding));
  }
}

template <typename T>
int64_t SumBlockErrors(const BlockGrid& grid, const T* x, int64_t count,
                       const BlockTrials<T>& trials) {
  if (count <= kErrorPiece) return SumPiece(grid, x, count, trials);
  double limit = trials.limit;
  int64_t best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t k = 0; k < trials.count; k += kTrialLanes) {
    SumPieces(grid, x, count, trials, k, limit);
    for (int64_t i = k; i < k + kTrialLanes; ++i) {
      if (!(trials.errors[i] < least)) continue;
      least = trials.errors[i];
      best = i;
    }
    limit = std::min(limit, least);
  }
  return best;
}

template int64_t SumBlockErrors(const BlockGrid&, const float*, int64_t,
                                const BlockTrials<float>&);
template int64_t SumBlockErrors(const BlockGrid&, const double*, int64_t,
                                const BlockTrials<double>&);

template <>
void SumBeyondEnds(const float* x, int64_t count,
                   const BlockEnds<float>& ends) {
  if (internal::UsesScalarKernels()) {
    SumBeyondEndsScalar(x, count, ends);
  } else {
    HWY_DYNAMIC_DISPATCH(SumBeyondFloatEnds)(x, count, ends);
  }
}

template <>
void SumBeyondEnds(const double* x, int64_t count,
                   const BlockEnds<double>& ends) {
  if (internal::UsesScalarKernels()) {
    SumBeyondEndsScalar(x, count, ends);
  } else {
    HWY_DYNAMIC_DISPATCH(SumBeyondDoubleEnds)(x, count, ends);
  }
}

}  // namespace quantd::core
#endif  // HWY_ONCE
