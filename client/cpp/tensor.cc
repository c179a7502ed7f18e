#include "client/cpp/tensor.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/errors.h"

namespace quantd {
namespace {

// What the library takes for granted.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "elements lie in memory as they do on the wire");
static_assert(std::numeric_limits<float>::is_iec559 &&
                  std::numeric_limits<double>::is_iec559,
              "float and double are those of IEEE 754");

constexpr absl::string_view kFormatPrefix = "NUMBER_FORMAT_";
constexpr int64_t kMaxElementCount = int64_t{1} << 56;

// A format that is not an integer with scales of any kind.
struct OtherFormat {
  v1::NumberFormat format;
  CodeKind kind;
  int bits;
  bool is_signed;
  // Of integers 0: it is their qmax.
  double max_value;
  int64_t default_group;
  v1::ScaleType scale_type;
};

constexpr OtherFormat Float(
    v1::NumberFormat format, int bits, double max_value,
    int64_t default_group = 0,
    v1::ScaleType scale_type = v1::SCALE_TYPE_UNSPECIFIED) {
  return {format,    CodeKind::kFloat, bits,      /*is_signed=*/false,
          max_value, default_group,    scale_type};
}

constexpr OtherFormat MxFloat(v1::NumberFormat format, int bits,
                              double max_value) {
  return Float(format, bits, max_value, 32, v1::SCALE_TYPE_E8M0);
}

constexpr OtherFormat BlockInteger(v1::NumberFormat format, int bits,
                                   bool is_signed, int64_t default_group,
                                   v1::ScaleType scale_type) {
  return {format,          CodeKind::kInteger, bits,      is_signed,
          /*max_value=*/0, default_group,      scale_type};
}

constexpr OtherFormat Codebook(v1::NumberFormat format, int bits,
                               int64_t default_group = 0) {
  return {format,
          CodeKind::kCodebook,
          bits,
          /*is_signed=*/false,
          /*max_value=*/1,
          default_group,
          v1::SCALE_TYPE_UNSPECIFIED};
}

constexpr OtherFormat kOtherFormats[] = {
    Float(v1::NUMBER_FORMAT_FLOAT8_E4M3FN, 8, 448),
    Float(v1::NUMBER_FORMAT_FLOAT8_E5M2, 8, 57344),
    Float(v1::NUMBER_FORMAT_FLOAT8_E4M3FNUZ, 8, 240),
    Float(v1::NUMBER_FORMAT_FLOAT8_E5M2FNUZ, 8, 57344),
    Float(v1::NUMBER_FORMAT_FLOAT6_E2M3, 6, 7.5),
    Float(v1::NUMBER_FORMAT_FLOAT6_E3M2, 6, 28),
    Float(v1::NUMBER_FORMAT_FLOAT4_E2M1, 4, 6),
    MxFloat(v1::NUMBER_FORMAT_MXFP8_E4M3, 8, 448),
    MxFloat(v1::NUMBER_FORMAT_MXFP8_E5M2, 8, 57344),
    MxFloat(v1::NUMBER_FORMAT_MXFP6_E2M3, 6, 7.5),
    MxFloat(v1::NUMBER_FORMAT_MXFP6_E3M2, 6, 28),
    MxFloat(v1::NUMBER_FORMAT_MXFP4_E2M1, 4, 6),
    BlockInteger(v1::NUMBER_FORMAT_MXINT8, 8, true, 32, v1::SCALE_TYPE_E8M0),
    Float(v1::NUMBER_FORMAT_NVFP4, 4, 6, 16, v1::SCALE_TYPE_E4M3),
    Codebook(v1::NUMBER_FORMAT_NF4, 4, 64),
    Codebook(v1::NUMBER_FORMAT_CODEBOOK2, 2),
    Codebook(v1::NUMBER_FORMAT_CODEBOOK4, 4),
    Codebook(v1::NUMBER_FORMAT_CODEBOOK8, 8),
    BlockInteger(v1::NUMBER_FORMAT_LPBQ, 4, true, 64, v1::SCALE_TYPE_INTEGER),
};

}  // namespace

int64_t ElementSizeBytes(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return 4;
    case ElementType::kFloat64:
      return 8;
    case ElementType::kFloat16:
    case ElementType::kBfloat16:
      return 2;
  }
  return 0;
}

absl::string_view ElementTypeName(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return "float32";
    case ElementType::kFloat64:
      return "float64";
    case ElementType::kFloat16:
      return "float16";
    case ElementType::kBfloat16:
      return "bfloat16";
  }
  return "unknown";
}

absl::StatusOr<ElementType> ParseElementType(absl::string_view name) {
  for (const ElementType type :
       {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBfloat16,
        ElementType::kFloat64}) {
    if (name == ElementTypeName(type)) return type;
  }
  return ArgumentInvalidError(absl::StrCat(
      "expected float32, float16, bfloat16 or float64, got \"", name, "\""));
}

absl::StatusOr<int64_t> ElementCount(absl::Span<const int64_t> shape) {
  // A dimension of 0 makes the product 0, but only the others can overflow.
  int64_t count = 1;
  bool is_empty = false;
  for (const int64_t size : shape) {
    if (size < 0) {
      return ArgumentInvalidError(
          absl::StrCat("expected dimensions of at least 0, got ", size));
    }
    if (size == 0) {
      is_empty = true;
      continue;
    }
    if (count > kMaxElementCount / size) {
      return ArgumentInvalidError("expected at most 2^56 elements, got more");
    }
    count *= size;
  }
  return is_empty ? 0 : count;
}

int64_t FormatInfo::SizeBytes(int64_t count) const {
  if (storage_bits >= 8) return count * (storage_bits / 8);
  const int64_t codes_per_byte = 8 / storage_bits;
  return count / codes_per_byte + (count % codes_per_byte != 0 ? 1 : 0);
}

absl::StatusOr<FormatInfo> GetFormatInfo(v1::NumberFormat format) {
  const int value = static_cast<int>(format);
  FormatInfo info = {};
  info.format = format;
  if (value >= 2 && value <= 16) {
    info.bits = value;
    info.is_signed = true;
  } else if (value >= 22 && value <= 36) {
    info.bits = value - 20;
  } else {
    bool is_known = false;
    for (const OtherFormat& row : kOtherFormats) {
      if (row.format != format) continue;
      is_known = true;
      info.kind = row.kind;
      info.bits = row.bits;
      info.max_value = row.max_value;
      info.is_signed = row.is_signed;
      info.default_group = row.default_group;
      info.scale_type = row.scale_type;
    }
    if (!is_known) {
      return ArgumentInvalidError(
          absl::StrCat("expected a number format, got ", FormatName(format)));
    }
  }
  info.qmin = info.is_signed ? -(1 << (info.bits - 1)) : 0;
  info.qmax = (1 << (info.is_signed ? info.bits - 1 : info.bits)) - 1;
  if (info.kind == CodeKind::kInteger) info.max_value = info.qmax;
  // The one that is symmetric.
  if (format == v1::NUMBER_FORMAT_MXINT8) info.qmin = -info.qmax;
  if (info.bits == 2 || info.bits == 4) {
    info.storage_bits = info.bits;
  } else {
    info.storage_bits = info.bits <= 8 ? 8 : 16;
  }
  return info;
}

v1::ScaleType ScaleTypeOf(const Encoding& encoding) {
  if (encoding.scale_type() != v1::SCALE_TYPE_UNSPECIFIED) {
    return encoding.scale_type();
  }
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(encoding.format());
  if (!format.ok() || format->scale_type == v1::SCALE_TYPE_UNSPECIFIED) {
    return v1::SCALE_TYPE_FLOAT32;
  }
  return format->scale_type;
}

std::vector<uint8_t> InterleavePairs(ElementType type,
                                     absl::Span<const uint8_t> reference,
                                     absl::Span<const uint8_t> test) {
  const size_t size = static_cast<size_t>(ElementSizeBytes(type));
  std::vector<uint8_t> pairs(2 * reference.size());
  for (size_t at = 0; at < reference.size(); at += size) {
    std::memcpy(&pairs[2 * at], &reference[at], size);
    std::memcpy(&pairs[2 * at + size], &test[at], size);
  }
  return pairs;
}

std::string FormatName(v1::NumberFormat format) {
  const std::string& name = v1::NumberFormat_Name(format);
  if (name.size() <= kFormatPrefix.size()) {
    return absl::StrCat("format ", static_cast<int>(format));
  }
  return absl::AsciiStrToLower(
      absl::string_view(name).substr(kFormatPrefix.size()));
}

absl::StatusOr<v1::NumberFormat> ParseFormat(absl::string_view name) {
  v1::NumberFormat format;
  if (!v1::NumberFormat_Parse(
          absl::StrCat(kFormatPrefix, absl::AsciiStrToUpper(name)), &format) ||
      format == v1::NUMBER_FORMAT_UNSPECIFIED) {
    return ArgumentInvalidError(absl::StrCat(
        "expected a format such as int8, uint4 or mxfp4_e2m1, got \"", name,
        "\""));
  }
  return format;
}

absl::StatusOr<std::vector<int64_t>> ScaleShape(
    absl::Span<const int64_t> shape, absl::Span<const int64_t> block_size) {
  if (block_size.empty()) return std::vector<int64_t>(shape.size(), 1);
  if (block_size.size() != shape.size()) {
    return ArgumentInvalidError(absl::StrCat("expected a block size of ",
                                             shape.size(), " entries, got ",
                                             block_size.size()));
  }
  std::vector<int64_t> scale_shape(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) {
    if (block_size[d] < 0 || shape[d] < 0) {
      return ArgumentInvalidError(absl::StrCat(
          "expected block sizes of at least 0, got ", block_size[d]));
    }
    if (block_size[d] == 0) {
      scale_shape[d] = 1;
    } else {
      scale_shape[d] =
          shape[d] / block_size[d] + (shape[d] % block_size[d] != 0 ? 1 : 0);
    }
  }
  return scale_shape;
}

}  // namespace quantd
