#include "client/cpp/tensor.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/errors.h"
#include "google/protobuf/descriptor.h"

namespace quantd {
namespace {

// Assumptions of the library.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "elements lie in memory as they do on the wire");
static_assert(std::numeric_limits<float>::is_iec559 &&
                  std::numeric_limits<double>::is_iec559,
              "float and double are those of IEEE 754");

constexpr absl::string_view kFormatPrefix = "NUMBER_FORMAT_";
constexpr int64_t kMaxElementCount = int64_t{1} << 56;

double MaxValue(const FloatLayout& layout) {
  int exponent = (1 << layout.exponent_bits) - 1;
  int mantissa = (1 << layout.mantissa_bits) - 1;
  if (layout.specials == FloatSpecials::kIeee) --exponent;
  if (layout.specials == FloatSpecials::kNan) --mantissa;
  return std::ldexp((1 << layout.mantissa_bits) + mantissa,
                    exponent - layout.bias - layout.mantissa_bits);
}

FormatInfo FromOptions(v1::NumberFormat format,
                       const v1::NumberFormatInfo& options) {
  const int bits = static_cast<int>(options.bits());
  FormatInfo info = {};
  info.format = format;
  info.kind = static_cast<CodeKind>(options.kind());
  info.bits = bits;
  info.storage_bits = static_cast<int>(options.storage_bits());
  info.is_signed = options.is_signed();
  const int magnitude_bits = info.is_signed ? bits - 1 : bits;
  info.qmax = static_cast<int32_t>((int64_t{1} << magnitude_bits) - 1);
  info.qmin = info.is_signed ? -info.qmax - 1 : 0;
  if (options.has_qmin()) info.qmin = options.qmin();
  info.default_group = options.default_group();
  info.scale_type = options.scale_type();
  switch (info.kind) {
    case CodeKind::kInteger:
      info.max_value = info.qmax;
      break;
    case CodeKind::kFloat: {
      const v1::FloatLayout& layout = options.float_layout();
      info.float_layout = {static_cast<int>(layout.exponent_bits()),
                           static_cast<int>(layout.mantissa_bits()),
                           static_cast<int>(layout.bias()),
                           static_cast<FloatSpecials>(layout.specials())};
      info.max_value = MaxValue(info.float_layout);
      break;
    }
    case CodeKind::kCodebook:
      info.carries_codebook = options.codebook().empty();
      info.max_value = 1;
      break;
  }
  return info;
}

std::vector<FormatInfo> ReadFormats() {
  const google::protobuf::EnumDescriptor& formats =
      *v1::NumberFormat_descriptor();
  std::vector<FormatInfo> rows;
  for (int i = 0; i < formats.value_count(); ++i) {
    const google::protobuf::EnumValueDescriptor& value = *formats.value(i);
    if (!value.options().HasExtension(v1::number_format)) continue;
    rows.push_back(
        FromOptions(static_cast<v1::NumberFormat>(value.number()),
                    value.options().GetExtension(v1::number_format)));
  }
  return rows;
}

const std::vector<FormatInfo>& AllFormats() {
  // Never destroyed.
  static const std::vector<FormatInfo>& rows =
      *new std::vector<FormatInfo>(ReadFormats());
  return rows;
}

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

bool FormatInfo::IsPlainInteger() const {
  return kind == CodeKind::kInteger &&
         scale_type == v1::SCALE_TYPE_UNSPECIFIED && default_group == 0;
}

absl::StatusOr<FormatInfo> GetFormatInfo(v1::NumberFormat format) {
  for (const FormatInfo& row : AllFormats()) {
    if (row.format == format) return row;
  }
  return ArgumentInvalidError(
      absl::StrCat("expected a number format, got ", FormatName(format)));
}

absl::StatusOr<v1::NumberFormat> IntegerFormat(int bits, bool is_signed) {
  for (const FormatInfo& row : AllFormats()) {
    if (row.IsPlainInteger() && row.bits == bits &&
        row.is_signed == is_signed) {
      return row.format;
    }
  }
  return ArgumentInvalidError(
      absl::StrCat("expected an integer of 2 to 16 bits, or a signed one of "
                   "32, got ",
                   bits));
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
