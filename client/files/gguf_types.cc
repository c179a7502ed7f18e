#include "client/files/gguf_types.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/dtype.h"
#include "client/files/gguf_grids.h"

namespace quantd::files {
namespace {

// Elements in a block of the k-quants and most i-quants.
constexpr size_t kSuperBlock = 256;

// Twice the values of FP4 E2M1.
constexpr int8_t kFp4[] = {0, 1,  2,  3,  4,  6,  8,  12,
                           0, -1, -2, -3, -4, -6, -8, -12};
constexpr int8_t kIq4[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                           1,    13,   25,  38,  53,  69,  89,  113};
constexpr int8_t kIq1[] = {-1, 0, 1};
constexpr int8_t kIq2[] = {8, 25, 43};
constexpr int8_t kIq3Xxs[] = {4, 12, 20, 28, 36, 44, 52, 62};
constexpr int8_t kIq3S[] = {1, 3, 5, 7, 9, 11, 13, 15};
constexpr float kIq1Delta = 0.125F;

uint16_t ReadU16(const uint8_t* bytes) {
  return static_cast<uint16_t>(bytes[0] | bytes[1] << 8);
}

uint32_t ReadU32(const uint8_t* bytes) {
  return ReadU16(bytes) | uint32_t{ReadU16(bytes + 2)} << 16;
}

int Bit(uint32_t bits, size_t i) { return static_cast<int>(bits >> i & 1); }

// Code i of a block of `count` nibbles: the low ones come first.
int Nibble(const uint8_t* bytes, size_t count, size_t i) {
  return i < count / 2 ? bytes[i] & 15 : bytes[i - count / 2] >> 4;
}

// Code i of part j of 32 codes, where 32 bytes have the nibbles of two parts.
int Nibble64(const uint8_t* bytes, size_t j, size_t i) {
  return bytes[j / 2 * 32 + i] >> (j % 2 * 4) & 15;
}

// Code i of part j of 32 codes, where 32 bytes have 2 bits each of four parts.
int Crumb128(const uint8_t* bytes, size_t j, size_t i) {
  return bytes[j / 4 * 32 + i] >> (j % 4 * 2) & 3;
}

// Multiplied by, not negated: a NaN keeps its sign.
float Sign(bool is_negative) { return is_negative ? -1.0F : 1.0F; }

// The signs of 8 elements of which 7 are stored: the number of negative ones is
// even.
uint32_t EvenSigns(uint32_t bits) {
  uint32_t parity = bits ^ bits >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return bits | (parity & 1) << 7;
}

void DecodeQ1_0(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  for (size_t i = 0; i < 128; ++i) {
    out[i] = Bit(block[2 + i / 8], i % 8) != 0 ? d : -d;
  }
}

void DecodeQ2_0(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  for (size_t i = 0; i < 64; ++i) {
    const int code = block[2 + i / 4] >> (i % 4 * 2) & 3;
    out[i] = static_cast<float>(code - 1) * d;
  }
}

void DecodeQ4_0(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  for (size_t i = 0; i < 32; ++i) {
    out[i] = static_cast<float>(Nibble(block + 2, 32, i) - 8) * d;
  }
}

void DecodeQ4_1(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  const float m = ReadHalf(block + 2);
  for (size_t i = 0; i < 32; ++i) {
    out[i] = static_cast<float>(Nibble(block + 4, 32, i)) * d + m;
  }
}

void DecodeQ5_0(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  const uint32_t high = ReadU32(block + 2);
  for (size_t i = 0; i < 32; ++i) {
    const int code = Nibble(block + 6, 32, i) | Bit(high, i) << 4;
    out[i] = static_cast<float>(code - 16) * d;
  }
}

void DecodeQ5_1(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  const float m = ReadHalf(block + 2);
  const uint32_t high = ReadU32(block + 4);
  for (size_t i = 0; i < 32; ++i) {
    const int code = Nibble(block + 8, 32, i) | Bit(high, i) << 4;
    out[i] = static_cast<float>(code) * d + m;
  }
}

// Int8 codes behind what else a block begins with.
void DecodeInt8(float d, const uint8_t* codes, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) {
    out[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * d;
  }
}

void DecodeQ8_0(const uint8_t* block, float* out) {
  DecodeInt8(ReadHalf(block), block + 2, 32, out);
}

// Behind d is the sum of the elements.
void DecodeQ8_1(const uint8_t* block, float* out) {
  DecodeInt8(ReadHalf(block), block + 4, 32, out);
}

// Behind the codes are sums of them.
void DecodeQ8K(const uint8_t* block, float* out) {
  float d = 0;
  std::memcpy(&d, block, sizeof(d));
  DecodeInt8(d, block + 4, kSuperBlock, out);
}

// 16 bytes of a scale and a minimum each, 64 of codes, d, dmin.
void DecodeQ2K(const uint8_t* block, float* out) {
  const float d = ReadHalf(block + 80);
  const float dmin = ReadHalf(block + 82);
  for (size_t j = 0; j < 16; ++j) {
    const float scale = d * static_cast<float>(block[j] & 15);
    const float minimum = dmin * static_cast<float>(block[j] >> 4);
    for (size_t i = 0; i < 16; ++i) {
      const int code = Crumb128(block + 16, j / 2, j % 2 * 16 + i);
      out[j * 16 + i] = scale * static_cast<float>(code) - minimum;
    }
  }
}

// 32 bytes of high bits, 64 of codes, 12 of scales (the low 4 bits of 16, then
// the high 2), d.
void DecodeQ3K(const uint8_t* block, float* out) {
  const uint8_t* const scales = block + 96;
  const float d = ReadHalf(block + 108);
  for (size_t j = 0; j < 16; ++j) {
    const int bits = (scales[j % 8] >> (j / 8 * 4) & 15) |
                     (scales[8 + j % 4] >> (j / 4 * 2) & 3) << 4;
    const float scale = d * static_cast<float>(bits - 32);
    for (size_t i = 0; i < 16; ++i) {
      const size_t k = j % 2 * 16 + i;
      const int code = Crumb128(block + 32, j / 2, k) | Bit(block[k], j / 2)
                                                            << 2;
      out[j * 16 + i] = scale * static_cast<float>(code - 4);
    }
  }
}

// Scale and minimum j of 8, of 6 bits each, in 12 bytes: the first 4 of both
// are the low bits of 8 bytes, the high bits of which go with the last 4.
struct ScaleAndMinimum {
  float scale;
  float minimum;
};
ScaleAndMinimum SixBits(const uint8_t* bytes, size_t j) {
  int scale = bytes[j] & 63;
  int minimum = bytes[j + 4] & 63;
  if (j >= 4) {
    scale = (bytes[j + 4] & 15) | bytes[j - 4] >> 6 << 4;
    minimum = bytes[j + 4] >> 4 | bytes[j] >> 6 << 4;
  }
  return {static_cast<float>(scale), static_cast<float>(minimum)};
}

// d, dmin, 12 bytes of scales and minima, 128 of codes.
void DecodeQ4K(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  const float dmin = ReadHalf(block + 2);
  for (size_t j = 0; j < 8; ++j) {
    const ScaleAndMinimum of = SixBits(block + 4, j);
    const float scale = d * of.scale;
    const float minimum = dmin * of.minimum;
    for (size_t i = 0; i < 32; ++i) {
      const int code = Nibble64(block + 16, j, i);
      out[j * 32 + i] = scale * static_cast<float>(code) - minimum;
    }
  }
}

// d, dmin, 12 bytes of scales and minima, 32 of high bits, 128 of codes.
void DecodeQ5K(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  const float dmin = ReadHalf(block + 2);
  for (size_t j = 0; j < 8; ++j) {
    const ScaleAndMinimum of = SixBits(block + 4, j);
    const float scale = d * of.scale;
    const float minimum = dmin * of.minimum;
    for (size_t i = 0; i < 32; ++i) {
      const int code = Nibble64(block + 48, j, i) | Bit(block[16 + i], j) << 4;
      out[j * 32 + i] = scale * static_cast<float>(code) - minimum;
    }
  }
}

// 128 bytes of the low 4 bits of codes, 64 of the high 2, 16 int8 scales, d.
void DecodeQ6K(const uint8_t* block, float* out) {
  const float d = ReadHalf(block + 208);
  for (size_t j = 0; j < 16; ++j) {
    const float scale =
        d * static_cast<float>(static_cast<int8_t>(block[192 + j]));
    // 64 bytes have the low bits of four parts of 32, two by two.
    const uint8_t* const low = block + j / 8 * 64 + j % 4 * 16;
    for (size_t i = 0; i < 16; ++i) {
      const int code = (low[i] >> (j % 8 / 4 * 4) & 15) |
                       Crumb128(block + 128, j / 2, j % 2 * 16 + i) << 4;
      out[j * 16 + i] = scale * static_cast<float>(code - 32);
    }
  }
}

// Element i of 52 bytes of 5 digits to the base 3, the last 4 with 4 digits.
// A byte is a fraction of 256, and so the first digit its highest.
int Trit(const uint8_t* bytes, size_t i) {
  constexpr uint8_t kPowers[] = {1, 3, 9, 27, 81};
  size_t byte = i % 32;
  size_t digit = i / 32;
  if (i >= 240) {
    byte = 48 + i % 4;
    digit = (i - 240) / 4;
  } else if (i >= 160) {
    byte = 32 + i % 16;
    digit = (i - 160) / 16;
  }
  const uint8_t rest = static_cast<uint8_t>(bytes[byte] * kPowers[digit]);
  return rest * 3 >> 8;
}

void DecodeTq1_0(const uint8_t* block, float* out) {
  const float d = ReadHalf(block + 52);
  for (size_t i = 0; i < kSuperBlock; ++i) {
    out[i] = static_cast<float>(Trit(block, i) - 1) * d;
  }
}

void DecodeTq2_0(const uint8_t* block, float* out) {
  const float d = ReadHalf(block + 64);
  for (size_t i = 0; i < kSuperBlock; ++i) {
    out[i] = static_cast<float>(Crumb128(block, i / 32, i % 32) - 1) * d;
  }
}

// Half of 2^(e - 127), also for 255, which is NaN elsewhere.
void DecodeMxfp4(const uint8_t* block, float* out) {
  const float d = std::ldexp(1.0F, block[0] - 128);
  for (size_t i = 0; i < 32; ++i) {
    out[i] = static_cast<float>(kFp4[Nibble(block + 1, 32, i)]) * d;
  }
}

// Half of an FP8 E4M3 without its sign; NaN is 0.
float Nvfp4Scale(uint8_t bits) {
  if (bits == 0x7F) return 0;
  const int exponent = bits >> 3 & 15;
  const float mantissa = static_cast<float>(bits & 7);
  return exponent == 0 ? std::ldexp(mantissa, -10)
                       : std::ldexp(mantissa + 8, exponent - 11);
}

// 4 scales, then 8 bytes for each 16 elements.
void DecodeNvfp4(const uint8_t* block, float* out) {
  for (size_t j = 0; j < 4; ++j) {
    const float d = Nvfp4Scale(block[j]);
    for (size_t i = 0; i < 16; ++i) {
      const int code = Nibble(block + 4 + j * 8, 16, i);
      out[j * 16 + i] = static_cast<float>(kFp4[code]) * d;
    }
  }
}

void DecodeIq4Nl(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  for (size_t i = 0; i < 32; ++i) {
    out[i] = d * static_cast<float>(kIq4[Nibble(block + 2, 32, i)]);
  }
}

// d, 2 bytes of the high 2 bits of 8 scales, 4 of their low 4 bits, codes.
void DecodeIq4Xs(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  const int high = ReadU16(block + 2);
  for (size_t j = 0; j < 8; ++j) {
    const int bits =
        (block[4 + j / 2] >> (j % 2 * 4) & 15) | (high >> (j * 2) & 3) << 4;
    const float scale = d * static_cast<float>(bits - 32);
    for (size_t i = 0; i < 32; ++i) {
      const int code = Nibble(block + 8 + j * 16, 32, i);
      out[j * 32 + i] = scale * static_cast<float>(kIq4[code]);
    }
  }
}

// 8 elements of a point of an iq2 grid.
void DecodePoint2(size_t point, float scale, uint32_t signs, float* out) {
  const uint32_t indices = kGgufGrids[point];
  for (size_t i = 0; i < 8; ++i) {
    out[i] = scale * static_cast<float>(kIq2[indices >> (2 * i) & 3]) *
             Sign(Bit(signs, i) != 0);
  }
}

// 8 elements of two points of an iq3 grid.
void DecodePoints3(size_t first, size_t second, const int8_t* values,
                   float scale, uint32_t signs, float* out) {
  const uint32_t indices = kGgufGrids[first] | uint32_t{kGgufGrids[second]}
                                                   << 12;
  for (size_t i = 0; i < 8; ++i) {
    out[i] = scale * static_cast<float>(values[indices >> (3 * i) & 7]) *
             Sign(Bit(signs, i) != 0);
  }
}

// 8 elements of a point of the iq1 grid, all shifted.
void DecodePoint1(size_t point, float scale, bool is_down, float* out) {
  const uint32_t indices = kGgufGrids[kIq1Grid + point];
  const float delta = is_down ? -kIq1Delta : kIq1Delta;
  for (size_t i = 0; i < 8; ++i) {
    out[i] = scale * (static_cast<float>(kIq1[indices >> (2 * i) & 3]) + delta);
  }
}

// The scale of a part of an iq2 or iq3 block: the middle of a 16th.
float MiddleScale(float d, uint32_t code, float factor) {
  return d * (0.5F + static_cast<float>(code)) * factor;
}

// d, then for each 32 elements 4 points and 4 bytes of signs and a scale.
void DecodeIq2Xxs(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  for (size_t g = 0; g < kSuperBlock / 8; ++g) {
    const uint8_t* const part = block + 2 + g / 4 * 8;
    const uint32_t bits = ReadU32(part + 4);
    DecodePoint2(kIq2XxsGrid + part[g % 4], MiddleScale(d, bits >> 28, 0.25F),
                 EvenSigns(bits >> (g % 4 * 7) & 127), out + g * 8);
  }
}

// d, 32 times a point of 9 bits and signs of 7, scales of 4 bits.
void DecodeIq2Xs(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  for (size_t g = 0; g < kSuperBlock / 8; ++g) {
    const uint32_t bits = ReadU16(block + 2 + g * 2);
    const uint32_t scale = block[66 + g / 4] >> (g % 4 / 2 * 4) & 15;
    DecodePoint2(kIq2XsGrid + (bits & 511), MiddleScale(d, scale, 0.25F),
                 EvenSigns(bits >> 9), out + g * 8);
  }
}

// d, the low 8 bits of 32 points, their signs, the points' high 2 bits, scales.
void DecodeIq2S(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  for (size_t g = 0; g < kSuperBlock / 8; ++g) {
    const size_t high = block[66 + g / 4] >> (g % 4 * 2) & 3;
    const uint32_t scale = block[74 + g / 4] >> (g % 4 / 2 * 4) & 15;
    DecodePoint2(kIq2SGrid + (block[2 + g] | high << 8),
                 MiddleScale(d, scale, 0.25F), block[34 + g], out + g * 8);
  }
}

// d, 64 points, then for each 32 elements 4 bytes of signs and a scale.
void DecodeIq3Xxs(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  for (size_t g = 0; g < kSuperBlock / 8; ++g) {
    const uint8_t* const points = block + 2 + g * 2;
    const uint32_t bits = ReadU32(block + 66 + g / 4 * 4);
    DecodePoints3(kIq3XxsGrid + points[0], kIq3XxsGrid + points[1], kIq3Xxs,
                  MiddleScale(d, bits >> 28, 0.5F),
                  EvenSigns(bits >> (g % 4 * 7) & 127), out + g * 8);
  }
}

// d, the low 8 bits of 64 points, their high bits, signs, scales of 4 bits.
void DecodeIq3S(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  for (size_t g = 0; g < kSuperBlock / 8; ++g) {
    const uint8_t* const points = block + 2 + g * 2;
    const size_t high = block[66 + g / 4] >> (g % 4 * 2);
    const int scale = block[106 + g / 8] >> (g % 8 / 4 * 4) & 15;
    DecodePoints3(kIq3SGrid + (points[0] | (high & 1) << 8),
                  kIq3SGrid + (points[1] | (high >> 1 & 1) << 8), kIq3S,
                  d * static_cast<float>(1 + 2 * scale), block[74 + g],
                  out + g * 8);
  }
}

// d, the low 8 bits of 32 points, then for each 4 of them 2 bytes: their high 3
// bits, a scale of 3 bits, the direction of the shift.
void DecodeIq1S(const uint8_t* block, float* out) {
  const float d = ReadHalf(block);
  for (size_t g = 0; g < kSuperBlock / 8; ++g) {
    const uint32_t bits = ReadU16(block + 34 + g / 4 * 2);
    const size_t high = bits >> (g % 4 * 3) & 7;
    DecodePoint1(block[2 + g] | high << 8,
                 d * static_cast<float>(2 * (bits >> 12 & 7) + 1),
                 bits >> 15 != 0, out + g * 8);
  }
}

// The low 8 bits of 32 points, 4 bits each of their high 3 bits and the
// direction of the shift, 8 bytes: 4 times 4 scales of 3 bits and 4 bits of d.
void DecodeIq1M(const uint8_t* block, float* out) {
  const uint8_t* const scales = block + 48;
  const uint8_t half[] = {
      static_cast<uint8_t>(scales[1] >> 4 | (scales[3] & 0xF0)),
      static_cast<uint8_t>(scales[5] >> 4 | (scales[7] & 0xF0))};
  const float d = ReadHalf(half);
  for (size_t g = 0; g < kSuperBlock / 8; ++g) {
    const size_t nibble = block[32 + g / 2] >> (g % 2 * 4) & 15;
    const int scale = ReadU16(scales + g / 8 * 2) >> (g % 8 / 2 * 3) & 7;
    DecodePoint1(block[g] | (nibble & 7) << 8,
                 d * static_cast<float>(2 * scale + 1), nibble >> 3 != 0,
                 out + g * 8);
  }
}

constexpr GgufType Plain(uint32_t number, absl::string_view name, Dtype dtype,
                         int64_t bytes) {
  return {number, name, 1, bytes, nullptr, dtype};
}

constexpr GgufType kGgufTypes[] = {
    Plain(0, "f32", Dtype::kF32, 4),
    Plain(1, "f16", Dtype::kF16, 2),
    {2, "q4_0", 32, 18, DecodeQ4_0, std::nullopt},
    {3, "q4_1", 32, 20, DecodeQ4_1, std::nullopt},
    {6, "q5_0", 32, 22, DecodeQ5_0, std::nullopt},
    {7, "q5_1", 32, 24, DecodeQ5_1, std::nullopt},
    {8, "q8_0", 32, 34, DecodeQ8_0, std::nullopt},
    {9, "q8_1", 32, 36, DecodeQ8_1, std::nullopt},
    {10, "q2_K", 256, 84, DecodeQ2K, std::nullopt},
    {11, "q3_K", 256, 110, DecodeQ3K, std::nullopt},
    {12, "q4_K", 256, 144, DecodeQ4K, std::nullopt},
    {13, "q5_K", 256, 176, DecodeQ5K, std::nullopt},
    {14, "q6_K", 256, 210, DecodeQ6K, std::nullopt},
    {15, "q8_K", 256, 292, DecodeQ8K, std::nullopt},
    {16, "iq2_xxs", 256, 66, DecodeIq2Xxs, std::nullopt},
    {17, "iq2_xs", 256, 74, DecodeIq2Xs, std::nullopt},
    {18, "iq3_xxs", 256, 98, DecodeIq3Xxs, std::nullopt},
    {19, "iq1_s", 256, 50, DecodeIq1S, std::nullopt},
    {20, "iq4_nl", 32, 18, DecodeIq4Nl, std::nullopt},
    {21, "iq3_s", 256, 110, DecodeIq3S, std::nullopt},
    {22, "iq2_s", 256, 82, DecodeIq2S, std::nullopt},
    {23, "iq4_xs", 256, 136, DecodeIq4Xs, std::nullopt},
    Plain(24, "i8", Dtype::kI8, 1),
    Plain(25, "i16", Dtype::kI16, 2),
    Plain(26, "i32", Dtype::kI32, 4),
    Plain(27, "i64", Dtype::kI64, 8),
    Plain(28, "f64", Dtype::kF64, 8),
    {29, "iq1_m", 256, 56, DecodeIq1M, std::nullopt},
    Plain(30, "bf16", Dtype::kBF16, 2),
    {34, "tq1_0", 256, 54, DecodeTq1_0, std::nullopt},
    {35, "tq2_0", 256, 66, DecodeTq2_0, std::nullopt},
    {39, "mxfp4", 32, 17, DecodeMxfp4, std::nullopt},
    {40, "nvfp4", 64, 36, DecodeNvfp4, std::nullopt},
    {41, "q1_0", 128, 18, DecodeQ1_0, std::nullopt},
    {42, "q2_0", 64, 18, DecodeQ2_0, std::nullopt},
};

}  // namespace

absl::Span<const GgufType> GgufTypes() { return kGgufTypes; }

const GgufType* FindGgufType(uint32_t number) {
  for (const GgufType& type : kGgufTypes) {
    if (type.number == number) return &type;
  }
  return nullptr;
}

const GgufType* FindGgufType(absl::string_view name) {
  for (const GgufType& type : kGgufTypes) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

const GgufType* FindGgufType(Dtype dtype) {
  for (const GgufType& type : kGgufTypes) {
    if (type.dtype == dtype) return &type;
  }
  return nullptr;
}

}  // namespace quantd::files
