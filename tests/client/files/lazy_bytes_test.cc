#include "client/files/lazy_bytes.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"

namespace quantd::files {
namespace {

constexpr size_t kSizeBytes = 10000;

std::shared_ptr<LazyBytes> Make(int* fill_count) {
  return std::make_shared<LazyBytes>(
      kSizeBytes, [fill_count](absl::Span<uint8_t> out) {
        // A page that was used before would have what was there.
        EXPECT_EQ(out[kSizeBytes - 1], 0);
        std::fill(out.begin(), out.end(), static_cast<uint8_t>(++*fill_count));
      });
}

TEST(LazyBytesTest, AreMadeForTheFirstHolderAndGoneAfterTheLast) {
  int fill_count = 0;
  const std::shared_ptr<LazyBytes> bytes = Make(&fill_count);
  EXPECT_EQ(bytes->span().size(), kSizeBytes);
  EXPECT_EQ(fill_count, 0);
  std::shared_ptr<const void> first = bytes->Hold();
  std::shared_ptr<const void> second = bytes->Hold();
  EXPECT_EQ(fill_count, 1);
  first = nullptr;
  EXPECT_EQ(bytes->span()[kSizeBytes - 1], 1);
  second = nullptr;
  second = bytes->Hold();
  EXPECT_EQ(fill_count, 2);
  EXPECT_EQ(bytes->span()[0], 2);
}

TEST(LazyBytesTest, StayWhileSomebodyHoldsThem) {
  int fill_count = 0;
  std::shared_ptr<LazyBytes> bytes = Make(&fill_count);
  const absl::Span<const uint8_t> span = bytes->span();
  const std::shared_ptr<const void> hold = bytes->Hold();
  bytes = nullptr;
  EXPECT_EQ(span[1], 1);
}

TEST(LazyBytesTest, ThreadsHoldTheSameBytes) {
  int fill_count = 0;
  const std::shared_ptr<LazyBytes> bytes = Make(&fill_count);
  const std::shared_ptr<const void> held = bytes->Hold();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&bytes] {
      for (int n = 0; n < 100; ++n) {
        const std::shared_ptr<const void> hold = bytes->Hold();
        EXPECT_EQ(bytes->span()[kSizeBytes / 2], 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(fill_count, 1);
}

TEST(LazyBytesDeathTest, WhoDoesNotHoldThemNotices) {
  int fill_count = 0;
  const std::shared_ptr<LazyBytes> bytes = Make(&fill_count);
  EXPECT_DEATH(
      {
        const volatile uint8_t* const first = bytes->span().data();
        static_cast<void>(*first);
      },
      "");
}

}  // namespace
}  // namespace quantd::files
