#include "client/cpp/errors.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"

namespace quantd {
namespace {

constexpr absl::string_view kServerUnreachable = "SERVER_UNREACHABLE";
// The payload of a status that holds a duration.
constexpr absl::string_view kRetryAfter = "quantd/retry_after";
// And one that holds an UnreachableCause.
constexpr absl::string_view kCause = "quantd/cause";

std::string UnreachableText(absl::string_view target, UnreachableCause cause,
                            absl::string_view detail) {
  // The last clause of what gRPC says of an address or a name.
  const size_t colon = detail.rfind(": ");
  const absl::string_view last =
      colon == absl::string_view::npos ? detail : detail.substr(colon + 2);
  switch (cause) {
    case UnreachableCause::kOther:
      break;
    case UnreachableCause::kNothingListens:
      return absl::StrCat("nothing listens at ", target, " (", last, ")");
    case UnreachableCause::kNameUnknown:
      return absl::StrCat("no address is known of ", target, " (", last, ")");
    case UnreachableCause::kClosed:
      return absl::StrCat(target, " closes connections at once (", last, ")");
    case UnreachableCause::kSilent:
      return absl::StrCat(target, " takes connections and says nothing");
    case UnreachableCause::kWantsCertificate:
      return absl::StrCat(
          target,
          " closes connections after the TLS handshake, as a server does that "
          "wants a client's certificate, or another one");
    case UnreachableCause::kNotQuantd:
      return absl::StrCat("what listens at ", target, " is no gRPC server");
    case UnreachableCause::kWantsTls:
      return absl::StrCat(target,
                          " wants TLS, and this client does not use it");
    case UnreachableCause::kNoTls:
      return absl::StrCat("what listens at ", target, " does not speak TLS");
    case UnreachableCause::kUntrusted:
      return absl::StrCat(
          "the certificate of ", target,
          " is of no authority that this client knows, or for another name (",
          last, ")");
    case UnreachableCause::kTlsFilesUnusable:
      return absl::StrCat(
          "the TLS handshake with ", target,
          " cannot begin: the key is not that of the certificate, or a PEM "
          "file holds something else than its option says");
  }
  return absl::StrCat("no answer from ", target, ": ", detail);
}

absl::Status Error(absl::StatusCode code, absl::string_view reason,
                   absl::string_view text) {
  return absl::Status(code, absl::StrCat(reason, ": ", text));
}

}  // namespace

absl::string_view ErrorReason(const absl::Status& status) {
  const absl::string_view message = status.message();
  const size_t colon = message.find(": ");
  if (colon == absl::string_view::npos) return "";
  const absl::string_view reason = message.substr(0, colon);
  for (const char c : reason) {
    if (!absl::ascii_isupper(c) && !absl::ascii_isdigit(c) && c != '_') {
      return "";
    }
  }
  return reason;
}

absl::string_view ErrorText(const absl::Status& status) {
  const absl::string_view reason = ErrorReason(status);
  return reason.empty() ? status.message()
                        : status.message().substr(reason.size() + 2);
}

absl::Status ServerUnreachableError(absl::string_view target,
                                    absl::string_view detail,
                                    UnreachableCause cause) {
  absl::Status status =
      Error(absl::StatusCode::kUnavailable, kServerUnreachable,
            UnreachableText(target, cause, detail));
  status.SetPayload(kCause, absl::Cord(absl::StrCat(static_cast<int>(cause))));
  return status;
}

UnreachableCause UnreachableCauseOf(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kCause);
  int cause = 0;
  if (!payload.has_value() ||
      !absl::SimpleAtoi(std::string(*payload), &cause)) {
    return UnreachableCause::kOther;
  }
  return static_cast<UnreachableCause>(cause);
}

bool IsServerUnreachable(const absl::Status& status) {
  return absl::IsUnavailable(status) &&
         ErrorReason(status) == kServerUnreachable;
}

absl::Status TimeoutError(absl::string_view target, absl::Duration timeout) {
  return Error(absl::StatusCode::kDeadlineExceeded, "TIMEOUT",
               absl::StrCat(target, " did not go on within ",
                            absl::FormatDuration(timeout)));
}

absl::Duration RetryAfter(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kRetryAfter);
  absl::Duration retry_after = absl::ZeroDuration();
  if (payload.has_value()) {
    static_cast<void>(absl::ParseDuration(std::string(*payload), &retry_after));
  }
  return retry_after;
}

absl::Status WithRetryAfter(absl::Status status, absl::Duration retry_after) {
  if (retry_after > absl::ZeroDuration()) {
    status.SetPayload(kRetryAfter,
                      absl::Cord(absl::FormatDuration(retry_after)));
  }
  return status;
}

absl::Status WithAttempts(const absl::Status& status, int attempts) {
  if (status.ok() || attempts < 2) return status;
  absl::Status result(status.code(), absl::StrCat(status.message(), " (after ",
                                                  attempts, " attempts)"));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    result.SetPayload(url, payload);
  });
  return result;
}

absl::Status EncodingReplacedError(absl::string_view expected_etag,
                                   absl::string_view got_etag) {
  return Error(absl::StatusCode::kAborted, "ENCODING_REPLACED",
               absl::StrCat("expected the encoding ", expected_etag,
                            " for the whole tensor, got ", got_etag));
}

absl::Status SharedMemoryUnavailableError(absl::string_view target,
                                          absl::string_view what) {
  return Error(absl::StatusCode::kFailedPrecondition,
               "SHARED_MEMORY_UNAVAILABLE",
               absl::StrCat("no shared memory at ", target, ": ", what,
                            "; expected a quantd on unix:/path with "
                            "--shared-memory"));
}

absl::Status ArgumentInvalidError(absl::string_view what) {
  return Error(absl::StatusCode::kInvalidArgument, "ARGUMENT_INVALID", what);
}

absl::Status OutputTooSmallError(uint64_t expected_bytes, uint64_t got_bytes) {
  return Error(
      absl::StatusCode::kInvalidArgument, "OUTPUT_TOO_SMALL",
      absl::StrCat("output needs ", expected_bytes, " bytes, got ", got_bytes));
}

absl::Status ResponseMalformedError(absl::string_view what) {
  return Error(absl::StatusCode::kInternal, "RESPONSE_MALFORMED", what);
}

absl::Status ChecksumMismatchError(uint64_t expected, uint64_t got) {
  return Error(
      absl::StatusCode::kDataLoss, "CHECKSUM_MISMATCH",
      absl::StrCat("XXH3 of the data received is ",
                   absl::Hex(got, absl::kZeroPad16), ", the server sent ",
                   absl::Hex(expected, absl::kZeroPad16)));
}

absl::Status FromTensorError(const v1::TensorError& error) {
  // Code 0 would make an error into a success.
  const absl::StatusCode code =
      error.code() > 0 && error.code() <= 16
          ? static_cast<absl::StatusCode>(error.code())
          : absl::StatusCode::kUnknown;
  const absl::string_view reason =
      error.reason().empty() ? "UNKNOWN" : absl::string_view(error.reason());
  const std::string text =
      error.field().empty()
          ? error.message()
          : absl::StrCat(error.message(), " (", error.field(), ")");
  return WithRetryAfter(Error(code, reason, text),
                        absl::Milliseconds(error.retry_after_ms()));
}

}  // namespace quantd
