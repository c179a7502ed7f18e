#include "server/store/encoding_pieces.h"

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
#include "absl/strings/string_view.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "core/types/encoding.h"
#include "server/store/sql_database.h"
#include "server/store/sqlite_database.h"
#include "tests/server/store/sqlite_fixture.h"

namespace quantd::server {
namespace {

using ::testing::ElementsAre;

core::Encoding Outline(absl::string_view format, core::ScaleType type) {
  core::Encoding encoding;
  encoding.format = core::FindFormatByName(format)->format;
  encoding.scale_type = type;
  return encoding;
}

TEST(PieceLayoutTest, FollowsFromTheTypesOfScalesAndZeroPoints) {
  const struct {
    core::Encoding outline;
    bool has_zero_points;
    int64_t scale_bytes;
    int64_t zero_point_bytes;
  } cases[] = {
      {Outline("int8", core::ScaleType::kFloat32), false, 4, 0},
      {Outline("uint8", core::ScaleType::kFloat32), true, 4, 1},
      {Outline("uint16", core::ScaleType::kFloat16), true, 2, 2},
      {Outline("mxfp4_e2m1", core::ScaleType::kE8m0), false, 1, 0},
  };
  for (const auto& c : cases) {
    const PieceLayout layout = PieceLayoutOf(c.outline, c.has_zero_points);
    EXPECT_EQ(layout.scale_bytes, c.scale_bytes);
    EXPECT_EQ(layout.zero_point_bytes, c.zero_point_bytes);
    // As many as fit.
    const int64_t both = c.scale_bytes + c.zero_point_bytes;
    EXPECT_LE(layout.scales_per_piece() * both, kEncodingPieceBytes);
    EXPECT_GT((layout.scales_per_piece() + 1) * both, kEncodingPieceBytes);
  }
}

// The numbers of the pieces in the order in which they are read, if each has
// the size that is expected.
std::vector<int64_t> PiecesOf(const PieceLayout& layout, int64_t scale_count,
                              int64_t outer_count) {
  PieceSequence sequence(layout, scale_count, outer_count);
  std::vector<int64_t> numbers;
  int64_t scales = 0;
  int64_t outer_scales = 0;
  while (!sequence.at_end()) {
    const int64_t number = sequence.piece();
    numbers.push_back(number);
    int64_t size = 0;
    if (number < 0) {
      size = 4 * std::min(outer_count - outer_scales, kOuterScalesPerPiece);
    } else {
      size = std::min(scale_count - scales, layout.scales_per_piece()) *
             (layout.scale_bytes + layout.zero_point_bytes);
    }
    ScalePiece piece;
    // One byte more or less is not the piece.
    for (const int64_t wrong : {size - 1, size + 1}) {
      PieceSequence other = sequence;
      EXPECT_TRUE(absl::IsDataLoss(
          other.Take(std::string(static_cast<size_t>(wrong), 'x'), &piece)));
    }
    EXPECT_EQ(
        sequence.Take(std::string(static_cast<size_t>(size), 'x'), &piece),
        absl::OkStatus());
    EXPECT_EQ(piece.first, scales);
    EXPECT_EQ(piece.first_outer, outer_scales);
    const auto count =
        static_cast<int64_t>(piece.scale.size()) / layout.scale_bytes;
    EXPECT_EQ(static_cast<int64_t>(piece.zero_point.size()),
              count * layout.zero_point_bytes);
    scales += count;
    outer_scales += static_cast<int64_t>(piece.outer_scale.size()) / 4;
  }
  EXPECT_EQ(scales, scale_count);
  EXPECT_EQ(outer_scales, outer_count);
  return numbers;
}

TEST(PieceSequenceTest, HasAllScalesOuterOnesFirst) {
  const PieceLayout floats = {4, 0};
  const int64_t full = floats.scales_per_piece();
  EXPECT_THAT(PiecesOf(floats, 1, 0), ElementsAre(0));
  EXPECT_THAT(PiecesOf(floats, full, 0), ElementsAre(0));
  EXPECT_THAT(PiecesOf(floats, full + 1, 0), ElementsAre(0, 1));
  EXPECT_THAT(PiecesOf({4, 1}, full, 0), ElementsAre(0, 1));
  EXPECT_THAT(PiecesOf({1, 0}, 3, kOuterScalesPerPiece), ElementsAre(-1, 0));
  EXPECT_THAT(PiecesOf({1, 0}, 2 << 20, kOuterScalesPerPiece + 1),
              ElementsAre(-1, -2, 0, 1));
}

TEST(PieceSequenceTest, CutsScalesFromTheirZeroPoints) {
  PieceSequence sequence({2, 1}, 3, 0);
  ScalePiece piece;
  ASSERT_EQ(sequence.Take("aabbccxyz", &piece), absl::OkStatus());
  EXPECT_EQ(piece.scale, "aabbcc");
  EXPECT_EQ(piece.zero_point, "xyz");
  EXPECT_TRUE(sequence.at_end());
}

TEST(OuterScaleCountTest, FollowsFromTheBlocks) {
  core::Encoding outline = Outline("int8", core::ScaleType::kFloat32);
  EXPECT_EQ(*OuterScaleCount(outline), 0);
  outline = Outline("nvfp4", core::ScaleType::kE4m3);
  EXPECT_EQ(*OuterScaleCount(outline), 1);
  outline.block_size = {1, 16};
  outline.scale_shape = {6, 4};
  EXPECT_EQ(*OuterScaleCount(outline), 1);
  outline.outer_block_size = {2, 0};
  EXPECT_EQ(*OuterScaleCount(outline), 3);
  outline.outer_block_size = {1, 32};
  EXPECT_EQ(*OuterScaleCount(outline), 12);
  // Of another rank.
  outline.outer_block_size = {1};
  EXPECT_FALSE(OuterScaleCount(outline).ok());
}

class PieceRowsTest : public SqliteFixture {
 protected:
  absl::Status Write(int64_t content, int64_t piece, absl::string_view bytes) {
    return database_->Write([&](SqlConnection& connection) {
      return WritePiece(connection, content, piece, bytes);
    });
  }
  // "" where there is none.
  absl::StatusOr<std::string> Read(int64_t content, int64_t piece) {
    std::string got;
    const absl::Status status = database_->Read([&](SqlConnection& connection) {
      const auto take = [&got](absl::string_view bytes) {
        got = std::string(bytes);
        return absl::OkStatus();
      };
      return ReadPiece(connection, content, piece, take).status();
    });
    if (!status.ok()) return status;
    return got;
  }

  const std::shared_ptr<SqliteDatabase> database_ = OpenDatabase();
};

TEST_F(PieceRowsTest, ComeBackUnderTheirContentAndNumber) {
  ASSERT_EQ(Write(1, 0, "scales"), absl::OkStatus());
  ASSERT_EQ(Write(1, -1, "outer"), absl::OkStatus());
  ASSERT_EQ(Write(2, 0, "others"), absl::OkStatus());
  EXPECT_EQ(*Read(1, 0), "scales");
  EXPECT_EQ(*Read(1, -1), "outer");
  EXPECT_EQ(*Read(2, 0), "others");
  EXPECT_EQ(*Read(2, 1), "");
  // An attempt before may have left one.
  ASSERT_EQ(Write(1, 0, "again"), absl::OkStatus());
  EXPECT_EQ(*Read(1, 0), "again");
}

TEST_F(PieceRowsTest, AreNotTakenForOthers) {
  const std::vector<std::pair<int64_t, int64_t>> places = {
      {1, 0}, {1, 1}, {2, 0}};
  ASSERT_EQ(Write(1, 0, "scales"), absl::OkStatus());
  for (const char* change :
       {"UPDATE encoding_pieces SET bytes = CAST('scaleS' AS BLOB)",
        "UPDATE encoding_pieces SET bytes = CAST('scales' AS BLOB), piece = 1",
        "UPDATE encoding_pieces SET piece = 0, content_id = 2"}) {
    Execute(change);
    for (const std::pair<int64_t, int64_t>& at : places) {
      const absl::StatusOr<std::string> read = Read(at.first, at.second);
      EXPECT_TRUE(absl::IsDataLoss(read.status()) || *read == "") << change;
    }
  }
}

}  // namespace
}  // namespace quantd::server
