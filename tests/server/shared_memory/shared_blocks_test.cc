#include "server/shared_memory/shared_blocks.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <vector>

#include "absl/types/span.h"
#include "core/parallel/thread_pool.h"
#include "gtest/gtest.h"

namespace quantd::server {
namespace {

std::vector<uint8_t> Bytes(int64_t size) {
  std::vector<uint8_t> bytes(size);
  std::iota(bytes.begin(), bytes.end(), 1);
  return bytes;
}

TEST(ForEachBlockTest, TakesEveryBlockOnceAndFollowsInOrder) {
  core::ThreadPool pool(4);
  constexpr int64_t kBlockBytes = 16;
  for (const int64_t size : {0, 1, 15, 16, 17, 16 * 200, 16 * 1000 + 5}) {
    const std::vector<uint8_t> in = Bytes(size);
    const int64_t blocks = (size + kBlockBytes - 1) / kBlockBytes;
    std::vector<std::atomic<int>> worked(blocks);
    int64_t next = 0;
    std::atomic<int> following{0};
    ForEachBlock(
        &pool, in, kBlockBytes,
        [&](int64_t block, absl::Span<const uint8_t> part) {
          EXPECT_EQ(part.data(), in.data() + block * kBlockBytes);
          EXPECT_EQ(part.data() + part.size(),
                    in.data() + std::min(size, (block + 1) * kBlockBytes));
          worked[block].fetch_add(1);
        },
        [&](int64_t block) {
          EXPECT_EQ(following.fetch_add(1), 0);
          EXPECT_EQ(block, next++);
          EXPECT_EQ(worked[block].load(), 1);
          following.fetch_sub(1);
        });
    EXPECT_EQ(next, blocks);
  }
}

TEST(ForEachBlockTest, NeedsNoPool) {
  const std::vector<uint8_t> in = Bytes(100);
  std::vector<int64_t> order;
  ForEachBlock(
      nullptr, in, 30,
      [&](int64_t block, absl::Span<const uint8_t>) {
        order.push_back(2 * block);
      },
      [&](int64_t block) { order.push_back(2 * block + 1); });
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(PrivateCopyTest, HasAllBytesHoweverManyThereWereBefore) {
  core::ThreadPool pool(3);
  PrivateCopy copy;
  for (const int64_t size : {int64_t{5}, 3 * kSharedBlockBytes + 7, int64_t{0},
                             kSharedBlockBytes, 5 * kSharedBlockBytes - 1}) {
    const std::vector<uint8_t> shared = Bytes(size);
    const absl::Span<const uint8_t> copied = copy.Of(shared, &pool);
    EXPECT_TRUE(copied == absl::MakeConstSpan(shared)) << size;
    if (size > 0) {
      EXPECT_NE(copied.data(), shared.data());
    }
  }
}

}  // namespace
}  // namespace quantd::server
