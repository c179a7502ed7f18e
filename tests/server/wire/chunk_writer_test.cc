#include "server/wire/chunk_writer.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/errors.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "gtest/gtest.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::server {
namespace {

std::string Flat(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(slice.begin(), slice.end());
  }
  return bytes;
}

// What a client makes of the messages.
template <typename Response>
std::vector<Response> Parse(const std::vector<grpc::ByteBuffer>& messages) {
  std::vector<Response> responses;
  for (const grpc::ByteBuffer& message : messages) {
    Response response;
    EXPECT_TRUE(response.ParseFromString(Flat(message)));
    EXPECT_EQ(
        response.GetReflection()->GetUnknownFields(response).field_count(), 0);
    responses.push_back(response);
  }
  return responses;
}

template <typename Response>
std::vector<Response> Take(ChunkWriter& writer) {
  return Parse<Response>(writer.Take());
}

void AddData(ChunkWriter& writer, int64_t offset, const std::string& data) {
  uint8_t* out = writer.AddData(offset, static_cast<int64_t>(data.size()));
  std::memcpy(out, data.data(), data.size());
}

v1::QuantizeResponseHeader Header(const std::string& tensor) {
  v1::QuantizeResponseHeader header;
  header.mutable_name()->set_tensor(tensor);
  header.add_shape(5);
  header.set_size_bytes(5);
  return header;
}

v1::QuantizeSummary Summary(uint64_t count) {
  v1::QuantizeSummary summary;
  summary.set_count(count);
  summary.set_checksum_xxh3(0x0123456789abcdef);
  return summary;
}

TEST(ChunkWriterTest, ASmallTensorIsOneMessage) {
  ChunkWriter writer;
  writer.SetHeader(Header("t"));
  AddData(writer, 0, "codes");
  writer.SetSummary(Summary(5));
  const auto responses = Take<v1::QuantizeResponse>(writer);
  ASSERT_EQ(responses.size(), 1u);
  EXPECT_EQ(responses[0].header().SerializeAsString(),
            Header("t").SerializeAsString());
  EXPECT_EQ(responses[0].offset(), 0u);
  EXPECT_EQ(responses[0].data(), "codes");
  EXPECT_EQ(responses[0].summary().SerializeAsString(),
            Summary(5).SerializeAsString());
  EXPECT_FALSE(responses[0].has_error());
  EXPECT_TRUE(writer.Take().empty());
}

TEST(ChunkWriterTest, DataFollowsDataInMessagesOfTheirOwn) {
  ChunkWriter writer;
  writer.SetHeader(Header("t"));
  AddData(writer, 0, "abc");
  AddData(writer, 3, "de");
  const int64_t far = int64_t{1} << 40;
  AddData(writer, far, "f");
  writer.SetSummary(Summary(6));
  const auto responses = Take<v1::QuantizeResponse>(writer);
  ASSERT_EQ(responses.size(), 3u);
  EXPECT_TRUE(responses[0].has_header());
  EXPECT_EQ(responses[0].data(), "abc");
  EXPECT_FALSE(responses[0].has_summary());
  EXPECT_FALSE(responses[1].has_header());
  EXPECT_EQ(responses[1].offset(), 3u);
  EXPECT_EQ(responses[1].data(), "de");
  EXPECT_EQ(responses[2].offset(), static_cast<uint64_t>(far));
  EXPECT_EQ(responses[2].data(), "f");
  EXPECT_TRUE(responses[2].has_summary());
}

TEST(ChunkWriterTest, DataDoNotFollowALargeHeader) {
  for (const int scales : {1000, 100000}) {
    ChunkWriter writer;
    v1::QuantizeResponseHeader header = Header("t");
    for (int i = 0; i < scales; ++i) header.mutable_encoding()->add_scale(1);
    writer.SetHeader(header);
    AddData(writer, 0, "abc");
    writer.SetSummary(Summary(3));
    const auto responses = Take<v1::QuantizeResponse>(writer);
    ASSERT_EQ(responses.size(), scales == 1000 ? 1u : 2u);
    EXPECT_EQ(responses.front().header().encoding().scale_size(), scales);
    EXPECT_EQ(responses.back().data(), "abc");
    EXPECT_TRUE(responses.back().has_summary());
  }
}

TEST(ChunkWriterTest, WhatIsTakenInBetweenGoesOnAfterwards) {
  ChunkWriter writer;
  writer.SetHeader(Header("t"));
  auto first = Take<v1::QuantizeResponse>(writer);
  ASSERT_EQ(first.size(), 1u);
  EXPECT_TRUE(first[0].has_header());
  EXPECT_TRUE(first[0].data().empty());
  AddData(writer, 7, "abc");
  auto second = Take<v1::QuantizeResponse>(writer);
  ASSERT_EQ(second.size(), 1u);
  EXPECT_FALSE(second[0].has_header());
  EXPECT_EQ(second[0].offset(), 7u);
  writer.SetSummary(Summary(3));
  auto third = Take<v1::QuantizeResponse>(writer);
  ASSERT_EQ(third.size(), 1u);
  EXPECT_TRUE(third[0].has_summary());
  EXPECT_TRUE(third[0].data().empty());
}

TEST(ChunkWriterTest, AnErrorDropsWhatWasGatheredOfItsTensorOnly) {
  ChunkWriter writer;
  writer.SetHeader(Header("good"));
  AddData(writer, 0, "abc");
  writer.SetSummary(Summary(3));
  writer.SetHeader(Header("bad"));
  AddData(writer, 0, "xyz");
  AddData(writer, 3, "void");
  writer.SetError(
      core::WithField(core::ChunkOffsetError(4, 2), "header.tensor"));
  writer.SetHeader(Header("next"));
  writer.SetSummary(Summary(0));
  const auto responses = Take<v1::QuantizeResponse>(writer);
  ASSERT_EQ(responses.size(), 3u);
  EXPECT_EQ(responses[0].header().name().tensor(), "good");
  EXPECT_EQ(responses[0].data(), "abc");
  EXPECT_TRUE(responses[0].has_summary());
  EXPECT_FALSE(responses[1].has_header());
  EXPECT_TRUE(responses[1].data().empty());
  EXPECT_FALSE(responses[1].has_summary());
  EXPECT_EQ(responses[1].error().reason(), "CHUNK_OFFSET");
  EXPECT_EQ(responses[1].error().code(), 3);
  EXPECT_EQ(responses[1].error().field(), "header.tensor");
  EXPECT_EQ(responses[2].header().name().tensor(), "next");
  EXPECT_FALSE(responses[2].has_error());
}

TEST(ChunkWriterTest, AnErrorAfterAnErrorKeepsBoth) {
  ChunkWriter writer;
  writer.SetError(core::TensorIncompleteError(8, 4));
  writer.SetHeader(Header("bad"));
  writer.SetError(core::EncodingMissingError());
  const auto responses = Take<v1::QuantizeResponse>(writer);
  ASSERT_EQ(responses.size(), 2u);
  EXPECT_EQ(responses[0].error().reason(), "TENSOR_INCOMPLETE");
  EXPECT_EQ(responses[1].error().reason(), "ENCODING_MISSING");
}

TEST(ChunkWriterTest, AnEmptyHeaderOrSummaryIsStillThere) {
  ChunkWriter writer;
  writer.SetHeader(v1::QuantizeResponseHeader());
  writer.SetSummary(v1::QuantizeSummary());
  const auto responses = Take<v1::QuantizeResponse>(writer);
  ASSERT_EQ(responses.size(), 1u);
  EXPECT_TRUE(responses[0].has_header());
  EXPECT_TRUE(responses[0].has_summary());
}

TEST(ChunkWriterTest, ServesTheResponsesOfAllFourCalls) {
  ChunkWriter writer;
  v1::CalibrateSummary calibrated;
  calibrated.mutable_statistics()->set_count(7);
  writer.SetSummary(calibrated);
  auto calibrate = Take<v1::CalibrateResponse>(writer);
  ASSERT_EQ(calibrate.size(), 1u);
  EXPECT_EQ(calibrate[0].summary().statistics().count(), 7u);

  v1::EvaluateSummary evaluated;
  evaluated.add_candidates()->set_label("a");
  writer.SetSummary(evaluated);
  auto evaluate = Take<v1::EvaluateResponse>(writer);
  ASSERT_EQ(evaluate.size(), 1u);
  EXPECT_EQ(evaluate[0].summary().candidates(0).label(), "a");
  writer.SetError(core::TensorIncompleteError(8, 4));
  evaluate = Take<v1::EvaluateResponse>(writer);
  ASSERT_EQ(evaluate.size(), 1u);
  EXPECT_EQ(evaluate[0].error().reason(), "TENSOR_INCOMPLETE");

  v1::DequantizeResponseHeader header;
  header.set_element_type(v1::ELEMENT_TYPE_FLOAT16);
  writer.SetHeader(header);
  AddData(writer, 300, "reals");
  v1::DequantizeSummary dequantized;
  dequantized.set_count(2);
  writer.SetSummary(dequantized);
  const auto dequantize = Take<v1::DequantizeResponse>(writer);
  ASSERT_EQ(dequantize.size(), 1u);
  EXPECT_EQ(dequantize[0].header().element_type(), v1::ELEMENT_TYPE_FLOAT16);
  EXPECT_EQ(dequantize[0].offset(), 300u);
  EXPECT_EQ(dequantize[0].data(), "reals");
  EXPECT_EQ(dequantize[0].summary().count(), 2u);
}

}  // namespace
}  // namespace quantd::server
