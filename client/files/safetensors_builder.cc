#include "client/files/safetensors_builder.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/files/atomic_file.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/safetensors_header.h"
#include "xxhash.h"

namespace quantd::files {
namespace {

// Read back at once.
constexpr size_t kReadBytes = size_t{1} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsBuilder>> SafetensorsBuilder::Create(
    const std::string& path, IfExists if_exists) {
  auto builder = std::unique_ptr<SafetensorsBuilder>(
      new SafetensorsBuilder(path, if_exists));
  absl::StatusOr<AtomicFile> file = AtomicFile::Create(path, if_exists);
  if (!file.ok()) return file.status();
  if (const std::optional<int> fd = file->fd(); fd.has_value()) {
    builder->file_.emplace(*std::move(file));
    builder->fd_ = *fd;
    return builder;
  }
  const absl::StatusOr<int> fd = OpenUnnamedFile(path);
  if (!fd.ok()) return fd.status();
  builder->fd_ = *fd;
  return builder;
}

SafetensorsBuilder::~SafetensorsBuilder() {
  if (!file_.has_value() && fd_ >= 0) close(fd_);
}

absl::StatusOr<SafetensorsBuilder::Entry> SafetensorsBuilder::MakeEntry(
    uint64_t order, const std::string& name, Dtype dtype,
    const std::vector<int64_t>& shape) {
  const std::optional<int64_t> size = TensorSizeBytes(dtype, shape);
  if (!size.has_value()) {
    return FileMalformedError(
        path_, absl::StrCat("tensor \"", name, "\": the shape has no size"));
  }
  if (name == kSafetensorsMetadataKey || !names_.insert(name).second) {
    return FileMalformedError(path_,
                              absl::StrCat("the name \"", name, "\" is taken"));
  }
  return Entry{order, name, dtype, shape, static_cast<uint64_t>(*size)};
}

absl::StatusOr<size_t> SafetensorsBuilder::Reserve(
    uint64_t order, const std::string& name, Dtype dtype,
    const std::vector<int64_t>& shape) {
  absl::MutexLock lock(&mutex_);
  absl::StatusOr<Entry> entry = MakeEntry(order, name, dtype, shape);
  if (!entry.ok()) return entry.status();
  entries_.push_back(*std::move(entry));
  return entries_.size() - 1;
}

uint64_t SafetensorsBuilder::reserved_bytes() const {
  absl::MutexLock lock(&mutex_);
  uint64_t size = 0;
  for (const Entry& entry : entries_) size += entry.size_bytes;
  return size;
}

absl::StatusOr<uint64_t> SafetensorsBuilder::HeaderBytes(
    const std::map<std::string, std::string>& metadata) const {
  absl::MutexLock lock(&mutex_);
  const absl::StatusOr<std::string> header =
      Header(Order(), metadata, /*room_bytes=*/0);
  if (!header.ok()) return header.status();
  return header->size();
}

absl::StatusOr<std::string> SafetensorsBuilder::Header(
    const std::vector<size_t>& indices,
    const std::map<std::string, std::string>& metadata,
    uint64_t room_bytes) const {
  std::vector<SafetensorsEntry> header_entries;
  for (const size_t index : indices) {
    const Entry& entry = entries_[index];
    header_entries.push_back(
        {entry.name, entry.dtype, entry.shape, entry.size_bytes});
  }
  return SafetensorsHeader(path_, header_entries, metadata, room_bytes);
}

absl::Status SafetensorsBuilder::PlaceAll(uint64_t header_bytes) {
  absl::MutexLock lock(&mutex_);
  header_bytes_ = header_bytes;
  end_bytes_ = header_bytes;
  places_.resize(entries_.size());
  for (const size_t index : Order()) {
    entries_[index].place_bytes = end_bytes_;
    places_[index] = {end_bytes_, entries_[index].size_bytes};
    end_bytes_ += entries_[index].size_bytes;
  }
  if (ftruncate(fd_, static_cast<off_t>(end_bytes_)) != 0) {
    return FileUnwritableError(path_, errno);
  }
  return absl::OkStatus();
}

absl::Status SafetensorsBuilder::Write(size_t index, uint64_t offset_bytes,
                                       absl::Span<const uint8_t> bytes) {
  const Place& place = places_[index];
  if (offset_bytes > place.size_bytes ||
      bytes.size() > place.size_bytes - offset_bytes) {
    return FileMalformedError(
        path_,
        absl::StrCat("expected a tensor of ", place.size_bytes,
                     " bytes, got bytes up to ", offset_bytes + bytes.size()));
  }
  return WriteAllAt(fd_, place.begin_bytes + offset_bytes, bytes, path_);
}

absl::Status SafetensorsBuilder::Add(uint64_t order, const std::string& name,
                                     Dtype dtype,
                                     const std::vector<int64_t>& shape,
                                     absl::Span<const uint8_t> data) {
  uint64_t place = 0;
  {
    absl::MutexLock lock(&mutex_);
    absl::StatusOr<Entry> entry = MakeEntry(order, name, dtype, shape);
    if (!entry.ok()) return entry.status();
    if (entry->size_bytes != data.size()) {
      return FileMalformedError(
          path_,
          absl::StrCat("tensor \"", name, "\": the data have ", data.size(),
                       " bytes, the shape ", entry->size_bytes));
    }
    place = end_bytes_;
    entry->place_bytes = place;
    end_bytes_ += data.size();
    entries_.push_back(*std::move(entry));
  }
  return WriteAllAt(fd_, place, data, path_);
}

void SafetensorsBuilder::Drop(size_t index) {
  absl::MutexLock lock(&mutex_);
  entries_[index].is_dropped = true;
  names_.erase(entries_[index].name);
}

void SafetensorsBuilder::SetDtype(size_t index, Dtype dtype) {
  absl::MutexLock lock(&mutex_);
  entries_[index].dtype = dtype;
}

void SafetensorsBuilder::SetMetadata(const std::string& key,
                                     const std::string& value) {
  absl::MutexLock lock(&mutex_);
  metadata_[key] = value;
}

std::vector<size_t> SafetensorsBuilder::Order() const {
  std::vector<size_t> indices;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!entries_[i].is_dropped) indices.push_back(i);
  }
  std::stable_sort(indices.begin(), indices.end(), [this](size_t a, size_t b) {
    mutex_.AssertHeld();
    const int64_t size_a = DtypeSizeBytes(entries_[a].dtype);
    const int64_t size_b = DtypeSizeBytes(entries_[b].dtype);
    return size_a != size_b ? size_a > size_b
                            : entries_[a].order < entries_[b].order;
  });
  return indices;
}

absl::StatusOr<uint64_t> SafetensorsBuilder::DataChecksum() const {
  absl::MutexLock lock(&mutex_);
  XXH3_state_t* const hash = XXH3_createState();
  const absl::Cleanup free_hash = [hash] { XXH3_freeState(hash); };
  XXH3_64bits_reset(hash);
  std::vector<uint8_t> piece(kReadBytes);
  for (const size_t index : Order()) {
    const Entry& entry = entries_[index];
    for (uint64_t at = 0; at < entry.size_bytes;) {
      const size_t wanted =
          std::min<uint64_t>(piece.size(), entry.size_bytes - at);
      const ssize_t count = pread(fd_, piece.data(), wanted,
                                  static_cast<off_t>(entry.place_bytes + at));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0)
        return FileUnwritableError(path_, count == 0 ? EIO : errno);
      XXH3_64bits_update(hash, piece.data(), static_cast<size_t>(count));
      at += static_cast<uint64_t>(count);
    }
  }
  return XXH3_64bits_digest(hash);
}

absl::StatusOr<uint64_t> SafetensorsBuilder::Finish() {
  absl::MutexLock lock(&mutex_);
  const std::vector<size_t> indices = Order();
  const absl::StatusOr<std::string> header =
      Header(indices, metadata_, header_bytes_);
  if (!header.ok()) return header.status();
  uint64_t end = header->size();
  bool is_in_place = file_.has_value();
  for (const size_t index : indices) {
    is_in_place = is_in_place && entries_[index].place_bytes == end;
    end += entries_[index].size_bytes;
  }
  if (is_in_place && end == end_bytes_) {
    const absl::Status status = WriteAllAt(
        fd_, 0,
        absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(header->data()),
                            header->size()),
        path_);
    if (!status.ok()) return status;
    const absl::Status committed = file_->Commit();
    if (!committed.ok()) return committed;
    return end;
  }
  absl::StatusOr<AtomicFile> file = AtomicFile::Create(path_, if_exists_);
  if (!file.ok()) return file.status();
  absl::Status status = file->Append(*header);
  for (const size_t index : indices) {
    if (!status.ok()) return status;
    const Entry& entry = entries_[index];
    status = file->AppendFrom(fd_, entry.place_bytes, entry.size_bytes);
  }
  if (status.ok()) status = file->Commit();
  if (!status.ok()) return status;
  return end;
}

}  // namespace quantd::files
