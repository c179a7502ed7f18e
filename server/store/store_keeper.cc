#include "server/store/store_keeper.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "server/store/encoding_pieces.h"
#include "server/store/row_sets.h"
#include "server/store/sql_usage.h"
#include "server/store/statistics_pieces.h"

namespace quantd::server {
namespace {

constexpr char kNextModel[] =
    "SELECT model FROM row_sets WHERE model > $1 ORDER BY model LIMIT 1";
constexpr char kLoseStaged[] =
    "DELETE FROM staged_contents WHERE content_id = ("
    "SELECT content_id FROM staged_contents WHERE touch_time_us < $1 "
    "ORDER BY content_id LIMIT 1) RETURNING content_id";
constexpr char kNextContent[] =
    "SELECT content_id FROM lost_contents ORDER BY content_id LIMIT 1";
constexpr char kFreePieces[] =
    "DELETE FROM encoding_pieces WHERE content_id = $1 AND piece IN ("
    "SELECT piece FROM encoding_pieces WHERE content_id = $1 LIMIT 4) "
    "RETURNING piece";
constexpr char kFreedContent[] =
    "DELETE FROM lost_contents WHERE content_id = $1";
constexpr char kRevisionOfSet[] =
    "SELECT model, revision FROM row_sets WHERE set_id = $1";
constexpr char kNextSet[] =
    "SELECT set_id FROM lost_sets WHERE set_id > $1 ORDER BY set_id LIMIT 1";
// But not those of a set that a revision has.
constexpr char kFreeEncodings[] =
    "DELETE FROM encodings WHERE set_id = $1 AND tensor IN ("
    "SELECT tensor FROM encodings WHERE set_id = $1 LIMIT 500) "
    "AND NOT EXISTS (SELECT 1 FROM row_sets WHERE set_id = $1) "
    "RETURNING slot";
constexpr char kFreeStatisticsRows[] =
    "DELETE FROM statistics WHERE set_id = $1 AND (tensor, source) IN ("
    "SELECT tensor, source FROM statistics WHERE set_id = $1 LIMIT 500) "
    "AND NOT EXISTS (SELECT 1 FROM row_sets WHERE set_id = $1) "
    "RETURNING slot";
constexpr int kRowsPerStep = 500;
constexpr char kFreedSet[] = "DELETE FROM lost_sets WHERE set_id = $1";

constexpr absl::string_view kFreeWhat = "cannot free what was deleted";
// Name that is locked, so that of several replicas one frees at a time: another
// one would take rows that wait to be deleted for freed. No scope has that
// name.
constexpr absl::string_view kFreeing = "\nfreeing";
// Pieces that a step frees; each has up to a MiB.
constexpr int kPiecesPerStep = 8;

// How many rows a statement answers.
absl::StatusOr<int> CountRows(SqlStatement* row) {
  int count = 0;
  while (true) {
    absl::StatusOr<bool> found = row->Step(kFreeWhat);
    if (!found.ok()) return found.status();
    if (!*found) return count;
    ++count;
  }
}

// Gives up one staged content that is not heard of; false if there is none.
absl::StatusOr<bool> LoseStaged(SqlConnection& connection,
                                absl::Duration staged_age) {
  int64_t id = 0;
  {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kLoseStaged);
    row->BindInt(1, absl::ToUnixMicros(absl::Now() - staged_age));
    absl::StatusOr<bool> found = row->Step(kFreeWhat);
    if (!found.ok() || !*found) return found;
    id = row->Int(0);
  }
  absl::Status status = LoseContent(connection, id, kFreeWhat);
  if (!status.ok()) return status;
  return true;
}

// Frees up to four pieces of the first content that was lost. Answers how many;
// none if there is no such content.
absl::StatusOr<absl::optional<int>> FreeContent(SqlConnection& connection) {
  int64_t id = 0;
  {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kNextContent);
    absl::StatusOr<bool> found = row->Step(kFreeWhat);
    if (!found.ok()) return found.status();
    if (!*found) return absl::optional<int>();
    id = row->Int(0);
  }
  absl::StatusOr<int> count = 0;
  {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kFreePieces);
    row->BindInt(1, id);
    count = CountRows(row.get());
    if (!count.ok()) return count.status();
  }
  if (*count < 4) {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kFreedContent);
    row->BindInt(1, id);
    if (absl::Status s = row->Step(kFreeWhat).status(); !s.ok()) return s;
  }
  return absl::optional<int>(*count);
}

// Frees pieces of one source of statistics, like FreeContent. Answers how many;
// none if there is no such source.
absl::StatusOr<absl::optional<int>> FreeStatistics(SqlConnection& connection,
                                                   absl::Time abandoned_time) {
  const absl::StatusOr<absl::optional<LostSource>> lost =
      NextFreeableSource(&connection, abandoned_time);
  if (!lost.ok()) return lost.status();
  if (!lost->has_value()) return absl::optional<int>();
  const auto& [set_id, tensor, source] = **lost;
  absl::optional<EncodingKey> key;
  {
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(kRevisionOfSet);
    row->BindInt(1, set_id);
    absl::StatusOr<bool> found = row->Step(kFreeWhat);
    if (!found.ok()) return found.status();
    if (*found) {
      key.emplace(EncodingKey{std::string(row->Bytes(0)),
                              std::string(row->Bytes(1)), tensor});
    }
  }
  if (key.has_value()) {
    // Nobody writes or deletes them meanwhile. In a lost set nobody does.
    absl::Status status = connection.LockSource(*key, source);
    if (status.ok()) status = connection.LockTensor(*key);
    if (!status.ok()) return status;
  }
  const absl::StatusOr<int> count =
      FreeStatisticsPieces(&connection, set_id, tensor, source, abandoned_time);
  if (!count.ok()) return count.status();
  if (*count < kPiecesPerTransaction) {
    absl::Status status =
        ForgetFreedStatistics(&connection, set_id, tensor, source);
    if (!status.ok()) return status;
  }
  return absl::optional<int>(*count);
}

// Frees rows of a set that was lost.
absl::Status FreeRows(SqlConnection& connection, int64_t set_id) {
  int most = 0;
  for (const char* sql : {kFreeEncodings, kFreeStatisticsRows}) {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(sql);
    row->BindInt(1, set_id);
    const absl::StatusOr<int> count = CountRows(row.get());
    if (!count.ok()) return count.status();
    most = std::max(most, *count);
  }
  if (most == kRowsPerStep) return absl::OkStatus();
  const std::unique_ptr<SqlStatement> row = connection.Prepare(kFreedSet);
  row->BindInt(1, set_id);
  return row->Step(kFreeWhat).status();
}

}  // namespace

StoreKeeper::StoreKeeper(std::shared_ptr<SqlDatabase> database)
    : database_(std::move(database)) {}

absl::StatusOr<Usage> StoreKeeper::ReadUsage(absl::string_view scope) {
  Usage usage;
  const auto read = [&](SqlConnection& connection) -> absl::Status {
    absl::StatusOr<Usage> found = server::ReadUsage(connection, scope);
    if (found.ok()) usage = *found;
    return found.status();
  };
  if (absl::Status s = database_->Read(read); !s.ok()) return s;
  return usage;
}

absl::StatusOr<std::string> StoreKeeper::NextModel(absl::string_view after) {
  std::string model;
  const auto read = [&](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kNextModel);
    row->BindText(1, after);
    absl::StatusOr<bool> found = row->Step("cannot list models");
    if (found.ok() && *found) model = std::string(row->Bytes(0));
    return found.status();
  };
  if (absl::Status s = database_->Read(read); !s.ok()) return s;
  return model;
}

absl::StatusOr<std::vector<RevisionUsage>> StoreKeeper::ListRevisions(
    absl::string_view model) {
  std::vector<RevisionUsage> revisions;
  const auto visit = [&](const CountedRowSet& set) {
    if (revisions.empty() || revisions.back().revision != set.revision) {
      revisions.push_back({std::string(model), set.revision, {}, {}});
    }
    RevisionUsage& revision = revisions.back();
    revision.error.Update(set.error);
    revision.update_time = std::max(revision.update_time,
                                    absl::FromUnixMicros(set.update_time_us));
    revision.usage.bytes += set.usage.bytes;
    revision.usage.rows += set.usage.rows;
    return true;
  };
  absl::Status status = ListRowSets(*database_, {model, "", ""}, visit);
  if (!status.ok()) return status;
  return revisions;
}

absl::StatusOr<DatabaseSize> StoreKeeper::ReadSize() {
  return database_->Size();
}

absl::StatusOr<bool> StoreKeeper::FreeStep(absl::Duration staged_age) {
  absl::StatusOr<bool> is_more = FreeSetStep();
  if (!is_more.ok() || *is_more) return is_more;
  const auto free = [&](SqlConnection& connection) -> absl::Status {
    if (absl::Status s = connection.LockName(kFreeing); !s.ok()) return s;
    int count = 0;
    is_more = true;
    const absl::StatusOr<bool> lost = LoseStaged(connection, staged_age);
    if (!lost.ok() || *lost) return lost.status();
    // Sources lock others: one in a step.
    absl::StatusOr<absl::optional<int>> freed =
        FreeStatistics(connection, absl::Now() - staged_age);
    if (!freed.ok() || freed->has_value()) return freed.status();
    // Contents without pieces take a step as well.
    for (int i = 0; i < kPiecesPerStep && count < kPiecesPerStep; ++i) {
      freed = FreeContent(connection);
      if (!freed.ok()) return freed.status();
      is_more = freed->has_value();
      if (!*is_more) break;
      count += **freed;
    }
    return absl::OkStatus();
  };
  if (absl::Status s = database_->WriteToFree(free); !s.ok()) return s;
  return is_more;
}

absl::StatusOr<bool> StoreKeeper::FreeSetStep() {
  absl::optional<int64_t> set_id;
  const auto find = [&](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kNextSet);
    row->BindInt(1, passed_set_);
    const absl::StatusOr<bool> found = row->Step(kFreeWhat);
    if (found.ok() && *found) set_id = row->Int(0);
    return found.status();
  };
  if (absl::Status s = database_->Read(find); !s.ok()) return s;
  if (!set_id.has_value()) {
    passed_set_ = 0;
    return false;
  }
  const absl::Status status =
      database_->WriteToFree([&](SqlConnection& connection) -> absl::Status {
        absl::Status locked = connection.LockName(kFreeing);
        return locked.ok() ? FreeRows(connection, *set_id) : locked;
      });
  // A set on a damaged page keeps nobody from the others.
  if (absl::IsDataLoss(status)) {
    passed_set_ = *set_id;
  } else if (!status.ok()) {
    return status;
  }
  return true;
}

absl::StatusOr<bool> StoreKeeper::Shrink() { return database_->Shrink(); }

}  // namespace quantd::server
