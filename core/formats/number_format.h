// The table of number formats: one row per format.

#ifndef QUANTD_CORE_FORMATS_NUMBER_FORMAT_H_
#define QUANTD_CORE_FORMATS_NUMBER_FORMAT_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/formats/scale_type.h"

namespace quantd::core {

// The values are those of quantd.v1.NumberFormat; FormatInfo::name spells them.
enum class NumberFormat : int {};

// Kind of a code; everything else of a format is scales.
enum class CodeKind { kInteger, kFloat, kCodebook };

// Meaning of the patterns at the end of a small float's range.
enum class FloatSpecials {
  kNone,  // numbers, all of them
  kNan,   // S.1..1.1..1 is NaN, there is no infinity (E4M3FN)
  kIeee,  // the largest exponent is infinity and NaN (E5M2)
  kFnuz   // 1.0..0.0..0, negative zero elsewhere, is the only NaN
};

// A sign bit, exponent bits and mantissa bits; subnormals as in IEEE 754.
struct FloatLayout {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  FloatSpecials specials;
};

// One row of the table.
struct FormatInfo {
  NumberFormat format;
  // Name as users write it: "int8", "uint4", "float8_e4m3fn", "mxfp4_e2m1".
  absl::string_view name;
  CodeKind kind;
  // Bits of a code.
  int bits;
  // Bits that a code takes in memory: 2 and 4 packed, otherwise 8, 16 or 32.
  int storage_bits;
  // Integers only: two's complement.
  bool is_signed;
  // The smallest and largest code; of floats and codebooks 0 and 2^bits - 1.
  int32_t qmin;
  int32_t qmax;
  // Floats only.
  FloatLayout float_layout;
  // The largest number that a code stands for, before scale and zero point; 1
  // for codebooks that the encoding carries.
  double max_value;
  // Codebooks that the format prescribes, ascending; empty for those that the
  // encoding carries.
  absl::Span<const float> codebook;
  // How scales are stored; kDefault: as the encoding says.
  ScaleType scale_type;
  // Elements of a block along the last axis when a spec names no granularity;
  // 0: per tensor.
  int64_t default_group;
  // The scale is 2^step_exponent times what is stored (MXINT8: -6).
  int step_exponent;

  // Codes per byte for packed formats, otherwise 1.
  int64_t codes_per_byte() const {
    return storage_bits < 8 ? 8 / storage_bits : 1;
  }
  // Size in bytes of `count` codes, the last byte zero-padded.
  // Requires: count >= 0.
  int64_t SizeBytes(int64_t count) const {
    return storage_bits < 8
               ? count / codes_per_byte() + (count % codes_per_byte() != 0)
               : count * (storage_bits / 8);
  }
  // True if a code can stand for NaN, or for infinity.
  bool has_nan() const {
    return kind == CodeKind::kFloat &&
           float_layout.specials != FloatSpecials::kNone;
  }
  bool has_infinity() const {
    return kind == CodeKind::kFloat &&
           float_layout.specials == FloatSpecials::kIeee;
  }
};

// All rows.
absl::Span<const FormatInfo> AllFormats();

// The row of a format or of a name; null when there is none.
const FormatInfo* FindFormat(NumberFormat format);
const FormatInfo* FindFormatByName(absl::string_view name);

// The width of integers that float32 does not hold exactly: int32. All their
// zero points are 0, and plain definitions take the place of kernels.
constexpr int kWideIntegerBits = 32;
inline bool IsWideInteger(const FormatInfo& format) {
  return format.kind == CodeKind::kInteger && format.bits == kWideIntegerBits;
}

// The row of the integer format of that width: 2 to 16, or 32 if signed.
const FormatInfo& IntegerFormat(int bits, bool is_signed);

}  // namespace quantd::core

#endif  // QUANTD_CORE_FORMATS_NUMBER_FORMAT_H_
