// One tensor up, its whole answer down, over the ordinary generated stubs.

#ifndef QUANTD_TESTS_SUPPORT_TENSOR_STREAMS_H_
#define QUANTD_TESTS_SUPPORT_TENSOR_STREAMS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/quantization_service.grpc.pb.h"

namespace quantd::testing {

// A tensor's answer: everything between two others on a stream.
struct QuantizeAnswer {
  v1::QuantizeResponseHeader header;
  std::string codes;
  v1::QuantizeSummary summary;
};

struct DequantizeAnswer {
  v1::DequantizeResponseHeader header;
  std::string reals;
  v1::DequantizeSummary summary;
};

// The status of a call as Abseil has it.
absl::Status FromGrpcStatus(const grpc::Status& status);

// Each opens a stream, sends `data` in chunks of `chunk_bytes` (0: all of it
// in the header's message), reads the whole answer and ends the stream. `data`
// are the bytes of the header's range, if it has one. A tensor that failed is
// the error's code and "REASON: message". An answer that breaks the protocol
// (offsets with gaps, two headers, two summaries) is INTERNAL.
absl::StatusOr<v1::CalibrateSummary> Calibrate(
    v1::QuantizationService::Stub& stub, const v1::CalibrateHeader& header,
    absl::string_view data, int64_t chunk_bytes = 0);
absl::StatusOr<QuantizeAnswer> Quantize(v1::QuantizationService::Stub& stub,
                                        const v1::QuantizeHeader& header,
                                        absl::string_view data,
                                        int64_t chunk_bytes = 0);
absl::StatusOr<DequantizeAnswer> Dequantize(v1::QuantizationService::Stub& stub,
                                            const v1::DequantizeHeader& header,
                                            absl::string_view codes,
                                            int64_t chunk_bytes = 0);
absl::StatusOr<v1::EvaluateSummary> Evaluate(
    v1::QuantizationService::Stub& stub, const v1::EvaluateHeader& header,
    absl::string_view data, int64_t chunk_bytes = 0);

// The header of a tensor of Quantize and the first of its four elements, which
// the server answers. The tensor stays open.
v1::QuantizeRequest OpenTensorRequest();

// The elements of `bytes`, and the bytes of `values`, as they are in memory.
template <typename T>
std::vector<T> FromBytes(absl::string_view bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  bytes.copy(reinterpret_cast<char*>(values.data()), values.size() * sizeof(T));
  return values;
}
template <typename T>
std::string ToBytes(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(T));
}

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_TENSOR_STREAMS_H_
