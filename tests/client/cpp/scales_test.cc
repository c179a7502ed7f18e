#include "client/cpp/scales.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "client/cpp/scale_feed.h"
#include "gtest/gtest.h"

namespace quantd {
namespace {

template <typename T>
absl::Span<const uint8_t> BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()),
          values.size() * sizeof(T)};
}

Encoding MakeEncoding(v1::NumberFormat format,
                      const std::vector<int64_t>& block_size) {
  Encoding encoding;
  encoding.set_format(format);
  encoding.mutable_block_size()->Assign(block_size.begin(), block_size.end());
  return encoding;
}

TEST(ScalesTest, ScalesComeBackWithTheSameBits) {
  for (const v1::ScaleType type :
       {v1::SCALE_TYPE_FLOAT32, v1::SCALE_TYPE_FLOAT16,
        v1::SCALE_TYPE_BFLOAT16}) {
    Encoding encoding = MakeEncoding(v1::NUMBER_FORMAT_UINT8, {1, 0});
    encoding.set_scale_type(type);
    for (const float scale : {0.5f, 1.5f, 0.25f}) encoding.add_scale(scale);
    for (const int zero_point : {0, 7, 255}) {
      encoding.add_zero_point(zero_point);
    }
    const ScaleBuffers scales = TakeScales(encoding);
    EXPECT_EQ(static_cast<int64_t>(scales.scale.size_bytes),
              3 * ScaleSizeBytes(type));
    Encoding bare = encoding;
    bare.clear_scale();
    bare.clear_zero_point();
    bare.set_scales_in_chunks(true);
    EXPECT_EQ(WithScales(bare, scales.view()).SerializeAsString(),
              encoding.SerializeAsString());
  }
}

TEST(ScalesTest, ZeroPointsComeBackFromTheirCodes) {
  const std::vector<int32_t> negative = {-128, -1, 0, 127};
  const struct {
    v1::NumberFormat format;
    bool exclude_zero;
    int64_t size_bytes;
    std::vector<int32_t> values;
  } cases[] = {
      {v1::NUMBER_FORMAT_INT8, false, 1, negative},
      {v1::NUMBER_FORMAT_UINT8, false, 1, {0, 128, 255}},
      {v1::NUMBER_FORMAT_UINT4, false, 1, {0, 15}},
      {v1::NUMBER_FORMAT_INT16, false, 2, {-32768, 32767}},
      {v1::NUMBER_FORMAT_UINT16, false, 2, {0, 65535}},
      {v1::NUMBER_FORMAT_UINT8, true, 4, {-4194304, 4194304}},
      {v1::NUMBER_FORMAT_INT32, false, 4, {0, 0}},
  };
  for (const auto& c : cases) {
    Encoding encoding = MakeEncoding(c.format, {});
    encoding.set_exclude_zero(c.exclude_zero);
    const std::string narrow =
        internal::NarrowZeroPoints(encoding, BytesOf(c.values));
    EXPECT_EQ(narrow.size(),
              c.values.size() * static_cast<size_t>(c.size_bytes));
    EXPECT_EQ(internal::WidenZeroPoints(
                  encoding, absl::MakeConstSpan(
                                reinterpret_cast<const uint8_t*>(narrow.data()),
                                narrow.size())),
              c.values);
  }
}

// By trying all elements.
int64_t SlowScalesOfFirst(const std::vector<int64_t>& shape,
                          const std::vector<int64_t>& block_size,
                          int64_t count) {
  const std::vector<int64_t> scales = *ScaleShape(shape, block_size);
  int64_t largest = 0;
  for (int64_t element = 0; element < count; ++element) {
    int64_t rest = element;
    int64_t index = 0;
    int64_t stride = 1;
    for (size_t d = shape.size(); d-- > 0;) {
      const int64_t at = rest % shape[d];
      rest /= shape[d];
      index += (block_size[d] == 0 ? 0 : at / block_size[d]) * stride;
      stride *= scales[d];
    }
    largest = std::max(largest, index);
  }
  return largest + 1;
}

TEST(ScalesTest, CountsTheScalesOfAnyBeginning) {
  const struct {
    std::vector<int64_t> shape;
    std::vector<int64_t> block_size;
  } cases[] = {
      {{4, 6}, {1, 4}}, {{4, 6}, {1, 0}},       {{5, 7}, {2, 3}},
      {{5, 7}, {0, 3}}, {{3, 4, 5}, {2, 0, 2}}, {{3, 4, 5}, {0, 3, 0}},
      {{9}, {2}},       {{1, 9}, {1, 2}},       {{2, 3}, {0, 0}},
  };
  for (const auto& c : cases) {
    int64_t elements = 1;
    for (const int64_t size : c.shape) elements *= size;
    for (int64_t count = 1; count <= elements; ++count) {
      EXPECT_EQ(internal::ScalesOfFirst(c.shape, c.block_size, count),
                SlowScalesOfFirst(c.shape, c.block_size, count))
          << count;
    }
  }
}

TEST(ScaleFeedTest, GivesOutAllScalesInOrderBeforeTheirElements) {
  constexpr int64_t kRows = 700;
  constexpr int64_t kColumns = 1024;
  const std::vector<int64_t> shape = {kRows, kColumns};
  Encoding encoding = MakeEncoding(v1::NUMBER_FORMAT_LPBQ, {1, 2});
  encoding.mutable_outer_block_size()->Add(1);
  encoding.mutable_outer_block_size()->Add(0);
  std::vector<uint8_t> scale(kRows * kColumns / 2);
  for (size_t i = 0; i < scale.size(); ++i) scale[i] = i % 15 + 1;
  const std::vector<float> outer(kRows, 0.5f);
  absl::StatusOr<internal::ScaleFeed> feed = internal::ScaleFeed::Create(
      shape, encoding, {scale, {}, BytesOf(outer)}, /*payload_bits=*/4);
  ASSERT_TRUE(feed.ok()) << feed.status();
  for (int round = 0; round < 2; ++round) {
    std::string scales;
    std::string outers;
    for (const uint64_t end : {1000u, 1001u, 300000u, 358400u}) {
      while (const auto chunk = feed->Next(end)) {
        EXPECT_EQ(chunk->first(), scales.size());
        EXPECT_EQ(chunk->first_outer() * sizeof(float), outers.size());
        EXPECT_LE(chunk->ByteSizeLong(), 513u << 10);
        scales += chunk->scale();
        outers += chunk->outer_scale();
      }
      // A scale for every byte, which is two codes.
      EXPECT_EQ(scales.size(), end);
      EXPECT_EQ(outers.size(), outer.size() * sizeof(float));
    }
    EXPECT_EQ(scales, std::string(scale.begin(), scale.end()));
    feed->Rewind();
  }
  EXPECT_FALSE(internal::ScaleFeed::Create(
                   shape, encoding, {BytesOf(outer), {}, BytesOf(outer)}, 4)
                   .ok());
}

}  // namespace
}  // namespace quantd
