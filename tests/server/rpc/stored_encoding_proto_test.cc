#include "server/rpc/stored_encoding_proto.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "absl/time/time.h"

namespace quantd::server {
namespace {

TEST(ToTimestampTest, SaysEveryTime) {
  EXPECT_EQ(ToTimestamp(absl::FromUnixMicros(-1)).seconds(), -1);
  EXPECT_EQ(ToTimestamp(absl::FromUnixMicros(-1)).nanos(), 999'999'000);
  EXPECT_EQ(ToTimestamp(absl::FromUnixMicros(1'500'000)).seconds(), 1);
  EXPECT_EQ(ToTimestamp(absl::FromUnixMicros(1'500'000)).nanos(), 500'000'000);
  // Years 9999 and 1.
  EXPECT_EQ(ToTimestamp(absl::InfiniteFuture()).seconds(), 253402300799);
  EXPECT_EQ(ToTimestamp(absl::InfinitePast()).seconds(), -62135596800);
  EXPECT_EQ(ToTimestamp(absl::FromUnixMicros(int64_t{1} << 62)).seconds(),
            253402300799);
}

}  // namespace
}  // namespace quantd::server
