#include "client/files/errors.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

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

absl::Status FileIncompleteError(absl::string_view path,
                                 absl::string_view what) {
  return absl::FailedPreconditionError(
      absl::StrCat("FILE_INCOMPLETE: ", path, ": ", what));
}

absl::Status FileChangedError(absl::string_view path,
                              absl::string_view tensor) {
  const std::string of_tensor =
      tensor.empty()
          ? ""
          : absl::StrCat(": tensor ", QuotedName(tensor), ": the file");
  return absl::AbortedError(
      absl::StrCat("FILE_CHANGED: ", path, of_tensor,
                   " was changed while it was read; nothing that was made of "
                   "it is kept"));
}

std::string GotInstead(absl::Span<const uint8_t> bytes) {
  constexpr size_t kMostBytes = 40;
  const absl::string_view begin(reinterpret_cast<const char*>(bytes.data()),
                                std::min(bytes.size(), kMostBytes));
  if (absl::StartsWith(begin, "version https://git-lfs")) {
    return ", got a pointer of git-lfs; `git lfs pull` gets the file";
  }
  const bool is_text = !begin.empty() && absl::c_all_of(begin, [](char c) {
    return absl::ascii_isprint(static_cast<unsigned char>(c)) ||
           absl::ascii_isspace(static_cast<unsigned char>(c));
  });
  return is_text
             ? absl::StrCat(", got text that begins with ", QuotedName(begin))
             : "";
}

std::string QuotedName(absl::string_view name) {
  constexpr size_t kMostBytes = 200;
  size_t size = std::min(name.size(), kMostBytes);
  // The cut must not be within a character.
  while (size < name.size() && size > 0 && (name[size] & 0xC0) == 0x80) --size;
  return absl::StrCat("\"", absl::Utf8SafeCHexEscape(name.substr(0, size)),
                      size < name.size() ? "...\"" : "\"");
}

}  // namespace quantd::files
