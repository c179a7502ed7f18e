// The histograms of one source's statistics, in rows of bounded size.
//
// A source's message is the body of its row and then its pieces: a piece is the
// message of some histograms, and messages that stand one after another are
// one.
//
// Pieces hang on the sequence of the row that has them. A large Gram matrix is
// written in several transactions before the row names its sequence: a mark,
// which is a piece too, keeps the pieces from being freed until then.

#ifndef QUANTD_SERVER_STORE_STATISTICS_PIECES_H_
#define QUANTD_SERVER_STORE_STATISTICS_PIECES_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/statistics/histogram.h"
#include "quantd/v1/statistics.pb.h"
#include "server/store/encoding_store.h"
#include "server/store/row_checksum.h"
#include "server/store/sql_database.h"

namespace quantd::server {

// A piece ends after the histogram that makes it as large as this.
constexpr int64_t kStatisticsPieceBytes = 256 << 10;

// Statistics that a source had after one of its contributions. The names
// outlive this.
struct SourceVersion {
  const EncodingKey& key;
  absl::string_view source;
  int64_t sequence;
  // Set in which its pieces are; not needed to check them.
  int64_t set_id = 0;
};

// STORE_CORRUPT for a source of which something is damaged: `what` follows "the
// statistics of ...".
absl::Status SourceCorruptError(const EncodingKey& key,
                                absl::string_view source,
                                absl::string_view what);

// Checksum of a piece, over its bytes and over what it belongs to.
uint64_t PieceChecksum(const SourceVersion& version, int64_t piece,
                       absl::string_view bytes);

// Writes a piece, and answers its checksum; one that an interrupted delete has
// left may be there.
// Errors: STORE_UNAVAILABLE, STORE_CORRUPT.
absl::StatusOr<uint64_t> WritePiece(SqlConnection* connection,
                                    const SourceVersion& version, int64_t piece,
                                    absl::string_view bytes);
// Notes, with every transaction that writes pieces before their row, that they
// are being written, and that they are to be freed should the row never come.
// Errors: STORE_UNAVAILABLE, STORE_CORRUPT.
absl::Status MarkPieces(SqlConnection* connection,
                        const SourceVersion& version);
// For pieces whose row won't come.
// Errors: STORE_UNAVAILABLE, STORE_CORRUPT.
absl::Status UnmarkPieces(SqlConnection* connection,
                          const SourceVersion& version);
// True if pieces of a set are being written before their row.
// Errors: STORE_UNAVAILABLE, STORE_CORRUPT.
absl::StatusOr<bool> IsBeingWritten(SqlConnection* connection, int64_t set_id);

// Most pieces that one transaction writes or frees; each has up to a MiB.
constexpr int kPiecesPerTransaction = 4;

// A source that may have pieces without a row.
struct LostSource {
  int64_t set_id = 0;
  std::string tensor;
  std::string source;
};

// Finds a source whose pieces FreeStatisticsPieces would free, if there is one.
// Errors: STORE_UNAVAILABLE, STORE_CORRUPT.
absl::StatusOr<absl::optional<LostSource>> NextFreeableSource(
    SqlConnection* connection, absl::Time abandoned_time);

// Frees so many pieces of a source that no row has, unless some of it are being
// written and were marked after `abandoned_time`. Answers how many; fewer at
// the end.
// Errors: STORE_UNAVAILABLE, STORE_CORRUPT.
absl::StatusOr<int> FreeStatisticsPieces(SqlConnection* connection,
                                         int64_t set_id,
                                         absl::string_view tensor,
                                         absl::string_view source,
                                         absl::Time abandoned_time);
// Then, if nothing of the source is left to free: forgets that there was. Not
// while a transaction deletes the source's row, whose note this would take.
// Errors: STORE_UNAVAILABLE, STORE_CORRUPT.
absl::Status ForgetFreedStatistics(SqlConnection* connection, int64_t set_id,
                                   absl::string_view tensor,
                                   absl::string_view source);

// Statement of the checksum and the bytes of a piece, if it is there, which
// Step has to find.
std::unique_ptr<SqlStatement> SelectPiece(SqlConnection* connection,
                                          const SourceVersion& version,
                                          int64_t piece);

// Over all that a row and its pieces hold. Not thread-safe.
class BodyChecksum {
 public:
  BodyChecksum(absl::string_view averages, absl::string_view body) {
    checksum_.Add(averages);
    checksum_.Add(body);
  }
  // The next piece has this one.
  void AddPiece(uint64_t checksum) {
    checksum_.Add({reinterpret_cast<const char*>(&checksum), sizeof(checksum)});
  }
  uint64_t Get() const { return checksum_.Get(); }

 private:
  RowChecksum checksum_;
};

// Writes histograms, in the order of their scale indices, as pieces. Calls are
// parts of one transaction. Not thread-safe.
// Errors of every call: STORE_UNAVAILABLE, STORE_CORRUPT.
class PieceWriter {
 public:
  // All must outlive the writer.
  PieceWriter(SqlConnection* connection, const SourceVersion& version,
              BodyChecksum* checksum)
      : connection_(connection), version_(version), checksum_(checksum) {}

  absl::Status Add(const core::Histogram& histogram);
  // After the last.
  absl::Status Flush();
  // Then: removes what other contributions have left, and the mark. Pieces of
  // moments and of the Gram matrix are kept before these numbers; of other
  // sequences, pieces from `others_end` on.
  absl::Status DeleteOthers(int64_t moments_end, int64_t gram_end,
                            int64_t others_end);

  // Bytes of all pieces.
  int64_t size_bytes() const { return size_bytes_; }

 private:
  absl::Status WriteHistograms();

  SqlConnection* const connection_;
  const SourceVersion version_;
  BodyChecksum* const checksum_;
  // The piece under way, and about what it takes.
  v1::StatisticsState piece_;
  int64_t piece_bytes_ = 0;
  int64_t count_ = 0;
  int64_t size_bytes_ = 0;
};

// Reads them, in a transaction or where nobody else writes. Not thread-safe.
class PieceReader {
 public:
  // All must outlive the reader.
  PieceReader(SqlConnection* connection, const SourceVersion& version,
              BodyChecksum* checksum)
      : connection_(connection), version_(version), checksum_(checksum) {}

  // The next histogram, good until the next call; null after the last.
  // Errors: STORE_UNAVAILABLE, STORE_CORRUPT.
  absl::StatusOr<const v1::Histogram*> Next();

 private:
  SqlConnection* const connection_;
  const SourceVersion version_;
  v1::StatisticsState piece_;
  BodyChecksum* const checksum_;
  // In piece_.
  int next_ = 0;
  int64_t next_piece_ = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_STATISTICS_PIECES_H_
