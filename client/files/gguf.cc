#include "client/files/gguf.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/gguf_types.h"
#include "client/files/mapped_file.h"

namespace quantd::files {
namespace {

constexpr absl::string_view kGgufMagic = "GGUF";
constexpr uint32_t kMostReadDimensions = 4;
constexpr absl::string_view kAlignmentKey = "general.alignment";
// The format's least, ggml's most.
constexpr uint32_t kLeastAlignment = 8;
constexpr uint32_t kMostAlignment = 1 << 20;
constexpr uint32_t kUint32Tag = 4;
constexpr uint32_t kStringType = 8;
constexpr uint32_t kArrayType = 9;

// Bytes of a metadata value of a type; nothing for strings and arrays, and for
// what is none.
std::optional<uint64_t> ValueBytes(uint32_t type) {
  switch (type) {
    case 0:
    case 1:
    case 7:
      return 1;
    case 2:
    case 3:
      return 2;
    case 4:
    case 5:
    case 6:
      return 4;
    case 10:
    case 11:
    case 12:
      return 8;
    default:
      return std::nullopt;
  }
}

// Takes values from the front of a file. Not thread-safe.
class Cursor {
 public:
  explicit Cursor(absl::Span<const uint8_t> bytes) : bytes_(bytes) {}

  size_t position() const { return position_; }

  bool Skip(uint64_t size) {
    if (size > bytes_.size() - position_) return false;
    position_ += size;
    return true;
  }

  template <typename T>
  bool Read(T* value) {
    const size_t at = position_;
    if (!Skip(sizeof(T))) return false;
    *value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      *value |= static_cast<T>(bytes_[at + i]) << (8 * i);
    }
    return true;
  }

  bool ReadString(absl::string_view* text) {
    uint64_t size = 0;
    if (!Read(&size)) return false;
    const size_t at = position_;
    if (!Skip(size)) return false;
    *text = {reinterpret_cast<const char*>(bytes_.data()) + at, size};
    return true;
  }

 private:
  const absl::Span<const uint8_t> bytes_;
  size_t position_ = 0;
};

// Parses what comes before the data.
class GgufHeaderParser {
 public:
  GgufHeaderParser(const std::string& path, absl::Span<const uint8_t> bytes)
      : path_(path), bytes_(bytes), cursor_(bytes) {}

  uint32_t alignment() const { return alignment_; }

  absl::Status Parse(std::vector<GgufPair>* pairs,
                     std::vector<GgufTensor>* tensors) {
    uint32_t magic = 0;
    uint32_t version = 0;
    uint64_t tensor_count = 0;
    uint64_t pair_count = 0;
    if (!cursor_.Read(&magic) ||
        std::memcmp(bytes_.data(), kGgufMagic.data(), kGgufMagic.size()) != 0) {
      return Malformed(absl::StrCat("expected a file that begins with GGUF",
                                    GotInstead(bytes_)));
    }
    if (!cursor_.Read(&version)) return CutShort("the version");
    if (version != 2 && version != 3) {
      return FileUnsupportedError(
          path_, version != 0 && version << 16 == 0
                     ? "expected a little-endian file, got a big-endian one"
                     : absl::StrCat("expected version 2 or 3, got ", version));
    }
    if (!cursor_.Read(&tensor_count) || !cursor_.Read(&pair_count)) {
      return CutShort("the counts");
    }
    for (uint64_t i = 0; i < pair_count; ++i) {
      const size_t begin = cursor_.position();
      pairs->emplace_back();
      absl::Status status = ParsePair(&pairs->back().key);
      if (!status.ok()) return status;
      if (!keys_.insert(pairs->back().key).second) {
        return Malformed(absl::StrCat(QuotedName(pairs->back().key),
                                      " occurs twice in the metadata"));
      }
      pairs->back().bytes = bytes_.subspan(begin, cursor_.position() - begin);
    }
    std::vector<uint64_t> offsets;
    for (uint64_t i = 0; i < tensor_count; ++i) {
      absl::Status status = ParseTensor(tensors, &offsets);
      if (!status.ok()) return status;
    }
    const uint64_t rest = cursor_.position() % alignment_;
    if (rest != 0 && !cursor_.Skip(alignment_ - rest) && !offsets.empty()) {
      return CutShort("the padding before the data");
    }
    const absl::Span<const uint8_t> data = bytes_.subspan(cursor_.position());
    for (size_t i = 0; i < tensors->size(); ++i) {
      absl::Status status = FindData(data, offsets[i], &(*tensors)[i]);
      if (!status.ok()) return status;
    }
    return CheckApart(*tensors);
  }

 private:
  absl::Status Malformed(absl::string_view what) const {
    return FileMalformedError(path_, what);
  }

  absl::Status CutShort(absl::string_view what) const {
    return Malformed(absl::StrCat("the file of ", bytes_.size(),
                                  " bytes ends within ", what));
  }

  absl::Status OfTensor(const GgufTensor& tensor,
                        absl::string_view what) const {
    return Malformed(
        absl::StrCat("tensor ", QuotedName(tensor.name), ": ", what));
  }

  absl::Status ParsePair(std::string* name) {
    absl::string_view key;
    uint32_t type = 0;
    if (!cursor_.ReadString(&key) || !cursor_.Read(&type)) {
      return CutShort("the metadata");
    }
    *name = std::string(key);
    if (key == kAlignmentKey) {
      uint32_t alignment = 0;
      if (type != kUint32Tag || !cursor_.Read(&alignment) ||
          alignment < kLeastAlignment || alignment > kMostAlignment ||
          (alignment & (alignment - 1)) != 0) {
        return Malformed(absl::StrCat(
            "expected general.alignment to be a uint32 that is a power of two "
            "from ",
            kLeastAlignment, " to ", kMostAlignment));
      }
      alignment_ = alignment;
      return absl::OkStatus();
    }
    uint64_t count = 1;
    if (type == kArrayType && (!cursor_.Read(&type) || !cursor_.Read(&count))) {
      return CutShort("the metadata");
    }
    if (type == kStringType) {
      absl::string_view text;
      for (uint64_t i = 0; i < count; ++i) {
        if (!cursor_.ReadString(&text)) return CutShort("the metadata");
      }
      return absl::OkStatus();
    }
    const std::optional<uint64_t> size = ValueBytes(type);
    if (!size.has_value()) {
      return Malformed(
          absl::StrCat("expected a type of metadata from 0 to 12 and no array "
                       "of arrays, got ",
                       type));
    }
    if (count > bytes_.size() || !cursor_.Skip(count * *size)) {
      return CutShort("the metadata");
    }
    return absl::OkStatus();
  }

  absl::Status ParseTensor(std::vector<GgufTensor>* tensors,
                           std::vector<uint64_t>* offsets) {
    absl::string_view name;
    uint32_t rank = 0;
    if (!cursor_.ReadString(&name) || !cursor_.Read(&rank)) {
      return CutShort("the description of the tensors");
    }
    GgufTensor tensor;
    tensor.name = std::string(name);
    if (!names_.insert(tensor.name).second) {
      return OfTensor(tensor, "the name occurs twice");
    }
    if (rank > kMostReadDimensions) {
      return OfTensor(tensor,
                      absl::StrCat("expected at most ", kMostReadDimensions,
                                   " dimensions, got ", rank));
    }
    for (uint32_t i = 0; i < rank; ++i) {
      uint64_t extent = 0;
      if (!cursor_.Read(&extent)) {
        return CutShort("the description of the tensors");
      }
      if (extent > static_cast<uint64_t>(INT64_MAX)) {
        return OfTensor(tensor, "a dimension does not fit in 63 bits");
      }
      tensor.shape.push_back(static_cast<int64_t>(extent));
    }
    std::reverse(tensor.shape.begin(), tensor.shape.end());
    uint64_t offset = 0;
    if (!cursor_.Read(&tensor.type_number) || !cursor_.Read(&offset)) {
      return CutShort("the description of the tensors");
    }
    tensor.type = FindGgufType(tensor.type_number);
    if (offset % alignment_ != 0) {
      return OfTensor(tensor,
                      absl::StrCat("expected an offset that is a multiple of ",
                                   alignment_, ", got ", offset));
    }
    tensors->push_back(std::move(tensor));
    offsets->push_back(offset);
    return absl::OkStatus();
  }

  absl::Status FindData(absl::Span<const uint8_t> data, uint64_t offset,
                        GgufTensor* tensor) const {
    if (tensor->type == nullptr) return absl::OkStatus();
    const GgufType& type = *tensor->type;
    // Type of the decoded elements, which have to have a size too.
    const Dtype dtype = type.dtype.value_or(Dtype::kF32);
    const std::optional<int64_t> decoded =
        TensorSizeBytes(dtype, tensor->shape);
    if (!decoded.has_value()) {
      return OfTensor(*tensor, "its size does not fit in 63 bits");
    }
    if (!type.IsPlain() && (tensor->shape.empty() ||
                            tensor->shape.back() % type.block_elements != 0)) {
      return OfTensor(
          *tensor,
          absl::StrCat("expected an innermost dimension of blocks "
                       "of ",
                       type.block_elements, ", as ", type.name, " has"));
    }
    // A block has a byte at least: what passes has a size that fits.
    const int64_t blocks =
        *decoded / DtypeSizeBytes(dtype) / type.block_elements;
    if (static_cast<uint64_t>(blocks) > data.size()) {
      return OfTensor(*tensor, "its data end behind the file");
    }
    const int64_t size = blocks * type.block_bytes;
    if (offset > data.size() ||
        static_cast<uint64_t>(size) > data.size() - offset) {
      return OfTensor(*tensor, "its data end behind the file");
    }
    tensor->data = data.subspan(offset, static_cast<size_t>(size));
    return absl::OkStatus();
  }

  // Else a small file could have many large tensors, all of the same bytes.
  absl::Status CheckApart(const std::vector<GgufTensor>& tensors) const {
    std::vector<const GgufTensor*> order;
    for (const GgufTensor& tensor : tensors) {
      if (!tensor.data.empty()) order.push_back(&tensor);
    }
    std::stable_sort(order.begin(), order.end(),
                     [](const GgufTensor* a, const GgufTensor* b) {
                       return a->data.data() < b->data.data();
                     });
    for (size_t i = 1; i < order.size(); ++i) {
      const GgufTensor& before = *order[i - 1];
      if (order[i]->data.data() < before.data.data() + before.data.size()) {
        return OfTensor(*order[i], absl::StrCat("its data overlap those of ",
                                                QuotedName(before.name)));
      }
    }
    return absl::OkStatus();
  }

  const std::string& path_;
  const absl::Span<const uint8_t> bytes_;
  Cursor cursor_;
  uint32_t alignment_ = kGgufAlignment;
  absl::flat_hash_set<std::string> names_;
  absl::flat_hash_set<std::string> keys_;
};

}  // namespace

absl::StatusOr<GgufReader> GgufReader::Open(const std::string& path) {
  absl::StatusOr<MappedFile> file = MappedFile::Open(path);
  if (!file.ok()) return file.status();
  GgufReader reader(*std::move(file));
  GgufHeaderParser parser(path, reader.file_.bytes());
  const absl::Status status = parser.Parse(&reader.pairs_, &reader.tensors_);
  if (!status.ok()) return status;
  reader.alignment_ = parser.alignment();
  std::vector<TensorBytes> named;
  for (const GgufTensor& tensor : reader.tensors_) {
    named.push_back({tensor.name, tensor.data});
  }
  reader.file_.SetTensors(std::move(named));
  return reader;
}

absl::Status GgufReader::CheckWhole(const std::string& path) const {
  const uint64_t count = IntegerOf("split.count").value_or(1);
  if (count <= 1) return absl::OkStatus();
  return FileUnsupportedError(
      path, absl::StrCat("expected a whole model, got file ",
                         IntegerOf("split.no").value_or(0) + 1, " of ", count,
                         "; merge them first, as `llama-gguf-split --merge` "
                         "does"));
}

std::optional<uint64_t> GgufReader::IntegerOf(absl::string_view key) const {
  for (const GgufPair& pair : pairs_) {
    if (pair.key != key) continue;
    // The key with its length, and the type.
    const size_t begin = sizeof(uint64_t) + key.size() + sizeof(uint32_t);
    const absl::Span<const uint8_t> bytes = pair.bytes.subspan(begin);
    if (bytes.size() > sizeof(uint64_t)) return std::nullopt;
    uint64_t value = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      value |= uint64_t{bytes[i]} << (8 * i);
    }
    return value;
  }
  return std::nullopt;
}

std::vector<float> DequantizeGguf(const GgufTensor& tensor) {
  const GgufType& type = *tensor.type;
  const size_t block_bytes = static_cast<size_t>(type.block_bytes);
  const size_t block_elements = static_cast<size_t>(type.block_elements);
  const size_t blocks = tensor.data.size() / block_bytes;
  std::vector<float> elements(blocks * block_elements);
  for (size_t b = 0; b < blocks; ++b) {
    type.decode(&tensor.data[b * block_bytes], &elements[b * block_elements]);
  }
  return elements;
}

}  // namespace quantd::files
