// A content that is being written in several transactions, before the row that
// has it.
//
// Its bytes count for whoever writes. A writer that is not heard of any more
// has lost it: StoreKeeper takes it off the counts, and frees what it has of
// encoding_pieces.h.

#ifndef QUANTD_SERVER_STORE_STAGED_CONTENTS_H_
#define QUANTD_SERVER_STORE_STAGED_CONTENTS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/store/encoding_store.h"
#include "server/store/sql_database.h"
#include "server/wire/encoding_key.h"

namespace quantd::server {

// In a transaction that has written some of a content: counts these bytes, with
// a new id or one that was staged before.
// Errors: QUOTA_EXCEEDED, STORE_CORRUPT; STORE_UNAVAILABLE also where it was
// lost meanwhile.
absl::Status StageContent(SqlConnection& connection, const EncodingKey& key,
                          const WriteAccount& account, int64_t id, bool is_new,
                          int64_t bytes);

// Ends the staging of a content in the transaction that writes its row, after
// the tensor's lock. The bytes count for the row from then on.
// Errors: those of StageContent except QUOTA_EXCEEDED.
absl::Status EndStagedContent(SqlConnection& connection, int64_t id);

// Ends the staging of a content whose row won't come. Answers false if the
// content was lost before.
// Errors: STORE_CORRUPT, STORE_UNAVAILABLE.
absl::StatusOr<bool> LoseStagedContent(SqlConnection& connection, int64_t id);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_STAGED_CONTENTS_H_
