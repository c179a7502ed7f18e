#include "server/store/staged_contents.h"

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "server/store/row_sets.h"
#include "server/store/sql_usage.h"

namespace quantd::server {
namespace {

constexpr char kStage[] =
    "INSERT INTO staged_contents (touch_time_us, bytes, content_id, model, "
    "principal, slot) VALUES ($1, $2, $3, $4, $5, $6) RETURNING content_id";
constexpr char kTouchStaged[] =
    "UPDATE staged_contents SET touch_time_us = $1, bytes = bytes + $2 "
    "WHERE content_id = $3 RETURNING content_id";
constexpr char kEndStaged[] =
    "DELETE FROM staged_contents WHERE content_id = $1 RETURNING content_id";

constexpr absl::string_view kStageWhat = "cannot write in steps";

// `found`  whether it is still staged.
absl::Status CheckStaged(const absl::StatusOr<bool>& found) {
  if (!found.ok() || *found) return found.status();
  return core::StoreUnavailableError(
      "what was written before came too slowly and was freed; send it again");
}

}  // namespace

absl::Status StageContent(SqlConnection& connection, const EncodingKey& key,
                          const WriteAccount& account, int64_t id, bool is_new,
                          int64_t bytes) {
  {
    const std::unique_ptr<SqlStatement> row =
        connection.Prepare(is_new ? kStage : kTouchStaged);
    row->BindInt(1, absl::ToUnixMicros(absl::Now()));
    row->BindInt(2, bytes);
    row->BindInt(3, id);
    if (is_new) {
      row->BindText(4, key.model);
      row->BindText(5, account.principal);
      row->BindInt(6, SlotOf(key.tensor));
    }
    absl::Status status = CheckStaged(row->Step(kStageWhat));
    if (!status.ok()) return status;
  }
  // Checks quotas of bytes alone: the row comes later.
  return CheckQuotas(connection, account, {true, account.principal, 0}, bytes);
}

absl::Status EndStagedContent(SqlConnection& connection, int64_t id) {
  return CheckStaged(LoseStagedContent(connection, id));
}

absl::StatusOr<bool> LoseStagedContent(SqlConnection& connection, int64_t id) {
  const std::unique_ptr<SqlStatement> row = connection.Prepare(kEndStaged);
  row->BindInt(1, id);
  return row->Step(kStageWhat);
}

}  // namespace quantd::server
