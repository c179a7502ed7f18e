#include "client/files/errors.h"

#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace quantd::files {

absl::Status FileUnreadableError(const std::string& path, int error_number) {
  return absl::ErrnoToStatus(error_number,
                             absl::StrCat("FILE_UNREADABLE: ", path));
}

absl::Status FileUnwritableError(const std::string& path, int error_number) {
  return absl::ErrnoToStatus(error_number,
                             absl::StrCat("FILE_UNWRITABLE: ", path));
}

absl::Status FileExistsError(const std::string& path) {
  return absl::AlreadyExistsError(
      absl::StrCat("FILE_EXISTS: ", path, " is there already"));
}

absl::Status FileMalformedError(absl::string_view path,
                                absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("FILE_MALFORMED: ", path, ": ", what));
}

absl::Status FileUnsupportedError(absl::string_view path,
                                  absl::string_view what) {
  return absl::UnimplementedError(
      absl::StrCat("FILE_UNSUPPORTED: ", path, ": ", what));
}

}  // namespace quantd::files
