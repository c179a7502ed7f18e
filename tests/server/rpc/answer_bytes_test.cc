#include "server/rpc/answer_bytes.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "gtest/gtest.h"
#include "server/guard/memory_budget.h"
#include "server/metrics/metrics.h"
#include "server/shared_memory/region.h"
#include "xxhash.h"

namespace quantd::server {
namespace {

TEST(ChecksumTest, IsThatOfTheWholeHoweverItComes) {
  std::vector<uint8_t> data(10000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i);
  for (const size_t step : {1, 7, 256, 4096, 10000}) {
    Checksum checksum;
    for (size_t at = 0; at < data.size(); at += step) {
      checksum.Update(absl::MakeConstSpan(data).subspan(at, step));
    }
    EXPECT_EQ(checksum.Digest(), XXH3_64bits(data.data(), data.size()));
  }
}

class SharedOutputTest : public ::testing::Test {
 protected:
  SharedBytes Bytes(size_t begin, size_t size) const {
    return {region_, region_->bytes().subspan(begin, size)};
  }

  Metrics metrics_;
  MemoryBudget budget_{1 << 20};
  const std::shared_ptr<const Region> region_ =
      Region::Create(4096, &budget_, &metrics_)->region;
};

TEST_F(SharedOutputTest, HasToHoldTheAnswer) {
  EXPECT_TRUE(CheckOutput(absl::nullopt, 1000).ok());
  EXPECT_TRUE(CheckOutput(Bytes(0, 1000), 1000).ok());
  const absl::Status status = CheckOutput(Bytes(0, 999), 1000);
  EXPECT_EQ(core::ErrorReason(status), "REGION_INVALID");
  EXPECT_EQ(core::ErrorField(status), "header.output");
}

TEST_F(SharedOutputTest, SharesNoByteWithTheTensor) {
  const auto apart = [this](size_t begin, size_t size) {
    return CheckApart(Bytes(1000, 100), region_,
                      region_->bytes().subspan(begin, size))
        .ok();
  };
  EXPECT_TRUE(apart(0, 1000));
  EXPECT_FALSE(apart(0, 1001));
  EXPECT_FALSE(apart(1050, 10));
  EXPECT_FALSE(apart(900, 300));
  EXPECT_FALSE(apart(1099, 1));
  EXPECT_TRUE(apart(1100, 100));
  EXPECT_TRUE(CheckApart(absl::nullopt, region_, region_->bytes()).ok());
  const auto other = Region::Create(4096, &budget_, &metrics_);
  ASSERT_TRUE(other.ok());
  EXPECT_TRUE(
      CheckApart(Bytes(0, 4096), other->region, other->region->bytes()).ok());
}

}  // namespace
}  // namespace quantd::server
