#include "server/wire/status.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "google/protobuf/any.pb.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/wire_format_lite.h"

namespace quantd::server {
namespace {

using ::google::protobuf::internal::WireFormatLite;
using ::google::protobuf::io::CodedOutputStream;
using ::google::protobuf::io::StringOutputStream;

// Writes the few fields of google.rpc's details by number: Debian has no
// package with those messages.
class MessageWriter {
 public:
  MessageWriter& String(int field, absl::string_view value) {
    WireFormatLite::WriteBytes(field, std::string(value), &out_);
    return *this;
  }
  MessageWriter& Int32(int field, int32_t value) {
    WireFormatLite::WriteInt32(field, value, &out_);
    return *this;
  }
  std::string Take() {
    out_.Trim();
    return std::move(bytes_);
  }

 private:
  std::string bytes_;
  StringOutputStream stream_{&bytes_};
  CodedOutputStream out_{&stream_};
};

std::string PackAny(absl::string_view type, std::string value) {
  google::protobuf::Any any;
  any.set_type_url(absl::StrCat("type.googleapis.com/google.rpc.", type));
  any.set_value(std::move(value));
  return any.SerializeAsString();
}

// google.rpc.Status {1: code, 2: message, 3: repeated Any details}.
std::string RpcStatus(const absl::Status& status) {
  MessageWriter out;
  out.Int32(1, static_cast<int32_t>(status.code())).String(2, status.message());
  // ErrorInfo {1: reason, 2: domain}.
  out.String(3, PackAny("ErrorInfo", MessageWriter()
                                         .String(1, core::ErrorReason(status))
                                         .String(2, "quantd")
                                         .Take()));
  if (const std::string field = core::ErrorField(status); !field.empty()) {
    // BadRequest {1: FieldViolation {1: field, 2: description}}.
    const std::string violation = MessageWriter()
                                      .String(1, field)
                                      .String(2, core::ErrorText(status))
                                      .Take();
    out.String(
        3, PackAny("BadRequest", MessageWriter().String(1, violation).Take()));
  }
  if (const absl::Duration retry = core::ErrorRetryAfter(status);
      retry > absl::ZeroDuration()) {
    google::protobuf::Duration delay;
    delay.set_seconds(absl::ToInt64Seconds(retry));
    delay.set_nanos(static_cast<int32_t>(
        absl::ToInt64Nanoseconds(retry % absl::Seconds(1))));
    // RetryInfo {1: retry_delay}.
    out.String(
        3,
        PackAny("RetryInfo",
                MessageWriter().String(1, delay.SerializeAsString()).Take()));
  }
  return out.Take();
}

// A status goes out in trailers, of which clients take 8 KiB by default, as the
// percent-encoded message and, twice, in base64: what a message quotes of the
// request must not make them overflow.
constexpr size_t kMaxMessageBytes = 1024;

// The beginning of `text`, cut where a UTF-8 sequence ends.
absl::string_view Beginning(absl::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  size_t size = max_bytes;
  while (size > 0 && (static_cast<uint8_t>(text[size]) & 0xC0) == 0x80) --size;
  return text.substr(0, size);
}

// Status that clients are told: it always has a reason, and a bounded size.
absl::Status PrintableStatus(const absl::Status& status) {
  const bool has_reason = !core::ErrorReason(status).empty();
  std::string message =
      absl::StrCat(has_reason ? "" : "INTERNAL: ", status.message());
  if (message.size() > kMaxMessageBytes) {
    message = absl::StrCat(Beginning(message, kMaxMessageBytes), "...");
  }
  absl::Status shown(has_reason ? status.code() : absl::StatusCode::kInternal,
                     message);
  status.ForEachPayload(
      [&shown](absl::string_view type, const absl::Cord& payload) {
        shown.SetPayload(type, payload);
      });
  return shown;
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const absl::Status shown = PrintableStatus(status);
  return grpc::Status(static_cast<grpc::StatusCode>(shown.code()),
                      std::string(shown.message()), RpcStatus(shown));
}

v1::TensorError ToTensorError(const absl::Status& status) {
  const absl::Status shown = PrintableStatus(status);
  v1::TensorError error;
  error.set_code(static_cast<int32_t>(shown.code()));
  error.set_reason(std::string(core::ErrorReason(shown)));
  error.set_message(std::string(core::ErrorText(shown)));
  error.set_field(core::ErrorField(shown));
  error.set_retry_after_ms(static_cast<uint32_t>(
      absl::ToInt64Milliseconds(core::ErrorRetryAfter(shown))));
  return error;
}

}  // namespace quantd::server
