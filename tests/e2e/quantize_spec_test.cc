// Tensors that are quantized by a spec: what is stored, and how fine the
// search is.

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/quantization_service.pb.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"

namespace quantd::testing {
namespace {

using ::testing::HasSubstr;

class QuantizeTest : public ::testing::Test {
 protected:
  static v1::QuantizeHeader StoringHeader() {
    v1::QuantizeHeader header;
    header.mutable_tensor()->mutable_name()->set_model("net");
    header.mutable_tensor()->mutable_name()->set_tensor("weight");
    header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
    header.mutable_tensor()->add_shape(3);
    header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
    header.set_store(true);
    return header;
  }

  absl::StatusCode GetStored() {
    grpc::ClientContext context;
    v1::GetEncodingRequest request;
    *request.mutable_name() = StoringHeader().tensor().name();
    v1::GetEncodingResponse response;
    return FromGrpcStatus(
               server_.encodings().GetEncoding(&context, request, &response))
        .code();
  }

  TestServer server_;
};

TEST_F(QuantizeTest, StoresTheEncodingOfASpecWhenAsked) {
  const auto answer = Quantize(server_.quantization(), StoringHeader(),
                               ToBytes<float>({1, -127, 3}));
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_NE(answer->header.etag(), "");
  EXPECT_EQ(GetStored(), absl::StatusCode::kOk);
}

TEST_F(QuantizeTest, ATensorThatIsRejectedLeavesNothingInTheStore) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity}) {
    v1::QuantizeHeader header = StoringHeader();
    header.set_nan_policy(v1::NAN_POLICY_REJECT);
    const auto answer =
        Quantize(server_.quantization(), header, ToBytes<float>({1, bad, 3}));
    EXPECT_EQ(answer.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(answer.status().ToString(), HasSubstr("NON_FINITE_REJECTED"));
    EXPECT_EQ(GetStored(), absl::StatusCode::kNotFound) << bad;
  }
}

// 3 channels along either axis, too long to be searched directly, and a tensor
// whose scale has so many elements that its histogram is made as it arrives.
TEST_F(QuantizeTest, SearchesAsFineWithManyScalesAsWithOne) {
  const struct {
    std::vector<int64_t> shape;
    std::vector<int64_t> block_size;
  } tensors[] = {{{3, 66000}, {1, 0}}, {{66000, 3}, {0, 1}}, {{300000}, {}}};
  for (const auto& [shape, block_size] : tensors) {
    std::vector<float> values;
    std::mt19937 random(3);
    std::normal_distribution<float> normal(0, 1);
    const int64_t count = shape.size() == 1 ? shape[0] : shape[0] * shape[1];
    for (int64_t i = 0; i < count; ++i) values.push_back(normal(random));
    v1::QuantizeHeader header = StoringHeader();
    header.mutable_tensor()->mutable_shape()->Assign(shape.begin(),
                                                     shape.end());
    header.mutable_spec()->mutable_block_size()->Assign(block_size.begin(),
                                                        block_size.end());
    v1::EvaluateHeader candidates;
    *candidates.mutable_tensor() = header.tensor();
    std::vector<v1::Encoding> found;
    for (const uint32_t bits : {0, 7, 3}) {
      v1::EncodingSpec& spec = *header.mutable_spec();
      spec.set_method(v1::CALIBRATION_METHOD_MSE);
      spec.set_search_steps(16);
      spec.set_mantissa_bits(bits);
      *candidates.add_candidates()->mutable_spec() = spec;
      for (const int64_t chunk_bytes : {0, 999 * 4}) {
        const auto answer = Quantize(server_.quantization(), header,
                                     ToBytes(values), chunk_bytes);
        ASSERT_TRUE(answer.ok()) << answer.status();
        EXPECT_EQ(answer->header.mantissa_bits(), bits == 0 ? 7 : bits);
        if (chunk_bytes == 0) found.push_back(answer->header.encoding());
        EXPECT_EQ(answer->header.encoding().SerializeAsString(),
                  found.back().SerializeAsString());
      }
    }
    EXPECT_EQ(found[0].SerializeAsString(), found[1].SerializeAsString());
    EXPECT_NE(found[0].SerializeAsString(), found[2].SerializeAsString());
    header.mutable_spec()->set_method(v1::CALIBRATION_METHOD_MIN_MAX);
    *candidates.add_candidates()->mutable_spec() = header.spec();
    const auto summary =
        Evaluate(server_.quantization(), candidates, ToBytes(values));
    ASSERT_TRUE(summary.ok()) << summary.status();
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(summary->candidates(i).encoding().SerializeAsString(),
                found[i].SerializeAsString());
      EXPECT_EQ(summary->candidates(i).mantissa_bits(), i == 2 ? 3 : 7);
    }
    EXPECT_EQ(summary->candidates(3).mantissa_bits(), 0);
  }
}

TEST_F(QuantizeTest, StatisticsDecideHowFineTheirEncodingsAreSearched) {
  v1::CalibrateHeader header;
  *header.mutable_tensor() = StoringHeader().tensor();
  header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  header.mutable_spec()->set_method(v1::CALIBRATION_METHOD_MSE);
  const std::string data = ToBytes<float>({1, -127, 3});
  auto summary = Calibrate(server_.quantization(), header, data);
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(summary->prediction().mantissa_bits(), 7);
  header.mutable_spec()->set_mantissa_bits(4);
  summary = Calibrate(server_.quantization(), header, data);
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(summary->prediction().mantissa_bits(), 4);
  header.mutable_contribution()->set_source("a");
  header.mutable_contribution()->set_sequence(1);
  header.mutable_contribution()->set_mantissa_bits(3);
  summary = Calibrate(server_.quantization(), header, data);
  EXPECT_THAT(summary.status().ToString(),
              HasSubstr("METHOD_INVALID: mantissa_bits is 4; the statistics "
                        "have 3, expected no more than that"));
  header.mutable_spec()->set_mantissa_bits(11);
  summary = Calibrate(server_.quantization(), header, data);
  EXPECT_THAT(summary.status().ToString(), HasSubstr("METHOD_INVALID"));
}

// Long rows, which are searched as they come: two at a time, however many
// threads there are.
TEST(SearchMemoryTest, FollowsTheRowsThatComeTogether) {
  server::ServerOptions options;
  options.threads = 64;
  options.limits.memory_budget_bytes = 48 << 20;
  TestServer server(options);
  constexpr int64_t kRows = 64;
  constexpr int64_t kColumns = 53248;
  std::vector<float> values(kRows * kColumns);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i * i % 1009) - 504;
  }
  const std::string data = ToBytes(values);
  v1::TensorDescription tensor;
  tensor.set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  tensor.add_shape(kRows);
  tensor.add_shape(kColumns);
  v1::EncodingSpec spec;
  spec.set_format(v1::NUMBER_FORMAT_INT8);
  spec.set_method(v1::CALIBRATION_METHOD_MSE);
  spec.add_block_size(1);
  spec.add_block_size(0);

  v1::QuantizeHeader quantize;
  *quantize.mutable_tensor() = tensor;
  *quantize.mutable_spec() = spec;
  quantize.set_omit_encoding(true);
  const auto answer = Quantize(server.quantization(), quantize, data, 1 << 20);
  EXPECT_TRUE(answer.ok()) << answer.status();

  v1::EvaluateHeader evaluate;
  *evaluate.mutable_tensor() = tensor;
  *evaluate.add_candidates()->mutable_spec() = spec;
  evaluate.set_omit_encodings(true);
  const auto summary = Evaluate(server.quantization(), evaluate, data, 1 << 20);
  EXPECT_TRUE(summary.ok()) << summary.status();
}

}  // namespace
}  // namespace quantd::testing
