#include "server/store/sql_encoding_store.h"

#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
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
#include "server/store/sql_usage.h"
#include "server/wire/encoding_proto.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

constexpr absl::string_view kAbsent = "absent";
// Larger encodings have their scales in pieces.
constexpr int64_t kMostInlineBytes = int64_t{16} << 10;
// U+10FFFF, after every name.
constexpr absl::string_view kAfterNames = "\xf4\x8f\xbf\xbf";

constexpr char kSelect[] =
    "SELECT generation, update_time_us, format, scale_count, checksum, body, "
    "content_id, content_bytes "
    "FROM encodings WHERE model = $1 AND revision = $2 AND tensor = $3";
constexpr char kSelectEtag[] =
    "SELECT generation, checksum FROM encodings "
    "WHERE model = $1 AND revision = $2 AND tensor = $3";
constexpr char kSelectReplacedEncoding[] =
    "SELECT principal, CAST(length(body) AS BIGINT) + content_bytes "
    "FROM encodings "
    "WHERE model = $1 AND revision = $2 AND tensor = $3";
constexpr char kUpsertEncoding[] =
    "INSERT INTO encodings (model, revision, tensor, generation, "
    "update_time_us, format, scale_count, checksum, body, principal, "
    "content_id, content_bytes) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) "
    "ON CONFLICT (model, revision, tensor) DO UPDATE SET "
    "generation = excluded.generation, "
    "update_time_us = excluded.update_time_us, format = excluded.format, "
    "scale_count = excluded.scale_count, checksum = excluded.checksum, "
    "body = excluded.body, principal = excluded.principal, "
    "content_id = excluded.content_id, content_bytes = excluded.content_bytes";
// Where the row is still there.
constexpr char kUpsertHead[] =
    "INSERT INTO encoding_heads (checksum, model, revision, tensor) "
    "SELECT CAST($1 AS BIGINT), model, revision, tensor FROM encodings "
    "WHERE model = $2 AND revision = $3 AND tensor = $4 "
    "ON CONFLICT (model, revision, tensor) DO UPDATE SET "
    "checksum = excluded.checksum";
constexpr char kDeleteEncodingRow[] =
    "DELETE FROM encodings WHERE model = $1 AND revision = $2 AND tensor = $3";
constexpr char kListEncodings[] =
    "SELECT tensor, generation, update_time_us, format, scale_count, checksum, "
    "(SELECT checksum FROM encoding_heads AS heads "
    "WHERE heads.model = encodings.model "
    "AND heads.revision = encodings.revision "
    "AND heads.tensor = encodings.tensor) "
    "FROM encodings WHERE model = $1 AND revision = $2 AND tensor > $3 "
    "ORDER BY tensor LIMIT $4";
// From the index of the key, whatever is damaged beside that.
constexpr char kListEncodingNames[] =
    "SELECT tensor FROM encodings "
    "WHERE model = $1 AND revision = $2 AND tensor > $3 "
    "ORDER BY tensor LIMIT $4";
// From counts, whose number does not grow with that of the tensors.
constexpr char kListModels[] =
    "SELECT model, COUNT(DISTINCT revision), CAST(SUM(encodings) AS BIGINT), "
    "CAST(SUM(statistics) AS BIGINT) FROM revision_counts "
    "WHERE model > $1 AND model < $2 AND (encodings > 0 OR statistics > 0) "
    "GROUP BY model ORDER BY model LIMIT $3";
constexpr char kListEncodingRevisions[] =
    "SELECT revision, CAST(SUM(encodings) AS BIGINT), "
    "CAST(SUM(statistics) AS BIGINT) FROM revision_counts "
    "WHERE model = $1 AND revision > $2 AND (encodings > 0 OR statistics > 0) "
    "GROUP BY revision ORDER BY revision LIMIT $3";
// Keys after one.
constexpr char kListEncodingKeys[] =
    "SELECT model, revision, tensor FROM encodings "
    "WHERE (model, revision, tensor) > ($1, $2, $3) "
    "ORDER BY model, revision, tensor LIMIT 1000";

// Contents that are being written.
constexpr char kStage[] =
    "INSERT INTO staged_contents (content_id, touch_time_us) VALUES ($1, $2)";
constexpr char kTouchStaged[] =
    "UPDATE staged_contents SET touch_time_us = $1 WHERE content_id = $2 "
    "RETURNING content_id";
constexpr char kEndStaged[] =
    "DELETE FROM staged_contents WHERE content_id = $1 RETURNING content_id";
// Pieces that no encoding has, and that nobody is to free.
constexpr char kListLostEncodingPieces[] =
    "SELECT content_id, COUNT(*) FROM encoding_pieces "
    "WHERE content_id NOT IN (SELECT content_id FROM encodings) "
    "AND content_id NOT IN (SELECT content_id FROM staged_contents) "
    "AND content_id NOT IN (SELECT content_id FROM lost_contents) "
    "GROUP BY content_id ORDER BY content_id";

// Whole revisions.
constexpr char kRename[] =
    "UPDATE encodings SET revision = $1, generation = $2, "
    "update_time_us = $3, checksum = $4 "
    "WHERE model = $5 AND revision = $6 AND tensor = $7";
constexpr char kDeleteRevision[] =
    "DELETE FROM encodings WHERE model = $1 AND revision = $2";
// Of tensors that another revision has too.
constexpr char kDeleteReplaced[] =
    "DELETE FROM encodings WHERE model = $1 AND revision = $2 AND tensor IN "
    "(SELECT tensor FROM encodings WHERE model = $3 AND revision = $4)";
constexpr char kDeleteRevisionHeads[] =
    "DELETE FROM encoding_heads WHERE model = $1 AND revision = $2";
constexpr char kDeleteRevisionStatistics[] =
    "DELETE FROM statistics WHERE model = $1 AND revision = $2";
constexpr char kCountEncodings[] =
    "SELECT COUNT(*) FROM encodings WHERE model = $1 AND revision = $2";
constexpr char kCountStatistics[] =
    "SELECT COUNT(*) FROM statistics WHERE model = $1 AND revision = $2";
// Those that have rows.
constexpr char kRevisionsOf[] =
    "SELECT revision FROM encodings WHERE model = $1 "
    "UNION SELECT revision FROM statistics WHERE model = $1 "
    "ORDER BY revision";

// What of a row the checksum covers, beside its key.
struct EncodingRowHead {
  int64_t generation = 0;
  int64_t update_time_us = 0;
  int64_t format = 0;
  int64_t scale_count = 0;
};

// What an encoding is.
struct Content {
  // v1::Encoding: whole, or with scales_in_chunks. With its provenance, as a
  // field that the message does not have: a quantd that does not know it reads
  // the encoding and publishes both.
  std::string body;
  // Of the pieces with scales; 0 where the body is whole.
  int64_t id = 0;
  int64_t bytes = 0;
};

// From the columns of a row that begin with `generation`.
EncodingRowHead HeadOf(const SqlStatement& row, int generation) {
  return {row.Int(generation), row.Int(generation + 1), row.Int(generation + 2),
          row.Int(generation + 3)};
}

// XXH3-64 over the key, the head and the body; lengths are hashed with the
// strings, so that no two keys run together.
uint64_t Checksum(const EncodingKey& key, const EncodingRowHead& head,
                  absl::string_view body) {
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(
      XXH3_createState(), &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  const int64_t numbers[] = {static_cast<int64_t>(key.model.size()),
                             static_cast<int64_t>(key.revision.size()),
                             static_cast<int64_t>(key.tensor.size()),
                             head.generation,
                             head.update_time_us,
                             head.format,
                             head.scale_count};
  XXH3_64bits_update(state.get(), numbers, sizeof(numbers));
  XXH3_64bits_update(state.get(), key.model.data(), key.model.size());
  XXH3_64bits_update(state.get(), key.revision.data(), key.revision.size());
  XXH3_64bits_update(state.get(), key.tensor.data(), key.tensor.size());
  XXH3_64bits_update(state.get(), body.data(), body.size());
  return XXH3_64bits_digest(state.get());
}

// The same of a row whose scales are in pieces, which have their own.
uint64_t Checksum(const EncodingKey& key, const EncodingRowHead& head,
                  const Content& content) {
  if (content.id == 0) return Checksum(key, head, content.body);
  const int64_t numbers[] = {head.generation, head.update_time_us,
                             head.format,     head.scale_count,
                             content.id,      content.bytes};
  return RowChecksum::Of(
      {key.model,
       key.revision,
       key.tensor,
       {reinterpret_cast<const char*>(numbers), sizeof(numbers)},
       content.body});
}

// The same without the body, so that lists need not read it. A quantd that knew
// none leaves it as it is.
uint64_t EncodingHeadChecksum(const EncodingKey& key,
                              const EncodingRowHead& head, uint64_t checksum) {
  const int64_t numbers[] = {head.generation, head.update_time_us, head.format,
                             head.scale_count, static_cast<int64_t>(checksum)};
  return RowChecksum::Of(
      {key.model,
       key.revision,
       key.tensor,
       {reinterpret_cast<const char*>(numbers), sizeof(numbers)}});
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

// The etag in a row of kSelectEtag.
std::string EtagOf(const SqlStatement& row) {
  return MakeEtag(row.Int(0), static_cast<uint64_t>(row.Int(1)));
}

// Records what a list verifies a row's head with.
absl::Status PutHeadChecksum(SqlConnection& connection, const EncodingKey& key,
                             uint64_t checksum) {
  const std::unique_ptr<SqlStatement> row = connection.Prepare(kUpsertHead);
  row->BindInt(1, static_cast<int64_t>(checksum));
  row->BindText(2, key.model);
  row->BindText(3, key.revision);
  row->BindText(4, key.tensor);
  return row->Step("cannot put an encoding").status();
}

// Errors: STORE_UNAVAILABLE.
absl::Status PutHeadChecksum(SqlConnection& connection, const EncodingKey& key,
                             const EncodingRowHead& head, uint64_t checksum) {
  return PutHeadChecksum(connection, key,
                         EncodingHeadChecksum(key, head, checksum));
}

// Puts a row, whose pieces are there, and fills in its head's generation and
// time. Answers its checksum.
// Errors: those of EncodingStore::Put.
absl::StatusOr<uint64_t> PutRow(SqlConnection& connection,
                                const EncodingKey& key, const Content& content,
                                const Precondition& precondition,
                                EncodingRowHead* head) {
  constexpr absl::string_view kWhat = "cannot put an encoding";
  if (absl::Status s = connection.LockTensor(key); !s.ok()) return s;
  if (!precondition.if_match.empty()) {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kSelectEtag);
    row->BindKey(key);
    absl::StatusOr<bool> found = row->Step(kWhat);
    if (!found.ok()) return found.status();
    const std::string etag = *found ? EtagOf(*row) : std::string(kAbsent);
    if (etag != precondition.if_match) {
      return core::EtagMismatchError(precondition.if_match, etag);
    }
  }
  const WriteAccount& account = precondition.account;
  ReplacedRow replaced;
  if (!account.quotas.empty()) {
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(kSelectReplacedEncoding);
    row->BindKey(key);
    absl::StatusOr<bool> found = row->Step(kWhat);
    if (!found.ok()) return found.status();
    if (*found) replaced = {true, std::string(row->Bytes(0)), row->Int(1)};
  }
  absl::StatusOr<int64_t> generation = connection.NextGeneration();
  if (!generation.ok()) return generation.status();
  head->generation = *generation;
  head->update_time_us = absl::ToUnixMicros(absl::Now());
  const uint64_t checksum = Checksum(key, *head, content);
  {
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(kUpsertEncoding);
    row->BindKey(key);
    row->BindInt(4, head->generation);
    row->BindInt(5, head->update_time_us);
    row->BindInt(6, head->format);
    row->BindInt(7, head->scale_count);
    row->BindInt(8, static_cast<int64_t>(checksum));
    row->BindBytes(9, content.body);
    row->BindText(10, account.principal);
    row->BindInt(11, content.id);
    row->BindInt(12, content.bytes);
    if (absl::Status s = row->Step(kWhat).status(); !s.ok()) return s;
  }
  absl::Status status = PutHeadChecksum(connection, key, *head, checksum);
  if (status.ok()) {
    status =
        CheckQuotas(connection, account, replaced,
                    static_cast<int64_t>(content.body.size()) + content.bytes);
  }
  if (status.ok()) status = connection.Announce();
  if (!status.ok()) return status;
  return checksum;
}

// Of the provenance, in the message of a body; proto/ keeps it free.
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

StoredEncoding Stored(const EncodingRowHead& head, uint64_t checksum,
                      std::string provenance) {
  StoredEncoding stored;
  stored.provenance = std::move(provenance);
  stored.etag = MakeEtag(head.generation, checksum);
  stored.generation = head.generation;
  stored.update_time = absl::FromUnixMicros(head.update_time_us);
  return stored;
}

// A row as it was read and verified.
struct ReadRow {
  EncodingRowHead head;
  uint64_t checksum = 0;
  Content content;
  // Of the body.
  v1::Encoding message;
};

// Errors: ENCODING_NOT_FOUND, STORE_CORRUPT.
absl::Status SelectRow(SqlConnection& connection, const EncodingKey& key,
                       ReadRow* read) {
  const std::unique_ptr<SqlStatement> select = connection.Prepare(kSelect);
  select->BindKey(key);
  absl::StatusOr<bool> found = select->Step("cannot read an encoding");
  if (absl::IsDataLoss(found.status())) {
    return core::StoreCorruptError(
        absl::StrCat(ShownKey(key),
                     "stands on a damaged page of the database; restore the "
                     "store from its backup"));
  }
  if (!found.ok()) return found.status();
  if (!*found) return NoSuchEncoding(key);
  read->head = HeadOf(*select, 0);
  read->checksum = static_cast<uint64_t>(select->Int(4));
  read->content = {std::string(select->Bytes(5)), select->Int(6),
                   select->Int(7)};
  if (read->checksum != Checksum(key, read->head, read->content)) {
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
  // What the encoding takes in memory.
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
        stored_(Stored(row.head, row.checksum, ProvenanceOf(row.message))),
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
      const std::unique_ptr<SqlStatement> row = connection.Prepare(kSelectEtag);
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
      {
        const std::unique_ptr<SqlStatement> row =
            connection.Prepare(kEndStaged);
        row->BindInt(1, content_.id);
        absl::StatusOr<bool> found = row->Step(kWhat);
        if (!found.ok() || !*found) return found.status();
      }
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
    uint64_t checksum = 0;
    const Content before = content_;
    const auto put = [&](SqlConnection& connection) -> absl::Status {
      content_ = before;
      head_.scale_count =
          scale_pieces_ * layout_.scales_per_piece() +
          static_cast<int64_t>(scale_.size()) / layout_.scale_bytes;
      if (absl::Status s = Stage(connection, /*is_last=*/true); !s.ok()) {
        return s;
      }
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
      absl::StatusOr<uint64_t> row =
          PutRow(connection, key_, content_, precondition_, &head_);
      if (row.ok()) checksum = *row;
      return row.status();
    };
    if (absl::Status s = database_->Write(put); !s.ok()) {
      content_ = before;
      return s;
    }
    is_staged_ = false;
    return Stored(head_, checksum, precondition_.provenance);
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
      absl::Status status = Stage(connection, /*is_last=*/false);
      if (status.ok()) status = Write(connection, piece, bytes);
      return status.ok() ? CheckStagedQuotas() : status;
    };
    absl::Status status = database_->Write(write);
    if (!status.ok()) {
      content_ = before;
      return status;
    }
    is_staged_ = true;
    return status;
  }

  // Says that the content is being written: the first time, again, or that it
  // is written.
  absl::Status Stage(SqlConnection& connection, bool is_last) {
    const int64_t now_us = absl::ToUnixMicros(absl::Now());
    if (!is_staged_) {
      absl::StatusOr<int64_t> id = connection.NextGeneration();
      if (!id.ok()) return id.status();
      content_.id = *id;
      if (is_last) return absl::OkStatus();
      const std::unique_ptr<SqlStatement> row = connection.Prepare(kStage);
      row->BindInt(1, content_.id);
      row->BindInt(2, now_us);
      return row->Step(kWhat).status();
    }
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(is_last ? kEndStaged : kTouchStaged);
    if (!is_last) row->BindInt(1, now_us);
    row->BindInt(is_last ? 1 : 2, content_.id);
    absl::StatusOr<bool> found = row->Step(kWhat);
    if (!found.ok()) return found.status();
    if (*found) return absl::OkStatus();
    return core::StoreUnavailableError(
        "cannot put an encoding: its pieces came too slowly and were freed; "
        "write it again");
  }

  absl::Status Write(SqlConnection& connection, int64_t piece,
                     const std::string& bytes) {
    content_.bytes += static_cast<int64_t>(bytes.size());
    return WritePiece(connection, content_.id, piece, bytes);
  }

  // That what is staged does not exceed a quota by itself; Finish looks at all.
  absl::Status CheckStagedQuotas() const {
    for (const Quota& quota : precondition_.account.quotas) {
      if (content_.bytes > quota.max_bytes) {
        return core::QuotaExceededError(quota.scope, quota.max_bytes, "bytes");
      }
    }
    return absl::OkStatus();
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

// Runs a statement about a revision. Answers the first column, 0 without a row.
absl::StatusOr<int64_t> Change(SqlConnection& connection, const char* sql,
                               absl::string_view model,
                               absl::string_view revision,
                               absl::string_view what) {
  const std::unique_ptr<SqlStatement> row = connection.Prepare(sql);
  row->BindText(1, model);
  row->BindText(2, revision);
  absl::StatusOr<bool> found = row->Step(what);
  if (!found.ok()) return found.status();
  return *found ? row->Int(0) : 0;
}

// Deletes what a revision has, and adds to the counts.
absl::Status DeleteRows(SqlConnection& connection, absl::string_view model,
                        absl::string_view revision, DeletedRows* deleted) {
  constexpr absl::string_view kWhat = "cannot delete a revision";
  absl::StatusOr<int64_t> encodings =
      Change(connection, kCountEncodings, model, revision, kWhat);
  if (!encodings.ok()) return encodings.status();
  absl::StatusOr<int64_t> statistics =
      Change(connection, kCountStatistics, model, revision, kWhat);
  if (!statistics.ok()) return statistics.status();
  deleted->encoding_count += *encodings;
  deleted->statistics_count += *statistics;
  absl::Status status =
      Change(connection, kDeleteRevision, model, revision, kWhat).status();
  if (!status.ok()) return status;
  return Change(connection, kDeleteRevisionStatistics, model, revision, kWhat)
      .status();
}

}  // namespace

SqlEncodingStore::SqlEncodingStore(std::shared_ptr<SqlDatabase> database)
    : database_(std::move(database)) {}

absl::StatusOr<StoredEncoding> SqlEncodingStore::Read(
    const EncodingKey& key,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  absl::StatusOr<Row> row = ReadWhole(key, proceed);
  if (!row.ok()) return row.status();
  return std::move(row->stored);
}

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
  uint64_t checksum = 0;
  const auto put = [&](SqlConnection& connection) -> absl::Status {
    absl::StatusOr<uint64_t> row =
        PutRow(connection, key, content, precondition, &head);
    if (row.ok()) checksum = *row;
    return row.status();
  };
  if (absl::Status s = database_->Write(put); !s.ok()) return s;
  StoredEncoding stored = Stored(head, checksum, precondition.provenance);
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
  StoredEncoding stored =
      Stored(row.head, row.checksum, ProvenanceOf(row.message));
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
  constexpr absl::string_view kWhat = "cannot publish a revision";
  PublishedRevision published;
  const auto publish = [&](SqlConnection& connection) -> absl::Status {
    published = {};
    std::vector<std::string> revisions = {std::string(source),
                                          std::string(target)};
    std::sort(revisions.begin(), revisions.end());
    absl::Status status = connection.LockRevisions(model, std::move(revisions));
    if (!status.ok()) return status;
    // Keys are small, however many there are.
    std::vector<std::string> tensors;
    {
      const std::unique_ptr<SqlStatement> row =
          connection.Prepare(kListEncodingNames);
      row->BindText(1, model);
      row->BindText(2, source);
      row->BindText(3, "");
      row->BindInt(4, std::numeric_limits<int64_t>::max());
      while (true) {
        absl::StatusOr<bool> found = row->Step(kWhat);
        if (!found.ok()) return found.status();
        if (!*found) break;
        tensors.emplace_back(row->Bytes(0));
      }
    }
    if (tensors.empty()) {
      return core::RevisionNotFoundError(model, source, "encodings");
    }
    const absl::StatusOr<int64_t> before =
        Change(connection, kCountEncodings, model, target, kWhat);
    if (!before.ok()) return before.status();
    if (keep_others) {
      const std::unique_ptr<SqlStatement> row =
          connection.Prepare(kDeleteReplaced);
      row->BindText(1, model);
      row->BindText(2, target);
      row->BindText(3, model);
      row->BindText(4, source);
      status = row->Step(kWhat).status();
    } else {
      status =
          Change(connection, kDeleteRevision, model, target, kWhat).status();
    }
    if (!status.ok()) return status;
    const absl::StatusOr<int64_t> kept =
        Change(connection, kCountEncodings, model, target, kWhat);
    if (!kept.ok()) return kept.status();
    published.replaced_count = *before - *kept;
    published.encoding_count = *kept + static_cast<int64_t>(tensors.size());
    const int64_t now_us = absl::ToUnixMicros(absl::Now());
    EncodingKey from{std::string(model), std::string(source), ""};
    EncodingKey to{std::string(model), std::string(target), ""};
    for (const std::string& tensor : tensors) {
      from.tensor = tensor;
      to.tensor = tensor;
      ReadRow read;
      if (absl::Status s = SelectRow(connection, from, &read); !s.ok()) {
        return s;
      }
      absl::StatusOr<int64_t> generation = connection.NextGeneration();
      if (!generation.ok()) return generation.status();
      read.head.generation = *generation;
      read.head.update_time_us = now_us;
      const uint64_t checksum = Checksum(to, read.head, read.content);
      {
        const std::unique_ptr<SqlStatement> row = connection.Prepare(kRename);
        row->BindText(1, target);
        row->BindInt(2, read.head.generation);
        row->BindInt(3, read.head.update_time_us);
        row->BindInt(4, static_cast<int64_t>(checksum));
        row->BindText(5, model);
        row->BindText(6, source);
        row->BindText(7, tensor);
        if (absl::Status s = row->Step(kWhat).status(); !s.ok()) return s;
      }
      status = PutHeadChecksum(connection, to, read.head, checksum);
      if (!status.ok()) return status;
    }
    status =
        Change(connection, kDeleteRevisionHeads, model, source, kWhat).status();
    return status.ok() ? connection.Announce() : status;
  };
  if (absl::Status s = database_->Write(publish); !s.ok()) return s;
  return published;
}

absl::StatusOr<DeletedRows> SqlEncodingStore::DeleteRevision(
    absl::string_view model, absl::string_view revision) {
  DeletedRows deleted;
  const auto remove = [&](SqlConnection& connection) -> absl::Status {
    deleted = {};
    absl::Status status =
        connection.LockRevisions(model, {std::string(revision)});
    if (!status.ok()) return status;
    status = DeleteRows(connection, model, revision, &deleted);
    if (!status.ok()) return status;
    if (deleted.encoding_count + deleted.statistics_count == 0) {
      return core::RevisionNotFoundError(model, revision,
                                         "encodings and no statistics");
    }
    return connection.Announce();
  };
  if (absl::Status s = database_->Write(remove); !s.ok()) return s;
  return deleted;
}

absl::StatusOr<DeletedRows> SqlEncodingStore::DeleteModel(
    absl::string_view model) {
  constexpr absl::string_view kWhat = "cannot delete a model";
  DeletedRows deleted;
  const auto remove = [&](SqlConnection& connection) -> absl::Status {
    deleted = {};
    std::vector<std::string> revisions;
    {
      const std::unique_ptr<SqlStatement> row =
          connection.Prepare(kRevisionsOf);
      row->BindText(1, model);
      while (true) {
        absl::StatusOr<bool> found = row->Step(kWhat);
        if (!found.ok()) return found.status();
        if (!*found) break;
        revisions.emplace_back(row->Bytes(0));
      }
    }
    if (revisions.empty()) return core::ModelNotFoundError(model);
    absl::Status status = connection.LockRevisions(model, revisions);
    for (size_t i = 0; status.ok() && i < revisions.size(); ++i) {
      status = DeleteRows(connection, model, revisions[i], &deleted);
    }
    return status.ok() ? connection.Announce() : status;
  };
  if (absl::Status s = database_->Write(remove); !s.ok()) return s;
  return deleted;
}

absl::Status SqlEncodingStore::Delete(const EncodingKey& key,
                                      const Precondition& precondition) {
  constexpr absl::string_view kWhat = "cannot delete an encoding";
  return database_->Write([&](SqlConnection& connection) -> absl::Status {
    if (absl::Status s = connection.LockTensor(key); !s.ok()) return s;
    {
      const std::unique_ptr<SqlStatement> row = connection.Prepare(kSelectEtag);
      row->BindKey(key);
      absl::StatusOr<bool> found = row->Step(kWhat);
      if (!found.ok()) return found.status();
      if (!*found) return NoSuchEncoding(key);
      const std::string etag = EtagOf(*row);
      if (!precondition.if_match.empty() && etag != precondition.if_match) {
        return core::EtagMismatchError(precondition.if_match, etag);
      }
    }
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(kDeleteEncodingRow);
    row->BindKey(key);
    absl::Status status = row->Step(kWhat).status();
    return status.ok() ? connection.Announce() : status;
  });
}

absl::StatusOr<SqlEncodingStore::Row> SqlEncodingStore::ReadWhole(
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
    Row result;
    result.stored = Stored(row.head, row.checksum, ProvenanceOf(row.message));
    if (!is_complete) {
      // Replaced between its row and its pieces; then the row is another now.
      if (result.stored.etag == incomplete_etag) {
        return CorruptEncoding(key, "lacks scales");
      }
      incomplete_etag = result.stored.etag;
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
    result.head_checksum = EncodingHeadChecksum(key, row.head, row.checksum);
    result.stored.encoding =
        std::make_shared<const core::Encoding>(*std::move(encoding));
    return result;
  }
}

absl::StatusOr<std::vector<EncodingListEntry>> SqlEncodingStore::ListEncodings(
    absl::string_view model, absl::string_view revision,
    absl::string_view after, int limit) {
  std::vector<EncodingListEntry> entries;
  if (limit <= 0) return entries;
  // Whether the entry of the same place is to be read whole.
  std::vector<bool> is_unverified;
  const auto select = [&](const char* sql, SqlConnection& connection,
                          absl::FunctionRef<bool(const SqlStatement&)> add) {
    entries.clear();
    is_unverified.clear();
    const std::unique_ptr<SqlStatement> row = connection.Prepare(sql);
    row->BindText(1, model);
    row->BindText(2, revision);
    row->BindText(3, after);
    row->BindInt(4, limit);
    while (true) {
      absl::StatusOr<bool> found = row->Step("cannot list encodings");
      if (!found.ok()) return found.status();
      if (!*found) return absl::OkStatus();
      entries.emplace_back().tensor = std::string(row->Bytes(0));
      is_unverified.push_back(!add(*row));
    }
  };
  const auto key_of = [&](const EncodingListEntry& entry) {
    return EncodingKey{std::string(model), std::string(revision), entry.tensor};
  };
  const auto read_head = [&](const SqlStatement& row) {
    EncodingListEntry& entry = entries.back();
    const EncodingRowHead head = HeadOf(row, 1);
    const auto checksum = static_cast<uint64_t>(row.Int(5));
    entry.stored.generation = head.generation;
    entry.stored.update_time = absl::FromUnixMicros(head.update_time_us);
    entry.format = static_cast<core::NumberFormat>(head.format);
    entry.scale_count = head.scale_count;
    entry.stored.etag = MakeEtag(head.generation, checksum);
    return static_cast<uint64_t>(row.Int(6)) ==
           EncodingHeadChecksum(key_of(entry), head, checksum);
  };
  absl::Status status = database_->Read([&](SqlConnection& connection) {
    return select(kListEncodings, connection, read_head);
  });
  // A damaged page is no reason to keep the other rows back.
  if (absl::IsDataLoss(status)) {
    status = database_->Read([&](SqlConnection& connection) {
      return select(kListEncodingNames, connection,
                    [](const SqlStatement&) { return false; });
    });
  }
  if (!status.ok()) return status;

  // What was put without a checksum of its head, and what is damaged.
  std::vector<std::pair<EncodingKey, uint64_t>> verified;
  const std::string last = entries.empty() ? "" : entries.back().tensor;
  int deleted_count = 0;
  std::vector<EncodingListEntry> listed;
  listed.reserve(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    EncodingListEntry& entry = listed.emplace_back(std::move(entries[i]));
    if (!is_unverified[i]) continue;
    absl::StatusOr<Row> row = ReadWhole(
        key_of(entry), [](int64_t /*memory*/) { return absl::OkStatus(); });
    if (row.ok()) {
      entry.format = row->stored.encoding->format;
      entry.scale_count =
          static_cast<int64_t>(row->stored.encoding->scale.size());
      entry.stored = std::move(row->stored);
      entry.stored.encoding = nullptr;
      verified.emplace_back(key_of(entry), row->head_checksum);
    } else if (absl::IsDataLoss(row.status())) {
      entry.error = row.status();
    } else if (absl::IsNotFound(row.status())) {
      // It was deleted in between.
      listed.pop_back();
      ++deleted_count;
    } else {
      return row.status();
    }
  }
  if (!verified.empty()) {
    // So that the next list need not read them. If not now, then later.
    const auto put = [&](SqlConnection& connection) -> absl::Status {
      for (const auto& [key, checksum] : verified) {
        absl::Status s = PutHeadChecksum(connection, key, checksum);
        if (!s.ok()) return s;
      }
      return absl::OkStatus();
    };
    database_->WriteNow(put).IgnoreError();
  }
  if (deleted_count > 0) {
    // A list that is shorter than it may be is the last one.
    absl::StatusOr<std::vector<EncodingListEntry>> more =
        ListEncodings(model, revision, last, deleted_count);
    if (!more.ok()) return more.status();
    std::move(more->begin(), more->end(), std::back_inserter(listed));
  }
  return listed;
}

absl::StatusOr<std::vector<ModelListEntry>> SqlEncodingStore::ListModels(
    const NameRange& range, int limit) {
  std::vector<ModelListEntry> entries;
  if (limit <= 0) return entries;
  const auto list = [&](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kListModels);
    row->BindText(1, range.after);
    row->BindText(2, range.before.empty() ? kAfterNames : range.before);
    row->BindInt(3, limit);
    while (true) {
      absl::StatusOr<bool> found = row->Step("cannot list models");
      if (!found.ok()) return found.status();
      if (!*found) return absl::OkStatus();
      entries.push_back(
          {std::string(row->Bytes(0)), row->Int(1), row->Int(2), row->Int(3)});
    }
  };
  if (absl::Status s = database_->Read(list); !s.ok()) return s;
  return entries;
}

absl::StatusOr<std::vector<RevisionListEntry>> SqlEncodingStore::ListRevisions(
    absl::string_view model, absl::string_view after, int limit) {
  std::vector<RevisionListEntry> entries;
  if (limit <= 0) return entries;
  const auto list = [&](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(kListEncodingRevisions);
    row->BindText(1, model);
    row->BindText(2, after);
    row->BindInt(3, limit);
    while (true) {
      absl::StatusOr<bool> found = row->Step("cannot list revisions");
      if (!found.ok()) return found.status();
      if (!*found) return absl::OkStatus();
      entries.push_back({std::string(row->Bytes(0)), row->Int(1), row->Int(2)});
    }
  };
  if (absl::Status s = database_->Read(list); !s.ok()) return s;
  return entries;
}

absl::StatusOr<int64_t> SqlEncodingStore::Check(
    absl::FunctionRef<void(const absl::Status&)> damaged) {
  int64_t count = 0;
  EncodingKey last;
  while (true) {
    std::vector<EncodingKey> keys;
    const auto list = [&](SqlConnection& connection) -> absl::Status {
      const std::unique_ptr<SqlStatement> row =
          connection.Prepare(kListEncodingKeys);
      row->BindKey(last);
      while (true) {
        absl::StatusOr<bool> found = row->Step("cannot list encodings");
        if (!found.ok()) return found.status();
        if (!*found) return absl::OkStatus();
        keys.push_back({std::string(row->Bytes(0)), std::string(row->Bytes(1)),
                        std::string(row->Bytes(2))});
      }
    };
    if (absl::Status s = database_->Read(list); !s.ok()) return s;
    if (keys.empty()) break;
    for (const EncodingKey& key : keys) {
      ++count;
      const absl::Status status = Get(key).status();
      // It was deleted in between.
      if (status.ok() || absl::IsNotFound(status)) continue;
      if (!absl::IsDataLoss(status)) return status;
      damaged(status);
    }
    last = std::move(keys.back());
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
