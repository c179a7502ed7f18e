#include "server/store/file_system.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

absl::Status FileFailure(absl::string_view what, const std::string& path,
                         int error_number) {
  return core::StoreUnavailableError(
      absl::StrCat(what, " \"", path, "\": ", std::strerror(error_number)));
}

// A new directory survives power loss once its parent is synced.
absl::Status SyncDirectory(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return FileFailure("cannot open the directory", path, errno);
  const int result = fsync(fd);
  const int error_number = errno;
  close(fd);
  if (result != 0) {
    return FileFailure("cannot sync the directory", path, error_number);
  }
  return absl::OkStatus();
}

// Directory of a file or folder; "." where its path names none.
std::string DirectoryOf(const std::string& path) {
  const std::string directory =
      std::filesystem::path(path).parent_path().string();
  return directory.empty() ? std::string(".") : directory;
}

}  // namespace

absl::string_view NetworkFileSystemName(int64_t f_type) {
  switch (static_cast<uint32_t>(f_type)) {
    case 0x6969:
      return "NFS";
    case 0x517b:
    case 0xfe534d42:
      return "SMB";
    case 0xff534d42:
      return "CIFS";
    default:
      return "";
  }
}

absl::Status MakeDefaultDirectory(const std::string& path) {
  const std::filesystem::path directory =
      std::filesystem::path(path).parent_path();
  std::filesystem::path part;
  for (const std::filesystem::path& name : directory) {
    part /= name;
    if (mkdir(part.c_str(), 0700) != 0 && errno != EEXIST) {
      // One that is there may be on a file system that only reads.
      const int error_number = errno;
      struct stat info;
      if (stat(part.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) continue;
      return FileFailure("cannot create the directory", part.string(),
                         error_number);
    }
  }
  struct stat info;
  if (stat(directory.c_str(), &info) != 0) {
    return FileFailure("cannot look at the directory", directory.string(),
                       errno);
  }
  if ((info.st_mode & 0077) != 0 && info.st_uid == geteuid() &&
      chmod(directory.c_str(), info.st_mode & 0700) != 0) {
    return FileFailure("cannot protect the directory", directory.string(),
                       errno);
  }
  return absl::OkStatus();
}

absl::Status CreateStoreFile(const std::string& path) {
  const int fd =
      open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  // SQLite says what is wrong with one that is there.
  if (fd < 0 && errno != EEXIST) {
    return FileFailure("cannot create the store", path, errno);
  }
  if (fd >= 0) close(fd);
  return absl::OkStatus();
}

bool ReserveSpace(const std::string& path, int64_t bytes) {
  const int fd =
      open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) return false;
  const bool is_there = posix_fallocate(fd, 0, bytes) == 0;
  close(fd);
  if (!is_there) unlink(path.c_str());
  return is_there;
}

absl::Status PrepareStoreDirectory(const std::string& path) {
  const std::string directory = DirectoryOf(path);
  if (mkdir(directory.c_str(), 0700) == 0) {
    if (absl::Status status = SyncDirectory(DirectoryOf(directory));
        !status.ok()) {
      return status;
    }
  } else if (errno != EEXIST) {
    return FileFailure("cannot create the store's directory", directory, errno);
  }
  struct statfs info;
  if (statfs(directory.c_str(), &info) != 0) {
    return FileFailure("cannot look at the store's directory", directory,
                       errno);
  }
  const absl::string_view network = NetworkFileSystemName(info.f_type);
  if (!network.empty()) {
    return core::StoreUnavailableError(
        absl::StrCat("\"", path, "\" is on a network file system (", network,
                     "); expected a local one"));
  }
  return absl::OkStatus();
}

}  // namespace quantd::server
