#include "server/rpc/scale_checker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/errors.h"
#include "quantd/v1/encoding.pb.h"

namespace quantd::server {
namespace {

using ::testing::HasSubstr;

template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(T));
}

// Six scales of a [6, 8] tensor.
v1::Encoding Outline() {
  v1::Encoding proto;
  proto.set_format(v1::NUMBER_FORMAT_INT8);
  for (const int64_t size : {1, 0}) proto.add_block_size(size);
  for (const int64_t count : {6, 1}) proto.add_scale_shape(count);
  proto.set_qmin(-128);
  proto.set_qmax(127);
  proto.set_scale_type(v1::SCALE_TYPE_FLOAT32);
  proto.set_scales_in_chunks(true);
  return proto;
}

// Scales of E4M3 under an outer one for every two.
v1::Encoding OutlineWithOuterScales() {
  v1::Encoding proto = Outline();
  proto.set_format(v1::NUMBER_FORMAT_NVFP4);
  proto.set_qmin(0);
  proto.set_qmax(15);
  proto.set_scale_type(v1::SCALE_TYPE_E4M3);
  for (const int64_t size : {2, 0}) proto.add_outer_block_size(size);
  return proto;
}

v1::ScaleChunk Chunk(uint64_t first, const std::vector<float>& scales) {
  v1::ScaleChunk chunk;
  chunk.set_first(first);
  chunk.set_scale(BytesOf(scales));
  return chunk;
}

// The reason, and the field.
std::string ErrorOf(const absl::Status& status) {
  return std::string(core::ErrorReason(status)) + " " +
         core::ErrorField(status);
}

TEST(ScaleCheckerTest, CountsTheScalesThatCome) {
  absl::StatusOr<ScaleChecker> checker = ScaleChecker::Create(Outline());
  ASSERT_TRUE(checker.ok()) << checker.status();
  EXPECT_FALSE(checker->has_zero_points());
  EXPECT_EQ(checker->Check(Chunk(0, {1, 2})), absl::OkStatus());
  EXPECT_EQ(checker->Check(Chunk(2, {3, 4, 5})), absl::OkStatus());
  EXPECT_EQ(checker->scale_count(), 5);
  EXPECT_EQ(core::ErrorReason(checker->Finish()), "SCALE_COUNT");
  EXPECT_EQ(checker->Check(Chunk(5, {6})), absl::OkStatus());
  EXPECT_EQ(checker->Finish(), absl::OkStatus());
  EXPECT_EQ(core::ErrorReason(checker->Check(Chunk(6, {7}))), "SCALE_COUNT");
}

// What is stored without scales could not be read.
TEST(ScaleCheckerTest, NoScalesAreRefused) {
  v1::Encoding outline = Outline();
  outline.set_scale_shape(0, 0);
  EXPECT_EQ(ErrorOf(ScaleChecker::Create(outline).status()),
            "BLOCK_SIZE_INVALID scale_shape");
}

TEST(ScaleCheckerTest, AnyNumberWillDoWhereTheShapeIsNotKnown) {
  v1::Encoding outline = Outline();
  outline.clear_scale_shape();
  absl::StatusOr<ScaleChecker> checker = ScaleChecker::Create(outline);
  ASSERT_TRUE(checker.ok()) << checker.status();
  // But there is one.
  EXPECT_EQ(core::ErrorReason(checker->Finish()), "SCALE_COUNT");
  EXPECT_EQ(checker->Check(Chunk(0, {1, 2, 3})), absl::OkStatus());
  EXPECT_EQ(checker->Finish(), absl::OkStatus());
}

TEST(ScaleCheckerTest, NamesAScaleByItsIndexInTheEncoding) {
  for (const float scale :
       {0.0f, -1.0f, 1e-40f, std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    absl::StatusOr<ScaleChecker> checker = ScaleChecker::Create(Outline());
    ASSERT_TRUE(checker.ok());
    ASSERT_TRUE(checker->Check(Chunk(0, {1, 2, 3})).ok());
    const absl::Status status = checker->Check(Chunk(3, {4, scale}));
    EXPECT_EQ(ErrorOf(status), "SCALE_INVALID scale") << scale;
    EXPECT_THAT(std::string(status.message()), HasSubstr("scale 4")) << scale;
  }
}

TEST(ScaleCheckerTest, RefusesGapsAndPartsOfScales) {
  absl::StatusOr<ScaleChecker> checker = ScaleChecker::Create(Outline());
  ASSERT_TRUE(checker.ok());
  v1::ScaleChunk cut = Chunk(0, {1});
  cut.mutable_scale()->pop_back();
  v1::ScaleChunk with_zero_points = Chunk(0, {1});
  with_zero_points.set_zero_point("\x01");
  for (const v1::ScaleChunk& chunk : {Chunk(1, {1}), cut, with_zero_points}) {
    EXPECT_EQ(core::ErrorReason(checker->Check(chunk)), "SCALE_COUNT");
  }
}

TEST(ScaleCheckerTest, ZeroPointsComeWithEachScaleIfAtAll) {
  v1::Encoding outline = Outline();
  outline.set_chunks_have_zero_points(true);
  absl::StatusOr<ScaleChecker> checker = ScaleChecker::Create(outline);
  ASSERT_TRUE(checker.ok());
  EXPECT_TRUE(checker->has_zero_points());
  v1::ScaleChunk chunk = Chunk(0, {1, 2});
  EXPECT_EQ(core::ErrorReason(checker->Check(chunk)), "SCALE_COUNT");
  chunk.set_zero_point(BytesOf<int8_t>({-128, 127}));
  EXPECT_EQ(checker->Check(chunk), absl::OkStatus());
}

TEST(ScaleCheckerTest, HoldsOuterScalesAndNothingElse) {
  absl::StatusOr<ScaleChecker> checker =
      ScaleChecker::Create(OutlineWithOuterScales());
  ASSERT_TRUE(checker.ok()) << checker.status();
  v1::ScaleChunk outer;
  outer.set_outer_scale(BytesOf<float>({1, 2}));
  EXPECT_EQ(checker->Check(outer), absl::OkStatus());
  outer.set_first_outer(2);
  outer.set_outer_scale(BytesOf<float>({3}));
  EXPECT_EQ(checker->Check(outer), absl::OkStatus());
  v1::ScaleChunk scales;
  scales.set_scale(std::string(4, '\x38'));
  EXPECT_EQ(checker->Check(scales), absl::OkStatus());
  EXPECT_EQ(checker->memory_bytes(), 3 * static_cast<int64_t>(sizeof(float)));
  scales.set_first(4);
  scales.set_scale(std::string(2, '\x38'));
  EXPECT_EQ(checker->Check(scales), absl::OkStatus());
  EXPECT_EQ(checker->Finish(), absl::OkStatus());
}

TEST(ScaleCheckerTest, MissesOuterScales) {
  absl::StatusOr<ScaleChecker> checker =
      ScaleChecker::Create(OutlineWithOuterScales());
  ASSERT_TRUE(checker.ok());
  v1::ScaleChunk chunk;
  chunk.set_outer_scale(BytesOf<float>({1, 2}));
  // Those of the first four.
  chunk.set_scale(std::string(4, '\x38'));
  ASSERT_EQ(checker->Check(chunk), absl::OkStatus());
  chunk.Clear();
  chunk.set_first(4);
  chunk.set_scale(std::string(2, '\x38'));
  EXPECT_EQ(core::ErrorReason(checker->Check(chunk)), "SCALE_COUNT");
  EXPECT_FALSE(checker->Finish().ok());
}

TEST(ScaleCheckerTest, RefusesOutlinesThatNoScalesMakeValid) {
  const struct {
    std::function<void(v1::Encoding*)> change;
    std::string error;
  } cases[] = {
      {[](v1::Encoding* e) { e->add_scale(1); },
       "SCALE_COUNT scales_in_chunks"},
      {[](v1::Encoding* e) { e->set_scale_code("1"); },
       "SCALE_COUNT scales_in_chunks"},
      {[](v1::Encoding* e) { e->set_format(v1::NUMBER_FORMAT_UNSPECIFIED); },
       "FORMAT_UNKNOWN format"},
      {[](v1::Encoding* e) { e->set_qmax(128); }, "CODE_RANGE_INVALID qmax"},
      // One block takes the whole dimension.
      {[](v1::Encoding* e) { e->set_scale_shape(1, 2); },
       "BLOCK_SIZE_INVALID scale_shape"},
      {[](v1::Encoding* e) { e->set_scale_shape(0, int64_t{1} << 60); },
       "BLOCK_SIZE_INVALID scale_shape"},
  };
  for (const auto& c : cases) {
    v1::Encoding outline = Outline();
    c.change(&outline);
    EXPECT_EQ(ErrorOf(ScaleChecker::Create(outline).status()), c.error);
  }
}

}  // namespace
}  // namespace quantd::server
