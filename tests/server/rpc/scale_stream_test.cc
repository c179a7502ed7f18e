#include "server/rpc/scale_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"
#include "quantd/v1/encoding.pb.h"
#include "tests/support/fake_tensor_rpc.h"

namespace quantd::server::scale_stream_test {
namespace {

using ::testing::Each;
using ::testing::SizeIs;

// As many scales as the budget of the environment has room for, and a few.
constexpr int64_t kScales = (int64_t{1} << 18) + 100;

v1::ScaleChunk Chunk(uint64_t first, int64_t count, float scale = 0.5f) {
  const std::vector<float> scales(count, scale);
  v1::ScaleChunk chunk;
  chunk.set_first(first);
  chunk.set_scale(std::string(reinterpret_cast<const char*>(scales.data()),
                              scales.size() * sizeof(float)));
  return chunk;
}

class IncomingScalesTest : public ::testing::Test {
 protected:
  static core::Encoding Int8() {
    core::Encoding encoding;
    encoding.format = core::FindFormatByName("int8")->format;
    encoding.qmin = -128;
    encoding.qmax = 127;
    encoding.scale_type = core::ScaleType::kFloat32;
    return encoding;
  }

  // A scale for each of `count` elements.
  std::unique_ptr<IncomingScales> Open(int64_t count, bool keep_all = false) {
    core::Encoding encoding = Int8();
    encoding.block_size = {1};
    absl::StatusOr<std::unique_ptr<IncomingScales>> scales =
        IncomingScales::Create(fake_.env, encoding,
                               *core::BlockLayout::Create({count}, {1}),
                               /*has_zero_points=*/false, 0, count, keep_all);
    EXPECT_TRUE(scales.ok()) << scales.status();
    return *std::move(scales);
  }

  testing::FakeEnvironment fake_;
};

TEST_F(IncomingScalesTest, ChargesMoreThanAFew) {
  std::unique_ptr<IncomingScales> scales = Open(kScales);
  ASSERT_TRUE(scales->Push(Chunk(0, 100)).ok());
  EXPECT_EQ(fake_.budget.used_bytes(), 0);
  ASSERT_TRUE(scales->Push(Chunk(100, 10000)).ok());
  EXPECT_EQ(fake_.budget.used_bytes(), 10100 * 4);
  // What goes makes room for as much.
  ASSERT_TRUE(scales->Advance(10100, 0, kScales).ok());
  ASSERT_TRUE(scales->Push(Chunk(10100, 10000)).ok());
  EXPECT_EQ(fake_.budget.used_bytes(), 10100 * 4);
  scales.reset();
  EXPECT_EQ(fake_.budget.used_bytes(), 0);
}

TEST_F(IncomingScalesTest, ScalesThatRowsShareTakeNoMoreThanCame) {
  constexpr int64_t kColumns = int64_t{1} << 40;
  core::Encoding encoding = Int8();
  encoding.block_size = {0, 1};
  const absl::StatusOr<std::unique_ptr<IncomingScales>> scales =
      IncomingScales::Create(
          fake_.env, encoding,
          *core::BlockLayout::Create({2, kColumns}, encoding.block_size),
          /*has_zero_points=*/false, 2 * kColumns - 4000, 2 * kColumns,
          /*keep_all=*/false);
  ASSERT_TRUE(scales.ok()) << scales.status();
  ASSERT_TRUE((*scales)->Push(Chunk(kColumns - 4000, 4000)).ok());
  EXPECT_EQ(fake_.budget.used_bytes(), 4000 * 4);
  EXPECT_THAT((*scales)->window().encoding().scale, SizeIs(4000));
  EXPECT_TRUE((*scales)->Advance(2 * kColumns - 4000, 4000, kColumns).ok());
}

TEST_F(IncomingScalesTest, TakesNothingWhileThereIsNoMemory) {
  const std::unique_ptr<IncomingScales> scales = Open(kScales);
  absl::StatusOr<MemoryBudget::Lease> other =
      fake_.budget.Acquire(int64_t{1} << 20, "");
  ASSERT_TRUE(other.ok());
  const absl::Status status = scales->Push(Chunk(0, 10000));
  EXPECT_EQ(core::ErrorReason(status), "MEMORY_BUDGET");
  EXPECT_GT(core::ErrorRetryAfter(status), absl::ZeroDuration());
  EXPECT_EQ(scales->window().end(), 0);
  other->Release();
  EXPECT_TRUE(scales->Push(Chunk(0, 10000)).ok());
  EXPECT_EQ(scales->window().end(), 10000);
  // More than the budget has in all.
  const absl::Status never = scales->Push(Chunk(10000, kScales - 10000));
  EXPECT_EQ(core::ErrorReason(never), "MEMORY_BUDGET");
  EXPECT_EQ(core::ErrorRetryAfter(never), absl::ZeroDuration());
}

TEST_F(IncomingScalesTest, PartsAreOneMessage) {
  const std::unique_ptr<IncomingScales> scales = Open(4);
  v1::ScaleChunk place;
  place.set_first(1);
  ASSERT_TRUE(scales->Push(Chunk(0, 1)).ok());
  ASSERT_TRUE(
      scales->Push({Chunk(0, 3).SerializeAsString(), place.SerializeAsString()})
          .ok());
  EXPECT_EQ(scales->window().end(), 4);
  const absl::Status broken = scales->Push({std::string("\x12\x7fx")});
  EXPECT_EQ(core::ErrorReason(broken), "MESSAGE_MALFORMED");
}

TEST_F(IncomingScalesTest, ScalesComeNoLaterThanTheirElements) {
  const std::unique_ptr<IncomingScales> scales = Open(8);
  ASSERT_TRUE(scales->Push(Chunk(0, 4)).ok());
  EXPECT_TRUE(scales->Advance(0, 4, 8).ok());
  const absl::Status late = scales->Advance(4, 1, 8);
  EXPECT_EQ(core::ErrorReason(late), "SCALE_COUNT");
  EXPECT_EQ(core::ErrorField(late), "scales.scale");
}

TEST_F(IncomingScalesTest, ChargesAllThatItKeepsBeforeItGrows) {
  constexpr int64_t kKept = int64_t{1} << 16;
  std::unique_ptr<IncomingScales> scales = Open(kKept, /*keep_all=*/true);
  ASSERT_TRUE(scales->Push(Chunk(0, 10)).ok());
  const std::vector<float>& kept = scales->window().encoding().scale;
  const float* const begin = kept.data();
  EXPECT_EQ(fake_.budget.used_bytes(), kKept * 4);
  for (int64_t first = 10; first < kKept; first += 1000) {
    ASSERT_TRUE(
        scales->Push(Chunk(first, std::min<int64_t>(1000, kKept - first)))
            .ok());
  }
  EXPECT_EQ(fake_.budget.used_bytes(), kKept * 4);
  EXPECT_THAT(kept, SizeIs(kKept));
  // Nothing was moved to more room.
  EXPECT_EQ(kept.capacity(), kKept);
  EXPECT_EQ(kept.data(), begin);
  // More than there ever is.
  scales = Open(int64_t{1} << 50, /*keep_all=*/true);
  EXPECT_EQ(core::ErrorReason(scales->Push(Chunk(0, 10))), "MEMORY_BUDGET");
}

TEST_F(IncomingScalesTest, GivesAllScalesOnceTheyAreThere) {
  const std::unique_ptr<IncomingScales> scales = Open(8, /*keep_all=*/true);
  ASSERT_TRUE(scales->Push(Chunk(0, 6, 2)).ok());
  EXPECT_TRUE(scales->Advance(6, 0, 8).ok());
  EXPECT_EQ(core::ErrorReason(scales->TakeWhole().status()), "SCALE_COUNT");
  ASSERT_TRUE(scales->Push(Chunk(6, 2, 2)).ok());
  const auto whole = scales->TakeWhole();
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_THAT((*whole)->scale, SizeIs(8));
  EXPECT_THAT((*whole)->scale, Each(2));
}

}  // namespace
}  // namespace quantd::server::scale_stream_test
