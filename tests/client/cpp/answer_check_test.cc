#include "client/cpp/answer_check.h"

#include <cstdint>
#include <string>
#include <vector>

#include "client/cpp/tensor.h"
#include "client/cpp/tensor_stream.h"
#include "gtest/gtest.h"
#include "tests/client/cpp/scale_helpers.h"

namespace quantd::internal {
namespace {

Tensor MakeTensor(std::vector<int64_t> shape) {
  Tensor tensor;
  tensor.name.set_tensor("w");
  tensor.shape = std::move(shape);
  return tensor;
}

Encoding EncodingOf(v1::NumberFormat format,
                    const std::vector<int64_t>& block_size, int scales) {
  Encoding encoding = MakeEncoding(format, block_size);
  for (int i = 0; i < scales; ++i) encoding.add_scale(1);
  return encoding;
}

std::string ErrorOf(const Question& question, const Encoding& encoding) {
  return std::string(CheckEncoding(question, encoding).message());
}

TEST(AnswerCheckTest, BlocksAreThoseThatTheSpecComesTo) {
  EncodingSpec spec;
  spec.set_format(v1::NUMBER_FORMAT_INT8);
  spec.mutable_granularity()->set_axis(-1);
  const Question per_channel(MakeTensor({4, 6}), spec);
  EXPECT_EQ(ErrorOf(per_channel, EncodingOf(v1::NUMBER_FORMAT_INT8, {0, 1}, 6)),
            "");
  EXPECT_EQ(ErrorOf(per_channel, EncodingOf(v1::NUMBER_FORMAT_INT8, {1, 0}, 4)),
            "RESPONSE_MALFORMED: expected block size [0,1], got [1,0]");
  spec.mutable_granularity()->set_group_size(3);
  const Question groups(MakeTensor({4, 6}), spec);
  EXPECT_EQ(ErrorOf(groups, EncodingOf(v1::NUMBER_FORMAT_INT8, {1, 3}, 8)), "");
  // A vector is per tensor.
  EXPECT_EQ(ErrorOf(Question(MakeTensor({6}), spec),
                    EncodingOf(v1::NUMBER_FORMAT_INT8, {}, 1)),
            "");
  EncodingSpec groups_by_default;
  groups_by_default.set_format(v1::NUMBER_FORMAT_NF4);
  const Question by_default(MakeTensor({2, 128}), groups_by_default);
  EXPECT_EQ(ErrorOf(by_default, EncodingOf(v1::NUMBER_FORMAT_NF4, {1, 64}, 4)),
            "");
  EXPECT_EQ(ErrorOf(by_default, EncodingOf(v1::NUMBER_FORMAT_NF4, {}, 1)),
            "RESPONSE_MALFORMED: expected block size [1,64], got []");
}

TEST(AnswerCheckTest, BlocksMayBeSaidInSeveralWays) {
  const Question one(MakeTensor({4, 6}),
                     EncodingOf(v1::NUMBER_FORMAT_INT8, {0, 0}, 1));
  EXPECT_EQ(ErrorOf(one, EncodingOf(v1::NUMBER_FORMAT_INT8, {}, 1)), "");
  EXPECT_EQ(ErrorOf(one, EncodingOf(v1::NUMBER_FORMAT_INT8, {9, 6}, 1)), "");
}

TEST(AnswerCheckTest, TheStoreMayHaveAnyEncoding) {
  const Question question(MakeTensor({4, 6}), v1::EncodingReference());
  EXPECT_EQ(ErrorOf(question, EncodingOf(v1::NUMBER_FORMAT_INT4, {1, 0}, 4)),
            "");
  EXPECT_EQ(ErrorOf(question, EncodingOf(v1::NUMBER_FORMAT_INT4, {1, 0}, 3)),
            "RESPONSE_MALFORMED: expected scale of 4 entries, got 3");
  EXPECT_EQ(ErrorOf(question, EncodingOf(v1::NUMBER_FORMAT_INT4, {1}, 4))
                .substr(0, 18),
            "RESPONSE_MALFORMED");
}

TEST(AnswerCheckTest, AnUnsignedFormatNeedsToBeAllowed) {
  EncodingSpec spec;
  spec.set_format(v1::NUMBER_FORMAT_INT8);
  const Encoding encoding = EncodingOf(v1::NUMBER_FORMAT_UINT8, {}, 1);
  EXPECT_EQ(ErrorOf(Question(MakeTensor({4}), spec), encoding),
            "RESPONSE_MALFORMED: expected format int8, got uint8");
  spec.set_unsigned_if_non_negative(true);
  EXPECT_EQ(ErrorOf(Question(MakeTensor({4}), spec), encoding), "");
}

TEST(AnswerCheckTest, RangesOfPackedCodesAreThoseOfTheirReals) {
  v1::QuantizeResponseHeader header;
  header.mutable_name()->set_tensor("w");
  header.add_shape(100);
  header.set_size_bytes(50);
  header.mutable_range()->set_begin_bytes(10);
  header.mutable_range()->set_end_bytes(20);
  const Question question(MakeTensor({100}),
                          EncodingOf(v1::NUMBER_FORMAT_INT4, {}, 1));
  EXPECT_TRUE(CheckHeader(question, {80, 160}, false, header).ok());
  EXPECT_EQ(CheckHeader(question, {80, 168}, false, header).message(),
            "RESPONSE_MALFORMED: expected bytes [10, 21), got [10, 20)");
  header.set_size_bytes(100);
  EXPECT_EQ(CheckHeader(question, {80, 160}, false, header).message(),
            "RESPONSE_MALFORMED: expected size_bytes 50, got 100");
}

TEST(AnswerCheckTest, RealsAreOfTheTypeThatWasAskedFor) {
  v1::DequantizeResponseHeader header;
  header.mutable_name()->set_tensor("w");
  header.add_shape(100);
  header.set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  header.set_size_bytes(400);
  const Question question(MakeTensor({100}),
                          EncodingOf(v1::NUMBER_FORMAT_INT8, {}, 1));
  EXPECT_TRUE(CheckHeader(question, {0, 100}, false, header).ok());
  header.set_size_bytes(800);
  EXPECT_EQ(CheckHeader(question, {0, 100}, false, header).message(),
            "RESPONSE_MALFORMED: expected size_bytes 400, got 800");
  header.set_element_type(v1::ELEMENT_TYPE_FLOAT64);
  EXPECT_EQ(CheckHeader(question, {0, 100}, false, header).message(),
            "RESPONSE_MALFORMED: expected element type float32, got float64");
}

}  // namespace
}  // namespace quantd::internal
