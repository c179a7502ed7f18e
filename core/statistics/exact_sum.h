// Sums without rounding: integers of many bits.

#ifndef QUANTD_CORE_STATISTICS_EXACT_SUM_H_
#define QUANTD_CORE_STATISTICS_EXACT_SUM_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/types/float_convert.h"

namespace quantd::core {

// A sum of integers times 2^kExponent, in two's complement: `kLimbs` limbs of
// 32 bits. Each limb has 32 bits to spare, so that carries wait until there are
// many. Plain value.
template <int kExponent, int kLimbs>
class ExactSum {
 public:
  static constexpr int kUnit = kExponent;
  static constexpr int kMaxBytes = 4 * kLimbs;

  // Adds `integer` * 2^(kExponent + shift).
  // Requires: what is added reaches no bit of the last limb but its sign; at
  // most kMaxAdds calls between two of Carry.
  static constexpr int64_t kMaxAdds = int64_t{1} << 30;
  void Add(int64_t integer, int shift) {
    __extension__ using Int128 = __int128;
    // Multiplied: a negative number may not be shifted.
    const Int128 wide = static_cast<Int128>(integer) *
                        static_cast<int64_t>(uint64_t{1} << (shift % 32));
    int64_t* limb = limbs_.data() + shift / 32;
    limb[0] += static_cast<int64_t>(wide & kLimbMask);
    limb[1] += static_cast<int64_t>((wide >> 32) & kLimbMask);
    limb[2] += static_cast<int64_t>(wide >> 64);
  }

  // Adds a number that is a multiple of 2^kExponent.
  void Add(double value) {
    if (value == 0) return;
    const uint64_t bits = BitsAs<uint64_t>(value);
    const int exponent = static_cast<int>(bits >> 52 & 0x7FF) - 1075;
    int64_t mantissa = static_cast<int64_t>((bits & kMantissaMask) | kHidden);
    int shift = exponent - kExponent;
    if (shift < 0) {
      mantissa >>= -shift;
      shift = 0;
    }
    Add(bits >> 63 != 0 ? -mantissa : mantissa, shift);
  }

  // Requires: Carry was called for both, less than kMaxAdds calls ago.
  void Add(const ExactSum& other) {
    for (size_t i = 0; i < kLimbs; ++i) limbs_[i] += other.limbs_[i];
  }

  // Brings the limbs into their one form: 32 bits each, the last one signed.
  void Carry() {
    for (size_t i = 0; i + 1 < kLimbs; ++i) {
      limbs_[i + 1] += limbs_[i] >> 32;
      limbs_[i] &= kLimbMask;
    }
  }

  // The rest requires that Carry was called after the last Add.

  bool is_zero() const {
    return std::all_of(limbs_.begin(), limbs_.end(),
                       [](int64_t limb) { return limb == 0; });
  }
  bool is_negative() const { return limbs_.back() < 0; }
  friend bool operator==(const ExactSum& a, const ExactSum& b) {
    return a.limbs_ == b.limbs_;
  }

  // To nearest even.
  double ToDouble() const {
    if (is_negative()) return -Negated().ToDouble();
    size_t top = kLimbs - 1;
    while (top > 0 && limbs_[top] == 0) --top;
    if (top < 2) {
      return std::ldexp(
          static_cast<double>(static_cast<uint64_t>(limbs_[1]) << 32 |
                              static_cast<uint64_t>(limbs_[0])),
          kExponent);
    }
    // At least 65 bits: the lowest of the upper 64 is set if any bit below is,
    // which rounds right, as it is no bit of the result.
    uint64_t upper = 0;
    bool rest = false;
    int taken = 0;
    for (size_t i = top + 1; i-- > 0;) {
      const uint64_t limb = static_cast<uint64_t>(limbs_[i]);
      const int bits =
          i == top ? 32 - __builtin_clz(static_cast<unsigned>(limb)) : 32;
      const int room = std::min(bits, 64 - taken);
      if (room < bits)
        rest |= (limb & ((uint64_t{1} << (bits - room)) - 1)) != 0;
      if (room > 0)
        upper = (room == 64 ? 0 : upper << room) | limb >> (bits - room);
      taken += room;
    }
    const int top_bits = 32 - __builtin_clz(static_cast<unsigned>(limbs_[top]));
    const int lowest = static_cast<int>(top) * 32 + top_bits - 64;
    return std::ldexp(static_cast<double>(upper | (rest ? 1 : 0)),
                      kExponent + lowest);
  }

  // How many bits below the lowest one that is set; -1 for zero.
  int TrailingZeros() const {
    for (size_t i = 0; i < kLimbs; ++i) {
      if (limbs_[i] != 0) {
        return static_cast<int>(i) * 32 +
               __builtin_ctz(static_cast<unsigned>(limbs_[i]));
      }
    }
    return -1;
  }

  // Bits that two's complement takes, with the sign; 0 for zero.
  int BitWidth() const {
    const ExactSum magnitude = is_negative() ? Complement() : *this;
    for (size_t i = kLimbs; i-- > 0;) {
      if (magnitude.limbs_[i] != 0) {
        return static_cast<int>(i) * 32 + 33 -
               __builtin_clz(static_cast<unsigned>(magnitude.limbs_[i]));
      }
    }
    return is_negative() ? 1 : 0;
  }

  // The sum divided by 2^(kExponent + shift), `width` bytes of little-endian
  // two's complement.
  // Requires: shift <= TrailingZeros() unless zero; the width holds it.
  void ToBytes(int shift, int width, uint8_t* out) const {
    for (int i = 0; i < width; ++i) {
      const int bit = shift + 8 * i;
      uint64_t two = Limb(bit / 32) | Limb(bit / 32 + 1) << 32;
      out[i] = static_cast<uint8_t>(two >> (bit % 32));
    }
  }

  // Reads the bytes of ToBytes. False if the limbs do not hold the sum.
  bool FromBytes(int shift, int width, const uint8_t* in) {
    limbs_.fill(0);
    if (width == 0) return true;
    const uint64_t sign = in[width - 1] >> 7 != 0 ? 0xFF : 0;
    for (int i = 0; i < width; ++i) {
      const int bit = shift + 8 * i;
      if (bit / 32 >= kLimbs - 1) {
        if (in[i] != sign) return false;
        continue;
      }
      const uint64_t two = static_cast<uint64_t>(in[i]) << (bit % 32);
      limbs_[bit / 32] |= static_cast<int64_t>(two & kLimbMask);
      if (two >> 32 == 0) continue;
      limbs_[bit / 32 + 1] |= static_cast<int64_t>(two >> 32);
    }
    if (sign != 0) {
      // All bits above those that were given.
      for (int bit = shift + 8 * width; bit < 32 * kLimbs;
           bit = (bit / 32 + 1) * 32) {
        limbs_[bit / 32] |=
            static_cast<int64_t>((kLimbMask << (bit % 32)) & kLimbMask);
      }
      // The last limb has the sign.
      limbs_.back() = static_cast<int32_t>(limbs_.back());
    }
    return is_negative() == (sign != 0);
  }

 private:
  static constexpr uint64_t kLimbMask = 0xFFFFFFFF;
  static constexpr uint64_t kHidden = uint64_t{1} << 52;
  static constexpr uint64_t kMantissaMask = kHidden - 1;

  // The limb, and the sign's bits beyond the last.
  uint64_t Limb(int i) const {
    return static_cast<uint64_t>(i < kLimbs      ? limbs_[i]
                                 : is_negative() ? -1
                                                 : 0) &
           kLimbMask;
  }

  ExactSum Complement() const {
    ExactSum result;
    for (size_t i = 0; i < kLimbs; ++i) {
      result.limbs_[i] = limbs_[i] ^ static_cast<int64_t>(kLimbMask);
    }
    result.limbs_.back() = ~limbs_.back();
    return result;
  }
  ExactSum Negated() const {
    ExactSum result = Complement();
    result.limbs_[0] += 1;
    result.Carry();
    return result;
  }

  std::array<int64_t, kLimbs> limbs_{};
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_STATISTICS_EXACT_SUM_H_
