// Packing of codes of 2 and 4 bits, lowest bits first, and of vectors of int32
// to codes of 8 and 16 bits.

#if defined(QUANTD_CORE_FORMATS_PACKING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUANTD_CORE_FORMATS_PACKING_INL_H_
#undef QUANTD_CORE_FORMATS_PACKING_INL_H_
#else
#define QUANTD_CORE_FORMATS_PACKING_INL_H_
#endif

#include <cstdint>

#include "core/simd_bytes-inl.h"
#include "hwy/highway.h"

// The targets without vectors run the scalar definitions.
#if HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// On x86 the packs of two vectors work within 128-bit blocks, and a permutation
// at the end restores the order. The other packs keep the order.

// The lanes of `a` and `b` saturated to int16, in an order that PackToBytes and
// OrderWords know.
template <class DI, class V = hn::Vec<DI>>
HWY_INLINE hn::Vec<hn::Repartition<int16_t, DI>> PackToWords(DI di, V a, V b) {
  using Words [[maybe_unused]] = hn::Vec<hn::Repartition<int16_t, DI>>;
#if HWY_ARCH_X86 && HWY_MAX_BYTES == 64
  return Words{_mm512_packs_epi32(a.raw, b.raw)};
#elif HWY_ARCH_X86 && HWY_MAX_BYTES == 32
  return Words{_mm256_packs_epi32(a.raw, b.raw)};
#elif HWY_ARCH_X86
  return Words{_mm_packs_epi32(a.raw, b.raw)};
#else
  const hn::Repartition<int16_t, DI> di16;
  const hn::Half<decltype(di16)> dhalf;
  return hn::Combine(di16, hn::DemoteTo(dhalf, b), hn::DemoteTo(dhalf, a));
#endif
}

// Words saturated to uint8, in an order that OrderBytes knows.
template <class DW, class V = hn::Vec<DW>>
HWY_INLINE hn::Vec<hn::Repartition<uint8_t, DW>> PackToBytes(DW dw, V a, V b) {
  using Bytes [[maybe_unused]] = hn::Vec<hn::Repartition<uint8_t, DW>>;
#if HWY_ARCH_X86 && HWY_MAX_BYTES == 64
  return Bytes{_mm512_packus_epi16(a.raw, b.raw)};
#elif HWY_ARCH_X86 && HWY_MAX_BYTES == 32
  return Bytes{_mm256_packus_epi16(a.raw, b.raw)};
#elif HWY_ARCH_X86
  return Bytes{_mm_packus_epi16(a.raw, b.raw)};
#else
  const hn::Repartition<uint8_t, DW> du8;
  const hn::Half<decltype(du8)> dhalf;
  return hn::Combine(du8, hn::DemoteTo(dhalf, b), hn::DemoteTo(dhalf, a));
#endif
}

template <class DW, class V = hn::Vec<DW>>
HWY_INLINE V OrderWords(DW dw, V v) {
#if HWY_ARCH_X86 && HWY_MAX_BYTES == 64
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  return V{_mm512_permutexvar_epi64(order, v.raw)};
#elif HWY_ARCH_X86 && HWY_MAX_BYTES == 32
  return V{_mm256_permute4x64_epi64(v.raw, 0xD8)};
#else
  return v;
#endif
}

template <class DB, class V = hn::Vec<DB>>
HWY_INLINE V OrderBytes(DB db, V v) {
#if HWY_ARCH_X86 && HWY_MAX_BYTES == 64
  const __m512i order =
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return V{_mm512_permutexvar_epi32(order, v.raw)};
#elif HWY_ARCH_X86 && HWY_MAX_BYTES == 32
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return V{_mm256_permutevar8x32_epi32(v.raw, order)};
#else
  return v;
#endif
}

// Stores codes of `bits` bits, each in the low bits of its byte, whatever is in
// the others.
template <class DB, class V = hn::Vec<DB>>
HWY_INLINE void StorePacked(DB db, V codes, int bits,
                            uint8_t* HWY_RESTRICT out) {
  if (HWY_LIKELY(bits == 8)) {
    hn::StoreU(codes, db, out);
    return;
  }
  const hn::Repartition<uint16_t, DB> du16;
  const hn::Repartition<int16_t, DB> di16;
  const hn::Repartition<uint32_t, DB> du32;
  const hn::Repartition<int32_t, DB> di32;
  if (bits == 4) {
    const auto pair = hn::BitCast(du16, hn::And(codes, hn::Set(db, 0x0F)));
    const auto both =
        hn::And(hn::Or(pair, hn::ShiftRight<4>(pair)), hn::Set(du16, 0x00FF));
    const hn::Rebind<uint8_t, decltype(du16)> dout;
    hn::StoreU(hn::DemoteTo(dout, hn::BitCast(di16, both)), dout, out);
  } else {
    const auto pair = hn::BitCast(du16, hn::And(codes, hn::Set(db, 0x03)));
    const auto both =
        hn::And(hn::Or(pair, hn::ShiftRight<6>(pair)), hn::Set(du16, 0x000F));
    const auto two = hn::BitCast(du32, both);
    const auto four = hn::And(hn::Or(two, hn::ShiftRight<12>(two)),
                              hn::Set(du32, 0x000000FF));
    const hn::Rebind<uint8_t, decltype(du32)> dout;
    StoreBytes(hn::DemoteTo(dout, hn::BitCast(di32, four)), dout, out);
  }
}

// Two codes of kBits bits, each in the low bits of its byte, to one byte of
// 2 * kBits bits. May work in place. `count` is the number of bytes out.
template <int kBits>
HWY_INLINE void PackPairs(const uint8_t* in, int64_t count, uint8_t* out) {
  constexpr uint16_t kMask = (1 << kBits) - 1;
  const hn::ScalableTag<uint16_t> du16;
  const hn::RebindToSigned<decltype(du16)> di16;
  const hn::Rebind<uint8_t, decltype(du16)> du8;
  const hn::Repartition<uint8_t, decltype(du16)> dpair;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(du16));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto pair = hn::BitCast(du16, hn::LoadU(dpair, in + i * 2));
    const auto low = hn::And(pair, hn::Set(du16, kMask));
    const auto high = hn::And(hn::ShiftRight<8 - kBits>(pair),
                              hn::Set(du16, uint16_t{kMask << kBits}));
    hn::StoreU(hn::DemoteTo(du8, hn::BitCast(di16, hn::Or(low, high))), du8,
               out + i);
  }
  for (; i < count; ++i) {
    out[i] = static_cast<uint8_t>((in[i * 2] & kMask) |
                                  ((in[i * 2 + 1] & kMask) << kBits));
  }
}

// The reverse: one byte of 2 * kBits bits to two bytes of kBits bits each.
template <int kBits>
HWY_INLINE void UnpackPairs(const uint8_t* HWY_RESTRICT in, int64_t count,
                            uint8_t* HWY_RESTRICT out) {
  constexpr uint8_t kMask = (1 << kBits) - 1;
  const hn::CappedTag<uint8_t, 16> du8;
  const hn::RepartitionToWide<decltype(du8)> du16;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(du8));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto bytes = hn::LoadU(du8, in + i);
    const auto mask = hn::Set(du8, kMask);
    const auto low = hn::And(bytes, mask);
    const auto high = hn::And(
        hn::BitCast(du8, hn::ShiftRight<kBits>(hn::BitCast(du16, bytes))),
        mask);
    hn::StoreU(hn::InterleaveLower(du8, low, high), du8, out + i * 2);
    hn::StoreU(hn::InterleaveUpper(du8, low, high), du8, out + i * 2 + lanes);
  }
  for (; i < count; ++i) {
    out[i * 2] = in[i] & kMask;
    out[i * 2 + 1] = (in[i] >> kBits) & kMask;
  }
}

// Packs `count` codes, one per byte, into ceil(count * bits / 8) bytes, the
// last one zero-padded. `codes` has room for 3 bytes more and is overwritten.
HWY_INLINE void PackCodes(int bits, uint8_t* codes, int64_t count,
                          uint8_t* out) {
  const int64_t per_byte = 8 / bits;
  const int64_t bytes = (count + per_byte - 1) / per_byte;
  for (int64_t i = count; i < bytes * per_byte; ++i) codes[i] = 0;
  if (bits == 2) {
    PackPairs<2>(codes, bytes * 2, codes);
  }
  PackPairs<4>(codes, bytes, out);
}

// Unpacks `count` codes into a byte each, sign-extended if signed. `scratch`
// and `codes` have room for 3 bytes more than `count`.
HWY_INLINE void UnpackCodes(int bits, bool is_signed,
                            const uint8_t* HWY_RESTRICT in, int64_t count,
                            uint8_t* HWY_RESTRICT scratch,
                            uint8_t* HWY_RESTRICT codes) {
  const int64_t per_byte = 8 / bits;
  const int64_t bytes = (count + per_byte - 1) / per_byte;
  if (bits == 2) {
    UnpackPairs<4>(in, bytes, scratch);
    UnpackPairs<2>(scratch, bytes * 2, codes);
  } else {
    UnpackPairs<4>(in, bytes, codes);
  }
  if (!is_signed) return;
  const hn::ScalableTag<uint8_t> du8;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(du8));
  const uint8_t sign = static_cast<uint8_t>(1 << (bits - 1));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto v = hn::LoadU(du8, codes + i);
    const auto s = hn::Set(du8, sign);
    hn::StoreU(hn::Sub(hn::Xor(v, s), s), du8, codes + i);
  }
  for (; i < count; ++i) {
    codes[i] = static_cast<uint8_t>((codes[i] ^ sign) - sign);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();
#endif

#endif  // QUANTD_CORE_FORMATS_PACKING_INL_H_
