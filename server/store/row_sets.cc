#include "server/store/row_sets.h"

#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "server/store/row_checksum.h"
#include "server/store/statistics_pieces.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

constexpr int64_t kSlotCount = 16;
// U+10FFFF, after every name.
constexpr absl::string_view kAfterNames = "\xf4\x8f\xbf\xbf";

constexpr char kSelectRowSet[] =
    "SELECT set_id, generation, update_time_us, checksum FROM row_sets "
    "WHERE model = $1 AND revision = $2 AND kind = $3";
// With what is counted, and whether there is a row: a set that counts none has
// none, unless its counts are damaged.
#define QUANTD_SELECT_COUNTED                                                \
  "SELECT model, revision, kind, set_id, generation, update_time_us, "       \
  "checksum, (SELECT CAST(SUM(row_count) AS BIGINT) FROM set_counts "        \
  "WHERE set_counts.set_id = row_sets.set_id), "                             \
  "(SELECT CAST(SUM(bytes) AS BIGINT) FROM set_counts "                      \
  "WHERE set_counts.set_id = row_sets.set_id), "                             \
  "(SELECT MAX(set_counts.update_time_us) FROM set_counts "                  \
  "WHERE set_counts.set_id = row_sets.set_id), "                             \
  "(SELECT COUNT(*) FROM (SELECT 1 FROM encodings "                          \
  "WHERE encodings.set_id = row_sets.set_id LIMIT 1) AS first_encoding) + "  \
  "(SELECT COUNT(*) FROM (SELECT 1 FROM statistics "                         \
  "WHERE statistics.set_id = row_sets.set_id LIMIT 1) AS first_statistics) " \
  "FROM row_sets WHERE "
#define QUANTD_PAGE_OF_SETS " ORDER BY model, revision, kind LIMIT 200"
constexpr char kPageOfSets[] = QUANTD_SELECT_COUNTED
    "(model, revision, kind) > ($1, $2, $3)" QUANTD_PAGE_OF_SETS;
constexpr char kPageOfSetsBefore[] = QUANTD_SELECT_COUNTED
    "(model, revision, kind) > ($1, $2, $3) "
    "AND model < $4" QUANTD_PAGE_OF_SETS;
constexpr char kPageOfSetsOfModel[] = QUANTD_SELECT_COUNTED
    "model = $1 AND (revision, kind) > ($2, $3)" QUANTD_PAGE_OF_SETS;
constexpr char kCountedSet[] =
    QUANTD_SELECT_COUNTED "model = $1 AND revision = $2 AND kind = $3";
#undef QUANTD_PAGE_OF_SETS
#undef QUANTD_SELECT_COUNTED
// These are from the index of the key, whatever is damaged beside that.
constexpr char kNextSetOfAnyKind[] =
    "SELECT model, revision, kind FROM row_sets "
    "WHERE (model, revision, kind) > ($1, $2, $3) "
    "ORDER BY model, revision, kind LIMIT 1";
constexpr char kNextRowSet[] =
    "SELECT model, revision FROM row_sets "
    "WHERE (model, revision) > ($1, $2) AND kind = $3 "
    "ORDER BY model, revision LIMIT 1";
// Another transaction may have added it meanwhile.
constexpr char kAddRowSet[] =
    "INSERT INTO row_sets (model, revision, kind, set_id, generation, "
    "update_time_us, checksum) VALUES ($1, $2, $3, $4, $5, $6, $7) "
    "ON CONFLICT (model, revision, kind) DO NOTHING";
constexpr char kUnassignRowSet[] =
    "DELETE FROM row_sets WHERE model = $1 AND revision = $2 AND kind = $3";
constexpr char kLoseRowSet[] = "INSERT INTO lost_sets (set_id) VALUES ($1)";
constexpr char kHasEncodings[] =
    "SELECT slot FROM encodings WHERE set_id = $1 LIMIT 1";
constexpr char kHasStatistics[] =
    "SELECT slot FROM statistics WHERE set_id = $1 LIMIT 1";
constexpr char kListLostEncodings[] =
    "SELECT set_id, COUNT(*) FROM encodings "
    "WHERE set_id NOT IN (SELECT set_id FROM row_sets WHERE kind IN (0, 2)) "
    "AND set_id NOT IN (SELECT set_id FROM lost_sets) "
    "GROUP BY set_id ORDER BY set_id";
constexpr char kListLostStatistics[] =
    "SELECT set_id, COUNT(*) FROM statistics "
    "WHERE set_id NOT IN (SELECT set_id FROM row_sets WHERE kind = 1) "
    "AND set_id NOT IN (SELECT set_id FROM lost_sets) "
    "GROUP BY set_id ORDER BY set_id";
constexpr char kSelectSetCounts[] =
    "SELECT principal, slot, row_count, bytes FROM set_counts "
    "WHERE set_id = $1";
constexpr char kForgetSetCounts[] = "DELETE FROM set_counts WHERE set_id = $1";
constexpr char kChangeSetCounts[] =
    "INSERT INTO set_counts (set_id, principal, slot, row_count, bytes, "
    "update_time_us) VALUES ($1, $2, $3, $4, $5, $6) "
    "ON CONFLICT (set_id, principal, slot) DO UPDATE SET "
    "row_count = set_counts.row_count + excluded.row_count, "
    "bytes = set_counts.bytes + excluded.bytes, "
    "update_time_us = CASE "
    "WHEN set_counts.update_time_us < excluded.update_time_us "
    "THEN excluded.update_time_us ELSE set_counts.update_time_us END";
constexpr char kForgetEmptyCounts[] =
    "DELETE FROM set_counts WHERE set_id = $1 AND row_count = 0";
constexpr char kChangeUsage[] =
    "INSERT INTO usage_changes (model, principal, slot, row_count, bytes) "
    "VALUES ($1, $2, $3, $4, $5)";

constexpr absl::string_view kFindWhat = "cannot find a revision";
constexpr absl::string_view kListWhat = "cannot list revisions";
constexpr absl::string_view kChangeWhat = "cannot change a revision";

uint64_t ChecksumOf(absl::string_view model, absl::string_view revision,
                    RowKind kind, const RowSet& set) {
  const int64_t numbers[] = {static_cast<int64_t>(kind), set.id, set.generation,
                             set.update_time_us};
  return RowChecksum::Of(
      {model,
       revision,
       {reinterpret_cast<const char*>(numbers), sizeof(numbers)}});
}

void Bind(absl::string_view model, absl::string_view revision, RowKind kind,
          SqlStatement* row) {
  row->BindText(1, model);
  row->BindText(2, revision);
  row->BindInt(3, static_cast<int64_t>(kind));
}

absl::Status AddRowSet(SqlConnection& connection, absl::string_view model,
                       absl::string_view revision, RowKind kind,
                       const RowSet& set) {
  const std::unique_ptr<SqlStatement> row = connection.Prepare(kAddRowSet);
  Bind(model, revision, kind, row.get());
  row->BindInt(4, set.id);
  row->BindInt(5, set.generation);
  row->BindInt(6, set.update_time_us);
  row->BindInt(7, static_cast<int64_t>(ChecksumOf(model, revision, kind, set)));
  return row->Step(kChangeWhat).status();
}

// Without the check of the checksum unless `verifies`.
absl::StatusOr<absl::optional<RowSet>> SelectRowSet(SqlConnection& connection,
                                                    absl::string_view model,
                                                    absl::string_view revision,
                                                    RowKind kind,
                                                    bool verifies) {
  const std::unique_ptr<SqlStatement> row = connection.Prepare(kSelectRowSet);
  Bind(model, revision, kind, row.get());
  absl::StatusOr<bool> found = row->Step(kFindWhat);
  if (!found.ok()) return found.status();
  if (!*found) return absl::optional<RowSet>();
  absl::StatusOr<RowSet> set = ReadRowSet(*row, 0, model, revision, kind);
  if (set.ok()) return absl::optional<RowSet>(*set);
  if (verifies) return set.status();
  return absl::optional<RowSet>({row->Int(0), 0, 0});
}

// Key of a set in the order of lists.
using SetKey = std::tuple<std::string, std::string, int64_t>;

std::string ShownRevision(const CountedRowSet& set) {
  return absl::StrCat("revision \"", ShownName(set.revision), "\" of model \"",
                      ShownName(set.model), "\"");
}

// From a row of what is counted; none where the set has no rows.
absl::optional<CountedRowSet> ReadCounted(const SqlStatement& row) {
  CountedRowSet counted;
  counted.model = std::string(row.Bytes(0));
  counted.revision = std::string(row.Bytes(1));
  counted.kind = static_cast<RowKind>(row.Int(2));
  const absl::StatusOr<RowSet> set =
      ReadRowSet(row, 3, counted.model, counted.revision, counted.kind);
  counted.error = set.status();
  if (!set.ok()) return counted;
  const Usage usage{row.Int(8), row.Int(7)};
  const bool has_rows = row.Int(10) > 0;
  if (has_rows != (usage.rows > 0)) {
    counted.error = core::StoreCorruptError(absl::StrCat(
        "the counts of ", ShownRevision(counted),
        " are not those of its rows; export it, delete it and import it "
        "again"));
    return counted;
  }
  if (!has_rows) return absl::nullopt;
  counted.usage = usage;
  counted.update_time_us = std::max(set->update_time_us, row.Int(9));
  return counted;
}

// The statement of a page, or of the next key, after `last`.
std::unique_ptr<SqlStatement> SelectAfter(SqlConnection& connection,
                                          const char* sql, const SetKey& last) {
  std::unique_ptr<SqlStatement> row = connection.Prepare(sql);
  row->BindText(1, std::get<0>(last));
  row->BindText(2, std::get<1>(last));
  row->BindInt(3, std::get<2>(last));
  return row;
}

// Reads the next sets of a range after `last`, and moves that to the last of
// them; false if there is none.
absl::StatusOr<bool> ReadCountedPage(SqlConnection& connection,
                                     const RowSetRange& range, SetKey* last,
                                     std::vector<CountedRowSet>* page) {
  const SetKey before = *last;
  const std::unique_ptr<SqlStatement> row = SelectAfter(
      connection,
      !range.model.empty()
          ? kPageOfSetsOfModel
          : (range.before.empty() ? kPageOfSets : kPageOfSetsBefore),
      before);
  if (range.model.empty() && !range.before.empty()) {
    row->BindText(4, range.before);
  }
  bool is_there = false;
  while (true) {
    absl::StatusOr<bool> found = row->Step(kListWhat);
    if (!found.ok()) return found.status();
    if (!*found) return is_there;
    is_there = true;
    *last = {std::string(row->Bytes(0)), std::string(row->Bytes(1)),
             row->Int(2)};
    absl::optional<CountedRowSet> set = ReadCounted(*row);
    if (set.has_value()) page->push_back(*std::move(set));
  }
}

// Reads the next set alone, like ReadCountedPage, whatever is damaged beside
// its key.
absl::StatusOr<bool> ReadNextCounted(SqlConnection& connection,
                                     const RowSetRange& range, SetKey* last,
                                     std::vector<CountedRowSet>* page) {
  const SetKey before = *last;
  {
    const std::unique_ptr<SqlStatement> row =
        SelectAfter(connection, kNextSetOfAnyKind, before);
    absl::StatusOr<bool> found = row->Step(kListWhat);
    if (!found.ok() || !*found) return found;
    *last = {std::string(row->Bytes(0)), std::string(row->Bytes(1)),
             row->Int(2)};
  }
  const std::string& model = std::get<0>(*last);
  if (range.model.empty() ? !range.before.empty() && model >= range.before
                          : model != range.model) {
    return false;
  }
  const SetKey key = *last;
  const std::unique_ptr<SqlStatement> row =
      SelectAfter(connection, kCountedSet, key);
  absl::StatusOr<bool> found = row->Step(kListWhat);
  if (found.ok()) {
    // It was deleted in between.
    if (!*found) return true;
    absl::optional<CountedRowSet> set = ReadCounted(*row);
    if (set.has_value()) page->push_back(*std::move(set));
    return true;
  }
  if (!absl::IsDataLoss(found.status())) return found;
  CountedRowSet& set = page->emplace_back();
  std::tie(set.model, set.revision, std::ignore) = key;
  set.kind = static_cast<RowKind>(std::get<2>(key));
  set.error = core::StoreCorruptError(absl::StrCat(
      "what tells of ", ShownRevision(set),
      " stands on a damaged page of the database; restore the store from its "
      "backup"));
  return true;
}

// Rows of no revision, which nobody is to free either.
absl::Status TellLostRows(SqlDatabase& database, RowKind kind,
                          absl::FunctionRef<void(const absl::Status&)> tell) {
  if (kind == RowKind::kOtherEncodings) return absl::OkStatus();
  const bool is_of_encodings = kind == RowKind::kEncodings;
  return database.Read([&](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(
        is_of_encodings ? kListLostEncodings : kListLostStatistics);
    while (true) {
      absl::StatusOr<bool> found = row->Step(kFindWhat);
      if (!found.ok()) return found.status();
      if (!*found) return absl::OkStatus();
      tell(core::StoreCorruptError(
          absl::StrCat("the set ", row->Int(0), " has ", row->Int(1),
                       is_of_encodings ? " encodings" : " statistics",
                       " without a revision")));
    }
  });
}

}  // namespace

absl::StatusOr<RowSet> ReadRowSet(const SqlStatement& row, int column,
                                  absl::string_view model,
                                  absl::string_view revision, RowKind kind) {
  const RowSet set{row.Int(column), row.Int(column + 1), row.Int(column + 2)};
  if (static_cast<uint64_t>(row.Int(column + 3)) !=
      ChecksumOf(model, revision, kind, set)) {
    return core::StoreCorruptError(absl::StrCat(
        "what tells of revision \"", ShownName(revision), "\" of model \"",
        ShownName(model), "\" fails its checksum; delete the revision"));
  }
  return set;
}

absl::StatusOr<absl::optional<RowSet>> FindRowSet(SqlConnection& connection,
                                                  absl::string_view model,
                                                  absl::string_view revision,
                                                  RowKind kind) {
  return SelectRowSet(connection, model, revision, kind, /*verifies=*/true);
}

absl::StatusOr<absl::optional<RowSet>> FindRowSetToDelete(
    SqlConnection& connection, absl::string_view model,
    absl::string_view revision, RowKind kind) {
  return SelectRowSet(connection, model, revision, kind, /*verifies=*/false);
}

absl::StatusOr<bool> HasRows(SqlConnection& connection, int64_t set_id,
                             RowKind kind) {
  const std::unique_ptr<SqlStatement> row = connection.Prepare(
      kind == RowKind::kStatistics ? kHasStatistics : kHasEncodings);
  row->BindInt(1, set_id);
  return row->Step(kFindWhat);
}

absl::Status ListRowSets(SqlDatabase& database, const RowSetRange& range,
                         absl::FunctionRef<bool(const CountedRowSet&)> visit) {
  constexpr int64_t kLastKind = std::numeric_limits<int64_t>::max();
  SetKey last = range.model.empty()
                    ? SetKey(range.after, kAfterNames, kLastKind)
                    : SetKey(range.model, range.after, kLastKind);
  // A damaged page is no reason to keep the other sets back.
  bool one_by_one = false;
  std::vector<CountedRowSet> page;
  bool is_more = true;
  while (is_more) {
    const SetKey before = last;
    const auto read = [&](SqlConnection& connection) -> absl::Status {
      page.clear();
      last = before;
      absl::StatusOr<bool> found =
          one_by_one ? ReadNextCounted(connection, range, &last, &page)
                     : ReadCountedPage(connection, range, &last, &page);
      is_more = found.value_or(false);
      return found.status();
    };
    absl::Status status = database.Read(read);
    if (absl::IsDataLoss(status) && !std::exchange(one_by_one, true)) {
      last = before;
      is_more = true;
      continue;
    }
    if (!status.ok()) return status;
    // Otherwise it might never end.
    if (is_more && last <= before) {
      return core::StoreCorruptError(
          absl::StrCat(kListWhat,
                       ": the index of revisions is damaged; restore the store "
                       "from its backup"));
    }
    for (const CountedRowSet& set : page) {
      // Damaged names may come after all names.
      if (range.model.empty() && set.model == range.after) continue;
      if (!visit(set)) return absl::OkStatus();
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRowSets(
    SqlDatabase& database, RowKind kind,
    absl::FunctionRef<void(const absl::Status&)> damaged,
    absl::FunctionRef<absl::Status(const ListedRowSet&)> visit) {
  std::string model, revision;
  while (true) {
    bool is_there = false;
    const auto find = [&](SqlConnection& connection) -> absl::Status {
      const std::unique_ptr<SqlStatement> row = connection.Prepare(kNextRowSet);
      // A copy, because the names are bound and then read.
      const std::string after_model = model;
      const std::string after_revision = revision;
      Bind(after_model, after_revision, kind, row.get());
      absl::StatusOr<bool> found = row->Step(kFindWhat);
      if (!found.ok()) return found.status();
      is_there = *found;
      if (!is_there) return absl::OkStatus();
      model = std::string(row->Bytes(0));
      revision = std::string(row->Bytes(1));
      return absl::OkStatus();
    };
    if (absl::Status s = database.Read(find); !s.ok()) return s;
    if (!is_there) return TellLostRows(database, kind, damaged);
    absl::optional<RowSet> set;
    const auto read = [&](SqlConnection& connection) -> absl::Status {
      absl::StatusOr<absl::optional<RowSet>> found =
          FindRowSet(connection, model, revision, kind);
      if (found.ok()) set = *found;
      return found.status();
    };
    absl::Status status = database.Read(read);
    if (absl::IsDataLoss(status)) {
      damaged(status);
    } else if (status.ok() && set.has_value()) {
      status = visit({model, revision, set->id});
      if (!status.ok()) return status;
    } else if (!status.ok()) {
      return status;
    }
  }
}

absl::StatusOr<RowSet> FindOrAddRowSet(SqlConnection& connection,
                                       absl::string_view model,
                                       absl::string_view revision,
                                       RowKind kind) {
  while (true) {
    absl::StatusOr<absl::optional<RowSet>> found =
        FindRowSet(connection, model, revision, kind);
    if (!found.ok()) return found.status();
    if (found->has_value()) return **found;
    absl::StatusOr<int64_t> id = connection.NextGeneration();
    if (!id.ok()) return id.status();
    absl::Status status =
        AddRowSet(connection, model, revision, kind, RowSet{*id});
    if (!status.ok()) return status;
  }
}

absl::Status AssignRowSet(SqlConnection& connection, absl::string_view model,
                          absl::string_view revision, RowKind kind,
                          const RowSet& set) {
  absl::Status status = UnassignRowSet(connection, model, revision, kind);
  if (!status.ok()) return status;
  return AddRowSet(connection, model, revision, kind, set);
}

absl::Status UnassignRowSet(SqlConnection& connection, absl::string_view model,
                            absl::string_view revision, RowKind kind) {
  const std::unique_ptr<SqlStatement> row = connection.Prepare(kUnassignRowSet);
  Bind(model, revision, kind, row.get());
  return row->Step(kChangeWhat).status();
}

absl::Status LoseRowSet(SqlConnection& connection, int64_t set_id) {
  {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kLoseRowSet);
    row->BindInt(1, set_id);
    if (absl::Status s = row->Step(kChangeWhat).status(); !s.ok()) return s;
  }
  const std::unique_ptr<SqlStatement> row =
      connection.Prepare(kForgetSetCounts);
  row->BindInt(1, set_id);
  return row->Step(kChangeWhat).status();
}

absl::StatusOr<SlotUsage> ReadSetUsage(SqlConnection& connection,
                                       int64_t set_id) {
  const std::unique_ptr<SqlStatement> row =
      connection.Prepare(kSelectSetCounts);
  row->BindInt(1, set_id);
  SlotUsage usage;
  while (true) {
    absl::StatusOr<bool> found = row->Step(kFindWhat);
    if (!found.ok()) return found.status();
    if (!*found) return usage;
    usage[{std::string(row->Bytes(0)), row->Int(1)}] = {row->Int(3),
                                                        row->Int(2)};
  }
}

void AddUsage(const SlotUsage& usage, int factor, SlotUsage* sum) {
  for (const auto& [slot, of_slot] : usage) {
    (*sum)[slot].rows += factor * of_slot.rows;
    (*sum)[slot].bytes += factor * of_slot.bytes;
  }
}

absl::Status ChangeSetUsage(SqlConnection& connection, int64_t set_id,
                            const SlotUsage& change, int64_t update_time_us) {
  for (const auto& [key, usage] : change) {
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(kChangeSetCounts);
    row->BindInt(1, set_id);
    row->BindText(2, key.first);
    row->BindInt(3, key.second);
    row->BindInt(4, usage.rows);
    row->BindInt(5, usage.bytes);
    row->BindInt(6, update_time_us);
    if (absl::Status s = row->Step(kChangeWhat).status(); !s.ok()) return s;
  }
  const std::unique_ptr<SqlStatement> row =
      connection.Prepare(kForgetEmptyCounts);
  row->BindInt(1, set_id);
  return row->Step(kChangeWhat).status();
}

absl::Status ChangeUsage(SqlConnection& connection, absl::string_view model,
                         const SlotUsage& change) {
  // Slot by slot, as all do, so that nobody waits in a circle.
  for (int64_t slot = 0; slot < kSlotCount; ++slot) {
    for (const auto& [key, usage] : change) {
      if (key.second != slot || (usage.rows == 0 && usage.bytes == 0)) continue;
      const std::unique_ptr<SqlStatement> row =
          connection.Prepare(kChangeUsage);
      row->BindText(1, model);
      row->BindText(2, key.first);
      row->BindInt(3, slot);
      row->BindInt(4, usage.rows);
      row->BindInt(5, usage.bytes);
      if (absl::Status s = row->Step(kChangeWhat).status(); !s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

int64_t RowCount(const SlotUsage& usage) {
  int64_t count = 0;
  for (const auto& [key, of_slot] : usage) count += of_slot.rows;
  return count;
}

int64_t SlotOf(absl::string_view tensor) {
  return static_cast<int64_t>(XXH3_64bits(tensor.data(), tensor.size()) %
                              kSlotCount);
}

int64_t NameBytes(const EncodingKey& key) {
  return static_cast<int64_t>(key.model.size() + key.tensor.size());
}

void UnassignEmptyRowSet(SqlDatabase& database, absl::string_view model,
                         absl::string_view revision, RowKind kind) {
  std::vector<RowKind> kinds(kEncodingKinds.begin(), kEncodingKinds.end());
  if (kind == RowKind::kStatistics) kinds = {kind};
  const auto is_empty = [&](SqlConnection& connection) -> absl::StatusOr<bool> {
    bool is_there = false;
    for (const RowKind each : kinds) {
      absl::StatusOr<absl::optional<RowSet>> set =
          FindRowSet(connection, model, revision, each);
      if (!set.ok()) return set.status();
      if (!set->has_value()) continue;
      is_there = true;
      absl::StatusOr<bool> has = HasRows(connection, (*set)->id, each);
      if (has.ok() && !*has && each == RowKind::kStatistics) {
        // A source whose first pieces are written has no row yet.
        has = IsBeingWritten(&connection, (*set)->id);
      }
      if (!has.ok()) return has.status();
      if (*has) return false;
    }
    return is_there;
  };
  bool seems_empty = false;
  const auto look = [&](SqlConnection& connection) -> absl::Status {
    const absl::StatusOr<bool> empty = is_empty(connection);
    seems_empty = empty.value_or(false);
    return empty.status();
  };
  database.Read(look).IgnoreError();
  if (!seems_empty) return;
  // Others may be writing the first row again.
  const auto unassign = [&](SqlConnection& connection) -> absl::Status {
    absl::Status status =
        connection.LockRevisions(model, {std::string(revision)});
    if (!status.ok()) return status;
    const absl::StatusOr<bool> empty = is_empty(connection);
    if (!empty.ok() || !*empty) return empty.status();
    for (const RowKind each : kinds) {
      status = UnassignRowSet(connection, model, revision, each);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  };
  database.WriteToFree(unassign).IgnoreError();
}

}  // namespace quantd::server
