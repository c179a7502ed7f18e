#include "server/store/encoding_pieces.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/formats/scale_type.h"
#include "core/types/block_layout.h"
#include "core/types/scale_bytes.h"
#include "server/store/row_checksum.h"

namespace quantd::server {
namespace {

// One that an attempt before has left may be there.
constexpr char kWriteEncodingPiece[] =
    "INSERT INTO encoding_pieces (content_id, piece, checksum, bytes) "
    "VALUES ($1, $2, $3, $4) ON CONFLICT (content_id, piece) DO UPDATE SET "
    "checksum = excluded.checksum, bytes = excluded.bytes";
constexpr char kReadEncodingPiece[] =
    "SELECT checksum, bytes FROM encoding_pieces "
    "WHERE content_id = $1 AND piece = $2";
constexpr char kLoseContent[] =
    "INSERT INTO lost_contents (content_id) VALUES ($1)";

uint64_t EncodingChecksum(int64_t content_id, int64_t piece,
                          absl::string_view bytes) {
  const int64_t numbers[] = {content_id, piece};
  return RowChecksum::Of(
      {{reinterpret_cast<const char*>(numbers), sizeof(numbers)}, bytes});
}

}  // namespace

PieceLayout PieceLayoutOf(const core::Encoding& outline, bool has_zero_points) {
  PieceLayout layout;
  layout.scale_bytes = core::ScaleSizeBytes(outline.scale_type);
  if (has_zero_points) {
    layout.zero_point_bytes = core::ZeroPointSizeBytes(outline);
  }
  return layout;
}

absl::Status WritePiece(SqlConnection& connection, int64_t content_id,
                        int64_t piece, absl::string_view bytes) {
  const std::unique_ptr<SqlStatement> row =
      connection.Prepare(kWriteEncodingPiece);
  row->BindInt(1, content_id);
  row->BindInt(2, piece);
  row->BindInt(
      3, static_cast<int64_t>(EncodingChecksum(content_id, piece, bytes)));
  row->BindBytes(4, bytes);
  return row->Step("cannot put an encoding").status();
}

absl::StatusOr<bool> ReadPiece(
    SqlConnection& connection, int64_t content_id, int64_t piece,
    absl::FunctionRef<absl::Status(absl::string_view bytes)> take) {
  const std::unique_ptr<SqlStatement> row =
      connection.Prepare(kReadEncodingPiece);
  row->BindInt(1, content_id);
  row->BindInt(2, piece);
  absl::StatusOr<bool> found = row->Step("cannot read an encoding");
  if (!found.ok() || !*found) return found;
  const absl::string_view bytes = row->Bytes(1);
  if (static_cast<uint64_t>(row->Int(0)) !=
      EncodingChecksum(content_id, piece, bytes)) {
    return absl::DataLossError("fails its checksum");
  }
  if (absl::Status s = take(bytes); !s.ok()) return s;
  return true;
}

absl::Status LoseContent(SqlConnection& connection, int64_t content_id,
                         absl::string_view what) {
  const std::unique_ptr<SqlStatement> row = connection.Prepare(kLoseContent);
  row->BindInt(1, content_id);
  return row->Step(what).status();
}

absl::Status PieceSequence::Take(absl::string_view bytes, ScalePiece* piece) {
  *piece = {};
  piece->first = scale_;
  piece->first_outer = outer_;
  const auto size = static_cast<int64_t>(bytes.size());
  if (outer_ < outer_count_) {
    const int64_t count = std::min(outer_count_ - outer_, kOuterScalesPerPiece);
    if (size != count * 4) return absl::DataLossError("lacks outer scales");
    outer_ += count;
    piece->outer_scale = std::string(bytes);
    return absl::OkStatus();
  }
  const int64_t count =
      std::min(scale_count_ - scale_, layout_.scales_per_piece());
  const int64_t scale_size = count * layout_.scale_bytes;
  if (size != scale_size + count * layout_.zero_point_bytes) {
    return absl::DataLossError("lacks scales");
  }
  scale_ += count;
  piece->scale = std::string(bytes.substr(0, static_cast<size_t>(scale_size)));
  piece->zero_point =
      std::string(bytes.substr(static_cast<size_t>(scale_size)));
  return absl::OkStatus();
}

absl::StatusOr<int64_t> OuterScaleCount(const core::Encoding& outline) {
  if (!core::HasOuterScales(outline.scale_type)) return 0;
  if (outline.scale_shape.empty()) return 1;
  absl::StatusOr<core::BlockLayout> layout =
      core::OuterLayout(outline, outline.scale_shape);
  if (!layout.ok()) return layout.status();
  return layout->scale_count();
}

}  // namespace quantd::server
