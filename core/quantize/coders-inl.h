// How the kernels of quantize.cc make codes of float32 vectors, one class per
// kind of code. All have the same members:
//
//   State<kCounts>        what a loop keeps of the elements that it saw: with
//                         kCounts how many were clipped, otherwise whether
//                         some were not ordinary
//   Accepts, Auxiliary    for ScaleArrays::Fill: which scales the class can
//                         work with, and what it needs of them besides
//   Code(d, x, scales)    codes of a vector; Store takes four of them
//   AllGood(state)        no element was clipped or NaN
//   CanCount              State<true> may be used
//   AllOrdinary(state)    its counts and the codes are right: there may be
//                         clipped elements, but none that are not finite
//   SawClipped(state)     some element was clipped
//   AddCounts(...)        adds its counts to sums over any lanes
//   Saturates             codes of clipped elements are right, but where
//                         quotients overflow
//   CountClipped(...)     counts those in `mask`; takes lanes out of `ordinary`
//                         whose codes may be wrong
//   SpecialCode(...)      codes of any elements; counts those in `mask`

#if defined(QUANTD_CORE_QUANTIZE_CODERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUANTD_CORE_QUANTIZE_CODERS_INL_H_
#undef QUANTD_CORE_QUANTIZE_CODERS_INL_H_
#else
#define QUANTD_CORE_QUANTIZE_CODERS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/formats/float_codec-inl.h"
#include "core/formats/grid.h"
#include "core/formats/packing-inl.h"
#include "core/quantize/quantize_kernel.h"
#include "core/quantize/scales-inl.h"
#include "hwy/highway.h"

// The targets without vectors run the scalar definitions.
#if HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Vectors are as wide as the target has them.
using FloatTag = hn::ScalableTag<float>;
using IntTag = hn::RebindToSigned<FloatTag>;
using WordTag = hn::Repartition<int16_t, FloatTag>;
using ByteTag = hn::Repartition<uint8_t, FloatTag>;
using FloatVector = hn::Vec<FloatTag>;
using IntVector = hn::Vec<IntTag>;
using FloatMask = hn::Mask<FloatTag>;

// To nearest even; the lowest int32 of NaN and of numbers beyond int32.
HWY_INLINE IntVector RoundToInt(FloatVector v) {
#if HWY_ARCH_X86 && HWY_MAX_BYTES == 64
  return IntVector{_mm512_cvtps_epi32(v.raw)};
#elif HWY_ARCH_X86 && HWY_MAX_BYTES == 32
  return IntVector{_mm256_cvtps_epi32(v.raw)};
#elif HWY_ARCH_X86
  return IntVector{_mm_cvtps_epi32(v.raw)};
#else
  const IntTag di;
  const auto is_int = hn::Lt(v, hn::Set(FloatTag(), 0x1p31f));
  return hn::IfThenElse(hn::RebindMask(di, is_int), hn::NearestInt(v),
                        hn::Set(di, std::numeric_limits<int32_t>::min()));
#endif
}

// v, loaded once: otherwise compilers load it again for every use, and loads
// that straddle cache lines are the bottleneck of what the L2 holds.
HWY_INLINE FloatVector InRegister(FloatVector v) {
#if HWY_ARCH_X86 && (HWY_COMPILER_GCC || HWY_COMPILER_CLANG)
#if HWY_MAX_BYTES == 64
  asm("" : "+v"(v.raw));
#else
  asm("" : "+x"(v.raw));
#endif
#endif
  return v;
}

// mask && a < b
HWY_INLINE FloatMask AndLess(FloatMask mask, FloatVector a, FloatVector b) {
#if HWY_ARCH_X86 && HWY_MAX_BYTES == 64
  return FloatMask{_mm512_mask_cmp_ps_mask(mask.raw, a.raw, b.raw, _CMP_LT_OQ)};
#else
  return hn::And(mask, hn::Lt(a, b));
#endif
}

// !(a < b): true of NaN
HWY_INLINE FloatMask NotLess(FloatVector a, FloatVector b) {
#if HWY_ARCH_X86 && HWY_MAX_BYTES == 64
  return FloatMask{_mm512_cmp_ps_mask(a.raw, b.raw, _CMP_NLT_UQ)};
#else
  return hn::Not(hn::Lt(a, b));
#endif
}

// v, and the bits in the lanes of the mask
HWY_INLINE IntVector OrWhere(FloatMask mask, IntVector v, IntVector bits) {
#if HWY_ARCH_X86 && HWY_MAX_BYTES == 64
  return IntVector{_mm512_mask_or_epi32(v.raw, mask.raw, v.raw, bits.raw)};
#else
  return hn::Or(v, hn::IfThenElseZero(hn::RebindMask(IntTag(), mask), bits));
#endif
}

// v, and 1 more in the lanes of the mask
template <class D, class V = hn::Vec<D>>
HWY_INLINE V CountWhere(D d, hn::Mask<D> mask, V v) {
#if HWY_ARCH_X86 && HWY_MAX_BYTES == 64
  if constexpr (sizeof(hn::TFromD<D>) == 2) {
    return V{
        _mm512_mask_sub_epi16(v.raw, mask.raw, v.raw, _mm512_set1_epi16(-1))};
  } else {
    return V{
        _mm512_mask_sub_epi32(v.raw, mask.raw, v.raw, _mm512_set1_epi32(-1))};
  }
#else
  return hn::Sub(v, hn::VecFromMask(d, mask));
#endif
}

HWY_INLINE void CountNonFinite(FloatMask mask, FloatVector x,
                               QuantizeCounts* counts) {
  const FloatTag d;
  const auto infinity = hn::Set(d, std::numeric_limits<float>::infinity());
  // One comparison where there is nothing to count.
  const auto is_special = hn::And(mask, hn::Not(hn::Lt(hn::Abs(x), infinity)));
  if (HWY_LIKELY(hn::AllFalse(d, is_special))) return;
  counts->nan += hn::CountTrue(d, hn::And(mask, hn::IsNaN(x)));
  counts->positive_infinity +=
      hn::CountTrue(d, hn::And(mask, hn::Eq(x, infinity)));
  counts->negative_infinity +=
      hn::CountTrue(d, hn::And(mask, hn::Eq(x, hn::Neg(infinity))));
}

// Integers in kBytes bytes. Codes are computed as what they are above qmin,
// which is 0 to qmax - qmin; `aux` is the zero point above qmin.
template <int kBytes>
class IntegerCoder {
 public:
  static constexpr int kCodeBytes = kBytes;

  // The largest code seen, as an unsigned number: what is below qmin is above
  // all others. Bytes are tested as int16, to which they saturate.
  using Seen = std::conditional_t<kBytes == 1, uint16_t, uint32_t>;
  using SeenTag = hn::Repartition<Seen, FloatTag>;
  struct FastState {
    HWY_INLINE FastState() : largest(hn::Zero(SeenTag())) {}
    hn::Vec<SeenTag> largest;
  };
  // Counts per lane, of a piece at the most, and the smallest and largest code
  // before the zero point or after it: what is not finite or overflows becomes
  // the end of a range of integers.
  using CountTag = std::conditional_t<kBytes == 1, WordTag, IntTag>;
  struct CountingState {
    HWY_INLINE CountingState()
        : low(hn::Zero(CountTag())),
          high(hn::Zero(CountTag())),
          smallest(hn::Zero(CountTag())),
          largest(hn::Zero(CountTag())) {}
    hn::Vec<CountTag> low;
    hn::Vec<CountTag> high;
    hn::Vec<CountTag> smallest;
    hn::Vec<CountTag> largest;
  };
  template <bool kCounts>
  using State = std::conditional_t<kCounts, CountingState, FastState>;

  explicit IntegerCoder(const QuantizeRange& range)
      : qmin_(range.encoding.qmin),
        span_(range.encoding.qmax - range.encoding.qmin),
        nan_is_qmin_(range.nan_policy == NanPolicy::kQmin) {}

  // Far from the ends of the exponents no step of ExactQuotient underflows or
  // overflows. Zero points outside of the codes may not leave int16.
  HWY_INLINE FloatMask Accepts(FloatTag d, FloatVector scale,
                               IntVector zero_point) const {
    const IntTag di;
    const auto aux = hn::Sub(zero_point, hn::Set(di, qmin_));
    const auto inside =
        hn::And(hn::Gt(aux, hn::Set(di, kBytes == 1 ? -16384 : -1)),
                hn::Lt(aux, hn::Set(di, kBytes == 1 ? 16384 : 65536)));
    return hn::And(hn::And(hn::Ge(scale, hn::Set(d, 0x1p-100f)),
                           hn::Le(scale, hn::Set(d, 0x1p100f))),
                   hn::RebindMask(d, inside));
  }
  HWY_INLINE IntVector Auxiliary(FloatTag d, FloatVector scale,
                                 IntVector zero_point) const {
    return hn::Sub(zero_point, hn::Set(IntTag(), qmin_));
  }

  // A zero point that all elements share is added in Store if that is cheaper.
  template <bool kVaries, class State>
  HWY_INLINE IntVector Code(FloatTag d, FloatVector x,
                            const ScaleLanes<FloatTag>& s, State& state) const {
    const auto code = RoundToInt(ExactQuotient<1>(d, x, s.scale, s.reciprocal));
    return kVaries || kBytes == 2 ? hn::Add(code, s.aux) : code;
  }

  template <bool kVaries, class State>
  HWY_INLINE void Store(IntVector v0, IntVector v1, IntVector v2, IntVector v3,
                        const ScaleLanes<FloatTag>& s, State& state, int bits,
                        uint8_t* HWY_RESTRICT out) const {
    const IntTag di;
    const WordTag dw;
    const ByteTag db;
    const SeenTag ds;
    constexpr bool kCounts = std::is_same_v<State, CountingState>;
    if constexpr (kBytes == 1) {
      auto low = PackToWords(di, v0, v1);
      auto high = PackToWords(di, v2, v3);
      if constexpr (kCounts && !kVaries) {
        state.smallest = hn::Min(state.smallest, hn::Min(low, high));
      }
      if constexpr (!kVaries) {
        const auto aux = PackToWords(di, s.aux, s.aux);
        low = hn::SaturatedAdd(low, aux);
        high = hn::SaturatedAdd(high, aux);
      }
      if constexpr (kCounts) {
        // The zero points may have wrapped what is at either end around.
        if constexpr (kVaries) {
          state.smallest = hn::Min(state.smallest, hn::Min(low, high));
          state.largest = hn::Max(state.largest, hn::Max(low, high));
        }
        Count(low, state);
        Count(high, state);
      } else {
        state.largest = hn::Max(state.largest, hn::BitCast(ds, low));
        state.largest = hn::Max(state.largest, hn::BitCast(ds, high));
      }
      const auto bytes = hn::Min(OrderBytes(db, PackToBytes(dw, low, high)),
                                 hn::Set(db, static_cast<uint8_t>(span_)));
      StorePacked(db, hn::Add(bytes, hn::Set(db, static_cast<uint8_t>(qmin_))),
                  bits, out);
    } else {
      for (const auto& v : {v0, v1, v2, v3}) {
        if constexpr (kCounts) {
          state.smallest = hn::Min(state.smallest, v);
          Count(v, state);
        } else {
          state.largest = hn::Max(state.largest, hn::BitCast(ds, v));
        }
      }
      const auto half = hn::Set(di, 32768);
      const auto last = hn::Set(dw, static_cast<int16_t>(span_ - 32768));
      const auto base = hn::Set(dw, static_cast<int16_t>(qmin_ + 32768));
      const auto store = [&](IntVector a, IntVector b, int64_t at) HWY_ATTR {
        const auto words =
            hn::Min(PackToWords(di, hn::Sub(a, half), hn::Sub(b, half)), last);
        hn::StoreU(hn::BitCast(db, OrderWords(dw, hn::Add(words, base))), db,
                   out + at);
      };
      store(v0, v1, 0);
      store(v2, v3, static_cast<int64_t>(hn::Lanes(db)));
    }
  }

  HWY_INLINE bool AllGood(const FastState& state) const {
    const SeenTag ds;
    // Saturated: Max gives the span unless a code is above it.
    const auto span = hn::Set(ds, static_cast<Seen>(span_));
    return hn::AllTrue(ds, hn::Eq(hn::Max(state.largest, span), span));
  }

  bool CanCount() const { return true; }

  HWY_INLINE bool AllOrdinary(const CountingState& state) const {
    const CountTag dc;
    using T = hn::TFromD<CountTag>;
    // A zero point of 16 bits is less than half of the numbers below.
    const auto lowest =
        hn::Set(dc, kBytes == 1 ? std::numeric_limits<T>::min()
                                : std::numeric_limits<T>::min() / 2);
    const auto highest = hn::Set(dc, std::numeric_limits<T>::max());
    return hn::AllTrue(dc, hn::And(hn::Gt(state.smallest, lowest),
                                   hn::Lt(state.largest, highest)));
  }

  HWY_INLINE bool SawClipped(const CountingState& state) const {
    const CountTag dc;
    return !hn::AllTrue(dc,
                        hn::Eq(hn::Or(state.low, state.high), hn::Zero(dc)));
  }

  HWY_INLINE void AddCounts(const CountingState& state, IntVector& low,
                            IntVector& high) const {
    low = Widened(state.low, low);
    high = Widened(state.high, high);
  }

  bool Saturates() const { return true; }

  HWY_INLINE FloatMask CountClipped(FloatTag d, FloatVector x,
                                    const ScaleLanes<FloatTag>& s,
                                    FloatMask mask, FloatMask ordinary,
                                    int64_t* low, int64_t* high) const {
    const IntTag di;
    const auto q = ExactQuotient<1>(d, x, s.scale, s.reciprocal);
    const auto code = hn::Add(RoundToInt(q), s.aux);
    const auto counted = hn::RebindMask(di, mask);
    *low += static_cast<int64_t>(
        hn::CountTrue(di, hn::And(counted, hn::Lt(code, hn::Zero(di)))));
    *high += static_cast<int64_t>(
        hn::CountTrue(di, hn::And(counted, hn::Gt(code, hn::Set(di, span_)))));
    return AndLess(ordinary, hn::Abs(q), hn::Set(d, 0x1p30f));
  }

  HWY_INLINE IntVector SpecialCode(FloatTag d, FloatVector x,
                                   const ScaleLanes<FloatTag>& s,
                                   FloatMask mask,
                                   QuantizeCounts* counts) const {
    const IntTag di;
    const auto nan = hn::IsNaN(x);
    // Beyond all codes and zero points, where rounding is still exact.
    const auto limit = hn::Mul(s.scale, hn::Set(d, 0x1p22f));
    const auto clamped =
        hn::Min(hn::Max(hn::IfThenZeroElse(nan, x), hn::Neg(limit)), limit);
    const auto code = hn::Add(
        RoundToInt(ExactQuotient<1>(d, clamped, s.scale, s.reciprocal)), s.aux);
    const auto span = hn::Set(di, span_);
    const auto counted = hn::RebindMask(di, hn::AndNot(nan, mask));
    counts->clipped_low +=
        hn::CountTrue(di, hn::And(counted, hn::Lt(code, hn::Zero(di))));
    counts->clipped_high +=
        hn::CountTrue(di, hn::And(counted, hn::Gt(code, span)));
    CountNonFinite(mask, x, counts);
    const auto number = hn::IfThenZeroElse(
        hn::And(hn::RebindMask(di, nan),
                hn::Eq(hn::Set(di, nan_is_qmin_), hn::Set(di, 1))),
        hn::Min(hn::Max(code, hn::Zero(di)), span));
    return hn::Add(number, hn::Set(di, qmin_));
  }

 private:
  HWY_INLINE void Count(hn::Vec<CountTag> code, CountingState& state) const {
    const CountTag dc;
    const auto span = hn::Set(dc, static_cast<hn::TFromD<CountTag>>(span_));
    state.low = hn::Sub(state.low, hn::BroadcastSignBit(code));
    state.high = CountWhere(dc, hn::Gt(code, span), state.high);
  }

  HWY_INLINE static IntVector Widened(hn::Vec<CountTag> counts, IntVector sum) {
    const IntTag di;
    if constexpr (kBytes == 1) {
      auto rest = hn::Zero(di);
      sum = hn::ReorderWidenMulAccumulate(di, counts, hn::Set(WordTag(), 1),
                                          sum, rest);
      return hn::Add(sum, rest);
    } else {
      return hn::Add(sum, counts);
    }
  }

  int32_t qmin_;
  int32_t span_;
  int32_t nan_is_qmin_;
};

// Base of the coders of floats and codebooks. Their codes are bytes.
template <class Grid>
class GridCoder {
 public:
  static constexpr int kCodeBytes = 1;

  struct FastState {
    HWY_INLINE FastState()
        : good(hn::Eq(hn::Zero(FloatTag()), hn::Zero(FloatTag()))) {}
    FloatMask good;
  };
  template <bool kVaries, class State>
  HWY_INLINE void Store(IntVector v0, IntVector v1, IntVector v2, IntVector v3,
                        const ScaleLanes<FloatTag>& s, State& state, int bits,
                        uint8_t* HWY_RESTRICT out) const {
    const IntTag di;
    const WordTag dw;
    const ByteTag db;
    const auto low = PackToWords(di, v0, v1);
    const auto high = PackToWords(di, v2, v3);
    StorePacked(db, OrderBytes(db, PackToBytes(dw, low, high)), bits, out);
  }

  HWY_INLINE bool AllGood(const FastState& state) const {
    return hn::AllTrue(FloatTag(), state.good);
  }

  HWY_INLINE IntVector SpecialCode(FloatTag d, FloatVector x,
                                   const ScaleLanes<FloatTag>& s,
                                   FloatMask mask,
                                   QuantizeCounts* counts) const {
    const IntTag di;
    // The zero point: it makes +0 of -0.
    const auto q = hn::Add(hn::Div(x, s.scale), hn::Zero(d));
    counts->clipped_low +=
        hn::CountTrue(d, hn::And(mask, IsBelow(d, *grid_, q)));
    counts->clipped_high +=
        hn::CountTrue(d, hn::And(mask, IsAbove(d, *grid_, q)));
    CountNonFinite(mask, x, counts);
    return hn::IfThenElse(hn::RebindMask(di, hn::IsNaN(x)),
                          hn::Set(di, nan_code_), Encode(d, *grid_, q));
  }

 protected:
  GridCoder(const QuantizeRange& range, const Grid& grid)
      : grid_(&grid), nan_code_(range.NanCode(0)) {}

  const Grid* grid_;
  int32_t nan_code_;
};

// Small floats, from quotients with one correction: ties between their numbers
// and the threshold of overflow have at most 5 bits. `aux` holds the bits of
// the lowest float32 whose quotient is -0, for it is too small, and becomes +0:
// -2^-150 times the scale, rounded towards 0.
class FloatCoder : public GridCoder<FloatGrid> {
 public:
  // Per lane, of the clipped elements alone: the sum of the magnitudes of their
  // quotients, which are all the largest number, or NaN where a quotient is
  // NaN; and the sum of their codes.
  struct CountingState {
    HWY_INLINE CountingState()
        : magnitudes(hn::Zero(FloatTag())), codes(hn::Zero(IntTag())) {}
    FloatVector magnitudes;
    IntVector codes;
  };
  template <bool kCounts>
  using State = std::conditional_t<kCounts, CountingState, FastState>;

  FloatCoder(const QuantizeRange& range, const FloatGrid& grid)
      : GridCoder(range, grid),
        overflow_(grid.for_float.overflow),
        largest_(grid.for_float.largest),
        smallest_normal_(grid.for_float.smallest_normal),
        mantissa_shift_(grid.mantissa_shift),
        sign_bit_(grid.sign_bit),
        largest_code_(grid.overflow_code),
        has_negative_zero_(grid.has_negative_zero),
        saturates_(!range.encoding.no_saturation) {
    const int mantissa_bits = 23 - grid.mantissa_shift;
    // Even, so that ties keep their parity.
    const int32_t low_bits = -grid.exponent_offset & (sign_bit_ - 1);
    magic_ =
        std::ldexp(static_cast<float>((1 << 23) + low_bits), -mantissa_bits);
    sign_shift_ = static_cast<int>(
        hwy::Num0BitsBelowLS1Bit_Nonzero32(static_cast<uint32_t>(sign_bit_)));
  }

  // Scales down to where quotients of at least 2^-18, half of the smallest
  // number of all formats, have corrections that do not underflow; up to where
  // the bits of `aux`, a subnormal number, are half the scale.
  HWY_INLINE FloatMask Accepts(FloatTag d, FloatVector scale,
                               IntVector zero_point) const {
    return hn::And(hn::Ge(scale, hn::Set(d, 0x1p-80f)),
                   hn::Le(scale, hn::Set(d, 0x1p23f)));
  }
  HWY_INLINE IntVector Auxiliary(FloatTag d, FloatVector scale,
                                 IntVector zero_point) const {
    const IntTag di;
    const auto bound = hn::ConvertTo(di, hn::Mul(scale, hn::Set(d, 0.5f)));
    return hn::Or(bound, hn::Set(di, std::numeric_limits<int32_t>::min()));
  }

  template <bool kVaries, class State>
  HWY_INLINE IntVector Code(FloatTag d, FloatVector x,
                            const ScaleLanes<FloatTag>& s, State& state) const {
    const IntTag di;
    const auto magnitude =
        hn::Abs(ExactQuotient<1>(d, x, s.scale, s.reciprocal));
    constexpr bool kCounts = std::is_same_v<State, CountingState>;
    if constexpr (!kCounts) {
      state.good = AndLess(state.good, magnitude, hn::Set(d, overflow_));
    }
    // NaN if the quotient is, where CanCount.
    const auto clamped = hn::Min(hn::Set(d, largest_), magnitude);
    // The bits of infinity are those of an exponent.
    const auto exponent = hn::Set(d, std::numeric_limits<float>::infinity());
    const auto power =
        hn::Max(hn::And(clamped, exponent), hn::Set(d, smallest_normal_));
    // The unit in the last place of the sum is that of the format's numbers
    // from `power` on. Its low bits count them, from what takes the bias out of
    // the exponent; one past the last mantissa is the next exponent.
    const auto sum = hn::MulAdd(power, hn::Set(d, magic_), clamped);
    const auto base =
        hn::ShiftRightSame(hn::BitCast(di, power), mantissa_shift_);
    const auto rest = hn::And(hn::Add(hn::BitCast(di, sum), base),
                              hn::Set(di, sign_bit_ - 1));
    auto negative = hn::Lt(x, hn::BitCast(d, s.aux));
    if (!has_negative_zero_) {
      negative =
          hn::And(negative, hn::RebindMask(d, hn::Ne(rest, hn::Zero(di))));
    }
    const auto code = OrWhere(negative, rest, hn::Set(di, sign_bit_));
    if constexpr (kCounts) {
      const auto clipped = NotLess(magnitude, hn::Set(d, overflow_));
      state.magnitudes = hn::IfThenElse(
          clipped, hn::Add(state.magnitudes, clamped), state.magnitudes);
      state.codes = hn::IfThenElse(hn::RebindMask(di, clipped),
                                   hn::Add(state.codes, code), state.codes);
    }
    return code;
  }

  // True if the format saturates and, on this target, quotients of numbers that
  // are not finite are NaN, and Min gives its second operand if that is NaN.
  bool CanCount() const {
    return saturates_ && HWY_ARCH_X86 != 0 && HWY_NATIVE_FMA != 0;
  }

  HWY_INLINE bool AllOrdinary(const CountingState& state) const {
    return hn::AllTrue(FloatTag(), hn::Eq(state.magnitudes, state.magnitudes));
  }

  HWY_INLINE bool SawClipped(const CountingState& state) const {
    const IntTag di;
    return !hn::AllTrue(di, hn::Eq(state.codes, hn::Zero(di)));
  }

  HWY_INLINE void AddCounts(const CountingState& state, IntVector& low,
                            IntVector& high) const {
    const FloatTag d;
    const IntTag di;
    // Both are exact: the codes of those below have the bit of the sign too.
    const auto clipped =
        hn::ConvertTo(di, hn::Div(state.magnitudes, hn::Set(d, largest_)));
    const auto signs =
        hn::Sub(state.codes, hn::Mul(clipped, hn::Set(di, largest_code_)));
    const auto below = hn::ShiftRightSame(signs, sign_shift_);
    low = hn::Add(low, below);
    high = hn::Add(high, hn::Sub(clipped, below));
  }

  bool Saturates() const { return saturates_; }

  HWY_INLINE FloatMask CountClipped(FloatTag d, FloatVector x,
                                    const ScaleLanes<FloatTag>& s,
                                    FloatMask mask, FloatMask ordinary,
                                    int64_t* low, int64_t* high) const {
    const auto q = ExactQuotient<1>(d, x, s.scale, s.reciprocal);
    const auto overflow = hn::Set(d, overflow_);
    *low += static_cast<int64_t>(
        hn::CountTrue(d, hn::And(mask, hn::Le(q, hn::Neg(overflow)))));
    *high += static_cast<int64_t>(
        hn::CountTrue(d, hn::And(mask, hn::Ge(q, overflow))));
    return AndLess(ordinary, hn::Abs(q), hn::Set(d, 0x1p100f));
  }

 private:
  float overflow_;
  float largest_;
  float smallest_normal_;
  float magic_;
  int mantissa_shift_;
  int32_t sign_bit_;
  int sign_shift_;
  // Code of the largest number, of saturating formats.
  int32_t largest_code_;
  bool has_negative_zero_;
  bool saturates_;
};

// Codebooks, from correctly rounded quotients: their thresholds may be any
// float32.
class CodebookCoder : public GridCoder<CodebookGrid> {
 public:
  // Counts per lane, and the largest magnitude of a quotient, by its bits: NaN
  // is above all numbers.
  struct CountingState {
    HWY_INLINE CountingState()
        : low(hn::Zero(IntTag())),
          high(hn::Zero(IntTag())),
          largest(hn::Zero(IntTag())) {}
    IntVector low;
    IntVector high;
    IntVector largest;
  };
  template <bool kCounts>
  using State = std::conditional_t<kCounts, CountingState, FastState>;

  CodebookCoder(const QuantizeRange& range, const CodebookGrid& grid)
      : GridCoder(range, grid),
        first_(grid.entry[0]),
        last_(grid.entry[grid.count - 1]) {
    // Quotients that are compared with 0 or numbers next to it must not
    // underflow.
    const auto is_small = [](float x) { return std::fabs(x) < 0x1p-40f; };
    const float* thresholds = grid.threshold_float;
    const bool is_safe =
        !is_small(first_) && !is_small(last_) &&
        std::none_of(thresholds, thresholds + grid.count - 1, is_small);
    const bool is_zero_or_safe =
        std::all_of(thresholds, thresholds + grid.count - 1,
                    [&](float x) { return x == 0 || !is_small(x); }) &&
        (first_ == 0 || !is_small(first_)) && (last_ == 0 || !is_small(last_));
    // With a reciprocal of at least 1 a quotient is 0 only if x is.
    largest_scale_ = is_safe ? 0x1p60f : is_zero_or_safe ? 1.0f : 0.0f;
  }

  HWY_INLINE FloatMask Accepts(FloatTag d, FloatVector scale,
                               IntVector zero_point) const {
    return hn::And(hn::Ge(scale, hn::Set(d, 0x1p-60f)),
                   hn::Le(scale, hn::Set(d, largest_scale_)));
  }
  HWY_INLINE IntVector Auxiliary(FloatTag d, FloatVector scale,
                                 IntVector zero_point) const {
    return hn::Zero(IntTag());
  }

  template <bool kVaries, class State>
  HWY_INLINE IntVector Code(FloatTag d, FloatVector x,
                            const ScaleLanes<FloatTag>& s, State& state) const {
    const auto q = ExactQuotient<2>(d, x, s.scale, s.reciprocal);
    if constexpr (std::is_same_v<State, CountingState>) {
      const auto low = hn::Lt(q, hn::Set(d, first_));
      const auto high = hn::Gt(q, hn::Set(d, last_));
      const IntTag di;
      state.low = CountWhere(di, hn::RebindMask(di, low), state.low);
      state.high = CountWhere(di, hn::RebindMask(di, high), state.high);
      state.largest = hn::Max(state.largest, hn::BitCast(di, hn::Abs(q)));
    } else {
      state.good = hn::And(state.good, hn::And(hn::Ge(q, hn::Set(d, first_)),
                                               hn::Le(q, hn::Set(d, last_))));
    }
    return EncodeInRange(d, *grid_, q);
  }

  bool CanCount() const { return true; }

  HWY_INLINE bool AllOrdinary(const CountingState& state) const {
    const IntTag di;
    const auto limit = hn::BitCast(di, hn::Set(FloatTag(), 0x1p100f));
    return hn::AllTrue(di, hn::Lt(state.largest, limit));
  }

  HWY_INLINE bool SawClipped(const CountingState& state) const {
    const IntTag di;
    return !hn::AllTrue(di,
                        hn::Eq(hn::Or(state.low, state.high), hn::Zero(di)));
  }

  HWY_INLINE void AddCounts(const CountingState& state, IntVector& low,
                            IntVector& high) const {
    low = hn::Add(low, state.low);
    high = hn::Add(high, state.high);
  }

  bool Saturates() const { return true; }

  HWY_INLINE FloatMask CountClipped(FloatTag d, FloatVector x,
                                    const ScaleLanes<FloatTag>& s,
                                    FloatMask mask, FloatMask ordinary,
                                    int64_t* low, int64_t* high) const {
    const auto q = ExactQuotient<2>(d, x, s.scale, s.reciprocal);
    *low += static_cast<int64_t>(
        hn::CountTrue(d, hn::And(mask, hn::Lt(q, hn::Set(d, first_)))));
    *high += static_cast<int64_t>(
        hn::CountTrue(d, hn::And(mask, hn::Gt(q, hn::Set(d, last_)))));
    return AndLess(ordinary, hn::Abs(q), hn::Set(d, 0x1p100f));
  }

 private:
  float first_;
  float last_;
  float largest_scale_;
};

}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();
#endif

#endif  // QUANTD_CORE_QUANTIZE_CODERS_INL_H_
