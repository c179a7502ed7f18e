// The one place where names that clients send are checked.

#ifndef QUANTD_SERVER_WIRE_NAMES_H_
#define QUANTD_SERVER_WIRE_NAMES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quantd/v1/tensor.pb.h"
#include "server/wire/encoding_key.h"

namespace quantd::server {

// The meaning of an empty revision.
inline constexpr absl::string_view kDefaultRevision = "main";

// [A-Za-z0-9._/-]{1,256}, no "..", no leading "/". `kind` opens the error's
// text: "model", "revision".
// Errors: NAME_INVALID.
absl::Status CheckPathName(absl::string_view kind, absl::string_view name);

// Valid UTF-8 of 1 to 1,024 bytes without control characters.
// Errors: NAME_INVALID.
absl::Status CheckTensorName(absl::string_view name);

// The name, or the bytes of what can't be one, escaped.
std::string ShownName(absl::string_view name);

// A name where an encoding is looked up or stored: model and tensor are
// required. Errors: NAME_INVALID at field "model", "revision" or "tensor".
absl::StatusOr<EncodingKey> KeyFromProto(const v1::TensorName& name);

// A name that only comes back in the answer: what is given must be valid.
// Errors: as KeyFromProto.
absl::Status CheckOptionalName(const v1::TensorName& name);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_WIRE_NAMES_H_
