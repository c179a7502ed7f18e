// The errors that the client itself finds, one function per error, and those
// of the server turned into absl::Status.
//
// A status has the message "REASON: what was expected and what came", whether
// the client or the server found the error. REASON is stable; programs may
// depend on it.

#ifndef QUANTD_CLIENT_CPP_ERRORS_H_
#define QUANTD_CLIENT_CPP_ERRORS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "quantd/v1/tensor.pb.h"

namespace quantd {

// The reason of a status, e.g. "CHUNK_OFFSET"; empty when it has none.
absl::string_view ErrorReason(const absl::Status& status);

// The message without "REASON: ".
absl::string_view ErrorText(const absl::Status& status);

// Why a server could not be reached.
enum class UnreachableCause {
  // It broke off, or what gRPC says of it has no meaning here; or it is not
  // that error at all.
  kOther,
  // Nobody listens there, or there is no such socket.
  kNothingListens,
  // No address goes by that name.
  kNameUnknown,
  // It takes connections and closes them, or says nothing.
  kClosed,
  kSilent,
  // It closes them behind TLS, as one does that wants a certificate.
  kWantsCertificate,
  // It speaks something else than gRPC.
  kNotQuantd,
  // TLS on one side alone.
  kWantsTls,
  kNoTls,
  // Its certificate is of an unknown authority, or for other names.
  kUntrusted,
  // TLS cannot begin with the files that this client was given.
  kTlsFilesUnusable,
};

// No connection to the server, or it broke. UNAVAILABLE / SERVER_UNREACHABLE.
// `detail` is what gRPC says.
absl::Status ServerUnreachableError(
    absl::string_view target, absl::string_view detail,
    UnreachableCause cause = UnreachableCause::kOther);
bool IsServerUnreachable(const absl::Status& status);
UnreachableCause UnreachableCauseOf(const absl::Status& status);

// The server did not go on in time. DEADLINE_EXCEEDED / TIMEOUT.
absl::Status TimeoutError(absl::string_view target, absl::Duration timeout);

// How long the server asks to wait before a retry; zero for not at all.
absl::Duration RetryAfter(const absl::Status& status);
absl::Status WithRetryAfter(absl::Status status, absl::Duration retry_after);

// `status` with a note that it is the error of the last of several attempts.
absl::Status WithAttempts(const absl::Status& status, int attempts);

// Another encoding came under the name while a tensor was on its way. ABORTED /
// ENCODING_REPLACED.
absl::Status EncodingReplacedError(absl::string_view expected_etag,
                                   absl::string_view got_etag);

// The server shares no memory with this client. FAILED_PRECONDITION /
// SHARED_MEMORY_UNAVAILABLE.
absl::Status SharedMemoryUnavailableError(absl::string_view target,
                                          absl::string_view what);

// A call that can not be sent. INVALID_ARGUMENT / ARGUMENT_INVALID.
absl::Status ArgumentInvalidError(absl::string_view what);

// The caller's buffer is too small. INVALID_ARGUMENT / OUTPUT_TOO_SMALL.
absl::Status OutputTooSmallError(uint64_t expected_bytes, uint64_t got_bytes);

// The answer breaks the protocol. INTERNAL / RESPONSE_MALFORMED.
absl::Status ResponseMalformedError(absl::string_view what);

// The data that arrived are not those that were sent. DATA_LOSS /
// CHECKSUM_MISMATCH.
absl::Status ChecksumMismatchError(uint64_t expected, uint64_t got);

// How one tensor failed.
absl::Status FromTensorError(const v1::TensorError& error);

}  // namespace quantd

#endif  // QUANTD_CLIENT_CPP_ERRORS_H_
