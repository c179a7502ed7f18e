// The envelope of a stream's message: {1: header, 2: offset, 3: data,
// 4: shared, 5: scales}.
//
// All four requests share it; that of Calibrate has no scales. So one parser
// serves them, and `data` stays where the transport put it. For every other
// client these are ordinary protobuf messages.

#ifndef QUANTD_SERVER_WIRE_ENVELOPE_H_
#define QUANTD_SERVER_WIRE_ENVELOPE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "grpcpp/support/byte_buffer.h"
#include "quantd/v1/shared_memory.pb.h"

namespace quantd::server {

// A message up, taken apart.
struct RequestEnvelope {
  bool has_header = false;
  // Serialized header; empty is a valid one.
  std::string header;
  uint64_t offset_bytes = 0;
  // The payload, in place, in as many pieces as it arrived in.
  absl::InlinedVector<absl::Span<const uint8_t>, 16> data;
  int64_t data_bytes = 0;
  // Span that stands for `data`, which the message then lacks.
  absl::optional<v1::SharedSpan> shared;
  // Serialized: a ScaleChunk, in parts that merge, or CandidateScales one after
  // the other.
  std::vector<std::string> scales;
};

// Parses as protobuf does: unknown fields are skipped, the last value of a
// field wins, headers that occur twice are merged. The pieces point into
// `buffer`, which must outlive them unmoved.
// Errors: MESSAGE_MALFORMED.
absl::Status ParseRequestEnvelope(grpc::ByteBuffer* buffer,
                                  RequestEnvelope* envelope);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_WIRE_ENVELOPE_H_
