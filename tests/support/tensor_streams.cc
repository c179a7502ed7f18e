#include "tests/support/tensor_streams.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"

namespace quantd::testing {
namespace {

// A hanging server fails a test instead of hanging it.
constexpr std::chrono::seconds kDeadline(120);

template <typename Header>
uint64_t RangeBegin(const Header& header) {
  return header.has_range() ? header.range().begin_bytes() : 0;
}
uint64_t RangeBegin(const v1::CalibrateHeader&) { return 0; }
uint64_t RangeBegin(const v1::EvaluateHeader&) { return 0; }

// Writes the tensor on a thread of its own, because the server stops reading
// while its answer is not read.
template <typename Request, typename Response, typename Header>
absl::Status Exchange(
    std::unique_ptr<grpc::ClientReaderWriter<Request, Response>> stream,
    const Header& header, absl::string_view data, int64_t chunk_bytes,
    absl::FunctionRef<absl::Status(const Response&)> read) {
  std::thread writer([&] {
    const int64_t size = static_cast<int64_t>(data.size());
    const int64_t step = chunk_bytes == 0 ? size : chunk_bytes;
    Request request;
    *request.mutable_header() = header;
    int64_t begin = 0;
    do {
      const int64_t bytes = std::min(step, size - begin);
      request.set_offset(RangeBegin(header) + begin);
      request.set_data(data.data() + begin, bytes);
      if (!stream->Write(request)) return;
      request.clear_header();
      begin += bytes;
    } while (begin < size);
    stream->WritesDone();
  });
  absl::Status result;
  bool complete = false;
  Response response;
  while (stream->Read(&response)) {
    if (!result.ok()) continue;
    if (complete) {
      result = absl::InternalError("an answer after the tensor's end");
    } else if (response.has_error()) {
      const v1::TensorError& error = response.error();
      result =
          absl::Status(static_cast<absl::StatusCode>(error.code()),
                       absl::StrCat(error.reason(), ": ", error.message()));
    } else {
      result = read(response);
      complete = response.has_summary();
    }
  }
  writer.join();
  const absl::Status status = FromGrpcStatus(stream->Finish());
  if (!result.ok()) return result;
  if (!status.ok()) return status;
  return complete ? absl::OkStatus()
                  : absl::InternalError("the answer has no summary");
}

// For Quantize and Dequantize: header, contiguous data, summary.
template <typename Response, typename Answer>
absl::Status Collect(const Response& response, std::string Answer::*bytes,
                     bool* has_header, Answer* answer) {
  if (response.has_header()) {
    if (*has_header) return absl::InternalError("two headers");
    *has_header = true;
    answer->header = response.header();
  }
  if (!response.data().empty()) {
    if (!*has_header) return absl::InternalError("data before the header");
    std::string& gathered = answer->*bytes;
    const uint64_t expected =
        answer->header.range().begin_bytes() + gathered.size();
    if (response.offset() != expected) {
      return absl::InternalError(absl::StrCat("data at ", response.offset(),
                                              ", expected at ", expected));
    }
    gathered += response.data();
  }
  if (response.has_summary()) {
    if (!*has_header) return absl::InternalError("summary before the header");
    answer->summary = response.summary();
  }
  return absl::OkStatus();
}

template <typename Response, typename Summary>
absl::Status TakeSummary(const Response& response, Summary* summary) {
  if (!response.has_summary()) return absl::InternalError("an empty message");
  *summary = response.summary();
  return absl::OkStatus();
}

void SetDeadline(grpc::ClientContext* context) {
  context->set_deadline(std::chrono::system_clock::now() + kDeadline);
}

}  // namespace

absl::Status FromGrpcStatus(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                      status.error_message());
}

absl::StatusOr<v1::CalibrateSummary> Calibrate(
    v1::QuantizationService::Stub& stub, const v1::CalibrateHeader& header,
    absl::string_view data, int64_t chunk_bytes) {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::CalibrateSummary summary;
  absl::Status status = Exchange<v1::CalibrateRequest, v1::CalibrateResponse>(
      stub.Calibrate(&context), header, data, chunk_bytes,
      [&](const v1::CalibrateResponse& response) {
        return TakeSummary(response, &summary);
      });
  if (!status.ok()) return status;
  return summary;
}

absl::StatusOr<QuantizeAnswer> Quantize(v1::QuantizationService::Stub& stub,
                                        const v1::QuantizeHeader& header,
                                        absl::string_view data,
                                        int64_t chunk_bytes) {
  grpc::ClientContext context;
  SetDeadline(&context);
  QuantizeAnswer answer;
  bool has_header = false;
  absl::Status status = Exchange<v1::QuantizeRequest, v1::QuantizeResponse>(
      stub.Quantize(&context), header, data, chunk_bytes,
      [&](const v1::QuantizeResponse& response) {
        return Collect(response, &QuantizeAnswer::codes, &has_header, &answer);
      });
  if (!status.ok()) return status;
  return answer;
}

absl::StatusOr<DequantizeAnswer> Dequantize(v1::QuantizationService::Stub& stub,
                                            const v1::DequantizeHeader& header,
                                            absl::string_view codes,
                                            int64_t chunk_bytes) {
  grpc::ClientContext context;
  SetDeadline(&context);
  DequantizeAnswer answer;
  bool has_header = false;
  absl::Status status = Exchange<v1::DequantizeRequest, v1::DequantizeResponse>(
      stub.Dequantize(&context), header, codes, chunk_bytes,
      [&](const v1::DequantizeResponse& response) {
        return Collect(response, &DequantizeAnswer::reals, &has_header,
                       &answer);
      });
  if (!status.ok()) return status;
  return answer;
}

absl::StatusOr<v1::EvaluateSummary> Evaluate(
    v1::QuantizationService::Stub& stub, const v1::EvaluateHeader& header,
    absl::string_view data, int64_t chunk_bytes) {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::EvaluateSummary summary;
  absl::Status status = Exchange<v1::EvaluateRequest, v1::EvaluateResponse>(
      stub.Evaluate(&context), header, data, chunk_bytes,
      [&](const v1::EvaluateResponse& response) {
        return TakeSummary(response, &summary);
      });
  if (!status.ok()) return status;
  return summary;
}

v1::QuantizeRequest OpenTensorRequest() {
  v1::QuantizeRequest request;
  v1::QuantizeHeader* const header = request.mutable_header();
  header->mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  header->mutable_tensor()->add_shape(4);
  header->mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT8);
  header->mutable_encoding()->add_scale(1);
  request.set_data(std::string(4, '\0'));
  return request;
}

}  // namespace quantd::testing
