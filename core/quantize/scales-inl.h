// Scales as the kernels of quantize.cc need them: division without dividing,
// and the parameters of many scales made at a time.

#if defined(QUANTD_CORE_QUANTIZE_SCALES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUANTD_CORE_QUANTIZE_SCALES_INL_H_
#undef QUANTD_CORE_QUANTIZE_SCALES_INL_H_
#else
#define QUANTD_CORE_QUANTIZE_SCALES_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"

// The targets without vectors run the scalar definitions.
#if HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// x / scale from the correctly rounded reciprocal y of the scale. A product
// x * y can be 1.5 units in the last place off; each step fma(x - q * scale, y,
// q) takes an error of e units to 2^-24 e before it is rounded. After one step
// the result is the neighbour of the correctly rounded quotient at the most,
// and only if the quotient is within 2^-23 units of the middle between the two.
// That is enough where results are told apart at numbers of few bits, such as
// ties between integers of 16 bits: division_test tries all the quotients that
// come so close. After two steps the quotient is correctly rounded (Markstein).
//
// Requires: 2^-100 <= scale <= 2^100. Where x * y overflows the result is NaN
// or infinite; quotients below 2^-26 may have another error.
template <int kSteps, class D, class V = hn::Vec<D>>
HWY_INLINE V ExactQuotient(D d, V x, V scale, V y) {
#if HWY_NATIVE_FMA
  V q = hn::Mul(x, y);
  for (int step = 0; step < kSteps; ++step) {
    q = hn::MulAdd(hn::NegMulAdd(q, scale, x), y, q);
  }
  return q;
#else
  return hn::Div(x, scale);
#endif
}

// Scales that are prepared at a time, and room behind them for vectors that
// begin before the last one.
constexpr int64_t kMostScales = 1024;
constexpr int64_t kScalePadding = 64;

// Arrays that the kernels compute with. `aux` is the coder's: see coders-inl.h.
struct ScaleArrays {
  HWY_ALIGN float scale[kMostScales + kScalePadding];
  HWY_ALIGN float reciprocal[kMostScales + kScalePadding];
  HWY_ALIGN int32_t aux[kMostScales + kScalePadding];

  // Prepares `count` scales, repeated `times` times. `zero_point` may be null:
  // all 0. Says whether the coder's fast kernels take all of them.
  // Requires: count * times <= kMostScales.
  template <class Coder>
  HWY_INLINE bool Fill(const Coder& coder, const float* scales,
                       const int32_t* zero_points, int64_t count,
                       int64_t times) {
    for (int64_t i = 0; i < times; ++i) {
      std::memcpy(scale + i * count, scales, count * sizeof(float));
      if (zero_points != nullptr) {
        std::memcpy(aux + i * count, zero_points, count * sizeof(int32_t));
      }
    }
    const int64_t filled = count * times;
    std::fill(scale + filled, scale + filled + kScalePadding, 1.0f);
    if (zero_points == nullptr) {
      std::fill(aux, aux + filled + kScalePadding, 0);
    } else {
      std::fill(aux + filled, aux + filled + kScalePadding, zero_points[0]);
    }
    const hn::ScalableTag<float> d;
    const hn::RebindToSigned<decltype(d)> di;
    auto good = hn::Eq(hn::Zero(d), hn::Zero(d));
    for (int64_t i = 0; i < filled; i += static_cast<int64_t>(hn::Lanes(d))) {
      const auto s = hn::Load(d, scale + i);
      const auto zero_point = hn::Load(di, aux + i);
      good = hn::And(good, coder.Accepts(d, s, zero_point));
      hn::Store(hn::Div(hn::Set(d, 1.0f), s), d, reciprocal + i);
      hn::Store(coder.Auxiliary(d, s, zero_point), di, aux + i);
    }
    // Padded elements are 0 and are to pass for good.
    std::fill(reciprocal + filled, reciprocal + filled + kScalePadding, 1.0f);
    std::fill(aux + filled, aux + filled + kScalePadding, 0);
    return hn::AllTrue(d, good);
  }
};

template <class D>
struct ScaleLanes {
  hn::Vec<D> scale;
  hn::Vec<D> reciprocal;
  hn::Vec<hn::RebindToSigned<D>> aux;
};

// Sources of the scales of Lanes(d) elements from the i-th on. Bind gives what
// a loop keeps in registers.

// One scale for all.
struct UniformScale {
  static constexpr bool kVaries = false;

  template <class D>
  struct Bound {
    ScaleLanes<D> lanes;
    HWY_INLINE const ScaleLanes<D>& Get(D d, int64_t i) const { return lanes; }
  };
  template <class D>
  HWY_INLINE Bound<D> Bind(D d) const {
    const hn::RebindToSigned<D> di;
    return {{hn::Set(d, arrays->scale[index]),
             hn::Set(d, arrays->reciprocal[index]),
             hn::Set(di, arrays->aux[index])}};
  }

  const ScaleArrays* arrays;
  int64_t index;
};

// One scale for each 2^shift elements, which are at least a vector, from the
// index-th on.
struct GroupScales {
  static constexpr bool kVaries = true;

  template <class D>
  struct Bound {
    const float* HWY_RESTRICT scale;
    const float* HWY_RESTRICT reciprocal;
    const int32_t* HWY_RESTRICT aux;
    int shift;
    HWY_INLINE ScaleLanes<D> Get(D d, int64_t i) const {
      const hn::RebindToSigned<D> di;
      const int64_t group = i >> shift;
      return {hn::Set(d, scale[group]), hn::Set(d, reciprocal[group]),
              hn::Set(di, aux[group])};
    }
  };
  template <class D>
  HWY_INLINE Bound<D> Bind(D d) const {
    return {arrays->scale + index, arrays->reciprocal + index,
            arrays->aux + index, shift};
  }

  const ScaleArrays* arrays;
  int64_t index;
  int shift;
};

// A scale for each element, from the index-th on.
struct ElementScales {
  static constexpr bool kVaries = true;

  template <class D>
  struct Bound {
    const float* HWY_RESTRICT scale;
    const float* HWY_RESTRICT reciprocal;
    const int32_t* HWY_RESTRICT aux;
    HWY_INLINE ScaleLanes<D> Get(D d, int64_t i) const {
      const hn::RebindToSigned<D> di;
      return {hn::LoadU(d, scale + i), hn::LoadU(d, reciprocal + i),
              hn::LoadU(di, aux + i)};
    }
  };
  template <class D>
  HWY_INLINE Bound<D> Bind(D d) const {
    return {arrays->scale + index, arrays->reciprocal + index,
            arrays->aux + index};
  }

  const ScaleArrays* arrays;
  int64_t index;
};

}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();
#endif

#endif  // QUANTD_CORE_QUANTIZE_SCALES_INL_H_
