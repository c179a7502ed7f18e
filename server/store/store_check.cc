#include "server/store/store_check.h"

#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "server/store/sql_encoding_store.h"
#include "server/store/sql_statistics_store.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

// Sets whose counts are not those of their rows, with a revision that has the
// set.
constexpr char kWrongCounts[] =
    "SELECT COALESCE(MAX(model), ''), COALESCE(MAX(revision), ''), "
    "CAST(SUM(counted) AS BIGINT), counts.set_id FROM ("
    "SELECT set_id, row_count AS counted FROM set_counts "
    "UNION ALL SELECT set_id, -COUNT(*) FROM encodings GROUP BY set_id "
    "UNION ALL SELECT set_id, -COUNT(*) FROM statistics GROUP BY set_id"
    ") AS counts LEFT JOIN row_sets ON row_sets.set_id = counts.set_id "
    "WHERE counts.set_id NOT IN (SELECT set_id FROM lost_sets) "
    "GROUP BY counts.set_id HAVING SUM(counted) <> 0 "
    "ORDER BY counts.set_id";

absl::Status CheckCounts(SqlDatabase& database,
                         absl::FunctionRef<void(absl::string_view)> tell) {
  return database.Read([&](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kWrongCounts);
    while (true) {
      absl::StatusOr<bool> found = row->Step("cannot compare counts");
      if (!found.ok()) return found.status();
      if (!*found) return absl::OkStatus();
      tell(absl::StrCat("the counts of set ", row->Int(3), ", of model \"",
                        ShownName(row->Bytes(0)), "\", revision \"",
                        ShownName(row->Bytes(1)), "\", are beyond its rows by ",
                        row->Int(2)));
    }
  });
}

}  // namespace

absl::StatusOr<StoreCheck> CheckStore(
    std::shared_ptr<SqlDatabase> database,
    absl::FunctionRef<void(absl::string_view line)> tell) {
  StoreCheck check;
  const auto damaged = [&](absl::string_view line) {
    ++check.damaged;
    tell(line);
  };
  const auto damaged_row = [&](const absl::Status& status) {
    damaged(core::ErrorText(status));
  };
  // A place that the database can't read on from is damaged; the rest is still
  // read.
  const auto settle = [&](const absl::Status& status) {
    if (!absl::IsDataLoss(status)) return status;
    damaged_row(status);
    return absl::OkStatus();
  };
  absl::StatusOr<int64_t> count = SqlEncodingStore(database).Check(damaged_row);
  if (absl::Status s = settle(count.status()); !s.ok()) return s;
  check.encodings = count.value_or(0);
  // Nothing is written that could be too large.
  count = SqlStatisticsStore(database, std::numeric_limits<int64_t>::max())
              .Check(damaged_row);
  if (absl::Status s = settle(count.status()); !s.ok()) return s;
  check.statistics = count.value_or(0);
  absl::Status status = settle(CheckCounts(*database, damaged));
  if (!status.ok()) return status;
  status = settle(database->CheckFile(damaged));
  if (!status.ok()) return status;
  return check;
}

}  // namespace quantd::server
