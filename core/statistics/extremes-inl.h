// Extremes of many groups of elements at a time, and how zeros and elements
// that are not finite are counted beside them.

#if defined(QUANTD_CORE_STATISTICS_EXTREMES_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef QUANTD_CORE_STATISTICS_EXTREMES_INL_H_
#undef QUANTD_CORE_STATISTICS_EXTREMES_INL_H_
#else
#define QUANTD_CORE_STATISTICS_EXTREMES_INL_H_
#endif

#include <cstdint>
#include <type_traits>

#include "core/types/element_type.h"
#include "core/types/float_convert-inl.h"
#include "hwy/highway.h"

// The targets without vectors run the scalar definitions.
#if HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Loads a vector of elements as what they are computed in.
template <ElementType kType, class D>
HWY_INLINE hn::Vec<D> LoadReals(D d, const uint8_t* HWY_RESTRICT in) {
  if constexpr (kType == ElementType::kBfloat16) {
    const hn::RebindToUnsigned<D> du32;
    const hn::Rebind<uint16_t, D> du16;
    return hn::BitCast(
        d, hn::ShiftLeft<16>(hn::PromoteTo(du32, LoadBytes(du16, in))));
  } else if constexpr (kType == ElementType::kFloat16) {
#if QUANTD_HAS_F16
    const hn::Rebind<uint16_t, D> du16;
    const hn::Rebind<hwy::float16_t, D> df16;
    return hn::PromoteTo(d, hn::BitCast(df16, LoadBytes(du16, in)));
#else
    HWY_ALIGN float wide[hn::MaxLanes(D())];
    Widen(kType, in, static_cast<int64_t>(hn::Lanes(d)), wide);
    return hn::Load(d, wide);
#endif
  } else {
    return LoadBytes(d, in);
  }
}

template <ElementType kType>
using Real = std::conditional_t<kType == ElementType::kFloat64, double, float>;

// Counts zeros and notices what is not finite.
template <class D>
class Tally {
 public:
  Tally()
      : sum_(hn::Zero(D()))
#if HWY_TARGET != HWY_AVX3
        ,
        zeros_(hn::Zero(hn::RebindToSigned<D>()))
#endif
  {
  }

  HWY_INLINE void Add(D d, hn::Vec<D> x) {
#if HWY_TARGET == HWY_AVX3
    // One instruction tells 1 for zeros, NaN for NaN and infinities and 0 for
    // the rest; what is counted is at most 2^24 in a lane.
    constexpr int kCodes = static_cast<int>(0x88338A33);
    if constexpr (std::is_same_v<hn::TFromD<D>, double>) {
      sum_.raw = _mm512_add_pd(
          sum_.raw,
          _mm512_fixupimm_pd(x.raw, x.raw, _mm512_set1_epi64(kCodes), 0));
    } else {
      sum_.raw = _mm512_add_ps(
          sum_.raw,
          _mm512_fixupimm_ps(x.raw, x.raw, _mm512_set1_epi32(kCodes), 0));
    }
#else
    const hn::RebindToSigned<D> di;
    sum_ = hn::MulAdd(x, hn::Zero(d), sum_);
    zeros_ = hn::Add(
        zeros_,
        hn::VecFromMask(di, hn::RebindMask(di, hn::Eq(x, hn::Zero(d)))));
#endif
  }

  HWY_INLINE void Add(D d, const Tally& other) {
    sum_ = hn::Add(sum_, other.sum_);
#if HWY_TARGET != HWY_AVX3
    zeros_ = hn::Add(zeros_, other.zeros_);
#endif
  }

  HWY_INLINE bool AllFinite(D d) const {
    return hn::AllFalse(d, hn::IsNaN(sum_));
  }

  // Requires: AllFinite.
  HWY_INLINE int64_t Zeros(D d) const {
#if HWY_TARGET == HWY_AVX3
    return static_cast<int64_t>(hn::GetLane(hn::SumOfLanes(d, sum_)));
#else
    const hn::RebindToSigned<D> di;
    return -static_cast<int64_t>(hn::GetLane(hn::SumOfLanes(di, zeros_)));
#endif
  }

 private:
  hn::Vec<D> sum_;
#if HWY_TARGET != HWY_AVX3
  // Minus their number.
  hn::Vec<hn::RebindToSigned<D>> zeros_;
#endif
};

#if HWY_HAVE_SCALABLE
constexpr bool kHasGroups = false;
#else
constexpr bool kHasGroups = true;
#endif

// The extremes of a vector of groups, or of parts of them.
template <class D>
struct VectorExtremes {
  HWY_INLINE VectorExtremes() {}
  HWY_INLINE VectorExtremes(hn::Vec<D> min, hn::Vec<D> max)
      : min(min), max(max) {}

  hn::Vec<D> min;
  hn::Vec<D> max;
};

// With the parts of `a` and `b` side by side in each block of 16 bytes, half as
// many of each: `Wide` is the type of what stands side by side already.
template <typename Wide, class D>
HWY_INLINE VectorExtremes<D> FoldInBlocks(D d, const VectorExtremes<D>& a,
                                          const VectorExtremes<D>& b) {
  const hn::Repartition<Wide, D> dw;
  const auto lower = [&](hn::Vec<D> x, hn::Vec<D> y) HWY_ATTR {
    return hn::BitCast(
        d, hn::InterleaveLower(dw, hn::BitCast(dw, x), hn::BitCast(dw, y)));
  };
  const auto upper = [&](hn::Vec<D> x, hn::Vec<D> y) HWY_ATTR {
    return hn::BitCast(
        d, hn::InterleaveUpper(dw, hn::BitCast(dw, x), hn::BitCast(dw, y)));
  };
  return {hn::Min(lower(a.min, b.min), upper(a.min, b.min)),
          hn::Max(lower(a.max, b.max), upper(a.max, b.max))};
}

// Extremes of four groups of `group` elements: lane i of every block has a part
// of group i.
template <ElementType kType, class D>
HWY_INLINE VectorExtremes<D> ReduceFourGroups(D d,
                                              const uint8_t* HWY_RESTRICT in,
                                              int64_t group, Tally<D>& tally) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t size = ElementSizeBytes(kType);
  VectorExtremes<D> each[4];
  for (int64_t g = 0; g < 4; ++g) {
    const auto first = LoadReals<kType>(d, in + g * group * size);
    tally.Add(d, first);
    each[g] = {first, first};
    for (int64_t k = lanes; k < group; k += lanes) {
      const auto x = LoadReals<kType>(d, in + (g * group + k) * size);
      tally.Add(d, x);
      each[g].min = hn::Min(each[g].min, x);
      each[g].max = hn::Max(each[g].max, x);
    }
  }
  return FoldInBlocks<double>(d, FoldInBlocks<float>(d, each[0], each[1]),
                              FoldInBlocks<float>(d, each[2], each[3]));
}

// Halves of `a` and `b` folded: a's in the lower half, b's in the upper one.
template <class D>
HWY_INLINE VectorExtremes<D> FoldHalves(D d, const VectorExtremes<D>& a,
                                        const VectorExtremes<D>& b) {
  return {hn::Min(hn::ConcatLowerLower(d, b.min, a.min),
                  hn::ConcatUpperUpper(d, b.min, a.min)),
          hn::Max(hn::ConcatLowerLower(d, b.max, a.max),
                  hn::ConcatUpperUpper(d, b.max, a.max))};
}

// Folds two vectors of two groups of blocks each into one vector.
template <class D>
HWY_INLINE VectorExtremes<D> FoldBlocks(const VectorExtremes<D>& a,
                                        const VectorExtremes<D>& b) {
  return {hn::Min(hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b.min), a.min),
                  hn::OddEvenBlocks(b.min, hn::SwapAdjacentBlocks(a.min))),
          hn::Max(hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b.max), a.max),
                  hn::OddEvenBlocks(b.max, hn::SwapAdjacentBlocks(a.max)))};
}

// Extremes of Lanes(d) groups of `group` elements, in order. Requires: `group`
// is a multiple of Lanes(d).
template <ElementType kType, class D>
HWY_INLINE VectorExtremes<D> ReduceGroups(D d, const uint8_t* HWY_RESTRICT in,
                                          int64_t group, Tally<D>& tally) {
  const int64_t four_bytes = 4 * group * ElementSizeBytes(kType);
  const auto four = [&](int64_t index) HWY_ATTR {
    return ReduceFourGroups<kType>(d, in + index * four_bytes, group, tally);
  };
  if constexpr (hn::MaxLanes(D()) == 4) {
    return four(0);
  } else if constexpr (hn::MaxLanes(D()) == 8) {
    const auto a = four(0);
    return FoldHalves(d, a, four(1));
  } else {
    // In the order that the blocks come out of the last fold.
    const auto a = four(0);
    const auto ab = FoldHalves(d, a, four(2));
    const auto c = four(1);
    return FoldBlocks(ab, FoldHalves(d, c, four(3)));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();
#endif

#endif  // QUANTD_CORE_STATISTICS_EXTREMES_INL_H_
