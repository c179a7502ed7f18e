// Packing of codes of 2 and 4 bits, lowest bits first.

#if defined(QUANTD_CORE_FORMATS_PACKING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUANTD_CORE_FORMATS_PACKING_INL_H_
#undef QUANTD_CORE_FORMATS_PACKING_INL_H_
#else
#define QUANTD_CORE_FORMATS_PACKING_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

// The targets without vectors run the scalar definitions.
#if HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

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
