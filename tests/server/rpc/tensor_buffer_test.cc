#include "server/rpc/tensor_buffer.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/statistics/histogram.h"
#include "core/types/block_layout.h"
#include "gtest/gtest.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/rpc_environment.h"

namespace quantd::server {
namespace {

constexpr int64_t kBlock = TensorBuffer::kBlockBytes;

class TensorBufferTest : public ::testing::Test {
 protected:
  TensorBufferTest() { env_.budget = &budget_; }

  MemoryBudget budget_{4 * kBlock};
  RpcEnvironment env_{};
};

std::vector<uint8_t> Numbered(int64_t size) {
  std::vector<uint8_t> bytes(static_cast<size_t>(size));
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<uint8_t>(i * 31 >> 3);
  }
  return bytes;
}

TEST_F(TensorBufferTest, KeepsBytesInOrderAcrossBlocks) {
  const int64_t total = 2 * kBlock + 100;
  const std::vector<uint8_t> bytes = Numbered(total);
  TensorBuffer buffer(env_, total, 0);
  for (int64_t at = 0; at < total;) {
    const int64_t size = std::min<int64_t>(700'001, total - at);
    ASSERT_TRUE(buffer.Reserve(size).ok());
    buffer.Append(absl::MakeConstSpan(bytes).subspan(
        static_cast<size_t>(at), static_cast<size_t>(size)));
    at += size;
  }
  ASSERT_EQ(buffer.block_count(), 3);
  std::vector<uint8_t> kept;
  for (int64_t i = 0; i < buffer.block_count(); ++i) {
    kept.insert(kept.end(), buffer.block(i).begin(), buffer.block(i).end());
  }
  EXPECT_EQ(kept, bytes);
}

TEST_F(TensorBufferTest, GivesRowsInBands) {
  constexpr int64_t kRowBytes = 1000;
  const int64_t rows = kBlock / kRowBytes + 10;
  const std::vector<uint8_t> bytes = Numbered(rows * kRowBytes);
  TensorBuffer buffer(env_, rows * kRowBytes, 0);
  ASSERT_TRUE(buffer.Reserve(rows * kRowBytes).ok());
  buffer.Append(bytes);
  for (const int64_t band_rows : {int64_t{7}, rows - 1, rows}) {
    std::vector<uint8_t> got;
    const absl::Status status = buffer.ForEachBand(
        kRowBytes, band_rows,
        [&](int64_t row, int64_t count, const uint8_t* reals) {
          EXPECT_EQ(row * kRowBytes, static_cast<int64_t>(got.size()));
          EXPECT_EQ(count, std::min(band_rows, rows - row));
          got.insert(got.end(), reals, reals + count * kRowBytes);
          return absl::OkStatus();
        });
    EXPECT_EQ(status, absl::OkStatus());
    EXPECT_EQ(got, bytes);
  }
  int calls = 0;
  EXPECT_EQ(buffer.ForEachBand(kRowBytes, 1,
                               [&](int64_t, int64_t, const uint8_t*) {
                                 return ++calls == 3 ? core::StoppedError()
                                                     : absl::OkStatus();
                               }),
            core::StoppedError());
  EXPECT_EQ(calls, 3);
}

TEST_F(TensorBufferTest, ChargesBlocksAsTheyCome) {
  {
    TensorBuffer buffer(env_, 3 * kBlock / 2, 0);
    EXPECT_EQ(budget_.used_bytes(), 0);
    ASSERT_TRUE(buffer.Reserve(1).ok());
    EXPECT_EQ(budget_.used_bytes(), kBlock);
    // Asked for again, it is not charged again.
    ASSERT_TRUE(buffer.Reserve(kBlock).ok());
    EXPECT_EQ(budget_.used_bytes(), kBlock);
    // No more than the tensor.
    ASSERT_TRUE(buffer.Reserve(kBlock + 1).ok());
    EXPECT_EQ(budget_.used_bytes(), 3 * kBlock / 2);
  }
  EXPECT_EQ(budget_.used_bytes(), 0);
}

TEST_F(TensorBufferTest, SaysWhereThereIsNoRoom) {
  absl::StatusOr<MemoryBudget::Lease> other = budget_.Acquire(kBlock, "wait");
  ASSERT_TRUE(other.ok()) << other.status();
  TensorBuffer buffer(env_, 4 * kBlock, 0);
  EXPECT_TRUE(buffer.Reserve(3 * kBlock).ok());
  const absl::Status status = buffer.Reserve(4 * kBlock);
  EXPECT_EQ(core::ErrorReason(status), "MEMORY_BUDGET");
  EXPECT_GT(core::ErrorRetryAfter(status), absl::ZeroDuration());
  other->Release();
  EXPECT_TRUE(buffer.Reserve(4 * kBlock).ok());
}

TEST_F(TensorBufferTest, TakesNothingOfATensorThatNeverFits) {
  TensorBuffer buffer(env_, 4 * kBlock + 1, 0);
  const absl::Status status = buffer.Reserve(1);
  EXPECT_EQ(core::ErrorReason(status), "MEMORY_BUDGET");
  EXPECT_EQ(core::ErrorRetryAfter(status), absl::ZeroDuration());
  EXPECT_EQ(budget_.used_bytes(), 0);
  // With what is leased for it besides.
  TensorBuffer other(env_, 3 * kBlock, kBlock + 1);
  EXPECT_EQ(core::ErrorRetryAfter(other.Reserve(1)), absl::ZeroDuration());
  TensorBuffer fitting(env_, 3 * kBlock, kBlock);
  EXPECT_TRUE(fitting.Reserve(1).ok());
}

TEST_F(TensorBufferTest, HoldsTheElementsOfItsTensor) {
  const int64_t count = kBlock / 4 + 10;
  std::vector<float> reals(static_cast<size_t>(count), 1.0f);
  reals.back() = -8;
  TensorBuffer buffer(env_, count * 4, 0);
  ASSERT_TRUE(buffer.Reserve(count * 4).ok());
  buffer.Append({reinterpret_cast<const uint8_t*>(reals.data()),
                 reals.size() * sizeof(float)});
  const auto layout = core::BlockLayout::Create({count}, {});
  ASSERT_TRUE(layout.ok()) << layout.status();
  const core::Histogram histogram =
      buffer.Held(*layout, core::ElementType::kFloat32).HistogramOf(0, 4);
  core::Histogram expected(4);
  expected.Add(reals.data(), count);
  EXPECT_EQ(histogram, expected);
}

}  // namespace
}  // namespace quantd::server
