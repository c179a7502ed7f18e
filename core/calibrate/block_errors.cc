#include "core/calibrate/block_errors.h"

#include <algorithm>
#include <cstdint>

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

void SumFloatErrors(const BlockGrid& grid, const float* x, int64_t count,
                    const BlockTrials<float>& trials) {
  SumBlockErrorsScalar(grid, x, count, trials);
}

void SumDoubleErrors(const BlockGrid& grid, const double* x, int64_t count,
                     const BlockTrials<double>& trials) {
  SumBlockErrorsScalar(grid, x, count, trials);
}

#else

// How far quotients are from the numbers nearest to them, and which of them are
// clipped. A lane is a scale.

template <class D>
class IntegerRounder {
 public:
  IntegerRounder(D d, const BlockGrid& /*grid*/,
                 const BlockTrials<hn::TFromD<D>>& trials, int64_t k)
      : low_(hn::LoadU(d, trials.low + k)),
        high_(hn::LoadU(d, trials.high + k)) {}

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

// Of magnitudes.
template <class D>
class MirroredRounder {
 public:
  MirroredRounder(D d, const BlockGrid& /*grid*/,
                  const BlockTrials<hn::TFromD<D>>& trials, int64_t k)
      : high_(hn::LoadU(d, trials.high + k)) {}

  HWY_INLINE hn::Vec<D> Distance(D /*d*/, hn::Vec<D> q) const {
    return hn::Sub(q, hn::Round(hn::Min(q, high_)));
  }
  HWY_INLINE hn::Mask<D> IsClipped(D d, hn::Vec<D> /*q*/,
                                   hn::Vec<D> distance) const {
    return hn::Gt(hn::Abs(distance),
                  hn::Set(d, hn::TFromD<D>{kClippedDistance}));
  }

 private:
  const hn::Vec<D> high_;
};

// Of magnitudes.
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

template <template <class> class Rounder, bool kClips, typename T>
void SumErrors(const BlockGrid& grid, const T* HWY_RESTRICT x, int64_t count,
               const BlockTrials<T>& trials) {
  const hn::CappedTag<T, kTrialLanes> d;
  using D = decltype(d);
  using V = hn::Vec<D>;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t k = 0; k < trials.count; k += lanes) {
    const Rounder<D> rounder(d, grid, trials, k);
    const V inverse = hn::LoadU(d, trials.inverse + k);
    V squares = hn::Zero(d);
    V clipped = hn::Zero(d);
    for (int64_t begin = 0; begin < count; begin += kErrorChunk) {
      ChunkSums<D> square_sums(d);
      ChunkSums<D> clipped_sums(d);
      const auto add = [&](int64_t i, V& square_sum, V& clipped_sum) HWY_ATTR {
        const V q = hn::Mul(hn::Set(d, x[i]), inverse);
        const V distance = rounder.Distance(d, q);
        const V square = hn::Mul(distance, distance);
        square_sum = hn::Add(square_sum, square);
        if constexpr (kClips) {
          clipped_sum = hn::Add(
              clipped_sum,
              hn::IfThenElseZero(rounder.IsClipped(d, q, distance), square));
        }
      };
      const int64_t end = HWY_MIN(count, begin + kErrorChunk);
      int64_t i = begin;
      for (; i + kErrorSums <= end; i += kErrorSums) {
        add(i, square_sums.sum0, clipped_sums.sum0);
        add(i + 1, square_sums.sum1, clipped_sums.sum1);
        add(i + 2, square_sums.sum2, clipped_sums.sum2);
        add(i + 3, square_sums.sum3, clipped_sums.sum3);
      }
      if (i < end) add(i, square_sums.sum0, clipped_sums.sum0);
      if (i + 1 < end) add(i + 1, square_sums.sum1, clipped_sums.sum1);
      if (i + 2 < end) add(i + 2, square_sums.sum2, clipped_sums.sum2);
      squares = hn::Add(squares, square_sums.PutTogether());
      if constexpr (kClips) {
        clipped = hn::Add(clipped, clipped_sums.PutTogether());
      }
    }
    hn::StoreU(squares, d, trials.squares + k);
    if constexpr (kClips) hn::StoreU(clipped, d, trials.clipped + k);
  }
}

template <template <class> class Rounder, typename T>
void SumErrorsBy(const BlockGrid& grid, const T* x, int64_t count,
                 const BlockTrials<T>& trials) {
  if (trials.clipped != nullptr) {
    SumErrors<Rounder, true>(grid, x, count, trials);
  } else {
    SumErrors<Rounder, false>(grid, x, count, trials);
  }
}

template <typename T>
void SumAnyErrors(const BlockGrid& grid, const T* x, int64_t count,
                  const BlockTrials<T>& trials) {
  switch (grid.format.kind) {
    case CodeKind::kInteger:
      if (grid.is_mirrored) {
        SumErrorsBy<MirroredRounder>(grid, x, count, trials);
      } else {
        SumErrorsBy<IntegerRounder>(grid, x, count, trials);
      }
      return;
    case CodeKind::kFloat:
      SumErrorsBy<FloatRounder>(grid, x, count, trials);
      return;
    case CodeKind::kCodebook:
      SumErrorsBy<CodebookRounder>(grid, x, count, trials);
      return;
  }
}

void SumFloatErrors(const BlockGrid& grid, const float* x, int64_t count,
                    const BlockTrials<float>& trials) {
  SumAnyErrors(grid, x, count, trials);
}

void SumDoubleErrors(const BlockGrid& grid, const double* x, int64_t count,
                     const BlockTrials<double>& trials) {
  SumAnyErrors(grid, x, count, trials);
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

template <>
void SumBlockErrors(const BlockGrid& grid, const float* x, int64_t count,
                    const BlockTrials<float>& trials) {
  if (internal::UsesScalarKernels()) {
    SumBlockErrorsScalar(grid, x, count, trials);
  } else {
    HWY_DYNAMIC_DISPATCH(SumFloatErrors)(grid, x, count, trials);
  }
}

template <>
void SumBlockErrors(const BlockGrid& grid, const double* x, int64_t count,
                    const BlockTrials<double>& trials) {
  if (internal::UsesScalarKernels()) {
    SumBlockErrorsScalar(grid, x, count, trials);
  } else {
    HWY_DYNAMIC_DISPATCH(SumDoubleErrors)(grid, x, count, trials);
  }
}

}  // namespace quantd::core
#endif  // HWY_ONCE
