// Counts of what the store holds of whom, and quotas on that.

#ifndef QUANTD_SERVER_STORE_SQL_USAGE_H_
#define QUANTD_SERVER_STORE_SQL_USAGE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/store/encoding_store.h"
#include "server/store/sql_database.h"

namespace quantd::server {

// Reads what a scope holds, exactly: triggers count in the transaction of every
// change. Takes the same time however much that is.
// Errors: STORE_UNAVAILABLE, STORE_CORRUPT.
absl::StatusOr<Usage> ReadUsage(SqlConnection& connection,
                                absl::string_view scope);

// A row that a write replaces.
struct ReplacedRow {
  bool exists = false;
  std::string principal;
  int64_t content_bytes = 0;
};

// In the transaction of a write, as its last step: whether all quotas of the
// account are kept to, what other transactions have committed included. A quota
// of bytes takes notice of rows that grow, one of rows of those that are new,
// or new to the principal. `content_bytes` are those of the row that is there
// now.
// Errors: QUOTA_EXCEEDED; STORE_UNAVAILABLE, STORE_CORRUPT.
absl::Status CheckQuotas(SqlConnection& connection, const WriteAccount& account,
                         const ReplacedRow& replaced, int64_t content_bytes);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_SQL_USAGE_H_
