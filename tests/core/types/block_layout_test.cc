#include "core/types/block_layout.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "core/errors.h"
#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core {
namespace {

// The bounds of a range, bands that share no scale, and windows.
void ExpectBounds(const LayoutCase& layout_case, int64_t first, int64_t count) {
  const BlockLayout layout = layout_case.Layout();
  if (count == 0) return;
  int64_t low = NaiveScaleIndex(layout_case, first), high = low;
  for (int64_t i = first; i < first + count; ++i) {
    low = std::min(low, NaiveScaleIndex(layout_case, i));
    high = std::max(high, NaiveScaleIndex(layout_case, i));
  }
  const BlockLayout::ScaleRange bounds = layout.ScaleBounds(first, count);
  ASSERT_EQ(bounds.first, low) << first << " " << count;
  ASSERT_EQ(bounds.end, high + 1) << first << " " << count;

  const BlockLayout window = layout.Window(low);
  EXPECT_EQ(window.first_scale(), low);
  window.ForEachRun(first, count, [&](const BlockLayout::Run& run) {
    ASSERT_EQ(run.scale_index, NaiveScaleIndex(layout_case, run.begin) - low);
  });
  EXPECT_EQ(window.ScaleBounds(first, count).first, low);

  // Before and after the border of a band there is no scale in common.
  const int64_t border = first / layout.band_size() * layout.band_size();
  if (border == 0) return;
  EXPECT_EQ(layout.ScaleBounds(0, border).end,
            layout.ScaleBounds(border, layout.element_count() - border).first);
}

// Every element of [first, first + count) once, in order, with the scale index
// of the formula.
void ExpectCovers(const LayoutCase& layout_case, int64_t first, int64_t count) {
  const BlockLayout layout = layout_case.Layout();
  int64_t position = first;
  layout.ForEachRun(first, count, [&](const BlockLayout::Run& run) {
    ASSERT_EQ(run.begin, position);
    ASSERT_GT(run.count, 0);
    ASSERT_TRUE(run.scale_step == 0 || run.scale_step == 1);
    for (int64_t k = 0; k < run.count; ++k) {
      ASSERT_EQ(run.scale_index + k * run.scale_step,
                NaiveScaleIndex(layout_case, position + k))
          << "element " << position + k;
    }
    position += run.count;
  });
  EXPECT_EQ(position, first + count);

  position = first;
  BlockLayout::RowCursor rows(layout, first, count);
  BlockLayout::Row row;
  while (rows.Next(&row)) {
    ASSERT_EQ(row.begin, position);
    ASSERT_GT(row.count, 0);
    ASSERT_LT(row.offset, row.block);
    ASSERT_EQ(row.block, layout.row_block());
    for (int64_t k = 0; k < row.count; ++k, ++position) {
      ASSERT_EQ(row.scale_index + (row.offset + k) / row.block,
                NaiveScaleIndex(layout_case, position))
          << "element " << position;
    }
    // Rows end where the formula begins anew, or with the range.
    ASSERT_TRUE(position % layout.row_size() == 0 || position == first + count);
  }
  EXPECT_EQ(position, first + count);
  ExpectBounds(layout_case, first, count);
}

// Every element of every scale index once, in order.
void ExpectBlocks(const LayoutCase& layout_case) {
  const BlockLayout layout = layout_case.Layout();
  if (layout.element_count() == 0) {
    EXPECT_EQ(layout.largest_block(), 0);
    return;
  }
  std::vector<std::vector<int64_t>> want(
      static_cast<size_t>(layout.scale_count()));
  for (int64_t i = 0; i < layout.element_count(); ++i) {
    want[static_cast<size_t>(NaiveScaleIndex(layout_case, i))].push_back(i);
  }
  size_t largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    BlockLayout::BlockCursor cursor(layout, static_cast<int64_t>(i));
    EXPECT_EQ(cursor.count(), want[i].size());
    std::vector<int64_t> got;
    int64_t begin = 0;
    int64_t count = 0;
    while (cursor.Next(&begin, &count)) {
      ASSERT_GT(count, 0);
      for (int64_t k = 0; k < count; ++k) got.push_back(begin + k);
    }
    ASSERT_EQ(got, want[i]) << i;
    largest = std::max(largest, want[i].size());
  }
  EXPECT_EQ(layout.largest_block(), largest);
}

TEST(BlockLayoutTest, KnowsWhetherRowsShareScales) {
  const auto share = [](const LayoutCase& layout_case) {
    return layout_case.Layout().rows_share_scales();
  };
  EXPECT_TRUE(share({{8, 4, 2}, {}}));
  EXPECT_TRUE(share({{8, 4, 2}, {0, 0, 1}}));
  EXPECT_TRUE(share({{8, 6}, {0, 2}}));
  EXPECT_FALSE(share({{8, 4, 3}, {4, 0, 2}}));
  EXPECT_FALSE(share({{8, 4, 3}, {2, 0, 1}}));
}

TEST(BlockLayoutTest, FollowsTheFormulaFromEveryStart) {
  for (const LayoutCase& layout_case : AllLayoutCases()) {
    SCOPED_TRACE(layout_case.Name());
    const int64_t total = layout_case.Layout().element_count();
    ExpectCovers(layout_case, 0, total);
    ExpectBlocks(layout_case);
    for (int64_t first = 0; first < std::min<int64_t>(total, 300); ++first) {
      ExpectCovers(layout_case, first, std::min<int64_t>(total - first, 97));
    }
    if (HasFatalFailure()) return;
  }
}

TEST(BlockLayoutTest, FollowsTheFormulaOnRandomShapes) {
  std::mt19937 random(5);
  for (int round = 0; round < 3000; ++round) {
    LayoutCase layout_case;
    const int rank = static_cast<int>(random() % 5);
    for (int d = 0; d < rank; ++d) {
      layout_case.shape.push_back(1 + random() % 7);
      layout_case.block.push_back(random() % 9);
    }
    SCOPED_TRACE(layout_case.Name());
    const int64_t total = layout_case.Layout().element_count();
    ExpectCovers(layout_case, 0, total);
    const int64_t first = random() % total;
    ExpectCovers(layout_case, first, random() % (total - first + 1));
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST(BlockLayoutTest, CountsScalesPerDimension) {
  const BlockLayout layout = *BlockLayout::Create({5, 10, 7}, {0, 3, 1});
  EXPECT_EQ(layout.scale_shape(), (std::vector<int64_t>{1, 4, 7}));
  EXPECT_EQ(layout.scale_count(), 28);
  EXPECT_EQ(layout.element_count(), 350);
}

TEST(BlockLayoutTest, HasScalesOfEmptyTensorsByTheFormula) {
  EXPECT_EQ(BlockLayout::Create({0, 3}, {})->scale_count(), 1);
  EXPECT_EQ(BlockLayout::Create({0, 3}, {0, 1})->scale_count(), 3);
  EXPECT_EQ(BlockLayout::Create({0, 3}, {1, 0})->scale_count(), 0);
  EXPECT_EQ(BlockLayout::Create({}, {})->scale_count(), 1);
  EXPECT_EQ(BlockLayout::Create({}, {})->element_count(), 1);
}

TEST(BlockLayoutTest, GivesMaximalRuns) {
  const auto runs = [](const LayoutCase& layout_case) {
    int64_t count = 0;
    const BlockLayout layout = layout_case.Layout();
    layout.ForEachRun(0, layout.element_count(),
                      [&](const BlockLayout::Run&) { ++count; });
    return count;
  };
  EXPECT_EQ(runs({{8, 4, 2}, {}}), 1);
  EXPECT_EQ(runs({{8, 4, 2}, {1, 0, 0}}), 8);
  EXPECT_EQ(runs({{8, 4, 2}, {1, 1, 0}}), 32);
  EXPECT_EQ(runs({{8, 4, 2}, {1, 1, 1}}), 1);
  EXPECT_EQ(runs({{8, 4, 2}, {0, 1, 1}}), 8);
  EXPECT_EQ(runs({{8, 4, 2}, {4, 0, 0}}), 2);
  EXPECT_EQ(runs({{8, 64}, {1, 32}}), 16);
}

TEST(BlockLayoutTest, RefusesShapesThatAreNoShapes) {
  EXPECT_EQ(ErrorReason(ElementCount({3, -1}).status()), "SHAPE_INVALID");
  EXPECT_EQ(ErrorReason(ElementCount(std::vector<int64_t>(17, 1)).status()),
            "SHAPE_INVALID");
  EXPECT_EQ(
      ErrorReason(ElementCount({int64_t{1} << 40, int64_t{1} << 40}).status()),
      "SHAPE_INVALID");
  EXPECT_EQ(ErrorReason(ElementCount({(int64_t{1} << 56) + 1}).status()),
            "SHAPE_INVALID");
  // Also where a zero would hide the overflow from the product.
  EXPECT_EQ(ErrorReason(
                ElementCount({int64_t{1} << 62, int64_t{1} << 62, 0}).status()),
            "SHAPE_INVALID");
  EXPECT_EQ(*ElementCount({int64_t{1} << 56}), int64_t{1} << 56);
  EXPECT_EQ(*ElementCount({4, 0, 3}), 0);
}

TEST(BlockLayoutTest, RefusesBlocksThatDoNotFitTheShape) {
  EXPECT_EQ(ErrorReason(BlockLayout::Create({3, 4}, {1}).status()),
            "BLOCK_SIZE_INVALID");
  EXPECT_EQ(ErrorReason(BlockLayout::Create({3}, {-1}).status()),
            "BLOCK_SIZE_INVALID");
  EXPECT_EQ(ErrorReason(BlockLayout::Create({}, {1}).status()),
            "BLOCK_SIZE_INVALID");
  // A block larger than the dimension is the whole of it.
  EXPECT_EQ(BlockLayout::Create({3}, {100})->scale_count(), 1);
}

}  // namespace
}  // namespace quantd::core
