#include "client/cpp/errors.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "google/protobuf/any.pb.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/status.h"

namespace quantd {
namespace {

constexpr absl::string_view kServerUnreachable = "SERVER_UNREACHABLE";
// The payload of a status that holds a duration.
constexpr absl::string_view kRetryAfter = "quantd/retry_after";
// And one that holds an UnreachableCause.
constexpr absl::string_view kCause = "quantd/cause";

// What gRPC 1.51 says, and what it means.
struct Symptom {
  absl::string_view text;
  UnreachableCause cause;
};
constexpr Symptom kSymptoms[] = {
    {"Connection refused", UnreachableCause::kNothingListens},
    {"No such file or directory", UnreachableCause::kNothingListens},
    {"DNS resolution failed", UnreachableCause::kNameUnknown},
    {"wrong version number", UnreachableCause::kNoTls},
    {"packet length too long", UnreachableCause::kNoTls},
    {"certificate verify failed", UnreachableCause::kUntrusted},
    {"is not in peer certificate", UnreachableCause::kUntrusted},
    {"Hostname Verification Check failed", UnreachableCause::kUntrusted},
    {"Failed parsing HTTP/2", UnreachableCause::kNotQuantd},
    {"Trying to connect an http1.x server", UnreachableCause::kNotQuantd},
    {"Expected SETTINGS frame", UnreachableCause::kNotQuantd},
    {"Received http2 header with status: 4", UnreachableCause::kNotQuantd},
    {"before receiving SETTINGS frame", UnreachableCause::kSilent},
    {"Handshake read failed", UnreachableCause::kSilent},
};

UnreachableCause CauseOf(absl::string_view message) {
  for (const Symptom& symptom : kSymptoms) {
    if (absl::StrContains(message, symptom.text)) return symptom.cause;
  }
  // Otherwise it was closed while it was in use.
  const bool is_new = absl::StrContains(message, "last error: ");
  for (const absl::string_view text :
       {"Socket closed", "Connection reset by peer"}) {
    if (is_new && absl::StrContains(message, text)) {
      return UnreachableCause::kClosed;
    }
  }
  return UnreachableCause::kOther;
}

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
  }
  return absl::StrCat("no answer from ", target, ": ", detail);
}

absl::Status Error(absl::StatusCode code, absl::string_view reason,
                   absl::string_view text) {
  return absl::Status(code, absl::StrCat(reason, ": ", text));
}

// Calls visit(bytes) for each length-delimited field `field` of a message, as
// far as it is one.
template <typename Visitor>
void ForEachBytes(const std::string& message, int field, Visitor&& visit) {
  using ::google::protobuf::internal::WireFormatLite;
  google::protobuf::io::CodedInputStream in(
      reinterpret_cast<const uint8_t*>(message.data()),
      static_cast<int>(message.size()));
  while (const uint32_t tag = in.ReadTag()) {
    if (tag == WireFormatLite::MakeTag(
                   field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED)) {
      std::string bytes;
      if (!WireFormatLite::ReadBytes(&in, &bytes)) return;
      visit(bytes);
    } else if (!WireFormatLite::SkipField(&in, tag)) {
      return;
    }
  }
}

// The RetryInfo {1: retry_delay} among the details of a google.rpc.Status {3:
// repeated Any details}, read by number: Debian has no package with those
// messages. Zero for none.
absl::Duration RetryDelay(const std::string& rpc_status) {
  absl::Duration retry_after = absl::ZeroDuration();
  ForEachBytes(rpc_status, 3, [&](const std::string& bytes) {
    google::protobuf::Any any;
    if (!any.ParseFromString(bytes) ||
        !absl::EndsWith(any.type_url(), "/google.rpc.RetryInfo")) {
      return;
    }
    ForEachBytes(any.value(), 1, [&](const std::string& delay_bytes) {
      google::protobuf::Duration delay;
      if (!delay.ParseFromString(delay_bytes)) return;
      retry_after =
          absl::Seconds(delay.seconds()) + absl::Nanoseconds(delay.nanos());
    });
  });
  return retry_after;
}

// What gRPC says without a word from quantd when a connection, or a proxy's to
// a replica, went away.
bool IsBroken(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsCancelled(status) ||
         (absl::IsInternal(status) &&
          absl::StrContains(status.message(), "RST_STREAM"));
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

absl::Status FromGrpcStatus(const grpc::Status& status,
                            absl::string_view target, absl::Duration timeout) {
  if (status.ok()) return absl::OkStatus();
  const absl::Status plain(static_cast<absl::StatusCode>(status.error_code()),
                           status.error_message());
  if (!ErrorReason(plain).empty()) {
    return WithRetryAfter(plain, RetryDelay(status.error_details()));
  }
  const UnreachableCause cause = CauseOf(plain.message());
  if (IsBroken(plain) || cause == UnreachableCause::kNotQuantd) {
    return ServerUnreachableError(target, plain.message(), cause);
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
  const std::string text =
      error.field().empty()
          ? error.message()
          : absl::StrCat(error.message(), " (", error.field(), ")");
  return WithRetryAfter(Error(code, reason, text),
                        absl::Milliseconds(error.retry_after_ms()));
}

}  // namespace quantd
