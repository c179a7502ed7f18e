#include "core/formats/number_format.h"

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace quantd::core {
namespace {

constexpr FormatInfo Integer(int value, absl::string_view name, int bits,
                             bool is_signed) {
  return FormatInfo{static_cast<NumberFormat>(value),
                    name,
                    FormatKind::kInteger,
                    bits,
                    bits == 2 || bits == 4 ? bits : (bits <= 8 ? 8 : 16),
                    is_signed,
                    is_signed ? -(1 << (bits - 1)) : 0,
                    is_signed ? (1 << (bits - 1)) - 1 : (1 << bits) - 1,
                    /*implemented=*/true};
}

constexpr FormatInfo Reserved(int value, absl::string_view name,
                              FormatKind kind, int bits) {
  return FormatInfo{static_cast<NumberFormat>(value),
                    name,
                    kind,
                    bits,
                    bits == 4 ? 4 : 8,
                    /*is_signed=*/false,
                    /*qmin=*/0,
                    /*qmax=*/0,
                    /*implemented=*/false};
}

constexpr int kFirstSigned = 0;
constexpr int kFirstUnsigned = 15;

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
    Reserved(40, "float8_e4m3fn", FormatKind::kFloat, 8),
    Reserved(41, "float8_e5m2", FormatKind::kFloat, 8),
    Reserved(42, "float8_e4m3fnuz", FormatKind::kFloat, 8),
    Reserved(43, "float8_e5m2fnuz", FormatKind::kFloat, 8),
    Reserved(44, "float6_e2m3", FormatKind::kFloat, 6),
    Reserved(45, "float6_e3m2", FormatKind::kFloat, 6),
    Reserved(46, "float4_e2m1", FormatKind::kFloat, 4),
    Reserved(50, "mxfp8_e4m3", FormatKind::kMicroscaling, 8),
    Reserved(51, "mxfp8_e5m2", FormatKind::kMicroscaling, 8),
    Reserved(52, "mxfp6_e2m3", FormatKind::kMicroscaling, 6),
    Reserved(53, "mxfp6_e3m2", FormatKind::kMicroscaling, 6),
    Reserved(54, "mxfp4_e2m1", FormatKind::kMicroscaling, 4),
    Reserved(55, "mxint8", FormatKind::kMicroscaling, 8),
    Reserved(56, "nvfp4", FormatKind::kMicroscaling, 4),
    Reserved(60, "nf4", FormatKind::kCodebook, 4),
    Reserved(61, "codebook", FormatKind::kCodebook, 8),
    Reserved(62, "lpbq", FormatKind::kLpbq, 4),
};

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
  return kFormats[(is_signed ? kFirstSigned : kFirstUnsigned) + bits - 2];
}

}  // namespace quantd::core
