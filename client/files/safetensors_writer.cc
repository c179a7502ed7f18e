#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/files/atomic_file.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/safetensors.h"
#include "client/files/safetensors_header.h"

namespace quantd::files {
namespace {}  // namespace

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::Create(
    const std::string& path, IfExists if_exists) {
  if (absl::Status s = CheckWritable(path, if_exists); !s.ok()) return s;
  const absl::StatusOr<int> fd = OpenUnnamedFile(path);
  if (!fd.ok()) return fd.status();
  return SafetensorsWriter(path, if_exists, *fd);
}

SafetensorsWriter::SafetensorsWriter(std::string path, IfExists if_exists,
                                     int spool_fd)
    : path_(std::move(path)), if_exists_(if_exists), spool_fd_(spool_fd) {}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept
    : path_(other.path_),
      if_exists_(other.if_exists_),
      spool_fd_(std::exchange(other.spool_fd_, -1)),
      spool_bytes_(other.spool_bytes_),
      entries_(std::move(other.entries_)),
      names_(std::move(other.names_)),
      metadata_(std::move(other.metadata_)) {}

SafetensorsWriter::~SafetensorsWriter() {
  if (spool_fd_ >= 0) close(spool_fd_);
}

absl::Status SafetensorsWriter::Check(const std::string& name, Dtype dtype,
                                      const std::vector<int64_t>& shape,
                                      size_t size_bytes) {
  const std::optional<int64_t> expected = TensorSizeBytes(dtype, shape);
  if (!expected.has_value() || static_cast<uint64_t>(*expected) != size_bytes) {
    return FileMalformedError(
        path_, absl::StrCat("tensor \"", name, "\": the data have ", size_bytes,
                            " bytes, the shape ", expected.value_or(-1)));
  }
  if (name == kSafetensorsMetadataKey || !names_.insert(name).second) {
    return FileMalformedError(path_,
                              absl::StrCat("the name \"", name, "\" is taken"));
  }
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Add(const std::string& name, Dtype dtype,
                                    const std::vector<int64_t>& shape,
                                    absl::Span<const uint8_t> data) {
  absl::Status status = Check(name, dtype, shape, data.size());
  if (!status.ok()) return status;
  status = WriteAll(spool_fd_, data, path_);
  if (!status.ok()) return status;
  entries_.push_back({name, dtype, shape, data.size(), nullptr, spool_bytes_});
  spool_bytes_ += data.size();
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::AddView(const std::string& name, Dtype dtype,
                                        const std::vector<int64_t>& shape,
                                        absl::Span<const uint8_t> data) {
  const absl::Status status = Check(name, dtype, shape, data.size());
  if (!status.ok()) return status;
  entries_.push_back({name, dtype, shape, data.size(), data.data(), 0});
  return absl::OkStatus();
}

void SafetensorsWriter::SetMetadata(const std::string& key,
                                    const std::string& value) {
  metadata_[key] = value;
}

absl::StatusOr<uint64_t> SafetensorsWriter::Finish() {
  std::stable_sort(entries_.begin(), entries_.end(),
                   [](const Entry& a, const Entry& b) {
                     return DtypeSizeBytes(a.dtype) > DtypeSizeBytes(b.dtype);
                   });
  std::vector<SafetensorsEntry> plain;
  uint64_t offset = 0;
  for (const Entry& entry : entries_) {
    plain.push_back({entry.name, entry.dtype, entry.shape, entry.size_bytes});
    offset += entry.size_bytes;
  }
  const absl::StatusOr<std::string> header =
      SafetensorsHeader(path_, plain, metadata_, /*room_bytes=*/0);
  if (!header.ok()) return header.status();
  absl::StatusOr<AtomicFile> file = AtomicFile::Create(path_, if_exists_);
  if (!file.ok()) return file.status();
  absl::Status status = file->Append(*header);
  for (const Entry& entry : entries_) {
    if (!status.ok()) return status;
    status =
        entry.data == nullptr
            ? file->AppendFrom(spool_fd_, entry.offset_bytes, entry.size_bytes)
            : file->Append(absl::MakeConstSpan(entry.data, entry.size_bytes));
  }
  if (!status.ok()) return status;
  status = file->Commit();
  if (!status.ok()) return status;
  return header->size() + offset;
}

}  // namespace quantd::files
