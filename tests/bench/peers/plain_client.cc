// The client that most people would write: generated messages on a synchronous
// stream, one thread that writes and one that reads.
//
//   plain_client PORT quantize|dequantize|calibrate SECONDS
//
// Sends tensors of 16 MiB of float32, or their codes, in chunks of 1 MiB, one
// after another on one stream, and prints what went through.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "tests/bench/peers/drive.h"

namespace quantd::bench {
namespace {

constexpr int64_t kElements = int64_t{4} << 20;
constexpr size_t kChunkBytes = size_t{1} << 20;
constexpr float kScale = 0.0247f;

void Describe(v1::TensorDescription* tensor) {
  tensor->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  tensor->add_shape(kElements);
}

void Encode(v1::Encoding* encoding) {
  encoding->set_format(v1::NUMBER_FORMAT_INT8);
  encoding->add_scale(kScale);
  encoding->set_qmin(-127);
  encoding->set_qmax(127);
}

// Payload that comes down, copied to where the caller wants it.
void Take(const std::string& data, uint64_t offset, std::string* output) {
  std::memcpy(output->data() + offset, data.data(), data.size());
}

void FillHeader(v1::QuantizeHeader* header) {
  Describe(header->mutable_tensor());
  Encode(header->mutable_encoding());
  header->set_omit_encoding(true);
}
void FillHeader(v1::DequantizeHeader* header) {
  Describe(header->mutable_tensor());
  Encode(header->mutable_encoding());
  header->set_omit_encoding(true);
}
void FillHeader(v1::CalibrateHeader* header) {
  Describe(header->mutable_tensor());
}

void TakeResponse(const v1::QuantizeResponse& response, std::string* output) {
  Take(response.data(), response.offset(), output);
}
void TakeResponse(const v1::DequantizeResponse& response, std::string* output) {
  Take(response.data(), response.offset(), output);
}
void TakeResponse(const v1::CalibrateResponse&, std::string*) {}

// `payload` is what goes up of one tensor, `output` has room for what comes
// down.
template <typename Request, typename Response>
bool Drive(grpc::ClientReaderWriter<Request, Response>* stream,
           const std::string& payload, std::string output, double seconds) {
  const Window window(seconds);
  std::thread writer([&] {
    while (!window.Over(Clock::now())) {
      Request request;
      FillHeader(request.mutable_header());
      for (size_t offset = 0; offset < payload.size(); offset += kChunkBytes) {
        request.set_offset(offset);
        request.set_data(payload.data() + offset, kChunkBytes);
        if (!stream->Write(request)) return;
        request.clear_header();
      }
    }
    stream->WritesDone();
  });
  int64_t tensors = 0;
  Response response;
  while (stream->Read(&response)) {
    TakeResponse(response, &output);
    if (response.has_summary() && window.Counts(Clock::now())) ++tensors;
  }
  writer.join();
  const grpc::Status status = stream->Finish();
  if (!status.ok()) {
    std::fprintf(stderr, "plain_client: %s\n", status.error_message().c_str());
    return false;
  }
  PrintThroughput(tensors * kElements * 4, window);
  return true;
}

// Reals of a few standard deviations, without a generator's cost.
std::string Reals() {
  std::string data(kElements * sizeof(float), '\0');
  for (int64_t i = 0; i < kElements; ++i) {
    const float value = 3.0f * std::sin(static_cast<float>(i));
    std::memcpy(data.data() + i * sizeof(float), &value, sizeof(float));
  }
  return data;
}

int Main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr,
                 "usage: plain_client PORT quantize|dequantize|calibrate "
                 "SECONDS\n");
    return 2;
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  const auto channel =
      grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", argv[1]),
                                grpc::InsecureChannelCredentials(), arguments);
  const auto stub = v1::QuantizationService::NewStub(channel);
  const absl::string_view operation = argv[2];
  const double seconds = std::atof(argv[3]);
  grpc::ClientContext context;
  bool done = false;
  if (operation == "quantize") {
    done = Drive(stub->Quantize(&context).get(), Reals(),
                 std::string(kElements, '\1'), seconds);
  } else if (operation == "dequantize") {
    done = Drive(stub->Dequantize(&context).get(), std::string(kElements, '\1'),
                 std::string(kElements * sizeof(float), '\1'), seconds);
  } else if (operation == "calibrate") {
    done = Drive(stub->Calibrate(&context).get(), Reals(), "", seconds);
  }
  return done ? 0 : 1;
}

}  // namespace
}  // namespace quantd::bench

int main(int argc, char** argv) { return quantd::bench::Main(argc, argv); }
