#include "server/rpc/code_geometry.h"

#include <cstdint>
#include <limits>

#include "absl/status/statusor.h"
#include "core/errors.h"
#include "gtest/gtest.h"
#include "quantd/v1/tensor.pb.h"

namespace quantd::server {
namespace {

TEST(CodeGeometryTest, FindsCodesBesideReals) {
  // Int4 of float32: two codes to a byte, the last of seven alone.
  const CodeGeometry nibbles = {7, 4, 2, 1};
  EXPECT_EQ(nibbles.codes_size_bytes(), 4);
  EXPECT_EQ(nibbles.reals_size_bytes(), 28);
  EXPECT_EQ(nibbles.granule_real_bytes(), 8);
  EXPECT_EQ(nibbles.CodesOffsetOfReal(16), 2);
  EXPECT_EQ(nibbles.CodesIndex(2), 4);
  EXPECT_EQ(nibbles.CodesIndex(3), 6);
  // Past the last whole granule is the end.
  EXPECT_EQ(nibbles.CodesIndex(4), 7);
  // Int12 of float64.
  const CodeGeometry words = {5, 8, 1, 2};
  EXPECT_EQ(words.codes_size_bytes(), 10);
  EXPECT_EQ(words.CodesOffset(3), 6);
  EXPECT_EQ(words.CodesIndex(6), 3);
}

v1::ByteRange Range(uint64_t begin, uint64_t end) {
  v1::ByteRange range;
  range.set_begin_bytes(begin);
  range.set_end_bytes(end);
  return range;
}

TEST(CheckRangeTest, TakesWholeGranulesAndTheEnd) {
  const absl::StatusOr<v1::ByteRange> all = CheckRange(nullptr, 30, 8);
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(all->begin_bytes(), 0u);
  EXPECT_EQ(all->end_bytes(), 30u);
  for (const v1::ByteRange& range :
       {Range(0, 8), Range(8, 24), Range(0, 30), Range(24, 30)}) {
    const absl::StatusOr<v1::ByteRange> checked = CheckRange(&range, 30, 8);
    ASSERT_TRUE(checked.ok()) << checked.status();
    EXPECT_EQ(checked->begin_bytes(), range.begin_bytes());
    EXPECT_EQ(checked->end_bytes(), range.end_bytes());
  }
}

TEST(CheckRangeTest, RefusesAllElse) {
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  for (const v1::ByteRange& range :
       {Range(0, 0), Range(8, 8), Range(16, 8), Range(4, 8), Range(0, 12),
        Range(0, 31), Range(0, 32), Range(30, 32), Range(kMost - 7, kMost),
        Range(0, kMost)}) {
    EXPECT_EQ(core::ErrorReason(CheckRange(&range, 30, 8).status()),
              "RANGE_INVALID")
        << range.ShortDebugString();
  }
  // The tensor's end is no beginning.
  const v1::ByteRange behind = Range(30, 30);
  EXPECT_FALSE(CheckRange(&behind, 30, 8).ok());
}

}  // namespace
}  // namespace quantd::server
