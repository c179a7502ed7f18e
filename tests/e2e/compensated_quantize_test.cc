// Rounding that makes up for its errors: what is told before the upload.

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "tests/support/metric_value.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"

namespace quantd::testing::compensated_quantize_test {
namespace {

constexpr int64_t kFeatures = 1024;
constexpr int64_t kRows = 64;
// What rounding takes beside the weight: its Gram matrix, and that of float64.
constexpr int64_t kWorkBytes = 12 * kFeatures * kFeatures;

server::ServerOptions RoomForOne(absl::Duration wait) {
  server::ServerOptions options;
  options.limits.memory_budget_bytes = 2 * kWorkBytes - (int64_t{2} << 20);
  options.limits.memory_wait = wait;
  return options;
}

class CompensatedQuantizeTest : public ::testing::Test {
 protected:
  explicit CompensatedQuantizeTest(
      absl::Duration memory_wait = absl::Milliseconds(10))
      : server_(RoomForOne(memory_wait)), weight_(kRows * kFeatures) {
    for (size_t i = 0; i < weight_.size(); ++i) {
      weight_[i] = std::sin(static_cast<float>(i));
    }
  }

  template <typename Header>
  static void Describe(const std::string& tensor, int64_t rows,
                       int64_t features, Header* header) {
    header->mutable_tensor()->mutable_name()->set_model("net");
    header->mutable_tensor()->mutable_name()->set_tensor(tensor);
    header->mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
    header->mutable_tensor()->add_shape(rows);
    header->mutable_tensor()->add_shape(features);
  }

  void Contribute(const std::string& tensor, int64_t features) {
    v1::CalibrateHeader header;
    Describe(tensor, 4, features, &header);
    v1::Contribution* const contribution = header.mutable_contribution();
    contribution->set_source("a");
    contribution->set_sequence(1);
    contribution->mutable_features()->set_gram(true);
    for (int64_t i = 0; i < features; ++i) {
      contribution->mutable_features()->add_step_exponent(-10);
    }
    const std::vector<float> rows(weight_.begin(),
                                  weight_.begin() + 4 * features);
    const absl::Status status =
        Calibrate(server_.quantization(), header, ToBytes(rows), 1 << 20)
            .status();
    ASSERT_TRUE(status.ok()) << status;
    ExpectNothingHeld();
  }

  void ExpectNothingHeld() {
    EXPECT_TRUE(PollUntil(kLongEnough, [&] {
      return server_.server().memory_used_bytes() == 0;
    })) << server_.server().memory_used_bytes();
  }

  static v1::QuantizeHeader Header(const std::string& inputs) {
    v1::QuantizeHeader header;
    Describe("w", kRows, kFeatures, &header);
    header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT4);
    header.mutable_rounding()->set_method(v1::ROUNDING_METHOD_COMPENSATED);
    header.mutable_rounding()->mutable_inputs()->set_tensor(inputs);
    return header;
  }

  // Sends the header with a chunk of the tensor.
  struct Begun {
    explicit Begun(v1::QuantizationService::Stub& stub,
                   const v1::QuantizeHeader& header, const std::string& data)
        : stream(stub.Quantize(&context)) {
      v1::QuantizeRequest request;
      *request.mutable_header() = header;
      request.set_data(data);
      EXPECT_TRUE(stream->Write(request));
    }
    ~Begun() {
      context.TryCancel();
      stream->Finish();
    }
    // Of the first answer, which comes though the tensor is not whole.
    std::string Reason() {
      v1::QuantizeResponse response;
      EXPECT_TRUE(stream->Read(&response));
      return response.error().reason();
    }

    grpc::ClientContext context;
    std::unique_ptr<
        grpc::ClientReaderWriter<v1::QuantizeRequest, v1::QuantizeResponse>>
        stream;
  };

  std::unique_ptr<Begun> Begin(const std::string& inputs,
                               int64_t chunk_elements = kFeatures) {
    const std::vector<float> chunk(weight_.begin(),
                                   weight_.begin() + chunk_elements);
    return std::make_unique<Begun>(server_.quantization(), Header(inputs),
                                   ToBytes(chunk));
  }

  // Begins one that holds most of the budget.
  std::unique_ptr<Begun> BeginAndHold() {
    auto begun = Begin("x");
    EXPECT_TRUE(PollUntil(kLongEnough, [&] {
      return server_.server().memory_used_bytes() >= kWorkBytes;
    })) << server_.server().memory_used_bytes();
    return begun;
  }

  TestServer server_;
  std::vector<float> weight_;
};

TEST_F(CompensatedQuantizeTest, InputsThatDoNotFitAreToldBeforeTheUpload) {
  ASSERT_NO_FATAL_FAILURE(Contribute("narrow", 8));
  EXPECT_EQ(Begin("narrow", /*chunk_elements=*/0)->Reason(), "GRAM_INVALID");
  EXPECT_EQ(Begin("none", /*chunk_elements=*/0)->Reason(),
            "STATISTICS_NOT_FOUND");
}

TEST_F(CompensatedQuantizeTest, MemoryIsRefusedBeforeTheUpload) {
  ASSERT_NO_FATAL_FAILURE(Contribute("x", kFeatures));
  const auto first = BeginAndHold();
  EXPECT_EQ(Begin("x")->Reason(), "MEMORY_BUDGET");
}

class PatientTest : public CompensatedQuantizeTest {
 protected:
  PatientTest() : CompensatedQuantizeTest(kLongEnough) {}
};

TEST_F(PatientTest, WaitsForMemory) {
  ASSERT_NO_FATAL_FAILURE(Contribute("x", kFeatures));
  auto first = BeginAndHold();
  absl::Status status = absl::UnknownError("still under way");
  std::thread second([&] {
    status =
        Quantize(server_.quantization(), Header("x"), ToBytes(weight_), 1 << 20)
            .status();
  });
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    return MetricValue(server_.metrics(), "quantd_active_tensors") == 2;
  }));
  first.reset();
  second.join();
  EXPECT_TRUE(status.ok()) << status;
  ExpectNothingHeld();
}

}  // namespace
}  // namespace quantd::testing::compensated_quantize_test
