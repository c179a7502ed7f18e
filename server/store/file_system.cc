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

absl::Status Failed(absl::string_view what, const std::string& path,
                    int error_number) {
  return core::StoreUnavailableError(
      absl::StrCat(what, " \"", path, "\": ", std::strerror(error_number)));
}

// A new directory survives power loss once its parent is synced.
absl::Status SyncDirectory(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return Failed("cannot open the directory", path, errno);
  const int result = fsync(fd);
  const int error_number = errno;
  close(fd);
  if (result != 0) {
    return Failed("cannot sync the directory", path, error_number);
  }
  return absl::OkStatus();
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

absl::Status PrepareStoreDirectory(const std::string& path) {
  std::string directory = std::filesystem::path(path).parent_path().string();
  if (directory.empty()) directory = ".";
  if (mkdir(directory.c_str(), 0700) == 0) {
    std::string parent =
        std::filesystem::path(directory).parent_path().string();
    if (parent.empty()) parent = ".";
    if (absl::Status status = SyncDirectory(parent); !status.ok()) {
      return status;
    }
  } else if (errno != EEXIST) {
    return Failed("cannot create the store's directory", directory, errno);
  }
  struct statfs info;
  if (statfs(directory.c_str(), &info) != 0) {
    return Failed("cannot look at the store's directory", directory, errno);
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
