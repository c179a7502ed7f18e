// The errors of reading and writing files, one function per error.
//
// A status has the message "REASON: path: what was expected and what came".

#ifndef QUANTD_CLIENT_FILES_ERRORS_H_
#define QUANTD_CLIENT_FILES_ERRORS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace quantd::files {

// The file could not be opened or read. The code follows errno.
// FILE_UNREADABLE.
absl::Status FileUnreadableError(const std::string& path, int error_number);

// The file could not be written. The code follows errno. FILE_UNWRITABLE.
absl::Status FileUnwritableError(const std::string& path, int error_number);

// The file is there already and is not to be replaced. ALREADY_EXISTS /
// FILE_EXISTS.
absl::Status FileExistsError(const std::string& path);

// The file is not what its format demands. INVALID_ARGUMENT / FILE_MALFORMED.
absl::Status FileMalformedError(absl::string_view path, absl::string_view what);

// The file is sound but has what quantd does not read or write.
// UNIMPLEMENTED / FILE_UNSUPPORTED.
absl::Status FileUnsupportedError(absl::string_view path,
                                  absl::string_view what);

// The files that this one is to be made of are not all there, or do not belong
// together. FAILED_PRECONDITION / FILE_INCOMPLETE.
absl::Status FileIncompleteError(absl::string_view path,
                                 absl::string_view what);

// The file was changed while it was read. `tensor` is one that it does not have
// any more as it was; it may be empty. ABORTED / FILE_CHANGED.
absl::Status FileChangedError(absl::string_view path, absl::string_view tensor);

// For a file that does not begin as its format demands: ", got " and what it
// is, where that can be told; otherwise empty.
std::string GotInstead(absl::Span<const uint8_t> bytes);

// A name from a file for an error's text: in quotes, escaped so that no file
// can write to the terminal, and cut after about 200 bytes, between two
// characters of UTF-8.
std::string QuotedName(absl::string_view name);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_ERRORS_H_
