#include "client/cpp/errors.h"

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace quantd {
namespace {

constexpr absl::string_view kServerUnreachable = "SERVER_UNREACHABLE";

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
                                    absl::string_view what) {
  return Error(absl::StatusCode::kUnavailable, kServerUnreachable,
               absl::StrCat("no answer from ", target, ": ", what));
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

absl::Status FromGrpcStatus(const grpc::Status& status,
                            absl::string_view target, absl::Duration timeout) {
  if (status.ok()) return absl::OkStatus();
  const absl::Status plain(static_cast<absl::StatusCode>(status.error_code()),
                           status.error_message());
  if (!ErrorReason(plain).empty()) return plain;
  if (absl::IsUnavailable(plain)) {
    return ServerUnreachableError(target, plain.message());
  }
  if (absl::IsDeadlineExceeded(plain)) return TimeoutError(target, timeout);
  return plain;
}

absl::Status FromTensorError(const v1::TensorError& error) {
  // Code 0 would make an error into a success.
  const absl::StatusCode code =
      error.code() > 0 && error.code() <= 16
          ? static_cast<absl::StatusCode>(error.code())
          : absl::StatusCode::kUnknown;
  const absl::string_view reason =
      error.reason().empty() ? "UNKNOWN" : absl::string_view(error.reason());
  if (error.field().empty()) return Error(code, reason, error.message());
  return Error(code, reason,
               absl::StrCat(error.message(), " (", error.field(), ")"));
}

}  // namespace quantd
