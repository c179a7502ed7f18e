#include "core/types/scale_window.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"
#include "core/types/scale_bytes.h"

namespace quantd::core {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()),
          values.size() * sizeof(T)};
}

absl::Span<const uint8_t> SpanOf(absl::string_view bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

// int8 in blocks of 2 on 8 elements: 4 scales.
class ScaleWindowTest : public ::testing::Test {
 protected:
  ScaleWindowTest() {
    encoding_.format = FindFormatByName("int8")->format;
    encoding_.block_size = {2};
    encoding_.qmin = -128;
    encoding_.qmax = 127;
    encoding_.scale_type = ScaleType::kFloat32;
  }

  ScaleWindow Window(bool has_zero_points = false, int64_t begin = 0,
                     int64_t end = 8) {
    const BlockLayout layout = *BlockLayout::Create({8}, {2});
    return ScaleWindow(encoding_, layout,
                       HasOuterScales(encoding_.scale_type)
                           ? *OuterLayout(encoding_, layout.scale_shape())
                           : *BlockLayout::Create({}, {}),
                       has_zero_points, begin, end);
  }

  // What is wrong, as REASON at the field; "" for nothing.
  static std::string Append(ScaleWindow* window, uint64_t first,
                            absl::string_view scale,
                            absl::string_view zero_point = "",
                            uint64_t first_outer = 0,
                            absl::string_view outer_scale = "") {
    const absl::Status status =
        window->Append({first, SpanOf(scale), SpanOf(zero_point), first_outer,
                        SpanOf(outer_scale)});
    if (status.ok()) return "";
    return absl::StrCat(ErrorReason(status), " at ", ErrorField(status));
  }

  Encoding encoding_;
};

TEST_F(ScaleWindowTest, TakesScalesInOrder) {
  ScaleWindow window = Window();
  EXPECT_EQ(Append(&window, 0, BytesOf<float>({1, 2})), "");
  EXPECT_EQ(Append(&window, 2, ""), "");
  EXPECT_EQ(Append(&window, 2, BytesOf<float>({3, 4})), "");
  EXPECT_THAT(window.encoding().scale, ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(window.begin(), 0);
  EXPECT_EQ(window.end(), 4);
  EXPECT_TRUE(window.CheckCovers(0, 8).ok());
}

TEST_F(ScaleWindowTest, NamesWhatIsWrongWithPlaces) {
  ScaleWindow window = Window();
  EXPECT_EQ(Append(&window, 1, BytesOf<float>({1})), "SCALE_COUNT at first");
  EXPECT_EQ(Append(&window, 0, BytesOf<float>({1})), "");
  for (const uint64_t first : {uint64_t{0}, uint64_t{2}, ~uint64_t{0}}) {
    EXPECT_EQ(Append(&window, first, BytesOf<float>({1})),
              "SCALE_COUNT at first");
  }
  EXPECT_EQ(Append(&window, 1, BytesOf<float>({1, 1, 1, 1})),
            "SCALE_COUNT at scale");
  EXPECT_EQ(Append(&window, 1, BytesOf<float>({1, 1, 1})), "");
  // After the end.
  EXPECT_EQ(Append(&window, 4, BytesOf<float>({1})), "SCALE_COUNT at scale");
}

TEST_F(ScaleWindowTest, NamesWhatIsWrongWithBytes) {
  ScaleWindow window = Window();
  EXPECT_EQ(Append(&window, 0, "abcde"), "SCALE_COUNT at scale");
  EXPECT_EQ(Append(&window, 0, BytesOf<float>({1}), "x"),
            "SCALE_COUNT at zero_point");
  EXPECT_EQ(Append(&window, 0, BytesOf<float>({1}), "", 0, "abcd"),
            "SCALE_COUNT at outer_scale");
  EXPECT_EQ(Append(&window, 0, BytesOf<float>({0})), "SCALE_INVALID at scale");
  ScaleWindow with = Window(/*has_zero_points=*/true);
  EXPECT_EQ(Append(&with, 0, BytesOf<float>({1, 2})),
            "SCALE_COUNT at zero_point");
  EXPECT_EQ(Append(&with, 0, BytesOf<float>({1, 2}), "x"),
            "SCALE_COUNT at zero_point");
  EXPECT_EQ(Append(&with, 0, BytesOf<float>({1, 2}), "\x01\xff"), "");
  EXPECT_THAT(with.encoding().zero_point, ElementsAre(1, -1));
}

TEST_F(ScaleWindowTest, ZeroPointsThatCodesCannotBeAreRefused) {
  encoding_.exclude_zero = true;
  ScaleWindow window = Window(/*has_zero_points=*/true);
  EXPECT_EQ(Append(&window, 0, BytesOf<float>({1}),
                   BytesOf<int32_t>({kMaxZeroPoint + 1})),
            "ZERO_POINT_RANGE at zero_point");
}

TEST_F(ScaleWindowTest, TakesRealZeroPointsAsFloats) {
  encoding_.zero_points_are_real = true;
  ScaleWindow refused = Window(/*has_zero_points=*/true);
  EXPECT_EQ(Append(&refused, 0, BytesOf<float>({1}), "x"),
            "SCALE_COUNT at zero_point");
  EXPECT_EQ(Append(&refused, 0, BytesOf<float>({1}), BytesOf<float>({127.5f})),
            "ZERO_POINT_RANGE at real_zero_point");
  ScaleWindow window = Window(/*has_zero_points=*/true);
  EXPECT_EQ(Append(&window, 0, BytesOf<float>({1, 2, 3}),
                   BytesOf<float>({-0.5f, 3, 126.25f})),
            "");
  EXPECT_THAT(window.encoding().real_zero_point,
              ElementsAre(-0.5f, 3, 126.25f));
  EXPECT_THAT(window.encoding().zero_point, IsEmpty());
  std::string scale, zero_point;
  AppendScaleBytes(window.encoding(), 1, 3, &scale, &zero_point);
  EXPECT_EQ(zero_point, BytesOf<float>({3, 126.25f}));
  window.Drop(6, kAll);
  EXPECT_THAT(window.encoding().real_zero_point, IsEmpty());
}

TEST_F(ScaleWindowTest, BeginsUpToTheFirstScaleThatIsNeeded) {
  // Elements 4 to 8 use scales 2 and 3.
  ScaleWindow window = Window(false, 4, 8);
  EXPECT_EQ(window.needed().first, 2);
  EXPECT_EQ(Append(&window, 3, BytesOf<float>({1})), "SCALE_COUNT at first");
  EXPECT_EQ(Append(&window, 1, BytesOf<float>({1, 2})), "");
  EXPECT_EQ(window.begin(), 1);
  EXPECT_TRUE(window.CheckCovers(4, 2).ok());
  EXPECT_EQ(ErrorReason(window.CheckCovers(4, 3)), "SCALE_COUNT");
  EXPECT_TRUE(window.CheckCovers(8, 0).ok());
}

TEST_F(ScaleWindowTest, LetsGoOfWhatNothingUsesAnyMore) {
  ScaleWindow window = Window();
  ASSERT_EQ(Append(&window, 0, BytesOf<float>({1, 2, 3, 4})), "");
  const int64_t bytes = window.MemoryBytes(0);
  EXPECT_EQ(bytes, 16);
  // One of four is not worth the work.
  window.Drop(2, kAll);
  EXPECT_EQ(window.begin(), 0);
  window.Drop(4, /*keep=*/0);
  EXPECT_EQ(window.begin(), 0);
  window.Drop(4, kAll);
  EXPECT_EQ(window.begin(), 2);
  EXPECT_EQ(window.end(), 4);
  EXPECT_THAT(window.encoding().scale, ElementsAre(3, 4));
  EXPECT_EQ(window.layout().ScaleBounds(4, 2).first, 2);
  EXPECT_EQ(window.MemoryBytes(0), 8);
  EXPECT_EQ(window.MemoryBytes(1), 12);
}

TEST_F(ScaleWindowTest, ReadsScalesAsTheyAreStored) {
  const struct {
    ScaleType type;
    std::string bytes;
  } cases[] = {{ScaleType::kFloat16, BytesOf<uint16_t>({0x3c00, 0x3800})},
               {ScaleType::kBfloat16, BytesOf<uint16_t>({0x3f80, 0x3f00})}};
  for (const auto& one : cases) {
    encoding_.scale_type = one.type;
    ScaleWindow window = Window();
    EXPECT_EQ(Append(&window, 0, one.bytes), "");
    EXPECT_THAT(window.encoding().scale, ElementsAre(1, 0.5f));
    std::string scale, zero_point;
    AppendScaleBytes(window.encoding(), 0, 2, &scale, &zero_point);
    EXPECT_EQ(scale, one.bytes);
    EXPECT_THAT(zero_point, IsEmpty());
  }
}

TEST_F(ScaleWindowTest, CodesMultiplyOuterScalesThatCameBefore) {
  encoding_.format = FindFormatByName("nvfp4")->format;
  encoding_.scale_type = ScaleType::kE4m3;
  encoding_.qmin = 0;
  encoding_.qmax = 15;
  // One outer scale for two blocks.
  encoding_.outer_block_size = {4};
  encoding_.scale_shape = {4};
  // 1.0 as E4M3 is 0x38.
  ScaleWindow late = Window();
  EXPECT_EQ(Append(&late, 0, "\x38"), "SCALE_COUNT at outer_scale");
  ScaleWindow window = Window();
  EXPECT_EQ(Append(&window, 0, "", "", 1, BytesOf<float>({2})),
            "SCALE_COUNT at first_outer");
  EXPECT_EQ(Append(&window, 0, "", "", 0, "abc"), "SCALE_COUNT at outer_scale");
  EXPECT_EQ(Append(&window, 0, "", "", 0, BytesOf<float>({1, 1, 1})),
            "SCALE_COUNT at outer_scale");
  EXPECT_EQ(Append(&window, 0, "\x38\x40", "", 0, BytesOf<float>({2})), "");
  EXPECT_EQ(Append(&window, 2, "", "", 0, BytesOf<float>({3})),
            "SCALE_COUNT at first_outer");
  EXPECT_EQ(Append(&window, 2, "\x38\x38", "", 1, BytesOf<float>({3})), "");
  EXPECT_THAT(window.encoding().scale, ElementsAre(2, 4, 3, 3));
  EXPECT_EQ(window.MemoryBytes(0), 4 * 5 + 2 * 4);
}

TEST_F(ScaleWindowTest, TakesTheScalesOfAQuantizer) {
  ScaleWindow window = Window(false, 4, 8);
  Encoding scales;
  scales.scale = {1, 2};
  window.Append(scales);
  EXPECT_EQ(window.begin(), 2);
  EXPECT_EQ(window.end(), 4);
  const Encoding taken = window.TakeEncoding();
  EXPECT_THAT(taken.scale, ElementsAre(1, 2));
}

TEST_F(ScaleWindowTest, KeepsAllScalesWhileSeveralRowsShareThem) {
  encoding_.block_size = {0, 1};
  const BlockLayout layout = *BlockLayout::Create({4, 4}, {0, 1});
  ScaleWindow window(encoding_, layout, *BlockLayout::Create({}, {}), false, 0,
                     16);
  ASSERT_EQ(Append(&window, 0, BytesOf<float>({1, 2, 3, 4})), "");
  window.Drop(11, kAll);
  EXPECT_EQ(window.begin(), 0);
  window.Drop(14, kAll);
  EXPECT_EQ(window.begin(), 2);
  EXPECT_THAT(window.encoding().scale, ElementsAre(3, 4));
}

TEST_F(ScaleWindowTest, HoldsNothingBeforeARangeOfARow) {
  encoding_.block_size = {0, 1};
  constexpr int64_t kColumns = int64_t{1} << 50;
  const BlockLayout layout =
      *BlockLayout::Create({2, kColumns}, encoding_.block_size);
  for (const bool has_zero_points : {false, true}) {
    ScaleWindow window(encoding_, layout, *BlockLayout::Create({}, {}),
                       has_zero_points, 2 * kColumns - 2, 2 * kColumns);
    EXPECT_EQ(Append(&window, kColumns - 2, BytesOf<float>({1, 2}),
                     has_zero_points ? "ab" : ""),
              "");
    EXPECT_EQ(window.begin(), kColumns - 2);
    EXPECT_EQ(window.MemoryBytes(0), has_zero_points ? 16 : 8);
    EXPECT_TRUE(window.CheckCovers(2 * kColumns - 2, 2).ok());
  }
}

}  // namespace
}  // namespace quantd::core
