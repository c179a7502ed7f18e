#include "client/cpp/grpc_status.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cpp/errors.h"
#include "google/protobuf/any.pb.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/status.h"

namespace quantd::internal {
namespace {

// Texts of gRPC 1.51, and the causes that they mean.
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

// True for a status that gRPC gives, without a word from quantd, when a
// connection, or a proxy's to a replica, went away.
bool IsBroken(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsCancelled(status) ||
         (absl::IsInternal(status) &&
          absl::StrContains(status.message(), "RST_STREAM"));
}

}  // namespace

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

}  // namespace quantd::internal
