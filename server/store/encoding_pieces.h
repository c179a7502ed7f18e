// Scales of an encoding in rows of their own, a MiB each.
//
// They stand under the id of a content, which an encoding names, and keeps when
// its row moves to another set. Pieces from 0 on have a fixed number of scales,
// then the zero points of these; pieces from -1 on downward have outer scales.

#ifndef QUANTD_SERVER_STORE_ENCODING_PIECES_H_
#define QUANTD_SERVER_STORE_ENCODING_PIECES_H_

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/types/encoding.h"
#include "server/store/encoding_store.h"
#include "server/store/sql_database.h"

namespace quantd::server {

// The most bytes of a piece.
constexpr int64_t kEncodingPieceBytes = int64_t{1} << 20;
constexpr int64_t kOuterScalesPerPiece = kEncodingPieceBytes / 4;

// How the scales of an encoding are cut.
struct PieceLayout {
  int64_t scale_bytes = 0;
  // 0 without zero points.
  int64_t zero_point_bytes = 0;

  int64_t scales_per_piece() const {
    return kEncodingPieceBytes / (scale_bytes + zero_point_bytes);
  }
};

PieceLayout PieceLayoutOf(const core::Encoding& outline, bool has_zero_points);

// Errors of both: STORE_UNAVAILABLE.
absl::Status WritePiece(SqlConnection& connection, int64_t content_id,
                        int64_t piece, absl::string_view bytes);
// False where there is none; `take` gets its bytes.
// Errors: those of `take`; DATA_LOSS without a reason where it fails its
// checksum.
absl::StatusOr<bool> ReadPiece(
    SqlConnection& connection, int64_t content_id, int64_t piece,
    absl::FunctionRef<absl::Status(absl::string_view bytes)> take);

// Has the pieces of a content freed later; nothing has it any more.
// Errors: STORE_UNAVAILABLE.
absl::Status LoseContent(SqlConnection& connection, int64_t content_id,
                         absl::string_view what);

// The pieces of an encoding, in the order in which they are read: outer scales
// first.
class PieceSequence {
 public:
  PieceSequence(const PieceLayout& layout, int64_t scale_count,
                int64_t outer_count)
      : layout_(layout), scale_count_(scale_count), outer_count_(outer_count) {}

  bool at_end() const { return scale_ == scale_count_; }
  // The number of the next piece.
  int64_t piece() const {
    return outer_ < outer_count_ ? -1 - outer_ / kOuterScalesPerPiece
                                 : scale_ / layout_.scales_per_piece();
  }
  // Cuts the bytes of that piece apart, and goes on to the next one.
  // Errors: DATA_LOSS without a reason where there are more or fewer.
  absl::Status Take(absl::string_view bytes, ScalePiece* piece);

 private:
  PieceLayout layout_;
  int64_t scale_count_;
  int64_t outer_count_;
  int64_t scale_ = 0;
  int64_t outer_ = 0;
};

// Outer scales that an encoding has.
// Errors: BLOCK_SIZE_INVALID.
absl::StatusOr<int64_t> OuterScaleCount(const core::Encoding& outline);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_ENCODING_PIECES_H_
