// What most people would write: a synchronous gRPC server on the same protocol,
// with generated messages and one chunk at a time. The kernels are quantd's, so
// that only the services differ. Float32 tensors, encodings inline.
//
//   plain_server    prints its port and runs until it is ended

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "core/dequantize/dequantize.h"
#include "core/quantize/quantize.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "server/wire/encoding_proto.h"

namespace quantd::bench {
namespace {

constexpr core::ElementType kType = core::ElementType::kFloat32;
constexpr int64_t kRealBytes = 4;

const uint8_t* Bytes(const std::string& data) {
  return reinterpret_cast<const uint8_t*>(data.data());
}

uint8_t* MutableBytes(int64_t size, std::string* data) {
  data->resize(static_cast<size_t>(size));
  return reinterpret_cast<uint8_t*>(data->data());
}

// The layout of a header's tensor; per tensor without block sizes.
core::BlockLayout LayoutOf(const v1::TensorDescription& tensor,
                           const std::vector<int64_t>& block_size) {
  const std::vector<int64_t> shape(tensor.shape().begin(),
                                   tensor.shape().end());
  return *core::BlockLayout::Create(shape, block_size);
}

class PlainService final : public v1::QuantizationService::Service {
 public:
  grpc::Status Quantize(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::QuantizeResponse, v1::QuantizeRequest>*
          stream) override {
    v1::QuantizeRequest request;
    while (stream->Read(&request)) {
      const core::Encoding encoding =
          *server::EncodingFromProto(request.header().encoding());
      const core::BlockLayout layout =
          LayoutOf(request.header().tensor(), encoding.block_size);
      core::QuantizeCounts counts;
      v1::QuantizeResponse response;
      *response.mutable_header()->mutable_shape() =
          request.header().tensor().shape();
      response.mutable_header()->set_size_bytes(layout.element_count());
      for (int64_t done = 0;;) {
        const int64_t count =
            static_cast<int64_t>(request.data().size()) / kRealBytes;
        response.set_offset(done);
        if (!core::Quantize(encoding, layout, kType, core::NanPolicy::kDefault,
                            done, count, Bytes(request.data()),
                            MutableBytes(count, response.mutable_data()),
                            &counts, nullptr)
                 .ok()) {
          return {grpc::StatusCode::INVALID_ARGUMENT, "not finite"};
        }
        done += count;
        if (done == layout.element_count()) break;
        stream->Write(response);
        response.clear_header();
        if (!stream->Read(&request)) return grpc::Status::CANCELLED;
      }
      response.mutable_summary()->set_count(counts.total);
      stream->Write(response);
    }
    return grpc::Status::OK;
  }

  grpc::Status Dequantize(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::DequantizeResponse, v1::DequantizeRequest>*
          stream) override {
    v1::DequantizeRequest request;
    while (stream->Read(&request)) {
      const core::Encoding encoding =
          *server::EncodingFromProto(request.header().encoding());
      const core::BlockLayout layout =
          LayoutOf(request.header().tensor(), encoding.block_size);
      v1::DequantizeResponse response;
      *response.mutable_header()->mutable_shape() =
          request.header().tensor().shape();
      response.mutable_header()->set_size_bytes(layout.element_count() *
                                                kRealBytes);
      for (int64_t done = 0;;) {
        const int64_t count = static_cast<int64_t>(request.data().size());
        response.set_offset(done * kRealBytes);
        core::Dequantize(
            encoding, layout, kType, done, count, Bytes(request.data()),
            MutableBytes(count * kRealBytes, response.mutable_data()), nullptr);
        done += count;
        if (done == layout.element_count()) break;
        stream->Write(response);
        response.clear_header();
        if (!stream->Read(&request)) return grpc::Status::CANCELLED;
      }
      response.mutable_summary()->set_count(layout.element_count());
      stream->Write(response);
    }
    return grpc::Status::OK;
  }

  grpc::Status Calibrate(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::CalibrateResponse, v1::CalibrateRequest>*
          stream) override {
    v1::CalibrateRequest request;
    while (stream->Read(&request)) {
      const core::BlockLayout layout = LayoutOf(request.header().tensor(), {});
      core::TensorStatistics statistics(layout.scale_count());
      for (int64_t done = 0;;) {
        const int64_t count =
            static_cast<int64_t>(request.data().size()) / kRealBytes;
        statistics.Update(layout, kType, done, count, Bytes(request.data()),
                          nullptr);
        done += count;
        if (done == layout.element_count()) break;
        if (!stream->Read(&request)) return grpc::Status::CANCELLED;
      }
      v1::CalibrateResponse response;
      v1::TensorStatistics* const found =
          response.mutable_summary()->mutable_statistics();
      found->set_count(statistics.counts().total);
      found->set_min(statistics.overall().min);
      found->set_max(statistics.overall().max);
      stream->Write(response);
    }
    return grpc::Status::OK;
  }
};

int Main() {
  PlainService service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(),
                           &port);
  builder.RegisterService(&service);
  builder.SetMaxReceiveMessageSize(-1);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  std::printf("%d\n", port);
  std::fflush(stdout);
  server->Wait();
  return 0;
}

}  // namespace
}  // namespace quantd::bench

int main() { return quantd::bench::Main(); }
