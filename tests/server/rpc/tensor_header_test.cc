#include "server/rpc/tensor_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/errors.h"
#include "quantd/v1/quantization_service.pb.h"
#include "tests/support/fake_tensor_rpc.h"

namespace quantd::server {
namespace {

class TensorHeaderTest : public ::testing::Test {
 protected:
  absl::StatusOr<ParsedHeader<v1::QuantizeHeader>> Parse(
      const std::string& bytes) {
    return ParseHeader<v1::QuantizeHeader>(fake_.env, bytes);
  }

  // A header whose encoding has so many scales.
  static std::string HeaderOf(int scale_count) {
    v1::QuantizeHeader header;
    header.mutable_encoding()->mutable_scale()->Resize(scale_count, 1);
    return header.SerializeAsString();
  }

  testing::FakeEnvironment fake_;
};

TEST_F(TensorHeaderTest, SmallHeadersAreNotCharged) {
  const auto parsed = Parse(HeaderOf(1000));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->header.encoding().scale_size(), 1000);
  EXPECT_EQ(fake_.budget.used_bytes(), 0);
}

TEST_F(TensorHeaderTest, LargeHeadersAreChargedAsLongAsTheyAreThere) {
  constexpr int kScales = 50000;
  {
    const auto parsed = Parse(HeaderOf(kScales));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    // The message, and the bytes that it came out of.
    EXPECT_GE(fake_.budget.used_bytes(), 2 * 4 * kScales);
  }
  EXPECT_EQ(fake_.budget.used_bytes(), 0);
  // The environment has a MiB.
  const absl::Status status = Parse(HeaderOf(10 * kScales)).status();
  EXPECT_EQ(core::ErrorReason(status), "MEMORY_BUDGET") << status;
}

TEST_F(TensorHeaderTest, RefusesWhatIsNotProtobuf) {
  const std::string large = HeaderOf(50000);
  for (const std::string& bytes :
       {std::string("\xFF"), large.substr(0, large.size() - 1),
        // A model's name that is not UTF-8.
        std::string("\x0A\x05\x0A\x03\x0A\x01\xE9")}) {
    EXPECT_EQ(core::ErrorReason(Parse(bytes).status()), "HEADER_INVALID");
  }
}

TEST_F(TensorHeaderTest, KeepsNoFieldsThatNobodyKnows) {
  v1::QuantizeHeader header;
  header.mutable_tensor()->mutable_name()->set_tensor("t");
  v1::TensorName* const name = header.mutable_tensor()->mutable_name();
  name->GetReflection()->MutableUnknownFields(name)->AddVarint(1000, 7);
  // A short one, and a long one.
  for (const int dimensions : {2, 500}) {
    header.mutable_tensor()->mutable_shape()->Resize(dimensions, 1);
    const auto parsed = Parse(header.SerializeAsString());
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(parsed->header.tensor().name().SerializeAsString(),
              std::string("\x1A\x01t"));
  }
}

TEST_F(TensorHeaderTest, ADescriptionKeepsTheLimits) {
  v1::TensorDescription proto;
  proto.set_element_type(v1::ELEMENT_TYPE_FLOAT64);
  proto.add_shape(4);
  proto.add_shape(8);
  fake_.env.limits.tensor_bytes = 256;
  fake_.env.limits.tensor_rank = 2;
  const auto description = CheckDescription(fake_.env, proto);
  ASSERT_TRUE(description.ok()) << description.status();
  EXPECT_EQ(description->element_count, 32);
  const auto error_of = [this](const v1::TensorDescription& bad) {
    const absl::Status status = CheckDescription(fake_.env, bad).status();
    return std::string(core::ErrorReason(status)) + " " +
           core::ErrorField(status);
  };
  fake_.env.limits.tensor_bytes = 255;
  EXPECT_EQ(error_of(proto), "TENSOR_TOO_LARGE header.tensor.shape");
  fake_.env.limits.tensor_bytes = 256;
  fake_.env.limits.tensor_rank = 1;
  EXPECT_EQ(error_of(proto), "RANK_LIMIT header.tensor.shape");
  proto.set_shape(0, -1);
  EXPECT_EQ(error_of(proto), "SHAPE_INVALID header.tensor.shape");
  proto.clear_element_type();
  EXPECT_EQ(error_of(proto), "ELEMENT_TYPE_UNKNOWN header.tensor.element_type");
}

}  // namespace
}  // namespace quantd::server
