// A text file read whole.

#ifndef QUANTD_CLIENT_CPP_TEXT_FILE_H_
#define QUANTD_CLIENT_CPP_TEXT_FILE_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace quantd::internal {

// Limit of what people write: specs, codebooks, configurations, certificates.
constexpr size_t kMaxTextBytes = size_t{16} << 20;
// Limit of what programs write: the encodings of a model.
constexpr size_t kMaxDocumentBytes = size_t{1} << 30;

// The bytes of a regular file. Does not wait for a writer, as of a FIFO.
// Errors: FILE_UNREADABLE; FILE_UNSUPPORTED for a folder, a pipe or a device,
// and for more than `max_bytes`.
absl::StatusOr<std::string> ReadTextFile(const std::string& path,
                                         size_t max_bytes = kMaxTextBytes);

// ReadTextFile of at most kMaxDocumentBytes; "-" is standard input, whatever
// that is.
absl::StatusOr<std::string> ReadDocument(const std::string& path);

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_TEXT_FILE_H_
