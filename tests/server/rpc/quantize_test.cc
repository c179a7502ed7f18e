#include <limits>
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

}  // namespace
}  // namespace quantd::testing
