// Tensors, formats and encodings as the client sees them.

#ifndef QUANTD_CLIENT_CPP_TENSOR_H_
#define QUANTD_CLIENT_CPP_TENSOR_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quantd/v1/encoding.pb.h"
#include "quantd/v1/tensor.pb.h"

namespace quantd {

using Encoding = v1::Encoding;
using EncodingSpec = v1::EncodingSpec;
using TensorName = v1::TensorName;

// Type of the real-valued elements; the values are those of
// quantd.v1.ElementType.
enum class ElementType : int {
  kFloat32 = 1,
  kFloat16 = 2,
  kBfloat16 = 3,
  kFloat64 = 4,
};

// 2, 4 or 8.
int64_t ElementSizeBytes(ElementType type);

// "float32", "float16", "bfloat16", "float64", and back.
absl::string_view ElementTypeName(ElementType type);
// Errors: ARGUMENT_INVALID.
absl::StatusOr<ElementType> ParseElementType(absl::string_view name);

// A tensor in memory that the caller owns: it must stay, unchanged, until the
// call that takes it has answered. Plain value, not synchronised.
struct Tensor {
  // May stay empty where nothing is looked up or stored.
  TensorName name;
  // Type of the reals, also when `data` are codes.
  ElementType element_type = ElementType::kFloat32;
  // Outermost dimension first; empty for a scalar.
  std::vector<int64_t> shape;
  // Row-major and little-endian: elements, or codes for Dequantize. No
  // alignment needed. Never copied.
  absl::Span<const uint8_t> data;
};

// Number of elements of a shape: the product of its dimensions.
// Errors: ARGUMENT_INVALID for a negative dimension or a product over 2^56.
absl::StatusOr<int64_t> ElementCount(absl::Span<const int64_t> shape);

// Kind of a format's codes; the values are those of quantd.v1.CodeKind.
enum class CodeKind : int { kInteger = 1, kFloat = 2, kCodebook = 3 };

// Meaning of the patterns at the end of a small float's range; the values are
// those of quantd.v1.FloatSpecials.
enum class FloatSpecials : int { kNone = 1, kNan = 2, kIeee = 3, kFnuz = 4 };

// A sign bit, exponent bits and mantissa bits; subnormals as in IEEE 754.
struct FloatLayout {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  FloatSpecials specials;
};

// Properties of a format, as the options of quantd.v1.NumberFormat say.
struct FormatInfo {
  v1::NumberFormat format;
  CodeKind kind;
  int bits;
  // 2, 4, 8, 16 or 32; codes of 2 and 4 are packed.
  int storage_bits;
  // Two's complement.
  bool is_signed;
  // Range of the codes; for floats and codebooks 0 and 2^bits - 1.
  int32_t qmin;
  int32_t qmax;
  // Floats only.
  FloatLayout float_layout;
  // The entries of its codebook are in the encoding.
  bool carries_codebook;
  // The block size along the last axis when a spec names none; 0: per tensor.
  int64_t default_group;
  // How scales are stored; SCALE_TYPE_UNSPECIFIED: as the encoding says.
  v1::ScaleType scale_type;
  // The largest number that a code stands for, before scale and zero point; 1
  // for codebooks that the encoding carries.
  double max_value;

  // Integers of that many bits, with scales of any type and no blocks.
  bool IsPlainInteger() const;
  // Size in bytes of `count` codes, the last byte zero-padded.
  int64_t SizeBytes(int64_t count) const;
};

// Errors: ARGUMENT_INVALID for an unknown format.
absl::StatusOr<FormatInfo> GetFormatInfo(v1::NumberFormat format);

// The format of plain integers of that width.
// Errors: ARGUMENT_INVALID for other widths than 2 to 16, or 32 if signed.
absl::StatusOr<v1::NumberFormat> IntegerFormat(int bits, bool is_signed);

// How the scales of an encoding are stored: its scale_type or what the format
// prescribes; never SCALE_TYPE_UNSPECIFIED.
v1::ScaleType ScaleTypeOf(const Encoding& encoding);

// "int8", "uint4", "mxfp4_e2m1", and back; the names are those of
// quantd.v1.NumberFormat in lower case.
std::string FormatName(v1::NumberFormat format);
// Errors: ARGUMENT_INVALID.
absl::StatusOr<v1::NumberFormat> ParseFormat(absl::string_view name);

// Shape of the scales of a tensor: ceil(shape[d] / block_size[d]), with 0
// meaning the whole dimension and an empty block size a single scale.
// Errors: ARGUMENT_INVALID when the ranks differ or an entry is negative.
absl::StatusOr<std::vector<int64_t>> ScaleShape(
    absl::Span<const int64_t> shape, absl::Span<const int64_t> block_size);

}  // namespace quantd

#endif  // QUANTD_CLIENT_CPP_TENSOR_H_
