// Which rows a revision has.
//
// Rows of encodings and of statistics carry the id of a set, and a revision has
// a set of each kind. Publishing gives a revision the set of another one, and
// deleting takes a set away: both take as long for 60,000 rows as for ten. A
// set that no revision has is lost; StoreKeeper frees its rows in steps.

#ifndef QUANTD_SERVER_STORE_ROW_SETS_H_
#define QUANTD_SERVER_STORE_ROW_SETS_H_

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

// As the database has them.
enum class RowKind { kEncodings = 0, kStatistics = 1 };

// The ids of a revision's sets in SQL; parameters 1 and 2 are its model and its
// name.
#define QUANTD_ENCODING_SET                       \
  "(SELECT set_id FROM row_sets WHERE model = $1" \
  " AND revision = $2 AND kind = 0)"
#define QUANTD_STATISTICS_SET                     \
  "(SELECT set_id FROM row_sets WHERE model = $1" \
  " AND revision = $2 AND kind = 1)"

struct RowSet {
  int64_t id = 0;
  // Of the last time that it was published; 0 if it never was. No row of it is
  // older.
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

struct ListedRowSet {
  std::string model;
  std::string revision;
  // Or why it is not known: STORE_CORRUPT.
  absl::StatusOr<RowSet> set;
};

// Calls `visit` with every set of a kind that is known, and `damaged` with why
// one is not.
absl::Status ForEachRowSet(
    SqlDatabase& database, RowKind kind,
    absl::FunctionRef<void(const absl::Status&)> damaged,
    absl::FunctionRef<absl::Status(const ListedRowSet&)> visit);

// In a transaction that writes, as all of the following. An empty one where the
// revision has none.
absl::StatusOr<RowSet> FindOrAddRowSet(SqlConnection& connection,
                                       absl::string_view model,
                                       absl::string_view revision,
                                       RowKind kind);

// The revision is locked, see SqlConnection::LockRevisions.
absl::Status AssignRowSet(SqlConnection& connection, absl::string_view model,
                          absl::string_view revision, RowKind kind,
                          const RowSet& set);

// The same.
absl::Status UnassignRowSet(SqlConnection& connection, absl::string_view model,
                            absl::string_view revision, RowKind kind);

// Notes that nobody has the set any more.
absl::Status LoseRowSet(SqlConnection& connection, int64_t set_id,
                        RowKind kind);

// By principal and slot.
using SlotUsage = std::map<std::pair<std::string, int64_t>, Usage>;

// Adds what a set has, times `factor`.
absl::Status AddSetUsage(SqlConnection& connection, int64_t set_id, int factor,
                         SlotUsage* usage);

// Adds to what the scopes of a model hold; as a transaction's last step,
// because others wait for it.
absl::Status ChangeUsage(SqlConnection& connection, absl::string_view model,
                         const SlotUsage& change);

// Counts the rows of a set of encodings again.
absl::Status RecountSet(SqlConnection& connection, int64_t set_id);

// Number of rows.
int64_t RowCount(const SlotUsage& usage);

// Where what is written of that tensor is counted: writers of different tensors
// rarely wait for each other.
int64_t SlotOf(absl::string_view tensor);

// Bytes of the names of a key, for which its row is charged as for its
// contents.
int64_t NameBytes(const EncodingKey& key);

// Unassigns a revision's set if it has no rows.
absl::Status UnassignEmptyRowSet(SqlDatabase& database, absl::string_view model,
                                 absl::string_view revision, RowKind kind);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_ROW_SETS_H_
