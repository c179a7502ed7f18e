// Many tensors, one after another, on one open stream.

#ifndef QUANTD_CLIENT_CPP_TENSOR_STREAM_H_
#define QUANTD_CLIENT_CPP_TENSOR_STREAM_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/client_options.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd {

namespace internal {
class RetryingStream;
}  // namespace internal

// Takes an output piece by piece: `bytes` belong at `offset_bytes` of it. The
// pieces come in order, on a thread of the client's, which should not wait for
// long. After a retry they come again, from an earlier offset on, with the same
// bytes. Only once the result is received they are known to be right. An error
// fails the tensor.
using Sink = std::function<absl::Status(uint64_t offset_bytes,
                                        absl::Span<const uint8_t> bytes)>;

// Sinks of scales; see Scales.
struct ScaleSinks {
  Sink scale;
  Sink zero_point;
  Sink outer_scale;
};

// Source of an encoding: the service, the caller, or the data.
using EncodingSource =
    std::variant<v1::EncodingReference, Encoding, EncodingSpec>;

// Bytes [begin, end) of what goes up; `data` is only those.
struct ByteRange {
  uint64_t begin_bytes = 0;
  uint64_t end_bytes = 0;
};

struct QuantizeJob {
  Tensor tensor;
  EncodingSource source;
  // Store the encoding that the caller gave or the data had.
  bool store = false;
  v1::NanPolicy nan_policy = v1::NAN_POLICY_UNSPECIFIED;
  std::optional<ByteRange> range;
  // Leave the encoding out of the result.
  bool omit_encoding = false;
  // Memory for the codes; it must stay until the result is received. When empty
  // the result has a buffer.
  absl::Span<uint8_t> output;
  // Takes the codes in place of that, so that nobody holds them.
  Sink sink;
  // The scales come as data, not in the encoding: an encoding may then have any
  // number of them. Not with omit_encoding. A server that does not know chunks
  // is no different.
  bool scales_in_chunks = false;
  // Takes these scales; where there is none, the result has a buffer.
  ScaleSinks scale_sinks;
  // With a spec and outer scales; see v1::QuantizeHeader.outer_maximum.
  std::vector<float> outer_maximum;
  // Not each element by itself. The tensor then goes whole, not in parts; see
  // v1::QuantizeHeader.rounding.
  std::optional<v1::Rounding> rounding;
  // The scales of a source that is an encoding, in place of those in it. They
  // go up beside the elements, and must stay as long as these.
  std::optional<Scales> scales;
};

struct QuantizeResult {
  // The encoding used, its etag if it is in the store, the number of bytes.
  v1::QuantizeResponseHeader header;
  v1::QuantizeSummary summary;
  // The codes, in the job's output or in `buffer`. Empty with a sink.
  absl::Span<const uint8_t> codes;
  Buffer buffer;
  // With scales_in_chunks: those that went to no sink. WithScales puts them
  // into the header's encoding.
  ScaleBuffers scales;
};

struct DequantizeJob {
  // Its data are codes.
  Tensor tensor;
  // Not a spec.
  EncodingSource source;
  std::optional<ByteRange> range;
  bool omit_encoding = false;
  // See QuantizeJob.
  absl::Span<uint8_t> output;
  Sink sink;
  std::optional<Scales> scales;
};

struct DequantizeResult {
  v1::DequantizeResponseHeader header;
  v1::DequantizeSummary summary;
  // The reals, in the job's output or in `buffer`. Empty with a sink.
  absl::Span<const uint8_t> elements;
  Buffer buffer;
};

struct CalibrateJob {
  Tensor tensor;
  // Without one only the statistics are answered.
  std::optional<EncodingSpec> spec;
  // Add the tensor to the statistics that the service keeps; see
  // v1::Contribution. A retry counts once. Send the contributions of one source
  // to one tensor on one stream: it keeps their order, and sends the next one
  // after the result of the last. On two streams the later one may arrive
  // first; the other is then a duplicate and does not count.
  std::optional<v1::Contribution> contribution;
};

using CalibrateResult = v1::CalibrateSummary;

struct EvaluateCandidate {
  EncodingSource source;
  // Comes back with the metrics.
  std::string label;
  // See QuantizeJob.
  std::vector<float> outer_maximum = {};
  std::optional<Scales> scales = std::nullopt;
};

// The elements that a tensor is compared with, of its shape. They are taken to
// be exact.
struct Reference {
  ElementType element_type = ElementType::kFloat32;
  // See Tensor.
  absl::Span<const uint8_t> data;
};

struct EvaluateJob {
  Tensor tensor;
  std::vector<EvaluateCandidate> candidates;
  // Answer the metrics of every scale index as well.
  bool per_scale_index = false;
  // Answer how values and errors spread as well.
  bool with_distribution = false;
  // Leave the encodings of specs out of the result. A spec whose scales depend
  // on their own block alone is then measured while the tensor arrives.
  bool omit_encodings = false;
  // Compare the tensor with this instead; there are no candidates. Where the
  // types differ, both go up in one that holds them exactly.
  std::optional<Reference> reference;
  // The fields of v1::ErrorMetrics to answer, besides the counts; the others
  // are then 0. Empty: all.
  std::vector<v1::ErrorMetric> metrics;
  // Answer the error at the output of the layer as well; see
  // v1::EvaluateHeader.inputs.
  std::optional<TensorName> inputs;
};

using EvaluateResult = v1::EvaluateSummary;

// Sends tensors and receives their results in the same order. The tensors'
// data, and outputs, are used in place: they must stay until their result was
// received or the stream is gone. An error of one tensor leaves the others
// alone. Memory: one chunk each way besides what the caller holds.
//
// Not thread-safe.
template <typename Job, typename Result>
class TensorStream {
 public:
  explicit TensorStream(std::unique_ptr<internal::RetryingStream> stream);
  // Cancels what was not received.
  ~TensorStream();
  TensorStream(const TensorStream&) = delete;
  TensorStream& operator=(const TensorStream&) = delete;

  // Starts to send and does not wait. Errors come with the result.
  void Send(const Job& job) { Send(job, /*is_last=*/false); }
  // Sends the last tensor; nothing may be sent after it. Saves a round trip.
  void SendLast(const Job& job) { Send(job, /*is_last=*/true); }

  // The result of the oldest tensor.
  // Errors: of that tensor; or, for all that were sent, of the stream.
  // ARGUMENT_INVALID when there is none.
  absl::StatusOr<Result> Receive();

  // Sent and not received.
  int64_t pending_count() const;

 private:
  void Send(const Job& job, bool is_last);

  std::unique_ptr<internal::RetryingStream> stream_;
};

using QuantizeStream = TensorStream<QuantizeJob, QuantizeResult>;
using DequantizeStream = TensorStream<DequantizeJob, DequantizeResult>;
using CalibrateStream = TensorStream<CalibrateJob, CalibrateResult>;
using EvaluateStream = TensorStream<EvaluateJob, EvaluateResult>;

}  // namespace quantd

#endif  // QUANTD_CLIENT_CPP_TENSOR_STREAM_H_
