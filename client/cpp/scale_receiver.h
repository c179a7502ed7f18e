// Gathers the scales that come beside the codes of a tensor.

#ifndef QUANTD_CLIENT_CPP_SCALE_RECEIVER_H_
#define QUANTD_CLIENT_CPP_SCALE_RECEIVER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/exchange.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor_stream.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::internal {

// Not thread-safe.
class ScaleReceiver {
 public:
  // Scales without a sink go into buffers. `sinks` must stay.
  explicit ScaleReceiver(const ScaleSinks& sinks) : sinks_(sinks) {}

  // Begins anew with the encoding of an answer's header. Where the encoding has
  // its scales itself, takes them out of it.
  // Errors: RESPONSE_MALFORMED; those of the sinks.
  absl::Status Begin(absl::Span<const int64_t> shape, Encoding* encoding);
  // Takes a serialized v1::ScaleChunk.
  // Errors: RESPONSE_MALFORMED.
  absl::Status Accept(absl::string_view chunk);
  // Checks that all scales came, and as they were sent.
  // Errors: RESPONSE_MALFORMED; CHECKSUM_MISMATCH; those of the sinks.
  absl::Status Finish(const v1::QuantizeSummary& summary) const;

  // The scales that went to no sink.
  ScaleBuffers TakeBuffers() { return std::move(buffers_); }

 private:
  // One kind of scales.
  struct Part {
    // Size of what goes to the sink or the buffer.
    uint64_t size_bytes = 0;
    uint64_t received_bytes = 0;
    // Hash of what came.
    Hash hash;
  };

  static void Reset(uint64_t size_bytes, Part* part);
  // Passes on bytes and notes an error of the sink.
  // Errors: RESPONSE_MALFORMED for too many.
  absl::Status Take(absl::Span<const uint8_t> bytes, const Sink& sink,
                    Part* part, Buffer* buffer);

  const ScaleSinks& sinks_;
  // Without scales.
  Encoding encoding_;
  // The scales came in the header.
  bool is_inline_ = false;
  Part scale_;
  Part zero_point_;
  Part outer_scale_;
  ScaleBuffers buffers_;
  absl::Status sink_status_;
};

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_SCALE_RECEIVER_H_
