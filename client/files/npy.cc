#include "client/files/npy.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/atomic_file.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/mapped_file.h"

namespace quantd::files {
namespace {

constexpr absl::string_view kNpyMagic = "\x93NUMPY";
constexpr size_t kNpyAlignmentBytes = 64;
// numpy's own arrays have at most 64 dimensions.
constexpr size_t kMaxRank = 64;

struct Descr {
  absl::string_view text;
  Dtype dtype;
};

constexpr Descr kDescrs[] = {
    {"|b1", Dtype::kBool}, {"|u1", Dtype::kU8},  {"|i1", Dtype::kI8},
    {"<u2", Dtype::kU16},  {"<i2", Dtype::kI16}, {"<f2", Dtype::kF16},
    {"<u4", Dtype::kU32},  {"<i4", Dtype::kI32}, {"<f4", Dtype::kF32},
    {"<u8", Dtype::kU64},  {"<i8", Dtype::kI64}, {"<f8", Dtype::kF64},
};

std::optional<Dtype> ParseDescr(absl::string_view text) {
  for (const Descr& descr : kDescrs) {
    if (descr.text == text) return descr.dtype;
    // The order of the bytes of one byte is of no account.
    if (DtypeSizeBytes(descr.dtype) == 1 && text.size() == 3 &&
        (text[0] == '<' || text[0] == '=' || text[0] == '>') &&
        descr.text.substr(1) == text.substr(1)) {
      return descr.dtype;
    }
  }
  return std::nullopt;
}

struct Header {
  std::string descr;
  bool fortran_order = false;
  std::vector<int64_t> shape;
};

// Reads the header: a Python literal such as
// {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }. Not
// thread-safe.
class NpyHeaderParser {
 public:
  explicit NpyHeaderParser(absl::string_view text) : text_(text) {}

  // Errors: what was expected, as the message of an INVALID_ARGUMENT.
  absl::StatusOr<Header> Parse() {
    Header header;
    bool has_descr = false;
    bool has_order = false;
    bool has_shape = false;
    if (!Take('{')) return Expected("{");
    while (!Take('}')) {
      std::string key;
      if (!TakeString(&key)) return Expected("a key in quotes");
      if (!Take(':')) return Expected(":");
      bool* has = nullptr;
      if (key == "descr") {
        has = &has_descr;
        if (!TakeString(&header.descr) && !TakeList(&header.descr)) {
          return Expected("a plain type for 'descr'");
        }
      } else if (key == "fortran_order") {
        has = &has_order;
        if (TakeWord("True")) {
          header.fortran_order = true;
        } else if (!TakeWord("False")) {
          return Expected("True or False for 'fortran_order'");
        }
      } else if (key == "shape") {
        has = &has_shape;
        const absl::Status status = TakeShape(&header.shape);
        if (!status.ok()) return status;
      } else {
        return absl::InvalidArgumentError(
            absl::StrCat("unknown key '", absl::CHexEscape(key), "'"));
      }
      if (*has) {
        return absl::InvalidArgumentError(
            absl::StrCat("key '", key, "' occurs twice"));
      }
      *has = true;
      if (!Take(',')) {
        if (!Take('}')) return Expected(", or }");
        break;
      }
    }
    SkipSpace();
    if (!text_.empty()) return Expected("nothing more");
    if (!has_descr || !has_order || !has_shape) {
      return absl::InvalidArgumentError(
          "expected the keys descr, fortran_order and shape");
    }
    return header;
  }

 private:
  absl::Status Expected(absl::string_view what) const {
    return absl::InvalidArgumentError(
        absl::StrCat("expected ", what, " in the header, got \"",
                     absl::CHexEscape(text_.substr(0, 20)), "\""));
  }

  void SkipSpace() { text_ = absl::StripLeadingAsciiWhitespace(text_); }

  bool Take(char c) {
    SkipSpace();
    if (text_.empty() || text_[0] != c) return false;
    text_.remove_prefix(1);
    return true;
  }

  bool TakeWord(absl::string_view word) {
    SkipSpace();
    if (!absl::StartsWith(text_, word)) return false;
    text_.remove_prefix(word.size());
    return true;
  }

  // No escapes: no key or type has any.
  bool TakeString(std::string* value) {
    SkipSpace();
    if (text_.empty() || (text_[0] != '\'' && text_[0] != '"')) return false;
    const size_t end = text_.find(text_[0], 1);
    if (end == absl::string_view::npos) return false;
    *value = std::string(text_.substr(1, end - 1));
    text_.remove_prefix(end + 1);
    return true;
  }

  // The text of a list: the fields of a structure. Quotes have no brackets.
  bool TakeList(std::string* text) {
    SkipSpace();
    size_t depth = 0;
    for (size_t end = 0; end < text_.size(); ++end) {
      if (text_[end] == '[') ++depth;
      if (depth == 0) return false;
      if (text_[end] == ']' && --depth == 0) {
        *text = std::string(text_.substr(0, end + 1));
        text_.remove_prefix(end + 1);
        return true;
      }
    }
    return false;
  }

  absl::Status TakeShape(std::vector<int64_t>* shape) {
    if (!Take('(')) return Expected("a tuple for 'shape'");
    bool has_comma = true;
    while (!Take(')')) {
      if (!has_comma) return Expected(", or ) in 'shape'");
      SkipSpace();
      size_t digits = 0;
      while (digits < text_.size() && absl::ascii_isdigit(text_[digits])) {
        ++digits;
      }
      int64_t size = 0;
      if (digits == 0 || !absl::SimpleAtoi(text_.substr(0, digits), &size)) {
        return Expected("a dimension of at least 0 in 63 bits");
      }
      text_.remove_prefix(digits);
      // Python 2 wrote long integers with an L.
      TakeWord("L");
      shape->push_back(size);
      if (shape->size() > kMaxRank) {
        return absl::InvalidArgumentError(
            absl::StrCat("expected at most ", kMaxRank, " dimensions"));
      }
      has_comma = Take(',');
    }
    // (3) is a number in parentheses, not a tuple.
    if (shape->size() == 1 && !has_comma) {
      return Expected("a tuple for 'shape'");
    }
    return absl::OkStatus();
  }

  absl::string_view text_;
};

}  // namespace

absl::StatusOr<NpyReader> NpyReader::Open(const std::string& path) {
  absl::StatusOr<MappedFile> file = MappedFile::Open(path);
  if (!file.ok()) return file.status();
  const absl::Span<const uint8_t> bytes = file->bytes();
  const absl::string_view text(reinterpret_cast<const char*>(bytes.data()),
                               bytes.size());
  const size_t version_at = kNpyMagic.size();
  if (!absl::StartsWith(text, kNpyMagic) || text.size() < version_at + 4) {
    return FileMalformedError(
        path, absl::StrCat("expected a file that begins with \\x93NUMPY",
                           GotInstead(bytes)));
  }
  const int major = bytes[version_at];
  const int minor = bytes[version_at + 1];
  if (major < 1 || major > 3 || minor != 0) {
    return FileUnsupportedError(
        path,
        absl::StrCat("expected version 1.0 to 3.0, got ", major, ".", minor));
  }
  const size_t length_at = version_at + 2;
  const size_t length_size = major == 1 ? 2 : 4;
  if (bytes.size() < length_at + length_size) {
    return FileMalformedError(path, "the length of the header is cut off");
  }
  size_t length = 0;
  for (size_t i = 0; i < length_size; ++i) {
    length |= static_cast<size_t>(bytes[length_at + i]) << (8 * i);
  }
  const size_t header_at = length_at + length_size;
  if (length > bytes.size() - header_at) {
    return FileMalformedError(
        path, absl::StrCat("expected a header of ", length, " bytes, got ",
                           bytes.size() - header_at));
  }
  absl::StatusOr<Header> header =
      NpyHeaderParser(text.substr(header_at, length)).Parse();
  if (!header.ok()) {
    return FileMalformedError(path, header.status().message());
  }
  const std::optional<Dtype> dtype = ParseDescr(header->descr);
  if (!dtype.has_value()) {
    return FileUnsupportedError(
        path,
        absl::StrCat(
            "expected little-endian booleans, integers or floats of 1 to 8 "
            "bytes, got ",
            absl::StartsWith(header->descr, "[")
                ? absl::StrCat("fields ",
                               absl::StrReplaceAll(QuotedName(header->descr),
                                                   {{"\\'", "'"}}))
                : absl::StrCat(
                      "type '",
                      absl::CHexEscape(
                          absl::string_view(header->descr).substr(0, 40)),
                      "'")));
  }
  const absl::Span<const uint8_t> data = bytes.subspan(header_at + length);
  const std::optional<int64_t> size = TensorSizeBytes(*dtype, header->shape);
  if (!size.has_value()) {
    return FileMalformedError(
        path,
        absl::StrCat("the size of shape (", absl::StrJoin(header->shape, ","),
                     ") does not fit in 63 bits"));
  }
  if (static_cast<uint64_t>(*size) != data.size()) {
    return FileMalformedError(
        path,
        absl::StrCat("expected ", *size, " bytes of data, got ", data.size()));
  }
  if (header->fortran_order) {
    return FileUnsupportedError(path,
                                "expected C order, got fortran_order; save "
                                "numpy.ascontiguousarray(array)");
  }
  NpyReader reader(*std::move(file));
  reader.dtype_ = *dtype;
  reader.shape_ = std::move(header->shape);
  reader.data_ = data;
  return reader;
}

absl::StatusOr<uint64_t> WriteNpy(const std::string& path, IfExists if_exists,
                                  Dtype dtype,
                                  const std::vector<int64_t>& shape,
                                  absl::Span<const uint8_t> data) {
  absl::string_view descr;
  for (const Descr& row : kDescrs) {
    if (row.dtype == dtype) descr = row.text;
  }
  if (descr.empty()) {
    return FileUnsupportedError(
        path, absl::StrCat(".npy has no type for ", DtypeName(dtype)));
  }
  const std::optional<int64_t> size = TensorSizeBytes(dtype, shape);
  if (!size.has_value() || static_cast<uint64_t>(*size) != data.size()) {
    return FileMalformedError(
        path, absl::StrCat("the data have ", data.size(), " bytes, the shape ",
                           size.value_or(-1)));
  }
  std::string header = absl::StrCat(
      "{'descr': '", descr, "', 'fortran_order': False, 'shape': (",
      absl::StrJoin(shape, ", "), shape.size() == 1 ? ",), }" : "), }");
  // Magic, version, length and header together are a multiple of 64.
  const auto pad = [&header](size_t length_size) {
    const size_t used = kNpyMagic.size() + 2 + length_size + header.size() + 1;
    return (kNpyAlignmentBytes - used % kNpyAlignmentBytes) %
           kNpyAlignmentBytes;
  };
  size_t length_size = 2;
  if (header.size() + pad(length_size) + 1 > 0xFFFF) length_size = 4;
  header.append(pad(length_size), ' ');
  header.push_back('\n');
  std::string front(kNpyMagic);
  front.push_back(length_size == 2 ? '\x01' : '\x02');
  front.push_back('\0');
  for (size_t i = 0; i < length_size; ++i) {
    front.push_back(static_cast<char>(header.size() >> (8 * i)));
  }
  front.append(header);
  absl::StatusOr<AtomicFile> file = AtomicFile::Create(path, if_exists);
  if (!file.ok()) return file.status();
  absl::Status status = file->Append(front);
  if (status.ok()) status = file->Append(data);
  if (status.ok()) status = file->Commit();
  if (!status.ok()) return status;
  return front.size() + data.size();
}

}  // namespace quantd::files
