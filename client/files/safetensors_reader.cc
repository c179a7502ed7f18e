#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/mapped_file.h"
#include "client/files/safetensors.h"
#include "client/files/safetensors_header.h"
#include "nlohmann/json.hpp"
#include "xxhash.h"

namespace quantd::files {
namespace {

struct HeaderTensor {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Takes the events of the JSON parser: no tree is built, duplicate keys are
// seen, and nothing but the header's own structure is let through.
class HeaderHandler final : public nlohmann::json_sax<nlohmann::json> {
 public:
  const std::string& error() const { return error_; }
  // True if the error is of what a newer format may have.
  bool is_unsupported() const { return is_unsupported_; }
  std::vector<HeaderTensor>& tensors() { return tensors_; }
  std::map<std::string, std::string>& metadata() { return metadata_; }

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a boolean"); }
  bool number_integer(number_integer_t) override {
    return Unexpected("a negative number");
  }
  bool number_float(number_float_t, const string_t&) override {
    return Unexpected("a number that is not an integer");
  }
  bool binary(binary_t&) override { return Unexpected("binary"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (where_ == Where::kShape) {
      if (value > static_cast<uint64_t>(INT64_MAX)) {
        return Fail("a dimension does not fit in 63 bits");
      }
      tensors_.back().shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (where_ == Where::kOffsets) {
      if (offset_count_ == 0) tensors_.back().begin = value;
      if (offset_count_ == 1) tensors_.back().end = value;
      if (++offset_count_ > 2) return Fail("more than two data_offsets");
      return true;
    }
    return Unexpected("a number");
  }

  bool string(string_t& value) override {
    if (where_ == Where::kMetadata) {
      metadata_[key_] = value;
      return true;
    }
    if (where_ == Where::kTensor && key_ == "dtype") {
      const std::optional<Dtype> dtype = ParseDtype(value);
      if (!dtype.has_value()) {
        is_unsupported_ = true;
        return Fail(absl::StrCat("unknown dtype ", QuotedName(value)));
      }
      tensors_.back().dtype = *dtype;
      return true;
    }
    return Unexpected("a string");
  }

  bool start_object(size_t) override {
    switch (where_) {
      case Where::kStart:
        where_ = Where::kTop;
        return true;
      case Where::kTop:
        if (key_ == kSafetensorsMetadataKey) {
          where_ = Where::kMetadata;
        } else {
          where_ = Where::kTensor;
          tensors_.emplace_back();
          tensors_.back().name = key_;
          tensor_keys_.clear();
        }
        return true;
      default:
        return Unexpected("an object");
    }
  }

  bool end_object() override {
    if (where_ == Where::kTensor) {
      if (tensor_keys_.size() != 3) {
        return Fail("expected dtype, shape and data_offsets");
      }
      where_ = Where::kTop;
    } else if (where_ == Where::kMetadata) {
      where_ = Where::kTop;
    } else {
      where_ = Where::kEnd;
    }
    return true;
  }

  bool start_array(size_t) override {
    if (where_ == Where::kTensor && key_ == "shape") {
      where_ = Where::kShape;
      return true;
    }
    if (where_ == Where::kTensor && key_ == "data_offsets") {
      where_ = Where::kOffsets;
      offset_count_ = 0;
      return true;
    }
    return Unexpected("an array");
  }

  bool end_array() override {
    if (where_ == Where::kOffsets && offset_count_ != 2) {
      return Fail("expected two data_offsets");
    }
    where_ = Where::kTensor;
    return true;
  }

  bool key(string_t& value) override {
    key_ = value;
    switch (where_) {
      case Where::kTop:
        if (!names_.insert(value).second) {
          return Fail(
              absl::StrCat("the name ", QuotedName(value), " occurs twice"));
        }
        return true;
      case Where::kMetadata:
        if (metadata_.count(value) != 0) {
          return Fail(absl::StrCat("the metadata key ", QuotedName(value),
                                   " occurs twice"));
        }
        return true;
      default:
        if (value != "dtype" && value != "shape" && value != "data_offsets") {
          return Fail(
              absl::StrCat("expected dtype, shape or data_offsets, got ",
                           QuotedName(value)));
        }
        if (!tensor_keys_.insert(value).second) {
          return Fail(absl::StrCat(QuotedName(value), " occurs twice"));
        }
        return true;
    }
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    error_ = absl::StrCat("the header is not valid JSON at byte ", position);
    return false;
  }

 private:
  enum class Where {
    kStart,
    kTop,
    kMetadata,
    kTensor,
    kShape,
    kOffsets,
    kEnd,
  };

  bool Fail(absl::string_view what) {
    error_ =
        where_ == Where::kTop || where_ == Where::kStart || tensors_.empty()
            ? std::string(what)
            : absl::StrCat("tensor ", QuotedName(tensors_.back().name), ": ",
                           what);
    return false;
  }

  bool Unexpected(absl::string_view got) {
    switch (where_) {
      case Where::kStart:
        return Fail(absl::StrCat("expected an object, got ", got));
      case Where::kTop:
        return Fail(absl::StrCat("expected an object for ", QuotedName(key_),
                                 ", got ", got));
      case Where::kMetadata:
        error_ = absl::StrCat("expected a string for the metadata key ",
                              QuotedName(key_), ", got ", got);
        return false;
      case Where::kTensor:
        return Fail(absl::StrCat("expected ",
                                 key_ == "dtype" ? "a string" : "an array",
                                 " for ", QuotedName(key_), ", got ", got));
      case Where::kShape:
      case Where::kOffsets:
        return Fail(absl::StrCat("expected integers of at least 0 in ",
                                 QuotedName(key_), ", got ", got));
      case Where::kEnd:
        break;
    }
    return Fail(absl::StrCat("expected nothing more, got ", got));
  }

  Where where_ = Where::kStart;
  std::string key_;
  int offset_count_ = 0;
  absl::flat_hash_set<std::string> names_;
  absl::flat_hash_set<std::string> tensor_keys_;
  std::vector<HeaderTensor> tensors_;
  std::map<std::string, std::string> metadata_;
  std::string error_;
  bool is_unsupported_ = false;
};

uint64_t ReadLength(absl::Span<const uint8_t> bytes) {
  uint64_t length = 0;
  for (size_t i = 0; i < kSafetensorsLengthBytes; ++i) {
    length |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  }
  return length;
}

// Checks that the tensors, in order of their data, cover it.
absl::Status CheckOffsets(const std::string& path,
                          const std::vector<HeaderTensor>& tensors,
                          uint64_t data_bytes) {
  uint64_t next = 0;
  for (const HeaderTensor& tensor : tensors) {
    const std::string quoted = QuotedName(tensor.name);
    if (tensor.begin > tensor.end) {
      return FileMalformedError(
          path,
          absl::StrCat("tensor ", quoted, ": data_offsets [", tensor.begin,
                       ", ", tensor.end, "] end before they begin"));
    }
    if (tensor.begin != next) {
      return FileMalformedError(
          path,
          absl::StrCat("tensor ", quoted, ": expected data at byte ", next,
                       " without hole or overlap, got ", tensor.begin));
    }
    const std::optional<int64_t> size =
        TensorSizeBytes(tensor.dtype, tensor.shape);
    if (!size.has_value()) {
      return FileMalformedError(
          path, absl::StrCat("tensor ", quoted, ": the size of shape [",
                             absl::StrJoin(tensor.shape, ","),
                             "] does not fit in 63 bits, or is no number of "
                             "whole bytes"));
    }
    if (static_cast<uint64_t>(*size) != tensor.end - tensor.begin) {
      return FileMalformedError(
          path, absl::StrCat("tensor ", quoted, ": ", DtypeName(tensor.dtype),
                             " of shape [", absl::StrJoin(tensor.shape, ","),
                             "] takes ", *size, " bytes, data_offsets have ",
                             tensor.end - tensor.begin));
    }
    next = tensor.end;
  }
  if (next != data_bytes) {
    return FileMalformedError(
        path,
        absl::StrCat("expected ", next, " bytes of data, got ", data_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SafetensorsReader> SafetensorsReader::Open(
    const std::string& path) {
  absl::StatusOr<MappedFile> file = MappedFile::Open(path);
  if (!file.ok()) return file.status();
  const absl::Span<const uint8_t> bytes = file->bytes();
  // No header is as long as eight characters of text would say.
  if (const std::string got = GotInstead(bytes); !got.empty()) {
    return FileMalformedError(path,
                              absl::StrCat("expected a safetensors file", got));
  }
  if (bytes.size() < kSafetensorsLengthBytes) {
    return FileMalformedError(
        path, absl::StrCat("expected at least 8 bytes, got ", bytes.size()));
  }
  const uint64_t length = ReadLength(bytes);
  if (length > kMaxSafetensorsHeaderBytes) {
    return FileMalformedError(
        path, absl::StrCat("expected a header of at most ",
                           kMaxSafetensorsHeaderBytes, " bytes, got ", length));
  }
  if (length > bytes.size() - kSafetensorsLengthBytes) {
    return FileMalformedError(
        path, absl::StrCat("expected a header of ", length, " bytes, got ",
                           bytes.size() - kSafetensorsLengthBytes));
  }
  const absl::Span<const uint8_t> header =
      bytes.subspan(kSafetensorsLengthBytes, length);
  if (header.empty() || header[0] != '{') {
    return FileMalformedError(path, "expected a header that begins with {");
  }
  // The parser takes a zero byte for the end and would ignore what follows.
  const size_t zero_at = static_cast<size_t>(
      std::find(header.begin(), header.end(), 0) - header.begin());
  if (zero_at < header.size()) {
    return FileMalformedError(
        path, absl::StrCat("the header has a zero byte at byte ", zero_at));
  }
  HeaderHandler handler;
  if (!nlohmann::json::sax_parse(header.begin(), header.end(), &handler)) {
    return handler.is_unsupported()
               ? FileUnsupportedError(path, handler.error())
               : FileMalformedError(path, handler.error());
  }
  std::vector<HeaderTensor>& tensors = handler.tensors();
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const HeaderTensor& a, const HeaderTensor& b) {
                     return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
                   });
  const absl::Span<const uint8_t> data =
      bytes.subspan(kSafetensorsLengthBytes + length);
  const absl::Status status = CheckOffsets(path, tensors, data.size());
  if (!status.ok()) return status;

  SafetensorsReader reader(*std::move(file));
  reader.metadata_ = std::move(handler.metadata());
  reader.tensors_.reserve(tensors.size());
  std::vector<TensorBytes> named;
  for (HeaderTensor& tensor : tensors) {
    reader.index_.emplace(tensor.name, reader.tensors_.size());
    reader.tensors_.push_back(
        {std::move(tensor.name), tensor.dtype, std::move(tensor.shape),
         data.subspan(tensor.begin, tensor.end - tensor.begin)});
    named.push_back({reader.tensors_.back().name, reader.tensors_.back().data});
  }
  reader.file_.SetTensors(std::move(named));
  return reader;
}

const FileTensor* SafetensorsReader::Find(absl::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

uint64_t SafetensorsReader::DataChecksum() const {
  if (tensors_.empty()) return XXH3_64bits(nullptr, 0);
  // Without hole or overlap.
  const uint8_t* const begin = tensors_.front().data.data();
  const absl::Span<const uint8_t> last = tensors_.back().data;
  return XXH3_64bits(begin,
                     static_cast<size_t>(last.data() + last.size() - begin));
}

}  // namespace quantd::files
