#include "client/cpp/answer_check.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "client/cpp/errors.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"

namespace quantd::internal {
namespace {

// From an integer format to the unsigned one of its width.
constexpr int kToUnsigned = 20;

template <typename Value>
absl::Status Mismatch(absl::string_view what, const Value& expected,
                      const Value& got) {
  return ResponseMalformedError(
      absl::StrCat("expected ", what, " ", expected, ", got ", got));
}

std::string NameText(const TensorName& name) {
  std::string text = absl::StrCat("\"", name.tensor(), "\"");
  if (!name.model().empty()) absl::StrAppend(&text, " of ", name.model());
  if (!name.revision().empty()) absl::StrAppend(&text, " @", name.revision());
  return text;
}

template <typename Sizes>
std::string SizesText(const Sizes& sizes) {
  return absl::StrCat("[", absl::StrJoin(sizes, ","), "]");
}

template <typename Header>
ByteRange RangeOf(const Header& header) {
  if (!header.has_range()) return {0, header.size_bytes()};
  return {header.range().begin_bytes(), header.range().end_bytes()};
}

std::string RangeText(const ByteRange& range) {
  return absl::StrCat("[", range.begin_bytes, ", ", range.end_bytes, ")");
}

template <typename Header>
absl::Status CheckTensor(const Question& question, bool wants_encoding,
                         const Header& header) {
  absl::Status status = CheckName(question.tensor.name(), header.name());
  if (!status.ok()) return status;
  const std::string expected = SizesText(question.tensor.shape());
  const std::string got = SizesText(header.shape());
  if (expected != got) return Mismatch("shape", expected, got);
  if (wants_encoding && !header.has_encoding()) {
    return ResponseMalformedError("expected an encoding, got none");
  }
  return header.has_encoding() ? CheckEncoding(question, header.encoding())
                               : absl::OkStatus();
}

absl::Status CheckRange(const ByteRange& expected, const ByteRange& got) {
  if (expected.begin_bytes == got.begin_bytes &&
      expected.end_bytes == got.end_bytes) {
    return absl::OkStatus();
  }
  return Mismatch("bytes", RangeText(expected), RangeText(got));
}

// The format of the encoding that was used, as far as it is known.
template <typename Header>
v1::NumberFormat FormatOf(const Question& question, const Header& header) {
  return header.has_encoding() ? header.encoding().format() : question.format;
}

int64_t CountOf(const v1::TensorDescription& tensor) {
  return *ElementCount(
      std::vector<int64_t>(tensor.shape().begin(), tensor.shape().end()));
}

int64_t RealSizeBytes(const v1::TensorDescription& tensor) {
  return ElementSizeBytes(static_cast<ElementType>(tensor.element_type()));
}

// The format of codes; of an unknown format only how wide they are, as `count`
// of them in `size_bytes` tell.
// Errors: RESPONSE_MALFORMED.
absl::StatusOr<FormatInfo> CodesOf(v1::NumberFormat format, int64_t count,
                                   uint64_t size_bytes) {
  if (format != v1::NUMBER_FORMAT_UNSPECIFIED) {
    const absl::StatusOr<FormatInfo> info = GetFormatInfo(format);
    if (info.ok()) return info;
    return ResponseMalformedError(ErrorText(info.status()));
  }
  for (const v1::NumberFormat wide :
       {v1::NUMBER_FORMAT_INT2, v1::NUMBER_FORMAT_INT4, v1::NUMBER_FORMAT_INT8,
        v1::NUMBER_FORMAT_INT16, v1::NUMBER_FORMAT_INT32}) {
    absl::StatusOr<FormatInfo> info = GetFormatInfo(wide);
    if (static_cast<uint64_t>(info->SizeBytes(count)) == size_bytes) {
      return info;
    }
  }
  return ResponseMalformedError(
      absl::StrCat("expected size_bytes of ", count,
                   " codes of 2, 4, 8, 16 or 32 bits, got ", size_bytes));
}

// Checks how many there are of one field of an encoding.
absl::Status CheckCount(absl::string_view field, int64_t expected, int got) {
  if (got == expected) return absl::OkStatus();
  return ResponseMalformedError(absl::StrCat("expected ", field, " of ",
                                             expected, " entries, got ", got));
}

// One that gives the same blocks: a whole dimension is 0, and one block for all
// is empty.
std::vector<int64_t> SameBlocks(std::vector<int64_t> block_size,
                                const std::vector<int64_t>& shape) {
  bool is_whole = true;
  for (size_t d = 0; d < block_size.size() && d < shape.size(); ++d) {
    if (block_size[d] >= shape[d]) block_size[d] = 0;
    is_whole = is_whole && block_size[d] == 0;
  }
  return is_whole ? std::vector<int64_t>() : block_size;
}

// The encoding has as many scales as the tensor has blocks, or none where they
// come in chunks.
// Errors: RESPONSE_MALFORMED.
absl::Status CheckScales(const std::vector<int64_t>& shape,
                         const Encoding& encoding) {
  const absl::StatusOr<ScaleCounts> counts = CountScales(shape, encoding);
  if (!counts.ok()) return ResponseMalformedError(ErrorText(counts.status()));
  const bool is_here = !encoding.scales_in_chunks();
  const int64_t count = is_here ? counts->scale : 0;
  absl::Status status = CheckCount("scale", count, encoding.scale_size());
  if (!is_here || encoding.zero_point_size() > 0) {
    status.Update(CheckCount("zero_point", count, encoding.zero_point_size()));
  }
  if (!is_here || encoding.real_zero_point_size() > 0) {
    status.Update(
        CheckCount("real_zero_point", count, encoding.real_zero_point_size()));
  }
  const bool has_codes = ScaleSizeBytes(ScaleTypeOf(encoding)) == 1;
  status.Update(CheckCount("scale_code", has_codes ? count : 0,
                           static_cast<int>(encoding.scale_code().size())));
  status.Update(CheckCount("outer_scale", is_here ? counts->outer_scale : 0,
                           encoding.outer_scale_size()));
  return status;
}

// Errors: RESPONSE_MALFORMED.
absl::Status CheckFormat(const Question& question, v1::NumberFormat format) {
  const bool is_asked_for =
      question.format == v1::NUMBER_FORMAT_UNSPECIFIED ||
      question.format == format ||
      (question.may_be_unsigned && question.format + kToUnsigned == format);
  if (!is_asked_for) {
    return Mismatch("format", FormatName(question.format), FormatName(format));
  }
  const absl::StatusOr<FormatInfo> info = GetFormatInfo(format);
  return info.ok() ? absl::OkStatus()
                   : ResponseMalformedError(ErrorText(info.status()));
}

}  // namespace

Question::Question(const Tensor& tensor, const EncodingSource& source) {
  *this->tensor.mutable_name() = tensor.name;
  this->tensor.set_element_type(
      static_cast<v1::ElementType>(tensor.element_type));
  this->tensor.mutable_shape()->Assign(tensor.shape.begin(),
                                       tensor.shape.end());
  if (const auto* encoding = std::get_if<Encoding>(&source)) {
    format = encoding->format();
    block_size.emplace(encoding->block_size().begin(),
                       encoding->block_size().end());
  } else if (const auto* spec = std::get_if<EncodingSpec>(&source)) {
    format = spec->format();
    may_be_unsigned = spec->unsigned_if_non_negative();
    block_size = BlockSizeOf(*spec, tensor.shape);
  }
}

absl::Status CheckName(const TensorName& expected, const TensorName& got) {
  const std::string expected_text = NameText(expected);
  const std::string got_text = NameText(got);
  return expected_text == got_text
             ? absl::OkStatus()
             : Mismatch("tensor", expected_text, got_text);
}

absl::Status CheckStoredName(const TensorName& expected,
                             const TensorName& got) {
  TensorName full = expected;
  if (full.revision().empty()) full.set_revision(got.revision());
  return CheckName(full, got);
}

absl::Status CheckEncoding(const Question& question, const Encoding& encoding) {
  absl::Status status = CheckFormat(question, encoding.format());
  if (!status.ok()) return status;
  const std::vector<int64_t> shape(question.tensor.shape().begin(),
                                   question.tensor.shape().end());
  const std::vector<int64_t> block_size(encoding.block_size().begin(),
                                        encoding.block_size().end());
  const absl::StatusOr<std::vector<int64_t>> scale_shape =
      ScaleShape(shape, block_size);
  if (!scale_shape.ok()) {
    return ResponseMalformedError(ErrorText(scale_shape.status()));
  }
  if (question.block_size.has_value() &&
      SameBlocks(*question.block_size, shape) !=
          SameBlocks(block_size, shape)) {
    return Mismatch("block size", SizesText(*question.block_size),
                    SizesText(block_size));
  }
  status = CheckScales(shape, encoding);
  if (!status.ok()) return status;
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(encoding.format());
  const int entries = encoding.codebook_size();
  const bool has_entries = format->kind == CodeKind::kCodebook &&
                           format->format != v1::NUMBER_FORMAT_NF4;
  if (has_entries ? entries < 2 || entries > format->qmax + 1 : entries > 0) {
    return ResponseMalformedError(absl::StrCat(
        "expected a codebook of ",
        has_entries ? absl::StrCat("2 to ", format->qmax + 1) : "0",
        " entries, got ", entries));
  }
  return absl::OkStatus();
}

absl::Status CheckHeader(const Question& question, const ByteRange& range,
                         bool wants_encoding,
                         const v1::QuantizeResponseHeader& header) {
  absl::Status status = CheckTensor(question, wants_encoding, header);
  if (!status.ok()) return status;
  const int64_t count = CountOf(question.tensor);
  const absl::StatusOr<FormatInfo> codes =
      CodesOf(FormatOf(question, header), count, header.size_bytes());
  if (!codes.ok()) return codes.status();
  const auto offset_of = [&](uint64_t real_bytes) {
    return static_cast<uint64_t>(codes->SizeBytes(
        static_cast<int64_t>(real_bytes) / RealSizeBytes(question.tensor)));
  };
  const uint64_t size_bytes = static_cast<uint64_t>(codes->SizeBytes(count));
  if (header.size_bytes() != size_bytes) {
    return Mismatch("size_bytes", size_bytes, header.size_bytes());
  }
  return CheckRange({offset_of(range.begin_bytes), offset_of(range.end_bytes)},
                    RangeOf(header));
}

absl::Status CheckHeader(const Question& question, const ByteRange& range,
                         bool wants_encoding,
                         const v1::DequantizeResponseHeader& header) {
  absl::Status status = CheckTensor(question, wants_encoding, header);
  if (!status.ok()) return status;
  const v1::ElementType type = question.tensor.element_type();
  if (header.element_type() != type) {
    return Mismatch(
        "element type", ElementTypeName(static_cast<ElementType>(type)),
        ElementTypeName(static_cast<ElementType>(header.element_type())));
  }
  const uint64_t size_bytes = static_cast<uint64_t>(
      CountOf(question.tensor) * RealSizeBytes(question.tensor));
  if (header.size_bytes() != size_bytes) {
    return Mismatch("size_bytes", size_bytes, header.size_bytes());
  }
  const ByteRange got = RangeOf(header);
  const v1::NumberFormat format = FormatOf(question, header);
  if (format == v1::NUMBER_FORMAT_UNSPECIFIED) {
    // How many reals the codes are, the server alone knows.
    return got.begin_bytes <= got.end_bytes && got.end_bytes <= size_bytes
               ? absl::OkStatus()
               : Mismatch("bytes within", RangeText({0, size_bytes}),
                          RangeText(got));
  }
  const absl::StatusOr<FormatInfo> codes = GetFormatInfo(format);
  if (!codes.ok()) return ResponseMalformedError(ErrorText(codes.status()));
  const auto offset_of = [&](uint64_t code_bytes) {
    const uint64_t index =
        code_bytes * 8 / static_cast<uint64_t>(codes->storage_bits);
    return std::min(size_bytes, index * static_cast<uint64_t>(
                                            RealSizeBytes(question.tensor)));
  };
  return CheckRange({offset_of(range.begin_bytes), offset_of(range.end_bytes)},
                    got);
}

}  // namespace quantd::internal
