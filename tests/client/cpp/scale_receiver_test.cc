#include "client/cpp/scale_receiver.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/cpp/errors.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor_stream.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding.pb.h"
#include "quantd/v1/quantization_service.pb.h"
#include "xxhash.h"

namespace quantd::internal::scale_receiver_test {
namespace {

template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(T));
}

std::string TextOf(absl::Span<const uint8_t> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Eight rows of uint8 with a scale and a zero point each.
class ScaleReceiverTest : public ::testing::Test {
 protected:
  ScaleReceiverTest() {
    encoding_.set_format(v1::NUMBER_FORMAT_UINT8);
    encoding_.add_block_size(1);
    encoding_.add_block_size(0);
    encoding_.set_scales_in_chunks(true);
    encoding_.set_chunks_have_zero_points(true);
    for (int row = 0; row < kRows; ++row) {
      scale_.push_back(0.5f + static_cast<float>(row));
      zero_point_.push_back(static_cast<uint8_t>(250 - row));
      wide_.push_back(250 - row);
    }
  }

  // Of rows [begin, end).
  std::string Chunk(int begin, int end) const {
    v1::ScaleChunk chunk;
    chunk.set_first(static_cast<uint64_t>(begin));
    chunk.set_scale(BytesOf(
        std::vector<float>(scale_.begin() + begin, scale_.begin() + end)));
    chunk.set_zero_point(BytesOf(std::vector<uint8_t>(
        zero_point_.begin() + begin, zero_point_.begin() + end)));
    return chunk.SerializeAsString();
  }

  v1::QuantizeSummary Summary() const {
    v1::QuantizeSummary summary;
    summary.set_scale_checksum_xxh3(
        XXH3_64bits(scale_.data(), scale_.size() * sizeof(float)));
    summary.set_zero_point_checksum_xxh3(
        XXH3_64bits(zero_point_.data(), zero_point_.size()));
    return summary;
  }

  absl::Status Begin() { return receiver_.Begin({kRows, 16}, &encoding_); }

  static constexpr int kRows = 8;
  Encoding encoding_;
  std::vector<float> scale_;
  std::vector<uint8_t> zero_point_;
  std::vector<int32_t> wide_;
  ScaleSinks sinks_;
  ScaleReceiver receiver_{sinks_};
};

TEST_F(ScaleReceiverTest, PutsChunksTogether) {
  // A retry begins anew.
  for (int attempt = 0; attempt < 2; ++attempt) {
    ASSERT_TRUE(Begin().ok());
    ASSERT_TRUE(receiver_.Accept(Chunk(0, 3)).ok());
    ASSERT_TRUE(receiver_.Accept(Chunk(3, 3)).ok());
    ASSERT_TRUE(receiver_.Accept(Chunk(3, 8)).ok());
    EXPECT_EQ(receiver_.Finish(Summary()), absl::OkStatus());
  }
  const ScaleBuffers buffers = receiver_.TakeBuffers();
  EXPECT_EQ(TextOf(buffers.scale.span()), BytesOf(scale_));
  EXPECT_EQ(TextOf(buffers.zero_point.span()), BytesOf(wide_));
}

TEST_F(ScaleReceiverTest, RefusesChunksThatDoNotFollow) {
  ASSERT_TRUE(Begin().ok());
  ASSERT_TRUE(receiver_.Accept(Chunk(0, 3)).ok());
  // A gap, the same again, too many.
  for (const std::string& chunk : {Chunk(4, 8), Chunk(0, 3)}) {
    EXPECT_EQ(ErrorReason(receiver_.Accept(chunk)), "RESPONSE_MALFORMED");
  }
  ASSERT_TRUE(receiver_.Accept(Chunk(3, 8)).ok());
  v1::ScaleChunk more;
  more.set_first(kRows);
  more.set_scale(std::string(4, '\0'));
  more.set_zero_point(std::string(1, '\0'));
  EXPECT_EQ(ErrorReason(receiver_.Accept(more.SerializeAsString())),
            "RESPONSE_MALFORMED");
}

TEST_F(ScaleReceiverTest, RefusesPartsOfScales) {
  v1::ScaleChunk chunk;
  chunk.ParseFromString(Chunk(0, 2));
  for (std::string* const bytes :
       {chunk.mutable_scale(), chunk.mutable_zero_point()}) {
    ASSERT_TRUE(Begin().ok());
    const std::string whole = *bytes;
    bytes->pop_back();
    EXPECT_EQ(ErrorReason(receiver_.Accept(chunk.SerializeAsString())),
              "RESPONSE_MALFORMED");
    *bytes = whole;
  }
  EXPECT_EQ(ErrorReason(receiver_.Accept("\xFF")), "RESPONSE_MALFORMED");
}

TEST_F(ScaleReceiverTest, FindsWhatIsMissingOrChanged) {
  ASSERT_TRUE(Begin().ok());
  ASSERT_TRUE(receiver_.Accept(Chunk(0, 7)).ok());
  EXPECT_EQ(ErrorReason(receiver_.Finish(Summary())), "RESPONSE_MALFORMED");
  ASSERT_TRUE(receiver_.Accept(Chunk(7, 8)).ok());
  v1::QuantizeSummary summary = Summary();
  summary.set_zero_point_checksum_xxh3(1);
  EXPECT_EQ(ErrorReason(receiver_.Finish(summary)), "CHECKSUM_MISMATCH");
  summary = Summary();
  summary.set_scale_checksum_xxh3(1);
  EXPECT_EQ(ErrorReason(receiver_.Finish(summary)), "CHECKSUM_MISMATCH");
  EXPECT_EQ(receiver_.Finish(Summary()), absl::OkStatus());
}

TEST_F(ScaleReceiverTest, TakesScalesOutOfAnEncodingThatHasThem) {
  encoding_.clear_scales_in_chunks();
  encoding_.clear_chunks_have_zero_points();
  for (const float scale : scale_) encoding_.add_scale(scale);
  for (const int32_t zero_point : wide_) encoding_.add_zero_point(zero_point);
  ASSERT_TRUE(Begin().ok());
  EXPECT_TRUE(encoding_.scales_in_chunks());
  EXPECT_EQ(encoding_.scale_size(), 0);
  // It is not a mixture of both.
  EXPECT_EQ(ErrorReason(receiver_.Accept(Chunk(0, 3))), "RESPONSE_MALFORMED");
  EXPECT_EQ(receiver_.Finish({}), absl::OkStatus());
  const ScaleBuffers buffers = receiver_.TakeBuffers();
  EXPECT_EQ(TextOf(buffers.scale.span()), BytesOf(scale_));
  EXPECT_EQ(TextOf(buffers.zero_point.span()), BytesOf(wide_));
}

TEST_F(ScaleReceiverTest, ASinkThatFailsFailsTheTensorAndNotTheStream) {
  std::string got;
  int calls = 0;
  sinks_.scale = [&](uint64_t offset_bytes, absl::Span<const uint8_t> bytes) {
    EXPECT_EQ(offset_bytes, got.size());
    got += TextOf(bytes);
    return ++calls == 2 ? absl::DataLossError("disk full") : absl::OkStatus();
  };
  ASSERT_TRUE(Begin().ok());
  for (int row = 0; row < kRows; ++row) {
    EXPECT_TRUE(receiver_.Accept(Chunk(row, row + 1)).ok()) << row;
  }
  EXPECT_EQ(receiver_.Finish(Summary()), absl::DataLossError("disk full"));
  // Nothing goes to it after its error.
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(got, BytesOf(scale_).substr(0, 2 * sizeof(float)));
}

TEST_F(ScaleReceiverTest, RefusesBlocksThatDoNotFitTheShape) {
  EXPECT_EQ(ErrorReason(receiver_.Begin({kRows}, &encoding_)),
            "RESPONSE_MALFORMED");
}

}  // namespace
}  // namespace quantd::internal::scale_receiver_test
