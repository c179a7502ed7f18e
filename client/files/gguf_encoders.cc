#include "client/files/gguf_encoders.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "absl/strings/string_view.h"
#include "client/files/dtype.h"
#include "client/files/gguf_types.h"
#include "client/files/half.h"

namespace quantd::files {
namespace {

constexpr size_t kEncodedBlock = 256;
// Sums are taken in so many lanes: in one order, and yet in vectors.
constexpr size_t kLanes = 8;
// Added and taken off again it rounds to the nearest integer, ties to even.
// Below 2^22 in magnitude.
constexpr float kRounder = 0x1.8p23F;
// Below this float16 has nothing but zero.
constexpr float kLeastRange = 0x1p-60F;
// How often what a super-block shares is fitted to its codes.
constexpr int kRounds = 4;
// Beyond so many times the error that blocks have by themselves, other numbers
// are tried for what a super-block shares.
constexpr double kSharedShare = 4;
// Steps and fits of searches whose scales are stored in float16.
constexpr int kHalfSteps = 7;
constexpr float kHalfStep = 0.5F;
constexpr int kHalfFits = 2;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The sum of one term for each element of a block.
template <size_t kCount>
float Sum(const float* terms) {
  float lanes[kLanes];
  for (size_t l = 0; l < kLanes; ++l) {
    lanes[l] = terms[l];
    for (size_t i = kLanes; i < kCount; i += kLanes) lanes[l] += terms[l + i];
  }
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// Without std::clamp, which compilers make no vectors of.
float Code(float value, float low, float high) {
  const float above = value < low ? low : value;
  const float clamped = above > high ? high : above;
  return clamped + kRounder - kRounder;
}

int NearestInt(float value, int low, int high) {
  return static_cast<int>(
      Code(value, static_cast<float>(low), static_cast<float>(high)));
}

float InverseOf(float scale) { return scale == 0 ? 0 : 1 / scale; }

// The nearest float16; not beyond its largest number.
float RoundedToHalf(double value) {
  const float clamped = static_cast<float>(
      std::clamp(value, -double{kMostHalf}, double{kMostHalf}));
  return HalfValue(NearestHalf(clamped));
}

// RoundedToHalf, but not less than `value` unless it is the largest number.
// Requires: value >= 0.
float ToHalfAbove(float value) {
  const float nearest = RoundedToHalf(value);
  if (!(nearest < value) || nearest == kMostHalf) return nearest;
  return HalfValue(static_cast<uint16_t>(NearestHalf(nearest) + 1));
}

// With one sign of zero.
void PutHalf(float value, uint8_t* bytes) {
  const uint16_t half = NearestHalf(value + 0.0F);
  bytes[0] = static_cast<uint8_t>(half & 255);
  bytes[1] = static_cast<uint8_t>(half >> 8);
}

// q4_K, q5_K, q4_1 and q5_1.

constexpr size_t kLineBlock = 32;
constexpr size_t kLineBlocks = kEncodedBlock / kLineBlock;
constexpr int kMostSixBits = 63;

// x' = scale * code - minimum, in q4_K and q5_K neither of them negative.
struct Line {
  float scale = 0;
  float minimum = 0;
};

// Elements and how much the squared error of each counts.
struct Weighed {
  const float* x;
  const float* weight;

  Weighed At(size_t begin) const { return {x + begin, weight + begin}; }
};

// The weighed squared error of a block, each element with its nearest code.
float ErrorOf(const Weighed& in, const Line& line, float most) {
  const float* const x = in.x;
  const float* const weight = in.weight;
  const float scale = line.scale;
  const float minimum = line.minimum;
  const float inverse = InverseOf(scale);
  float squares[kLineBlock];
  for (size_t i = 0; i < kLineBlock; ++i) {
    const float code = Code((x[i] + minimum) * inverse, 0, most);
    const float error = x[i] - (scale * code - minimum);
    squares[i] = error * error * weight[i];
  }
  return Sum<kLineBlock>(squares);
}

// Weighed sums over codes q and elements x of a block.
struct LineSums {
  float one;
  float q;
  float qq;
  float x;
  float xq;
};

LineSums SumsOf(const Weighed& in, const Line& line, float most) {
  const float* const x = in.x;
  const float* const weight = in.weight;
  const float minimum = line.minimum;
  const float inverse = InverseOf(line.scale);
  float q[kLineBlock];
  float qq[kLineBlock];
  float wx[kLineBlock];
  float xq[kLineBlock];
  for (size_t i = 0; i < kLineBlock; ++i) {
    const float code = Code((x[i] + minimum) * inverse, 0, most);
    q[i] = code * weight[i];
    qq[i] = code * q[i];
    wx[i] = x[i] * weight[i];
    xq[i] = x[i] * q[i];
  }
  return {Sum<kLineBlock>(weight), Sum<kLineBlock>(q), Sum<kLineBlock>(qq),
          Sum<kLineBlock>(wx), Sum<kLineBlock>(xq)};
}

// The line with the least error for the codes that `line` gives.
Line Fit(const Weighed& x, const Line& line, float most) {
  const LineSums sums = SumsOf(x, line, most);
  if (sums.qq == 0) return line;
  const float determinant = sums.one * sums.qq - sums.q * sums.q;
  Line fit = {sums.xq / sums.qq, 0};
  if (determinant > 0) {
    const Line free = {(sums.one * sums.xq - sums.q * sums.x) / determinant,
                       (sums.q * sums.xq - sums.qq * sums.x) / determinant};
    if (free.minimum > 0) fit = free;
  }
  return fit.scale > kLeastRange ? fit : line;
}

// The line with the least error of those that are tried.
Line FindLine(const Weighed& in, float most) {
  // The search tries ranges that are cut off ever more at their upper end.
  constexpr int kSteps = 33;
  constexpr float kStep = 0.125F;
  constexpr int kFits = 4;
  const float low = std::min(*std::min_element(in.x, in.x + kLineBlock), 0.0F);
  const float high = std::max(*std::max_element(in.x, in.x + kLineBlock), low);
  if (!(high - low > kLeastRange)) return {0, -low};
  Line best;
  float least = kInfinity;
  const auto attempt = [&](const Line& line) {
    const float error = ErrorOf(in, line, most);
    if (!(error < least)) return false;
    least = error;
    best = line;
    return true;
  };
  for (int i = 0; i < kSteps; ++i) {
    const float codes = most - 1 + kStep * static_cast<float>(i);
    attempt(Fit(in, {(high - low) / codes, -low}, most));
  }
  for (int i = 0; i < kFits; ++i) {
    if (!attempt(Fit(in, best, most))) break;
  }
  return best;
}

// The line whose upper end has that code. With one that is a power of two it
// keeps multiples of a power of two, such as 0 and 1, if its integers are
// powers of two as well.
Line EndLine(const float* x, float code) {
  const float low = std::min(*std::min_element(x, x + kLineBlock), 0.0F);
  const float high = std::max(*std::max_element(x, x + kLineBlock), low);
  const float span = high - low;
  return {span > kLeastRange ? span / code : 0, -low};
}

// The stored numbers of a super-block, but for its codes.
struct LineBlock {
  float d = 0;
  float dmin = 0;
  int scale[kLineBlocks] = {};
  int minimum[kLineBlocks] = {};
  double error = kInfinity;

  // The line of block j as it will be decoded.
  Line LineOf(size_t j) const {
    return {d * static_cast<float>(scale[j]),
            dmin * static_cast<float>(minimum[j])};
  }
};

// Chooses the integers of each block near those of its line.
LineBlock ChooseLines(const Weighed& x, const Line* lines, float d, float dmin,
                      float most) {
  LineBlock chosen = {d, dmin};
  chosen.error = 0;
  for (size_t j = 0; j < kLineBlocks; ++j) {
    const int scale =
        NearestInt(lines[j].scale * InverseOf(d), 0, kMostSixBits);
    const int minimum =
        NearestInt(lines[j].minimum * InverseOf(dmin), 0, kMostSixBits);
    float least = kInfinity;
    for (int s = std::max(scale - 1, 0); s <= std::min(scale + 1, kMostSixBits);
         ++s) {
      for (int m = std::max(minimum - 1, 0);
           m <= std::min(minimum + 1, kMostSixBits); ++m) {
        const Line line = {d * static_cast<float>(s),
                           dmin * static_cast<float>(m)};
        const float error = ErrorOf(x.At(j * kLineBlock), line, most);
        if (!(error < least)) continue;
        least = error;
        chosen.scale[j] = s;
        chosen.minimum[j] = m;
      }
    }
    chosen.error += double{least};
  }
  return chosen;
}

// The d and dmin with the least error for the integers and codes that there
// are: x is near d * a - dmin * b.
void FitShared(const Weighed& x, const LineBlock& block, float most, float* d,
               float* dmin) {
  double aa = 0;
  double ab = 0;
  double bb = 0;
  double xa = 0;
  double xb = 0;
  for (size_t j = 0; j < kLineBlocks; ++j) {
    const LineSums sums = SumsOf(x.At(j * kLineBlock), block.LineOf(j), most);
    const double scale = block.scale[j];
    const double minimum = block.minimum[j];
    aa += scale * scale * double{sums.qq};
    ab += scale * minimum * double{sums.q};
    bb += minimum * minimum * double{sums.one};
    xa += scale * double{sums.xq};
    xb += minimum * double{sums.x};
  }
  const double determinant = aa * bb - ab * ab;
  if (bb == 0) {
    if (aa > 0 && xa > 0) *d = RoundedToHalf(xa / aa);
  } else if (determinant > 0) {
    const double free_d = (xa * bb - xb * ab) / determinant;
    const double free_dmin = (xa * ab - xb * aa) / determinant;
    if (free_d > 0 && free_dmin > 0) {
      *d = RoundedToHalf(free_d);
      *dmin = RoundedToHalf(free_dmin);
    }
  }
}

// The largest scale and minimum of all blocks.
Line LargestOf(const Line* lines) {
  Line largest;
  for (size_t j = 0; j < kLineBlocks; ++j) {
    largest.scale = std::max(largest.scale, lines[j].scale);
    largest.minimum = std::max(largest.minimum, lines[j].minimum);
  }
  return largest;
}

// The least d and dmin under which the integers of blocks are at most `most`.
Line SharedOf(const Line* lines, float most) {
  const Line largest = LargestOf(lines);
  return {ToHalfAbove(largest.scale / most),
          ToHalfAbove(largest.minimum / most)};
}

// With the even lines of all blocks, where they have no error.
LineBlock FindEvenLines(const Weighed& x, float most) {
  Line lines[kLineBlocks];
  for (size_t j = 0; j < kLineBlocks; ++j) {
    const Weighed block = x.At(j * kLineBlock);
    lines[j] = EndLine(block.x, (most + 1) / 2);
    if (ErrorOf(block, lines[j], most) != 0) return {};
  }
  const Line shared = SharedOf(lines, (kMostSixBits + 1) / 2.0F);
  return ChooseLines(x, lines, shared.scale, shared.minimum, most);
}

LineBlock FindLines(const Weighed& x, float most) {
  const LineBlock even = FindEvenLines(x, most);
  if (even.error == 0) return even;
  Line lines[kLineBlocks];
  Line ends[kLineBlocks];
  double unshared_error = 0;
  for (size_t j = 0; j < kLineBlocks; ++j) {
    const Weighed block = x.At(j * kLineBlock);
    lines[j] = FindLine(block, most);
    ends[j] = EndLine(block.x, most);
    unshared_error += double{ErrorOf(block, lines[j], most)};
  }
  auto [d, dmin] = SharedOf(lines, kMostSixBits);
  LineBlock best;
  for (int i = 0; i < kRounds; ++i) {
    const LineBlock chosen = ChooseLines(x, lines, d, dmin, most);
    if (!(chosen.error < best.error)) break;
    best = chosen;
    FitShared(x, best, most, &d, &dmin);
    if (d == best.d && dmin == best.dmin) break;
  }
  if (even.error <= best.error) best = even;
  if (best.error <= kSharedShare * unshared_error) return best;
  // Tries d and dmin for one integer of both: what float16 rounds off is all
  // there is.
  for (const Line* const found : {lines, ends}) {
    const Line largest = LargestOf(found);
    for (int most_integer = kMostSixBits; most_integer > kMostSixBits / 2;
         --most_integer) {
      const auto divisor = static_cast<float>(most_integer);
      const LineBlock chosen =
          ChooseLines(x, found, RoundedToHalf(largest.scale / divisor),
                      RoundedToHalf(largest.minimum / divisor), most);
      if (chosen.error < best.error) best = chosen;
    }
  }
  return best;
}

// Scales and minima of 6 bits in 12 bytes, as gguf_types.cc reads them.
void PutSixBits(const LineBlock& block, uint8_t* bytes) {
  for (size_t j = 0; j < kLineBlocks / 2; ++j) {
    const int scale = block.scale[j + 4];
    const int minimum = block.minimum[j + 4];
    bytes[j] = static_cast<uint8_t>(block.scale[j] | scale >> 4 << 6);
    bytes[j + 4] = static_cast<uint8_t>(block.minimum[j] | minimum >> 4 << 6);
    bytes[j + 8] = static_cast<uint8_t>((scale & 15) | (minimum & 15) << 4);
  }
}

// `low`  128 bytes of the low 4 bits of codes; `high`  32 of the fifth, or
// null.
void EncodeLines(const Weighed& in, int most, uint8_t* block, uint8_t* high,
                 uint8_t* low) {
  const auto largest = static_cast<float>(most);
  const LineBlock found = FindLines(in, largest);
  PutHalf(found.d, block);
  PutHalf(found.dmin, block + 2);
  PutSixBits(found, block + 4);
  for (size_t j = 0; j < kLineBlocks; ++j) {
    const Line line = found.LineOf(j);
    const float inverse = InverseOf(line.scale);
    for (size_t i = 0; i < kLineBlock; ++i) {
      const int code = static_cast<int>(Code(
          (in.x[j * kLineBlock + i] + line.minimum) * inverse, 0, largest));
      // 32 bytes have two blocks.
      low[j / 2 * 32 + i] |= static_cast<uint8_t>((code & 15) << (j % 2 * 4));
      if (high != nullptr) {
        high[i] |= static_cast<uint8_t>(code >> 4 << j);
      }
    }
  }
}

void EncodeQ4K(const float* elements, const float* weights, uint8_t* block) {
  std::memset(block, 0, 144);
  EncodeLines({elements, weights}, 15, block, nullptr, block + 16);
}

void EncodeQ5K(const float* elements, const float* weights, uint8_t* block) {
  std::memset(block, 0, 176);
  EncodeLines({elements, weights}, 31, block, block + 16, block + 48);
}

// The minimum and the scale with the least error for the codes that `line`
// gives, as float16 has them.
Line FitHalves(const Weighed& x, const Line& line, float most) {
  const LineSums sums = SumsOf(x, line, most);
  const float determinant = sums.one * sums.qq - sums.q * sums.q;
  const float minimum = RoundedToHalf(
      determinant > 0 ? (sums.q * sums.xq - sums.qq * sums.x) / determinant
                      : line.minimum);
  return {RoundedToHalf(sums.qq > 0 ? (sums.xq + minimum * sums.q) / sums.qq
                                    : line.scale),
          minimum};
}

// The line in float16 with the least error of those that are tried, that of
// ggml first.
Line FindHalves(const Weighed& in, float most) {
  const float low = *std::min_element(in.x, in.x + kLineBlock);
  const float span = *std::max_element(in.x, in.x + kLineBlock) - low;
  const float minimum = RoundedToHalf(-low);
  Line best = {0, minimum};
  if (!(span > kLeastRange)) return best;
  float least = ErrorOf(in, best, most);
  const auto attempt = [&](const Line& line) {
    const float error = ErrorOf(in, line, most);
    if (!(error < least)) return;
    least = error;
    best = line;
  };
  attempt({RoundedToHalf(span / most), minimum});
  attempt({ToHalfAbove(span / most), minimum});
  // It keeps multiples of a power of two.
  attempt({RoundedToHalf(span / ((most + 1) / 2)), minimum});
  for (int i = 0; i < kHalfSteps; ++i) {
    const float codes = most - 2 + kHalfStep * static_cast<float>(i);
    attempt(FitHalves(in, {span / codes, -low}, most));
  }
  for (int i = 0; i < kHalfFits; ++i) attempt(FitHalves(in, best, most));
  return best;
}

template <int kBits>
void EncodeHalfLine(const float* x, const float* weights, uint8_t* block) {
  constexpr float kMost = (1 << kBits) - 1;
  std::memset(block, 0, 4 + kLineBlock * kBits / 8);
  const Line line = FindHalves({x, weights}, kMost);
  PutHalf(line.scale, block);
  PutHalf(-line.minimum, block + 2);
  const float inverse = InverseOf(line.scale);
  int codes[kLineBlock];
  for (size_t i = 0; i < kLineBlock; ++i) {
    codes[i] =
        static_cast<int>(Code((x[i] + line.minimum) * inverse, 0, kMost));
  }
  PutGgufCodes(codes, kBits, block + 4);
}

// q6_K, q4_0, q5_0 and q8_0: codes of two's complement.

constexpr size_t kScaleBlock = 16;
constexpr size_t kScaleBlocks = kEncodedBlock / kScaleBlock;
constexpr int kLeastScale = -128;
constexpr int kMostScale = 127;
constexpr int kScaleBits = 6;

// The least of codes of so many bits.
constexpr int LeastCode(int bits) { return -(1 << (bits - 1)); }

template <int kBits>
float ScaledCode(float x, float inverse) {
  return Code(x * inverse, LeastCode(kBits), -LeastCode(kBits) - 1);
}

template <size_t kCount, int kBits>
float ScaledError(const Weighed& in, float scale) {
  const float* const x = in.x;
  const float* const weight = in.weight;
  const float inverse = InverseOf(scale);
  float squares[kCount];
  for (size_t i = 0; i < kCount; ++i) {
    const float error = x[i] - scale * ScaledCode<kBits>(x[i], inverse);
    squares[i] = error * error * weight[i];
  }
  return Sum<kCount>(squares);
}

// Weighed sums over codes q and elements x.
struct ScaleSums {
  float qq;
  float xq;
};

template <size_t kCount, int kBits>
ScaleSums ScaledSums(const Weighed& in, float scale) {
  const float* const x = in.x;
  const float* const weight = in.weight;
  const float inverse = InverseOf(scale);
  float qq[kCount];
  float xq[kCount];
  for (size_t i = 0; i < kCount; ++i) {
    const float code = ScaledCode<kBits>(x[i], inverse);
    qq[i] = code * code * weight[i];
    xq[i] = x[i] * code * weight[i];
  }
  return {Sum<kCount>(qq), Sum<kCount>(xq)};
}

// The first one of the largest magnitude.
template <size_t kCount>
float Largest(const float* x) {
  float largest = 0;
  for (size_t i = 0; i < kCount; ++i) {
    if (std::fabs(x[i]) > std::fabs(largest)) largest = x[i];
  }
  return largest;
}

// The scale with the least error of those that are tried. Of either sign: codes
// reach further down than up.
float FindScale(const Weighed& x) {
  constexpr int kSteps = 21;
  constexpr float kStep = 0.25F;
  constexpr float kFirst = 29;
  const float largest = Largest<kScaleBlock>(x.x);
  if (!(std::fabs(largest) > kLeastRange)) return 0;
  float best = 0;
  float least = kInfinity;
  for (const float sign : {-1.0F, 1.0F}) {
    for (int i = 0; i < kSteps; ++i) {
      const float codes = kFirst + kStep * static_cast<float>(i);
      const ScaleSums sums =
          ScaledSums<kScaleBlock, kScaleBits>(x, sign * largest / codes);
      const float scale = sums.xq / sums.qq;
      const float error = ScaledError<kScaleBlock, kScaleBits>(x, scale);
      if (!(error < least)) continue;
      least = error;
      best = scale;
    }
  }
  return best;
}

struct ScaledBlock {
  float d = 0;
  int scale[kScaleBlocks] = {};
  double error = kInfinity;
};

ScaledBlock ChooseScales(const Weighed& x, const float* scales, float d) {
  ScaledBlock chosen = {d};
  chosen.error = 0;
  for (size_t j = 0; j < kScaleBlocks; ++j) {
    const int scale =
        NearestInt(scales[j] * InverseOf(d), kLeastScale, kMostScale);
    float least = kInfinity;
    for (int s = std::max(scale - 1, kLeastScale);
         s <= std::min(scale + 1, kMostScale); ++s) {
      const float error = ScaledError<kScaleBlock, kScaleBits>(
          x.At(j * kScaleBlock), d * static_cast<float>(s));
      if (!(error < least)) continue;
      least = error;
      chosen.scale[j] = s;
    }
    chosen.error += double{least};
  }
  return chosen;
}

float FitScales(const Weighed& x, const ScaledBlock& block) {
  double aa = 0;
  double xa = 0;
  for (size_t j = 0; j < kScaleBlocks; ++j) {
    const double scale = block.scale[j];
    const ScaleSums sums = ScaledSums<kScaleBlock, kScaleBits>(
        x.At(j * kScaleBlock), block.d * static_cast<float>(block.scale[j]));
    aa += scale * scale * double{sums.qq};
    xa += scale * double{sums.xq};
  }
  return aa > 0 ? RoundedToHalf(xa / aa) : block.d;
}

// The d with which the largest scale becomes -128.
float SharedOf(const float* scales) {
  const float largest = Largest<kScaleBlocks>(scales);
  const float d = ToHalfAbove(std::fabs(largest) / -kLeastScale);
  return largest > 0 ? -d : d;
}

// The even scales of all blocks, where they have no error, like FindEvenLines.
ScaledBlock FindEvenScales(const Weighed& x) {
  float scales[kScaleBlocks];
  for (size_t j = 0; j < kScaleBlocks; ++j) {
    const Weighed block = x.At(j * kScaleBlock);
    const float largest = std::fabs(Largest<kScaleBlock>(block.x));
    scales[j] =
        largest > kLeastRange ? largest / (-LeastCode(kScaleBits) / 2.0F) : 0;
    if (ScaledError<kScaleBlock, kScaleBits>(block, scales[j]) != 0) return {};
  }
  return ChooseScales(x, scales, SharedOf(scales));
}

ScaledBlock FindScales(const Weighed& x) {
  const ScaledBlock even = FindEvenScales(x);
  if (even.error == 0) return even;
  float scales[kScaleBlocks];
  float ends[kScaleBlocks];
  double unshared_error = 0;
  for (size_t j = 0; j < kScaleBlocks; ++j) {
    const Weighed block = x.At(j * kScaleBlock);
    scales[j] = FindScale(block);
    ends[j] = Largest<kScaleBlock>(block.x) / LeastCode(kScaleBits);
    unshared_error +=
        double{ScaledError<kScaleBlock, kScaleBits>(block, scales[j])};
  }
  float d = SharedOf(scales);
  ScaledBlock best;
  for (int i = 0; i < kRounds; ++i) {
    const ScaledBlock chosen = ChooseScales(x, scales, d);
    if (!(chosen.error < best.error)) break;
    best = chosen;
    d = FitScales(x, best);
    if (d == best.d) break;
  }
  if (even.error <= best.error) best = even;
  if (best.error <= kSharedShare * unshared_error) return best;
  // Tries d for one integer, like FindLines.
  for (const float* const found : {scales, ends}) {
    const float largest = Largest<kScaleBlocks>(found);
    for (int integer = kLeastScale; integer < kLeastScale / 2; ++integer) {
      const ScaledBlock chosen = ChooseScales(
          x, found, RoundedToHalf(largest / static_cast<float>(integer)));
      if (chosen.error < best.error) best = chosen;
    }
  }
  return best;
}

void EncodeQ6K(const float* elements, const float* weights, uint8_t* block) {
  std::memset(block, 0, 210);
  const ScaledBlock found = FindScales({elements, weights});
  PutHalf(found.d, block + 208);
  for (size_t j = 0; j < kScaleBlocks; ++j) {
    block[192 + j] = static_cast<uint8_t>(found.scale[j]);
    const float inverse =
        InverseOf(found.d * static_cast<float>(found.scale[j]));
    // The places where gguf_types.cc finds the bits of the codes.
    uint8_t* const low = block + j / 8 * 64 + j % 4 * 16;
    uint8_t* const high = block + 128 + j / 8 * 32 + j % 2 * 16;
    for (size_t i = 0; i < kScaleBlock; ++i) {
      const int code = static_cast<int>(ScaledCode<kScaleBits>(
                           elements[j * kScaleBlock + i], inverse)) -
                       LeastCode(kScaleBits);
      low[i] |= static_cast<uint8_t>((code & 15) << (j % 8 / 4 * 4));
      high[i] |= static_cast<uint8_t>(code >> 4 << (j / 2 % 4 * 2));
    }
  }
}

// The scale in float16 with the least error of those that are tried, that of
// ggml first, where the largest element has the code `of_ggml`.
template <int kBits>
float FindHalf(const Weighed& x, float of_ggml) {
  constexpr int kLeast = LeastCode(kBits);
  const float largest = Largest<kLineBlock>(x.x);
  if (!(std::fabs(largest) > kLeastRange)) return 0;
  float best = 0;
  float least = ScaledError<kLineBlock, kBits>(x, best);
  const auto attempt = [&](float scale) {
    const float error = ScaledError<kLineBlock, kBits>(x, scale);
    if (!(error < least)) return;
    least = error;
    best = scale;
  };
  attempt(RoundedToHalf(largest / of_ggml));
  attempt(ToHalfAbove(std::fabs(largest) / (-kLeast - 1)));
  // It keeps multiples of a power of two.
  attempt(RoundedToHalf(largest / (-kLeast / 2.0F)));
  for (const float sign : {-1.0F, 1.0F}) {
    for (int i = 0; i < kHalfSteps; ++i) {
      const float codes = -kLeast - 2 + kHalfStep * static_cast<float>(i);
      const ScaleSums sums =
          ScaledSums<kLineBlock, kBits>(x, sign * largest / codes);
      attempt(RoundedToHalf(sums.xq / sums.qq));
    }
  }
  return best;
}

template <int kBits, int kOfGgml>
void EncodeHalfScale(const float* x, const float* weights, uint8_t* block) {
  // Two's complement becomes a distance from the lowest code, but for 8 bits.
  constexpr int kOffset = kBits < 8 ? -LeastCode(kBits) : 0;
  std::memset(block, 0, 2 + kLineBlock * kBits / 8);
  const float scale = FindHalf<kBits>({x, weights}, kOfGgml);
  PutHalf(scale, block);
  const float inverse = InverseOf(scale);
  int codes[kLineBlock];
  for (size_t i = 0; i < kLineBlock; ++i) {
    codes[i] = static_cast<int>(ScaledCode<kBits>(x[i], inverse)) + kOffset;
  }
  PutGgufCodes(codes, kBits, block + 2);
}

struct EncoderRow {
  absl::string_view type;
  GgufEncoder encoder;
};
constexpr EncoderRow kEncoders[] = {
    {"q4_0", {8 * kMostHalf, EncodeHalfScale<4, -8>}},
    {"q4_1", {kMostHalf, EncodeHalfLine<4>}},
    {"q5_0", {16 * kMostHalf, EncodeHalfScale<5, -16>}},
    {"q5_1", {kMostHalf, EncodeHalfLine<5>}},
    {"q8_0", {0x1p21F, EncodeHalfScale<8, 127>}},
    {"q4_K", {0x1p21F, EncodeQ4K}},
    {"q5_K", {0x1p21F, EncodeQ5K}},
    {"q6_K", {0x1p21F, EncodeQ6K}}};

}  // namespace

const GgufEncoder* FindGgufEncoder(const GgufType& type) {
  for (const EncoderRow& row : kEncoders) {
    if (row.type == type.name) return &row.encoder;
  }
  return nullptr;
}

void PutGgufCodes(const int* codes, int bits, uint8_t* bytes) {
  if (bits == 8) {
    for (size_t i = 0; i < kLineBlock; ++i) {
      bytes[i] = static_cast<uint8_t>(codes[i]);
    }
    return;
  }
  if (bits == 5) {
    for (size_t i = 0; i < kLineBlock; ++i) {
      bytes[i / 8] |= static_cast<uint8_t>((codes[i] >> 4 & 1) << (i % 8));
    }
    bytes += kLineBlock / 8;
  }
  for (size_t i = 0; i < kLineBlock / 2; ++i) {
    bytes[i] = static_cast<uint8_t>((codes[i] & 15) |
                                    (codes[i + kLineBlock / 2] & 15) << 4);
  }
}

}  // namespace quantd::files
