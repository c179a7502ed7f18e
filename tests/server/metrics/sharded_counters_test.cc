#include "server/metrics/sharded_counters.h"

#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace quantd::server {
namespace {

TEST(ShardedCountersTest, AddsUpWhatManyThreadsAdd) {
  // More threads than copies; more counters than a line has.
  constexpr int kCount = 19;
  constexpr int kThreads = 40;
  constexpr int kTimes = 200;
  ShardedCounters counters(kCount);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&counters] {
      for (int i = 0; i < kTimes; ++i) {
        for (int c = 0; c < kCount; ++c) counters.Add(c, c - 3);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int c = 0; c < kCount; ++c) {
    EXPECT_EQ(counters.Sum(c), int64_t{kThreads} * kTimes * (c - 3)) << c;
  }
}

}  // namespace
}  // namespace quantd::server
