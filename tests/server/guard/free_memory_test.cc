#include "server/guard/free_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace quantd::server::free_memory_test {
namespace {

constexpr int64_t kMiB = 1 << 20;

class FreeMemoryTest : public ::testing::Test {
 protected:
  int64_t private_bytes_ = 30 * kMiB;
  // What is left when all that is free was given back.
  int64_t needed_bytes_ = 30 * kMiB;
  int count_ = 0;
  FreeMemory memory_{{[this] { return private_bytes_; },
                      [this] {
                        ++count_;
                        private_bytes_ = needed_bytes_;
                      }}};
};

TEST_F(FreeMemoryTest, GivesBackWhatStaysFree) {
  private_bytes_ = 500 * kMiB;
  memory_.Look(0);
  EXPECT_EQ(count_, 0);
  memory_.Look(0);
  EXPECT_EQ(count_, 1);
  for (int i = 0; i < 5; ++i) memory_.Look(0);
  EXPECT_EQ(count_, 1);
}

TEST_F(FreeMemoryTest, KeepsWhatIsUsedAndWhatIsLittle) {
  private_bytes_ = 500 * kMiB;
  for (int i = 0; i < 5; ++i) memory_.Look(450 * kMiB);
  private_bytes_ = 90 * kMiB;
  for (int i = 0; i < 5; ++i) memory_.Look(0);
  EXPECT_EQ(count_, 0);
}

TEST_F(FreeMemoryTest, KeepsWhatTheNextTensorTakes) {
  for (int i = 0; i < 5; ++i) {
    private_bytes_ = 500 * kMiB;
    memory_.Look(0);
    memory_.Look(450 * kMiB);
  }
  EXPECT_EQ(count_, 0);
}

TEST_F(FreeMemoryTest, DoesNotTryAgainForWhatIsNeeded) {
  private_bytes_ = 500 * kMiB;
  needed_bytes_ = 300 * kMiB;
  for (int i = 0; i < 10; ++i) memory_.Look(0);
  EXPECT_EQ(count_, 1);
  private_bytes_ = 400 * kMiB;
  for (int i = 0; i < 10; ++i) memory_.Look(0);
  EXPECT_EQ(count_, 2);
}

TEST(PrivateBytesTest, GrowsWithWhatIsTouched) {
  const int64_t before = PrivateBytes();
  ASSERT_GT(before, 0);
  std::vector<char> bytes(64 * kMiB, 1);
  EXPECT_GT(PrivateBytes(), before + 60 * kMiB);
  EXPECT_EQ(bytes.back(), 1);
}

}  // namespace
}  // namespace quantd::server::free_memory_test
