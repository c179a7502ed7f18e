// The table of number formats: one row per format.

#ifndef QUANTD_CORE_FORMATS_NUMBER_FORMAT_H_
#define QUANTD_CORE_FORMATS_NUMBER_FORMAT_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace quantd::core {

// The values are those of quantd.v1.NumberFormat; FormatInfo::name spells them.
enum class NumberFormat : int {};

// What a format is made of.
enum class FormatKind { kInteger, kFloat, kMicroscaling, kCodebook, kLpbq };

// One row of the table.
struct FormatInfo {
  NumberFormat format;
  // As users write it: "int8", "uint4", "float8_e4m3fn", "mxfp4_e2m1".
  absl::string_view name;
  FormatKind kind;
  // Bits of a code.
  int bits;
  // Bits that a code takes in memory: 2 and 4 packed, otherwise 8 or 16.
  int storage_bits;
  // Integers only: two's complement, and the smallest and largest code.
  bool is_signed;
  int32_t qmin;
  int32_t qmax;
  // False: reserved by name, answers FORMAT_NOT_IMPLEMENTED.
  bool implemented;

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
};

// All rows.
absl::Span<const FormatInfo> AllFormats();

// The row of a format or of a name; null when there is none.
const FormatInfo* FindFormat(NumberFormat format);
const FormatInfo* FindFormatByName(absl::string_view name);

// The row of the integer format of that width (2 to 16).
const FormatInfo& IntegerFormat(int bits, bool is_signed);

}  // namespace quantd::core

#endif  // QUANTD_CORE_FORMATS_NUMBER_FORMAT_H_
