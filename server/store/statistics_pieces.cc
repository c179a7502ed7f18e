#include "server/store/statistics_pieces.h"

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "server/wire/names.h"
#include "server/wire/statistics_proto.h"

namespace quantd::server {
namespace {

constexpr absl::string_view kCannotAddStatistics =
    "cannot contribute statistics";
constexpr absl::string_view kCannotFreeStatistics = "cannot free statistics";

constexpr char kWriteStatisticsPiece[] =
    "INSERT INTO statistics_pieces (set_id, tensor, source, sequence, "
    "piece, checksum, bytes) VALUES ($1, $2, $3, $4, $5, $6, $7) "
    "ON CONFLICT (set_id, tensor, source, sequence, piece) "
    "DO UPDATE SET checksum = excluded.checksum, bytes = excluded.bytes";
constexpr char kDeleteOthers[] =
    "DELETE FROM statistics_pieces WHERE set_id = $1 AND tensor = $2 "
    "AND source = $3 AND ((sequence = $4 AND (piece < 0 "
    "OR (piece >= $5 AND piece < 549755813888) "
    "OR (piece >= $6 AND piece < 1099511627776) OR piece >= $7)) "
    "OR (sequence <> $4 AND piece < $8))";
constexpr char kNoteLost[] =
    "INSERT INTO lost_statistics (set_id, tensor, source) VALUES ($1, $2, $3) "
    "ON CONFLICT (set_id, tensor, source) DO NOTHING";
constexpr char kUnmarkPieces[] =
    "DELETE FROM statistics_pieces WHERE set_id = $1 AND tensor = $2 "
    "AND source = $3 AND sequence = $4 AND piece = $5";
// A mark has its time where other pieces have a checksum.
#define QUANTD_NOT_BEING_WRITTEN                                         \
  "NOT EXISTS (SELECT 1 FROM statistics_pieces AS marks "                \
  "WHERE marks.set_id = $1 AND marks.tensor = $2 AND marks.source = $3 " \
  "AND marks.piece = -1 AND marks.checksum > $4)"
#define QUANTD_WITHOUT_ROW                             \
  "FROM statistics_pieces AS pieces "                  \
  "WHERE set_id = $1 AND tensor = $2 AND source = $3 " \
  "AND NOT EXISTS (SELECT 1 FROM statistics "          \
  "WHERE statistics.set_id = pieces.set_id "           \
  "AND statistics.tensor = pieces.tensor "             \
  "AND statistics.source = pieces.source "             \
  "AND statistics.sequence = pieces.sequence)"
constexpr char kFreeStatistics[] =
    "DELETE FROM statistics_pieces WHERE set_id = $1 "
    "AND tensor = $2 AND source = $3 AND " QUANTD_NOT_BEING_WRITTEN
    " AND (sequence, piece) IN (SELECT sequence, piece " QUANTD_WITHOUT_ROW
    " LIMIT 4) RETURNING piece";
constexpr char kForgetFreed[] =
    "DELETE FROM lost_statistics WHERE set_id = $1 AND tensor = $2 "
    "AND source = $3 AND NOT EXISTS (SELECT 1 " QUANTD_WITHOUT_ROW ")";
#undef QUANTD_WITHOUT_ROW
#undef QUANTD_NOT_BEING_WRITTEN
static_assert(kPiecesPerTransaction == 4, "as in the statement");
// The number of the piece that is a mark, as the statements have it.
constexpr int64_t kMark = -1;
constexpr char kNextFreeable[] =
    "SELECT set_id, tensor, source FROM lost_statistics AS lost "
    "WHERE NOT EXISTS (SELECT 1 FROM statistics_pieces AS marks "
    "WHERE marks.set_id = lost.set_id AND marks.tensor = lost.tensor "
    "AND marks.source = lost.source AND marks.piece = $1 "
    "AND marks.checksum > $2) LIMIT 1";
constexpr char kFindMark[] =
    "SELECT piece FROM statistics_pieces WHERE set_id = $1 AND piece = $2 "
    "LIMIT 1";
constexpr char kReadStatisticsPiece[] =
    "SELECT checksum, bytes FROM statistics_pieces WHERE set_id = $1 "
    "AND tensor = $2 AND source = $3 AND sequence = $4 AND piece = $5";

void Bind(const SourceVersion& version, int64_t piece, SqlStatement* row) {
  row->BindInt(1, version.set_id);
  row->BindText(2, version.key.tensor);
  row->BindText(3, version.source);
  row->BindInt(4, version.sequence);
  row->BindInt(5, piece);
}

}  // namespace

absl::Status SourceCorruptError(const EncodingKey& key,
                                absl::string_view source,
                                absl::string_view what) {
  return core::StoreCorruptError(absl::StrCat(
      "the statistics of source \"", ShownName(source), "\" for tensor \"",
      ShownName(key.tensor), "\" of model \"", ShownName(key.model),
      "\", revision \"", ShownName(key.revision), "\" ", what,
      "; delete them and contribute again"));
}

uint64_t PieceChecksum(const SourceVersion& version, int64_t piece,
                       absl::string_view bytes) {
  const int64_t numbers[] = {version.sequence, piece};
  return RowChecksum::Of(
      {version.key.model,
       version.key.revision,
       version.key.tensor,
       version.source,
       {reinterpret_cast<const char*>(numbers), sizeof(numbers)},
       bytes});
}

absl::StatusOr<uint64_t> WritePiece(SqlConnection* connection,
                                    const SourceVersion& version, int64_t piece,
                                    absl::string_view bytes) {
  const uint64_t checksum = PieceChecksum(version, piece, bytes);
  const std::unique_ptr<SqlStatement> row =
      connection->Prepare(kWriteStatisticsPiece);
  Bind(version, piece, row.get());
  row->BindInt(6, static_cast<int64_t>(checksum));
  row->BindBytes(7, bytes);
  if (absl::Status s = row->Step(kCannotAddStatistics).status(); !s.ok())
    return s;
  return checksum;
}

absl::Status MarkPieces(SqlConnection* connection,
                        const SourceVersion& version) {
  {
    const std::unique_ptr<SqlStatement> row =
        connection->Prepare(kWriteStatisticsPiece);
    Bind(version, kMark, row.get());
    row->BindInt(6, absl::ToUnixMicros(absl::Now()));
    row->BindBytes(7, "");
    absl::Status status = row->Step(kCannotAddStatistics).status();
    if (!status.ok()) return status;
  }
  const std::unique_ptr<SqlStatement> row = connection->Prepare(kNoteLost);
  row->BindInt(1, version.set_id);
  row->BindText(2, version.key.tensor);
  row->BindText(3, version.source);
  return row->Step(kCannotAddStatistics).status();
}

absl::Status UnmarkPieces(SqlConnection* connection,
                          const SourceVersion& version) {
  const std::unique_ptr<SqlStatement> row = connection->Prepare(kUnmarkPieces);
  Bind(version, kMark, row.get());
  return row->Step(kCannotAddStatistics).status();
}

absl::StatusOr<bool> IsBeingWritten(SqlConnection* connection, int64_t set_id) {
  const std::unique_ptr<SqlStatement> row = connection->Prepare(kFindMark);
  row->BindInt(1, set_id);
  row->BindInt(2, kMark);
  return row->Step("cannot read statistics");
}

absl::StatusOr<absl::optional<LostSource>> NextFreeableSource(
    SqlConnection* connection, absl::Time abandoned_time) {
  const std::unique_ptr<SqlStatement> row = connection->Prepare(kNextFreeable);
  row->BindInt(1, kMark);
  row->BindInt(2, absl::ToUnixMicros(abandoned_time));
  absl::StatusOr<bool> found = row->Step("cannot free statistics");
  if (!found.ok()) return found.status();
  if (!*found) return absl::optional<LostSource>();
  return absl::optional<LostSource>(
      {row->Int(0), std::string(row->Bytes(1)), std::string(row->Bytes(2))});
}

absl::StatusOr<int> FreeStatisticsPieces(SqlConnection* connection,
                                         int64_t set_id,
                                         absl::string_view tensor,
                                         absl::string_view source,
                                         absl::Time abandoned_time) {
  const std::unique_ptr<SqlStatement> row =
      connection->Prepare(kFreeStatistics);
  row->BindInt(1, set_id);
  row->BindText(2, tensor);
  row->BindText(3, source);
  row->BindInt(4, absl::ToUnixMicros(abandoned_time));
  int count = 0;
  while (true) {
    absl::StatusOr<bool> found = row->Step(kCannotFreeStatistics);
    if (!found.ok()) return found.status();
    if (!*found) return count;
    ++count;
  }
}

absl::Status ForgetFreedStatistics(SqlConnection* connection, int64_t set_id,
                                   absl::string_view tensor,
                                   absl::string_view source) {
  const std::unique_ptr<SqlStatement> row = connection->Prepare(kForgetFreed);
  row->BindInt(1, set_id);
  row->BindText(2, tensor);
  row->BindText(3, source);
  return row->Step(kCannotFreeStatistics).status();
}

std::unique_ptr<SqlStatement> SelectPiece(SqlConnection* connection,
                                          const SourceVersion& version,
                                          int64_t piece) {
  std::unique_ptr<SqlStatement> row = connection->Prepare(kReadStatisticsPiece);
  Bind(version, piece, row.get());
  return row;
}

absl::Status PieceWriter::Add(const core::Histogram& histogram) {
  v1::Histogram* const proto = piece_.add_histograms();
  HistogramToProto(histogram, proto);
  // Many empty ones take memory, too.
  constexpr int64_t kMore = 32;
  piece_bytes_ += static_cast<int64_t>(proto->ByteSizeLong()) + kMore;
  return piece_bytes_ >= kStatisticsPieceBytes ? WriteHistograms()
                                               : absl::OkStatus();
}

absl::Status PieceWriter::WriteHistograms() {
  const std::string bytes = piece_.SerializeAsString();
  // Memory that a large piece took is not kept for the next.
  v1::StatisticsState().Swap(&piece_);
  piece_bytes_ = 0;
  const absl::StatusOr<uint64_t> checksum =
      WritePiece(connection_, version_, count_++, bytes);
  if (!checksum.ok()) return checksum.status();
  checksum_->AddPiece(*checksum);
  size_bytes_ += static_cast<int64_t>(bytes.size());
  return absl::OkStatus();
}

absl::Status PieceWriter::Flush() {
  return piece_.histograms_size() > 0 ? WriteHistograms() : absl::OkStatus();
}

absl::Status PieceWriter::DeleteOthers(int64_t moments_end, int64_t gram_end,
                                       int64_t others_end) {
  const std::unique_ptr<SqlStatement> row = connection_->Prepare(kDeleteOthers);
  Bind(version_, count_, row.get());
  row->BindInt(6, moments_end);
  row->BindInt(7, gram_end);
  row->BindInt(8, others_end);
  return row->Step(kCannotAddStatistics).status();
}

absl::StatusOr<const v1::Histogram*> PieceReader::Next() {
  while (next_ == piece_.histograms_size()) {
    next_ = 0;
    v1::StatisticsState().Swap(&piece_);
    const std::unique_ptr<SqlStatement> row =
        SelectPiece(connection_, version_, next_piece_);
    absl::StatusOr<bool> found = row->Step(kCannotAddStatistics);
    if (!found.ok()) return found.status();
    if (!*found) return nullptr;
    const auto checksum = static_cast<uint64_t>(row->Int(0));
    const absl::string_view bytes = row->Bytes(1);
    if (checksum != PieceChecksum(version_, next_piece_, bytes)) {
      return SourceCorruptError(version_.key, version_.source,
                                "fail their checksum");
    }
    if (!piece_.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      return SourceCorruptError(version_.key, version_.source, "do not decode");
    }
    checksum_->AddPiece(checksum);
    ++next_piece_;
  }
  return &piece_.histograms(next_++);
}

}  // namespace quantd::server
