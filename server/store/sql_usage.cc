#include "server/store/sql_usage.h"

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

constexpr char kSelectUsage[] =
    "SELECT CAST(COALESCE(SUM(bytes), 0) AS BIGINT), "
    "CAST(COALESCE(SUM(row_count), 0) AS BIGINT) "
    "FROM usage_counts WHERE scope = $1";

}  // namespace

absl::StatusOr<Usage> ReadUsage(SqlConnection& connection,
                                absl::string_view scope) {
  const std::unique_ptr<SqlStatement> row = connection.Prepare(kSelectUsage);
  row->BindText(1, scope);
  absl::StatusOr<bool> found = row->Step("cannot read what is used");
  if (!found.ok()) return found.status();
  return Usage{row->Int(0), row->Int(1)};
}

absl::Status CheckQuotas(SqlConnection& connection, const WriteAccount& account,
                         const ReplacedRow& replaced, int64_t content_bytes) {
  for (const Quota& quota : account.quotas) {
    const bool is_new =
        !replaced.exists || (absl::StartsWith(quota.scope, "principal:") &&
                             replaced.principal != account.principal);
    const bool is_larger = is_new || content_bytes > replaced.content_bytes;
    if (!is_larger) continue;
    if (absl::Status s = connection.LockName(quota.scope); !s.ok()) return s;
    absl::StatusOr<Usage> usage = ReadUsage(connection, quota.scope);
    if (!usage.ok()) return usage.status();
    if (usage->bytes > quota.max_bytes) {
      return core::QuotaExceededError(quota.scope, quota.max_bytes, "bytes");
    }
    if (is_new && usage->rows > quota.max_rows) {
      return core::QuotaExceededError(quota.scope, quota.max_rows, "rows");
    }
  }
  return absl::OkStatus();
}

}  // namespace quantd::server
