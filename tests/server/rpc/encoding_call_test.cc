#include "server/rpc/encoding_call.h"

#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace quantd::server {
namespace {

TEST(SendTimeTest, GivesASecondMoreForEachMiB) {
  constexpr absl::Duration kLong = absl::Seconds(30);
  constexpr absl::Duration kShort = absl::Milliseconds(200);
  EXPECT_EQ(SendTime(1000, kLong), kLong);
  EXPECT_EQ(SendTime(16 << 20, kLong), kLong + absl::Seconds(16));
  EXPECT_EQ(SendTime(16 << 20, kShort), 17 * kShort);
}

}  // namespace
}  // namespace quantd::server
