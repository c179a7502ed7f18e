#include "client/cpp/envelope.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/errors.h"
#include "gtest/gtest.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::internal {
namespace {

std::string Bytes(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(slice.begin(), slice.end());
  }
  return bytes;
}

// In slices of at most `step` bytes, with empty ones between.
grpc::ByteBuffer InSlices(const std::string& bytes, size_t step) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += step) {
    slices.emplace_back(bytes.substr(at, step));
    slices.emplace_back();
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::string Data(const Response& response) {
  std::string data;
  for (const absl::Span<const uint8_t> piece : response.data) {
    data.append(piece.begin(), piece.end());
  }
  return data;
}

TEST(EncodeRequestTest, IsWhatProtobufReads) {
  v1::QuantizeHeader header;
  header.mutable_tensor()->add_shape(7);
  const auto references = std::make_shared<PayloadReferences>();
  // Copied, and referred to.
  for (const size_t size : {0, 1, 127, 128, 4095, 4096, 100000}) {
    for (const uint64_t offset : {uint64_t{0}, uint64_t{1} << 40}) {
      const std::vector<uint8_t> data(size, 'd');
      {
        const grpc::ByteBuffer buffer = EncodeRequest(
            header.SerializeAsString(), {}, offset, SliceOf(data, references));
        v1::QuantizeRequest request;
        ASSERT_TRUE(request.ParseFromString(Bytes(buffer)));
        EXPECT_EQ(request.header().tensor().shape(0), 7);
        EXPECT_EQ(request.offset(), offset);
        EXPECT_EQ(request.data(), std::string(data.begin(), data.end()));
        EXPECT_EQ(references->AwaitNone(absl::ZeroDuration()), size < 4096);
      }
      EXPECT_TRUE(references->AwaitNone(absl::Minutes(2)));
    }
  }
  v1::QuantizeRequest request;
  ASSERT_TRUE(
      request.ParseFromString(Bytes(EncodeRequest("", {}, 3, grpc::Slice()))));
  EXPECT_FALSE(request.has_header());
}

TEST(EncodeSharedRequestTest, IsWhatProtobufReads) {
  v1::SharedSpan span;
  span.set_region_id("id");
  v1::QuantizeRequest request;
  ASSERT_TRUE(request.ParseFromString(
      Bytes(EncodeSharedRequest("", 5, span.SerializeAsString()))));
  EXPECT_TRUE(request.has_header());
  EXPECT_EQ(request.offset(), 5u);
  EXPECT_EQ(request.shared().region_id(), "id");
}

TEST(DecodeResponseTest, ReadsPartsAcrossSlices) {
  v1::QuantizeResponse message;
  message.mutable_header()->set_size_bytes(300);
  message.set_offset(1 << 20);
  message.set_data(std::string(300, 'x'));
  message.mutable_summary()->set_count(77);
  const std::string bytes = message.SerializeAsString();
  for (const size_t step : {1, 2, 3, 7, 64, 1000}) {
    Response response;
    ASSERT_TRUE(DecodeResponse(InSlices(bytes, step), &response).ok()) << step;
    EXPECT_TRUE(response.has_header && response.has_summary);
    EXPECT_FALSE(response.has_error);
    EXPECT_EQ(response.header, message.header().SerializeAsString());
    EXPECT_EQ(response.summary, message.summary().SerializeAsString());
    EXPECT_EQ(response.offset_bytes, uint64_t{1} << 20);
    EXPECT_EQ(response.data_size_bytes, 300u);
    EXPECT_EQ(Data(response), message.data());
  }
}

TEST(DecodeResponseTest, MergesAndSkipsAsProtobufDoes) {
  v1::QuantizeResponse first;
  first.mutable_header()->set_size_bytes(1);
  first.set_data("old");
  v1::QuantizeResponse second;
  second.mutable_header()->mutable_encoding()->add_scale(2);
  second.set_data("new");
  // Unknown: 9 as varint, fixed64 and fixed32, and 3 as fixed32.
  const std::string unknown(
      "\x48\x01"
      "\x49"
      "12345678"
      "\x4d"
      "1234"
      "\x1d"
      "1234");
  Response response;
  ASSERT_TRUE(DecodeResponse(InSlices(first.SerializeAsString() + unknown +
                                          second.SerializeAsString(),
                                      5),
                             &response)
                  .ok());
  EXPECT_EQ(Data(response), "new");
  EXPECT_EQ(response.data_size_bytes, 3u);
  v1::QuantizeResponseHeader header;
  ASSERT_TRUE(header.ParseFromString(response.header));
  EXPECT_EQ(header.size_bytes(), 1u);
  EXPECT_EQ(header.encoding().scale_size(), 1);
}

TEST(DecodeResponseTest, RefusesWhatIsNotProtobuf) {
  v1::QuantizeResponse message;
  message.set_offset(uint64_t{1} << 50);
  message.set_data("0123456789");
  const std::string whole = message.SerializeAsString();
  for (size_t size = 1; size < whole.size(); ++size) {
    // Between the two fields it is one message less.
    if (size == whole.size() - 12) continue;
    Response response;
    EXPECT_EQ(ErrorReason(DecodeResponse(InSlices(whole.substr(0, size), 3),
                                         &response)),
              "RESPONSE_MALFORMED")
        << size;
  }
  for (const std::string& bytes :
       {std::string("\x03"), std::string("\x0b"), std::string("\x1c"),
        std::string("\x10") + std::string(11, '\xff'),
        std::string("\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01x"),
        std::string("\0\0", 2)}) {
    Response response;
    EXPECT_FALSE(DecodeResponse(InSlices(bytes, 2), &response).ok());
  }
}

}  // namespace
}  // namespace quantd::internal
