// The sets of rows that revisions have.
//
// Rows of encodings and of statistics carry the id of a set, and a revision has
// a set of each kind. Publishing gives a revision the set of another one, and
// deleting takes a set away: both take as long for 60,000 rows as for ten. A
// set that no revision has is lost; StoreKeeper frees its rows in steps.
//
// A revision may have a second set of encodings; no tensor is in both. Where
// publishing keeps encodings of other tensors, it first divides those of the
// target between two sets, in steps that change nothing for readers: one set
// has what stays, the other one what is replaced. Then it takes that away.

#ifndef QUANTD_SERVER_STORE_ROW_SETS_H_
#define QUANTD_SERVER_STORE_ROW_SETS_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "server/store/encoding_store.h"
#include "server/store/sql_database.h"
#include "server/wire/encoding_key.h"

namespace quantd::server {

// The values are those in the database. kOtherEncodings is the kind of a
// revision's second set of encodings. Only a revision with a first set has it,
// and both sets have the same generation and time.
enum class RowKind { kEncodings = 0, kStatistics = 1, kOtherEncodings = 2 };
inline constexpr std::array kEncodingKinds = {RowKind::kEncodings,
                                              RowKind::kOtherEncodings};

// The ids of a revision's sets in SQL; parameters 1 and 2 are its model and its
// name.
#define QUANTD_ENCODING_SET                       \
  "(SELECT set_id FROM row_sets WHERE model = $1" \
  " AND revision = $2 AND kind = 0)"
#define QUANTD_OTHER_ENCODING_SET                 \
  "(SELECT set_id FROM row_sets WHERE model = $1" \
  " AND revision = $2 AND kind = 2)"
// For IN.
#define QUANTD_ENCODING_SETS \
  "(" QUANTD_ENCODING_SET ", " QUANTD_OTHER_ENCODING_SET ")"
#define QUANTD_STATISTICS_SET                     \
  "(SELECT set_id FROM row_sets WHERE model = $1" \
  " AND revision = $2 AND kind = 1)"

struct RowSet {
  int64_t id = 0;
  // Generation and time of the last time that it was published; 0 if it never
  // was. Rows that were put before count as put then.
  int64_t generation = 0;
  int64_t update_time_us = 0;
};

// Errors of all functions: STORE_UNAVAILABLE, STORE_CORRUPT.

// From four columns, the first of which is `column`: set_id, generation,
// update_time_us, checksum.
absl::StatusOr<RowSet> ReadRowSet(const SqlStatement& row, int column,
                                  absl::string_view model,
                                  absl::string_view revision, RowKind kind);

absl::StatusOr<absl::optional<RowSet>> FindRowSet(SqlConnection& connection,
                                                  absl::string_view model,
                                                  absl::string_view revision,
                                                  RowKind kind);
// Finds the set of a revision that is to be deleted, even if its checksum
// fails. No other revision has the set.
absl::StatusOr<absl::optional<RowSet>> FindRowSetToDelete(
    SqlConnection& connection, absl::string_view model,
    absl::string_view revision, RowKind kind);

// True if there are rows in a set.
absl::StatusOr<bool> HasRows(SqlConnection& connection, int64_t set_id,
                             RowKind kind);

// A set and what is counted of it.
struct CountedRowSet {
  // Any bytes where the row is damaged.
  std::string model;
  std::string revision;
  RowKind kind{};
  // STORE_CORRUPT where what tells of the set or counts its rows is damaged;
  // what follows is empty then.
  absl::Status error;
  Usage usage;
  // Time of the newest row, or when the set was published.
  int64_t update_time_us = 0;
};

// Range of the sets to list.
struct RowSetRange {
  // The model that has them; empty for all models.
  absl::string_view model;
  // After this revision of the model, or this model of all.
  absl::string_view after;
  // With all models: before this one, unless that is empty.
  absl::string_view before;
};

// Calls `visit` with each set that has rows or is damaged, in order of model,
// revision and kind, until it answers false.
absl::Status ListRowSets(SqlDatabase& database, const RowSetRange& range,
                         absl::FunctionRef<bool(const CountedRowSet&)> visit);

struct ListedRowSet {
  std::string model;
  std::string revision;
  int64_t set_id = 0;
};

// Calls `visit` with every set of a kind that is known, and `damaged` with why
// one is not. Unless the kind is that of second sets, it also tells `damaged`
// of rows that no revision has and nobody is to free.
absl::Status CheckRowSets(
    SqlDatabase& database, RowKind kind,
    absl::FunctionRef<void(const absl::Status&)> damaged,
    absl::FunctionRef<absl::Status(const ListedRowSet&)> visit);

// The functions that follow are for a transaction that writes.

// An empty one where the revision has none.
absl::StatusOr<RowSet> FindOrAddRowSet(SqlConnection& connection,
                                       absl::string_view model,
                                       absl::string_view revision,
                                       RowKind kind);

// The revision is locked, see SqlConnection::LockRevisions.
absl::Status AssignRowSet(SqlConnection& connection, absl::string_view model,
                          absl::string_view revision, RowKind kind,
                          const RowSet& set);

// The revision is locked, see SqlConnection::LockRevisions.
absl::Status UnassignRowSet(SqlConnection& connection, absl::string_view model,
                            absl::string_view revision, RowKind kind);

// Notes that nobody has the set any more.
absl::Status LoseRowSet(SqlConnection& connection, int64_t set_id);

// By principal and slot.
using SlotUsage = std::map<std::pair<std::string, int64_t>, Usage>;

// Counts of what a set has.
absl::StatusOr<SlotUsage> ReadSetUsage(SqlConnection& connection,
                                       int64_t set_id);

// Adds to what the scopes of a model hold; as a transaction's last step,
// because others wait for it.
absl::Status ChangeUsage(SqlConnection& connection, absl::string_view model,
                         const SlotUsage& change);

// Adds to what a set has. `update_time_us` is that of the newest row that came.
absl::Status ChangeSetUsage(SqlConnection& connection, int64_t set_id,
                            const SlotUsage& change, int64_t update_time_us);

// Adds `usage` times `factor`.
void AddUsage(const SlotUsage& usage, int factor, SlotUsage* sum);

// Number of rows.
int64_t RowCount(const SlotUsage& usage);

// Slot in which what is written of that tensor is counted: writers of different
// tensors rarely wait for each other.
int64_t SlotOf(absl::string_view tensor);

// Bytes of the names that a row is charged for, beside its contents. Not of the
// revision, which may become another one.
int64_t NameBytes(const EncodingKey& key);

// In transactions of its own: unassigns a revision's set, of encodings both, if
// there are no rows. What stays where that fails is in nobody's way.
void UnassignEmptyRowSet(SqlDatabase& database, absl::string_view model,
                         absl::string_view revision, RowKind kind);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_ROW_SETS_H_
