#include "server/shared_memory/region.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <limits>

#include "core/errors.h"
#include "gtest/gtest.h"
#include "server/guard/memory_budget.h"
#include "server/metrics/metrics.h"
#include "tests/support/metric_value.h"

namespace quantd::server {
namespace {

class RegionTest : public ::testing::Test {
 protected:
  auto Create(uint64_t size_bytes) {
    return Region::Create(size_bytes, &budget_, &metrics_);
  }

  Metrics metrics_;
  MemoryBudget budget_{1 << 20};
};

TEST_F(RegionTest, IsWholePagesAndReleasedWithItsUser) {
  {
    const auto created = Create(5000);
    ASSERT_TRUE(created.ok()) << created.status();
    EXPECT_EQ(created->region->bytes().size(), 8192u);
    EXPECT_EQ(created->region->id().size(), Region::kIdBytes);
    EXPECT_EQ(budget_.used_bytes(), 8192);
    EXPECT_EQ(testing::MetricValue(metrics_, "quantd_shared_memory_bytes"),
              8192);
    const auto other = Create(1);
    ASSERT_TRUE(other.ok());
    EXPECT_NE(other->region->id(), created->region->id());
  }
  EXPECT_EQ(budget_.used_bytes(), 0);
  EXPECT_EQ(testing::MetricValue(metrics_, "quantd_shared_memory_bytes"), 0);
}

TEST_F(RegionTest, TheClientMapsTheSameBytesAndCannotShrinkThem) {
  const auto created = Create(4096);
  ASSERT_TRUE(created.ok());
  void* const mapped = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED,
                            created->file.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  static_cast<uint8_t*>(mapped)[4095] = 42;
  EXPECT_EQ(created->region->bytes()[4095], 42);
  munmap(mapped, 4096);
  EXPECT_NE(ftruncate(created->file.get(), 0), 0);
  EXPECT_NE(ftruncate(created->file.get(), 8192), 0);
}

TEST_F(RegionTest, RefusesNothingAndMoreThanTheBudget) {
  EXPECT_EQ(core::ErrorReason(Create(0).status()), "REGION_INVALID");
  for (const uint64_t size :
       {uint64_t{(1 << 20) + 1}, std::numeric_limits<uint64_t>::max()}) {
    EXPECT_EQ(core::ErrorReason(Create(size).status()), "MEMORY_BUDGET")
        << size;
  }
  EXPECT_EQ(budget_.used_bytes(), 0);
  EXPECT_TRUE(Create(1 << 20).ok());
}

}  // namespace
}  // namespace quantd::server
