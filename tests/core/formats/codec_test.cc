#include "core/formats/codec.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/dequantize/dequantize.h"
#include "core/formats/number_format.h"
#include "core/formats/packing.h"
#include "core/quantize/quantize.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"
#include "gtest/gtest.h"
#include "tests/core/formats/format_test_util.h"
#include "tests/core/kernel_test_util.h"
#include "tests/support/count.h"

namespace quantd::core::codec_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// An encoding under scale 1, whose codes are those of the elements themselves.
Encoding UnitEncoding(const FormatInfo& format) {
  Encoding encoding;
  encoding.format = format.format;
  encoding.scale = {1};
  encoding.qmin = format.qmin;
  encoding.qmax = format.qmax;
  return encoding;
}

// A byte per code, of elements under scale 1, and the number of clipped ones.
struct Codes {
  std::vector<uint8_t> codes;
  int64_t clipped = 0;
};

Codes QuantizeToCodes(const Encoding& encoding, ElementType type,
                      const uint8_t* reals, int64_t count) {
  const FormatInfo& format = *FindFormat(encoding.format);
  const BlockLayout layout = *BlockLayout::Create({count}, {});
  std::vector<uint8_t> bytes(format.SizeBytes(count));
  QuantizeCounts counts;
  EXPECT_TRUE(Quantize(encoding, layout, type, NanPolicy::kDefault, 0, count,
                       reals, bytes.data(), &counts, nullptr)
                  .ok());
  Codes result;
  result.clipped = counts.clipped_low + counts.clipped_high;
  if (format.storage_bits == 8) {
    result.codes = std::move(bytes);
    return result;
  }
  result.codes.resize(count);
  for (int64_t i = 0; i < count; ++i) {
    result.codes[i] = static_cast<uint8_t>(LoadCode(format, bytes.data(), i));
  }
  return result;
}

// Nearest even by a search over all numbers of the format, saturating and not.
class BruteForce {
 public:
  explicit BruteForce(const NaiveFloat& naive) : naive_(naive) {
    for (int pattern = 0; pattern <= naive.largest(); ++pattern) {
      numbers_.push_back(naive.Magnitude(pattern));
    }
    // The next number, if the format went on, is as far again.
    next_ = 2 * numbers_.back() - numbers_[numbers_.size() - 2];
  }

  struct Result {
    uint8_t saturated;
    uint8_t unsaturated;
    bool is_clipped;
  };

  Result Encode(double x) const {
    const int nan = naive_.is_fnuz          ? naive_.sign_bit()
                    : naive_.first_nan >= 0 ? naive_.sign_bit() - 1
                                            : 0;
    if (std::isnan(x)) return {Byte(nan), Byte(nan), false};
    const int sign = std::signbit(x) ? naive_.sign_bit() : 0;
    const double magnitude = std::fabs(x);
    const int largest = naive_.largest();
    const auto above =
        std::upper_bound(numbers_.begin(), numbers_.end(), magnitude);
    // numbers_[0] is 0, so that there is one at or below.
    int pattern = static_cast<int>(above - numbers_.begin()) - 1;
    // Exact: long double has 64 bits, and these three are close together.
    const long double low = numbers_[pattern];
    const long double high = pattern == largest ? next_ : numbers_[pattern + 1];
    const bool is_far = magnitude >= next_;
    const long double below = magnitude - low;
    const long double beyond = high - magnitude;
    if (is_far || beyond < below || (beyond == below && pattern % 2 == 1)) {
      ++pattern;
    }
    if (pattern > largest) {
      const int overflow = naive_.infinity >= 0 ? sign | naive_.infinity : nan;
      return {Byte(sign | largest), Byte(overflow), true};
    }
    const int code = naive_.is_fnuz && pattern == 0 ? 0 : sign | pattern;
    return {Byte(code), Byte(code), false};
  }

 private:
  static uint8_t Byte(int code) { return static_cast<uint8_t>(code); }

  const NaiveFloat& naive_;
  std::vector<double> numbers_;
  double next_;
};

// Compares all targets with the search, for elements of a type.
void CheckEncodes(const NaiveFloat& naive, ElementType type,
                  const std::vector<uint8_t>& reals,
                  bool check_unsaturated = true) {
  const FormatInfo& format = *FindFormatByName(naive.name);
  const int64_t count =
      static_cast<int64_t>(reals.size()) / ElementSizeBytes(type);
  const BruteForce brute_force(naive);
  std::vector<uint8_t> saturated(count);
  std::vector<uint8_t> unsaturated(count);
  int64_t clipped = 0;
  for (int64_t i = 0; i < count; ++i) {
    // Quantizing makes +0 of -0.
    const BruteForce::Result result =
        brute_force.Encode(NaiveReal(type, reals.data(), i) + 0.0);
    saturated[i] = result.saturated;
    unsaturated[i] = result.unsaturated;
    clipped += result.is_clipped;
  }
  ForEachSimdTarget([&] {
    for (const bool no_saturation : {false, true}) {
      if (no_saturation && !(check_unsaturated && format.has_nan())) continue;
      SCOPED_TRACE(no_saturation);
      Encoding encoding = UnitEncoding(format);
      encoding.no_saturation = no_saturation;
      const Codes got = QuantizeToCodes(encoding, type, reals.data(), count);
      EXPECT_EQ(got.clipped, clipped);
      const std::vector<uint8_t>& want =
          no_saturation ? unsaturated : saturated;
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(int{got.codes[i]}, int{want[i]})
            << NaiveReal(type, reals.data(), i);
      }
    }
  });
}

// So that the tests of kNaiveFloats are of all floats.
TEST(CodecTest, KnowsTheSpecificationOfEveryFloat) {
  for (const FormatInfo& format : AllFormats()) {
    if (format.kind != CodeKind::kFloat) continue;
    SCOPED_TRACE(format.name);
    const NaiveFloat* naive = FindNaiveFloat(format);
    ASSERT_NE(naive, nullptr);
    EXPECT_EQ(format.bits, naive->bits());
    EXPECT_EQ(format.max_value, naive->Magnitude(naive->largest()));
    EXPECT_EQ(format.has_nan(), naive->first_nan >= 0 || naive->is_fnuz);
    EXPECT_EQ(format.has_infinity(), naive->infinity >= 0);
  }
}

TEST(CodecTest, DecodesEveryCodeOfEveryFloatExactly) {
  for (const NaiveFloat& naive : kNaiveFloats) {
    SCOPED_TRACE(naive.name);
    const FormatInfo& format = *FindFormatByName(naive.name);
    ASSERT_EQ(format.bits, naive.bits());
    EXPECT_EQ(LargestFloat(format.float_layout),
              naive.Magnitude(naive.largest()));
    EXPECT_EQ(format.max_value, LargestFloat(format.float_layout));
    const int64_t count = int64_t{1} << format.bits;
    std::vector<int32_t> codes(count);
    for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<int32_t>(i);
    const std::vector<uint8_t> bytes = NaivePack(format, codes);
    const BlockLayout layout = *BlockLayout::Create({count}, {});
    ForEachSimdTarget([&] {
      std::vector<float> out(count);
      Dequantize(UnitEncoding(format), layout, ElementType::kFloat32, 0, count,
                 bytes.data(), reinterpret_cast<uint8_t*>(out.data()), nullptr);
      for (int code = 0; code < count; ++code) {
        const double want = naive.Decode(code);
        if (std::isnan(want)) {
          EXPECT_TRUE(std::isnan(out[code])) << code;
        } else {
          EXPECT_EQ(out[code], want) << code;
          EXPECT_EQ(std::signbit(out[code]), std::signbit(want)) << code;
        }
      }
    });
  }
}

TEST(CodecTest, EncodesEveryHalfAndBfloatToTheNearestEven) {
  std::vector<uint8_t> reals(65536 * 2);
  for (int i = 0; i < 65536; ++i) {
    reals[2 * i] = static_cast<uint8_t>(i);
    reals[2 * i + 1] = static_cast<uint8_t>(i >> 8);
  }
  for (const NaiveFloat& naive : kNaiveFloats) {
    SCOPED_TRACE(naive.name);
    for (const ElementType type :
         {ElementType::kFloat16, ElementType::kBfloat16}) {
      SCOPED_TRACE(ElementTypeName(type));
      CheckEncodes(naive, type, reals);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CodecTest, EncodesRandomFloatPatternsToTheNearestEven) {
  const int64_t kCount = testing::Count("QUANTD_CODEC_PATTERNS",
                                        kIsSlowBuild ? 100'000 : 2'000'000);
  const int64_t kPart = 1 << 20;
  for (const NaiveFloat& naive : kNaiveFloats) {
    SCOPED_TRACE(naive.name);
    std::mt19937 random(17);
    for (int64_t done = 0; done < kCount; done += kPart) {
      const int64_t count = std::min(kPart, kCount - done);
      std::vector<uint8_t> reals(count * 4);
      for (int64_t i = 0; i < count; ++i) {
        uint32_t bits = static_cast<uint32_t>(random());
        if (i % 4 == 1) {
          // An exponent near those of the format, and a mantissa on a tie of
          // some width or next to one.
          const uint32_t exponent = 127 + bits % 48 - 28;
          const int zeros = 16 + static_cast<int>(bits >> 8) % 7;
          const uint32_t mantissa =
              (bits >> (zeros - 1)) << zeros | uint32_t{1} << (zeros - 1);
          const uint32_t next = bits >> 28;
          bits = (bits & 0x80000000) | exponent << 23 |
                 ((mantissa + (next == 0) - (next == 1)) & 0x7FFFFF);
        } else if (i % 64 == 2) {
          bits &= 0x807FFFFF;  // subnormal
        } else if (i % 256 == 3) {
          bits |= 0x7F800000;  // NaN, now and then infinity
          if (i % 512 == 3) bits &= 0xFF800000;
        } else if (i % 4096 == 4) {
          bits &= 0x80000000;  // zero
        }
        std::memcpy(reals.data() + 4 * i, &bits, 4);
      }
      // The two differ past the largest number only.
      CheckEncodes(naive, ElementType::kFloat32, reals,
                   /*check_unsaturated=*/done % (8 * kPart) == 0);
      if (HasFatalFailure()) return;
    }
  }
}

// Rounding to float32 on the way would end on the tie.
TEST(CodecTest, RoundsFloat64Once) {
  for (const NaiveFloat& naive : kNaiveFloats) {
    SCOPED_TRACE(naive.name);
    std::vector<double> values = {0.0,          -0.0,    kInfinity, -kInfinity,
                                  5e-324,       -5e-324, 1e-310,    1e300,
                                  std::nan(""), -1e300};
    for (int pattern = 0; pattern <= naive.largest(); ++pattern) {
      const double low = naive.Magnitude(pattern);
      const double high = pattern == naive.largest()
                              ? 2 * low - naive.Magnitude(pattern - 1)
                              : naive.Magnitude(pattern + 1);
      const double tie = (low + high) / 2;
      for (const double x :
           {low, tie, std::nextafter(tie, 0.0), std::nextafter(tie, 1e9),
            tie * (1 - 0x1p-40), tie * (1 + 0x1p-40), tie * (1 - 0x1p-30),
            tie * (1 + 0x1p-30)}) {
        values.push_back(x);
        values.push_back(-x);
      }
    }
    std::vector<uint8_t> reals(values.size() * 8);
    std::memcpy(reals.data(), values.data(), reals.size());
    CheckEncodes(naive, ElementType::kFloat64, reals);
    if (HasFatalFailure()) return;
  }
}

// The index of the nearest entry, the lower of two, by trying all. Entries and
// x are multiples of 2^-60 below 2^60, so that everything is an integer.
int NearestEntry(const std::vector<float>& codebook, double x) {
  using Integer = __int128;
  const auto to_integer = [](double value) {
    return static_cast<Integer>(
        std::ldexp(static_cast<long double>(value), 60));
  };
  int nearest = 0;
  Integer least = -1;
  for (size_t k = 0; k < codebook.size(); ++k) {
    Integer distance = to_integer(x) - to_integer(codebook[k]);
    if (distance < 0) distance = -distance;
    if (least < 0 || distance < least) {
      least = distance;
      nearest = static_cast<int>(k);
    }
  }
  return nearest;
}

template <typename T>
void CheckCodebook(const Encoding& encoding, const std::vector<float>& codebook,
                   uint32_t seed) {
  constexpr ElementType kType =
      sizeof(T) == 8 ? ElementType::kFloat64 : ElementType::kFloat32;
  std::mt19937 random(seed);
  std::vector<T> values = {0, T{-0.0f}, 1, -1, 100, -100};
  const T low = codebook.front() - T{0.5};
  const T span = codebook.back() + T{0.5} - low;
  for (int i = 0; i < 2000; ++i) {
    values.push_back(low + span * static_cast<T>(random() * 0x1p-32));
  }
  for (size_t k = 0; k + 1 < codebook.size(); ++k) {
    const T middle = (static_cast<T>(codebook[k]) + codebook[k + 1]) / 2;
    T x = middle;
    for (int i = 0; i < 3; ++i) x = std::nextafter(x, T{-1e9f});
    for (int i = 0; i < 7; ++i) {
      values.push_back(x);
      x = std::nextafter(x, T{1e9f});
    }
  }
  values.insert(values.end(), codebook.begin(), codebook.end());
  // Multiples of 2^-60, that NearestEntry is exact.
  for (T& x : values) {
    x = static_cast<T>(std::ldexp(
        std::nearbyint(std::ldexp(static_cast<long double>(x), 60)), -60));
  }
  const int64_t count = static_cast<int64_t>(values.size());
  const auto* reals = reinterpret_cast<const uint8_t*>(values.data());
  std::vector<int> want;
  int64_t clipped = 0;
  for (const T x : values) {
    want.push_back(NearestEntry(codebook, x));
    clipped += x < codebook.front() || x > codebook.back();
  }
  ForEachSimdTarget([&] {
    const Codes got = QuantizeToCodes(encoding, kType, reals, count);
    EXPECT_EQ(got.clipped, clipped);
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(int{got.codes[i]}, want[i]) << values[i];
    }
  });
}

TEST(CodecTest, EncodesToTheNearestEntryOfEveryCodebook) {
  for (const FormatInfo& format : AllFormats()) {
    if (format.kind != CodeKind::kCodebook) continue;
    SCOPED_TRACE(format.name);
    for (const int size : {2, 3, 4, 5, 8, 9, 15, 16, 17, 100, 255, 256}) {
      if (size > (1 << format.bits)) continue;
      SCOPED_TRACE(size);
      Encoding encoding = UnitEncoding(format);
      std::vector<float> codebook(format.codebook.begin(),
                                  format.codebook.end());
      if (codebook.empty()) {
        codebook = RandomCodebook(size, static_cast<uint32_t>(size));
        // Entries that NearestEntry takes exactly, some of them close.
        for (float& entry : codebook) {
          entry = std::ldexp(std::nearbyint(std::ldexp(entry, 40)), -40);
        }
        codebook[1] = std::nextafter(codebook[0], 1.0f);
        encoding.codebook = codebook;
        encoding.qmax = size - 1;
      }
      CheckCodebook<float>(encoding, codebook, 1);
      CheckCodebook<double>(encoding, codebook, 2);
      if (HasFatalFailure()) return;
    }
  }
}

// The middle of two entries need not be a float64.
TEST(CodecTest, ComparesWithTheExactMiddleOfFarEntries) {
  const struct {
    std::vector<float> codebook;
    double x;
    int want;
  } kCases[] = {
      {{0x1p-60f, 0x1p60f}, 0x1p59, 0},
      {{-0x1p-60f, 0x1p60f}, 0x1p59, 1},
      {{-0x1p60f, -0x1p-60f}, -0x1p59, 1},
      {{-0x1p60f, 0x1p-60f}, -0x1p59, 0},
      {{-0x1p60f, 0x1p60f}, 0.0, 0},
      {{-3e38f, 3e38f}, 1e-30, 1},
      {{3e38f, 3.4e38f}, 3.1e38, 0},
      {{0x1p-149f, 0x1p-148f}, 0x1p-149 * 1.5, 0},
      {{0, 0x1p-149f}, 0x1p-150, 0},
      {{0, 0x1p-149f}, 0x1p-149, 1},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.x);
    EXPECT_EQ(static_cast<int>(EncodeCodebook(c.codebook, c.x)), c.want);
    Encoding encoding = UnitEncoding(*FindFormatByName("codebook8"));
    encoding.codebook = c.codebook;
    encoding.qmax = 1;
    ForEachSimdTarget([&] {
      EXPECT_EQ(QuantizeToCodes(encoding, ElementType::kFloat64,
                                reinterpret_cast<const uint8_t*>(&c.x), 1)
                    .codes[0],
                c.want);
      const float single = static_cast<float>(c.x);
      if (double{single} != c.x) return;
      EXPECT_EQ(QuantizeToCodes(encoding, ElementType::kFloat32,
                                reinterpret_cast<const uint8_t*>(&single), 1)
                    .codes[0],
                c.want);
    });
  }
}

TEST(CodecTest, TakesNanToTheEntryNearestToZero) {
  const std::vector<float> codebook = {-2, -0.75f, -0.5f, 0.5f, 3};
  EXPECT_EQ(EncodeCodebook(codebook, std::nan("")), 2u);
  EXPECT_EQ(EncodeCodebook(codebook, kInfinity), 4u);
  EXPECT_EQ(EncodeCodebook(codebook, -kInfinity), 0u);
}

TEST(CodecTest, TellsWhereOverflowBegins) {
  const struct {
    const char* name;
    double threshold;
    bool is_tie_in;
  } kCases[] = {{"float8_e4m3fn", 464, false},     // 448 is 1.75 * 2^8: even
                {"float8_e5m2", 61440, true},      // 57344 is odd
                {"float8_e4m3fnuz", 248, true},    //
                {"float8_e5m2fnuz", 61440, true},  //
                {"float6_e2m3", 7.75, true},       //
                {"float6_e3m2", 30, true},         //
                {"float4_e2m1", 7, true}};
  for (const auto& c : kCases) {
    const double got =
        OverflowThreshold(FindFormatByName(c.name)->float_layout);
    EXPECT_EQ(
        got, c.is_tie_in ? c.threshold : std::nextafter(c.threshold, kInfinity))
        << c.name;
  }
}

}  // namespace
}  // namespace quantd::core::codec_test
