// SIMD versions of float_convert.h.

#if defined(QUANTD_CORE_TYPES_FLOAT_CONVERT_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef QUANTD_CORE_TYPES_FLOAT_CONVERT_INL_H_
#undef QUANTD_CORE_TYPES_FLOAT_CONVERT_INL_H_
#else
#define QUANTD_CORE_TYPES_FLOAT_CONVERT_INL_H_
#endif

#include <cstdint>

#include "core/simd_bytes-inl.h"
#include "core/types/element_type.h"
#include "core/types/float_convert.h"
#include "hwy/highway.h"

// Conversions between float16 and float32 in hardware, to nearest even.
#undef QUANTD_HAS_F16
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || \
    HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_NEON
#define QUANTD_HAS_F16 1
#else
#define QUANTD_HAS_F16 0
#endif

// The targets without vectors run the scalar definitions.
#if HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// out[i] = in[i], exactly. `in` is float16 or bfloat16.
HWY_INLINE void Widen(ElementType type, const uint8_t* HWY_RESTRICT in,
                      int64_t count, float* HWY_RESTRICT out) {
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du32;
  const hn::Rebind<uint16_t, decltype(df)> du16;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  if (type == ElementType::kBfloat16) {
    for (; i + lanes <= count; i += lanes) {
      const auto bits = hn::PromoteTo(du32, LoadBytes(du16, in + i * 2));
      hn::StoreU(hn::BitCast(df, hn::ShiftLeft<16>(bits)), df, out + i);
    }
  } else {
#if QUANTD_HAS_F16
    const hn::Rebind<hwy::float16_t, decltype(df)> df16;
    for (; i + lanes <= count; i += lanes) {
      const auto half = hn::BitCast(df16, LoadBytes(du16, in + i * 2));
      hn::StoreU(hn::PromoteTo(df, half), df, out + i);
    }
#else
    const auto rebias = hn::Set(du32, uint32_t{127 - 15} << 23);
    for (; i + lanes <= count; i += lanes) {
      const auto half = hn::PromoteTo(du32, LoadBytes(du16, in + i * 2));
      const auto rest = hn::And(half, hn::Set(du32, 0x7FFF));
      const auto sign = hn::ShiftLeft<16>(hn::Xor(half, rest));
      const auto normal = hn::Add(hn::ShiftLeft<13>(rest), rebias);
      // Signed comparisons: they exist on every target.
      const hn::RebindToSigned<decltype(du32)> di32;
      const auto rest_i = hn::BitCast(di32, rest);
      const auto subnormal = hn::BitCast(
          du32, hn::Mul(hn::ConvertTo(df, rest_i), hn::Set(df, 0x1p-24f)));
      const auto special = hn::Add(normal, rebias);
      const auto quiet = hn::Or(special, hn::Set(du32, 0x00400000));
      auto bits = hn::IfThenElse(
          hn::RebindMask(du32, hn::Lt(rest_i, hn::Set(di32, 0x0400))),
          subnormal, normal);
      bits = hn::IfThenElse(
          hn::RebindMask(du32, hn::Gt(rest_i, hn::Set(di32, 0x7BFF))), special,
          bits);
      bits = hn::IfThenElse(
          hn::RebindMask(du32, hn::Gt(rest_i, hn::Set(di32, 0x7C00))), quiet,
          bits);
      hn::StoreU(hn::BitCast(df, hn::Or(bits, sign)), df, out + i);
    }
#endif
  }
  for (; i < count; ++i) out[i] = LoadElement<float>(type, in, i);
}

// True if StoreNarrow takes the type.
constexpr bool CanStoreNarrow(ElementType type) {
  return type == ElementType::kBfloat16 ||
         (type == ElementType::kFloat16 && QUANTD_HAS_F16 != 0);
}

// Stores a vector to nearest even, as float16 or bfloat16.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void StoreNarrow(ElementType type, D df, V value,
                            uint8_t* HWY_RESTRICT out) {
  const hn::Rebind<uint16_t, D> du16;
#if QUANTD_HAS_F16
  if (type == ElementType::kFloat16) {
    const hn::Rebind<hwy::float16_t, D> df16;
    StoreBytes(hn::BitCast(du16, hn::DemoteTo(df16, value)), du16, out);
    return;
  }
#endif
  const hn::RebindToUnsigned<D> du32;
  const hn::RebindToSigned<D> di32;
  const auto bits = hn::BitCast(du32, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 1));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(du32, 0x7FFF)), odd);
  const auto nan = hn::Or(bits, hn::Set(du32, uint32_t{0x400000}));
  const auto result = hn::ShiftRight<16>(
      hn::IfThenElse(hn::RebindMask(du32, hn::IsNaN(value)), nan, rounded));
  // At most 0xFFFF, so that the saturating demotion keeps all bits.
  StoreBytes(hn::DemoteTo(du16, hn::BitCast(di32, result)), du16, out);
}

// out[i] = in[i], to nearest even. `out` is float16 or bfloat16.
HWY_INLINE void Narrow(ElementType type, const float* HWY_RESTRICT in,
                       int64_t count, uint8_t* HWY_RESTRICT out) {
  const hn::ScalableTag<float> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  if (CanStoreNarrow(type)) {
    for (; i + lanes <= count; i += lanes) {
      StoreNarrow(type, df, hn::LoadU(df, in + i), out + i * 2);
    }
  }
  for (; i < count; ++i) StoreElement<float>(type, in[i], out, i);
}

}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();
#endif

#endif  // QUANTD_CORE_TYPES_FLOAT_CONVERT_INL_H_
