// The file system that a store sits on: its kind, directories and files.

#ifndef QUANTD_SERVER_STORE_FILE_SYSTEM_H_
#define QUANTD_SERVER_STORE_FILE_SYSTEM_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace quantd::server {

// "NFS", "SMB" or "CIFS" for the `f_type` of statfs(2); empty for what is not
// known to be on the network.
absl::string_view NetworkFileSystemName(int64_t f_type);

// Makes sure that the directory of `path` exists (its last component is
// created, mode 0700) and is not on a network file system, whose locks SQLite
// cannot trust.
// Errors: STORE_UNAVAILABLE.
absl::Status PrepareStoreDirectory(const std::string& path);

// For a store at a place that nobody named: makes all directories of `path`
// that are missing, mode 0700, and takes the last one away from others than its
// owner.
// Errors: STORE_UNAVAILABLE.
absl::Status MakeDefaultDirectory(const std::string& path);

// Creates the file, mode 0600, unless it is there; SQLite makes the files next
// to it alike.
// Errors: STORE_UNAVAILABLE.
absl::Status CreateStoreFile(const std::string& path);

// Makes a file that takes so much of the disk, mode 0600, unless it is there.
// False, and it is not there, if the disk has no room for it.
bool ReserveSpace(const std::string& path, int64_t bytes);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_FILE_SYSTEM_H_
