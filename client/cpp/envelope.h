// The protobuf envelope of the four streams, written and read by hand so that
// the payload is neither copied on the way up nor more than once on the way
// down.
//
// All requests of quantd.v1.QuantizationService are {1: header, 2: offset,
// 3: data, 4: shared, 5: scales}; all responses {1: header, 2: offset, 3: data,
// 4: summary, 5: error, 6: scales}.

#ifndef QUANTD_CLIENT_CPP_ENVELOPE_H_
#define QUANTD_CLIENT_CPP_ENVELOPE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"

namespace quantd::internal {

// Counts the pieces of the caller's memory that gRPC still refers to.
// Thread-safe.
class PayloadReferences {
 public:
  void Add() ABSL_LOCKS_EXCLUDED(mutex_);
  void Remove() ABSL_LOCKS_EXCLUDED(mutex_);
  // True once gRPC refers to none: the memory may go away. False when that
  // takes longer than `timeout`.
  bool AwaitNone(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  absl::Mutex mutex_;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
};

// A piece of the caller's memory. A large one is referenced, not copied, and
// counted in `references` until gRPC lets go of it.
grpc::Slice SliceOf(absl::Span<const uint8_t> data,
                    const std::shared_ptr<PayloadReferences>& references);

// A request message. `header` is the serialized header message, empty for a
// message without one; each of `scales` is what one field of scales has.
grpc::ByteBuffer EncodeRequest(absl::string_view header,
                               absl::Span<const std::string> scales,
                               uint64_t offset_bytes, const grpc::Slice& data);

// A request message for a whole tensor, whose data are where `shared`, a
// serialized quantd.v1.SharedSpan, says.
grpc::ByteBuffer EncodeSharedRequest(absl::string_view header,
                                     uint64_t offset_bytes,
                                     absl::string_view shared);

// A response message in parts. Plain value.
struct Response {
  bool has_header = false;
  bool has_summary = false;
  bool has_error = false;
  bool has_scales = false;
  // Serialized messages.
  std::string header;
  std::string summary;
  std::string error;
  std::string scales;
  uint64_t offset_bytes = 0;
  // Pieces of the payload in order; they point into `slices`.
  std::vector<absl::Span<const uint8_t>> data;
  size_t data_size_bytes = 0;
  std::vector<grpc::Slice> slices;
};

// Reads a response in place. Fields may come in any order, unknown ones are
// skipped, a repeated message field is merged: as protobuf does.
// Errors: RESPONSE_MALFORMED when it is not protobuf.
absl::Status DecodeResponse(const grpc::ByteBuffer& buffer, Response* response);

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_ENVELOPE_H_
