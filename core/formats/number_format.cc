#include "core/formats/number_format.h"

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace quantd::core {
namespace {

constexpr FloatLayout kNoFloat = {0, 0, 0, FloatSpecials::kNone};
constexpr FloatLayout kE4m3fn = {4, 3, 7, FloatSpecials::kNan};
constexpr FloatLayout kE5m2 = {5, 2, 15, FloatSpecials::kIeee};
constexpr FloatLayout kE4m3fnuz = {4, 3, 8, FloatSpecials::kFnuz};
constexpr FloatLayout kE5m2fnuz = {5, 2, 16, FloatSpecials::kFnuz};
constexpr FloatLayout kE2m3 = {2, 3, 1, FloatSpecials::kNone};
constexpr FloatLayout kE3m2 = {3, 2, 3, FloatSpecials::kNone};
constexpr FloatLayout kE2m1 = {2, 1, 1, FloatSpecials::kNone};

// The normal float 4 of QLoRA (Dettmers et al., 2023, appendix E).
constexpr float kNf4[] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

constexpr int StorageBits(int bits) {
  if (bits == 2 || bits == 4) return bits;
  return bits <= 8 ? 8 : (bits <= 16 ? 16 : 32);
}

constexpr FormatInfo Integer(int value, absl::string_view name, int bits,
                             bool is_signed) {
  const int magnitude_bits = is_signed ? bits - 1 : bits;
  const auto qmax = static_cast<int32_t>((int64_t{1} << magnitude_bits) - 1);
  return FormatInfo{static_cast<NumberFormat>(value),
                    name,
                    CodeKind::kInteger,
                    bits,
                    StorageBits(bits),
                    is_signed,
                    is_signed ? -qmax - 1 : 0,
                    qmax,
                    kNoFloat,
                    static_cast<double>(qmax),
                    {},
                    ScaleType::kDefault,
                    /*default_group=*/0,
                    /*step_exponent=*/0};
}

constexpr double MaxValue(const FloatLayout& layout) {
  int exponent = (1 << layout.exponent_bits) - 1;
  int mantissa = (1 << layout.mantissa_bits) - 1;
  if (layout.specials == FloatSpecials::kIeee) --exponent;
  if (layout.specials == FloatSpecials::kNan) --mantissa;
  double value = (1 << layout.mantissa_bits) + mantissa;
  int power = exponent - layout.bias - layout.mantissa_bits;
  for (; power > 0; --power) value *= 2;
  for (; power < 0; ++power) value /= 2;
  return value;
}

constexpr FormatInfo Float(int value, absl::string_view name,
                           FloatLayout layout,
                           ScaleType scale_type = ScaleType::kDefault,
                           int64_t default_group = 0) {
  const int bits = 1 + layout.exponent_bits + layout.mantissa_bits;
  return FormatInfo{static_cast<NumberFormat>(value),
                    name,
                    CodeKind::kFloat,
                    bits,
                    StorageBits(bits),
                    /*is_signed=*/false,
                    /*qmin=*/0,
                    /*qmax=*/(1 << bits) - 1,
                    layout,
                    MaxValue(layout),
                    {},
                    scale_type,
                    default_group,
                    /*step_exponent=*/0};
}

constexpr FormatInfo Codebook(int value, absl::string_view name, int bits,
                              absl::Span<const float> codebook = {},
                              int64_t default_group = 0) {
  return FormatInfo{static_cast<NumberFormat>(value),
                    name,
                    CodeKind::kCodebook,
                    bits,
                    StorageBits(bits),
                    /*is_signed=*/false,
                    /*qmin=*/0,
                    /*qmax=*/(1 << bits) - 1,
                    kNoFloat,
                    /*max_value=*/1,
                    codebook,
                    ScaleType::kDefault,
                    default_group,
                    /*step_exponent=*/0};
}

// An integer format in blocks under scales of a prescribed type. MXINT8 does
// without -128, so that it is symmetric.
constexpr FormatInfo BlockInteger(int value, absl::string_view name, int bits,
                                  int32_t qmin, ScaleType scale_type,
                                  int64_t default_group, int step_exponent) {
  FormatInfo row = Integer(value, name, bits, true);
  row.qmin = qmin;
  row.scale_type = scale_type;
  row.default_group = default_group;
  row.step_exponent = step_exponent;
  return row;
}

constexpr FormatInfo kFormats[] = {
    Integer(2, "int2", 2, true),
    Integer(3, "int3", 3, true),
    Integer(4, "int4", 4, true),
    Integer(5, "int5", 5, true),
    Integer(6, "int6", 6, true),
    Integer(7, "int7", 7, true),
    Integer(8, "int8", 8, true),
    Integer(9, "int9", 9, true),
    Integer(10, "int10", 10, true),
    Integer(11, "int11", 11, true),
    Integer(12, "int12", 12, true),
    Integer(13, "int13", 13, true),
    Integer(14, "int14", 14, true),
    Integer(15, "int15", 15, true),
    Integer(16, "int16", 16, true),
    Integer(22, "uint2", 2, false),
    Integer(23, "uint3", 3, false),
    Integer(24, "uint4", 4, false),
    Integer(25, "uint5", 5, false),
    Integer(26, "uint6", 6, false),
    Integer(27, "uint7", 7, false),
    Integer(28, "uint8", 8, false),
    Integer(29, "uint9", 9, false),
    Integer(30, "uint10", 10, false),
    Integer(31, "uint11", 11, false),
    Integer(32, "uint12", 12, false),
    Integer(33, "uint13", 13, false),
    Integer(34, "uint14", 14, false),
    Integer(35, "uint15", 15, false),
    Integer(36, "uint16", 16, false),
    Float(40, "float8_e4m3fn", kE4m3fn),
    Float(41, "float8_e5m2", kE5m2),
    Float(42, "float8_e4m3fnuz", kE4m3fnuz),
    Float(43, "float8_e5m2fnuz", kE5m2fnuz),
    Float(44, "float6_e2m3", kE2m3),
    Float(45, "float6_e3m2", kE3m2),
    Float(46, "float4_e2m1", kE2m1),
    Float(50, "mxfp8_e4m3", kE4m3fn, ScaleType::kE8m0, 32),
    Float(51, "mxfp8_e5m2", kE5m2, ScaleType::kE8m0, 32),
    Float(52, "mxfp6_e2m3", kE2m3, ScaleType::kE8m0, 32),
    Float(53, "mxfp6_e3m2", kE3m2, ScaleType::kE8m0, 32),
    Float(54, "mxfp4_e2m1", kE2m1, ScaleType::kE8m0, 32),
    BlockInteger(55, "mxint8", 8, -127, ScaleType::kE8m0, 32, -6),
    Float(56, "nvfp4", kE2m1, ScaleType::kE4m3, 16),
    Codebook(60, "nf4", 4, kNf4, 64),
    Codebook(61, "codebook2", 2),
    Codebook(62, "codebook4", 4),
    Codebook(63, "codebook8", 8),
    BlockInteger(64, "lpbq", 4, -8, ScaleType::kInteger, 64, 0),
    Integer(65, "int32", 32, true),
};

// True if FloatCoder of core/quantize/coders-inl.h computes all float formats
// exactly: codes of a byte, ties of at most 5 bits, and no number below 2^-17.
constexpr bool FloatsAreSmall() {
  for (const FormatInfo& row : kFormats) {
    const FloatLayout& layout = row.float_layout;
    if (row.kind == CodeKind::kFloat &&
        (row.bits > 8 || layout.mantissa_bits > 3 ||
         1 - layout.bias - layout.mantissa_bits < -17)) {
      return false;
    }
  }
  return true;
}
static_assert(FloatsAreSmall(), "a float that FloatCoder gets wrong");

}  // namespace

absl::Span<const FormatInfo> AllFormats() { return kFormats; }

const FormatInfo* FindFormat(NumberFormat format) {
  for (const FormatInfo& row : kFormats) {
    if (row.format == format) return &row;
  }
  return nullptr;
}

const FormatInfo* FindFormatByName(absl::string_view name) {
  for (const FormatInfo& row : kFormats) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

const FormatInfo& IntegerFormat(int bits, bool is_signed) {
  if (bits == kWideIntegerBits) return *FindFormatByName("int32");
  return *FindFormat(static_cast<NumberFormat>(is_signed ? bits : 20 + bits));
}

}  // namespace quantd::core
