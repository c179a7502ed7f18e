// A file that appears complete or not at all.

#ifndef QUANTD_CLIENT_FILES_ATOMIC_FILE_H_
#define QUANTD_CLIENT_FILES_ATOMIC_FILE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace quantd::files {

// The path that stands for standard output.
constexpr char kStandardOutput[] = "-";

// The choice for a file that is there already.
enum class IfExists { kRefuse, kReplace };

// Checks that a file can be written there, as AtomicFile::Create does.
// Errors: FILE_EXISTS; FILE_UNWRITABLE for a folder and the like, or in one
// that is not there or not writable.
absl::Status CheckWritable(const std::string& path, IfExists if_exists);

// A file without a name in the folder of `path`, or in the temporary folder
// where `path` is no regular file. Returns a descriptor to write and to read.
// Errors: FILE_UNWRITABLE.
absl::StatusOr<int> OpenUnnamedFile(const std::string& path);

// Writes to a file without a name in the folder of `path`, which Commit gives
// it: a process that is killed leaves nothing behind. On file systems that do
// not know such files it is PATH.tmp-PID-N meanwhile. Standard output, pipes
// and devices are written as the data come. Not thread-safe.
class AtomicFile {
 public:
  // Errors: FILE_EXISTS, FILE_UNWRITABLE.
  static absl::StatusOr<AtomicFile> Create(const std::string& path,
                                           IfExists if_exists);

  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  // Errors of these: FILE_UNWRITABLE.
  absl::Status Append(absl::Span<const uint8_t> bytes);
  absl::Status Append(absl::string_view bytes);
  // Appends `size_bytes` of another open file from `offset_bytes`.
  absl::Status AppendFrom(int fd, uint64_t offset_bytes, uint64_t size_bytes);

  // The open file, to write and to read at any place; none where it is written
  // as the data come.
  std::optional<int> fd() const {
    return kind_ == Kind::kStream ? std::nullopt : std::optional<int>(fd_);
  }

  // Makes the file durable and visible.
  // Errors: FILE_EXISTS where one came meanwhile; FILE_UNWRITABLE; those of
  // CheckMappedFiles, as the contents may be of what was read.
  absl::Status Commit();

 private:
  enum class Kind { kUnnamed, kNamed, kStream };

  AtomicFile(std::string path, IfExists if_exists, Kind kind,
             std::string temporary_path, int fd);
  // Puts the file in its place. Returns errno, or 0.
  int Publish() const;

  const std::string path_;
  const IfExists if_exists_;
  const Kind kind_;
  // Path of the file until Commit; for kNamed alone.
  const std::string temporary_path_;
  // Negative once committed or moved from.
  int fd_;
};

// Writes all bytes to `fd`; `path` is for the error.
// Errors: FILE_UNWRITABLE.
absl::Status WriteAll(int fd, absl::Span<const uint8_t> bytes,
                      const std::string& path);

// WriteAll from `offset_bytes` on. Thread-safe for bytes that do not overlap.
// Errors: FILE_UNWRITABLE.
absl::Status WriteAllAt(int fd, uint64_t offset_bytes,
                        absl::Span<const uint8_t> bytes,
                        const std::string& path);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_ATOMIC_FILE_H_
