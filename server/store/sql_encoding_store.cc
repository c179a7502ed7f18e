#include "server/store/sql_encoding_store.h"

#include <xxhash.h>

#include <algorithm>
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
#include "core/errors.h"
#include "quantd/v1/encoding.pb.h"
#include "server/store/row_checksum.h"
#include "server/store/sql_usage.h"
#include "server/wire/encoding_proto.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

constexpr absl::string_view kAbsent = "absent";
// U+10FFFF, after every name.
constexpr absl::string_view kAfterNames = "\xf4\x8f\xbf\xbf";

constexpr char kSelect[] =
    "SELECT generation, update_time_us, format, scale_count, checksum, body "
    "FROM encodings WHERE model = $1 AND revision = $2 AND tensor = $3";
constexpr char kSelectEtag[] =
    "SELECT generation, checksum FROM encodings "
    "WHERE model = $1 AND revision = $2 AND tensor = $3";
constexpr char kSelectReplaced[] =
    "SELECT principal, CAST(length(body) AS BIGINT) FROM encodings "
    "WHERE model = $1 AND revision = $2 AND tensor = $3";
constexpr char kUpsert[] =
    "INSERT INTO encodings (model, revision, tensor, generation, "
    "update_time_us, format, scale_count, checksum, body, principal) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) "
    "ON CONFLICT (model, revision, tensor) DO UPDATE SET "
    "generation = excluded.generation, "
    "update_time_us = excluded.update_time_us, format = excluded.format, "
    "scale_count = excluded.scale_count, checksum = excluded.checksum, "
    "body = excluded.body, principal = excluded.principal";
// Where the row is still there.
constexpr char kUpsertHead[] =
    "INSERT INTO encoding_heads (checksum, model, revision, tensor) "
    "SELECT CAST($1 AS BIGINT), model, revision, tensor FROM encodings "
    "WHERE model = $2 AND revision = $3 AND tensor = $4 "
    "ON CONFLICT (model, revision, tensor) DO UPDATE SET "
    "checksum = excluded.checksum";
constexpr char kDelete[] =
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
constexpr char kListNames[] =
    "SELECT tensor FROM encodings "
    "WHERE model = $1 AND revision = $2 AND tensor > $3 "
    "ORDER BY tensor LIMIT $4";
// From counts, whose number does not grow with that of the tensors.
constexpr char kListModels[] =
    "SELECT model, COUNT(DISTINCT revision), CAST(SUM(encodings) AS BIGINT), "
    "CAST(SUM(statistics) AS BIGINT) FROM revision_counts "
    "WHERE model > $1 AND model < $2 AND (encodings > 0 OR statistics > 0) "
    "GROUP BY model ORDER BY model LIMIT $3";
constexpr char kListRevisions[] =
    "SELECT revision, CAST(SUM(encodings) AS BIGINT), "
    "CAST(SUM(statistics) AS BIGINT) FROM revision_counts "
    "WHERE model = $1 AND revision > $2 AND (encodings > 0 OR statistics > 0) "
    "GROUP BY revision ORDER BY revision LIMIT $3";
// Keys after one.
constexpr char kListKeys[] =
    "SELECT model, revision, tensor FROM encodings "
    "WHERE (model, revision, tensor) > ($1, $2, $3) "
    "ORDER BY model, revision, tensor LIMIT 1000";

// What of a row the checksum covers, beside its key.
struct RowHead {
  int64_t generation = 0;
  int64_t update_time_us = 0;
  int64_t format = 0;
  int64_t scale_count = 0;
};

// From the columns of a row that begin with `generation`.
RowHead HeadOf(const SqlStatement& row, int generation) {
  return {row.Int(generation), row.Int(generation + 1), row.Int(generation + 2),
          row.Int(generation + 3)};
}

// XXH3-64 over the key, the head and the body; lengths are hashed with the
// strings, so that no two keys run together.
uint64_t Checksum(const EncodingKey& key, const RowHead& head,
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

// The same without the body, so that lists need not read it. A quantd that knew
// none leaves it as it is.
uint64_t HeadChecksum(const EncodingKey& key, const RowHead& head,
                      uint64_t checksum) {
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

absl::Status NotFound(const EncodingKey& key) {
  return core::EncodingNotFoundError(key.model, key.revision, key.tensor);
}

std::string Shown(const EncodingKey& key) {
  return absl::StrCat("the encoding for tensor \"", ShownName(key.tensor),
                      "\" of model \"", ShownName(key.model), "\", revision \"",
                      ShownName(key.revision), "\" ");
}

absl::Status Corrupt(const EncodingKey& key, absl::string_view what) {
  return core::StoreCorruptError(
      absl::StrCat(Shown(key), what, "; put it again or delete it"));
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

}  // namespace

SqlEncodingStore::SqlEncodingStore(std::shared_ptr<SqlDatabase> database)
    : database_(std::move(database)) {}

absl::StatusOr<StoredEncoding> SqlEncodingStore::Get(const EncodingKey& key) {
  absl::StatusOr<Row> row = Read(key);
  if (!row.ok()) return row.status();
  return std::move(row->stored);
}

absl::StatusOr<StoredEncoding> SqlEncodingStore::Put(
    const EncodingKey& key, std::shared_ptr<const core::Encoding> encoding,
    const Precondition& precondition) {
  constexpr absl::string_view kWhat = "cannot put an encoding";
  v1::Encoding message;
  EncodingToProto(*encoding, &message);
  const std::string body = message.SerializeAsString();
  RowHead head;
  head.format = static_cast<int64_t>(encoding->format);
  head.scale_count = static_cast<int64_t>(encoding->scale.size());
  uint64_t checksum = 0;

  const auto put = [&](SqlConnection& connection) -> absl::Status {
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
          connection.Prepare(kSelectReplaced);
      row->BindKey(key);
      absl::StatusOr<bool> found = row->Step(kWhat);
      if (!found.ok()) return found.status();
      if (*found) replaced = {true, std::string(row->Bytes(0)), row->Int(1)};
    }
    absl::StatusOr<int64_t> generation = connection.NextGeneration();
    if (!generation.ok()) return generation.status();
    head.generation = *generation;
    head.update_time_us = absl::ToUnixMicros(absl::Now());
    checksum = Checksum(key, head, body);
    absl::Status status;
    {
      const std::unique_ptr<SqlStatement> row = connection.Prepare(kUpsert);
      row->BindKey(key);
      row->BindInt(4, head.generation);
      row->BindInt(5, head.update_time_us);
      row->BindInt(6, head.format);
      row->BindInt(7, head.scale_count);
      row->BindInt(8, static_cast<int64_t>(checksum));
      row->BindBytes(9, body);
      row->BindText(10, account.principal);
      status = row->Step(kWhat).status();
    }
    if (status.ok()) {
      status =
          PutHeadChecksum(connection, key, HeadChecksum(key, head, checksum));
    }
    if (status.ok()) {
      status = CheckQuotas(connection, account, replaced,
                           static_cast<int64_t>(body.size()));
    }
    return status.ok() ? connection.Announce() : status;
  };
  if (absl::Status s = database_->Write(put); !s.ok()) return s;
  StoredEncoding stored;
  stored.encoding = std::move(encoding);
  stored.etag = MakeEtag(head.generation, checksum);
  stored.generation = head.generation;
  stored.update_time = absl::FromUnixMicros(head.update_time_us);
  return stored;
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
      if (!*found) return NotFound(key);
      const std::string etag = EtagOf(*row);
      if (!precondition.if_match.empty() && etag != precondition.if_match) {
        return core::EtagMismatchError(precondition.if_match, etag);
      }
    }
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kDelete);
    row->BindKey(key);
    absl::Status status = row->Step(kWhat).status();
    return status.ok() ? connection.Announce() : status;
  });
}

absl::StatusOr<SqlEncodingStore::Row> SqlEncodingStore::Read(
    const EncodingKey& key) {
  Row row;
  v1::Encoding message;
  const auto read = [&](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> select = connection.Prepare(kSelect);
    select->BindKey(key);
    absl::StatusOr<bool> found = select->Step("cannot read an encoding");
    if (absl::IsDataLoss(found.status())) {
      return core::StoreCorruptError(
          absl::StrCat(Shown(key),
                       "stands on a damaged page of the database; restore the "
                       "store from its backup"));
    }
    if (!found.ok()) return found.status();
    if (!*found) return NotFound(key);
    const RowHead head = HeadOf(*select, 0);
    const uint64_t checksum = static_cast<uint64_t>(select->Int(4));
    const absl::string_view body = select->Bytes(5);
    if (checksum != Checksum(key, head, body)) {
      return Corrupt(key, "fails its checksum");
    }
    if (!message.ParseFromArray(body.data(), static_cast<int>(body.size()))) {
      return Corrupt(key, "does not decode");
    }
    row.stored.generation = head.generation;
    row.stored.update_time = absl::FromUnixMicros(head.update_time_us);
    row.stored.etag = MakeEtag(head.generation, checksum);
    row.head_checksum = HeadChecksum(key, head, checksum);
    return absl::OkStatus();
  };
  if (absl::Status s = database_->Read(read); !s.ok()) return s;
  absl::StatusOr<core::Encoding> encoding = EncodingFromProto(message);
  if (!encoding.ok()) {
    return Corrupt(key,
                   absl::StrCat("is invalid: ", encoding.status().message()));
  }
  row.stored.encoding =
      std::make_shared<const core::Encoding>(*std::move(encoding));
  return row;
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
    const RowHead head = HeadOf(row, 1);
    const auto checksum = static_cast<uint64_t>(row.Int(5));
    entry.stored.generation = head.generation;
    entry.stored.update_time = absl::FromUnixMicros(head.update_time_us);
    entry.format = static_cast<core::NumberFormat>(head.format);
    entry.scale_count = head.scale_count;
    entry.stored.etag = MakeEtag(head.generation, checksum);
    return static_cast<uint64_t>(row.Int(6)) ==
           HeadChecksum(key_of(entry), head, checksum);
  };
  absl::Status status = database_->Read([&](SqlConnection& connection) {
    return select(kListEncodings, connection, read_head);
  });
  // A damaged page is no reason to keep the other rows back.
  if (absl::IsDataLoss(status)) {
    status = database_->Read([&](SqlConnection& connection) {
      return select(kListNames, connection,
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
    absl::StatusOr<Row> row = Read(key_of(entry));
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
        connection.Prepare(kListRevisions);
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
      const std::unique_ptr<SqlStatement> row = connection.Prepare(kListKeys);
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
    if (keys.empty()) return count;
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
}

absl::optional<int64_t> SqlEncodingStore::ForeignVersion() {
  return database_->ForeignVersion();
}

absl::Status SqlEncodingStore::Ping() { return database_->Ping(); }

}  // namespace quantd::server
