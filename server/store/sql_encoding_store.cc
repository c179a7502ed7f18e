#include "server/store/sql_encoding_store.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/types/encoding.h"
#include "core/types/encoding_memory.h"
#include "core/types/scale_bytes.h"
#include "google/protobuf/unknown_field_set.h"
#include "quantd/v1/encoding.pb.h"
#include "server/store/encoding_pieces.h"
#include "server/store/row_checksum.h"
#include "server/store/row_sets.h"
#include "server/store/sql_usage.h"
#include "server/store/staged_contents.h"
#include "server/wire/encoding_proto.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

constexpr absl::string_view kAbsent = "absent";
// Larger encodings have their scales in pieces.
constexpr int64_t kMostInlineBytes = int64_t{16} << 10;

// A row for each set of the revision, whatever that has of the tensor.
constexpr char kSelect[] =
    "SELECT encodings.generation, encodings.update_time_us, format, "
    "scale_count, charged_bytes, encodings.checksum, head_checksum, body, "
    "content_id, content_bytes, COALESCE(encodings.set_id, 0), sets.set_id, "
    "sets.generation, sets.update_time_us, sets.checksum, sets.kind "
    "FROM (SELECT set_id, generation, update_time_us, checksum, kind "
    "FROM row_sets "
    "WHERE model = $1 AND revision = $2 AND kind IN (0, 2)) AS sets "
    "LEFT JOIN encodings "
    "ON encodings.set_id = sets.set_id AND encodings.tensor = $3";
// Reads what is there before a put or a delete.
constexpr char kSelectPresent[] =
    "SELECT generation, checksum, update_time_us, principal, charged_bytes, "
    "set_id FROM encodings "
    "WHERE set_id IN " QUANTD_ENCODING_SETS " AND tensor = $3";
constexpr char kUpsertEncoding[] =
    "INSERT INTO encodings (set_id, tensor, generation, update_time_us, "
    "format, scale_count, checksum, head_checksum, principal, slot, "
    "charged_bytes, content_id, content_bytes, body) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14) "
    "ON CONFLICT (set_id, tensor) DO UPDATE SET "
    "generation = excluded.generation, "
    "update_time_us = excluded.update_time_us, format = excluded.format, "
    "scale_count = excluded.scale_count, checksum = excluded.checksum, "
    "head_checksum = excluded.head_checksum, principal = excluded.principal, "
    "charged_bytes = excluded.charged_bytes, "
    "content_id = excluded.content_id, "
    "content_bytes = excluded.content_bytes, body = excluded.body";
constexpr char kDeleteEncodingRow[] =
    "DELETE FROM encodings "
    "WHERE set_id IN " QUANTD_ENCODING_SETS " AND tensor = $3";
// A page of each set gives one of both.
#define QUANTD_PAGE_OF_BOTH(page) \
  "SELECT * FROM (" page(QUANTD_ENCODING_SET) ") AS page UNION ALL "    \
  "SELECT * FROM (" page(QUANTD_OTHER_ENCODING_SET) ") AS other_page "  \
  "ORDER BY tensor LIMIT $4"
#define QUANTD_PAGE(set)                                                     \
  "SELECT tensor, encodings.generation, encodings.update_time_us AS time, "  \
  "format, scale_count, charged_bytes, encodings.checksum AS row_checksum, " \
  "head_checksum, sets.set_id, sets.generation AS set_generation, "          \
  "sets.update_time_us AS set_time, sets.checksum AS set_checksum, "         \
  "sets.kind "                                                               \
  "FROM encodings JOIN row_sets AS sets ON sets.set_id = encodings.set_id "  \
  "WHERE encodings.set_id = " set " AND tensor > $3 ORDER BY tensor LIMIT $4"
constexpr char kListEncodings[] = QUANTD_PAGE_OF_BOTH(QUANTD_PAGE);
#undef QUANTD_PAGE
// From the index of the key, whatever is damaged beside that.
#define QUANTD_PAGE(set)                             \
  "SELECT tensor FROM encodings WHERE set_id = " set \
  " AND tensor > $3 ORDER BY tensor LIMIT $4"
constexpr char kListEncodingNames[] = QUANTD_PAGE_OF_BOTH(QUANTD_PAGE);
#undef QUANTD_PAGE
#undef QUANTD_PAGE_OF_BOTH
// Lists like kListEncodingNames, of one set.
constexpr char kListNamesOfSet[] =
    "SELECT tensor FROM encodings WHERE set_id = $1 AND tensor > $2 "
    "ORDER BY tensor LIMIT $3";

// Pieces that no encoding has, and that nobody is to free.
constexpr char kListLostEncodingPieces[] =
    "SELECT content_id, COUNT(*) FROM encoding_pieces "
    "WHERE content_id NOT IN (SELECT content_id FROM encodings) "
    "AND content_id NOT IN (SELECT content_id FROM staged_contents) "
    "AND content_id NOT IN (SELECT content_id FROM lost_contents) "
    "GROUP BY content_id ORDER BY content_id";

// Dividing sets. A scalar subquery makes PostgreSQL look up each tensor in the
// index. A join or EXISTS may compare every row with every other one as long as
// the statistics of the database do not know the sets: minutes for 30,000.
constexpr char kCountBoth[] =
    "SELECT COUNT(*) FROM encodings WHERE set_id = $1 AND ("
    "SELECT 1 FROM encodings AS others WHERE others.set_id = $2 "
    "AND others.tensor = encodings.tensor) IS NOT NULL";
#define QUANTD_LIST_HEADS(is_in_others)                              \
  "SELECT tensor, generation, update_time_us, format, scale_count, " \
  "charged_bytes, checksum, head_checksum, principal, slot "         \
  "FROM encodings WHERE set_id = $1 AND tensor > $2 AND ("           \
  "SELECT 1 FROM encodings AS others WHERE others.set_id = $3 "      \
  "AND others.tensor = encodings.tensor) " is_in_others              \
  " ORDER BY tensor LIMIT $4"
constexpr char kListHeadsInOthers[] = QUANTD_LIST_HEADS("IS NOT NULL");
constexpr char kListHeadsNotInOthers[] = QUANTD_LIST_HEADS("IS NULL");
#undef QUANTD_LIST_HEADS
constexpr char kMoveRow[] =
    "UPDATE encodings SET set_id = $1, head_checksum = $2 "
    "WHERE set_id = $3 AND tensor = $4";
constexpr char kRevisionsOf[] =
    "SELECT DISTINCT revision FROM row_sets WHERE model = $1 "
    "ORDER BY revision";

// The columns of a row that lists read.
struct EncodingRowHead {
  int64_t generation = 0;
  int64_t update_time_us = 0;
  int64_t format = 0;
  int64_t scale_count = 0;
  // Bytes of names and contents.
  int64_t charged_bytes = 0;
  // Checksum of the content.
  uint64_t checksum = 0;
};

// Content of an encoding, as it is stored.
struct Content {
  // v1::Encoding: whole, or with scales_in_chunks. With its provenance, as a
  // field that the message does not have.
  std::string body;
  // Id of the pieces with scales; 0 where the body is whole.
  int64_t id = 0;
  int64_t bytes = 0;
};

// From the columns of a row that begin with `generation`.
EncodingRowHead HeadOf(const SqlStatement& row, int generation) {
  return {
      row.Int(generation),     row.Int(generation + 1),
      row.Int(generation + 2), row.Int(generation + 3),
      row.Int(generation + 4), static_cast<uint64_t>(row.Int(generation + 5))};
}

// Checksum of the content of that generation, wherever the row is; pieces have
// their own.
uint64_t ContentChecksum(int64_t generation, const Content& content) {
  const int64_t numbers[] = {generation, content.id, content.bytes};
  return RowChecksum::Of(
      {{reinterpret_cast<const char*>(numbers), sizeof(numbers)},
       content.body});
}

// Checksum of a row without its content, so that lists need not read that.
uint64_t HeadChecksum(int64_t set_id, absl::string_view tensor,
                      const EncodingRowHead& head) {
  const int64_t numbers[] = {set_id,
                             head.generation,
                             head.update_time_us,
                             head.format,
                             head.scale_count,
                             head.charged_bytes,
                             static_cast<int64_t>(head.checksum)};
  return RowChecksum::Of(
      {tensor, {reinterpret_cast<const char*>(numbers), sizeof(numbers)}});
}

std::string MakeEtag(int64_t generation, uint64_t checksum) {
  return absl::StrCat(absl::Hex(generation), "-",
                      absl::Hex(checksum, absl::kZeroPad16));
}

absl::Status NoSuchEncoding(const EncodingKey& key) {
  return core::EncodingNotFoundError(key.model, key.revision, key.tensor);
}

std::string ShownKey(const EncodingKey& key) {
  return absl::StrCat("the encoding for tensor \"", ShownName(key.tensor),
                      "\" of model \"", ShownName(key.model), "\", revision \"",
                      ShownName(key.revision), "\" ");
}

absl::Status CorruptEncoding(const EncodingKey& key, absl::string_view what) {
  return core::StoreCorruptError(
      absl::StrCat(ShownKey(key), what, "; put it again or delete it"));
}

// The etag in a row of kSelectPresent.
std::string EtagOf(const SqlStatement& row) {
  return MakeEtag(row.Int(0), static_cast<uint64_t>(row.Int(1)));
}

// Puts a row, whose pieces are there, and fills in the rest of its head.
// Errors: those of EncodingStore::Put.
absl::Status PutRow(SqlConnection& connection, const EncodingKey& key,
                    const Content& content, const Precondition& precondition,
                    EncodingRowHead* head) {
  constexpr absl::string_view kWhat = "cannot put an encoding";
  if (absl::Status s = connection.LockTensor(key); !s.ok()) return s;
  const WriteAccount& account = precondition.account;
  ReplacedRow replaced;
  // Set of the row: a row that is replaced stays in its set.
  int64_t set_id = 0;
  {
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(kSelectPresent);
    row->BindKey(key);
    absl::StatusOr<bool> found = row->Step(kWhat);
    if (!found.ok()) return found.status();
    const std::string etag = *found ? EtagOf(*row) : std::string(kAbsent);
    if (!precondition.if_match.empty() && etag != precondition.if_match) {
      return core::EtagMismatchError(precondition.if_match, etag);
    }
    if (*found) {
      replaced = {true, std::string(row->Bytes(3)), row->Int(4)};
      set_id = row->Int(5);
    }
  }
  const absl::StatusOr<RowSet> set =
      FindOrAddRowSet(connection, key.model, key.revision, RowKind::kEncodings);
  if (!set.ok()) return set.status();
  if (!replaced.exists) set_id = set->id;
  absl::StatusOr<int64_t> generation = connection.NextGeneration();
  if (!generation.ok()) return generation.status();
  head->generation = *generation;
  head->update_time_us = absl::ToUnixMicros(absl::Now());
  head->charged_bytes = NameBytes(key) +
                        static_cast<int64_t>(content.body.size()) +
                        content.bytes;
  head->checksum = ContentChecksum(head->generation, content);
  {
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(kUpsertEncoding);
    row->BindInt(1, set_id);
    row->BindText(2, key.tensor);
    row->BindInt(3, head->generation);
    row->BindInt(4, head->update_time_us);
    row->BindInt(5, head->format);
    row->BindInt(6, head->scale_count);
    row->BindInt(7, static_cast<int64_t>(head->checksum));
    row->BindInt(8,
                 static_cast<int64_t>(HeadChecksum(set_id, key.tensor, *head)));
    row->BindText(9, account.principal);
    row->BindInt(10, SlotOf(key.tensor));
    row->BindInt(11, head->charged_bytes);
    row->BindInt(12, content.id);
    row->BindInt(13, content.bytes);
    row->BindBytes(14, content.body);
    if (absl::Status s = row->Step(kWhat).status(); !s.ok()) return s;
  }
  absl::Status status =
      CheckQuotas(connection, account, replaced, head->charged_bytes);
  return status.ok() ? connection.Announce() : status;
}

// Field number of the provenance in the message of a body; proto/ keeps it
// free.
constexpr int kProvenanceField = 1000;

std::string BodyOf(v1::Encoding message, const std::string& provenance) {
  if (!provenance.empty()) {
    *v1::Encoding::GetReflection()
         ->MutableUnknownFields(&message)
         ->AddLengthDelimited(kProvenanceField) = provenance;
  }
  return message.SerializeAsString();
}

// Empty where the body has none.
std::string ProvenanceOf(const v1::Encoding& message) {
  const google::protobuf::UnknownFieldSet& fields =
      v1::Encoding::GetReflection()->GetUnknownFields(message);
  for (int i = 0; i < fields.field_count(); ++i) {
    const google::protobuf::UnknownField& field = fields.field(i);
    if (field.number() == kProvenanceField &&
        field.type() == google::protobuf::UnknownField::TYPE_LENGTH_DELIMITED) {
      return field.length_delimited();
    }
  }
  return "";
}

// `set`  what the row is in; an empty one where it was written just now.
StoredEncoding Stored(const EncodingRowHead& head, const RowSet& set,
                      std::string provenance) {
  StoredEncoding stored;
  stored.provenance = std::move(provenance);
  stored.etag = MakeEtag(head.generation, head.checksum);
  stored.generation = std::max(head.generation, set.generation);
  stored.update_time =
      absl::FromUnixMicros(std::max(head.update_time_us, set.update_time_us));
  return stored;
}

// A row as it was read and verified.
struct ReadRow {
  RowSet set;
  EncodingRowHead head;
  Content content;
  // Message of the body.
  v1::Encoding message;
};

// Errors: ENCODING_NOT_FOUND, STORE_CORRUPT.
absl::Status SelectRow(SqlConnection& connection, const EncodingKey& key,
                       ReadRow* read) {
  const std::unique_ptr<SqlStatement> select = connection.Prepare(kSelect);
  select->BindKey(key);
  do {
    const absl::StatusOr<bool> found = select->Step("cannot read an encoding");
    if (absl::IsDataLoss(found.status())) {
      return core::StoreCorruptError(
          absl::StrCat(ShownKey(key),
                       "stands on a damaged page of the database; restore the "
                       "store from its backup"));
    }
    if (!found.ok()) return found.status();
    if (!*found) return NoSuchEncoding(key);
    absl::StatusOr<RowSet> set =
        ReadRowSet(*select, 11, key.model, key.revision,
                   static_cast<RowKind>(select->Int(15)));
    if (!set.ok()) return set.status();
    read->set = *set;
  } while (select->Int(10) != read->set.id);
  read->head = HeadOf(*select, 0);
  read->content = {std::string(select->Bytes(7)), select->Int(8),
                   select->Int(9)};
  if (static_cast<uint64_t>(select->Int(6)) !=
          HeadChecksum(read->set.id, key.tensor, read->head) ||
      read->head.checksum !=
          ContentChecksum(read->head.generation, read->content)) {
    return CorruptEncoding(key, "fails its checksum");
  }
  const std::string& body = read->content.body;
  if (!read->message.ParseFromArray(body.data(),
                                    static_cast<int>(body.size()))) {
    return CorruptEncoding(key, "does not decode");
  }
  return absl::OkStatus();
}

// Reads the pieces of a row, one with each call.
class EncodingPieceReader {
 public:
  // Errors: STORE_CORRUPT.
  static absl::StatusOr<EncodingPieceReader> Create(const EncodingKey& key,
                                                    const ReadRow& row) {
    absl::StatusOr<core::Encoding> outline =
        EncodingOutlineFromProto(row.message);
    absl::Status status = outline.status();
    if (status.ok()) {
      const absl::StatusOr<int64_t> outer_count = OuterScaleCount(*outline);
      status = outer_count.status();
      if (status.ok()) {
        const bool has_zero_points = row.message.chunks_have_zero_points();
        const PieceSequence sequence(PieceLayoutOf(*outline, has_zero_points),
                                     row.head.scale_count, *outer_count);
        const int64_t memory_bytes =
            core::MemoryBytes(*outline) +
            row.head.scale_count *
                core::MemoryPerScale(outline->scale_type, has_zero_points) +
            *outer_count * static_cast<int64_t>(sizeof(float));
        return EncodingPieceReader(key, row.content.id, has_zero_points,
                                   memory_bytes, sequence, *std::move(outline));
      }
    }
    return CorruptEncoding(key, absl::StrCat("is invalid: ", status.message()));
  }

  const core::Encoding& outline() const { return outline_; }
  bool has_zero_points() const { return has_zero_points_; }
  // Bytes that the encoding takes in memory.
  int64_t memory_bytes() const { return memory_bytes_; }
  bool at_end() const { return sequence_.at_end(); }

  // False where the piece is not there.
  // Errors: STORE_CORRUPT.
  absl::StatusOr<bool> Read(SqlConnection& connection, ScalePiece* piece) {
    absl::StatusOr<bool> found = ReadPiece(
        connection, content_id_, sequence_.piece(),
        [&](absl::string_view bytes) { return sequence_.Take(bytes, piece); });
    if (absl::IsDataLoss(found.status()) &&
        core::ErrorReason(found.status()).empty()) {
      return CorruptEncoding(key_, found.status().message());
    }
    return found;
  }

 private:
  EncodingPieceReader(const EncodingKey& key, int64_t content_id,
                      bool has_zero_points, int64_t memory_bytes,
                      PieceSequence sequence, core::Encoding outline)
      : key_(key),
        content_id_(content_id),
        has_zero_points_(has_zero_points),
        memory_bytes_(memory_bytes),
        sequence_(sequence),
        outline_(std::move(outline)) {}

  EncodingKey key_;
  int64_t content_id_;
  bool has_zero_points_;
  int64_t memory_bytes_;
  PieceSequence sequence_;
  core::Encoding outline_;
};

absl::Span<const uint8_t> BytesOf(absl::string_view bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

core::Encoding OutlineOf(const core::Encoding& encoding) {
  core::Encoding outline;
  outline.format = encoding.format;
  outline.block_size = encoding.block_size;
  outline.qmin = encoding.qmin;
  outline.qmax = encoding.qmax;
  outline.exclude_zero = encoding.exclude_zero;
  outline.zero_points_are_real = encoding.zero_points_are_real;
  outline.degenerate_count = encoding.degenerate_count;
  outline.scale_type = encoding.scale_type;
  outline.outer_block_size = encoding.outer_block_size;
  outline.codebook = encoding.codebook;
  outline.no_saturation = encoding.no_saturation;
  outline.scale_shape = encoding.scale_shape;
  return outline;
}

// Scales [first, first + count) and, with the first of them, outer scales.
ScalePiece PieceOf(const core::Encoding& encoding, int64_t first,
                   int64_t count) {
  ScalePiece piece;
  piece.first = first;
  core::AppendScaleBytes(encoding, first, first + count, &piece.scale,
                         &piece.zero_point);
  if (first == 0 && !encoding.outer_scale.empty()) {
    piece.outer_scale.assign(
        reinterpret_cast<const char*>(encoding.outer_scale.data()),
        encoding.outer_scale.size() * sizeof(float));
  } else {
    piece.first_outer = static_cast<int64_t>(encoding.outer_scale.size());
  }
  return piece;
}

// An encoding that is in memory.
class WholeEncodingReader final : public EncodingReader {
 public:
  explicit WholeEncodingReader(StoredEncoding whole)
      : encoding_(whole.encoding), stored_(std::move(whole)) {
    stored_.encoding =
        std::make_shared<const core::Encoding>(OutlineOf(*encoding_));
  }

  const StoredEncoding& stored() const override { return stored_; }
  int64_t scale_count() const override {
    return static_cast<int64_t>(encoding_->scale.size());
  }
  bool has_zero_points() const override {
    return core::HasZeroPoints(*encoding_);
  }
  absl::StatusOr<absl::optional<ScalePiece>> Next() override {
    if (next_ == scale_count()) return absl::nullopt;
    const int64_t first = next_;
    const int64_t count = std::min(
        scale_count() - first,
        PieceLayoutOf(*encoding_, has_zero_points()).scales_per_piece());
    next_ += count;
    return PieceOf(*encoding_, first, count);
  }

 private:
  const std::shared_ptr<const core::Encoding> encoding_;
  StoredEncoding stored_;
  int64_t next_ = 0;
};

// An encoding in pieces.
class SqlEncodingReader final : public EncodingReader {
 public:
  SqlEncodingReader(SqlDatabase* database, EncodingKey key, const ReadRow& row,
                    EncodingPieceReader pieces)
      : database_(database),
        key_(std::move(key)),
        scale_count_(row.head.scale_count),
        stored_(Stored(row.head, row.set, ProvenanceOf(row.message))),
        pieces_(std::move(pieces)) {
    stored_.encoding =
        std::make_shared<const core::Encoding>(pieces_.outline());
  }

  const StoredEncoding& stored() const override { return stored_; }
  int64_t scale_count() const override { return scale_count_; }
  bool has_zero_points() const override { return pieces_.has_zero_points(); }

  absl::StatusOr<absl::optional<ScalePiece>> Next() override {
    if (pieces_.at_end()) return absl::nullopt;
    ScalePiece piece;
    std::string etag(kAbsent);
    const auto read = [&](SqlConnection& connection) -> absl::Status {
      absl::StatusOr<bool> found = pieces_.Read(connection, &piece);
      if (!found.ok() || *found) return found.status();
      const std::unique_ptr<SqlStatement> row =
          connection.Prepare(kSelectPresent);
      row->BindKey(key_);
      found = row->Step("cannot read an encoding");
      if (!found.ok()) return found.status();
      if (*found) etag = EtagOf(*row);
      return etag == stored_.etag ? CorruptEncoding(key_, "lacks scales")
                                  : core::EtagMismatchError(stored_.etag, etag);
    };
    if (absl::Status s = database_->Read(read); !s.ok()) return s;
    return piece;
  }

 private:
  SqlDatabase* const database_;
  const EncodingKey key_;
  const int64_t scale_count_;
  StoredEncoding stored_;
  EncodingPieceReader pieces_;
};

// Pieces as they fill; those before the last are in transactions of their own.
class SqlEncodingWriter final : public EncodingWriter {
 public:
  SqlEncodingWriter(SqlDatabase* database, EncodingKey key,
                    const core::Encoding& outline, bool has_zero_points,
                    Precondition precondition)
      : database_(database),
        key_(std::move(key)),
        layout_(PieceLayoutOf(outline, has_zero_points)),
        precondition_(std::move(precondition)) {
    head_.format = static_cast<int64_t>(outline.format);
    EncodingToProto(outline, &message_);
  }
  ~SqlEncodingWriter() override {
    if (!is_staged_) return;
    const auto lose = [&](SqlConnection& connection) -> absl::Status {
      const absl::StatusOr<bool> found =
          LoseStagedContent(connection, content_.id);
      if (!found.ok() || !*found) return found.status();
      return LoseContent(connection, content_.id, kWhat);
    };
    // If not now, then the one who looks after what is staged does.
    database_->WriteNow(lose).IgnoreError();
  }

  absl::Status Add(const ScalePiece& piece) override {
    outer_scale_ += piece.outer_scale;
    scale_ += piece.scale;
    zero_point_ += piece.zero_point;
    if (absl::Status s = WriteFull(); !s.ok()) return s;
    return absl::OkStatus();
  }

  absl::StatusOr<StoredEncoding> Finish() override {
    const Content before = content_;
    const auto put = [&](SqlConnection& connection) -> absl::Status {
      content_ = before;
      head_.scale_count =
          scale_pieces_ * layout_.scales_per_piece() +
          static_cast<int64_t>(scale_.size()) / layout_.scale_bytes;
      // Before any count, as all do.
      if (absl::Status s = connection.LockTensor(key_); !s.ok()) return s;
      absl::Status ended = is_staged_
                               ? EndStagedContent(connection, content_.id)
                               : NewContent(connection);
      if (!ended.ok()) return ended;
      if (!outer_scale_.empty()) {
        absl::Status status =
            Write(connection, -1 - outer_pieces_, outer_scale_);
        if (!status.ok()) return status;
      }
      if (!scale_.empty()) {
        absl::Status status =
            Write(connection, scale_pieces_, absl::StrCat(scale_, zero_point_));
        if (!status.ok()) return status;
      }
      message_.set_scales_in_chunks(true);
      message_.set_chunks_have_zero_points(layout_.zero_point_bytes > 0);
      content_.body = BodyOf(message_, precondition_.provenance);
      return PutRow(connection, key_, content_, precondition_, &head_);
    };
    if (absl::Status s = database_->Write(put); !s.ok()) {
      content_ = before;
      return s;
    }
    is_staged_ = false;
    return Stored(head_, {}, precondition_.provenance);
  }

 private:
  static constexpr absl::string_view kWhat = "cannot put an encoding";

  // Writes the pieces that are full and not the last.
  absl::Status WriteFull() {
    const auto scales = static_cast<size_t>(layout_.scales_per_piece());
    const size_t scale_size = scales * static_cast<size_t>(layout_.scale_bytes);
    const size_t zero_size =
        scales * static_cast<size_t>(layout_.zero_point_bytes);
    constexpr size_t kOuterSize = kEncodingPieceBytes;
    while (outer_scale_.size() > kOuterSize) {
      absl::Status status =
          WriteStaged(-1 - outer_pieces_, outer_scale_.substr(0, kOuterSize));
      if (!status.ok()) return status;
      outer_scale_.erase(0, kOuterSize);
      ++outer_pieces_;
    }
    while (scale_.size() > scale_size) {
      absl::Status status = WriteStaged(
          scale_pieces_, absl::StrCat(scale_.substr(0, scale_size),
                                      zero_point_.substr(0, zero_size)));
      if (!status.ok()) return status;
      scale_.erase(0, scale_size);
      zero_point_.erase(0, zero_size);
      ++scale_pieces_;
    }
    return absl::OkStatus();
  }

  absl::Status WriteStaged(int64_t piece, const std::string& bytes) {
    const Content before = content_;
    const auto write = [&](SqlConnection& connection) -> absl::Status {
      content_ = before;
      absl::Status status =
          is_staged_ ? absl::OkStatus() : NewContent(connection);
      if (status.ok()) status = Write(connection, piece, bytes);
      return status.ok() ? StageContent(connection, key_, precondition_.account,
                                        content_.id, /*is_new=*/!is_staged_,
                                        static_cast<int64_t>(bytes.size()))
                         : status;
    };
    absl::Status status = database_->Write(write);
    if (!status.ok()) {
      content_ = before;
      return status;
    }
    is_staged_ = true;
    return status;
  }

  absl::Status NewContent(SqlConnection& connection) {
    absl::StatusOr<int64_t> id = connection.NextGeneration();
    if (id.ok()) content_.id = *id;
    return id.status();
  }

  absl::Status Write(SqlConnection& connection, int64_t piece,
                     const std::string& bytes) {
    content_.bytes += static_cast<int64_t>(bytes.size());
    return WritePiece(connection, content_.id, piece, bytes);
  }

  SqlDatabase* const database_;
  const EncodingKey key_;
  const PieceLayout layout_;
  const Precondition precondition_;
  EncodingRowHead head_;
  v1::Encoding message_;
  Content content_;
  bool is_staged_ = false;
  // Not written yet, and how many pieces are.
  std::string scale_;
  std::string zero_point_;
  std::string outer_scale_;
  int64_t scale_pieces_ = 0;
  int64_t outer_pieces_ = 0;
};

// The sets of a revision's encodings; the id of one that it has not is 0.
using EncodingSets = std::array<RowSet, kEncodingKinds.size()>;

absl::StatusOr<EncodingSets> FindEncodingSets(SqlConnection& connection,
                                              absl::string_view model,
                                              absl::string_view revision) {
  EncodingSets sets;
  for (size_t i = 0; i < sets.size(); ++i) {
    const absl::StatusOr<absl::optional<RowSet>> set =
        FindRowSet(connection, model, revision, kEncodingKinds[i]);
    if (!set.ok()) return set.status();
    sets[i] = set->value_or(RowSet());
  }
  return sets;
}

absl::StatusOr<bool> HasEncodings(SqlConnection& connection,
                                  const EncodingSets& sets) {
  for (const RowSet& set : sets) {
    const absl::StatusOr<bool> has =
        HasRows(connection, set.id, RowKind::kEncodings);
    if (!has.ok() || *has) return has;
  }
  return false;
}

// Makes the encodings of one revision those of another. If many rows of the
// target stay and many are replaced, transactions before the last one divide
// them between its two sets, which nobody sees who reads. Not thread-safe.
// Errors of every call: STORE_CORRUPT, STORE_UNAVAILABLE.
class RevisionPublisher {
 public:
  // The names outlive this.
  RevisionPublisher(absl::string_view model, absl::string_view source,
                    absl::string_view target, bool keep_others)
      : model_(model),
        source_(source),
        target_(target),
        keep_others_(keep_others) {}

  // Comes first: finds out in which direction fewer rows move.
  absl::Status Plan(SqlConnection& connection) {
    if (!keep_others_) return absl::OkStatus();
    if (absl::Status s = FindSets(connection); !s.ok()) return s;
    // How many rows of each set of the target are replaced, and are not.
    std::array<int64_t, kEncodingKinds.size()> replaced = {}, others = {};
    for (size_t i = 0; i < to_.size(); ++i) {
      const absl::StatusOr<SlotUsage> usage =
          ReadSetUsage(connection, to_[i].id);
      if (!usage.ok()) return usage.status();
      for (const RowSet& set : from_) {
        const std::unique_ptr<SqlStatement> row =
            connection.Prepare(kCountBoth);
        row->BindInt(1, set.id);
        row->BindInt(2, to_[i].id);
        absl::StatusOr<bool> found = row->Step(kWhat);
        if (!found.ok()) return found.status();
        replaced[i] += row->Int(0);
      }
      others[i] = RowCount(*usage) - replaced[i];
    }
    kept_ = replaced[0] + others[1] <= others[0] + replaced[1] ? 0 : 1;
    return absl::OkStatus();
  }

  // Comes then, in a transaction each time, until is_done().
  // Errors: REVISION_NOT_FOUND.
  absl::Status Step(SqlConnection& connection) {
    std::vector<std::string> revisions = {std::string(source_),
                                          std::string(target_)};
    std::sort(revisions.begin(), revisions.end());
    absl::Status status = connection.LockRevisions(model_, revisions);
    if (status.ok()) status = FindSets(connection);
    if (!status.ok()) return status;
    const absl::StatusOr<bool> has_rows = HasEncodings(connection, from_);
    if (!has_rows.ok()) return has_rows.status();
    if (!*has_rows) {
      return core::RevisionNotFoundError(model_, source_, "encodings");
    }
    if (keep_others_ && to_[0].id != 0) {
      const absl::StatusOr<bool> is_divided = Divide(connection);
      if (!is_divided.ok() || !*is_divided) return is_divided.status();
    }
    return Publish(connection);
  }

  bool is_done() const { return is_done_; }
  const PublishedRevision& published() const { return published_; }

 private:
  static constexpr absl::string_view kWhat = "cannot publish a revision";
  // Rows that a step moves, so that others do not wait for long.
  static constexpr int64_t kRowsPerStep = 200;

  // Rows that are not where they belong.
  struct Misplaced {
    // The revision whose sets they are in, and which ones.
    absl::string_view revision;
    EncodingSets* sets;
    size_t from;
    size_t to;
    // Rows are misplaced if their tensors are in this set, or are not.
    int64_t others_id;
    bool are_in_others;
  };

  absl::Status FindSets(SqlConnection& connection) {
    absl::StatusOr<EncodingSets> sets =
        FindEncodingSets(connection, model_, source_);
    if (!sets.ok()) return sets.status();
    from_ = *sets;
    sets = FindEncodingSets(connection, model_, target_);
    if (sets.ok()) to_ = *sets;
    return sets.status();
  }

  // False where there is more to do in other transactions.
  absl::StatusOr<bool> Divide(SqlConnection& connection) {
    const size_t lost = 1 - kept_;
    const Misplaced misplaced[] = {
        // The target takes one set: its other one has the rows that stay.
        {source_, &from_, 1, 0, 0, false},
        {target_, &to_, kept_, lost, from_[0].id, true},
        {target_, &to_, lost, kept_, from_[0].id, false},
    };
    const bool from_start = next_ == 0 && after_.empty();
    for (; next_ < std::size(misplaced); ++next_) {
      absl::StatusOr<int64_t> count = kRowsPerStep;
      while (*count == kRowsPerStep) {
        count = MoveRows(connection, misplaced[next_]);
        if (!count.ok()) return count.status();
        if (*count == kRowsPerStep && !is_last_) return false;
      }
      after_.clear();
    }
    next_ = 0;
    // Rows that were written meanwhile are found from the start on, and move at
    // once.
    is_last_ = !from_start;
    return from_start;
  }

  // Moves the next rows. Answers how many.
  absl::StatusOr<int64_t> MoveRows(SqlConnection& connection,
                                   const Misplaced& misplaced) {
    const int64_t from_id = (*misplaced.sets)[misplaced.from].id;
    std::vector<std::pair<std::string, EncodingRowHead>> rows;
    SlotUsage moved;
    int64_t newest_us = 0;
    if (from_id != 0) {
      const std::unique_ptr<SqlStatement> row = connection.Prepare(
          misplaced.are_in_others ? kListHeadsInOthers : kListHeadsNotInOthers);
      row->BindInt(1, from_id);
      row->BindText(2, after_);
      row->BindInt(3, misplaced.others_id);
      row->BindInt(4, kRowsPerStep);
      while (true) {
        absl::StatusOr<bool> found = row->Step(kWhat);
        if (!found.ok()) return found.status();
        if (!*found) break;
        rows.emplace_back(row->Bytes(0), HeadOf(*row, 1));
        const auto& [tensor, head] = rows.back();
        if (static_cast<uint64_t>(row->Int(7)) !=
            HeadChecksum(from_id, tensor, head)) {
          return CorruptEncoding(
              {std::string(model_), std::string(misplaced.revision), tensor},
              "fails its checksum");
        }
        Usage& of_slot = moved[{std::string(row->Bytes(8)), row->Int(9)}];
        of_slot.rows += 1;
        of_slot.bytes += head.charged_bytes;
        newest_us = std::max(newest_us, head.update_time_us);
      }
    }
    if (rows.empty()) return 0;
    RowSet& to = (*misplaced.sets)[misplaced.to];
    if (to.id == 0) {
      absl::StatusOr<int64_t> id = connection.NextGeneration();
      if (!id.ok()) return id.status();
      to = (*misplaced.sets)[misplaced.from];
      to.id = *id;
      absl::Status status = AssignRowSet(connection, model_, misplaced.revision,
                                         kEncodingKinds[misplaced.to], to);
      if (!status.ok()) return status;
    }
    for (const auto& [tensor, head] : rows) {
      const std::unique_ptr<SqlStatement> row = connection.Prepare(kMoveRow);
      row->BindInt(1, to.id);
      row->BindInt(2, static_cast<int64_t>(HeadChecksum(to.id, tensor, head)));
      row->BindInt(3, from_id);
      row->BindText(4, tensor);
      if (absl::Status s = row->Step(kWhat).status(); !s.ok()) return s;
    }
    after_ = rows.back().first;
    SlotUsage gone;
    AddUsage(moved, -1, &gone);
    absl::Status status = ChangeSetUsage(connection, to.id, moved, newest_us);
    if (status.ok()) status = ChangeSetUsage(connection, from_id, gone, 0);
    if (!status.ok()) return status;
    return static_cast<int64_t>(rows.size());
  }

  absl::Status Publish(SqlConnection& connection) {
    published_ = {};
    // The sets that the target has afterwards, and those that nobody has.
    EncodingSets result = from_;
    std::vector<RowSet> lost = {to_[0], to_[1]};
    if (keep_others_ && to_[kept_].id != 0) {
      const absl::StatusOr<bool> has_rows =
          HasRows(connection, to_[kept_].id, RowKind::kEncodings);
      if (!has_rows.ok()) return has_rows.status();
      if (*has_rows) {
        result[1] = to_[kept_];
        lost = {to_[1 - kept_], from_[1]};
      }
    }
    SlotUsage change;
    for (const RowSet& set : lost) {
      if (set.id == 0) continue;
      const absl::StatusOr<SlotUsage> usage = ReadSetUsage(connection, set.id);
      if (!usage.ok()) return usage.status();
      AddUsage(*usage, -1, &change);
      absl::Status status = LoseRowSet(connection, set.id);
      if (!status.ok()) return status;
    }
    const absl::StatusOr<int64_t> generation = connection.NextGeneration();
    if (!generation.ok()) return generation.status();
    for (const RowKind kind : kEncodingKinds) {
      absl::Status status = UnassignRowSet(connection, model_, source_, kind);
      if (status.ok()) {
        status = UnassignRowSet(connection, model_, target_, kind);
      }
      if (!status.ok()) return status;
    }
    const int64_t now_us = absl::ToUnixMicros(absl::Now());
    for (size_t i = 0; i < result.size(); ++i) {
      if (result[i].id == 0) continue;
      const absl::StatusOr<SlotUsage> usage =
          ReadSetUsage(connection, result[i].id);
      if (!usage.ok()) return usage.status();
      published_.encoding_count += RowCount(*usage);
      absl::Status status =
          AssignRowSet(connection, model_, target_, kEncodingKinds[i],
                       {result[i].id, *generation, now_us});
      if (!status.ok()) return status;
    }
    published_.replaced_count = -RowCount(change);
    is_done_ = true;
    absl::Status status = connection.Announce();
    return status.ok() ? ChangeUsage(connection, model_, change) : status;
  }

  const absl::string_view model_;
  const absl::string_view source_;
  const absl::string_view target_;
  const bool keep_others_;
  // Index of the target's set that is to have the rows that stay.
  size_t kept_ = 0;
  EncodingSets from_;
  EncodingSets to_;
  // How far the steps have come.
  size_t next_ = 0;
  std::string after_;
  bool is_last_ = false;
  bool is_done_ = false;
  PublishedRevision published_;
};

// Takes away what a revision has of a kind, and takes that from `change`.
// Answers how many rows; 0 where there was none.
absl::StatusOr<int64_t> DeleteSet(SqlConnection& connection,
                                  absl::string_view model,
                                  absl::string_view revision, RowKind kind,
                                  SlotUsage* change, bool* has_rows) {
  absl::StatusOr<absl::optional<RowSet>> set =
      FindRowSetToDelete(connection, model, revision, kind);
  if (!set.ok()) return set.status();
  if (!set->has_value()) return 0;
  absl::StatusOr<bool> has = HasRows(connection, (*set)->id, kind);
  if (!has.ok()) return has.status();
  *has_rows = *has_rows || *has;
  absl::StatusOr<SlotUsage> usage = ReadSetUsage(connection, (*set)->id);
  if (!usage.ok()) return usage.status();
  AddUsage(*usage, -1, change);
  absl::Status status = LoseRowSet(connection, (*set)->id);
  if (status.ok()) status = UnassignRowSet(connection, model, revision, kind);
  if (!status.ok()) return status;
  return RowCount(*usage);
}

// Deletes what a revision has, takes that from `change` and adds to `deleted`.
// Answers whether it had anything.
absl::StatusOr<bool> DeleteSets(SqlConnection& connection,
                                absl::string_view model,
                                absl::string_view revision, SlotUsage* change,
                                DeletedRows* deleted) {
  bool has_rows = false;
  for (const RowKind kind : kEncodingKinds) {
    absl::StatusOr<int64_t> encodings =
        DeleteSet(connection, model, revision, kind, change, &has_rows);
    if (!encodings.ok()) return encodings.status();
    deleted->encoding_count += *encodings;
  }
  absl::StatusOr<int64_t> statistics = DeleteSet(
      connection, model, revision, RowKind::kStatistics, change, &has_rows);
  if (!statistics.ok()) return statistics.status();
  deleted->statistics_count += *statistics;
  return has_rows;
}

// Adds to what a model or a revision has.
template <typename Entry>
void AddSet(const CountedRowSet& set, Entry* entry) {
  entry->error.Update(set.error);
  (set.kind == RowKind::kStatistics ? entry->statistics_count
                                    : entry->encoding_count) += set.usage.rows;
}

}  // namespace

SqlEncodingStore::SqlEncodingStore(std::shared_ptr<SqlDatabase> database)
    : database_(std::move(database)) {}

absl::StatusOr<StoredEncoding> SqlEncodingStore::Put(
    const EncodingKey& key, std::shared_ptr<const core::Encoding> encoding,
    const Precondition& precondition) {
  const auto scale_count = static_cast<int64_t>(encoding->scale.size());
  const bool has_zero_points = core::HasZeroPoints(*encoding);
  const PieceLayout layout = PieceLayoutOf(*encoding, has_zero_points);
  if (scale_count * (layout.scale_bytes + layout.zero_point_bytes) >
      kMostInlineBytes) {
    SqlEncodingWriter writer(database_.get(), key, OutlineOf(*encoding),
                             has_zero_points, precondition);
    const int64_t step = layout.scales_per_piece();
    for (int64_t first = 0; first < scale_count; first += step) {
      absl::Status status = writer.Add(
          PieceOf(*encoding, first, std::min(step, scale_count - first)));
      if (!status.ok()) return status;
    }
    absl::StatusOr<StoredEncoding> stored = writer.Finish();
    if (stored.ok()) stored->encoding = std::move(encoding);
    return stored;
  }
  v1::Encoding message;
  EncodingToProto(*encoding, &message);
  Content content;
  content.body = BodyOf(std::move(message), precondition.provenance);
  EncodingRowHead head;
  head.format = static_cast<int64_t>(encoding->format);
  head.scale_count = scale_count;
  const auto put = [&](SqlConnection& connection) {
    return PutRow(connection, key, content, precondition, &head);
  };
  if (absl::Status s = database_->Write(put); !s.ok()) return s;
  StoredEncoding stored = Stored(head, {}, precondition.provenance);
  stored.encoding = std::move(encoding);
  return stored;
}

absl::StatusOr<std::unique_ptr<EncodingReader>> SqlEncodingStore::OpenReader(
    const EncodingKey& key) {
  ReadRow row;
  const auto read = [&](SqlConnection& connection) {
    return SelectRow(connection, key, &row);
  };
  if (absl::Status s = database_->Read(read); !s.ok()) return s;
  if (row.message.scales_in_chunks()) {
    absl::StatusOr<EncodingPieceReader> pieces =
        EncodingPieceReader::Create(key, row);
    if (!pieces.ok()) return pieces.status();
    return std::make_unique<SqlEncodingReader>(database_.get(), key, row,
                                               *std::move(pieces));
  }
  absl::StatusOr<core::Encoding> encoding = EncodingFromProto(row.message);
  if (!encoding.ok()) {
    return CorruptEncoding(
        key, absl::StrCat("is invalid: ", encoding.status().message()));
  }
  StoredEncoding stored = Stored(row.head, row.set, ProvenanceOf(row.message));
  stored.encoding =
      std::make_shared<const core::Encoding>(*std::move(encoding));
  return std::make_unique<WholeEncodingReader>(std::move(stored));
}

absl::StatusOr<std::unique_ptr<EncodingWriter>> SqlEncodingStore::OpenWriter(
    const EncodingKey& key, std::shared_ptr<const core::Encoding> outline,
    bool has_zero_points, const Precondition& precondition) {
  return std::make_unique<SqlEncodingWriter>(database_.get(), key, *outline,
                                             has_zero_points, precondition);
}

absl::StatusOr<PublishedRevision> SqlEncodingStore::PublishRevision(
    absl::string_view model, absl::string_view source, absl::string_view target,
    bool keep_others) {
  RevisionPublisher publisher(model, source, target, keep_others);
  const auto plan = [&](SqlConnection& connection) {
    return publisher.Plan(connection);
  };
  if (absl::Status s = database_->Read(plan); !s.ok()) return s;
  while (!publisher.is_done()) {
    const auto step = [&](SqlConnection& connection) {
      return publisher.Step(connection);
    };
    if (absl::Status s = database_->Write(step); !s.ok()) return s;
  }
  return publisher.published();
}

absl::StatusOr<DeletedRows> SqlEncodingStore::DeleteRevision(
    absl::string_view model, absl::string_view revision) {
  DeletedRows deleted;
  const auto remove = [&](SqlConnection& connection) -> absl::Status {
    deleted = {};
    SlotUsage change;
    absl::Status status =
        connection.LockRevisions(model, {std::string(revision)});
    if (!status.ok()) return status;
    absl::StatusOr<bool> had_rows =
        DeleteSets(connection, model, revision, &change, &deleted);
    if (!had_rows.ok()) return had_rows.status();
    if (!*had_rows) {
      return core::RevisionNotFoundError(model, revision,
                                         "encodings and no statistics");
    }
    status = connection.Announce();
    return status.ok() ? ChangeUsage(connection, model, change) : status;
  };
  if (absl::Status s = database_->WriteToFree(remove); !s.ok()) return s;
  return deleted;
}

absl::StatusOr<DeletedRows> SqlEncodingStore::DeleteModel(
    absl::string_view model) {
  const auto list = [&](SqlConnection& connection)
      -> absl::StatusOr<std::vector<std::string>> {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kRevisionsOf);
    row->BindText(1, model);
    std::vector<std::string> revisions;
    while (true) {
      absl::StatusOr<bool> found = row->Step("cannot delete a model");
      if (!found.ok()) return found.status();
      if (!*found) return revisions;
      revisions.emplace_back(row->Bytes(0));
    }
  };
  DeletedRows deleted;
  const auto remove = [&](SqlConnection& connection) -> absl::Status {
    deleted = {};
    SlotUsage change;
    absl::Status status = connection.LockModel(model);
    if (!status.ok()) return status;
    const absl::StatusOr<std::vector<std::string>> revisions = list(connection);
    if (!revisions.ok()) return revisions.status();
    bool is_there = false;
    for (const std::string& revision : *revisions) {
      absl::StatusOr<bool> had_rows =
          DeleteSets(connection, model, revision, &change, &deleted);
      if (!had_rows.ok()) return had_rows.status();
      is_there = is_there || *had_rows;
    }
    if (!is_there) return core::ModelNotFoundError(model);
    status = connection.Announce();
    return status.ok() ? ChangeUsage(connection, model, change) : status;
  };
  if (absl::Status s = database_->WriteToFree(remove); !s.ok()) return s;
  return deleted;
}

absl::Status SqlEncodingStore::Delete(const EncodingKey& key,
                                      const Precondition& precondition) {
  constexpr absl::string_view kWhat = "cannot delete an encoding";
  const auto remove = [&](SqlConnection& connection) -> absl::Status {
    if (absl::Status s = connection.LockTensor(key); !s.ok()) return s;
    const absl::StatusOr<absl::optional<RowSet>> set =
        FindRowSet(connection, key.model, key.revision, RowKind::kEncodings);
    if (!set.ok()) return set.status();
    if (!set->has_value()) return NoSuchEncoding(key);
    {
      const std::unique_ptr<SqlStatement> row =
          connection.Prepare(kSelectPresent);
      row->BindKey(key);
      absl::StatusOr<bool> found = row->Step(kWhat);
      if (!found.ok()) return found.status();
      if (!*found) return NoSuchEncoding(key);
      const std::string etag = EtagOf(*row);
      const absl::Time time =
          absl::FromUnixMicros(std::max(row->Int(2), (*set)->update_time_us));
      if ((!precondition.if_match.empty() && etag != precondition.if_match) ||
          time > precondition.not_updated_after) {
        return core::EtagMismatchError(precondition.if_match, etag);
      }
    }
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(kDeleteEncodingRow);
    row->BindKey(key);
    absl::Status status = row->Step(kWhat).status();
    return status.ok() ? connection.Announce() : status;
  };
  if (absl::Status s = database_->WriteToFree(remove); !s.ok()) return s;
  UnassignEmptyRowSet(*database_, key.model, key.revision, RowKind::kEncodings);
  return absl::OkStatus();
}

absl::StatusOr<StoredEncoding> SqlEncodingStore::Read(
    const EncodingKey& key,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  std::string incomplete_etag;
  while (true) {
    ReadRow row;
    absl::StatusOr<core::Encoding> encoding = core::Encoding();
    bool is_complete = true;
    const auto read = [&](SqlConnection& connection) -> absl::Status {
      if (absl::Status s = SelectRow(connection, key, &row); !s.ok()) return s;
      if (!row.message.scales_in_chunks()) {
        absl::Status status = proceed(EncodingMemoryBytes(row.message));
        if (status.ok()) encoding = EncodingFromProto(row.message);
        return status;
      }
      absl::StatusOr<EncodingPieceReader> pieces =
          EncodingPieceReader::Create(key, row);
      if (!pieces.ok()) return pieces.status();
      absl::Status status = proceed(pieces->memory_bytes());
      if (!status.ok()) return status;
      encoding = pieces->outline();
      core::ReserveScales(row.head.scale_count, pieces->has_zero_points(),
                          &*encoding);
      while (!pieces->at_end()) {
        ScalePiece piece;
        absl::StatusOr<bool> found = pieces->Read(connection, &piece);
        if (!found.ok()) return found.status();
        is_complete = *found;
        if (!is_complete) return absl::OkStatus();
        core::AppendScales(BytesOf(piece.scale), &*encoding);
        core::AppendZeroPoints(BytesOf(piece.zero_point), &*encoding);
        core::AppendOuterScales(BytesOf(piece.outer_scale), &*encoding);
      }
      return absl::OkStatus();
    };
    if (absl::Status s = database_->Read(read); !s.ok()) return s;
    StoredEncoding stored =
        Stored(row.head, row.set, ProvenanceOf(row.message));
    if (!is_complete) {
      // Replaced between its row and its pieces; then the row is another now.
      if (stored.etag == incomplete_etag) {
        return CorruptEncoding(key, "lacks scales");
      }
      incomplete_etag = stored.etag;
      continue;
    }
    absl::Status status = encoding.status();
    if (status.ok() && row.message.scales_in_chunks()) {
      status = core::DeriveScales(&*encoding);
      if (status.ok()) status = core::ValidateEncoding(*encoding);
    }
    if (!status.ok()) {
      return CorruptEncoding(key,
                             absl::StrCat("is invalid: ", status.message()));
    }
    stored.encoding =
        std::make_shared<const core::Encoding>(*std::move(encoding));
    return stored;
  }
}

absl::StatusOr<std::vector<EncodingListEntry>> SqlEncodingStore::ListEncodings(
    absl::string_view model, absl::string_view revision,
    absl::string_view after, int limit) {
  std::vector<EncodingListEntry> entries;
  if (limit <= 0) return entries;
  const auto select = [&](const char* sql, SqlConnection& connection,
                          absl::FunctionRef<absl::Status(const SqlStatement&,
                                                         EncodingListEntry*)>
                              read) {
    entries.clear();
    const std::unique_ptr<SqlStatement> row = connection.Prepare(sql);
    row->BindText(1, model);
    row->BindText(2, revision);
    row->BindText(3, after);
    row->BindInt(4, limit);
    while (true) {
      absl::StatusOr<bool> found = row->Step("cannot list encodings");
      if (!found.ok()) return found.status();
      if (!*found) return absl::OkStatus();
      EncodingListEntry& entry = entries.emplace_back();
      entry.tensor = std::string(row->Bytes(0));
      entry.error = read(*row, &entry);
    }
  };
  const auto key_of = [&](const EncodingListEntry& entry) {
    return EncodingKey{std::string(model), std::string(revision), entry.tensor};
  };
  const auto read_head = [&](const SqlStatement& row,
                             EncodingListEntry* entry) -> absl::Status {
    const absl::StatusOr<RowSet> set =
        ReadRowSet(row, 8, model, revision, static_cast<RowKind>(row.Int(12)));
    if (!set.ok()) return set.status();
    const EncodingRowHead head = HeadOf(row, 1);
    if (static_cast<uint64_t>(row.Int(7)) !=
        HeadChecksum(set->id, entry->tensor, head)) {
      return CorruptEncoding(key_of(*entry), "fails its checksum");
    }
    entry->stored = Stored(head, *set, "");
    entry->format = static_cast<core::NumberFormat>(head.format);
    entry->scale_count = head.scale_count;
    return absl::OkStatus();
  };
  // Unless it is not known which ones there are.
  const auto checked = [&]() -> absl::StatusOr<decltype(entries)> {
    const auto check = [&](SqlConnection& connection) -> absl::Status {
      for (const RowKind kind : kEncodingKinds) {
        // Entries of the first set tell if the set is damaged.
        if (kind == RowKind::kEncodings && !entries.empty()) continue;
        absl::Status status =
            FindRowSet(connection, model, revision, kind).status();
        if (!status.ok()) return status;
      }
      return absl::OkStatus();
    };
    if (absl::Status s = database_->Read(check); !s.ok()) return s;
    return std::move(entries);
  };
  absl::Status status = database_->Read([&](SqlConnection& connection) {
    return select(kListEncodings, connection, read_head);
  });
  if (status.ok()) return checked();
  if (!absl::IsDataLoss(status)) return status;
  // A damaged page is no reason to keep the other rows back.
  status = database_->Read([&](SqlConnection& connection) {
    return select(kListEncodingNames, connection,
                  [](const SqlStatement&, EncodingListEntry*) {
                    return absl::OkStatus();
                  });
  });
  if (!status.ok()) return status;
  for (EncodingListEntry& entry : entries) {
    absl::StatusOr<StoredEncoding> stored = Get(key_of(entry));
    if (stored.ok()) {
      entry.format = stored->encoding->format;
      entry.scale_count = static_cast<int64_t>(stored->encoding->scale.size());
      entry.stored = *std::move(stored);
      entry.stored.encoding = nullptr;
      entry.stored.provenance.clear();
    } else if (absl::IsDataLoss(stored.status()) ||
               absl::IsNotFound(stored.status())) {
      // The entry says so where the encoding was deleted in between.
      entry.error = stored.status();
    } else {
      return stored.status();
    }
  }
  return checked();
}

absl::StatusOr<std::vector<ModelListEntry>> SqlEncodingStore::ListModels(
    const NameRange& range, int limit) {
  std::vector<ModelListEntry> entries;
  if (limit <= 0) return entries;
  std::string revision;
  const auto visit = [&](const CountedRowSet& set) {
    const bool is_new = entries.empty() || entries.back().model != set.model;
    if (is_new) {
      if (entries.size() == static_cast<size_t>(limit)) return false;
      entries.emplace_back().model = set.model;
    }
    ModelListEntry& entry = entries.back();
    entry.revision_count += is_new || revision != set.revision;
    revision = set.revision;
    AddSet(set, &entry);
    return true;
  };
  absl::Status status =
      ListRowSets(*database_, {"", range.after, range.before}, visit);
  if (!status.ok()) return status;
  return entries;
}

absl::StatusOr<std::vector<RevisionListEntry>> SqlEncodingStore::ListRevisions(
    absl::string_view model, absl::string_view after, int limit) {
  std::vector<RevisionListEntry> entries;
  if (limit <= 0) return entries;
  const auto visit = [&](const CountedRowSet& set) {
    if (entries.empty() || entries.back().revision != set.revision) {
      if (entries.size() == static_cast<size_t>(limit)) return false;
      entries.emplace_back().revision = set.revision;
    }
    AddSet(set, &entries.back());
    return true;
  };
  absl::Status status = ListRowSets(*database_, {model, after, ""}, visit);
  if (!status.ok()) return status;
  return entries;
}

absl::StatusOr<int64_t> SqlEncodingStore::Check(
    absl::FunctionRef<void(const absl::Status&)> damaged) {
  int64_t count = 0;
  const auto check_set = [&](const ListedRowSet& set) -> absl::Status {
    constexpr int64_t kPage = 1000;
    std::vector<std::string> page;
    do {
      const std::string after = page.empty() ? "" : page.back();
      page.clear();
      const auto list = [&](SqlConnection& connection) -> absl::Status {
        const std::unique_ptr<SqlStatement> row =
            connection.Prepare(kListNamesOfSet);
        row->BindInt(1, set.set_id);
        row->BindText(2, after);
        row->BindInt(3, kPage);
        while (true) {
          absl::StatusOr<bool> found = row->Step("cannot list encodings");
          if (!found.ok()) return found.status();
          if (!*found) return absl::OkStatus();
          page.emplace_back(row->Bytes(0));
        }
      };
      if (absl::Status s = database_->Read(list); !s.ok()) return s;
      for (const std::string& tensor : page) {
        ++count;
        const absl::Status status =
            Get({set.model, set.revision, tensor}).status();
        // It was deleted in between.
        if (status.ok() || absl::IsNotFound(status)) continue;
        if (!absl::IsDataLoss(status)) return status;
        damaged(status);
      }
    } while (!page.empty());
    return absl::OkStatus();
  };
  for (const RowKind kind : kEncodingKinds) {
    absl::Status status = CheckRowSets(*database_, kind, damaged, check_set);
    if (!status.ok()) return status;
  }
  const auto list = [&](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(kListLostEncodingPieces);
    while (true) {
      absl::StatusOr<bool> found = row->Step("cannot list encodings");
      if (!found.ok()) return found.status();
      if (!*found) return absl::OkStatus();
      damaged(core::StoreCorruptError(
          absl::StrCat("the content ", row->Int(0), " has ", row->Int(1),
                       " pieces of scales without an encoding")));
    }
  };
  if (absl::Status s = database_->Read(list); !s.ok()) return s;
  return count;
}

absl::optional<int64_t> SqlEncodingStore::ForeignVersion() {
  return database_->ForeignVersion();
}

absl::Status SqlEncodingStore::Ping() { return database_->Ping(); }

}  // namespace quantd::server
