#include "client/cpp/scale_feed.h"

#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/client/cpp/scale_helpers.h"

namespace quantd::internal::scale_feed_test {
namespace {

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
  absl::StatusOr<ScaleFeed> feed = ScaleFeed::Create(
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
  EXPECT_FALSE(ScaleFeed::Create(shape, encoding,
                                 {BytesOf(outer), {}, BytesOf(outer)}, 4)
                   .ok());
}

}  // namespace
}  // namespace quantd::internal::scale_feed_test
