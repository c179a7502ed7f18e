// Memory that a message will take, told before it is parsed.

#ifndef QUANTD_SERVER_WIRE_PARSED_BYTES_H_
#define QUANTD_SERVER_WIRE_PARSED_BYTES_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "google/protobuf/descriptor.h"
#include "grpcpp/support/byte_buffer.h"

namespace quantd::server {

// At least what `buffer` takes in memory as a message of `type`. Two bytes of a
// message may stand for hundreds: an empty element of a repeated field, or a
// field that nobody knows. Looks at every field once and allocates nothing.
// Errors: MESSAGE_MALFORMED; REQUEST_TOO_LARGE as soon as it is more than
// `limit_bytes`.
absl::StatusOr<int64_t> ParsedBytes(grpc::ByteBuffer* buffer,
                                    const google::protobuf::Descriptor& type,
                                    int64_t limit_bytes);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_WIRE_PARSED_BYTES_H_
