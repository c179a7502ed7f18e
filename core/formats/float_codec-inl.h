// SIMD versions of codec.h: vectors of quotients x / scale to the numbers of a
// format, and to its codes. The same for small floats and codebooks, and for
// float and double; each equals codec.h bit for bit:
//
//   InRange(d, grid, q)  lanes that are neither NaN nor clipped
//   IsBelow(d, grid, q), IsAbove(d, grid, q)  lanes that are clipped
//   Round(d, grid, q)    the number that the code stands for, any q
//   Encode(d, grid, q)   the code, as int32, any q
//   EncodeInRange(d, grid, q)  the same where InRange, otherwise unspecified
//
// Clipped are magnitudes from FloatGrid::Limits::overflow on, and numbers
// outside of a codebook's first and last entry.

#if defined(QUANTD_CORE_FORMATS_FLOAT_CODEC_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef QUANTD_CORE_FORMATS_FLOAT_CODEC_INL_H_
#undef QUANTD_CORE_FORMATS_FLOAT_CODEC_INL_H_
#else
#define QUANTD_CORE_FORMATS_FLOAT_CODEC_INL_H_
#endif

#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/formats/grid.h"
#include "hwy/highway.h"

// The targets without vectors run the scalar definitions.
#if HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// --- Small floats ----------------------------------------------------------

template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Mask<D> InRange(D d, const FloatGrid& grid, V q) {
  using T = hn::TFromD<D>;
  return hn::Lt(hn::Abs(q), hn::Set(d, grid.limits<T>().overflow));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Mask<D> IsBelow(D d, const FloatGrid& grid, V q) {
  using T = hn::TFromD<D>;
  return hn::Le(q, hn::Set(d, -grid.limits<T>().overflow));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Mask<D> IsAbove(D d, const FloatGrid& grid, V q) {
  using T = hn::TFromD<D>;
  return hn::Ge(q, hn::Set(d, grid.limits<T>().overflow));
}

// A magnitude that is being rounded: adding `magic`, whose unit in the last
// place is that of the format's numbers from `power` on, rounds it to nearest
// even, subnormals included.
template <class D>
struct RoundedMagnitude {
  hn::Vec<D> power;
  hn::Vec<D> magic;
  hn::Vec<D> sum;
};

// Rounds the magnitude, or the largest number if the magnitude is above that.
template <class D, class V = hn::Vec<D>>
HWY_INLINE RoundedMagnitude<D> RoundMagnitude(D d, const FloatGrid& grid,
                                              V magnitude) {
  using T = hn::TFromD<D>;
  const hn::RebindToUnsigned<D> du;
  const auto& limits = grid.limits<T>();
  const auto clamped = hn::Min(magnitude, hn::Set(d, limits.largest));
  // The bits of infinity are those of an exponent.
  const auto exponent = hn::Set(d, std::numeric_limits<T>::infinity());
  const auto power =
      hn::Max(hn::And(clamped, exponent), hn::Set(d, limits.smallest_normal));
  const auto magic = hn::BitCast(
      d, hn::Add(hn::BitCast(du, power), hn::Set(du, limits.magic_offset)));
  return {power, magic, hn::Add(clamped, magic)};
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Round(D d, const FloatGrid& grid, V q) {
  using T = hn::TFromD<D>;
  const auto rounded = RoundMagnitude(d, grid, hn::Abs(q));
  auto value = hn::Sub(rounded.sum, rounded.magic);
  if (!grid.has_negative_zero) {
    value = hn::IfThenZeroElse(hn::Eq(value, hn::Zero(d)),
                               hn::CopySignToAbs(value, q));
  } else {
    value = hn::CopySignToAbs(value, q);
  }
  const auto overflow = hn::Set(d, static_cast<T>(grid.overflow_value));
  value = hn::IfThenElse(
      IsAbove(d, grid, hn::Abs(q)),
      grid.overflow_has_sign ? hn::CopySignToAbs(overflow, q) : overflow,
      value);
  return hn::IfThenElse(hn::IsNaN(q),
                        hn::Set(d, static_cast<T>(grid.nan_value)), value);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<hn::Rebind<int32_t, D>> EncodeInRange(D d,
                                                         const FloatGrid& grid,
                                                         V q) {
  if constexpr (std::is_same_v<hn::TFromD<D>, double>) {
    // The numbers of the format are float32: no second rounding.
    const hn::Rebind<float, D> df;
    return EncodeInRange(df, grid, hn::DemoteTo(df, Round(d, grid, q)));
  } else {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto rounded = RoundMagnitude(d, grid, hn::Abs(q));
    // The low bits of the sum count units in the last place. One past the last
    // mantissa is the next exponent.
    const auto steps =
        hn::Sub(hn::BitCast(di, rounded.sum), hn::BitCast(di, rounded.magic));
    const auto base =
        hn::BitCast(di, hn::ShiftRightSame(hn::BitCast(du, rounded.power),
                                           grid.mantissa_shift));
    const auto sign = hn::And(
        hn::BitCast(di,
                    hn::ShiftRightSame(hn::BitCast(du, q), grid.sign_shift)),
        hn::Set(di, grid.sign_bit));
    const auto rest =
        hn::Add(steps, hn::Sub(base, hn::Set(di, grid.exponent_offset)));
    if (grid.has_negative_zero) return hn::Or(rest, sign);
    return hn::IfThenElseZero(hn::Ne(rest, hn::Zero(di)), hn::Or(rest, sign));
  }
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<hn::Rebind<int32_t, D>> Encode(D d, const FloatGrid& grid,
                                                  V q) {
  if constexpr (std::is_same_v<hn::TFromD<D>, double>) {
    const hn::Rebind<float, D> df;
    return Encode(df, grid, hn::DemoteTo(df, Round(d, grid, q)));
  } else {
    const hn::RebindToSigned<D> di;
    const auto sign = hn::IfThenElseZero(
        hn::Lt(hn::BitCast(di, q), hn::Zero(di)), hn::Set(di, grid.sign_bit));
    const auto overflow = hn::Set(di, grid.overflow_code);
    auto code = EncodeInRange(d, grid, q);
    code = hn::IfThenElse(
        hn::RebindMask(di, IsAbove(d, grid, hn::Abs(q))),
        grid.overflow_has_sign ? hn::Or(overflow, sign) : overflow, code);
    return hn::IfThenElse(hn::RebindMask(di, hn::IsNaN(q)),
                          hn::Set(di, grid.nan_code), code);
  }
}

// --- Codebooks -------------------------------------------------------------

template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Mask<D> IsBelow(D d, const CodebookGrid& grid, V q) {
  return hn::Lt(q, hn::Set(d, hn::TFromD<D>{grid.entry[0]}));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Mask<D> IsAbove(D d, const CodebookGrid& grid, V q) {
  return hn::Gt(q, hn::Set(d, hn::TFromD<D>{grid.entry[grid.count - 1]}));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Mask<D> InRange(D d, const CodebookGrid& grid, V q) {
  using T = hn::TFromD<D>;
  return hn::And(hn::Ge(q, hn::Set(d, T{grid.entry[0]})),
                 hn::Le(q, hn::Set(d, T{grid.entry[grid.count - 1]})));
}

// The index of the entry; 0 for NaN. As wide as the lanes of D.
template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> EntryIndex(D d,
                                                     const CodebookGrid& grid,
                                                     V q) {
  using T = hn::TFromD<D>;
  const hn::RebindToSigned<D> di;
  using TI = hn::TFromD<decltype(di)>;
  const T* threshold = grid.threshold<T>();
  auto index = hn::Zero(di);
  const auto add_where_above = [&](hn::Vec<D> probe, TI step) HWY_ATTR {
    index =
        hn::Add(index, hn::IfThenElseZero(hn::RebindMask(di, hn::Gt(q, probe)),
                                          hn::Set(di, step)));
  };
  int rest_steps = grid.search_steps;
  if constexpr (hn::MaxLanes(D()) >= 16) {
    // 16 thresholds fit one vector. The index is a multiple of twice the step:
    // a table that begins step - 1 thresholds later takes it as it is.
    const bool fits = grid.search_steps <= 4;
    const T* table = fits ? threshold : grid.coarse_threshold;
    add_where_above(hn::Set(d, table[7]), 8);
    for (TI step = 4; step > 0; step /= 2) {
      add_where_above(hn::TableLookupLanes(hn::LoadU(d, table + step - 1),
                                           hn::IndicesFromVec(d, index)),
                      step);
    }
    if (fits) return index;
    index = hn::ShiftLeft<4>(index);
    rest_steps = 4;
  } else if (grid.search_steps <= 4) {
    if constexpr (hn::MaxLanes(D()) == 8 && sizeof(T) == 4) {
      // A vector holds the thresholds of each level of the search.
      for (const auto& level : grid.level_threshold) {
        const auto above =
            hn::Gt(q, hn::TableLookupLanes(hn::Load(d, level),
                                           hn::IndicesFromVec(d, index)));
        // True is -1.
        index = hn::Sub(hn::Add(index, index),
                        hn::VecFromMask(di, hn::RebindMask(di, above)));
      }
      return index;
    }
    for (int k = 0; k + 1 < grid.count; ++k) {
      add_where_above(hn::Set(d, threshold[k]), 1);
    }
    return index;
  }
  for (TI step = TI{1} << (rest_steps - 1); step > 0; step /= 2) {
    const auto at = hn::Add(index, hn::Set(di, static_cast<TI>(step - 1)));
    add_where_above(hn::GatherIndex(d, threshold, at), step);
  }
  return index;
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<hn::Rebind<int32_t, D>> EncodeInRange(
    D d, const CodebookGrid& grid, V q) {
  const hn::Rebind<int32_t, D> di32;
  const auto index = EntryIndex(d, grid, q);
  if constexpr (std::is_same_v<hn::TFromD<D>, double>) {
    // Under the bits of 2^52 an integer becomes a float64.
    const hn::RebindToSigned<D> di;
    const auto magic = hn::Set(d, 0x1p52);
    const auto sum = hn::BitCast(d, hn::Or(index, hn::BitCast(di, magic)));
    return hn::DemoteTo(di32, hn::Sub(sum, magic));
  } else {
    return index;
  }
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<hn::Rebind<int32_t, D>> Encode(D d, const CodebookGrid& grid,
                                                  V q) {
  // Only NaN differs: its quotient is taken to be 0.
  return EncodeInRange(d, grid, hn::IfThenElseZero(hn::Eq(q, q), q));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Round(D d, const CodebookGrid& grid, V q) {
  const hn::Rebind<float, D> df;
  const auto number = hn::IfThenElseZero(hn::Eq(q, q), q);
  if constexpr (std::is_same_v<hn::TFromD<D>, double>) {
    const auto index = EncodeInRange(d, grid, number);
    return hn::PromoteTo(d, hn::GatherIndex(df, grid.entry, index));
  } else {
    const auto index = EntryIndex(d, grid, number);
    if constexpr (hn::MaxLanes(D()) >= 16) {
      if (grid.search_steps <= 4) {
        return hn::TableLookupLanes(hn::Load(d, grid.entry),
                                    hn::IndicesFromVec(d, index));
      }
    }
    return hn::GatherIndex(df, grid.entry, index);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();
#endif

#endif  // QUANTD_CORE_FORMATS_FLOAT_CODEC_INL_H_
