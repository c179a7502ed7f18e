// The moments of features of one source's statistics.
//
// They are one piece of the source (see statistics_pieces.h), behind its
// histograms and before its Gram matrix: a v1.FeatureMoments. The checksum of
// the source's row covers it.

#ifndef QUANTD_SERVER_STORE_MOMENTS_PIECES_H_
#define QUANTD_SERVER_STORE_MOMENTS_PIECES_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/statistics/statistics_state.h"
#include "server/store/sql_database.h"
#include "server/store/statistics_pieces.h"

namespace quantd::server {

// Number of the piece.
constexpr int64_t kMomentsPiece = int64_t{1} << 39;

// Most bytes that reading or merging moments of so many features holds: those
// of a source, those that are merged, and their message.
int64_t MergeMomentsBytes(int64_t feature_count);

// The moments of a piece.
// `proceed`  is called with what they will hold in memory.
// Errors: STORE_CORRUPT; that of `proceed`.
absl::StatusOr<core::AxisMoments> ReadMomentsPiece(
    const SourceVersion& version, uint64_t checksum, absl::string_view bytes,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed);

// Checks that `part` goes with the moments of another source, of which `bytes`
// are the piece.
// Errors: STATISTICS_MISMATCH, STORE_CORRUPT.
absl::Status CheckMomentsPiece(const SourceVersion& version, uint64_t checksum,
                               absl::string_view bytes,
                               const core::AxisMoments& part);

// Result of WriteMoments.
struct WrittenMoments {
  // Bytes that the moments take in the store.
  int64_t size_bytes = 0;
  // Checksums of the piece now and before, where there is one.
  absl::optional<uint64_t> checksum;
  absl::optional<uint64_t> checksum_before;

  // Behind the piece, or where it would be.
  int64_t end_piece() const {
    return kMomentsPiece + (checksum.has_value() ? 1 : 0);
  }
};

// Writes the moments of a source after a contribution: those of `before`, if it
// is given and has some, and `part`, if it is not null. A part of one
// transaction.
// Errors: STATISTICS_MISMATCH, STORE_UNAVAILABLE, STORE_CORRUPT.
absl::StatusOr<WrittenMoments> WriteMoments(
    SqlConnection* connection, const absl::optional<SourceVersion>& before,
    const SourceVersion& now, const core::AxisMoments* part);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_MOMENTS_PIECES_H_
