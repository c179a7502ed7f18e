#include "core/quantize/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "core/errors.h"
#include "core/formats/grid.h"
#include "core/formats/number_format.h"
#include "core/formats/packing.h"
#include "core/quantize/quantize_kernel.h"
#include "core/simd_internal.h"
#include "core/types/float_convert.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/quantize/quantize.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/formats/float_codec-inl.h"
#include "core/formats/packing-inl.h"
#include "core/types/float_convert-inl.h"

#ifndef QUANTD_CORE_QUANTIZE_QUANTIZE_ONCE
#define QUANTD_CORE_QUANTIZE_QUANTIZE_ONCE
namespace quantd::core {
namespace {

// Elements that go through the L1 buffers at a time.
constexpr int64_t kBlockElements = 2048;
// Elements that are done over when one of them is clipped or not a number.
constexpr int64_t kPieceElements = 256;
// Elements of a task; a multiple of kBlockElements.
constexpr int64_t kTaskElements = 64 * 1024;

// Adding 1.5 * 2^23 rounds a float of magnitude up to 2^22 to the nearest even
// integer, which the low bits of the sum then hold.
constexpr float kMagic = 12582912.0f;
constexpr int32_t kMagicBits = 0x4B400000;
constexpr int32_t kMagicLimit = 1 << 22;

// Scales whose parameters are made at a time.
constexpr int64_t kBatchScales = 16;

// What the elements of one scale index have in common.
struct ScaleParameters {
  float scale;
  float reciprocal;
  // The smallest and the largest x that are not clipped.
  float low;
  float high;
  int32_t zero_point;
  // The division may be replaced; see ExactQuotient.
  bool has_reciprocal;
};

}  // namespace
}  // namespace quantd::core
#endif  // QUANTD_CORE_QUANTIZE_QUANTIZE_ONCE

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

void QuantizeSimd(const QuantizeRange& range, QuantizeCounts* counts) {
  QuantizeScalar(range, counts);
}

#else

#undef QUANTD_HAS_FMA
#if HWY_TARGET == HWY_SSSE3 || HWY_TARGET == HWY_SSE4
#define QUANTD_HAS_FMA 0
#else
#define QUANTD_HAS_FMA 1
#endif

// x / scale, correctly rounded. With y the correctly rounded reciprocal and q
// within one unit in the last place of the quotient, fma(x - q * scale, y, q)
// is the correctly rounded quotient (Markstein); a product x * y can be 1.5
// units off, so one such step makes it good enough for the other. Quotients
// below a quarter may come out different, but round to zero all the same.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExactQuotient(D d, V x, V scale, V y) {
#if QUANTD_HAS_FMA
  const V product = hn::Mul(x, y);
  const V near = hn::MulAdd(hn::NegMulAdd(product, scale, x), y, product);
  return hn::MulAdd(hn::NegMulAdd(near, scale, x), y, near);
#else
  return hn::Div(x, scale);
#endif
}

// The neighbours of floats other than zero.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V NextAbove(D d, V x) {
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(di, x);
  // 1 for positive numbers, -1 for negative ones.
  const auto step = hn::Or(hn::BroadcastSignBit(bits), hn::Set(di, 1));
  return hn::BitCast(d, hn::Add(bits, step));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V NextBelow(D d, V x) {
  return hn::Neg(NextAbove(d, hn::Neg(x)));
}

// The largest x with rint(x / scale) <= high, in exact IEEE terms: x / scale
// rounds to at most `last`, the largest float that rint takes to `high`, while
// it is below the middle between `last` and its successor. It is never equal:
// that middle has 25 significant bits, and a product with it at least as many,
// more than x has. The product with a float's 24 bits is exact in float64.
template <class DF, class VF = hn::Vec<DF>,
          class VI = hn::Vec<hn::RebindToSigned<DF>>>
HWY_INLINE VF LargestUnclipped(DF df, VF scale, VI high) {
  const hn::RebindToSigned<DF> di;
  const hn::Rebind<double, DF> dd;
  const auto tie = hn::Add(hn::ConvertTo(df, high), hn::Set(df, 0.5f));
  const auto is_even = hn::Eq(hn::And(high, hn::Set(di, 1)), hn::Zero(di));
  const auto last =
      hn::IfThenElse(hn::RebindMask(df, is_even), tie, NextBelow(df, tie));
  const auto middle = hn::Mul(
      hn::Add(hn::PromoteTo(dd, last), hn::PromoteTo(dd, NextAbove(df, last))),
      hn::Set(dd, 0.5));
  const auto bound = hn::Mul(hn::PromoteTo(dd, scale), middle);
  const auto rounded = hn::DemoteTo(df, bound);
  // One float64 unit of slack in the other direction has the sign of the
  // excess, so that a mask of the narrow type is made from numbers.
  const auto excess = hn::DemoteTo(
      df, hn::IfThenElseZero(hn::Gt(hn::PromoteTo(dd, rounded), bound),
                             hn::Set(dd, 1.0)));
  return hn::IfThenElse(hn::Gt(excess, hn::Zero(df)), NextBelow(df, rounded),
                        rounded);
}

// Parameters of up to kBatchScales consecutive scale indices.
class ScaleBatch {
 public:
  explicit ScaleBatch(const QuantizeRange& range) : range_(range) {}

  // Makes those from `scale_index` on where it has them not.
  HWY_INLINE const ScaleParameters& Get(int64_t scale_index) {
    if (HWY_UNLIKELY(scale_index < first_ || scale_index >= first_ + count_)) {
      Make(scale_index);
    }
    return parameters_[scale_index - first_];
  }

 private:
  HWY_NOINLINE void Make(int64_t first) {
    const Encoding& encoding = range_.encoding;
    first_ = first;
    count_ = std::min<int64_t>(
        kBatchScales, static_cast<int64_t>(encoding.scale.size()) - first);
    HWY_ALIGN float scale[kBatchScales];
    HWY_ALIGN int32_t zero_point[kBatchScales];
    for (int64_t i = 0; i < kBatchScales; ++i) {
      scale[i] = i < count_ ? encoding.scale[first + i] : 1.0f;
      zero_point[i] = i < count_ ? range_.zero_point(first + i) : 0;
    }
    HWY_ALIGN float reciprocal[kBatchScales];
    HWY_ALIGN float low[kBatchScales];
    HWY_ALIGN float high[kBatchScales];
    const hn::CappedTag<double, kBatchScales> dd;
    const hn::Rebind<float, decltype(dd)> df;
    const hn::Rebind<int32_t, decltype(dd)> di;
    for (size_t i = 0; i < kBatchScales; i += hn::Lanes(dd)) {
      const auto s = hn::LoadU(df, scale + i);
      const auto zero = hn::LoadU(di, zero_point + i);
      const auto qmin = hn::Set(di, encoding.qmin);
      const auto qmax = hn::Set(di, encoding.qmax);
      hn::StoreU(hn::Div(hn::Set(df, 1.0f), s), df, reciprocal + i);
      hn::StoreU(LargestUnclipped(df, s, hn::Sub(qmax, zero)), df, high + i);
      hn::StoreU(hn::Neg(LargestUnclipped(df, s, hn::Sub(zero, qmin))), df,
                 low + i);
    }
    for (int64_t i = 0; i < count_; ++i) {
      // Far from the ends of the exponents no step of ExactQuotient underflows
      // or overflows; the magic sum has its own limit.
      const bool has_reciprocal =
          scale[i] >= 0x1p-100f && scale[i] <= 0x1p100f &&
          encoding.qmin - zero_point[i] >= -kMagicLimit &&
          encoding.qmax - zero_point[i] <= kMagicLimit;
      parameters_[i] = {scale[i], reciprocal[i], low[i],
                        high[i],  zero_point[i], has_reciprocal};
    }
  }

  const QuantizeRange& range_;
  int64_t first_ = 0;
  int64_t count_ = 0;
  ScaleParameters parameters_[kBatchScales];
};

// The parameters of one scale index in every lane.
template <class D>
struct VectorParameters {
  VectorParameters(D d, const ScaleParameters& p)
      : low(hn::Set(d, p.low)),
        high(hn::Set(d, p.high)),
        scale(hn::Set(d, p.scale)),
        reciprocal(hn::Set(d, p.reciprocal)),
        magic(hn::Set(d, kMagic)),
        offset(hn::Set(hn::RebindToSigned<D>(), kMagicBits - p.zero_point)) {}

  hn::Vec<D> low;
  hn::Vec<D> high;
  hn::Vec<D> scale;
  hn::Vec<D> reciprocal;
  hn::Vec<D> magic;
  hn::Vec<hn::RebindToSigned<D>> offset;
};

// Codes of Lanes(d) elements of one scale index. Takes lanes out of `good`
// that are clipped or NaN: a clipped code is right, that of a NaN is not.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> QuantizeVector(
    D d, const uint8_t* HWY_RESTRICT in, const VectorParameters<D>& p,
    hn::Mask<D>& good) {
  const hn::RebindToSigned<D> di;
  const auto x = LoadBytes(d, in);
  const auto clamped = hn::Min(hn::Max(x, p.low), p.high);
  good = hn::And(good, hn::Eq(x, clamped));
  const auto quotient = ExactQuotient(d, clamped, p.scale, p.reciprocal);
  return hn::Sub(hn::BitCast(di, hn::Add(quotient, p.magic)), p.offset);
}

// Stores 4 * Lanes(di) codes.
template <typename Code, class DI, class V = hn::Vec<DI>>
HWY_INLINE void StoreFour(DI di, V v0, V v1, V v2, V v3,
                          uint8_t* HWY_RESTRICT out) {
#if HWY_TARGET == HWY_AVX3
  // Four demotions take eight shuffles, this takes four. The packs work within
  // 128-bit blocks; the permutation puts the blocks back in order.
  if constexpr (sizeof(Code) == 1) {
    const __m512i low = _mm512_packs_epi32(v0.raw, v1.raw);
    const __m512i high = _mm512_packs_epi32(v2.raw, v3.raw);
    const __m512i packed = std::is_signed_v<Code>
                               ? _mm512_packs_epi16(low, high)
                               : _mm512_packus_epi16(low, high);
    const __m512i order =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, packed));
  } else {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const auto pack = [](__m512i a, __m512i b) HWY_ATTR {
      return std::is_signed_v<Code> ? _mm512_packs_epi32(a, b)
                                    : _mm512_packus_epi32(a, b);
    };
    _mm512_storeu_si512(out,
                        _mm512_permutexvar_epi64(order, pack(v0.raw, v1.raw)));
    _mm512_storeu_si512(out + 64,
                        _mm512_permutexvar_epi64(order, pack(v2.raw, v3.raw)));
  }
#else
  const hn::Rebind<Code, DI> dc;
  const size_t stride = hn::Lanes(di) * sizeof(Code);
  StoreBytes(hn::DemoteTo(dc, v0), dc, out);
  StoreBytes(hn::DemoteTo(dc, v1), dc, out + stride);
  StoreBytes(hn::DemoteTo(dc, v2), dc, out + 2 * stride);
  StoreBytes(hn::DemoteTo(dc, v3), dc, out + 3 * stride);
#endif
}

// Counts what QuantizeVector found clipped or NaN, and gives NaN its code.
template <typename Code>
void CountSpecial(const uint8_t* HWY_RESTRICT in, int64_t count,
                  const ScaleParameters& p, int32_t nan_code,
                  uint8_t* HWY_RESTRICT out, QuantizeCounts* counts) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const float infinity = std::numeric_limits<float>::infinity();
  int64_t low = 0, high = 0, nan = 0, positive = 0, negative = 0;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto x = LoadBytes(d, in + i * 4);
    low += hn::CountTrue(d, hn::Lt(x, hn::Set(d, p.low)));
    high += hn::CountTrue(d, hn::Gt(x, hn::Set(d, p.high)));
    nan += hn::CountTrue(d, hn::IsNaN(x));
    positive += hn::CountTrue(d, hn::Eq(x, hn::Set(d, infinity)));
    negative += hn::CountTrue(d, hn::Eq(x, hn::Set(d, -infinity)));
  }
  for (; i < count; ++i) {
    const float x = LoadUnaligned<float>(in + i * 4);
    low += x < p.low;
    high += x > p.high;
    nan += std::isnan(x);
    positive += x == infinity;
    negative += x == -infinity;
  }
  counts->clipped_low += low;
  counts->clipped_high += high;
  counts->nan += nan;
  counts->positive_infinity += positive;
  counts->negative_infinity += negative;
  if (nan == 0) return;
  for (i = 0; i < count; ++i) {
    if (std::isnan(LoadUnaligned<float>(in + i * 4))) {
      StoreUnaligned(static_cast<Code>(nan_code),
                     out + i * static_cast<int64_t>(sizeof(Code)));
    }
  }
}

// Elements of one scale index that has a reciprocal.
template <typename Code>
HWY_INLINE void QuantizeUniform(const uint8_t* HWY_RESTRICT in, int64_t count,
                                const ScaleParameters& p, int32_t nan_code,
                                uint8_t* HWY_RESTRICT out,
                                QuantizeCounts* counts) {
  using D = hn::ScalableTag<float>;
  using D1 = hn::CappedTag<float, 1>;
  const D d;
  const D1 d1;
  const hn::RebindToSigned<D> di;
  const hn::Rebind<Code, D> dc;
  const hn::Rebind<Code, D1> dc1;
  constexpr int64_t kCodeSize = sizeof(Code);
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const VectorParameters<D> vp(d, p);
  while (count > 0) {
    const int64_t piece = std::min(count, kPieceElements);
    int64_t i = 0;
    auto good = hn::Eq(hn::Zero(d), hn::Zero(d));
    for (; i + 4 * lanes <= piece; i += 4 * lanes) {
      const uint8_t* four = in + i * 4;
      const auto v0 = QuantizeVector(d, four, vp, good);
      const auto v1 = QuantizeVector(d, four + 4 * lanes, vp, good);
      const auto v2 = QuantizeVector(d, four + 8 * lanes, vp, good);
      const auto v3 = QuantizeVector(d, four + 12 * lanes, vp, good);
      StoreFour<Code>(di, v0, v1, v2, v3, out + i * kCodeSize);
    }
    for (; i + lanes <= piece; i += lanes) {
      StoreBytes(hn::DemoteTo(dc, QuantizeVector(d, in + i * 4, vp, good)), dc,
                 out + i * kCodeSize);
    }
    bool all_good = hn::AllTrue(d, good);
    if (i < piece) {
      const VectorParameters<D1> vp1(d1, p);
      auto good1 = hn::Eq(hn::Zero(d1), hn::Zero(d1));
      for (; i < piece; ++i) {
        StoreBytes(
            hn::DemoteTo(dc1, QuantizeVector(d1, in + i * 4, vp1, good1)), dc1,
            out + i * kCodeSize);
      }
      all_good &= hn::AllTrue(d1, good1);
    }
    if (HWY_UNLIKELY(!all_good)) {
      CountSpecial<Code>(in, piece, p, nan_code, out, counts);
    }
    in += piece * 4;
    out += piece * kCodeSize;
    count -= piece;
  }
}

// Elements and their quotients, with a scale and zero point each or the same in
// all lanes.
template <class D>
struct Quotients {
  hn::Vec<D> x;
  hn::Vec<D> rounded;
  // Codes less the zero point.
  hn::Vec<D> low;
  hn::Vec<D> high;
  hn::Vec<hn::Rebind<int32_t, D>> zero_point;
};

// The run's scales and zero points [count], or [1] if they do not step.
struct RunScales {
  const float* scale;
  // Null: all zero.
  const int32_t* zero_point;
  int32_t qmin;
  int32_t qmax;
};

// Lanes(d) elements from the i-th of a run on, at `in`.
template <int kStep, class D>
HWY_INLINE Quotients<D> Divide(D d, const uint8_t* HWY_RESTRICT in,
                               const RunScales& run, int64_t i) {
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<float, D> df;
  Quotients<D> q;
  q.x = LoadBytes(d, in);
  if (run.zero_point == nullptr) {
    q.zero_point = hn::Zero(di);
  } else {
    q.zero_point = kStep == 1 ? hn::LoadU(di, run.zero_point + i)
                              : hn::Set(di, *run.zero_point);
  }
  const auto scale =
      kStep == 1 ? hn::LoadU(df, run.scale + i) : hn::Set(df, *run.scale);
  const auto low = hn::Sub(hn::Set(di, run.qmin), q.zero_point);
  const auto high = hn::Sub(hn::Set(di, run.qmax), q.zero_point);
  if constexpr (std::is_same_v<hn::TFromD<D>, double>) {
    q.rounded = hn::Round(hn::Div(q.x, hn::PromoteTo(d, scale)));
    q.low = hn::PromoteTo(d, low);
    q.high = hn::PromoteTo(d, high);
  } else {
    q.rounded = hn::Round(hn::Div(q.x, scale));
    q.low = hn::ConvertTo(d, low);
    q.high = hn::ConvertTo(d, high);
  }
  return q;
}

// Stores codes. Takes lanes out of `good` that are clipped or NaN: a clipped
// code is right, that of a NaN is not.
template <typename Code, class D>
HWY_INLINE void StoreQuotients(D d, const Quotients<D>& q,
                               uint8_t* HWY_RESTRICT out, hn::Mask<D>& good) {
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<Code, D> dc;
  const auto clamped = hn::Min(hn::Max(q.rounded, q.low), q.high);
  good = hn::And(good, hn::Eq(q.rounded, clamped));
  hn::Vec<decltype(di)> code;
  if constexpr (std::is_same_v<hn::TFromD<D>, double>) {
    code = hn::DemoteTo(di, clamped);
  } else {
    code = hn::ConvertTo(di, clamped);
  }
  StoreBytes(hn::DemoteTo(dc, hn::Add(code, q.zero_point)), dc, out);
}

// Counts elements that are not finite.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void CountNonFinite(D d, V x, QuantizeCounts* counts) {
  using T = hn::TFromD<D>;
  const auto infinity = hn::Set(d, std::numeric_limits<T>::infinity());
  counts->nan += hn::CountTrue(d, hn::IsNaN(x));
  counts->positive_infinity += hn::CountTrue(d, hn::Eq(x, infinity));
  counts->negative_infinity += hn::CountTrue(d, hn::Eq(x, hn::Neg(infinity)));
}

// Whether a quotient is NaN: that of a NaN, or of any element by a NaN scale.
template <class D>
HWY_INLINE bool CountQuotients(D d, const Quotients<D>& q,
                               QuantizeCounts* counts) {
  counts->clipped_low += hn::CountTrue(d, hn::Lt(q.rounded, q.low));
  counts->clipped_high += hn::CountTrue(d, hn::Gt(q.rounded, q.high));
  CountNonFinite(d, q.x, counts);
  return !hn::AllFalse(d, hn::IsNaN(q.rounded));
}

// Elements of one run. `T` is float or double.
template <int kStep, typename T, typename Code>
void QuantizeByDivision(const QuantizeRange& range, int64_t scale_index,
                        const uint8_t* HWY_RESTRICT in, int64_t count,
                        uint8_t* HWY_RESTRICT out, QuantizeCounts* counts) {
  using D = hn::ScalableTag<T>;
  using D1 = hn::CappedTag<T, 1>;
  const D d;
  const D1 d1;
  constexpr int64_t kSize = sizeof(T);
  constexpr int64_t kCodeSize = sizeof(Code);
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const Encoding& encoding = range.encoding;
  const RunScales run{encoding.scale.data() + scale_index,
                      encoding.zero_point.empty()
                          ? nullptr
                          : encoding.zero_point.data() + scale_index,
                      encoding.qmin, encoding.qmax};
  for (int64_t begin = 0; begin < count; begin += kPieceElements) {
    const int64_t end = std::min(begin + kPieceElements, count);
    auto good = hn::Eq(hn::Zero(d), hn::Zero(d));
    auto good1 = hn::Eq(hn::Zero(d1), hn::Zero(d1));
    int64_t i = begin;
    for (; i + lanes <= end; i += lanes) {
      StoreQuotients<Code>(d, Divide<kStep>(d, in + i * kSize, run, i),
                           out + i * kCodeSize, good);
    }
    for (; i < end; ++i) {
      StoreQuotients<Code>(d1, Divide<kStep>(d1, in + i * kSize, run, i),
                           out + i * kCodeSize, good1);
    }
    if (HWY_LIKELY(hn::AllTrue(d, good) && hn::AllTrue(d1, good1))) continue;
    bool has_nan = false;
    for (i = begin; i + lanes <= end; i += lanes) {
      has_nan |=
          CountQuotients(d, Divide<kStep>(d, in + i * kSize, run, i), counts);
    }
    for (; i < end; ++i) {
      has_nan |=
          CountQuotients(d1, Divide<kStep>(d1, in + i * kSize, run, i), counts);
    }
    if (!has_nan) continue;
    for (i = begin; i < end; ++i) {
      int32_t code;
      if (std::isnan(run.scale[i * kStep])) {
        code = 0;
      } else if (std::isnan(LoadUnaligned<T>(in + i * kSize))) {
        code = range.NanCode(
            run.zero_point == nullptr ? 0 : run.zero_point[i * kStep]);
      } else {
        continue;
      }
      StoreUnaligned(static_cast<Code>(code), out + i * kCodeSize);
    }
  }
}

// Lanes(d) elements from the i-th of a run on and their quotients.
template <class D>
struct GridQuotients {
  hn::Vec<D> x;
  hn::Vec<D> quotient;
};

template <int kStep, class D>
HWY_INLINE GridQuotients<D> DivideForGrid(D d, const uint8_t* HWY_RESTRICT in,
                                          const float* HWY_RESTRICT scale,
                                          int64_t i) {
  using T = hn::TFromD<D>;
  const hn::Rebind<float, D> df;
  const auto x = LoadBytes(d, in + i * static_cast<int64_t>(sizeof(T)));
  const auto s = kStep == 1 ? hn::LoadU(df, scale + i) : hn::Set(df, *scale);
  // The zero point: it makes +0 of -0.
  const auto zero = hn::Zero(d);
  if constexpr (std::is_same_v<T, double>) {
    return {x, hn::Add(hn::Div(x, hn::PromoteTo(d, s)), zero)};
  } else {
    return {x, hn::Add(hn::Div(x, s), zero)};
  }
}

// Elements of one run, codes on a FloatGrid or CodebookGrid.
template <int kStep, typename T, class Grid>
void QuantizeOnGrid(const QuantizeRange& range, const Grid& grid,
                    int64_t scale_index, const uint8_t* HWY_RESTRICT in,
                    int64_t count, uint8_t* HWY_RESTRICT out,
                    QuantizeCounts* counts) {
  using D = hn::ScalableTag<T>;
  using D1 = hn::CappedTag<T, 1>;
  const D d;
  const D1 d1;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const float* scale = range.encoding.scale.data() + scale_index;
  const auto encode = [&](auto tag, int64_t i, auto& good) HWY_ATTR {
    const auto q = DivideForGrid<kStep>(tag, in, scale, i).quotient;
    good = hn::And(good, InRange(tag, grid, q));
    return EncodeInRange(tag, grid, q);
  };
  // Counts, and makes all codes but those of NaN under other policies than the
  // default.
  const auto encode_special = [&](auto tag, int64_t i) HWY_ATTR {
    const hn::Rebind<uint8_t, decltype(tag)> du8;
    const auto q = DivideForGrid<kStep>(tag, in, scale, i);
    counts->clipped_low += hn::CountTrue(tag, IsBelow(tag, grid, q.quotient));
    counts->clipped_high += hn::CountTrue(tag, IsAbove(tag, grid, q.quotient));
    CountNonFinite(tag, q.x, counts);
    StoreBytes(hn::DemoteTo(du8, Encode(tag, grid, q.quotient)), du8, out + i);
  };
  for (int64_t begin = 0; begin < count; begin += kPieceElements) {
    const int64_t end = std::min(begin + kPieceElements, count);
    auto good = hn::Eq(hn::Zero(d), hn::Zero(d));
    auto good1 = hn::Eq(hn::Zero(d1), hn::Zero(d1));
    int64_t i = begin;
    if constexpr (std::is_same_v<T, float>) {
      const hn::RebindToSigned<D> di;
      for (; i + 4 * lanes <= end; i += 4 * lanes) {
        const auto v0 = encode(d, i, good);
        const auto v1 = encode(d, i + lanes, good);
        const auto v2 = encode(d, i + 2 * lanes, good);
        const auto v3 = encode(d, i + 3 * lanes, good);
        StoreFour<uint8_t>(di, v0, v1, v2, v3, out + i);
      }
    }
    for (; i + lanes <= end; i += lanes) {
      const hn::Rebind<uint8_t, D> du8;
      StoreBytes(hn::DemoteTo(du8, encode(d, i, good)), du8, out + i);
    }
    for (; i < end; ++i) {
      const hn::Rebind<uint8_t, D1> du8;
      StoreBytes(hn::DemoteTo(du8, encode(d1, i, good1)), du8, out + i);
    }
    if (HWY_LIKELY(hn::AllTrue(d, good) && hn::AllTrue(d1, good1))) continue;
    const int64_t nan_before = counts->nan;
    for (i = begin; i + lanes <= end; i += lanes) encode_special(d, i);
    for (; i < end; ++i) encode_special(d1, i);
    if (counts->nan == nan_before) continue;
    for (i = begin; i < end; ++i) {
      if (std::isnan(
              LoadUnaligned<T>(in + i * static_cast<int64_t>(sizeof(T)))) &&
          !std::isnan(scale[i * kStep])) {
        out[i] = static_cast<uint8_t>(range.NanCode(0));
      }
    }
  }
}

// Calls `quantize_part(run, in, count, codes)` for the parts of the runs,
// widened to T and with codes of that size each.
template <typename T, typename Code, class Function>
HWY_INLINE void ForEachPart(const QuantizeRange& range,
                            const Function& quantize_part) {
  const bool is_packed = range.format.storage_bits < 8;
  const bool widens = sizeof(T) == 4 && range.type != ElementType::kFloat32;
  const int64_t element_bytes = ElementSizeBytes(range.type);
  HWY_ALIGN float wide[kBlockElements];
  HWY_ALIGN uint8_t codes[kBlockElements];

  BlockLayout::RunCursor cursor(range.layout, range.first, range.count);
  BlockLayout::Run run{};
  for (int64_t begin = 0; begin < range.count; begin += kBlockElements) {
    const int64_t count = std::min(range.count - begin, kBlockElements);
    const uint8_t* in = range.in + begin * element_bytes;
    uint8_t* out = range.out + range.format.SizeBytes(begin);
    if (widens) {
      Widen(range.type, in, count, wide);
      in = reinterpret_cast<const uint8_t*>(wide);
    }
    uint8_t* block_codes = is_packed ? codes : out;
    for (int64_t i = 0; i < count;) {
      if (run.count == 0) cursor.Next(&run);
      const int64_t part = std::min(run.count, count - i);
      const uint8_t* part_in = in + i * static_cast<int64_t>(sizeof(T));
      uint8_t* part_codes =
          block_codes + i * static_cast<int64_t>(sizeof(Code));
      quantize_part(run, part_in, part, part_codes);
      run.count -= part;
      run.scale_index += part * run.scale_step;
      i += part;
    }
    if (is_packed) PackCodes(range.format.storage_bits, codes, count, out);
  }
}

template <typename T, typename Code>
void QuantizeIntegers(const QuantizeRange& range, QuantizeCounts* counts) {
  ScaleBatch batch(range);
  ForEachPart<T, Code>(
      range, [&](const BlockLayout::Run& run, const uint8_t* in, int64_t count,
                 uint8_t* codes) HWY_ATTR {
        if (run.scale_step == 1) {
          QuantizeByDivision<1, T, Code>(range, run.scale_index, in, count,
                                         codes, counts);
          return;
        }
        if constexpr (std::is_same_v<T, float>) {
          const ScaleParameters& parameters = batch.Get(run.scale_index);
          if (parameters.has_reciprocal) {
            QuantizeUniform<Code>(in, count, parameters,
                                  range.NanCode(parameters.zero_point), codes,
                                  counts);
            return;
          }
        }
        QuantizeByDivision<0, T, Code>(range, run.scale_index, in, count, codes,
                                       counts);
      });
}

template <typename T, class Grid>
void QuantizeToGrid(const QuantizeRange& range, const Grid& grid,
                    QuantizeCounts* counts) {
  ForEachPart<T, uint8_t>(
      range, [&](const BlockLayout::Run& run, const uint8_t* in, int64_t count,
                 uint8_t* codes) HWY_ATTR {
        if (run.scale_step == 1) {
          QuantizeOnGrid<1, T>(range, grid, run.scale_index, in, count, codes,
                               counts);
        } else {
          QuantizeOnGrid<0, T>(range, grid, run.scale_index, in, count, codes,
                               counts);
        }
      });
}

template <typename T>
void QuantizeTyped(const QuantizeRange& range, QuantizeCounts* counts) {
  const FormatInfo& format = range.format;
  switch (format.kind) {
    case CodeKind::kInteger:
      if (format.storage_bits == 16) {
        if (format.is_signed) {
          QuantizeIntegers<T, int16_t>(range, counts);
        } else {
          QuantizeIntegers<T, uint16_t>(range, counts);
        }
      } else {
        if (format.is_signed) {
          QuantizeIntegers<T, int8_t>(range, counts);
        } else {
          QuantizeIntegers<T, uint8_t>(range, counts);
        }
      }
      return;
    case CodeKind::kFloat:
      QuantizeToGrid<T>(
          range, FloatGrid(format.float_layout, range.encoding.no_saturation),
          counts);
      return;
    case CodeKind::kCodebook:
      QuantizeToGrid<T>(range, CodebookGrid(CodebookOf(range.encoding)),
                        counts);
      return;
  }
}

void QuantizeSimd(const QuantizeRange& range, QuantizeCounts* counts) {
  counts->total += range.count;
  if (range.type == ElementType::kFloat64) {
    QuantizeTyped<double>(range, counts);
  } else {
    QuantizeTyped<float>(range, counts);
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

HWY_EXPORT(QuantizeSimd);

// Requires: there is one.
absl::Status FirstNonFinite(const QuantizeRange& range) {
  int64_t i = 0;
  double value = 0;
  for (; i < range.count; ++i) {
    value = range.type == ElementType::kFloat64
                ? LoadElement<double>(range.type, range.in, i)
                : LoadElement<float>(range.type, range.in, i);
    if (!std::isfinite(value)) break;
  }
  return NonFiniteRejectedError(range.first + i, value);
}

}  // namespace

void QuantizeCounts::Merge(const QuantizeCounts& other) {
  total += other.total;
  clipped_low += other.clipped_low;
  clipped_high += other.clipped_high;
  nan += other.nan;
  positive_infinity += other.positive_infinity;
  negative_infinity += other.negative_infinity;
}

absl::Status Quantize(const Encoding& encoding, const BlockLayout& layout,
                      ElementType type, NanPolicy nan_policy, int64_t first,
                      int64_t count, const uint8_t* in, uint8_t* out,
                      QuantizeCounts* counts, ThreadPool* pool) {
  if (count == 0) return absl::OkStatus();
  const FormatInfo& format = *FindFormat(encoding.format);
  const int64_t element_bytes = ElementSizeBytes(type);
  const int64_t tasks = (count + kTaskElements - 1) / kTaskElements;
  const auto task_range = [&](int64_t task) {
    const int64_t begin = task * kTaskElements;
    return QuantizeRange{encoding,
                         format,
                         layout,
                         type,
                         nan_policy,
                         first + begin,
                         std::min(kTaskElements, count - begin),
                         in + begin * element_bytes,
                         out + format.SizeBytes(begin)};
  };
  std::vector<QuantizeCounts> task_counts(tasks);
  const bool is_scalar = internal::UsesScalarKernels();
  const auto run_task = [&](int64_t task) {
    if (is_scalar) {
      QuantizeScalar(task_range(task), &task_counts[task]);
    } else {
      HWY_DYNAMIC_DISPATCH(QuantizeSimd)(task_range(task), &task_counts[task]);
    }
  };
  ParallelFor(pool, tasks, run_task);
  for (int64_t task = 0; task < tasks; ++task) {
    const QuantizeCounts& c = task_counts[task];
    if (nan_policy == NanPolicy::kReject &&
        c.nan + c.positive_infinity + c.negative_infinity > 0) {
      return FirstNonFinite(task_range(task));
    }
    counts->Merge(c);
  }
  return absl::OkStatus();
}

}  // namespace quantd::core
#endif  // HWY_ONCE
