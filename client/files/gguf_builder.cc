#include "client/files/gguf_builder.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/atomic_file.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/gguf_types.h"

namespace quantd::files {
namespace {

constexpr uint32_t kVersion = 3;
constexpr uint32_t kUint32Code = 4;
constexpr uint32_t kTextCode = 8;
constexpr uint32_t kArrayCode = 9;
// ggml's limits; a name has a zero behind it there.
constexpr size_t kMostNameBytes = 63;
constexpr size_t kMostWrittenDimensions = 4;

template <typename T>
void AppendNumber(T value, std::string* bytes) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    bytes->push_back(static_cast<char>(value >> (8 * i) & 255));
  }
}

void AppendText(absl::string_view text, std::string* bytes) {
  AppendNumber(uint64_t{text.size()}, bytes);
  absl::StrAppend(bytes, text);
}

uint64_t RoundUp(uint64_t size, uint64_t alignment) {
  return (size + alignment - 1) / alignment * alignment;
}

}  // namespace

std::string GgufUint32Pair(absl::string_view key, uint32_t value) {
  std::string pair;
  AppendText(key, &pair);
  AppendNumber(kUint32Code, &pair);
  AppendNumber(value, &pair);
  return pair;
}

std::string GgufTextPair(absl::string_view key, absl::string_view value) {
  std::string pair;
  AppendText(key, &pair);
  AppendNumber(kTextCode, &pair);
  AppendText(value, &pair);
  return pair;
}

std::string GgufTextsPair(absl::string_view key,
                          absl::Span<const absl::string_view> values) {
  std::string pair;
  AppendText(key, &pair);
  AppendNumber(kArrayCode, &pair);
  AppendNumber(kTextCode, &pair);
  AppendNumber(uint64_t{values.size()}, &pair);
  for (const absl::string_view value : values) AppendText(value, &pair);
  return pair;
}

uint64_t GgufEntry::SizeBytes() const {
  const int64_t elements = TensorSizeBytes(Dtype::kU8, shape).value_or(0);
  return static_cast<uint64_t>(elements / type->block_elements *
                               type->block_bytes);
}

absl::Status CheckGgufEntry(const std::string& path, const GgufEntry& entry) {
  const auto refuse = [&](absl::string_view what) {
    return FileUnsupportedError(
        path, absl::StrCat("tensor ", QuotedName(entry.name), ": ", what));
  };
  if (entry.name.size() > kMostNameBytes) {
    return refuse(absl::StrCat("GGUF takes names of at most ", kMostNameBytes,
                               " bytes, this one has ", entry.name.size()));
  }
  if (entry.shape.size() > kMostWrittenDimensions) {
    return refuse(absl::StrCat("GGUF takes at most ", kMostWrittenDimensions,
                               " dimensions, this one has ",
                               entry.shape.size()));
  }
  if (std::count(entry.shape.begin(), entry.shape.end(), 0) > 0) {
    return refuse("GGUF takes no tensors without elements");
  }
  const int64_t innermost = entry.shape.empty() ? 1 : entry.shape.back();
  if (innermost % entry.type->block_elements != 0) {
    return refuse(absl::StrCat(entry.type->name, " has blocks of ",
                               entry.type->block_elements,
                               " elements, which do not divide the innermost "
                               "dimension of ",
                               innermost));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<GgufBuilder>> GgufBuilder::Create(
    const std::string& path, IfExists if_exists,
    const std::vector<absl::string_view>& pairs, uint32_t alignment,
    const std::vector<GgufEntry>& entries) {
  std::string header = "GGUF";
  AppendNumber(kVersion, &header);
  AppendNumber(uint64_t{entries.size()}, &header);
  AppendNumber(uint64_t{pairs.size()}, &header);
  for (const absl::string_view pair : pairs) absl::StrAppend(&header, pair);
  std::vector<Place> places;
  absl::flat_hash_set<absl::string_view> names;
  uint64_t offset = 0;
  for (const GgufEntry& entry : entries) {
    if (!names.insert(entry.name).second) {
      return FileMalformedError(path,
                                absl::StrCat("tensor ", QuotedName(entry.name),
                                             ": the name occurs twice"));
    }
    AppendText(entry.name, &header);
    AppendNumber(static_cast<uint32_t>(entry.shape.size()), &header);
    for (size_t d = entry.shape.size(); d > 0; --d) {
      AppendNumber(static_cast<uint64_t>(entry.shape[d - 1]), &header);
    }
    AppendNumber(entry.type->number, &header);
    AppendNumber(offset, &header);
    places.push_back({offset, entry.SizeBytes()});
    offset = RoundUp(offset + entry.SizeBytes(), alignment);
  }
  header.resize(RoundUp(header.size(), alignment));
  for (Place& place : places) place.begin_bytes += header.size();

  absl::StatusOr<AtomicFile> file = AtomicFile::Create(path, if_exists);
  if (!file.ok()) return file.status();
  auto builder =
      std::unique_ptr<GgufBuilder>(new GgufBuilder(path, *std::move(file)));
  if (const std::optional<int> fd = builder->file_.fd(); fd.has_value()) {
    builder->fd_ = *fd;
  } else {
    const absl::StatusOr<int> unnamed = OpenUnnamedFile(path);
    if (!unnamed.ok()) return unnamed.status();
    builder->fd_ = *unnamed;
  }
  builder->places_ = std::move(places);
  builder->size_bytes_ = header.size() + offset;
  // Also what is between tensors and behind the last: zeros.
  if (ftruncate(builder->fd_, static_cast<off_t>(builder->size_bytes_)) != 0) {
    return FileUnwritableError(path, errno);
  }
  const absl::Status status = WriteAllAt(
      builder->fd_, 0,
      {reinterpret_cast<const uint8_t*>(header.data()), header.size()}, path);
  if (!status.ok()) return status;
  return builder;
}

GgufBuilder::~GgufBuilder() {
  if (!file_.fd().has_value() && fd_ >= 0) close(fd_);
}

absl::Status GgufBuilder::Write(size_t index, absl::Span<const uint8_t> data) {
  const Place& place = places_[index];
  if (data.size() != place.size_bytes) {
    return FileMalformedError(
        path_, absl::StrCat("expected a tensor of ", place.size_bytes,
                            " bytes, got ", data.size()));
  }
  return WriteAllAt(fd_, place.begin_bytes, data, path_);
}

absl::StatusOr<uint64_t> GgufBuilder::Finish() {
  absl::Status status;
  if (!file_.fd().has_value()) status = file_.AppendFrom(fd_, 0, size_bytes_);
  if (status.ok()) status = file_.Commit();
  if (!status.ok()) return status;
  return size_bytes_;
}

}  // namespace quantd::files
