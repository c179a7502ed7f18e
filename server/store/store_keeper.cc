#include "server/store/store_keeper.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/store/sql_usage.h"

namespace quantd::server {
namespace {

constexpr char kNextModel[] =
    "SELECT model FROM revision_counts WHERE model > $1 ORDER BY model LIMIT 1";
constexpr char kListRevisions[] =
    "SELECT revision, MAX(update_time_us), CAST(SUM(bytes) AS BIGINT), "
    "CAST(SUM(encodings + statistics) AS BIGINT) FROM revision_counts "
    "WHERE model = $1 GROUP BY revision ORDER BY revision";

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
  const auto read = [&](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(kListRevisions);
    row->BindText(1, model);
    while (true) {
      absl::StatusOr<bool> found = row->Step("cannot list revisions");
      if (!found.ok()) return found.status();
      if (!*found) return absl::OkStatus();
      revisions.push_back({std::string(model),
                           std::string(row->Bytes(0)),
                           absl::FromUnixMicros(row->Int(1)),
                           {row->Int(2), row->Int(3)}});
    }
  };
  if (absl::Status s = database_->Read(read); !s.ok()) return s;
  return revisions;
}

}  // namespace quantd::server
