#include "server/store/sql_statistics_store.h"

#include <google/protobuf/io/coded_stream.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/statistics/gram_state.h"
#include "quantd/v1/statistics.pb.h"
#include "server/store/gram_pieces.h"
#include "server/store/moments_pieces.h"
#include "server/store/row_checksum.h"
#include "server/store/row_sets.h"
#include "server/store/sql_usage.h"
#include "server/store/staged_contents.h"
#include "server/store/statistics_pieces.h"
#include "server/wire/names.h"
#include "server/wire/statistics_proto.h"

namespace quantd::server {
namespace {

// Columns that ReadHead reads.
#define QUANTD_ROW_COLUMNS                                               \
  "statistics.source, statistics.sequence, update_time_us, size_bytes, " \
  "mantissa_bits, block_size, shape, body_checksum, "                    \
  "statistics.checksum, incarnation"
// Pieces below kMomentsPiece are of histograms; that one has the moments.
// kFirstGramPiece is the head of the Gram matrix, and those behind it are its
// sums.
#define QUANTD_IS_OF_HISTOGRAMS(piece) #piece " < 549755813888"
#define QUANTD_IS_OF_MOMENTS(piece) #piece " = 549755813888"
#define QUANTD_IS_NO_SUM(piece) #piece " <= 1099511627776"
#define QUANTD_IS_OF_GRAM(piece) #piece " >= 1099511627776"
#define QUANTD_OF_SOURCE \
  "WHERE set_id = " QUANTD_STATISTICS_SET " AND tensor = $3 AND source = $4"

// With the sizes of what merging reads at once, whether there is a Gram matrix,
// and the size of the moments.
constexpr char kSelectHead[] =
    "SELECT " QUANTD_ROW_COLUMNS
    ", CAST(length(body) AS BIGINT), "
    "(SELECT CAST(COALESCE(MAX(length(bytes)), 0) "
    "AS BIGINT) FROM statistics_pieces " QUANTD_OF_SOURCE
    " AND " QUANTD_IS_OF_HISTOGRAMS(
        piece) "), (SELECT COUNT(*) FROM statistics_pieces " QUANTD_OF_SOURCE
               " AND piece = 1099511627776), "
               "(SELECT CAST(COALESCE(MAX(length(bytes)), 0) "
               "AS BIGINT) FROM statistics_pieces " QUANTD_OF_SOURCE
               " AND " QUANTD_IS_OF_MOMENTS(
                   piece) ") FROM statistics " QUANTD_OF_SOURCE;
constexpr char kSelectBody[] =
    "SELECT averages, body FROM statistics " QUANTD_OF_SOURCE;
// Reads the sources of a tensor.
constexpr char kSelectSources[] =
    "SELECT source, incarnation FROM statistics "
    "WHERE set_id = " QUANTD_STATISTICS_SET " AND tensor = $3 ORDER BY source";
// A row per piece of a source, of its Gram matrix the first; the large columns
// of the source, and the size of its Gram matrix, with the first.
constexpr char kSelectAll[] =
    "SELECT " QUANTD_ROW_COLUMNS
    ", CASE WHEN COALESCE(pieces.piece, 0) = 0 THEN averages END, "
    "CASE WHEN COALESCE(pieces.piece, 0) = 0 THEN body END, "
    "COALESCE(pieces.piece, -1), pieces.checksum, pieces.bytes, "
    "CASE WHEN COALESCE(pieces.piece, 0) = 0 THEN "
    "(SELECT CAST(COALESCE(SUM(length(grams.bytes)), 0) AS BIGINT) "
    "FROM statistics_pieces AS grams WHERE grams.set_id = statistics.set_id "
    "AND grams.tensor = statistics.tensor "
    "AND grams.source = statistics.source "
    "AND grams.sequence = statistics.sequence "
    "AND " QUANTD_IS_OF_GRAM(grams.piece) ") END "
    "FROM statistics LEFT JOIN statistics_pieces AS pieces "
    "ON pieces.set_id = statistics.set_id "
    "AND pieces.tensor = statistics.tensor "
    "AND pieces.source = statistics.source "
    "AND pieces.sequence = statistics.sequence "
    "AND " QUANTD_IS_NO_SUM(pieces.piece) " "
    "WHERE statistics.set_id = " QUANTD_STATISTICS_SET " "
    "AND statistics.tensor = $3 AND statistics.source = $4 "
    "ORDER BY pieces.piece";
// A row per piece of the Gram matrix of a source; one if it has none, with the
// size of all that it has.
constexpr char kSelectGram[] =
    "SELECT " QUANTD_ROW_COLUMNS
    ", COALESCE(pieces.piece, -1), pieces.checksum, pieces.bytes, "
    "CASE WHEN pieces.piece IS NULL THEN "
    "(SELECT CAST(COALESCE(SUM(length(others.bytes)), 0) AS BIGINT) "
    "FROM statistics_pieces AS others WHERE others.set_id = statistics.set_id "
    "AND others.tensor = statistics.tensor "
    "AND others.source = statistics.source "
    "AND others.sequence = statistics.sequence) "
    "+ CAST(length(averages) + length(body) AS BIGINT) END "
    "FROM statistics LEFT JOIN statistics_pieces AS pieces "
    "ON pieces.set_id = statistics.set_id "
    "AND pieces.tensor = statistics.tensor "
    "AND pieces.source = statistics.source "
    "AND pieces.sequence = statistics.sequence "
    "AND " QUANTD_IS_OF_GRAM(pieces.piece) " "
    "WHERE statistics.set_id = " QUANTD_STATISTICS_SET " "
    "AND statistics.tensor = $3 AND statistics.source = $4 "
    "ORDER BY pieces.piece";
// Reads the moments of a source, like kSelectGram its Gram matrix.
constexpr char kSelectMoments[] =
    "SELECT " QUANTD_ROW_COLUMNS
    ", COALESCE(pieces.piece, -1), pieces.checksum, pieces.bytes "
    "FROM statistics LEFT JOIN statistics_pieces AS pieces "
    "ON pieces.set_id = statistics.set_id "
    "AND pieces.tensor = statistics.tensor "
    "AND pieces.source = statistics.source "
    "AND pieces.sequence = statistics.sequence "
    "AND " QUANTD_IS_OF_MOMENTS(pieces.piece) " "
    "WHERE statistics.set_id = " QUANTD_STATISTICS_SET " "
    "AND statistics.tensor = $3 AND statistics.source = $4";
// A piece of each other source that has it.
constexpr char kSelectOtherPieces[] =
    "SELECT pieces.source, pieces.sequence, pieces.checksum, pieces.bytes "
    "FROM statistics_pieces AS pieces JOIN statistics "
    "ON pieces.set_id = statistics.set_id "
    "AND pieces.tensor = statistics.tensor "
    "AND pieces.source = statistics.source "
    "AND pieces.sequence = statistics.sequence "
    "WHERE pieces.set_id = " QUANTD_STATISTICS_SET
    " "
    "AND pieces.tensor = $3 AND pieces.source <> $4 "
    "AND pieces.piece = $5";
// Reads the checksum of each source of a tensor.
constexpr char kSelectFingerprint[] =
    "SELECT checksum FROM statistics "
    "WHERE set_id = " QUANTD_STATISTICS_SET " AND tensor = $3 ORDER BY source";
// Another source's row, without the large columns.
constexpr char kSelectOther[] = "SELECT " QUANTD_ROW_COLUMNS
                                " FROM statistics "
                                "WHERE set_id = " QUANTD_STATISTICS_SET
                                " AND tensor = $3 AND source <> $4 "
                                "LIMIT 1";
constexpr char kSelectReplacedStatistics[] =
    "SELECT principal, charged_bytes FROM statistics " QUANTD_OF_SOURCE;
constexpr char kSelectChecksum[] =
    "SELECT checksum FROM statistics " QUANTD_OF_SOURCE;
constexpr char kUpsertStatistics[] =
    "INSERT INTO statistics (set_id, tensor, source, "
    "sequence, update_time_us, size_bytes, mantissa_bits, block_size, shape, "
    "body_checksum, checksum, averages, body, principal, slot, charged_bytes, "
    "incarnation) "
    "VALUES (" QUANTD_STATISTICS_SET
    ", $3, $4, $5, $6, $7, $8, $9, $10, $11, "
    "$12, $13, $14, $15, $16, $17, $18) "
    "ON CONFLICT (set_id, tensor, source) DO UPDATE SET "
    "sequence = excluded.sequence, update_time_us = excluded.update_time_us, "
    "size_bytes = excluded.size_bytes, "
    "mantissa_bits = excluded.mantissa_bits, "
    "block_size = excluded.block_size, shape = excluded.shape, "
    "body_checksum = excluded.body_checksum, checksum = excluded.checksum, "
    "averages = excluded.averages, body = excluded.body, "
    "principal = excluded.principal, charged_bytes = excluded.charged_bytes, "
    "incarnation = excluded.incarnation";
// All rows of the next tensors.
constexpr char kList[] =
    "SELECT " QUANTD_ROW_COLUMNS
    ", tensor, (SELECT CAST(COALESCE(SUM(length(grams.bytes)), 0) AS BIGINT) "
    "FROM statistics_pieces AS grams WHERE grams.set_id = statistics.set_id "
    "AND grams.tensor = statistics.tensor "
    "AND grams.source = statistics.source "
    "AND grams.sequence = statistics.sequence "
    "AND " QUANTD_IS_OF_GRAM(grams.piece) ") "
    "FROM statistics WHERE set_id = " QUANTD_STATISTICS_SET " "
    "AND tensor > $3 AND tensor <= (SELECT MAX(tensor) FROM ("
    "SELECT DISTINCT tensor FROM statistics WHERE set_id = " QUANTD_STATISTICS_SET " AND tensor > $3 ORDER BY tensor LIMIT $4) AS page) "
    "ORDER BY tensor, source";
// From the index of the key, whatever is damaged beside that.
constexpr char kListStatisticsNames[] =
    "SELECT DISTINCT tensor FROM statistics "
    "WHERE set_id = " QUANTD_STATISTICS_SET
    " AND tensor > $3 "
    "ORDER BY tensor LIMIT $4";
// Sources of a set after one.
constexpr char kListStatisticsKeys[] =
    "SELECT tensor, source FROM statistics "
    "WHERE set_id = $1 AND (tensor, source) > ($2, $3) "
    "ORDER BY tensor, source LIMIT 1000";
// Pieces that no row has.
constexpr char kListLostStatisticsPieces[] =
    "SELECT set_id, tensor, source, COUNT(*) "
    "FROM statistics_pieces AS pieces WHERE NOT EXISTS ("
    "SELECT 1 FROM statistics WHERE statistics.set_id = pieces.set_id "
    "AND statistics.tensor = pieces.tensor "
    "AND statistics.source = pieces.source "
    "AND statistics.sequence = pieces.sequence) "
    "AND NOT EXISTS (SELECT 1 FROM lost_statistics AS lost "
    "WHERE lost.set_id = pieces.set_id "
    "AND lost.tensor = pieces.tensor AND lost.source = pieces.source) "
    "GROUP BY set_id, tensor, source ORDER BY set_id, tensor, source";
constexpr char kSelectNewer[] =
    "SELECT sequence FROM statistics WHERE set_id = " QUANTD_STATISTICS_SET
    " "
    "AND tensor = $3 AND update_time_us > $4 LIMIT 1";
constexpr char kDeleteStatisticsRow[] =
    "DELETE FROM statistics WHERE set_id = " QUANTD_STATISTICS_SET
    " AND tensor = $3 "
    "AND ($4 = '' OR source = $4) RETURNING sequence";

#undef QUANTD_OF_SOURCE
#undef QUANTD_IS_OF_GRAM
#undef QUANTD_IS_OF_MOMENTS
#undef QUANTD_IS_OF_HISTOGRAMS
#undef QUANTD_IS_NO_SUM
#undef QUANTD_ROW_COLUMNS

static_assert(kFirstGramPiece == 1099511627776, "as in the statements");
static_assert(kMomentsPiece == 549755813888, "as in the statements");

// The columns of a row that are small.
struct StatisticsRowHead {
  std::string source;
  int64_t sequence = 0;
  int64_t update_time_us = 0;
  // Bytes of averages, body and pieces.
  int64_t size_bytes = 0;
  int64_t mantissa_bits = 0;
  std::vector<int64_t> block_size;
  std::vector<int64_t> shape;
  // Checksum of averages, body and pieces.
  uint64_t body_checksum = 0;
  // Number that is the same for all contributions; another one once the source
  // was deleted.
  int64_t incarnation = 0;
  // Checksum of the row: over all of these.
  uint64_t checksum = 0;
};

// Plain numbers in the order of this machine's bytes, which is that of all
// machines that quantd runs on.
template <typename T>
std::string Pack(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(T));
}

template <typename T>
std::vector<T> Unpack(absl::string_view bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) {
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  }
  return values;
}

uint64_t StatisticsHeadChecksum(const EncodingKey& key,
                                const StatisticsRowHead& head) {
  const std::vector<int64_t> numbers = {
      head.sequence,
      head.update_time_us,
      head.size_bytes,
      head.mantissa_bits,
      static_cast<int64_t>(head.body_checksum),
      head.incarnation};
  return RowChecksum::Of({key.model, key.revision, key.tensor, head.source,
                          Pack(numbers), Pack(head.block_size),
                          Pack(head.shape)});
}

// Errors: STATISTICS_NOT_FOUND; STORE_CORRUPT where that is not known.
absl::Status NoSuchStatistics(SqlConnection& connection,
                              const EncodingKey& key) {
  const absl::Status status =
      FindRowSet(connection, key.model, key.revision, RowKind::kStatistics)
          .status();
  if (!status.ok()) return status;
  return core::StatisticsNotFoundError(key.model, key.revision, key.tensor);
}

// The small columns of a row.
// Errors: STORE_CORRUPT.
absl::StatusOr<StatisticsRowHead> ReadHead(const EncodingKey& key,
                                           const SqlStatement& row) {
  StatisticsRowHead head;
  head.source = std::string(row.Bytes(0));
  head.sequence = row.Int(1);
  head.update_time_us = row.Int(2);
  head.size_bytes = row.Int(3);
  head.mantissa_bits = row.Int(4);
  head.block_size = Unpack<int64_t>(row.Bytes(5));
  head.shape = Unpack<int64_t>(row.Bytes(6));
  head.body_checksum = static_cast<uint64_t>(row.Int(7));
  head.incarnation = row.Int(9);
  head.checksum = static_cast<uint64_t>(row.Int(8));
  if (head.checksum != StatisticsHeadChecksum(key, head)) {
    return SourceCorruptError(key, head.source, "fail their checksum");
  }
  return head;
}

// Contributions of a source, as they are read row by row.
class SourceReader {
 public:
  SourceReader(const EncodingKey& key, StatisticsRowHead head)
      : key_(key), head_(std::move(head)) {}

  const StatisticsRowHead& head() const { return head_; }

  // Takes a row of kSelectAll.
  // Errors: STORE_CORRUPT.
  absl::Status Add(const SqlStatement& row) {
    if (!checksum_.has_value()) {
      averages_ = Unpack<core::Extremes>(row.Bytes(10));
      checksum_.emplace(row.Bytes(10), row.Bytes(11));
      if (absl::Status s = Append(row.Bytes(11)); !s.ok()) return s;
    }
    const int64_t piece = row.Int(12);
    if (piece < 0) return absl::OkStatus();
    const auto checksum = static_cast<uint64_t>(row.Int(13));
    if (checksum != PieceChecksum({key_, head_.source, head_.sequence}, piece,
                                  row.Bytes(14))) {
      return Corrupt("fail their checksum");
    }
    checksum_->AddPiece(checksum);
    if (piece >= kMomentsPiece) return absl::OkStatus();
    return Append(row.Bytes(14));
  }

  // After the last row.
  // Errors: STORE_CORRUPT.
  absl::Status Finish(core::StatisticsState* state,
                      std::vector<core::Extremes>* averages) {
    if (head_.body_checksum != checksum_->Get()) {
      return Corrupt("fail their checksum");
    }
    absl::StatusOr<core::StatisticsState> read = StateFromProto(message_);
    if (!read.ok()) {
      return Corrupt(absl::StrCat("are invalid: ", read.status().message()));
    }
    if (static_cast<int64_t>(averages_.size()) !=
        read->statistics.scale_count()) {
      return Corrupt("lack their averages");
    }
    *state = *std::move(read);
    *averages = std::move(averages_);
    return absl::OkStatus();
  }

  absl::Status Corrupt(absl::string_view what) const {
    return SourceCorruptError(key_, head_.source, what);
  }

 private:
  absl::Status Append(absl::string_view bytes) {
    google::protobuf::io::CodedInputStream stream(
        reinterpret_cast<const uint8_t*>(bytes.data()),
        static_cast<int>(bytes.size()));
    return message_.MergeFromCodedStream(&stream) &&
                   stream.ConsumedEntireMessage()
               ? absl::OkStatus()
               : Corrupt("do not decode");
  }

  const EncodingKey& key_;
  const StatisticsRowHead head_;
  // From the first row on.
  absl::optional<BodyChecksum> checksum_;
  std::vector<core::Extremes> averages_;
  v1::StatisticsState message_;
};

// Fingerprint of the checksums of all rows of a tensor, in order of source,
// which tell contributions apart. Not thread-safe.
class SourcesFingerprint {
 public:
  void Add(uint64_t row_checksum) {
    checksum_.Add(
        {reinterpret_cast<const char*>(&row_checksum), sizeof(row_checksum)});
  }
  uint64_t Get() const { return checksum_.Get(); }

 private:
  RowChecksum checksum_;
};

// Adds a source that was read to its end.
// Errors: STORE_CORRUPT.
absl::Status AddSource(SourceReader* reader, StoredStatistics* stored) {
  core::StatisticsState state;
  std::vector<core::Extremes> averages;
  if (absl::Status s = reader->Finish(&state, &averages); !s.ok()) return s;
  if (stored->sources.empty()) {
    stored->state = std::move(state);
    stored->moving_average = std::move(averages);
  } else {
    absl::Status status = core::MergeState(state, &stored->state);
    // They were checked when they were written.
    if (!status.ok()) return reader->Corrupt(status.message());
    stored->moving_average.clear();
  }
  const StatisticsRowHead& head = reader->head();
  stored->sources.push_back({head.source, static_cast<uint64_t>(head.sequence),
                             absl::FromUnixMicros(head.update_time_us)});
  return absl::OkStatus();
}

// Moves by `constant` of the difference to the extremes of a contribution.
void MoveAverages(absl::Span<const core::Extremes> part, double constant,
                  std::vector<core::Extremes>* averages) {
  for (size_t i = 0; i < part.size(); ++i) {
    if (part[i].empty()) continue;
    core::Extremes& average = (*averages)[i];
    if (average.empty()) {
      average = part[i];
    } else {
      average.min += constant * (part[i].min - average.min);
      average.max += constant * (part[i].max - average.max);
    }
  }
}

// Parts of a state that CheckMergeable looks at, from the columns of a row.
core::StatisticsState Outline(const StatisticsRowHead& head,
                              const core::ElementCounts& counts) {
  core::StatisticsState outline;
  outline.block_size = head.block_size;
  outline.shape = head.shape;
  outline.statistics = core::TensorStatistics::FromParts(
      counts, {}, {}, static_cast<int>(head.mantissa_bits), {});
  return outline;
}

// Bytes of memory that merging holds beside `part`: the outlines of all, a
// piece that is read, one that is written, and the histogram between them. A
// serialized bin of few bytes takes dozens as a message.
// `stored_bytes`  of the row's body and its largest piece.
int64_t MergeMemoryBytes(const core::TensorStatistics& part,
                         int64_t stored_bytes) {
  constexpr int64_t kOutlineBytesPerScale = 256;
  constexpr int64_t kMemoryPerWrittenByte = 10;
  constexpr int64_t kMessagePerHistogramByte = 5;
  constexpr int64_t kMemoryPerStoredByte = 16;
  int64_t largest = 0;
  for (const core::Histogram& histogram : part.histograms()) {
    largest = std::max(largest, histogram.memory_bytes());
  }
  const int64_t written_bytes =
      std::min(kStatisticsPieceBytes, part.memory_bytes() + stored_bytes);
  return kOutlineBytesPerScale * part.scale_count() +
         kMemoryPerWrittenByte * written_bytes +
         kMessagePerHistogramByte * largest +
         kMemoryPerStoredByte * stored_bytes;
}

// Adds the head of a source that is stored, and was checked when it was
// written.
// Errors: STORE_CORRUPT.
absl::Status AddStoredGramHead(const EncodingKey& key, absl::string_view source,
                               const core::GramState::Parts& head,
                               absl::optional<core::GramState::Parts>* whole) {
  if (!whole->has_value()) {
    *whole = head;
    return absl::OkStatus();
  }
  absl::Status status = CheckGramHeads(**whole, head);
  if (!status.ok()) return SourceCorruptError(key, source, status.message());
  AddGramHead(head, &**whole);
  return absl::OkStatus();
}

// Adds the head from the piece that has it, like AddStoredGramHead.
// Errors: STORE_CORRUPT.
absl::Status AddGramHeadPiece(const SourceVersion& version, uint64_t checksum,
                              absl::string_view bytes,
                              absl::optional<core::GramState::Parts>* whole) {
  GramAssembler assembler(version);
  absl::Status status =
      assembler.Add(kFirstGramPiece, checksum, bytes).status();
  if (!status.ok()) return status;
  return AddStoredGramHead(version.key, version.source, assembler.head(),
                           whole);
}

// Adds the moments of a source that is stored, and was checked when it was
// written.
// `proceed`  as of ReadMomentsPiece.
// Errors: STORE_CORRUPT; that of `proceed`.
absl::Status AddMomentsPiece(
    const SourceVersion& version, uint64_t checksum, absl::string_view bytes,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed,
    absl::optional<core::AxisMoments>* whole) {
  absl::StatusOr<core::AxisMoments> part =
      ReadMomentsPiece(version, checksum, bytes, proceed);
  if (!part.ok()) return part.status();
  if (!whole->has_value()) {
    *whole = *std::move(part);
    return absl::OkStatus();
  }
  absl::Status status = core::MergeMoments(*part, &**whole);
  if (!status.ok()) {
    return SourceCorruptError(version.key, version.source, status.message());
  }
  return absl::OkStatus();
}

// Reads the Gram matrix over all sources but `but_source`, without sums.
// Errors: STORE_CORRUPT, STORE_UNAVAILABLE.
absl::StatusOr<absl::optional<core::GramState::Parts>> ReadGramHeads(
    SqlConnection& connection, const EncodingKey& key,
    absl::string_view but_source) {
  absl::optional<core::GramState::Parts> whole;
  const std::unique_ptr<SqlStatement> row =
      connection.Prepare(kSelectOtherPieces);
  row->BindKey(key);
  row->BindText(4, but_source);
  row->BindInt(5, kFirstGramPiece);
  while (true) {
    absl::StatusOr<bool> found = row->Step("cannot read a Gram matrix");
    if (!found.ok()) return found.status();
    if (!*found) return whole;
    const std::string source(row->Bytes(0));
    absl::Status status = AddGramHeadPiece({key, source, row->Int(1)},
                                           static_cast<uint64_t>(row->Int(2)),
                                           row->Bytes(3), &whole);
    if (!status.ok()) return status;
  }
}

// Between transactions, so that other processes that write a file come in.
constexpr absl::Duration kStepPause = absl::Milliseconds(5);

// A contribution over the transactions that write it: what they know of each
// other.
struct Attempt {
  // `gram`  of the part; null if it has none.
  explicit Attempt(const core::GramState::Parts* gram)
      : gram(gram), writer(gram) {}

  const core::GramState::Parts* const gram;
  GramWriter writer;
  // State in which it began: the set in which pieces are written, and the
  // checksum of the row that was there, if any.
  int64_t set_id = 0;
  absl::optional<uint64_t> row_checksum;
  // Id of what the steps have counted, see staged_contents.h; 0 for nothing.
  int64_t staged_id = 0;
  // Nothing is left to write.
  bool is_done = false;
};

// A contribution in a transaction that writes it.
class Merger {
 public:
  Merger(SqlConnection* connection, const ContributionKey& key,
         const core::StatisticsState& part, Attempt* attempt,
         double averaging_constant)
      : connection_(*connection),
        key_(key),
        part_(part),
        attempt_(*attempt),
        averaging_constant_(averaging_constant) {}

  // Reads what the source has; answers whether the contribution is counted
  // there already, and by which sequence.
  absl::StatusOr<absl::optional<int64_t>> ReadBefore() {
    const std::unique_ptr<SqlStatement> row = Select(kSelectHead);
    absl::StatusOr<bool> found = row->Step(kWhat);
    if (!found.ok()) return found.status();
    if (!*found) return absl::nullopt;
    absl::StatusOr<StatisticsRowHead> head = ReadHead(key_.tensor, *row);
    if (!head.ok()) return head.status();
    if (static_cast<int64_t>(key_.sequence) <= head->sequence) {
      return head->sequence;
    }
    stored_bytes_ = row->Int(10) + row->Int(11);
    had_gram_ = row->Int(12) > 0;
    moments_bytes_before_ = row->Int(13);
    before_ = *std::move(head);
    return absl::nullopt;
  }

  int64_t memory_bytes() const {
    return MergeMemoryBytes(part_.statistics, stored_bytes_) +
           (had_gram_ || attempt_.gram != nullptr
                ? WriteGramBytes(attempt_.gram)
                : 0) +
           // Moments as they are read and as they are written.
           2 * moments_bytes_before_ +
           (moments() != nullptr
                ? MergeMomentsBytes(moments()->moments.feature_count())
                : 0);
  }

  // True if the contribution may take several transactions.
  bool may_take_steps() const {
    return part_.gram.has_value() ? TakesSteps(part_.gram->sum_count())
                                  : had_gram_;
  }

  // Before the first of them, which would be in vain: what the last one would
  // refuse. Writes nothing. Those who write meanwhile may make it fail with any
  // error of Write.
  // `set_id`  where the source has its pieces, if it has anything.
  // Errors: STATISTICS_MISMATCH, STATISTICS_TOO_LARGE.
  absl::Status CheckFits(int64_t set_id, int64_t limit_bytes) {
    set_id_ = set_id;
    absl::StatusOr<Content> content = MergeContent();
    if (!content.ok()) return content.status();
    auto size_bytes =
        static_cast<int64_t>(content->averages.size() + content->body.size());
    v1::StatisticsState piece;
    absl::Status status =
        MergeHistograms(&*content, [&](const core::Histogram& histogram) {
          piece.clear_histograms();
          HistogramToProto(histogram, piece.add_histograms());
          size_bytes += static_cast<int64_t>(piece.ByteSizeLong());
          return absl::OkStatus();
        });
    return status.ok() ? CheckLimit(size_bytes, limit_bytes) : status;
  }

  // Writes the source's new pieces and row, and the attempt is done; or of a
  // large Gram matrix the next pieces. False, and nothing is to be committed,
  // where the source is not any more what it was.
  // Errors: STATISTICS_MISMATCH, STATISTICS_TOO_LARGE, QUOTA_EXCEEDED,
  // STORE_CORRUPT, STORE_UNAVAILABLE.
  absl::StatusOr<bool> Write(int64_t limit_bytes) {
    const absl::StatusOr<bool> begun = BeginGram();
    if (!begun.ok() || !*begun) return begun;
    absl::StatusOr<bool> written = true;
    if (attempt_.writer.has_steps()) {
      absl::Status status = WriteStep();
      if (!status.ok()) written = status;
    } else {
      written = WriteAll(limit_bytes);
      attempt_.is_done = true;
    }
    // Who deletes the source meanwhile takes pieces away that were to be read.
    if (before_.has_value() && absl::IsDataLoss(written.status()) &&
        connection_.LockTensor(key_.tensor).ok() &&
        !IsUnchanged().value_or(true)) {
      return false;
    }
    return written;
  }

 private:
  // False where the source is not any more what it was when the attempt began.
  absl::StatusOr<bool> BeginGram() {
    const absl::StatusOr<absl::optional<RowSet>> set =
        FindRowSet(connection_, key_.tensor.model, key_.tensor.revision,
                   RowKind::kStatistics);
    if (!set.ok()) return set.status();
    if (!set->has_value()) return false;
    set_id_ = (*set)->id;
    absl::optional<uint64_t> row_checksum;
    if (before_.has_value()) row_checksum = before_->checksum;
    if (attempt_.writer.has_begun()) {
      return attempt_.set_id == set_id_ &&
             attempt_.row_checksum == row_checksum;
    }
    attempt_.set_id = set_id_;
    attempt_.row_checksum = row_checksum;
    absl::optional<SourceVersion> before;
    if (before_.has_value()) {
      before.emplace(VersionOf(static_cast<uint64_t>(before_->sequence)));
    }
    absl::Status status =
        attempt_.writer.Begin(&connection_, before, VersionOf(key_.sequence));
    // Before all is written in vain.
    if (status.ok() && attempt_.writer.has_steps()) status = CheckOthers();
    if (!status.ok()) return status;
    return true;
  }

  // A matrix that takes the place of another one, which it is as large as,
  // counts for nobody.
  absl::Status WriteStep() {
    const int64_t bytes_before = attempt_.writer.size_bytes();
    absl::Status status = attempt_.writer.Step(&connection_);
    if (!status.ok() || had_gram_) return status;
    const bool is_new = attempt_.staged_id == 0;
    if (is_new) {
      const absl::StatusOr<int64_t> id = connection_.NextGeneration();
      if (!id.ok()) return id.status();
      attempt_.staged_id = *id;
    }
    return StageContent(connection_, key_.tensor, key_.account,
                        attempt_.staged_id, is_new,
                        attempt_.writer.size_bytes() - bytes_before);
  }

  static constexpr absl::string_view kWhat = "cannot contribute statistics";

  // True if the row that was read is there, or none still, in the same set.
  absl::StatusOr<bool> IsUnchanged() {
    const absl::StatusOr<absl::optional<RowSet>> set =
        FindRowSet(connection_, key_.tensor.model, key_.tensor.revision,
                   RowKind::kStatistics);
    if (!set.ok()) return set.status();
    if (!set->has_value() || (*set)->id != set_id_) return false;
    const std::unique_ptr<SqlStatement> row = Select(kSelectChecksum);
    absl::StatusOr<bool> found = row->Step(kWhat);
    if (!found.ok()) return found.status();
    // The checksum covers the sequence, and tells a row from one that came
    // after it was deleted.
    return *found == before_.has_value() &&
           (!*found || static_cast<uint64_t>(row->Int(0)) == before_->checksum);
  }

  absl::Status CheckOtherGrams() {
    if (attempt_.gram == nullptr) return absl::OkStatus();
    absl::StatusOr<absl::optional<core::GramState::Parts>> other =
        ReadGramHeads(connection_, key_.tensor, key_.source);
    if (!other.ok()) return other.status();
    if (!other->has_value()) return absl::OkStatus();
    return CheckGramHeads(**other, attempt_.writer.head());
  }

  const core::AxisMoments* moments() const {
    return part_.moments.has_value() ? &*part_.moments : nullptr;
  }

  absl::Status CheckOtherMoments() {
    if (moments() == nullptr) return absl::OkStatus();
    const std::unique_ptr<SqlStatement> row = Select(kSelectOtherPieces);
    row->BindInt(5, kMomentsPiece);
    absl::StatusOr<bool> found = row->Step(kWhat);
    // Any one will do: all that are there go together.
    if (!found.ok() || !*found) return found.status();
    const std::string source(row->Bytes(0));
    return CheckMomentsPiece({key_.tensor, source, row->Int(1)},
                             static_cast<uint64_t>(row->Int(2)), row->Bytes(3),
                             *moments());
  }

  absl::Status CheckOthers() {
    if (absl::Status s = CheckOtherGrams(); !s.ok()) return s;
    if (absl::Status s = CheckOtherMoments(); !s.ok()) return s;
    const std::unique_ptr<SqlStatement> row = Select(kSelectOther);
    absl::StatusOr<bool> found = row->Step(kWhat);
    if (!found.ok()) return found.status();
    // Any one will do: all that are there go together.
    if (!*found) return absl::OkStatus();
    absl::StatusOr<StatisticsRowHead> other = ReadHead(key_.tensor, *row);
    if (!other.ok()) return other.status();
    return core::CheckMergeable(Outline(*other, {}), part_);
  }

  std::unique_ptr<SqlStatement> Select(const char* sql) {
    std::unique_ptr<SqlStatement> row = connection_.Prepare(sql);
    row->BindKey(key_.tensor);
    row->BindText(4, key_.source);
    return row;
  }

  SourceVersion VersionOf(uint64_t sequence) const {
    return {key_.tensor, key_.source, static_cast<int64_t>(sequence), set_id_};
  }

  absl::Status Corrupt(absl::string_view what) const {
    return SourceCorruptError(key_.tensor, key_.source, what);
  }

  core::StatisticsState PartOutline() const {
    return {part_.block_size, part_.shape,
            part_.statistics.WithoutHistograms()};
  }

  // Contents of the source's row, beside what its pieces have.
  struct Content {
    std::vector<int64_t> shape;
    std::string averages;
    std::string body;
    // Elements that the source had, if it had anything, and the checksum over
    // as much of it as was read.
    uint64_t count_before = 0;
    absl::optional<BodyChecksum> checksum_before;
  };

  absl::StatusOr<Content> MergeContent() {
    Content content;
    core::StatisticsState outline = PartOutline();
    const absl::Span<const core::Extremes> extremes =
        part_.statistics.extremes();
    std::vector<core::Extremes> averages(extremes.begin(), extremes.end());
    if (before_.has_value()) {
      absl::Status status = AddBefore(&content, &outline, &averages);
      if (!status.ok()) return status;
    }
    content.averages = Pack(averages);
    content.body = BodyOf(outline);
    content.shape = std::move(outline.shape);
    return content;
  }

  // Adds what the source had to what the part has.
  absl::Status AddBefore(Content* content, core::StatisticsState* outline,
                         std::vector<core::Extremes>* averages) {
    v1::StatisticsState message;
    std::vector<core::Extremes> stored_averages;
    {
      const std::unique_ptr<SqlStatement> row = Select(kSelectBody);
      absl::StatusOr<bool> found = row->Step(kWhat);
      if (!found.ok()) return found.status();
      if (!*found) return Corrupt("are there and not there");
      const absl::string_view body = row->Bytes(1);
      stored_averages = Unpack<core::Extremes>(row->Bytes(0));
      content->checksum_before.emplace(row->Bytes(0), body);
      if (!message.ParseFromArray(body.data(), static_cast<int>(body.size()))) {
        return Corrupt("do not decode");
      }
    }
    absl::StatusOr<core::StatisticsState> stored = OutlineFromProto(message);
    if (!stored.ok()) {
      return Corrupt(absl::StrCat("are invalid: ", stored.status().message()));
    }
    absl::Status status = core::CheckMergeable(
        Outline(*before_, stored->statistics.counts()), part_);
    if (!status.ok()) return status;
    const int64_t scale_count = part_.statistics.scale_count();
    if (stored->statistics.scale_count() != scale_count ||
        static_cast<int64_t>(stored_averages.size()) != scale_count) {
      return Corrupt("lack scale indices");
    }
    content->count_before =
        static_cast<uint64_t>(stored->statistics.counts().total);
    status = core::MergeState(*outline, &*stored);
    if (!status.ok()) return status;
    *outline = *std::move(stored);
    MoveAverages(part_.statistics.extremes(), averaging_constant_,
                 &stored_averages);
    *averages = std::move(stored_averages);
    return absl::OkStatus();
  }

  // Calls `add` with the histogram of each scale index.
  absl::Status MergeHistograms(
      Content* content,
      absl::FunctionRef<absl::Status(const core::Histogram&)> add) {
    if (!before_.has_value()) {
      for (const core::Histogram& histogram : part_.statistics.histograms()) {
        if (absl::Status s = add(histogram); !s.ok()) return s;
      }
      return absl::OkStatus();
    }
    PieceReader reader(&connection_,
                       VersionOf(static_cast<uint64_t>(before_->sequence)),
                       &*content->checksum_before);
    for (const core::Histogram& more : part_.statistics.histograms()) {
      absl::StatusOr<const v1::Histogram*> stored = reader.Next();
      if (!stored.ok()) return stored.status();
      if (*stored == nullptr) return Corrupt("lack histograms");
      absl::StatusOr<core::Histogram> histogram = HistogramFromProto(
          **stored, more.mantissa_bits(), content->count_before);
      if (!histogram.ok()) {
        return Corrupt(
            absl::StrCat("are invalid: ", histogram.status().message()));
      }
      histogram->Merge(more);
      if (absl::Status s = add(*histogram); !s.ok()) return s;
    }
    absl::StatusOr<const v1::Histogram*> end = reader.Next();
    if (!end.ok()) return end.status();
    return *end == nullptr ? absl::OkStatus() : Corrupt("fail their checksum");
  }

  absl::StatusOr<bool> WriteAll(int64_t limit_bytes) {
    absl::StatusOr<Content> content = MergeContent();
    if (!content.ok()) return content.status();
    BodyChecksum checksum(content->averages, content->body);
    PieceWriter writer(&connection_, VersionOf(key_.sequence), &checksum);
    absl::Status status =
        MergeHistograms(&*content, [&](const core::Histogram& histogram) {
          return writer.Add(histogram);
        });
    if (!status.ok()) return status;
    if (absl::Status s = writer.Flush(); !s.ok()) return s;
    status = WriteFeaturePieces(&checksum, content->checksum_before.has_value()
                                               ? &*content->checksum_before
                                               : nullptr);
    if (!status.ok()) return status;
    if (before_.has_value() &&
        content->checksum_before->Get() != before_->body_checksum) {
      return Corrupt("fail their checksum");
    }
    return WriteRow(*content, checksum, limit_bytes, &writer);
  }

  static absl::Status CheckLimit(int64_t size_bytes, int64_t limit_bytes) {
    if (size_bytes <= limit_bytes) return absl::OkStatus();
    return core::StatisticsTooLargeError(
        limit_bytes, size_bytes,
        "contribute with a coarser granularity or fewer mantissa bits");
  }

  // `read`  over what the source had before, if it had anything.
  absl::Status WriteFeaturePieces(BodyChecksum* checksum, BodyChecksum* read) {
    absl::optional<SourceVersion> before;
    if (before_.has_value()) {
      before.emplace(VersionOf(static_cast<uint64_t>(before_->sequence)));
    }
    const auto add = [&](const auto& written) {
      feature_bytes_ += written.size_bytes;
      if (written.checksum.has_value()) checksum->AddPiece(*written.checksum);
      if (written.checksum_before.has_value()) {
        read->AddPiece(*written.checksum_before);
      }
    };
    const SourceVersion now = VersionOf(key_.sequence);
    absl::StatusOr<WrittenMoments> moments_written =
        WriteMoments(&connection_, before, now, moments());
    if (!moments_written.ok()) return moments_written.status();
    add(*moments_written);
    moments_end_ = moments_written->end_piece();
    absl::StatusOr<WrittenGram> gram_written =
        attempt_.writer.Finish(&connection_);
    if (!gram_written.ok()) return gram_written.status();
    add(*gram_written);
    gram_end_ = gram_written->end_piece;
    return absl::OkStatus();
  }

  std::string BodyOf(const core::StatisticsState& outline) const {
    v1::StatisticsState message;
    OutlineToProto(outline, part_.statistics.mantissa_bits(), &message);
    return message.SerializeAsString();
  }

  // After the pieces: until here only the source was locked, so that others of
  // the tensor were merged meanwhile.
  absl::StatusOr<bool> WriteRow(const Content& content,
                                const BodyChecksum& checksum,
                                int64_t limit_bytes, PieceWriter* writer) {
    absl::Status status = connection_.LockTensor(key_.tensor);
    if (!status.ok()) return status;
    absl::StatusOr<bool> unchanged = IsUnchanged();
    if (!unchanged.ok() || !*unchanged) return unchanged;
    if (absl::Status s = CheckOthers(); !s.ok()) return s;
    StatisticsRowHead head;
    head.source = key_.source;
    head.sequence = static_cast<int64_t>(key_.sequence);
    head.update_time_us = absl::ToUnixMicros(absl::Now());
    head.size_bytes =
        static_cast<int64_t>(content.averages.size() + content.body.size()) +
        writer->size_bytes();
    head.mantissa_bits = part_.statistics.mantissa_bits();
    head.block_size = part_.block_size;
    head.shape = content.shape;
    head.body_checksum = checksum.Get();
    if (before_.has_value()) {
      head.incarnation = before_->incarnation;
    } else {
      const absl::StatusOr<int64_t> incarnation = connection_.NextGeneration();
      if (!incarnation.ok()) return incarnation.status();
      head.incarnation = *incarnation;
    }
    status = CheckLimit(head.size_bytes, limit_bytes);
    if (!status.ok()) return status;
    head.size_bytes += feature_bytes_;
    if (attempt_.staged_id != 0) {
      status = EndStagedContent(connection_, attempt_.staged_id);
      if (!status.ok()) return status;
    }
    const WriteAccount& account = key_.account;
    ReplacedRow replaced;
    if (!account.quotas.empty()) {
      const std::unique_ptr<SqlStatement> row =
          Select(kSelectReplacedStatistics);
      absl::StatusOr<bool> found = row->Step(kWhat);
      if (!found.ok()) return found.status();
      if (*found) replaced = {true, std::string(row->Bytes(0)), row->Int(1)};
    }
    const int64_t charged_bytes = head.size_bytes + NameBytes(key_.tensor) +
                                  static_cast<int64_t>(head.source.size());
    const std::string packed_block_size = Pack(head.block_size);
    const std::string packed_shape = Pack(head.shape);
    {
      const std::unique_ptr<SqlStatement> row =
          connection_.Prepare(kUpsertStatistics);
      row->BindKey(key_.tensor);
      row->BindText(4, head.source);
      row->BindInt(5, head.sequence);
      row->BindInt(6, head.update_time_us);
      row->BindInt(7, head.size_bytes);
      row->BindInt(8, head.mantissa_bits);
      row->BindBytes(9, packed_block_size);
      row->BindBytes(10, packed_shape);
      row->BindInt(11, static_cast<int64_t>(head.body_checksum));
      row->BindInt(
          12, static_cast<int64_t>(StatisticsHeadChecksum(key_.tensor, head)));
      row->BindBytes(13, content.averages);
      row->BindBytes(14, content.body);
      row->BindText(15, account.principal);
      row->BindInt(16, SlotOf(key_.tensor.tensor));
      row->BindInt(17, charged_bytes);
      row->BindInt(18, head.incarnation);
      if (absl::Status s = row->Step(kWhat).status(); !s.ok()) return s;
    }
    // Freeing the earlier sums takes as long as it takes to write them.
    const int64_t others_end = attempt_.writer.is_staged()
                                   ? kFirstGramPiece + 1
                                   : std::numeric_limits<int64_t>::max();
    status = writer->DeleteOthers(moments_end_, gram_end_, others_end);
    if (!status.ok()) return status;
    status = CheckQuotas(connection_, account, replaced, charged_bytes);
    if (!status.ok()) return status;
    return true;
  }

  SqlConnection& connection_;
  const ContributionKey& key_;
  const core::StatisticsState& part_;
  Attempt& attempt_;
  const double averaging_constant_;
  // Set in which pieces are written.
  int64_t set_id_ = 0;
  // The row that is there, if any, and what it and its largest piece take.
  absl::optional<StatisticsRowHead> before_;
  int64_t stored_bytes_ = 0;
  bool had_gram_ = false;
  int64_t moments_bytes_before_ = 0;
  // Bytes of the moments and the Gram matrix that were written, and the number
  // behind the last piece of each.
  int64_t feature_bytes_ = 0;
  int64_t moments_end_ = kMomentsPiece;
  int64_t gram_end_ = kFirstGramPiece;
};

}  // namespace

SqlStatisticsStore::SqlStatisticsStore(std::shared_ptr<SqlDatabase> database,
                                       int64_t limit_bytes)
    : database_(std::move(database)), limit_bytes_(limit_bytes) {}

absl::StatusOr<ContributionOutcome> SqlStatisticsStore::Merge(
    const ContributionKey& key, const core::StatisticsState& part,
    double averaging_constant,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  ContributionOutcome outcome{key.sequence, false};
  // True if `merger` finds that the contribution is counted already.
  const auto is_duplicate = [&](Merger& merger) -> absl::StatusOr<bool> {
    absl::StatusOr<absl::optional<int64_t>> counted = merger.ReadBefore();
    if (!counted.ok()) return counted.status();
    if (!counted->has_value()) return false;
    outcome = {static_cast<uint64_t>(**counted), true};
    return true;
  };
  bool has_set = false;
  // Mostly told without waiting for those that write.
  const auto look = [&](SqlConnection& connection) -> absl::Status {
    Attempt attempt(nullptr);
    Merger merger(&connection, key, part, &attempt, averaging_constant);
    absl::StatusOr<bool> duplicate = is_duplicate(merger);
    if (!duplicate.ok() || *duplicate) return duplicate.status();
    const absl::StatusOr<absl::optional<RowSet>> set =
        FindRowSet(connection, key.tensor.model, key.tensor.revision,
                   RowKind::kStatistics);
    if (!set.ok()) return set.status();
    has_set = set->has_value();
    if (!merger.may_take_steps()) return absl::OkStatus();
    if (absl::Status s = proceed(merger.memory_bytes()); !s.ok()) return s;
    absl::Status status =
        merger.CheckFits(has_set ? (*set)->id : 0, limit_bytes_);
    const bool is_refused =
        absl::IsFailedPrecondition(status) || absl::IsResourceExhausted(status);
    return is_refused ? status : absl::OkStatus();
  };
  if (absl::Status s = database_->Read(look); !s.ok()) return s;
  if (outcome.duplicate) return outcome;
  // Before others have to wait.
  absl::optional<core::GramState::Parts> gram;
  if (part.gram.has_value()) {
    absl::Status status = proceed(part.gram->memory_bytes());
    if (!status.ok()) return status;
    gram = part.gram->ToParts();
  }
  const absl::Status overtaken = absl::AbortedError("overtaken");
  const auto write = [&](SqlConnection& connection,
                         Attempt* attempt) -> absl::Status {
    absl::Status status = connection.LockSource(key.tensor, key.source);
    if (!status.ok()) return status;
    Merger merger(&connection, key, part, attempt, averaging_constant);
    absl::StatusOr<bool> duplicate = is_duplicate(merger);
    attempt->is_done = duplicate.ok() && *duplicate;
    if (!duplicate.ok() || *duplicate) return duplicate.status();
    if (absl::Status s = proceed(merger.memory_bytes()); !s.ok()) return s;
    absl::StatusOr<bool> written = merger.Write(limit_bytes_);
    if (!written.ok()) return written.status();
    return *written ? absl::OkStatus() : overtaken;
  };
  // Briefly: whoever else adds the same set waits for it.
  const auto add_set = [&](SqlConnection& connection) {
    return FindOrAddRowSet(connection, key.tensor.model, key.tensor.revision,
                           RowKind::kStatistics)
        .status();
  };
  // Who deletes the source or its revision overtakes.
  absl::Status status;
  do {
    if (!has_set) {
      if (absl::Status s = database_->Write(add_set); !s.ok()) return s;
    }
    has_set = false;
    Attempt attempt(gram.has_value() ? &*gram : nullptr);
    do {
      if (attempt.writer.is_staged()) absl::SleepFor(kStepPause);
      status = database_->Write([&](SqlConnection& connection) {
        return write(connection, &attempt);
      });
    } while (status.ok() && !attempt.is_done);
    if (attempt.writer.is_staged()) {
      FreeStaged(key, attempt.set_id, attempt.staged_id);
    }
  } while (status == overtaken);
  if (!status.ok()) {
    // A contribution that was refused leaves no set behind that nobody is
    // charged for.
    UnassignEmptyRowSet(*database_, key.tensor.model, key.tensor.revision,
                        RowKind::kStatistics);
    return status;
  }
  return outcome;
}

void SqlStatisticsStore::FreeStaged(const ContributionKey& key, int64_t set_id,
                                    int64_t staged_id) {
  const SourceVersion version{key.tensor, key.source,
                              static_cast<int64_t>(key.sequence), set_id};
  absl::StatusOr<int> count = 0;
  const auto free = [&](SqlConnection& connection) -> absl::Status {
    absl::Status status = connection.LockSource(key.tensor, key.source);
    if (status.ok()) status = UnmarkPieces(&connection, version);
    if (!status.ok()) return status;
    count = FreeStatisticsPieces(&connection, set_id, key.tensor.tensor,
                                 key.source, absl::InfinitePast());
    return count.ok() ? LoseStagedContent(connection, staged_id).status()
                      : count.status();
  };
  // If not now, then StoreKeeper does.
  do {
    absl::SleepFor(kStepPause);
  } while (database_->Write(free).ok() && *count == kPiecesPerTransaction);
}

absl::StatusOr<uint64_t> SqlStatisticsStore::ForEachSource(
    const EncodingKey& key, absl::string_view only,
    absl::FunctionRef<void()> begin,
    absl::FunctionRef<absl::StatusOr<absl::optional<SourceRow>>(
        SqlConnection&, const std::string& source)>
        read) {
  // With their incarnations.
  using Sources = std::vector<std::pair<std::string, int64_t>>;
  const auto list = [&](Sources* sources) {
    return database_->Read([&](SqlConnection& connection) -> absl::Status {
      const std::unique_ptr<SqlStatement> row =
          connection.Prepare(kSelectSources);
      row->BindKey(key);
      sources->clear();
      while (true) {
        absl::StatusOr<bool> found = row->Step("cannot read statistics");
        if (!found.ok()) return found.status();
        if (!*found) return absl::OkStatus();
        sources->emplace_back(row->Bytes(0), row->Int(1));
      }
    });
  };
  absl::StatusOr<absl::optional<SourceRow>> row;
  SourcesFingerprint fingerprint;
  const auto read_one = [&](const std::string& source) -> absl::Status {
    absl::Status status = database_->Read([&](SqlConnection& connection) {
      row = read(connection, source);
      return row.status();
    });
    if (status.ok() && row->has_value()) fingerprint.Add((*row)->checksum);
    return status;
  };
  const auto none = [&] {
    return database_->Read([&](SqlConnection& connection) {
      return NoSuchStatistics(connection, key);
    });
  };
  if (!only.empty()) {
    begin();
    if (absl::Status s = read_one(std::string(only)); !s.ok()) return s;
    if (!row->has_value()) return none();
    return fingerprint.Get();
  }
  // Nobody but who deletes has it read again.
  while (true) {
    Sources sources, there;
    if (absl::Status s = list(&sources); !s.ok()) return s;
    if (sources.empty()) return none();
    begin();
    fingerprint = {};
    bool is_whole = true;
    for (const auto& [source, listed] : sources) {
      if (absl::Status s = read_one(source); !s.ok()) return s;
      if (!row->has_value()) continue;
      // It was deleted, perhaps with those that were read, and came back.
      is_whole = (*row)->incarnation == listed;
      if (!is_whole) break;
      there.emplace_back(source, listed);
    }
    if (is_whole && there.size() < sources.size()) {
      // Some were deleted: by themselves, or with those that were read.
      if (absl::Status s = list(&sources); !s.ok()) return s;
      is_whole = !there.empty() && absl::c_all_of(there, [&](const auto& read) {
        return absl::c_linear_search(sources, read);
      });
    }
    if (is_whole) return fingerprint.Get();
  }
}

absl::StatusOr<uint64_t> SqlStatisticsStore::Fingerprint(
    const EncodingKey& key) {
  SourcesFingerprint fingerprint;
  const auto read = [&](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(kSelectFingerprint);
    row->BindKey(key);
    for (bool is_first = true;; is_first = false) {
      absl::StatusOr<bool> found = row->Step("cannot read statistics");
      if (!found.ok()) return found.status();
      if (!*found && is_first) break;
      if (!*found) return absl::OkStatus();
      fingerprint.Add(static_cast<uint64_t>(row->Int(0)));
    }
    return NoSuchStatistics(connection, key);
  };
  if (absl::Status s = database_->Read(read); !s.ok()) return s;
  return fingerprint.Get();
}

absl::StatusOr<StoredStatistics> SqlStatisticsStore::ReadStatistics(
    const EncodingKey& key, bool with_moments,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  return ReadSources(key, "", with_moments, proceed);
}

absl::StatusOr<StoredStatistics> SqlStatisticsStore::ReadSources(
    const EncodingKey& key, absl::string_view only, bool with_moments,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  // A bin takes about four times as much as its varints: in the state of the
  // source, and in the merged one, which may not have had it.
  constexpr int64_t kMemoryPerStoredByte = 8;
  StoredStatistics stored;
  const auto read = [&](SqlConnection& connection, const std::string& source)
      -> absl::StatusOr<absl::optional<SourceRow>> {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kSelectAll);
    row->BindKey(key);
    row->BindText(4, source);
    absl::optional<SourceReader> reader;
    int64_t memory_bytes = 0;
    while (true) {
      absl::StatusOr<bool> found = row->Step("cannot read statistics");
      if (!found.ok()) return found.status();
      if (!*found) break;
      if (!reader.has_value()) {
        absl::StatusOr<StatisticsRowHead> head = ReadHead(key, *row);
        if (!head.ok()) return head.status();
        memory_bytes = stored.state.statistics.memory_bytes() +
                       kMemoryPerStoredByte * (head->size_bytes - row->Int(15));
        if (absl::Status s = proceed(memory_bytes); !s.ok()) return s;
        stored.gram_size_bytes += row->Int(15);
        reader.emplace(key, *std::move(head));
      }
      if (absl::Status s = reader->Add(*row); !s.ok()) return s;
      const SourceVersion version{key, source, reader->head().sequence};
      const auto checksum = static_cast<uint64_t>(row->Int(13));
      absl::Status status;
      if (row->Int(12) == kFirstGramPiece) {
        status =
            AddGramHeadPiece(version, checksum, row->Bytes(14), &stored.gram);
      } else if (row->Int(12) == kMomentsPiece && with_moments) {
        status = AddMomentsPiece(
            version, checksum, row->Bytes(14),
            [&](int64_t more_bytes) {
              return proceed(memory_bytes + more_bytes);
            },
            &stored.moments);
      }
      if (!status.ok()) return status;
    }
    if (!reader.has_value()) return absl::nullopt;
    absl::Status status = AddSource(&*reader, &stored);
    if (!status.ok()) return status;
    return SourceRow{reader->head().incarnation, reader->head().checksum};
  };
  const auto begin = [&] { stored = {}; };
  const absl::StatusOr<uint64_t> fingerprint =
      ForEachSource(key, only, begin, read);
  if (!fingerprint.ok()) return fingerprint.status();
  stored.fingerprint = *fingerprint;
  return stored;
}

absl::StatusOr<absl::optional<core::GramState>> SqlStatisticsStore::ReadGram(
    const EncodingKey& key,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  return ReadGrams(key, "", proceed);
}

absl::StatusOr<absl::optional<core::GramState>> SqlStatisticsStore::ReadGrams(
    const EncodingKey& key, absl::string_view only,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  // The sums, and the state that is made of them.
  constexpr int64_t kCopies = 2;
  absl::optional<core::GramState::Parts> whole;
  const auto read = [&](SqlConnection& connection, const std::string& source)
      -> absl::StatusOr<absl::optional<SourceRow>> {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kSelectGram);
    row->BindKey(key);
    row->BindText(4, source);
    absl::optional<GramAssembler> assembler;
    absl::optional<SourceRow> source_row;
    while (true) {
      absl::StatusOr<bool> found = row->Step("cannot read a Gram matrix");
      if (!found.ok()) return found.status();
      if (!*found) break;
      const bool is_first = !source_row.has_value();
      const int64_t piece = row->Int(10);
      if (is_first) {
        absl::StatusOr<StatisticsRowHead> head = ReadHead(key, *row);
        if (!head.ok()) return head.status();
        source_row = SourceRow{head->incarnation, head->checksum};
        if (piece < 0) {
          // It had more, such as a Gram matrix.
          if (head->size_bytes != row->Int(13)) {
            return SourceCorruptError(key, source, "lack pieces");
          }
          return source_row;
        }
        assembler.emplace(SourceVersion{key, source, head->sequence});
      }
      absl::StatusOr<absl::Span<const int64_t>> sums = assembler->Add(
          piece, static_cast<uint64_t>(row->Int(11)), row->Bytes(12));
      if (!sums.ok()) return sums.status();
      if (is_first) {
        absl::Status status =
            AddStoredGramHead(key, source, assembler->head(), &whole);
        if (!status.ok()) return status;
        const int64_t count = whole->sum_count();
        status =
            proceed(kCopies * count * static_cast<int64_t>(sizeof(int64_t)));
        if (!status.ok()) return status;
        whole->code_sums.resize(static_cast<size_t>(count));
        continue;
      }
      const absl::Status added = core::AddGramSums(
          *sums, absl::MakeSpan(whole->code_sums)
                     .subspan(static_cast<size_t>(assembler->first_sum()),
                              sums->size()));
      if (!added.ok()) return core::GramInvalidError(core::ErrorText(added));
    }
    if (assembler.has_value()) {
      if (absl::Status s = assembler->Finish(); !s.ok()) return s;
    }
    return source_row;
  };
  const auto begin = [&] { whole.reset(); };
  absl::Status status = ForEachSource(key, only, begin, read).status();
  if (!status.ok()) return status;
  if (!whole.has_value()) return absl::optional<core::GramState>();
  absl::StatusOr<core::GramState> gram =
      core::GramState::FromParts(*std::move(whole));
  if (!gram.ok()) {
    return core::StoreCorruptError(absl::StrCat(
        "the Gram matrix of tensor \"", ShownName(key.tensor), "\" of model \"",
        ShownName(key.model), "\" is invalid: ", gram.status().message(),
        "; delete its statistics and contribute again"));
  }
  return absl::optional<core::GramState>(*std::move(gram));
}

absl::StatusOr<absl::optional<core::GramState::Parts>>
SqlStatisticsStore::FindGram(const EncodingKey& key) {
  absl::optional<core::GramState::Parts> found;
  const auto read = [&](SqlConnection& connection) -> absl::Status {
    absl::StatusOr<absl::optional<core::GramState::Parts>> head =
        ReadGramHeads(connection, key, "");
    if (!head.ok()) return head.status();
    found = *std::move(head);
    return absl::OkStatus();
  };
  if (absl::Status s = database_->Read(read); !s.ok()) return s;
  return found;
}

absl::StatusOr<StoredMoments> SqlStatisticsStore::ReadMoments(
    const EncodingKey& key,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  return ReadMomentsOf(key, "", proceed);
}

absl::StatusOr<StoredMoments> SqlStatisticsStore::ReadMomentsOf(
    const EncodingKey& key, absl::string_view only,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  StoredMoments stored;
  const auto read = [&](SqlConnection& connection, const std::string& source)
      -> absl::StatusOr<absl::optional<SourceRow>> {
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(kSelectMoments);
    row->BindKey(key);
    row->BindText(4, source);
    absl::StatusOr<bool> found = row->Step("cannot read moments");
    if (!found.ok()) return found.status();
    if (!*found) return absl::nullopt;
    const absl::StatusOr<StatisticsRowHead> head = ReadHead(key, *row);
    if (!head.ok()) return head.status();
    if (row->Int(10) < 0) return SourceRow{head->incarnation, head->checksum};
    absl::Status status = AddMomentsPiece(
        {key, source, head->sequence}, static_cast<uint64_t>(row->Int(11)),
        row->Bytes(12), proceed, &stored.moments);
    if (!status.ok()) return status;
    return SourceRow{head->incarnation, head->checksum};
  };
  const auto begin = [&] { stored = {}; };
  const absl::StatusOr<uint64_t> fingerprint =
      ForEachSource(key, only, begin, read);
  if (!fingerprint.ok()) return fingerprint.status();
  stored.fingerprint = *fingerprint;
  return stored;
}

absl::StatusOr<std::vector<StatisticsListEntry>>
SqlStatisticsStore::ListStatistics(absl::string_view model,
                                   absl::string_view revision,
                                   absl::string_view after, int limit) {
  std::vector<StatisticsListEntry> entries;
  if (limit <= 0) return entries;
  const auto bind = [&](SqlStatement* row, absl::string_view from, int count) {
    row->BindText(1, model);
    row->BindText(2, revision);
    row->BindText(3, from);
    row->BindInt(4, count);
  };
  EncodingKey key{std::string(model), std::string(revision), ""};
  // Adds the entries of at most `count` tensors after `from`.
  const auto list = [&](SqlConnection& connection, const std::string& from,
                        int count) -> absl::Status {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kList);
    bind(row.get(), from, count);
    while (true) {
      absl::StatusOr<bool> found = row->Step("cannot list statistics");
      if (!found.ok()) return found.status();
      if (!*found) return absl::OkStatus();
      if (entries.empty() || entries.back().tensor != row->Bytes(10)) {
        key.tensor = std::string(row->Bytes(10));
        entries.emplace_back().tensor = key.tensor;
      }
      StatisticsListEntry& entry = entries.back();
      absl::StatusOr<StatisticsRowHead> head = ReadHead(key, *row);
      if (!head.ok()) {
        entry.error = head.status();
        continue;
      }
      ++entry.source_count;
      entry.size_bytes += head->size_bytes;
      entry.gram_size_bytes += row->Int(11);
      const absl::Time time = absl::FromUnixMicros(head->update_time_us);
      entry.update_time =
          entry.source_count == 1 ? time : std::max(entry.update_time, time);
    }
  };
  // A damaged page is no reason to keep the other tensors back.
  const auto list_one_by_one = [&](SqlConnection& connection) -> absl::Status {
    std::vector<std::string> names = {std::string(after)};
    {
      const std::unique_ptr<SqlStatement> row =
          connection.Prepare(kListStatisticsNames);
      bind(row.get(), after, limit);
      while (true) {
        absl::StatusOr<bool> found = row->Step("cannot list statistics");
        if (!found.ok()) return found.status();
        if (!*found) break;
        names.emplace_back(row->Bytes(0));
      }
    }
    entries.clear();
    for (size_t i = 1; i < names.size(); ++i) {
      absl::Status status = list(connection, names[i - 1], 1);
      if (status.ok()) continue;
      if (!absl::IsDataLoss(status)) return status;
      if (entries.empty() || entries.back().tensor != names[i]) {
        entries.emplace_back().tensor = names[i];
      }
      entries.back().error = core::StoreCorruptError(absl::StrCat(
          "statistics for tensor \"", ShownName(names[i]), "\" of model \"",
          ShownName(model), "\", revision \"", ShownName(revision),
          "\" stand on a damaged page of the database; restore the store from "
          "its backup"));
    }
    return absl::OkStatus();
  };
  absl::Status status = database_->Read([&](SqlConnection& connection) {
    return list(connection, std::string(after), limit);
  });
  if (absl::IsDataLoss(status)) status = database_->Read(list_one_by_one);
  if (!status.ok()) return status;
  status = database_->Read([&](SqlConnection& connection) {
    return FindRowSet(connection, model, revision, RowKind::kStatistics)
        .status();
  });
  if (status.ok()) return entries;
  // It is not known which ones there are; those of another set tell that they
  // are not of this one.
  if (!absl::IsDataLoss(status) || entries.empty()) return status;
  for (StatisticsListEntry& entry : entries) entry.error.Update(status);
  return entries;
}

absl::StatusOr<int64_t> SqlStatisticsStore::Check(
    absl::FunctionRef<void(const absl::Status&)> damaged) {
  int64_t count = 0;
  const auto check = [&](const ContributionKey& key) -> absl::Status {
    ++count;
    const auto proceed = [](int64_t /*memory*/) { return absl::OkStatus(); };
    absl::Status status =
        ReadSources(key.tensor, key.source, /*with_moments=*/true, proceed)
            .status();
    if (status.ok()) {
      status = ReadGrams(key.tensor, key.source, proceed).status();
    }
    // It was deleted in between.
    if (status.ok() || absl::IsNotFound(status)) return absl::OkStatus();
    if (!absl::IsDataLoss(status)) return status;
    damaged(status);
    return absl::OkStatus();
  };
  const auto check_set = [&](const ListedRowSet& set) -> absl::Status {
    std::vector<ContributionKey> page;
    do {
      const ContributionKey last =
          page.empty() ? ContributionKey() : page.back();
      page.clear();
      const auto list = [&](SqlConnection& connection) -> absl::Status {
        const std::unique_ptr<SqlStatement> row =
            connection.Prepare(kListStatisticsKeys);
        row->BindInt(1, set.set_id);
        row->BindText(2, last.tensor.tensor);
        row->BindText(3, last.source);
        while (true) {
          absl::StatusOr<bool> found = row->Step("cannot list statistics");
          if (!found.ok()) return found.status();
          if (!*found) return absl::OkStatus();
          ContributionKey& key = page.emplace_back();
          key.tensor = {set.model, set.revision, std::string(row->Bytes(0))};
          key.source = std::string(row->Bytes(1));
        }
      };
      if (absl::Status s = database_->Read(list); !s.ok()) return s;
      for (const ContributionKey& key : page) {
        if (absl::Status s = check(key); !s.ok()) return s;
      }
    } while (!page.empty());
    return absl::OkStatus();
  };
  absl::Status status =
      CheckRowSets(*database_, RowKind::kStatistics, damaged, check_set);
  if (!status.ok()) return status;
  const auto list = [&](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(kListLostStatisticsPieces);
    while (true) {
      absl::StatusOr<bool> found = row->Step("cannot list statistics");
      if (!found.ok()) return found.status();
      if (!*found) return absl::OkStatus();
      damaged(core::StoreCorruptError(
          absl::StrCat("statistics of source \"", ShownName(row->Bytes(2)),
                       "\" for tensor \"", ShownName(row->Bytes(1)), "\" have ",
                       row->Int(3), " pieces without a row")));
    }
  };
  if (absl::Status s = database_->Read(list); !s.ok()) return s;
  return count;
}

absl::Status SqlStatisticsStore::DeleteStatisticsUpTo(const EncodingKey& key,
                                                      absl::Time update_time) {
  return Delete(key, "", [&](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kSelectNewer);
    row->BindKey(key);
    row->BindInt(4, absl::ToUnixMicros(update_time));
    absl::StatusOr<bool> found = row->Step("cannot delete statistics");
    if (!found.ok()) return found.status();
    return *found ? NoSuchStatistics(connection, key) : absl::OkStatus();
  });
}

absl::Status SqlStatisticsStore::DeleteStatistics(const EncodingKey& key,
                                                  absl::string_view source) {
  return Delete(key, source,
                [](SqlConnection& /*connection*/) { return absl::OkStatus(); });
}

absl::Status SqlStatisticsStore::Delete(
    const EncodingKey& key, absl::string_view source,
    absl::FunctionRef<absl::Status(SqlConnection&)> check) {
  const auto remove = [&](SqlConnection& connection) -> absl::Status {
    if (absl::Status s = connection.LockTensor(key); !s.ok()) return s;
    const absl::StatusOr<absl::optional<RowSet>> set =
        FindRowSet(connection, key.model, key.revision, RowKind::kStatistics);
    if (!set.ok()) return set.status();
    if (absl::Status s = check(connection); !s.ok()) return s;
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(kDeleteStatisticsRow);
    row->BindKey(key);
    row->BindText(4, source);
    // All rows are deleted before the first one is answered.
    absl::StatusOr<bool> found = row->Step("cannot delete statistics");
    if (!found.ok()) return found.status();
    return *found ? absl::OkStatus() : NoSuchStatistics(connection, key);
  };
  if (absl::Status s = database_->WriteToFree(remove); !s.ok()) return s;
  UnassignEmptyRowSet(*database_, key.model, key.revision,
                      RowKind::kStatistics);
  return absl::OkStatus();
}

}  // namespace quantd::server
