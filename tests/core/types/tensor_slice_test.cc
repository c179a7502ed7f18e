#include "core/types/tensor_slice.h"

#include <cstdint>
#include <numeric>
#include <vector>

#include "absl/types/span.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"
#include "gtest/gtest.h"

namespace quantd::core {
namespace {

// Index by index, and slowly.
std::vector<int64_t> NaiveOffsets(const TensorSlice& slice) {
  std::vector<int64_t> offsets;
  const int64_t count = *ElementCount(slice.shape);
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i;
    int64_t offset = 0;
    int64_t stride = 1;
    for (size_t d = slice.shape.size(); d-- > 0;) {
      offset += (slice.offset[d] + rest % slice.shape[d]) * stride;
      rest /= slice.shape[d];
      stride *= slice.global_shape[d];
    }
    offsets.push_back(offset);
  }
  return offsets;
}

std::vector<TensorSlice> Slices() {
  return {{{}, {}, {}},
          {{7}, {2}, {3}},
          {{4, 6}, {0, 0}, {4, 6}},
          {{4, 6}, {1, 0}, {2, 6}},
          {{4, 6}, {0, 2}, {4, 3}},
          {{5, 6, 7}, {1, 2, 3}, {3, 2, 4}},
          {{5, 6, 7}, {0, 2, 0}, {5, 3, 7}},
          {{5, 6, 7}, {2, 0, 0}, {1, 6, 7}},
          {{3, 4, 5, 2}, {1, 0, 1, 0}, {2, 4, 3, 2}},
          {{4, 6}, {2, 6}, {2, 0}}};
}

TEST(TensorSliceTest, KnowsWhereItsElementsAre) {
  for (const TensorSlice& slice : Slices()) {
    ASSERT_TRUE(CheckSlice(slice).ok());
    const std::vector<int64_t> want = NaiveOffsets(slice);
    const auto count = static_cast<int64_t>(want.size());
    for (int64_t first = 0; first <= count; ++first) {
      for (int64_t end = first; end <= count; ++end) {
        std::vector<int64_t> got;
        slice.ForEachRange(first, end - first,
                           [&](int64_t global_first, int64_t length) {
                             EXPECT_GT(length, 0);
                             for (int64_t i = 0; i < length; ++i) {
                               got.push_back(global_first + i);
                             }
                           });
        ASSERT_EQ(got, std::vector<int64_t>(want.begin() + first,
                                            want.begin() + end));
      }
    }
  }
}

TEST(TensorSliceTest, LiesWithinTheWhole) {
  for (const TensorSlice& slice :
       {TensorSlice{{4, 6}, {0}, {4, 6}}, TensorSlice{{4}, {0, 0}, {4, 6}},
        TensorSlice{{4, 6}, {1, 0}, {4, 6}},
        TensorSlice{{4, 6}, {0, -1}, {4, 2}},
        TensorSlice{{4, 6}, {0, INT64_MAX}, {4, 2}},
        TensorSlice{{4, INT64_MAX}, {0, 0}, {4, 6}},
        TensorSlice{{4, 6}, {0, 0}, {5, 6}}}) {
    EXPECT_EQ(ErrorReason(CheckSlice(slice)), "SHAPE_INVALID");
  }
}

TEST(TensorSliceTest, KnowsWhichBlocksItCuts) {
  struct Case {
    TensorSlice slice;
    std::vector<int64_t> block_size;
    bool cuts_none;
    bool has_whole;
  };
  const Case cases[] = {
      {{{4, 96}, {0, 32}, {4, 32}}, {1, 32}, true, true},
      {{{4, 96}, {0, 32}, {4, 33}}, {1, 32}, false, false},
      {{{4, 96}, {0, 31}, {4, 33}}, {1, 32}, false, false},
      // The last block is a part.
      {{{4, 90}, {0, 32}, {4, 58}}, {1, 32}, true, true},
      {{{4, 96}, {1, 0}, {2, 96}}, {}, true, false},
      {{{4, 96}, {1, 0}, {2, 96}}, {1, 0}, true, true},
      {{{4, 96}, {0, 32}, {4, 32}}, {1, 0}, true, false},
      // A block as large as the dimension.
      {{{4, 96}, {0, 32}, {4, 32}}, {1, 96}, true, false},
      {{{4, 96}, {0, 0}, {4, 96}}, {}, true, true},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(CheckCutsNoBlock(c.slice, c.block_size).ok(), c.cuts_none);
    EXPECT_EQ(CheckHasWholeBlocks(c.slice, c.block_size).ok(), c.has_whole);
  }
}

TEST(TensorSliceTest, ItsEncodingHasTheScalesOfItsElements) {
  struct Case {
    TensorSlice slice;
    std::vector<int64_t> block_size;
  };
  const Case cases[] = {
      {{{6, 75}, {2, 0}, {3, 75}}, {1, 32}},
      {{{6, 75}, {2, 32}, {3, 43}}, {1, 32}},
      {{{6, 75}, {0, 64}, {6, 11}}, {2, 32}},
      {{{6, 75}, {1, 5}, {4, 20}}, {}},
      {{{6, 75}, {1, 5}, {4, 20}}, {0, 5}},
      {{{6, 75}, {1, 7}, {4, 20}}, {1, 100}},
      {{{4, 6, 8}, {1, 2, 4}, {2, 4, 4}}, {1, 2, 4}},
      {{{4, 6, 8}, {1, 0, 0}, {2, 6, 8}}, {0, 1, 0}},
  };
  for (const Case& c : cases) {
    const BlockLayout whole =
        *BlockLayout::Create(c.slice.global_shape, c.block_size);
    const BlockLayout part = *BlockLayout::Create(c.slice.shape, c.block_size);
    Encoding encoding;
    encoding.format = FindFormatByName("uint8")->format;
    encoding.block_size = c.block_size;
    encoding.qmax = 255;
    encoding.scale_type = ScaleType::kFloat32;
    for (int64_t i = 0; i < whole.scale_count(); ++i) {
      encoding.scale.push_back(static_cast<float>(i + 1));
      encoding.zero_point.push_back(static_cast<int32_t>(i % 200));
    }
    const absl::StatusOr<Encoding> cut = CutToSlice(c.slice, encoding);
    ASSERT_TRUE(cut.ok()) << cut.status();
    ASSERT_TRUE(ValidateEncoding(*cut).ok()) << ValidateEncoding(*cut);
    ASSERT_TRUE(CheckEncodingFits(*cut, part).ok());
    const std::vector<int64_t> offsets = NaiveOffsets(c.slice);
    for (size_t i = 0; i < offsets.size(); ++i) {
      const int64_t want = whole.ScaleBounds(offsets[i], 1).first;
      const int64_t got = part.ScaleBounds(static_cast<int64_t>(i), 1).first;
      ASSERT_EQ(cut->scale[got], encoding.scale[want]) << i;
      ASSERT_EQ(cut->zero_point[got], encoding.zero_point[want]) << i;
    }
  }
}

TEST(TensorSliceTest, OuterScalesAreCutAsWell) {
  const TensorSlice slice{{4, 96}, {2, 32}, {2, 64}};
  Encoding encoding;
  encoding.format = FindFormatByName("float4_e2m1")->format;
  encoding.block_size = {1, 16};
  encoding.scale_type = ScaleType::kE4m3;
  encoding.outer_block_size = {1, 32};
  encoding.scale_shape = {4, 6};
  encoding.scale_code.resize(24);
  std::iota(encoding.scale_code.begin(), encoding.scale_code.end(), 0x30);
  encoding.outer_scale.resize(12);
  std::iota(encoding.outer_scale.begin(), encoding.outer_scale.end(), 1.0F);
  absl::StatusOr<Encoding> cut = CutToSlice(slice, encoding);
  ASSERT_TRUE(cut.ok()) << cut.status();
  EXPECT_EQ(cut->scale_code, (std::vector<uint8_t>{0x3E, 0x3F, 0x40, 0x41, 0x44,
                                                   0x45, 0x46, 0x47}));
  EXPECT_EQ(cut->outer_scale, (std::vector<float>{8, 9, 11, 12}));
  EXPECT_EQ(cut->scale_shape, (std::vector<int64_t>{2, 4}));
  EXPECT_EQ(
      ErrorReason(CutToSlice({{4, 96}, {2, 16}, {2, 64}}, encoding).status()),
      "BLOCK_SIZE_INVALID");
  // One for all of them is that of every slice.
  encoding.outer_block_size.clear();
  encoding.outer_scale = {3};
  cut = CutToSlice({{4, 96}, {2, 16}, {2, 64}}, encoding);
  ASSERT_TRUE(cut.ok()) << cut.status();
  EXPECT_EQ(cut->outer_scale, (std::vector<float>{3}));
  EXPECT_EQ(cut->scale_code.front(), 0x3D);
}

}  // namespace
}  // namespace quantd::core
