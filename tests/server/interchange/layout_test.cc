#include "server/interchange/layout.h"

#include <cstdint>
#include <vector>

#include "core/errors.h"
#include "core/formats/number_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quantd::server::layout_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Open = PendingEncoding::Open;

// Of int8, with the scales 1, 2, 3, ...
PendingEncoding Pending(Open open, int scale_count, int64_t block = 0) {
  PendingEncoding pending;
  pending.tensor = "t";
  pending.place = "file.t";
  pending.open = open;
  pending.block = block;
  const core::FormatInfo& info = *core::FindFormatByName("int8");
  pending.encoding.format = info.format;
  pending.encoding.qmin = info.qmin;
  pending.encoding.qmax = info.qmax;
  for (int i = 1; i <= scale_count; ++i) {
    pending.encoding.scale.push_back(static_cast<float>(i));
  }
  return pending;
}

LayoutHint Shape(std::vector<int64_t> shape) {
  LayoutHint hint;
  hint.shape = std::move(shape);
  hint.shape_known = true;
  return hint;
}

TEST(ResolveLayoutTest, FindsTheOneDimensionThatFits) {
  PendingEncoding pending = Pending(Open::kChannels, 3);
  ASSERT_TRUE(ResolveLayout(Shape({2, 3, 4}), &pending).ok());
  EXPECT_THAT(pending.encoding.block_size, ElementsAre(0, 1, 0));
  EXPECT_THAT(pending.encoding.scale_shape, ElementsAre(1, 3, 1));
  EXPECT_EQ(pending.open, Open::kNothing);
}

TEST(ResolveLayoutTest, AsksWhereTwoFit) {
  PendingEncoding pending = Pending(Open::kChannels, 3);
  const absl::Status status = ResolveLayout(Shape({3, 3}), &pending);
  EXPECT_EQ(core::ErrorReason(status), "AXIS_UNKNOWN");
  EXPECT_THAT(std::string(status.message()), HasSubstr("file.t"));
  LayoutHint hint = Shape({3, 3});
  hint.axis = -1;
  pending = Pending(Open::kChannels, 3);
  ASSERT_TRUE(ResolveLayout(hint, &pending).ok());
  EXPECT_THAT(pending.encoding.block_size, ElementsAre(0, 1));
  // The file's own word goes before the hint's.
  pending = Pending(Open::kChannels, 3);
  pending.axis = 0;
  ASSERT_TRUE(ResolveLayout(hint, &pending).ok());
  EXPECT_THAT(pending.encoding.block_size, ElementsAre(1, 0));
}

TEST(ResolveLayoutTest, AsksWhereNothingIsKnown) {
  PendingEncoding pending = Pending(Open::kChannels, 3);
  EXPECT_EQ(core::ErrorReason(ResolveLayout(LayoutHint(), &pending)),
            "AXIS_UNKNOWN");
}

TEST(ResolveLayoutTest, RefusesWhatDoesNotFit) {
  PendingEncoding pending = Pending(Open::kChannels, 5);
  EXPECT_EQ(core::ErrorReason(ResolveLayout(Shape({2, 3}), &pending)),
            "INTERCHANGE_INVALID");
  LayoutHint hint = Shape({5, 3});
  hint.axis = 1;
  pending = Pending(Open::kChannels, 5);
  EXPECT_EQ(core::ErrorReason(ResolveLayout(hint, &pending)),
            "INTERCHANGE_INVALID");
  hint.axis = 2;
  pending = Pending(Open::kChannels, 5);
  EXPECT_EQ(core::ErrorReason(ResolveLayout(hint, &pending)),
            "INTERCHANGE_INVALID");
  hint = Shape({5, 3});
  hint.block_size = {0};
  pending = Pending(Open::kChannels, 5);
  EXPECT_EQ(core::ErrorReason(ResolveLayout(hint, &pending)),
            "INTERCHANGE_INVALID");
}

TEST(ResolveLayoutTest, PutsBlocksInTheOrderOfTheTensor) {
  // The file has [channels, blocks]; here the channels come first, too.
  PendingEncoding pending = Pending(Open::kChannelBlocks, 6, 32);
  ASSERT_TRUE(ResolveLayout(Shape({2, 96}), &pending).ok());
  EXPECT_THAT(pending.encoding.block_size, ElementsAre(1, 32));
  EXPECT_THAT(pending.encoding.scale_shape, ElementsAre(2, 3));
  EXPECT_THAT(pending.encoding.scale, ElementsAre(1, 2, 3, 4, 5, 6));
  // Here they come last.
  pending = Pending(Open::kChannelBlocks, 6, 32);
  ASSERT_TRUE(ResolveLayout(Shape({96, 2}), &pending).ok());
  EXPECT_THAT(pending.encoding.block_size, ElementsAre(32, 1));
  EXPECT_THAT(pending.encoding.scale_shape, ElementsAre(3, 2));
  EXPECT_THAT(pending.encoding.scale, ElementsAre(1, 4, 2, 5, 3, 6));
  // The last block may be short.
  pending = Pending(Open::kChannelBlocks, 6, 32);
  EXPECT_TRUE(ResolveLayout(Shape({2, 65}), &pending).ok());
  pending = Pending(Open::kChannelBlocks, 6, 32);
  EXPECT_FALSE(ResolveLayout(Shape({2, 64}), &pending).ok());
}

TEST(ResolveLayoutTest, ChecksTheEncoding) {
  PendingEncoding pending = Pending(Open::kNothing, 1);
  pending.encoding.scale[0] = -1;
  const absl::Status status = ResolveLayout(LayoutHint(), &pending);
  EXPECT_EQ(core::ErrorReason(status), "INTERCHANGE_INVALID");
  EXPECT_THAT(std::string(status.message()), HasSubstr("file.t: scale: "));
}

TEST(HintOfTest, LeadsBackToTheSameLayout) {
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{2, 96}, {96, 2}, {2, 1, 96}}) {
    PendingEncoding pending = Pending(Open::kChannelBlocks, 6, 32);
    ASSERT_TRUE(ResolveLayout(Shape(shape), &pending).ok());
    const core::Encoding before = pending.encoding;
    PendingEncoding again = Pending(Open::kChannelBlocks, 6, 32);
    ASSERT_TRUE(
        ResolveLayout(HintOf(before, Open::kChannelBlocks), &again).ok());
    EXPECT_EQ(again.encoding.block_size, before.block_size);
    EXPECT_EQ(again.encoding.scale_shape, before.scale_shape);
    EXPECT_EQ(again.encoding.scale, before.scale);
  }
}

TEST(IsWholeTest, IsWhatHasOneScale) {
  core::Encoding encoding;
  EXPECT_TRUE(IsWhole(encoding, 0));
  encoding.block_size = {0, 1, 32};
  encoding.scale_shape = {1, 4, 1};
  EXPECT_TRUE(IsWhole(encoding, 0));
  EXPECT_FALSE(IsWhole(encoding, 1));
  EXPECT_TRUE(IsWhole(encoding, 2));
  encoding.scale_shape.clear();
  EXPECT_FALSE(IsWhole(encoding, 2));
}

}  // namespace
}  // namespace quantd::server::layout_test
