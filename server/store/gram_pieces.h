// The Gram matrix of one source's statistics, in rows of bounded size.
//
// The matrix stands among the pieces of the source (see statistics_pieces.h),
// after all numbers that its histograms may use. The first piece has a checksum
// of 8 bytes over the other pieces, and a v1.GramState without sums. The others
// have the sums, 8 bytes each. The checksum of the source's row covers the
// first piece.

#ifndef QUANTD_SERVER_STORE_GRAM_PIECES_H_
#define QUANTD_SERVER_STORE_GRAM_PIECES_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/statistics/gram_state.h"
#include "server/store/row_checksum.h"
#include "server/store/sql_database.h"
#include "server/store/statistics_pieces.h"

namespace quantd::server {

// Number of the first piece.
constexpr int64_t kFirstGramPiece = int64_t{1} << 40;
// Sums of a piece, but of the last.
constexpr int64_t kSumsPerPiece = int64_t{1} << 17;

// True if so many sums are written in several transactions.
constexpr bool TakesSteps(int64_t sum_count) {
  return sum_count > kPiecesPerTransaction * kSumsPerPiece;
}

// Bytes of memory that writing a matrix holds, with `part`, which is null if
// there is none.
int64_t WriteGramBytes(const core::GramState::Parts* part);

// Reads the pieces of one source, in order. Not thread-safe.
class GramAssembler {
 public:
  explicit GramAssembler(SourceVersion version) : version_(version) {}

  // The next piece. The first gives the head. Of others answers the sums:
  // [first_sum(), first_sum() + size), good until the next call.
  // Errors: STORE_CORRUPT.
  absl::StatusOr<absl::Span<const int64_t>> Add(int64_t piece,
                                                uint64_t checksum,
                                                absl::string_view bytes);
  // After the last piece.
  // Errors: STORE_CORRUPT.
  absl::Status Finish() const;

  bool has_head() const { return next_ > 0; }
  // Without sums.
  const core::GramState::Parts& head() const { return head_; }
  int64_t first_sum() const { return (next_ - 2) * kSumsPerPiece; }

 private:
  absl::Status Corrupt(absl::string_view what) const;

  const SourceVersion version_;
  core::GramState::Parts head_;
  // Checksum over the pieces behind the head: as the head says, and as they
  // are.
  uint64_t expected_checksum_ = 0;
  RowChecksum checksum_;
  int64_t sum_count_ = 0;
  std::vector<int64_t> sums_;
  // The next piece, counted from the first.
  int64_t next_ = 0;
};

// Checks that Gram matrices with these heads may be added.
// Errors: STATISTICS_MISMATCH.
absl::Status CheckGramHeads(const core::GramState::Parts& whole,
                            const core::GramState::Parts& part);
// Adds all but the sums.
void AddGramHead(const core::GramState::Parts& part,
                 core::GramState::Parts* whole);

// Result of GramWriter.
struct WrittenGram {
  // Bytes that the matrix takes in the store.
  int64_t size_bytes = 0;
  // Behind its last piece.
  int64_t end_piece = kFirstGramPiece;
  // Checksums of the first piece now and before, where there is one.
  absl::optional<uint64_t> checksum;
  absl::optional<uint64_t> checksum_before;
};

// Writes the Gram matrix of a source after a contribution: that which it had,
// if it had one, and `part`, if that is not null. A large one takes several
// transactions, so that nobody waits for all of it: the caller sees in each of
// them that the source still has what it had at first. Not thread-safe.
// Errors of every call: STORE_UNAVAILABLE, STORE_CORRUPT.
class GramWriter {
 public:
  // `part` outlives the writer.
  explicit GramWriter(const core::GramState::Parts* part) : part_(part) {}

  // First. `before` is what the source has, if it has something.
  // Errors: STATISTICS_MISMATCH.
  absl::Status Begin(SqlConnection* connection,
                     const absl::optional<SourceVersion>& before,
                     const SourceVersion& now);
  bool has_begun() const { return now_.has_value(); }

  // True if more is left than a transaction should write.
  bool has_steps() const;
  // Then, while it has steps: writes the next pieces, and marks them.
  // Errors: STATISTICS_MISMATCH where the sums become too large.
  absl::Status Step(SqlConnection* connection);
  // True if a step was taken.
  bool is_staged() const { return staged_count_ > 0; }
  // Bytes of what was written.
  int64_t size_bytes() const { return written_.size_bytes; }

  // Last: writes what is left, in the transaction of the row.
  // Errors: those of Step; STORE_UNAVAILABLE also where another contribution of
  // the same sequence has changed what the steps wrote.
  absl::StatusOr<WrittenGram> Finish(SqlConnection* connection);

  // Head of the matrix that will be written, without sums.
  const core::GramState::Parts& head() const { return head_; }

 private:
  absl::Status WriteNext(SqlConnection* connection);
  absl::Status CheckStaged(SqlConnection* connection) const;

  const core::GramState::Parts* const part_;
  absl::optional<SourceVersion> before_;
  absl::optional<SourceVersion> now_;
  // Reader of the matrix that the source had; none if it had none.
  absl::optional<GramAssembler> read_;
  core::GramState::Parts head_;
  WrittenGram written_;
  int64_t sum_count_ = 0;
  // How many pieces of sums are written, and how many of them steps wrote.
  int64_t count_ = 0;
  int64_t staged_count_ = 0;
  // The checksum over all pieces that are written, and that over those that
  // steps wrote.
  RowChecksum checksum_;
  uint64_t staged_checksum_ = 0;
  std::vector<int64_t> sums_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_GRAM_PIECES_H_
