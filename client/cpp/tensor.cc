#include "client/cpp/tensor.h"

#include <cstdint>
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

constexpr absl::string_view kFormatPrefix = "NUMBER_FORMAT_";
constexpr int64_t kMaxElementCount = int64_t{1} << 56;

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
  FormatInfo info;
  info.format = format;
  if (value >= 2 && value <= 16) {
    info.bits = value;
    info.is_signed = true;
    info.qmin = -(1 << (info.bits - 1));
    info.qmax = (1 << (info.bits - 1)) - 1;
  } else if (value >= 22 && value <= 36) {
    info.bits = value - 20;
    info.is_signed = false;
    info.qmin = 0;
    info.qmax = (1 << info.bits) - 1;
  } else {
    return ArgumentInvalidError(
        absl::StrCat("expected an integer format of 2 to 16 bits, got ",
                     FormatName(format)));
  }
  if (info.bits == 2 || info.bits == 4) {
    info.storage_bits = info.bits;
  } else {
    info.storage_bits = info.bits <= 8 ? 8 : 16;
  }
  return info;
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
        "expected a format such as int8 or uint4, got \"", name, "\""));
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
